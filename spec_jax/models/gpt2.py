"""GPT-2: learned positions, layer norms, fused attention weights."""

from collections.abc import Mapping
from typing import Any

from spec_jax.models import common
from spec_jax.models.common import Source
from spec_jax.models.decoder import DecoderConfig

MODEL_TYPES = ("gpt2",)
# Old files carry their causal masks as tensors.
IGNORED = (r".*\.attn\.(bias|masked_bias)", r"lm_head\.weight")
# The first files have no "transformer." before their names.
RENAMES = ((r"^(wte|wpe|h|ln_f)\.", r"transformer.\1."),)


def from_hf(config: Mapping[str, Any]) -> DecoderConfig:
  """Reads a Hugging Face config.json.

  Raises:
    ValueError: naming the field that is missing or not supported.
  """
  fields = common.Fields(config)
  fields.expect("model_type", *MODEL_TYPES)
  width, heads = fields.take("n_embd"), fields.take("n_head")
  if width % heads:
    raise ValueError(f"n_embd={width} is not a multiple of n_head={heads}")
  length = fields.take("n_positions")
  fields.expect("n_ctx", length, None)
  fields.expect("scale_attn_weights", True)
  fields.expect("scale_attn_by_inverse_layer_idx", False)
  fields.expect("reorder_and_upcast_attn", False)
  # A head for classification, which no language model here has.
  for name in ("type", "use_proj", "activation", "proj_to_labels"):
    fields.take(f"summary_{name}", None)
  fields.take("summary_first_dropout", None)
  read = DecoderConfig(
    vocab_size=fields.take("vocab_size"),
    width=width,
    num_layers=fields.take("n_layer"),
    num_heads=heads,
    num_kv_heads=heads,
    head_dim=width // heads,
    ffn_width=fields.take("n_inner", 4 * width),
    max_length=length,
    norm_eps=fields.take("layer_norm_epsilon"),
    norm="layer",
    qkv_bias=True,
    out_bias=True,
    activation=fields.activation("activation_function"),
    gated=False,
    tied=fields.take("tie_word_embeddings", True),
  )
  fields.close()
  return read


def sources(config: DecoderConfig) -> dict[tuple, Source]:
  """Returns the source of every parameter; matrices are stored `[in, out]`."""
  D = config.width
  found: dict[tuple, Source] = {
    ("embed",): Source("transformer.wte.weight"),
    ("position",): Source("transformer.wpe.weight"),
    ("final_norm",): Source("transformer.ln_f.weight"),
    ("final_norm_bias",): Source("transformer.ln_f.bias"),
  }
  if not config.tied:
    found["head",] = Source("lm_head.weight", transpose=True)
  names: dict[str, tuple[str, tuple[int, int] | None]] = {
    "attn_norm": ("ln_1.weight", None),
    "attn_norm_bias": ("ln_1.bias", None),
    "wo": ("attn.c_proj.weight", None),
    "bo": ("attn.c_proj.bias", None),
    "ffn_norm": ("ln_2.weight", None),
    "ffn_norm_bias": ("ln_2.bias", None),
    "w_up": ("mlp.c_fc.weight", None),
    "b_up": ("mlp.c_fc.bias", None),
    "w_down": ("mlp.c_proj.weight", None),
    "b_down": ("mlp.c_proj.bias", None),
  }
  for j, x in enumerate("qkv"):
    third = (j * D, (j + 1) * D)
    names[f"w{x}"] = ("attn.c_attn.weight", third)
    names[f"b{x}"] = ("attn.c_attn.bias", third)
  for i in range(config.num_layers):
    for key, (name, part) in names.items():
      full = f"transformer.h.{i}.{name}"
      found["layers", i, key] = Source(full, part=part)
  return found
