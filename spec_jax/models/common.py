"""What the model families share: layers, reading config.json, tensor names.

`linear`, `linears` and `linear_transposed` are the only places that multiply
by a weight and `embed_rows` the only one that reads rows of it, so another
storage of weights needs a change here alone: they take `kernels.Packed` too.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from spec_jax import kernels
from spec_jax.base import Array
from spec_jax.rope import Rope, make_rope

# Hugging Face's names. "gelu_new" and "gelu_pytorch_tanh" are one function.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
  "silu": jax.nn.silu,
  "gelu": functools.partial(jax.nn.gelu, approximate=False),
  "gelu_new": functools.partial(jax.nn.gelu, approximate=True),
  "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


# --- layers -----------------------------------------------------------------


# A matrix, or one packed for the CPU kernel.
Weight = Array | kernels.Packed


def linear(
  x: Array, weight: Weight, bias: Array | None = None, *, dtype=None
) -> Array:
  """Multiplies by a weight as one 2-D product.

  A product of three dimensions is 10 times slower in XLA on CPU.

  Args:
    x: `[..., in]`.
    weight: `[in, out]`.
    bias: `[out]` or None.
    dtype: of the result; `x`'s if None. The sum is float32 in any case.

  Returns:
    `[..., out]`.
  """
  rows = x.reshape(-1, x.shape[-1])
  if isinstance(weight, kernels.Packed):
    y = kernels.matmul(rows, weight, bias)
  else:
    y = jnp.matmul(rows, weight, preferred_element_type=jnp.float32)
    if bias is not None:
      y = y + bias.astype(jnp.float32)[None]
  return y.astype(dtype or x.dtype).reshape(*x.shape[:-1], y.shape[-1])


def linears(
  x: Array,
  weights: Sequence[Weight],
  biases: Sequence[Array | None] | None = None,
) -> list[Array]:
  """Multiplies by several weights: `linear` of each, packed ones in one call.

  Args:
    x: `[..., in]`.
    weights: `[in, out]` each; all packed or none.
    biases: `[out]` or None for each; None means no bias at all.

  Returns:
    `[..., out]` for each weight, in `x`'s dtype.
  """
  biases = [None] * len(weights) if biases is None else biases
  packed = [w for w in weights if isinstance(w, kernels.Packed)]
  if len(packed) < len(weights):
    pairs = zip(weights, biases, strict=True)
    return [linear(x, weight, bias) for weight, bias in pairs]
  rows = x.reshape(-1, x.shape[-1])
  return [
    y.astype(x.dtype).reshape(*x.shape[:-1], y.shape[-1])
    for y in kernels.matmuls(rows, packed, biases)
  ]


def linear_transposed(x: Array, weight: Weight) -> Array:
  """Multiplies by a weight stored `[out, in]`, without transposing it.

  Args:
    x: `[..., in]`.
    weight: `[out, in]`, for example a tied embedding; packed, its transpose.

  Returns:
    `[..., out]` float32, for these are logits.
  """
  if isinstance(weight, kernels.Packed):
    return linear(x, weight, dtype=jnp.float32)
  rows = x.reshape(-1, x.shape[-1])
  y = jnp.einsum("ri,oi->ro", rows, weight, preferred_element_type=jnp.float32)
  return y.reshape(*x.shape[:-1], y.shape[-1])


def embed_rows(table: Weight, index: Array) -> Array:
  """Returns `table[index]`, `[..., D]`; an index out of range is clipped.

  A packed table is the packed transpose of `[V, D]`.
  """
  if isinstance(table, kernels.Packed):
    return kernels.take_columns(table, index)
  return jnp.take(table, index, axis=0, mode="clip")


def _trailing(weight: Array, ndim: int) -> Array:
  """Returns `weight: [D]` in float32 with leading axes of 1."""
  return weight.astype(jnp.float32).reshape((1,) * (ndim - 1) + (-1,))


def _mean(x: Array, packed: bool) -> Array:
  """Returns the mean of the last axis, kept; packed: by the CPU kernel."""
  if packed:
    return kernels.row_sums(x) / x.shape[-1]
  return jnp.mean(x, -1, keepdims=True)


def rms_norm(
  x: Array, weight: Array, eps: float, *, offset: float, packed: bool = False
) -> Array:
  """Normalises `x: [..., D]` by its root mean square, in float32.

  Args:
    x: any dtype.
    weight: `[D]`.
    eps: added to the mean square.
    offset: added to the weight; Gemma stores it less 1.
    packed: sum with the CPU kernel, in one order for any number of rows.

  Returns:
    Like `x`.
  """
  y = x.astype(jnp.float32)
  y = y * lax.rsqrt(_mean(jnp.square(y), packed) + eps)
  return (y * (_trailing(weight, x.ndim) + offset)).astype(x.dtype)


def layer_norm(
  x: Array, weight: Array, bias: Array, eps: float, *, packed: bool = False
) -> Array:
  """Normalises `x: [..., D]` to mean 0 and variance 1, in float32."""
  y = x.astype(jnp.float32)
  y = y - _mean(y, packed)
  y = y * lax.rsqrt(_mean(jnp.square(y), packed) + eps)
  y = y * _trailing(weight, x.ndim) + _trailing(bias, x.ndim)
  return y.astype(x.dtype)


# --- config.json ------------------------------------------------------------

# Fields that change no logits here, whatever their value.
_HARMLESS = frozenset(
  """_attn_implementation _name_or_path architectures attention_dropout
  attn_pdrop bos_token_id cache_implementation decoder_start_token_id dtype
  embd_pdrop eos_token_id finetuning_task gradient_checkpointing id2label
  initializer_range keys_to_ignore_at_inference label2id model_type num_labels
  output_attentions output_hidden_states pad_token_id prefix problem_type
  resid_pdrop return_dict sep_token_id task_specific_params tokenizer_class
  torch_dtype torchscript transformers_version unk_token_id unsloth_fixed
  unsloth_version use_cache use_return_dict""".split()
)

# Fields that change nothing at these values and are refused at others.
_HARMLESS_AT: dict[str, tuple] = {
  "add_cross_attention": (False, None),
  "attention_bias": (False, None),
  "attn_logit_softcapping": (None,),
  "auto_map": (None,),
  "chunk_size_feed_forward": (0, None),
  "cross_attention_hidden_size": (None,),
  "final_logit_softcapping": (None,),
  "is_decoder": (False, True, None),
  "is_encoder_decoder": (False, None),
  "is_llama_config": (True, None),
  "layer_types": (None,),
  "mlp_bias": (False, None),
  "partial_rotary_factor": (1, None),
  "pretraining_tp": (1, None),
  "pruned_heads": ({}, None),
  "quantization_config": (None,),
  "rope_interleaved": (False, None),
  "sliding_window": (None,),
  "tie_encoder_decoder": (False, None),
  "use_bidirectional_attention": (False, None),
}

_REQUIRED = object()


class Fields:
  """Reads a config.json and refuses what nobody read."""

  def __init__(self, config: Mapping[str, Any]):
    self._left = dict(config)

  def take(self, name: str, default: Any = _REQUIRED) -> Any:
    """Returns a field; None counts as absent where there is a default.

    Raises:
      ValueError: if the field is absent and has no default.
    """
    value = self._left.pop(name, None)
    if value is not None:
      return value
    if default is _REQUIRED:
      raise ValueError(f"config.json has no {name!r}")
    return default

  def expect(self, name: str, *allowed: Any) -> None:
    """Raises ValueError if a field is present and its value not allowed."""
    value = self._left.pop(name, allowed[0])
    if value not in allowed:
      raise ValueError(
        f"{name}={value!r} is not supported; supported: {list(allowed)}"
      )

  def activation(self, name: str, default: Any = _REQUIRED) -> str:
    """Returns a known activation's name.

    Raises:
      ValueError: if it is not in `ACTIVATIONS`.
    """
    value = self.take(name, default)
    if value not in ACTIVATIONS:
      raise ValueError(f"{name}={value!r} is not one of {list(ACTIVATIONS)}")
    return value

  def rope(self, head_dim: int) -> Rope:
    """Reads `rope_parameters`, or `rope_theta` and `rope_scaling`.

    Raises:
      ValueError: see `make_rope`; if old and new fields disagree; if "dynamic"
        scaling starts before `max_position_embeddings`.
    """
    parameters = self.take("rope_parameters", None)
    old = self.take("rope_scaling", None)
    theta = self.take("rope_theta", None)
    if parameters is None:
      parameters = dict(old or {})
    elif old is not None and dict(old) != dict(parameters):
      raise ValueError(f"rope_scaling={old} but rope_parameters={parameters}")
    parameters = dict(parameters)
    if (
      theta is not None and parameters.setdefault("rope_theta", theta) != theta
    ):
      raise ValueError(f"rope_theta={theta} but rope_parameters={parameters}")
    return make_rope(head_dim, parameters)

  def close(self) -> None:
    """Raises ValueError if a field is left that may change the logits."""
    for name, value in self._left.items():
      if name in _HARMLESS:
        continue
      if value in _HARMLESS_AT.get(name, ()):
        continue
      raise ValueError(f"config.json: {name}={value!r} is not supported")


def windows_of(
  kinds: Sequence[str], num_layers: int, window: int | None
) -> tuple[int | None, ...]:
  """Turns `layer_types` into windows, per layer a number or None.

  Args:
    kinds: "full_attention" or "sliding_attention" per layer.
    num_layers: `L`.
    window: of the layers that slide.

  Raises:
    ValueError: if there are not `L` kinds, one is unknown, or one slides and
      there is no window.
  """
  if len(kinds) != num_layers:
    raise ValueError(f"{len(kinds)} layer_types for {num_layers} layers")
  unknown = set(kinds) - {"full_attention", "sliding_attention"}
  if unknown or (window is None and "sliding_attention" in kinds):
    raise ValueError(f"layer_types={kinds} with sliding_window={window}")
  return tuple(window if k == "sliding_attention" else None for k in kinds)


def llama_fields(fields: Fields) -> dict[str, Any]:
  """Reads what all families after Llama share.

  Returns:
    Arguments of `DecoderConfig`.

  Raises:
    ValueError: naming the field that is missing or not supported.
  """
  width = fields.take("hidden_size")
  num_heads = fields.take("num_attention_heads")
  head_dim = fields.take("head_dim", None)
  if head_dim is None:
    if width % num_heads:
      raise ValueError(
        f"no head_dim, and hidden_size={width} is not a multiple of "
        f"num_attention_heads={num_heads}"
      )
    head_dim = width // num_heads
  return {
    "vocab_size": fields.take("vocab_size"),
    "width": width,
    "num_layers": fields.take("num_hidden_layers"),
    "num_heads": num_heads,
    "num_kv_heads": fields.take("num_key_value_heads", num_heads),
    "head_dim": head_dim,
    "ffn_width": fields.take("intermediate_size"),
    "max_length": fields.take("max_position_embeddings"),
    "norm_eps": fields.take("rms_norm_eps"),
    "activation": fields.activation("hidden_act", "silu"),
    "tied": fields.take("tie_word_embeddings", False),
    "rope": fields.rope(head_dim),
  }


# --- checkpoints ------------------------------------------------------------


# Tensors that checkpoints carry and no parameter comes from, as patterns of
# full names. An untied `lm_head.weight` is in `sources`, so it is read.
LLAMA_IGNORED = (r".*rotary_emb\.inv_freq", r"lm_head\.weight")


class Source(NamedTuple):
  """Where a parameter comes from.

  Attributes:
    name: of the tensor in a Hugging Face checkpoint.
    transpose: the tensor is stored `[out, in]`.
    part: `(start, stop)` on the output axis, when several parameters share
      the tensor; it counts as read when all its parts are.
  """

  name: str
  transpose: bool = False
  part: tuple[int, int] | None = None


def llama_sources(config) -> dict[tuple, Source]:
  """Returns the source of every parameter, in the names Llama started.

  Args:
    config: a `DecoderConfig` with gated feed-forward and RMS norms.
  """
  # Gemma's sandwich norms use Llama's second name for another place.
  norms = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
  }
  if config.post_norms:
    norms |= {
      "attn_post_norm": "post_attention_layernorm",
      "ffn_norm": "pre_feedforward_layernorm",
      "ffn_post_norm": "post_feedforward_layernorm",
    }
  if config.qk_norm:
    norms |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
  matrices = {f"w{x}": f"self_attn.{x}_proj" for x in "qkvo"}
  matrices |= {f"w_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
  found: dict[tuple, Source] = {
    ("embed",): Source("model.embed_tokens.weight"),
    ("final_norm",): Source("model.norm.weight"),
  }
  if not config.tied:
    found["head",] = Source("lm_head.weight", transpose=True)
  for i in range(config.num_layers):
    prefix = f"model.layers.{i}"
    for key, name in norms.items():
      found["layers", i, key] = Source(f"{prefix}.{name}.weight")
    for key, name in matrices.items():
      found["layers", i, key] = Source(f"{prefix}.{name}.weight", True)
    if config.qkv_bias:
      for x in "qkv":
        name = f"{prefix}.self_attn.{x}_proj.bias"
        found["layers", i, f"b{x}"] = Source(name)
  return found
