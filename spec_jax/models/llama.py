"""Llama 2, 3.x and models that kept its form (SmolLM2, TinyLlama)."""

from collections.abc import Mapping
from typing import Any

from spec_jax.models import common
from spec_jax.models.decoder import DecoderConfig

MODEL_TYPES = ("llama",)
IGNORED = common.LLAMA_IGNORED
RENAMES = ()

sources = common.llama_sources


def from_hf(config: Mapping[str, Any]) -> DecoderConfig:
  """Reads a Hugging Face config.json.

  Raises:
    ValueError: naming the field that is missing or not supported.
  """
  fields = common.Fields(config)
  fields.expect("model_type", *MODEL_TYPES)
  read = common.llama_fields(fields)
  fields.close()
  return DecoderConfig(**read)
