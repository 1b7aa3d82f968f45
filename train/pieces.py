"""Sums a loss over positions, a piece at a time, in the room of one piece.

Logits of `[B, T, V]` do not fit at real sizes, and of many examples half is
the prompt, whose positions need no logits. So positions that count are moved to
the front, pieces without any are skipped, and each piece's gradient is taken
where its loss is: nothing is computed twice and no logits are kept.
"""

from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from spec_jax.base import Array, PyTree

__all__ = ["sum_pieces"]


class _Parts(NamedTuple):
  """What a loss reads; the first two are differentiated.

  Attributes:
    params: pytree of floating arrays that all pieces read.
    learned: pytree of floating `[B, T, ...]`.
    given: pytree of `[B, T, ...]`.
    frozen: pytree that all pieces read.
  """

  params: PyTree
  learned: PyTree
  given: PyTree
  frozen: PyTree


def sum_pieces(
  function: Callable[..., dict[str, Array]],
  size: int,
  *,
  params: PyTree = None,
  learned: PyTree,
  given: PyTree,
  frozen: PyTree,
  counted: Array,
  compact: bool = False,
) -> tuple[Array, dict[str, Array]]:
  """Sums `function(params, learned, given, frozen)` over pieces.

  Gradients flow from the loss into `params` and `learned` alone.

  Args:
    function: returns sums over positions, "loss" among them. A position that
      does not count adds nothing to any. It closes over no array.
    size: positions a piece, of each of the `B` rows; divides `T`; 0 = all at
      once.
    params: pytree of floating arrays that all pieces read.
    learned: pytree of floating `[B, T, ...]`.
    given: pytree of `[B, T, ...]`.
    frozen: pytree that all pieces read.
    counted: `[B, T]` bool; pieces that hold none are skipped.
    compact: move positions that count to the front, across rows; not for rows
      that lie on several devices.

  Returns:
    The loss, and the other sums.

  Raises:
    ValueError: if `size` does not divide `T`.
  """
  T = counted.shape[1]
  size = T if size <= 0 else size
  if T % size:
    raise ValueError(f"pieces of {size} positions do not divide {T}")
  parts = _Parts(params, learned, given, frozen)
  if size == T:
    parts = parts._replace(
      given=lax.stop_gradient(given), frozen=lax.stop_gradient(frozen)
    )
    loss, sums = _loss_first(function, parts)
    return loss, lax.stop_gradient(sums)
  return _sum(function, size, compact, parts, counted)


def _loss_first(function: Callable, parts: _Parts):
  sums = dict(function(*parts))
  return sums.pop("loss"), sums


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _sum(function, size: int, compact: bool, parts: _Parts, counted: Array):
  cut = _Cut(size, compact, counted)
  return cut.add_up(lambda piece: _loss_first(function, piece), parts)


def _sum_forward(function, size, compact, parts, counted):
  """Takes the gradient of each piece beside its loss."""
  cut = _Cut(size, compact, counted)

  def piece_of(piece: _Parts):
    def loss(params, learned):
      return _loss_first(
        function, piece._replace(params=params, learned=learned)
      )

    (value, sums), (of_params, of_learned) = jax.value_and_grad(
      loss, argnums=(0, 1), has_aux=True
    )(piece.params, piece.learned)
    return ((value, sums), of_params), of_learned

  (found, of_params), of_learned = cut.add_up(piece_of, parts, kept=True)
  return found, (of_params, of_learned)


def _sum_backward(function, size, compact, gradients, given):
  del function, size, compact
  scale = given[0]
  of_params, of_learned = jax.tree.map(
    lambda g: g * scale.astype(g.dtype), gradients
  )
  return _Parts(of_params, of_learned, None, None), None


_sum.defvjp(_sum_forward, _sum_backward)


class _Cut:
  """How `[B, T]` positions become `[n, B, size]` pieces."""

  def __init__(self, size: int, compact: bool, counted: Array):
    self.shape, self.size = counted.shape, size
    self._order = None
    if compact:
      self._order = jnp.argsort(~counted.reshape(-1), stable=True)
    self.live = self.cut(counted).any((1, 2))

  def cut(self, x: Array) -> Array:
    """Returns `x: [B, T, ...]` as `[n, B, size, ...]`."""
    B, T = self.shape
    rest = x.shape[2:]
    if self._order is not None:
      flat = x.reshape(B * T, *rest)[self._order]
      return flat.reshape(T // self.size, B, self.size, *rest)
    split = x.reshape(B, T // self.size, self.size, *rest)
    return jnp.moveaxis(split, 1, 0)

  def join(self, x: Array) -> Array:
    """Undoes `cut`."""
    B, T = self.shape
    rest = x.shape[3:]
    if self._order is not None:
      places = jnp.argsort(self._order)
      return x.reshape(B * T, *rest)[places].reshape(B, T, *rest)
    return jnp.moveaxis(x, 0, 1).reshape(B, T, *rest)

  def add_up(self, function: Callable, parts: _Parts, kept: bool = False):
    """Returns the sum of `function` over pieces that count.

    With `kept` it returns a pair, of which the second is of positions: these
    are joined instead.
    """
    pieces = jax.tree.map(self.cut, (parts.learned, parts.given))

    def run(piece):
      learned, given = piece
      found = function(parts._replace(learned=learned, given=given))
      return found if kept else (found, None)

    zeros = jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype),
      jax.eval_shape(run, jax.tree.map(lambda x: x[0], pieces)),
    )

    def body(total, x):
      live, piece = x
      found, own = lax.cond(live, run, lambda _: zeros, piece)
      return jax.tree.map(jnp.add, total, found), own

    total, own = lax.scan(body, zeros[0], (self.live, pieces))
    return (total, jax.tree.map(self.join, own)) if kept else total
