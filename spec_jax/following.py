"""Follows what a step costs while an engine decodes.

A machine does not stay as it was when its costs were measured: where others
share its memory bus, a pass over one token may take half as long again for some
minutes while a wide one, bound by arithmetic, takes what it took. What pays
changes with that. Every call of a run tells its seconds, and now and then one
is made to look at the kind of step that the others do not show.
"""

from collections import deque
from collections.abc import Sequence
import dataclasses
import statistics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.base import SpecState
from spec_jax.length import CostState

# Steps of a call that is made to look; fewer say nothing.
LOOK_STEPS = 4
# Calls whose median is believed: one that the machine held up has no say.
_CALLS = 3
# Of the time, what looks may take. They emit tokens too: what is lost is the
# difference between a step that pays and one that does not.
_SHARE = 1 / 30
# No call is believed to be so many times as fast or as slow as measured.
_MOST = 4.0


class Seen(NamedTuple):
  """What a cost-aware policy has counted so far, on the host.

  Attributes:
    reads_at: `[B, K + 1]`, see `length.CostState`.
    caught_up: `[B]`, see there.
  """

  reads_at: np.ndarray
  caught_up: np.ndarray

  def since(self, before: "Seen") -> tuple[np.ndarray, int]:
    """Returns (steps by depth `[K + 1]`, tokens caught up with) of a call.

    A row that ran longest ran in all of its steps.
    """
    at = self.reads_at - before.reads_at
    row = int(at.sum(1).argmax())
    return at[row], int(self.caught_up[row] - before.caught_up[row])


def seen(state: CostState) -> Seen:
  """Returns what a policy's state has counted."""
  return Seen(*jax.device_get((state.reads_at, state.caught_up)))


def forced(state: SpecState, depth: int) -> SpecState:
  """Returns a state whose next steps draft so deep; -1 = as the policy says."""
  old = state.policy.force
  force = jax.device_put(jnp.full(old.shape, depth, old.dtype), old.sharding)
  policy = dataclasses.replace(state.policy, force=force)
  return dataclasses.replace(state, policy=policy)


class CostFollower:
  """Scales measured costs by what the calls of a run take.

  Two factors are followed: of a step without a draft, and of one with, at
  whatever depth. A call moves the factor of the kind that most of its time went
  to, given the other one.

  Attributes:
    num_looks: calls that were made to look.
  """

  def __init__(self, costs: Sequence[float], depth: int, call_s: float):
    """Begins with what was measured.

    Args:
      costs: see `costs.measure_costs`.
      depth: `K`.
      call_s: what a call takes for no step.
    """
    self._base = np.asarray(costs, np.float64)
    self._depth, self._call_s = depth, call_s
    self._factors = [deque([1.0], _CALLS), deque([1.0], _CALLS)]
    self._unseen_s = [0.0, 0.0]  # since a kind of step was shown
    self._wait_s = LOOK_STEPS * float(self._base[: depth + 1].max()) / _SHARE
    self._since_look_s = 0.0
    self._usual = 0  # the depth drafted most
    self._pending: tuple[float, np.ndarray, int] | None = None
    self.num_looks = 0

  @property
  def factors(self) -> tuple[float, float]:
    """Of a step without a draft and of one with, relative to the start."""
    plain, deep = (statistics.median(x) for x in self._factors)
    return plain, deep

  def costs(self) -> list[float]:
    """Returns the costs as they are now, see `measure_costs`."""
    plain, deep = self.factors
    scaled = self._base * deep
    scaled[0] = self._base[0] * plain
    steps = slice(1, self._depth + 1)
    scaled[steps] = np.maximum(scaled[steps], scaled[0])
    return scaled.tolist()

  def look(self) -> int | None:
    """Returns a depth that the next `LOOK_STEPS` steps shall take, or None."""
    kind = int(self._unseen_s[1] > self._unseen_s[0])
    if min(self._unseen_s[kind], self._since_look_s) < self._wait_s:
      return None
    if kind and not self._usual:  # the policy's own probes come first
      return None
    return self._usual if kind else 0

  def add(
    self, seconds: float, before: Seen, after: Seen, looked: bool
  ) -> bool:
    """Learns from a call; tells whether the costs are other ones now.

    Args:
      seconds: that it took.
      before: what had been counted.
      after: the same after it.
      looked: whether its steps took what `look` said.
    """
    at, late = after.since(before)
    spent = max(seconds - self._call_s, seconds / 10)
    self._unseen_s = [x + seconds for x in self._unseen_s]
    self._since_look_s += seconds
    drafted = after.reads_at.sum(0)[1:]
    if drafted.any():
      self._usual = 1 + int(drafted.argmax())
    if looked:
      self.num_looks += 1
      self._since_look_s, self._wait_s = 0.0, seconds / _SHARE
    elif self._pending is not None:
      spent += self._pending[0]
      at, late = at + self._pending[1], late + self._pending[2]
    self._pending = None
    if at.sum() < LOOK_STEPS:
      if not looked:
        self._pending = spent, at, late
      return False
    return self._learn(spent, at, late)

  def _learn(self, spent: float, at: np.ndarray, late: int) -> bool:
    steps = self._base[: self._depth + 1] * at
    caught_up = late * self._base[-1] if len(self._base) > len(steps) else 0.0
    measured = [float(steps[0]), float(steps[1:].sum() + caught_up)]
    expected = [x * f for x, f in zip(measured, self.factors, strict=True)]
    kind = int(expected[1] >= expected[0])
    factor = (spent - expected[1 - kind]) / measured[kind]
    old = self.factors
    self._factors[kind].append(float(np.clip(factor, 1 / _MOST, _MOST)))
    self._unseen_s[kind] = 0.0
    return self.factors != old

  def report(self) -> dict[str, Any]:
    """Returns what was measured at first, and what it was multiplied by."""
    plain, deep = self.factors
    return {
      "measured_costs_s": self._base.tolist(),
      "cost_factors": {"plain": plain, "draft": deep},
      "num_looks": self.num_looks,
    }
