"""Gemma 3, its language model: local and global layers, sandwich norms."""

from collections.abc import Mapping
import math
from typing import Any

from spec_jax import rope as rope_lib
from spec_jax.models import common
from spec_jax.models.decoder import DecoderConfig

MODEL_TYPES = ("gemma3_text", "gemma3")
IGNORED = (
  *common.LLAMA_IGNORED,
  r"(model\.)?(vision_tower|multi_modal_projector)\..*",
)
RENAMES = (
  (r"^(language_model\.model|model\.language_model)\.", "model."),
  (r"^language_model\.lm_head\.", "lm_head."),
)

# "gemma3" files (4B and larger) leave out every field of text_config that has
# the transformers library's default; the text-only files name them all.
_LEFT_OUT = {
  "vocab_size": 262208,
  "num_attention_heads": 8,
  "num_key_value_heads": 4,
  "head_dim": 256,
  "hidden_activation": "gelu_pytorch_tanh",
  "max_position_embeddings": 131072,
  "rms_norm_eps": 1e-6,
  "query_pre_attn_scalar": 256,
}
_LEFT_OUT_ROPE = {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
_LEFT_OUT_PATTERN = {"sliding_window_pattern": 6}

# Fields of "gemma3" files that only an image would reach.
_VISION = (
  "vision_config",
  "mm_tokens_per_image",
  "boi_token_index",
  "eoi_token_index",
  "image_token_index",
)

sources = common.llama_sources


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the language model's part of a "gemma3" file, completed."""
  outer = common.Fields(config)
  for name in ("model_type", *_VISION):
    outer.take(name, None)
  text = dict(outer.take("text_config"))
  if (tied := outer.take("tie_word_embeddings", None)) is not None:
    text.setdefault("tie_word_embeddings", tied)
  outer.close()
  found = _LEFT_OUT | text
  if "rope_parameters" not in text:
    found = _LEFT_OUT_ROPE | found
  if "layer_types" not in text:
    found = _LEFT_OUT_PATTERN | found
  return found | {"model_type": "gemma3_text"}


def _ropes(fields: common.Fields, head_dim: int):
  """Reads the rope of global layers and that of local ones.

  New files nest both in `rope_parameters`; old ones have `rope_theta` and
  `rope_scaling` for global layers and `rope_local_base_freq`, never scaled.
  """
  nested = fields.take("rope_parameters", None)
  theta = fields.take("rope_theta", None)
  local = fields.take("rope_local_base_freq", None)
  scaling = fields.take("rope_scaling", None)
  if nested is None:
    nested = {
      "full_attention": {**(scaling or {}), "rope_theta": theta},
      "sliding_attention": {"rope_theta": local},
    }
  elif (theta, local, scaling) != (None, None, None):
    raise ValueError(
      f"rope_parameters={nested} beside rope_theta={theta}, "
      f"rope_local_base_freq={local}, rope_scaling={scaling}"
    )
  unknown = set(nested) - {"full_attention", "sliding_attention"}
  if unknown or len(nested) != 2:
    raise ValueError(
      "rope_parameters needs full_attention and sliding_attention, got "
      f"{nested}"
    )
  return (
    rope_lib.make_rope(head_dim, nested["full_attention"]),
    rope_lib.make_rope(head_dim, nested["sliding_attention"]),
  )


def from_hf(config: Mapping[str, Any]) -> DecoderConfig:
  """Reads a Hugging Face config.json.

  Raises:
    ValueError: naming the field that is missing or not supported.
  """
  if config.get("model_type") == "gemma3":
    config = _text_config(config)
  fields = common.Fields(config)
  fields.expect("model_type", "gemma3_text")
  head_dim = fields.take("head_dim")
  rope, rope_local = _ropes(fields, head_dim)
  width = fields.take("hidden_size")
  num_layers = fields.take("num_hidden_layers")
  # The library writes its private copy of the pattern beside `layer_types`.
  pattern = fields.take("_sliding_window_pattern", None)
  pattern = fields.take("sliding_window_pattern", pattern)
  kinds = fields.take("layer_types", None)
  if kinds is None:
    if pattern is None:
      raise ValueError(
        "config.json has neither 'layer_types' nor 'sliding_window_pattern'"
      )
    kinds = [
      "sliding_attention" if (i + 1) % pattern else "full_attention"
      for i in range(num_layers)
    ]
  window = fields.take("sliding_window", None)
  read = DecoderConfig(
    vocab_size=fields.take("vocab_size"),
    width=width,
    num_layers=num_layers,
    num_heads=fields.take("num_attention_heads"),
    num_kv_heads=fields.take("num_key_value_heads"),
    head_dim=head_dim,
    ffn_width=fields.take("intermediate_size"),
    max_length=fields.take("max_position_embeddings"),
    norm_eps=fields.take("rms_norm_eps"),
    rope=rope,
    rope_local=rope_local,
    windows=common.windows_of(kinds, num_layers, window),
    norm="rms_plus_one",
    qk_norm=True,
    post_norms=True,
    activation=fields.activation("hidden_activation"),
    tied=fields.take("tie_word_embeddings", True),
    embed_scale=math.sqrt(width),
    attention_scale=fields.take("query_pre_attn_scalar") ** -0.5,
  )
  fields.close()
  return read
