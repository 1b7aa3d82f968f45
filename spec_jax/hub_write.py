"""Writes a model as a folder that `spec_jax.load` and transformers read."""

import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spec_jax import models
from spec_jax.base import PyTree
from spec_jax.hub import Loaded

__all__ = ["write_model"]


def write_model(
  folder: str | os.PathLike,
  loaded: Loaded,
  params: PyTree,
  *,
  dtype: Any = None,
) -> Path:
  """Writes config.json, model.safetensors and the tokenizer.

  Args:
    folder: made if it is not there.
    loaded: the model; its own parameters are not looked at.
    params: what to write: plain arrays, layers not stacked.
    dtype: of the file; that of the parameters if None.

  Returns:
    The weights' path; they are there whole, or as they were before.
  """
  from safetensors.numpy import save

  folder = Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  family = models.load(str(loaded.config["model_type"]))
  parts: dict[str, list[tuple[int, int, np.ndarray]]] = {}
  for path, source in family.sources(loaded.model.config).items():
    leaf = params
    for key in path:
      leaf = leaf[key]
    array = np.asarray(jax.device_get(leaf), dtype)
    if source.transpose:
      array = array.T
    # The output axis: parts of a tensor follow each other there.
    axis = 0 if source.transpose or array.ndim == 1 else -1
    begin = source.part[0] if source.part else 0
    parts.setdefault(source.name, []).append((begin, axis, array))
  tensors = {}
  for name, found in parts.items():
    ordered = [array for _, _, array in sorted(found, key=lambda x: x[0])]
    whole = np.concatenate(ordered, found[0][1]) if ordered[1:] else ordered[0]
    tensors[name] = np.ascontiguousarray(whole)
  config = {**loaded.config, "eos_token_id": list(loaded.stop_ids)}
  text = json.dumps(config, indent=2) + "\n"
  (folder / "config.json").write_text(text, encoding="utf-8")
  if loaded.tokenizer is not None:
    loaded.tokenizer.save_pretrained(folder)
  path = folder / "model.safetensors"
  temporary = folder / "weights.tmp"
  temporary.write_bytes(save(tensors, metadata={"format": "pt"}))
  os.replace(temporary, path)
  return path
