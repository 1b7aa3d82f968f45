"""Follows what a step costs while an engine decodes.

A machine does not stay as it was when its costs were measured: where others
share its memory bus, a pass over one token may take half as long again for some
minutes while a wide one, bound by arithmetic, takes what it took; where they
take a core, both take longer. What pays changes with that. Every call of a run
tells its seconds, and now and then one is made to look at the kind of step that
the others do not show.
"""

from collections import deque
from collections.abc import Sequence
import statistics
from typing import Any, NamedTuple

import jax
import numpy as np

from spec_jax.cost_policy import CostState
from spec_jax.levels import Levels

# Steps of a call that is made to look; fewer say nothing.
LOOK_STEPS = 4
# Calls whose median is believed: one that the machine held up has no say.
_CALLS = 3
# Of the time, what looks of a kind may lose: that the tokens they bring would
# have come sooner with the other kind of step, and what their calls take.
_SHARE = 1 / 100
# Looks at what seems to lose nothing count as if they lost so much of a step.
_LEAST = 0.05
# Looks at a time: most of the calls whose median is believed.
_LOOKS = 2
# A sum of calls says nothing before its steps took so many times what the calls
# themselves did, which is known less well.
_CALL_PART = 8
# A call with drafts of a part of its time below the first tells what a step
# without one costs; above the second, knowing that, what one with a draft does.
_LITTLE, _MUCH = 0.1, 0.3
# No call is believed to be so many times as fast or as slow as measured.
_MOST = 4.0


class Seen(NamedTuple):
  """What a cost-aware policy has counted so far, on the host.

  Attributes:
    reads_at: `[B, L + 1]`, see `cost_policy.CostState`.
    caught_up: `[B]`, see there.
    behind: `[B]`, see there.
    accepted: `[L + 1]`, tokens that a step asked for such a level was seen to
      accept in a row, on average of late; depths without a chance add nothing.
    widened: `[L + 1]`, part of the steps asked for such a level of late that
      were wider than one without a draft.
  """

  reads_at: np.ndarray
  caught_up: np.ndarray
  behind: np.ndarray
  accepted: np.ndarray
  widened: np.ndarray

  def since(self, before: "Seen") -> tuple[np.ndarray, int]:
    """Returns (steps by level `[L + 1]`, tokens caught up with) of a call.

    A row that ran longest ran in all of its steps.
    """
    at = self.reads_at - before.reads_at
    row = int(at.sum(1).argmax())
    return at[row], int(self.caught_up[row] - before.caught_up[row])


def seen(state: CostState, levels: Levels) -> Seen:
  """Returns what a policy's state has counted."""
  known = state.hits, state.chances, state.asks, state.offers, state.widens
  reads_at, caught_up, behind, *known = jax.device_get(
    (state.reads_at, state.caught_up, state.behind, *known)
  )
  hits, chances, asks, offers, widens = (x.sum(0) for x in known)
  rates = _part(hits, chances, 0.0)
  offered, widened = _part(offers, asks, 0.0), _part(widens, asks, 1.0)
  accepted = np.concatenate(
    [[0.0]]
    + [
      part * np.cumprod(rates[s]).cumsum()
      for part, s in zip(offered, levels.slices(), strict=True)
    ]
  )
  widened = np.append(0.0, np.repeat(widened, levels.depths))
  return Seen(reads_at, caught_up, behind, accepted, widened)


def _part(some: np.ndarray, of: np.ndarray, unknown: float) -> np.ndarray:
  """Returns `some / of`, where `of` is 0 what is thought of the unknown.

  However small: what rests fades with each prompt, and divided by 1 at least a
  dear way would look free, and be looked at.
  """
  return np.divide(some, of, out=np.full_like(of, unknown), where=of > 0)


class _Calls(NamedTuple):
  """Calls taken together: seconds of their steps, steps by level, and so on."""

  seconds: float
  steps_at: np.ndarray
  caught_up: int
  num: int

  def plus(self, more: "_Calls") -> "_Calls":
    """Adds other calls."""
    return _Calls(
      self.seconds + more.seconds,
      self.steps_at + more.steps_at,
      self.caught_up + more.caught_up,
      self.num + more.num,
    )


class _Alone(NamedTuple):
  """Since when one kind of step alone is shown: what was known then.

  Attributes:
    kind: which.
    factor: its own.
    others: the last factors of the other kind.
    num: calls since.
  """

  kind: int
  factor: float
  others: tuple[float, ...]
  num: int = 0


class CostFollower:
  """Scales measured costs by what the calls of a run take.

  Two factors are followed: of a step without a draft, and of one with, at
  whatever level. A call with (nearly) no draft moves the first, one with many
  the second. While only one kind is shown the other is thought to move with it,
  as when somebody else takes a core, until it is looked at.

  Attributes:
    num_looks: calls that were made to look.
  """

  def __init__(self, costs: Sequence[float], levels: Levels, call_s: float):
    """Begins with what was measured.

    Args:
      costs: see `costs.measure_costs`.
      levels: of the drafter.
      call_s: what a call takes for no step.
    """
    self._base = np.asarray(costs, np.float64)
    self._levels, self._call_s = levels, call_s
    self._catches_up = len(costs) > levels.num + 1
    self._factors = [deque([1.0] * _CALLS, _CALLS) for _ in range(2)]
    self._alone = _Alone(0, 1.0, (1.0,) * _CALLS)
    self._unseen_s = [0.0, 0.0]  # since a kind of step was shown
    self._since_look_s = [0.0, 0.0]
    self._usual = 0  # the level drafted most
    self._looked, self._looks_left = 0, 0
    self._pending: _Calls | None = None
    self._seen: Seen | None = None
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
    steps = slice(1, self._levels.num + 1)
    scaled[steps] = np.maximum(scaled[steps], scaled[0])
    return scaled.tolist()

  def begin(self, counted: Seen) -> None:
    """Begins a run."""
    self._seen, self._pending, self._looks_left = counted, None, 0

  def look(self) -> int | None:
    """Returns a level that the next `LOOK_STEPS` steps shall take, or None."""
    if self._looks_left:
      return self._looked
    costs = self.costs()
    for kind, level in enumerate((0, self._usual)):
      waited = min(self._unseen_s[kind], self._since_look_s[kind])
      # What was never drafted is not looked at: the policy's own probes first.
      if kind == (level > 0) and waited * _SHARE >= self._price(kind, costs):
        self._looked, self._looks_left = level, _LOOKS
        return level
    return None

  def add(self, seconds: float, counted: Seen, looked: int | None) -> bool:
    """Learns from a call; tells whether the costs are other ones now.

    Args:
      seconds: that it took.
      counted: after it.
      looked: what `look` said.
    """
    assert self._seen is not None
    at, late = counted.since(self._seen)
    self._seen = counted
    self._unseen_s = [x + seconds for x in self._unseen_s]
    self._since_look_s = [x + seconds for x in self._since_look_s]
    drafted = counted.reads_at.sum(0)[1:]
    if drafted.any():
      self._usual = 1 + int(drafted.argmax())
    calls = _Calls(seconds - self._call_s, at, late, 1)
    if looked is not None:
      self.num_looks += 1
      self._looks_left -= 1
      self._since_look_s[int(looked > 0)] = 0.0
    elif self._pending is not None:
      calls = self._pending.plus(calls)
    enough = calls.seconds >= _CALL_PART * calls.num * self._call_s
    if calls.steps_at.sum() >= LOOK_STEPS and enough:
      self._pending = None
      return self._learn(calls)
    self._pending = calls if looked is None else None
    return False

  def _learn(self, calls: _Calls) -> bool:
    steps = self._base[: self._levels.num + 1] * calls.steps_at
    late = self._catches_up
    caught_up = calls.caught_up * self._base[-1] if late else 0.0
    measured = [float(steps[0]), float(steps[1:].sum() + caught_up)]
    expected = [x * f for x, f in zip(measured, self.factors, strict=True)]
    share = expected[1] / sum(expected)
    if _LITTLE < share < _MUCH:
      return False
    kind = int(share >= _MUCH)
    factor = (calls.seconds - expected[1 - kind]) / measured[kind]
    old, other = self.factors, 1 - kind
    pure = not _LITTLE < share < 1 - _LITTLE
    if not pure or kind != self._alone.kind:
      self._alone = _Alone(kind, old[kind], tuple(self._factors[other]))
    self._factors[kind].append(float(np.clip(factor, 1 / _MOST, _MOST)))
    self._unseen_s[kind] = 0.0
    self._alone = self._alone._replace(num=self._alone.num + 1)
    if pure and self._alone.num >= _CALLS:
      moved = self.factors[kind] / self._alone.factor
      self._factors[other].extend(x * moved for x in self._alone.others)
    return self.factors != old

  def _price(self, kind: int, costs: Sequence[float]) -> float:
    """Returns the seconds that looks at a kind of step would lose."""
    assert self._seen is not None
    plain, level = costs[0], self._usual
    wide = float(self._seen.widened[level])
    deep = plain + wide * (costs[level] - plain)
    tokens = 1 + float(self._seen.accepted[level])
    lost = deep - plain * tokens if kind else plain - deep / tokens
    price = self._call_s + LOOK_STEPS * max(lost, _LEAST * plain)
    if kind and self._catches_up and self._levels.way_of[level] == 0:
      return _LOOKS * price + costs[-1] * int(self._seen.behind.max())
    return _LOOKS * price

  def report(self) -> dict[str, Any]:
    """Returns what was measured at first, and what it is multiplied by now."""
    plain, deep = self.factors
    return {
      "measured_costs_s": self._base.tolist(),
      "cost_factors": {"plain": plain, "draft": deep},
      "num_looks": self.num_looks,
    }
