"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from collections.abc import Mapping
from typing import Any

from spec_jax.models import common
from spec_jax.models.decoder import DecoderConfig

MODEL_TYPES = ("qwen2",)
IGNORED = common.LLAMA_IGNORED
RENAMES = ()

sources = common.llama_sources


def windows(fields: common.Fields, num_layers: int) -> tuple:
  """Reads the sliding windows of Qwen models.

  Args:
    fields: of config.json.
    num_layers: `L`.

  Returns:
    Per layer the window or None. `sliding_window` counts only where
    `use_sliding_window` is true; without `layer_types` the layers from
    `max_window_layers` on slide.

  Raises:
    ValueError: if a field is missing, or a layer slides without a window.
  """
  window = fields.take("sliding_window", None)
  first = fields.take("max_window_layers", None)
  if not fields.take("use_sliding_window", False):
    window = None
  kinds = fields.take("layer_types", None)
  if kinds is not None:
    return common.windows_of(kinds, num_layers, window)
  if window is None:
    return (None,) * num_layers
  if first is None:
    raise ValueError(
      f"sliding_window={window} in use without 'max_window_layers' or "
      "'layer_types'"
    )
  return tuple(window if i >= first else None for i in range(num_layers))


def from_hf(config: Mapping[str, Any]) -> DecoderConfig:
  """Reads a Hugging Face config.json.

  Raises:
    ValueError: naming the field that is missing or not supported.
  """
  fields = common.Fields(config)
  fields.expect("model_type", *MODEL_TYPES)
  read = common.llama_fields(fields)
  read["windows"] = windows(fields, read["num_layers"])
  fields.close()
  return DecoderConfig(**read, qkv_bias=True)
