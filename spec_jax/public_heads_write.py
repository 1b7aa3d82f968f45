"""Writes heads as their authors publish them, see `public_heads`."""

from collections.abc import Mapping
import json
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from spec_jax import eagle
from spec_jax.base import PyTree
from spec_jax.heads import Heads, output_columns
from spec_jax.hub import Loaded
from spec_jax.public_heads import LAYER, LAYER_3, TAPS, is_public
from spec_jax.trained import flatten

__all__ = ["write_public"]


def write_public(
  folder: str | os.PathLike, heads: Heads, params: PyTree, loaded: Loaded
) -> Path:
  """Writes heads as their authors do.

  Args:
    folder: made if it is not there.
    heads: Medusa or EAGLE.
    params: theirs, not packed, the words' matrix included.
    loaded: their target.

  Returns:
    The weights' path; they are there whole, or as they were before.

  Raises:
    ValueError: if the folder holds anything but such heads.
  """
  from safetensors.numpy import save

  folder = Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  others = {x.name for x in folder.iterdir()} - {
    "config.json",
    "model.safetensors",
    "weights.tmp",
  }
  if others or (any(folder.iterdir()) and not is_public(folder)):
    raise ValueError(
      f"{folder} holds something else ({', '.join(sorted(others)) or 'a model'}"
      "): give a new folder"
    )
  own = {n: np.asarray(x) for n, x in flatten(params).items()}
  turn = lambda x: np.ascontiguousarray(x.T if x.ndim == 2 else x)
  c = heads.config
  config: dict[str, Any] = {"hidden_size": c.width}
  tensors: dict[str, np.ndarray] = {}
  if heads.kind == "medusa":
    config |= {
      "medusa_num_heads": c.num_heads,
      "medusa_num_layers": c.num_layers,
    }
    for name, x in own.items():
      if name in ("head", "ids"):
        continue  # the target's own columns: there, heads know every word
      _, k, leaf = name.split(".")
      if leaf == "out":
        tensors[f"{k}.{c.num_layers}.weight"] = turn(x)
      else:
        what = "weight" if leaf[0] == "w" else "bias"
        tensors[f"{k}.{leaf[1:]}.linear.{what}"] = turn(x)
  else:
    tensors = {
      n: turn(x) for n, x in _eagle_tensors(heads, own, loaded).items()
    }
    config |= _eagle_config(c, loaded)
  path, temporary = folder / "model.safetensors", folder / "weights.tmp"
  temporary.write_bytes(save(tensors))
  os.replace(temporary, path)
  (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
  return path


def _eagle_tensors(
  heads: Heads, own: Mapping[str, np.ndarray], loaded: Loaded
) -> dict:
  """Returns the tensors of an EAGLE head under their names, not transposed."""
  c = heads.config
  prefix = "midlayer." if c.version == 3 else "layers.0."
  names = LAYER | (LAYER_3 if c.version == 3 else {})
  found = {
    f"{prefix}{theirs}.weight": own[f"layers.0.{name}"]
    for name, theirs in names.items()
  }
  found["fc.weight"] = own["fc.w"]
  if c.fc_bias:
    found["fc.bias"] = own["fc.b"]
  if c.version == 3:
    found["norm.weight"] = own["final_norm"]
    if "head" in own:
      found["lm_head.weight"] = own["head"]
    else:
      every = jnp.arange(c.words.size, dtype=jnp.int32)
      columns = output_columns(loaded.model, loaded.params, every)
      found["lm_head.weight"] = np.asarray(columns)
    ids = own.get("ids", np.arange(c.words.size))
    found["d2t"] = (ids - np.arange(c.words.size)).astype(np.int64)
    known = np.zeros(c.words.target_size, bool)
    known[ids] = True
    found["t2d"] = known
  return found


def _eagle_config(c: eagle.EagleConfig, loaded: Loaded) -> dict[str, Any]:
  theirs = {
    k: v
    for k, v in loaded.config.items()
    if k in ("rope_theta", "rope_scaling", "rope_parameters")
  }
  config = {
    "architectures": [
      "LlamaForCausalLMEagle3" if c.version == 3 else "LlamaForCausalLMEagle"
    ],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "num_attention_heads": c.num_heads,
    "num_key_value_heads": c.num_kv_heads,
    "head_dim": c.head_dim,
    "intermediate_size": c.ffn_width,
    "max_position_embeddings": c.max_length,
    "rms_norm_eps": c.norm_eps,
    "hidden_act": c.activation,
    "vocab_size": c.words.target_size,
    "bias": c.fc_bias,
    **theirs,
  }
  if c.version == 3:
    config["draft_vocab_size"] = c.words.size
    config["eagle_config"] = {TAPS: [tap - 1 for tap in c.taps]}
  return config
