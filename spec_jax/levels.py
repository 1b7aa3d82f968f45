"""Levels: how deep a drafter is asked, and with which of its parts.

A drafter of depth `K` has the levels 0 (not asked) to `K`. One that can also be
asked without its dearer part has another way, whose depths are the levels
above: with `K = 4` and a copying part of depth 2, level 3 is depth 3 with all
it has, and level 6 depth 2 of the copying part alone.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from spec_jax.base import Array, Drafter

# Names of the ways, for people and results.
WAYS = "all parts", "without a model"


class Levels(NamedTuple):
  """The levels of a drafter.

  Attributes:
    depths: of each way, the deepest; the first is the drafter's `K`.
  """

  depths: tuple[int, ...]

  @classmethod
  def of(cls, drafter: Drafter) -> "Levels":
    """Returns those of a drafter."""
    ways = () if drafter.cheap_depth is None else (drafter.cheap_depth,)
    return cls((drafter.depth, *ways))

  @property
  def num(self) -> int:
    """`L`, the highest level."""
    return sum(self.depths)

  @property
  def num_ways(self) -> int:
    """`G`."""
    return len(self.depths)

  @property
  def way_of(self) -> np.ndarray:
    """`[L + 1]`, the way of each level; that of level 0 is 0."""
    return np.append(0, np.repeat(np.arange(self.num_ways), self.depths))

  @property
  def depth_of(self) -> np.ndarray:
    """`[L + 1]`, the depth of each level."""
    return np.concatenate([[0], *(1 + np.arange(d) for d in self.depths)])

  def slices(self) -> list[slice]:
    """Returns where each way's depths 1, 2, .. lie among levels 1 to `L`."""
    ends = np.cumsum(self.depths)
    return [slice(e - d, e) for e, d in zip(ends, self.depths, strict=True)]

  def split(self, level: Array) -> tuple[Array, Array]:
    """Returns (way, depth) of levels."""
    return jnp.array(self.way_of)[level], jnp.array(self.depth_of)[level]

  def join(self, way: Array, depth: Array) -> Array:
    """Returns the levels of ways and depths; 0 where the depth is 0."""
    begin = jnp.array([s.start for s in self.slices()])
    return jnp.where(depth > 0, begin[way] + depth, 0).astype(jnp.int32)
