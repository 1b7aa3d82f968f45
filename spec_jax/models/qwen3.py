"""Qwen3 (dense): Qwen2 with normalised queries and keys, without biases."""

from collections.abc import Mapping
from typing import Any

from spec_jax.models import common, qwen2
from spec_jax.models.decoder import DecoderConfig

MODEL_TYPES = ("qwen3",)
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
  # Required: the library's default of 128 is not width / heads.
  if config.get("head_dim") is None:
    raise ValueError("config.json has no 'head_dim'")
  read = common.llama_fields(fields)
  read["windows"] = qwen2.windows(fields, read["num_layers"])
  fields.close()
  return DecoderConfig(**read, qk_norm=True)
