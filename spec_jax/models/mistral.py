"""Mistral: Llama with a sliding window in every layer, or in none."""

from collections.abc import Mapping
from typing import Any

from spec_jax.models import common
from spec_jax.models.decoder import DecoderConfig

MODEL_TYPES = ("mistral",)
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
  # null means none. An absent field does too: the library's default of 4096
  # belongs to the first model, whose file names it.
  window = fields.take("sliding_window", None)
  fields.close()
  return DecoderConfig(**read, windows=(window,) * read["num_layers"])
