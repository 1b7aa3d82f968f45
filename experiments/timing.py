"""Times cases in turn, and says how far a ratio of speeds can be trusted.

Turns meet a disturbance of the machine together, so ratios within one run are
fair where the times themselves are not.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
import dataclasses
import statistics
import time
from typing import Any, TypeVar
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.cache import empty_block

Case = TypeVar("Case", bound=Hashable)
_RESAMPLES = 4000


def take_turns(
  cases: Mapping[Case, Callable[[], float | None]], rounds: int
) -> dict[Case, list[float]]:
  """Calls all cases in turn, after one call of each to compile.

  Args:
    cases: each returns when its work is done, with None or the seconds it
      took, where only a part of the call is to count.
    rounds: counted calls of each.

  Returns:
    Seconds of each round, by case.
  """
  times: dict[Case, list[float]] = {case: [] for case in cases}
  for round_ in range(rounds + 1):
    for case, run in cases.items():
      begin = time.perf_counter()
      own = run()
      whole = time.perf_counter() - begin
      if round_:
        times[case].append(whole if own is None else own)
  return times


def medians(times: Mapping[Case, Sequence[float]]) -> dict[Case, float]:
  """Returns the median of each case in milliseconds."""
  return {case: 1e3 * statistics.median(x) for case, x in times.items()}


def timed(function: Callable, *args) -> float:
  """Returns the seconds of one call until its results are there."""
  begin = time.perf_counter()
  jax.block_until_ready(function(*args))
  return time.perf_counter() - begin


def pass_of(
  model: Any, params: Any, width: int, rows: int, *, slots: int, held: int
) -> Callable[[], float]:
  """Returns a function that times one pass over some tokens.

  Args:
    model: which model.
    params: its parameters.
    width: tokens a row, each with its logits.
    rows: `B`.
    slots: `S` of the cache.
    held: tokens already in it.
  """
  cache = model.init_cache(rows, slots)
  length = jnp.full((rows,), held, jnp.int32)
  cache = dataclasses.replace(cache, length=length)
  tokens = jnp.ones((rows, width), jnp.int32)
  positions = held + jnp.broadcast_to(jnp.arange(width)[None], (rows, width))
  visible = jnp.tril(jnp.ones((width, width), bool))[None]
  visible = jnp.broadcast_to(visible, (rows, width, width))

  @jax.jit
  def run(params, cache):
    out = model.apply(
      params, tokens, positions, cache, empty_block(cache, width), visible
    )
    return out.logits, out.block

  return lambda: timed(run, params, cache)


def speed_ratio(
  tokens: Sequence[float],
  seconds: Sequence[float],
  plain_tokens: Sequence[float],
  plain_seconds: Sequence[float],
  seed: int = 0,
) -> tuple[float, tuple[float, float]]:
  """Compares tokens a second with plain decoding's, over the same prompts.

  All tokens over all seconds, not a mean of ratios. Two prompts of 10 tokens
  in 1 and 3 s, plainly in 2 and 4 s: 5 tokens/s against 3.33, ratio 1.5.

  Args:
    tokens: emitted, by prompt.
    seconds: they took.
    plain_tokens: like `tokens`, of plain decoding.
    plain_seconds: like `seconds`.
    seed: of the resampling.

  Returns:
    (ratio, its 95 % interval by bootstrap over prompts).
  """
  columns = np.array([tokens, seconds, plain_tokens, plain_seconds], float)
  P = columns.shape[1]
  picks = np.random.default_rng(seed).integers(0, P, (_RESAMPLES, P))

  def ratio(sums):
    return sums[0] / sums[1] / (sums[2] / sums[3])

  spread = ratio(columns[:, picks].sum(-1))
  low, high = np.percentile(spread, [2.5, 97.5])
  return float(ratio(columns.sum(-1))), (float(low), float(high))


@dataclasses.dataclass
class Piece:
  """A compiled function that is timed on fresh copies of what it consumes.

  Attributes:
    function: takes (params, consumed, *rest); the second is donated, as the
      loop's state is.
    params: first argument.
    consumed: second argument.
    rest: further arguments.
  """

  function: Callable
  params: Any
  consumed: Any
  rest: tuple

  def __post_init__(self):
    # Arguments that are not looked at are passed too, so that the idle piece
    # has as many of them.
    self._jitted = jax.jit(self.function, donate_argnums=1, keep_unused=True)

  def __call__(self) -> float:
    """Returns the seconds of one call; copying is not part of it.

    Of the second of two: the first brings the call's own data near, which
    other cases have driven out.
    """
    with warnings.catch_warnings():
      # What a function only reads cannot be donated.
      warnings.filterwarnings("ignore", message="Some donated buffers")
      for _ in range(2):
        copy = jax.block_until_ready(jax.tree.map(jnp.copy, self.consumed))
        seconds = timed(self._jitted, self.params, copy, *self.rest)
    return seconds

  def result(self) -> Any:
    """Returns what the function returns, nothing consumed."""
    return jax.jit(self.function)(self.params, self.consumed, *self.rest)

  def idle(self) -> "Piece":
    """Returns the piece that returns what it consumes, as it was."""
    nothing = lambda params, consumed, *rest: consumed
    return Piece(nothing, self.params, self.consumed, self.rest)
