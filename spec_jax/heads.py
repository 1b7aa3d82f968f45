"""Heads: small networks that draft from a target's hidden states.

They have no embedding of their own and, as a rule, no output matrix: the
target's serve. A head may know fewer words than its target; `Words` says
which, and how its logits become the target's.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import kernels
from spec_jax.base import Array, Model, PyTree
from spec_jax.models import common
from spec_jax.models.decoder import PRECISION


class Heads(NamedTuple):
  """Heads as pure functions; configuration is closed over.

  Attributes:
    kind: "medusa" or "eagle", as a trained draft's card says.
    init: `init(key) -> params`, as a training starts.
    axes: `axes() -> pytree like params` of tuples of logical axis names.
    apply: see the file of the kind.
    config: sizes, `words` and `max_length`.
    dtype: of parameters and activations.
  """

  kind: str
  init: Callable[..., PyTree]
  axes: Callable[[], PyTree]
  apply: Callable[..., Any]
  config: Any
  dtype: Any = jnp.float32


@dataclasses.dataclass(frozen=True)
class Words:
  """The words that heads know.

  Attributes:
    size: `v`, how many.
    target_size: `V`, the target's.
    own_matrix: whether `params["head"]: [D, v]` gives the logits; else the
      target's output matrix does, and `v = V`.
    mapped: whether `params["ids"]: [v]` int32 says which of the target's
      tokens they are; else they are its first `v`.
  """

  size: int
  target_size: int
  own_matrix: bool = False
  mapped: bool = False

  def __post_init__(self):
    if not 1 <= self.size <= self.target_size:
      raise ValueError(
        f"heads know 1 to {self.target_size} words, got {self.size}"
      )
    if not self.own_matrix and self.size != self.target_size:
      raise ValueError(
        f"heads that know {self.size} of {self.target_size} words need a "
        "matrix for them"
      )
    if self.mapped and not self.own_matrix:
      raise ValueError("words that are mapped need a matrix for them")

  def logits(
    self, params: PyTree, target: Model, target_params: PyTree, x: Array
  ) -> Array:
    """Returns `[..., v]` float32 logits of normalised states `[..., D]`."""
    if self.own_matrix:
      with jax.default_matmul_precision(PRECISION):
        return common.linear(x, params["head"], dtype=jnp.float32)
    return target.unembed(target_params, x)

  def to_target(self, params: PyTree, logits: Array) -> Array:
    """Returns `[..., V]` logits, -inf for tokens that are no words."""
    missing = self.target_size - self.size
    if self.mapped:
      full = jnp.full((*logits.shape[:-1], self.target_size), -jnp.inf)
      return full.at[..., params["ids"]].set(logits)
    if not missing:
      return logits
    widths = [(0, 0)] * (logits.ndim - 1) + [(0, missing)]
    return jnp.pad(logits, widths, constant_values=-jnp.inf)


def words_params(words: Words, width: int, dtype) -> dict[str, Array]:
  """Returns what `params` holds for the words, zeros."""
  found = {}
  if words.own_matrix:
    found["head"] = jnp.zeros((width, words.size), dtype)
  if words.mapped:
    found["ids"] = jnp.arange(words.size, dtype=jnp.int32)
  return found


def words_axes(words: Words) -> dict[str, tuple]:
  """Returns the axes of `words_params`."""
  found: dict[str, tuple] = {}
  if words.own_matrix:
    found["head"] = ("embed", None)
  if words.mapped:
    found["ids"] = (None,)
  return found


def are_words(ids: np.ndarray, target_size: int) -> bool:
  """Tells whether ids `[v]` rise within a target's vocabulary."""
  inside = (ids >= 0).all() and (ids < target_size).all()
  return bool(inside and (np.diff(ids) > 0).all())


def check_heads(name: str, draft: Any, kind: str) -> Heads:
  """Returns a drafter's heads.

  Args:
    name: of the drafter.
    draft: what it was given.
    kind: what it needs.

  Raises:
    ValueError: if it was given nothing, a draft model, or heads of another
      kind.
  """
  if draft is None:
    raise ValueError(
      f"drafter {name!r} needs trained {kind} heads as its draft"
    )
  if not isinstance(draft, Heads) or draft.kind != kind:
    found = f"{draft.kind} heads" if isinstance(draft, Heads) else "a model"
    raise ValueError(f"drafter {name!r} needs {kind} heads, got {found}")
  return draft


def refuse_heads(name: str, draft: Any) -> None:
  """Checks that a draft is a model.

  Raises:
    ValueError: if heads are given to a drafter that asks a model.
  """
  if isinstance(draft, Heads):
    raise ValueError(
      f"drafter {name!r} needs a draft model, got {draft.kind} heads: they are "
      f"for drafter {draft.kind!r}"
    )


def output_columns(target: Model, params: PyTree, ids: Array) -> Array:
  """Returns `[D, v]` float32, the columns of the target's output matrix.

  Args:
    target: the target.
    params: its parameters, packed or not.
    ids: `[v]` int32, the words.
  """
  if target.config.tied:
    return common.embed_rows(params["embed"], ids).astype(jnp.float32).T
  head = params["head"]
  if isinstance(head, kernels.Packed):
    return kernels.take_columns(head, ids).T
  return jnp.take(head, ids, axis=1).astype(jnp.float32)
