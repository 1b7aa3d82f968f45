"""What a step costs at each draft depth, measured on this device."""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.base import Drafter
from spec_jax.cost_policy import forced
from spec_jax.levels import Levels
from spec_jax.requests import Job
from spec_jax.settings import Settings

_PERIOD = 8  # tokens after which the measured prompt repeats
_PROMPT = 48  # at least
_READ = 4096  # tokens read to measure, all rows together, if that is enough
# Up to this depth every depth is measured where the draft is no chain.
_EVERY = 8
# Tokens a draft model is left behind to measure what catching up costs.
_BEHIND = 16
# Steps of a call where one step would tell too much: the first finds nothing
# near, what was in the caches of the processor being other data.
_STEPS = 4


def num_costs(drafter: Drafter) -> int:
  """Returns how many costs a drafter's steps have, see `measure_costs`."""
  return Levels.of(drafter).num + 1 + drafter.catches_up


def check_costs(costs: Sequence[float], drafter: Drafter) -> None:
  """Checks costs that were given.

  Raises:
    ValueError: if their number is wrong, or one is not finite and above 0.
  """
  values = np.asarray(costs, np.float32)
  good = values.shape == (num_costs(drafter),)
  if not (good and np.isfinite(values).all() and (values > 0).all()):
    raise ValueError(
      f"{num_costs(drafter)} costs above 0 are needed, got {list(costs)}"
    )


def typical_length(jobs: Sequence[Job]) -> int:
  """Returns the mean of the jobs' lengths in the middle of their answers."""
  lengths = [len(x.ids) + x.settings.max_new_tokens // 2 for x in jobs]
  return int(np.mean(lengths)) if lengths else _PROMPT


def measure_costs(
  engine: Any, rounds: int = 5, tokens: int = _PROMPT
) -> tuple[list[float], float]:
  """Measures steps of a full batch by level, and what catching up costs.

  Rows hold a prompt that repeats itself, so that every drafter has something
  to propose, and take one step at depth 0, 1, `K` and where the target's pass
  gets wider, in turn; depths between are interpolated. A tree of at most 8
  levels is measured at each. Where parts of a drafter serve by turns, so does a
  prompt without repetition, and the dearer step counts: which part will serve
  is not known when the depth is chosen. For a drafter that `catches_up`, one
  step is also taken after some without a draft.

  A call moves the state in and out, and its first step finds none of it near;
  in a run many steps share that. So a step is what a call of four takes more
  than a call of one, a third of it: a step without a draft, and one with where
  the drafter `fills` (which by then reads what was accepted). Others may have
  nothing to propose in a second step: of their first is taken off what is too
  much in a first step without a draft.

  Args:
    engine: an `Engine` whose policy needs costs.
    rounds: steps at each depth; the median counts.
    tokens: of a row's text, see `typical_length`; attention costs more behind
      a long one, and more so for a wide pass. At most 4096 in all rows, but 48
      in each.

  Returns:
    (`L + 1` seconds, of each way not falling, and for a drafter that catches
    up the seconds of one token of it; seconds that a call takes for no step).
  """
  programs, config = engine.programs, engine.config
  drafter = programs.drafter
  K, B, levels = drafter.depth, config.batch_size, Levels.of(drafter)
  late = _BEHIND if drafter.catches_up else 0
  num = max(_PROMPT, min(tokens, _READ // B))
  num = max(2, min(num, config.slots - K - late - 2))
  late = max(0, min(late, config.slots - num - K - 2))
  steps = min(_STEPS, max(1, (config.slots - num - late - 2) // (K + 1)))

  def after_prompt(period):
    """Returns the state of rows that have read `0, 1, .. period - 1, 0 ..`."""
    period = min(period, engine.model.config.vocab_size)
    job = Job(
      [i % period for i in range(num)],
      Settings(max_new_tokens=steps * (K + 1) + late + 1, stop_ids=()),
      (0,),
    )
    state = programs.empty()
    for first in range(0, B, config.refill_rows):
      rows = range(first, min(first + config.refill_rows, B))
      state, _ = engine.read([job] * len(rows), rows, state, None)
    return state

  periods = (_PERIOD, num) if drafter.alternates else (_PERIOD,)
  states = [after_prompt(period) for period in periods]

  def take(state, level, steps=1):
    """Returns (state, seconds) after steps of a copy at a level."""
    copy = jax.tree.map(jnp.copy, state)
    policy = forced(copy.policy, level)
    copy = jax.block_until_ready(dataclasses.replace(copy, policy=policy))
    limits = jnp.int32(steps), jnp.int32(B + 1)
    (after, _), seconds = engine.timed(programs.decode, copy, *limits)
    return after, seconds

  is_tree = drafter.num_nodes != K + 1
  if is_tree and K <= _EVERY:
    depths = list(range(K + 1))
  else:
    edges = [d for n in programs.widths for d in (n - 1, n) if d <= K]
    depths = sorted({0, 1, K, *edges})
  # Of each way the levels that are measured: these depths, and its deepest.
  measured = [
    [s.start + d for d in sorted({min(d, deepest) for d in depths if d})]
    for s, deepest in zip(levels.slices(), levels.depths, strict=True)
  ]
  every_level = sum(measured, [0])
  several = [level for level in every_level if drafter.fills or not level]
  behind = take(states[-1], 0, late)[0] if late else None
  # What is called: a state, a level, and steps.
  calls: dict[Any, tuple] = {"call": (states[0], 0, 0)}
  for i, state in enumerate(states):
    calls |= {(level, 1, i): (state, level, 1) for level in every_level}
    calls |= {(level, steps, i): (state, level, steps) for level in several}
  if late:
    calls["behind"] = (behind, 1, 1)
  times: dict[Any, list[float]] = {name: [] for name in calls}
  for round_ in range(rounds + 1):  # the first warms up
    for name, (state, level, num) in calls.items():
      seconds = take(state, level, num)[1]
      if round_:
        times[name].append(seconds)
  took = {name: float(np.median(x)) for name, x in times.items()}

  def longest(level, num):
    """Returns what the call took with the prompt where it takes longest."""
    return max(took[level, num, i] for i in range(len(states)))

  def step_of(level):
    """Returns what one more step of a call takes, of those taken several of.

    Never below a tenth of what was measured, whatever else the machine did.
    """
    one = longest(level, 1)
    if steps == 1:
      return max(one - took["call"], one / 10)
    return max((longest(level, steps) - one) / (steps - 1), one / 10)

  call = took["call"]
  first = max(longest(0, 1) - step_of(0), call)
  medians = {
    level: step_of(level)
    if level in several
    else max(longest(level, 1) - first, longest(level, 1) / 10)
    for level in every_level
  }
  costs = [medians[0]]
  for s, at in zip(levels.slices(), measured, strict=True):
    rising = np.maximum.accumulate([medians[level] for level in (0, *at)])
    every = range(s.start + 1, s.stop + 1)
    costs += np.interp(every, [s.start, *at], rising).tolist()
  if not drafter.catches_up:
    return costs, call
  extra = (took["behind"] - longest(1, 1)) / late if late else 0.0
  # Never free: less than a thousandth of a step cannot be measured.
  return [*costs, max(extra, costs[0] / 1000)], call
