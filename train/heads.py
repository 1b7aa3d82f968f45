"""What the recipes of heads share: what is trained, placed, built and saved."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from spec_jax import sharding, trained, trained_draft
from spec_jax.base import Array, Model, PyTree
from spec_jax.heads import Heads
from spec_jax.hub import Loaded
from spec_jax.trained_draft import BuiltDraft
from train.measure import cast

__all__ = [
  "draft_of",
  "earlier",
  "later",
  "save",
  "shardings",
  "start",
  "weights_later",
  "words_of",
]

# What follows from the target, or was chosen before: not trained.
_WORDS = ("head", "ids")


def start(heads: Heads, key: Any) -> PyTree:
  """Returns the parameters that are trained, float32, as they begin."""
  made = cast(heads.init(key), jnp.float32)
  return {name: x for name, x in made.items() if name not in _WORDS}


def words_of(heads: Heads, ids: Array | None, loaded: Loaded) -> PyTree:
  """Returns the parameters of the heads' words for a target.

  Args:
    heads: whose words they are.
    ids: of mapped words, or None.
    loaded: the target, its parameters plain arrays.
  """
  own = {} if ids is None else {"ids": ids}
  return trained_draft.build_heads(heads, own, loaded)[1]


def shardings(
  heads: Heads, target: Model, words: PyTree, mesh: Any
) -> tuple[PyTree, PyTree]:
  """Returns what `Recipe.shardings` does; small heads lie on every device."""
  own = sharding.params_shardings(heads, mesh, replicate=True)
  return (
    {name: place for name, place in own.items() if name not in _WORDS},
    {
      "target": sharding.params_shardings(target, mesh),
      "words": {name: own[name] for name in words},
    },
  )


def draft_of(
  heads: Heads, params: PyTree, words: PyTree, saved: Any
) -> BuiltDraft:
  """Returns heads in training as they would be loaded: rounded."""
  return BuiltDraft(heads, {**words, **cast(cast(params, saved), heads.dtype)})


def save(
  folder: Path,
  heads: Heads,
  params: PyTree,
  words: PyTree,
  saved: Any,
  own: Mapping[str, Any],
  info: Mapping[str, Any],
) -> None:
  """Writes heads and their card.

  Args:
    folder: made if it is not there.
    heads: what was trained.
    params: its parameters.
    words: see `words_of`; ids are kept, the target's columns are not.
    saved: dtype of the file.
    own: the card's "heads", but for the words.
    info: the rest of the card.
  """
  tensors = {
    name: np.asarray(x)
    for name, x in trained.flatten(cast(params, saved)).items()
  }
  if "ids" in words:
    tensors["ids"] = np.asarray(words["ids"])
  about = {**own, **trained_draft.words_info(heads.config.words)}
  trained.save(folder, heads.kind, tensors, {"heads": about, **info})


def later(x: Array, k: int) -> Array:
  """Returns `x: [B, T, ...]` moved `k` places to the front, zeros behind."""
  widths = [(0, 0)] * x.ndim
  widths[1] = (0, min(k, x.shape[1]))
  return jnp.pad(x[:, k:], widths)


def earlier(x: Array, k: int) -> Array:
  """Returns `x: [B, T, ...]` moved `k` places to the back, zeros before."""
  widths = [(0, 0)] * x.ndim
  k = min(k, x.shape[1])
  widths[1] = (k, 0)
  return jnp.pad(x[:, : x.shape[1] - k], widths)


def weights_later(batch: Mapping[str, Array], k: int) -> Array:
  """Returns `[B, T]`, at `i` whether the token `i + k + 1` is to be said.

  0 where that is no part of an answer, or of another example than `i`.
  """
  segment = batch["segment_ids"]
  same = (later(segment, k) == segment) & (segment > 0)
  return jnp.where(same, later(batch["weights"], k), 0.0)
