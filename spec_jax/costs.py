"""What a step costs at each draft depth, measured on this device."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.requests import Job
from spec_jax.settings import Settings

_PERIOD = 8  # tokens after which the measured prompt repeats
_PROMPT = 48


def measure_costs(engine: Any, rounds: int = 5) -> list[float]:
  """Measures steps of a full batch by depth.

  Rows hold a prompt that repeats itself, so that every drafter has something
  to propose, and take one step at depth 0, 1, `K` and where the target's pass
  gets wider, in turn; depths between are interpolated.

  Args:
    engine: an `Engine` whose policy needs costs.
    rounds: steps at each depth; the median counts.

  Returns:
    `K + 1` seconds, not falling.
  """
  programs, config = engine.programs, engine.config
  K, B = programs.drafter.depth, config.batch_size
  num = max(2, min(_PROMPT, config.slots - K - 2))
  period = min(_PERIOD, engine.model.config.vocab_size)
  job = Job(
    [i % period for i in range(num)],
    Settings(max_new_tokens=K + 1, stop_ids=()),
    (0,),
  )
  state = programs.empty()
  for first in range(0, B, config.refill_rows):
    rows = range(first, min(first + config.refill_rows, B))
    state, _ = engine.read([job] * len(rows), rows, state, None)
  edges = [n - 1 for n in programs.widths]
  depths = sorted({0, 1, K, *(d for n in edges for d in (n, n + 1) if d <= K)})
  times: dict[int, list[float]] = {d: [] for d in depths}
  for round_ in range(rounds + 1):  # the first warms up
    for d in depths:
      copy = jax.tree.map(jnp.copy, state)
      policy = dataclasses.replace(
        copy.policy, force=jnp.full((B,), d, jnp.int32)
      )
      copy = jax.block_until_ready(dataclasses.replace(copy, policy=policy))
      limits = jnp.int32(1), jnp.int32(B + 1)
      _, seconds = engine.timed(programs.decode, copy, *limits)
      if round_:
        times[d].append(seconds)
  medians = np.maximum.accumulate([np.median(times[d]) for d in depths])
  return np.interp(np.arange(K + 1), depths, medians).tolist()
