"""Writes tiny random checkpoints, so that no test needs a real one."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file
from tiny_tokenizer import byte_level_tokenizer

LLAMA = {
  "model_type": "llama",
  "architectures": ["LlamaForCausalLM"],
  "vocab_size": 300,
  "hidden_size": 32,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "intermediate_size": 64,
  "max_position_embeddings": 128,
  "rms_norm_eps": 1e-5,
  "rope_theta": 10000.0,
  "tie_word_embeddings": False,
  "eos_token_id": 264,
}


def llama_tensors(
  config: dict[str, Any] = LLAMA, seed: int = 0, bias: bool = False
) -> dict[str, np.ndarray]:
  """Returns random float32 tensors under Hugging Face's names.

  The list is written out here by hand, not taken from the code under test.
  """
  c = config
  width = c["hidden_size"]
  head_dim = c.get("head_dim", width // c["num_attention_heads"])
  heads = c["num_attention_heads"] * head_dim
  kv = c["num_key_value_heads"] * head_dim
  ffn = c["intermediate_size"]
  shapes = {
    "model.embed_tokens.weight": (c["vocab_size"], width),
    "model.norm.weight": (width,),
  }
  if not c["tie_word_embeddings"]:
    shapes["lm_head.weight"] = (c["vocab_size"], width)
  for i in range(c["num_hidden_layers"]):
    layer = {
      "input_layernorm": (width,),
      "post_attention_layernorm": (width,),
      "self_attn.q_proj": (heads, width),
      "self_attn.k_proj": (kv, width),
      "self_attn.v_proj": (kv, width),
      "self_attn.o_proj": (width, heads),
      "mlp.gate_proj": (ffn, width),
      "mlp.up_proj": (ffn, width),
      "mlp.down_proj": (width, ffn),
    }
    for name, shape in layer.items():
      shapes[f"model.layers.{i}.{name}.weight"] = shape
    for x, rows in (("q", heads), ("k", kv), ("v", kv)):
      if bias:
        shapes[f"model.layers.{i}.self_attn.{x}_proj.bias"] = (rows,)
  rng = np.random.default_rng(seed)
  return {
    name: rng.normal(size=shape).astype(np.float32) / 4
    for name, shape in shapes.items()
  }


def write_folder(
  folder: Path,
  config: dict[str, Any] | None = None,
  tensors: dict[str, np.ndarray] | None = None,
  *,
  tokenizer: bool = False,
) -> Path:
  """Writes config.json and model.safetensors, and returns `folder`."""
  config = LLAMA if config is None else config
  tensors = llama_tensors(config) if tensors is None else tensors
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "config.json").write_text(json.dumps(config))
  save_file(tensors, folder / "model.safetensors")
  if tokenizer:
    byte_level_tokenizer().save_pretrained(folder)
  return folder


# Hugging Face -> GGUF, as llama.cpp names them.
_GGUF_NAMES = {
  "model.embed_tokens": "token_embd",
  "model.norm": "output_norm",
  "lm_head": "output",
  "input_layernorm": "attn_norm",
  "post_attention_layernorm": "ffn_norm",
  "self_attn.q_proj": "attn_q",
  "self_attn.k_proj": "attn_k",
  "self_attn.v_proj": "attn_v",
  "self_attn.o_proj": "attn_output",
  "mlp.gate_proj": "ffn_gate",
  "mlp.up_proj": "ffn_up",
  "mlp.down_proj": "ffn_down",
}


def _interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
  """Puts row `i` and row `i + half` of each head side by side, in a loop."""
  half = len(rows) // num_heads // 2
  out = []
  for head in np.split(rows, num_heads):
    for i in range(half):
      out += [head[i], head[i + half]]
  return np.stack(out)


def write_gguf(
  path: Path,
  config: dict[str, Any] | None = None,
  tensors: dict[str, np.ndarray] | None = None,
  *,
  arch: str = "llama",
  extra: dict[str, np.ndarray] | None = None,
  edit=lambda writer: None,
) -> Path:
  """Writes what llama.cpp would make of a checkpoint, and returns `path`.

  Args:
    path: of the file.
    config: Hugging Face style.
    tensors: under Hugging Face's names.
    arch: GGUF's architecture; for "llama" q and k rows are interleaved.
    extra: more tensors, under GGUF's names.
    edit: called with the writer, to add metadata.
  """
  config = LLAMA if config is None else config
  tensors = llama_tensors(config) if tensors is None else tensors
  writer = gguf.GGUFWriter(path, arch)
  writer.add_block_count(config["num_hidden_layers"])
  writer.add_context_length(config["max_position_embeddings"])
  writer.add_embedding_length(config["hidden_size"])
  writer.add_feed_forward_length(config["intermediate_size"])
  writer.add_head_count(config["num_attention_heads"])
  writer.add_head_count_kv(config["num_key_value_heads"])
  writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
  writer.add_rope_freq_base(config["rope_theta"])
  edit(writer)
  for name, value in tensors.items():
    stem, _, kind = name.rpartition(".")
    prefix = ""
    if stem.startswith("model.layers."):
      _, _, layer, stem = stem.split(".", 3)
      prefix = f"blk.{layer}."
    if arch == "llama" and stem == "self_attn.q_proj":
      value = _interleave(value, config["num_attention_heads"])
    if arch == "llama" and stem == "self_attn.k_proj":
      value = _interleave(value, config["num_key_value_heads"])
    writer.add_tensor(f"{prefix}{_GGUF_NAMES[stem]}.{kind}", value)
  for name, value in (extra or {}).items():
    writer.add_tensor(name, value)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path
