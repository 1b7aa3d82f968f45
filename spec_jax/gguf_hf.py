"""Presents a GGUF file as the Hugging Face checkpoint it was made from.

What llama.cpp changes when it writes a file is undone: rows of query and key
matrices of llama-type files go back from interleaved to half-split order, and
Gemma's norms lose the 1 that was added to them.
"""

from collections.abc import Callable
import math
import re
from typing import Any

import numpy as np

from spec_jax.gguf_io import GGUF
from spec_jax.safetensors_io import LoadError, Tensor

__all__ = ["hf_config", "hf_tensors", "interleaved_rows"]

# GGUF name -> Hugging Face name, for all architectures read here.
_TOP = {
  "token_embd.weight": "model.embed_tokens.weight",
  "output_norm.weight": "model.norm.weight",
  "output.weight": "lm_head.weight",
}
_BLOCK = {
  "attn_norm": "input_layernorm",
  "attn_q": "self_attn.q_proj",
  "attn_k": "self_attn.k_proj",
  "attn_v": "self_attn.v_proj",
  "attn_output": "self_attn.o_proj",
  "attn_q_norm": "self_attn.q_norm",
  "attn_k_norm": "self_attn.k_norm",
  "ffn_norm": "post_attention_layernorm",
  "ffn_gate": "mlp.gate_proj",
  "ffn_up": "mlp.up_proj",
  "ffn_down": "mlp.down_proj",
}
_GEMMA_BLOCK = {
  "post_attention_norm": "post_attention_layernorm",
  "ffn_norm": "pre_feedforward_layernorm",
  "post_ffw_norm": "post_feedforward_layernorm",
}
_ROPE_FREQS = "rope_freqs.weight"

# GGUF key (after the architecture's name) -> Hugging Face field.
_FIELDS = {
  "block_count": "num_hidden_layers",
  "context_length": "max_position_embeddings",
  "embedding_length": "hidden_size",
  "feed_forward_length": "intermediate_size",
  "attention.head_count": "num_attention_heads",
  "attention.head_count_kv": "num_key_value_heads",
  "attention.layer_norm_rms_epsilon": "rms_norm_eps",
  "attention.key_length": "head_dim",
  "rope.freq_base": "rope_theta",
}
_OPTIONAL = ("attention.head_count_kv", "attention.key_length")
# Used or checked below, or without influence on logits.
_OTHER = (
  "attention.sliding_window",
  "attention.value_length",
  "rope.dimension_count",
  "rope.scaling.factor",
  "rope.scaling.original_context_length",
  "rope.scaling.type",
  "vocab_size",
)
_MODEL_TYPES = {
  "llama": "llama",
  "qwen2": "qwen2",
  "qwen3": "qwen3",
  "gemma3": "gemma3_text",
}
# llama.cpp's default where a file states no base.
_ROPE_BASE = 10000.0


def hf_config(gguf: GGUF) -> dict[str, Any]:
  """Returns the config.json the file's metadata amount to.

  Raises:
    LoadError: if the architecture is not one of llama, qwen2, qwen3, gemma3,
      a field is missing, or one is present that nobody reads.
  """
  metadata = gguf.metadata
  arch = str(metadata.get("general.architecture"))
  if arch not in _MODEL_TYPES:
    raise LoadError(
      f"{gguf.path}: GGUF architecture {arch!r} is not supported; supported:"
      f" {', '.join(_MODEL_TYPES)}"
    )
  given = {
    key.removeprefix(f"{arch}."): _short(value)
    for key, value in metadata.items()
    if key.startswith(f"{arch}.")
  }
  given.setdefault("rope.freq_base", _ROPE_BASE)
  unknown = sorted(given.keys() - {*_FIELDS, *_OTHER})
  missing = sorted(_FIELDS.keys() - given.keys() - {*_OPTIONAL})
  if unknown or missing:
    raise LoadError(
      f"{gguf.path}: metadata of {arch}: missing {missing}, not supported"
      f" { {key: given[key] for key in unknown} }"
    )
  if "token_embd.weight" not in gguf.tensors:
    raise LoadError(f"{gguf.path} holds no token_embd.weight")
  config = {hf: given[key] for key, hf in _FIELDS.items() if key in given}
  config["model_type"] = _MODEL_TYPES[arch]
  config["vocab_size"] = gguf.tensors["token_embd.weight"].shape[0]
  config["tie_word_embeddings"] = "output.weight" not in gguf.tensors
  heads = config["num_attention_heads"]
  head_dim = config.setdefault("head_dim", config["hidden_size"] // heads)
  for key in ("rope.dimension_count", "attention.value_length"):
    if given.get(key, head_dim) != head_dim:
      raise LoadError(f"{gguf.path}: {key} {given[key]}, head width {head_dim}")
  scaling = _rope_scaling(gguf, given, head_dim)
  if arch == "gemma3":
    _add_gemma3(config, given, scaling)
    return config
  if scaling:
    config["rope_scaling"] = scaling
  if given.get("attention.sliding_window"):
    config["sliding_window"] = given["attention.sliding_window"]
  if arch == "llama" and "blk.0.attn_q.bias" in gguf.tensors:
    config["attention_bias"] = True
  return config


def _short(value):
  """Returns the shortest decimal of a float32: 1e-05, not 9.99...e-06."""
  return float(str(np.float32(value))) if isinstance(value, float) else value


def _add_gemma3(config, given, scaling) -> None:
  """Adds what Gemma 3's files leave to the reader (llama.cpp's constants).

  Every sixth layer is global; local layers turn with base 10,000, unscaled.
  The 27B model (62 layers) alone scales scores by width over heads.
  """
  layers = config["num_hidden_layers"]
  scalar = config["head_dim"]
  if layers == 62:
    scalar = config["hidden_size"] // config["num_attention_heads"]
  full = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
  config |= {
    "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": [
      "sliding_attention" if (i + 1) % 6 else "full_attention"
      for i in range(layers)
    ],
    "query_pre_attn_scalar": scalar,
    "rope_parameters": {
      "full_attention": full | (scaling or {}),
      "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "sliding_window": given.get("attention.sliding_window"),
  }


def _rope_scaling(gguf: GGUF, given, head_dim) -> dict[str, Any] | None:
  kind = given.get("rope.scaling.type", "none")
  if _ROPE_FREQS in gguf.tensors:
    return _llama3_scaling(gguf, given, head_dim)
  if kind == "none":
    return None
  scaling = {"rope_type": kind, "factor": given.get("rope.scaling.factor")}
  original = given.get("rope.scaling.original_context_length")
  if kind == "yarn":
    scaling["original_max_position_embeddings"] = original
  return scaling


def _llama3_scaling(gguf: GGUF, given, head_dim) -> dict[str, Any]:
  """Recovers Llama 3's rope scaling from the divisors stored in a file.

  Only the values every released Llama 3 has (low 1, high 4, 8192 positions)
  are tried; the factor is the largest divisor.
  """
  (size,) = gguf.tensors[_ROPE_FREQS].shape
  stored = gguf.tensors[_ROPE_FREQS].read(0, size)
  factor, low, high, original = float(stored.max()), 1.0, 4.0, 8192
  plain = given["rope.freq_base"] ** -(np.arange(0, head_dim, 2) / head_dim)
  turns = original * plain / (2 * math.pi)
  smooth = np.clip((turns - low) / (high - low), 0, 1)
  divisor = 1 / ((1 - smooth) / factor + smooth)
  # The file's float32 divisors carry 7 digits.
  if stored.shape != divisor.shape or not np.allclose(stored, divisor, 1e-4):
    raise LoadError(
      f"{gguf.path}: {_ROPE_FREQS} is not Llama 3's rope scaling with factor"
      f" {factor}, low 1, high 4, 8192 positions; no other is supported"
    )
  return {
    "rope_type": "llama3",
    "factor": factor,
    "low_freq_factor": low,
    "high_freq_factor": high,
    "original_max_position_embeddings": original,
  }


def hf_tensors(gguf: GGUF, config: dict[str, Any]) -> dict[str, Tensor]:
  """Returns the tensors as Hugging Face names and stores them.

  Args:
    gguf: header.
    config: what `hf_config` made of it.

  Raises:
    LoadError: if a tensor has a name nobody knows.
  """
  gemma = config["model_type"] == "gemma3_text"
  block = _BLOCK | _GEMMA_BLOCK if gemma else _BLOCK
  heads = {
    "attn_q": config["num_attention_heads"],
    "attn_k": config.get("num_key_value_heads", config["num_attention_heads"]),
  }
  found = {}
  for name, tensor in gguf.tensors.items():
    if name == _ROPE_FREQS:
      continue
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if name in _TOP:
      hf_name = _TOP[name]
    elif match and match[2] in block:
      hf_name = f"model.layers.{match[1]}.{block[match[2]]}.{match[3]}"
      if config["model_type"] == "llama" and match[2] in heads:
        order = interleaved_rows(heads[match[2]], tensor.shape[0])
        tensor = tensor._replace(read=_gather(tensor, order))
    else:
      raise LoadError(f"{gguf.path}: tensor {name!r} is not known")
    if gemma and hf_name.endswith("norm.weight"):
      tensor = tensor._replace(read=_minus_one(tensor))
    found[hf_name] = tensor
  return found


def interleaved_rows(num_heads: int, num_rows: int) -> np.ndarray:
  """Returns where the rows of a half-split matrix lie in a llama-type file.

  With one head of 6 rows the file holds rows 0, 3, 1, 4, 2, 5; so row `i` of
  the half-split matrix is row `[0, 2, 4, 1, 3, 5][i]` of the file.

  Args:
    num_heads: heads of this matrix (`G` for keys).
    num_rows: rows in all heads.

  Returns:
    `[num_rows]` indices.

  Raises:
    LoadError: if the rows are no even number a head.
  """
  if num_rows % (2 * num_heads):
    raise LoadError(f"{num_rows} rows do not give {num_heads} even heads")
  rows = np.arange(num_rows).reshape(num_heads, -1, 2)
  return rows.swapaxes(1, 2).reshape(-1)


def _gather(tensor: Tensor, order: np.ndarray) -> Callable:
  """Reads the rows `order[begin:end]`; a head's rows lie close together."""

  def read(begin, end):
    wanted = order[begin:end]
    first = int(wanted.min())
    return tensor.read(first, int(wanted.max()) + 1)[wanted - first]

  return read


def _minus_one(tensor: Tensor) -> Callable:
  return lambda begin, end: tensor.read(begin, end) - np.float32(1)
