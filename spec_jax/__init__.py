"""Speculative decoding in JAX: exact, complete, on the device.

loaded = spec_jax.load("smollm2-135m-instruct")
out = spec_jax.generate(loaded, "Once", drafter="prompt_lookup")
"""

from spec_jax.engine import Engine
from spec_jax.generate import Completion, Generation, generate
from spec_jax.hub import Loaded, LoadError, load
from spec_jax.programs import EngineConfig
from spec_jax.settings import Settings

__all__ = [
  "Completion",
  "Engine",
  "EngineConfig",
  "Generation",
  "LoadError",
  "Loaded",
  "Settings",
  "generate",
  "load",
]
