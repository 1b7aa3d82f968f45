"""Trained drafts on disk: weights as safetensors, a card beside them.

A folder holds `draft.json` (the card) and the weights it names. The card says
what was trained and for which target; a draft is refused for another one, for
it would be correct but slow, and nobody would know why.

Writing is atomic: weights go under a name made of their hash, then the card is
replaced in one piece, then older weights are removed. Whatever is killed, the
card names weights that are there.
"""

from collections.abc import Mapping
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from spec_jax import hub
from spec_jax.base import PyTree
from spec_jax.builtin import sha256_of
from spec_jax.safetensors_io import LoadError, Tensor, open_safetensors

__all__ = [
  "CARD",
  "Card",
  "flatten",
  "is_trained",
  "read_card",
  "save",
  "target_identity",
  "unflatten",
]

CARD = "draft.json"
_FORMAT = 1


class Card(NamedTuple):
  """A card that was read, its weights opened.

  Attributes:
    folder: where it lies.
    kind: what was trained: "layers", ...
    info: the card's content.
    tensors: by name, not yet read.
  """

  folder: Path
  kind: str
  info: dict[str, Any]
  tensors: dict[str, Tensor]


def target_identity(loaded: hub.Loaded) -> dict[str, Any]:
  """Returns what a card says of the target; reads its weight files once."""
  config = loaded.model.config
  return {
    "name": loaded.name,
    "weights_sha256": hub.weights_hash(loaded),
    "tokenizer_sha256": loaded.hashes.get("tokenizer"),
    "width": config.width,
    "num_layers": config.num_layers,
    "vocab_size": config.vocab_size,
  }


def flatten(params: PyTree) -> dict[str, Any]:
  """Returns leaves under names like "layers.0.wq"."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(params)
  return {
    ".".join(str(p.key if hasattr(p, "key") else p.idx) for p in path): leaf
    for path, leaf in leaves
  }


def unflatten(tensors: Mapping[str, Any]) -> dict[str, Any]:
  """Undoes `flatten` for dicts, and tuples that are not empty."""
  root: dict[str, Any] = {}
  for name, value in tensors.items():
    *path, last = name.split(".")
    at = root
    for part in path:
      at = at.setdefault(part, {})
    at[last] = value

  def settle(x):
    if not isinstance(x, dict):
      return x
    if x and all(key.isdigit() for key in x):
      return tuple(settle(x[key]) for key in sorted(x, key=int))
    return {key: settle(value) for key, value in x.items()}

  return settle(root)


def save(
  folder: str | os.PathLike,
  kind: str,
  tensors: Mapping[str, Any],
  info: Mapping[str, Any],
) -> Path:
  """Writes a trained draft; the old one or the new one is there, never half.

  Args:
    folder: made if it is not there.
    kind: what was trained.
    tensors: arrays by name.
    info: the card: "target" from `target_identity`, and whatever else.

  Returns:
    The card's path.
  """
  from safetensors.numpy import save as to_bytes

  folder = Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  arrays = {
    name: np.ascontiguousarray(jax.device_get(x)) for name, x in tensors.items()
  }
  temporary = folder / "weights.tmp"
  temporary.write_bytes(to_bytes(arrays))
  digest = sha256_of(temporary)
  weights = folder / f"draft-{digest[:12]}.safetensors"
  os.replace(temporary, weights)
  card = {
    "format": _FORMAT,
    "kind": kind,
    "weights": weights.name,
    "weights_sha256": digest,
    **info,
  }
  path = folder / CARD
  draft = folder / f"{CARD}.tmp"
  draft.write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
  os.replace(draft, path)
  for old in folder.glob("draft-*.safetensors"):
    if old.name != weights.name:
      old.unlink()
  return path


def is_trained(path: str | os.PathLike) -> bool:
  """Tells whether a path is a folder with a card."""
  return (Path(path).expanduser() / CARD).is_file()


def read_card(
  path: str | os.PathLike, loaded: hub.Loaded, kinds: tuple[str, ...]
) -> Card:
  """Reads a card and checks that it fits; reads no weight.

  Args:
    path: the folder.
    loaded: the target; `params` are not looked at.
    kinds: what the caller can use.

  Raises:
    LoadError: one line, if it is damaged, of another kind, or was trained for
      another target.
  """
  folder = Path(path).expanduser()
  try:
    info = json.loads((folder / CARD).read_text("utf-8"))
    kind, file = info["kind"], folder / info["weights"]
    if file.parent != folder:
      raise ValueError(f"{info['weights']} lies elsewhere")
    if info["format"] != _FORMAT:
      raise LoadError(
        f"{folder} is a draft of format {info['format']}, this version reads "
        f"{_FORMAT}"
      )
    theirs, digest = dict(info["target"]), info["weights_sha256"]
  except LoadError:
    raise
  except (OSError, ValueError, TypeError, KeyError) as error:
    raise LoadError(f"{folder / CARD} is no card of a trained draft") from error
  if kind not in kinds:
    raise LoadError(
      f"{folder} holds a trained draft of kind {kind!r}, not "
      f"{' or '.join(kinds)}"
    )
  # Cheap ones first, and those that say most.
  for name in ("vocab_size", "width", "num_layers"):
    ours = getattr(loaded.model.config, name, None)
    _same(folder, theirs, name, ours, loaded.name)
  ours = loaded.hashes.get("tokenizer")
  _same(folder, theirs, "tokenizer_sha256", ours, loaded.name)
  ours = hub.weights_hash(loaded)
  _same(folder, theirs, "weights_sha256", ours, loaded.name)
  if not file.is_file() or sha256_of(file) != digest:
    raise LoadError(f"{file} is missing or damaged: its card names other bytes")
  return Card(folder, kind, info, open_safetensors(file))


def _same(folder, theirs: Mapping, name: str, ours: Any, target: str) -> None:
  if theirs.get(name) != ours:
    short = lambda x: x[:12] if isinstance(x, str) else x
    raise LoadError(
      f"{folder} was trained for another target ({theirs.get('name')}): its "
      f"{name} is {short(theirs.get(name))}, that of {target} is {short(ours)}"
    )
