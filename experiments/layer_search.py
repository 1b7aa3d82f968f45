"""Which layers of a target draft best: the objective and the ways to search.

Reference: Zhang et al. 2024, "Draft & Verify", section 4.1.
"""

from collections.abc import Callable, Sequence
import math
from typing import NamedTuple

import numpy as np

Layers = tuple[int, ...]


class Costs(NamedTuple):
  """Seconds of passes on this device.

  Attributes:
    target: of the target over 1, 2, ... tokens.
    base: of a draft pass without any layer: embedding, norm, output matrix.
    layer: of each layer of the draft.
  """

  target: tuple[float, ...]
  base: float
  layer: float

  def draft(self, num_layers: int) -> float:
    """Returns the seconds of a draft pass."""
    return self.base + self.layer * num_layers


class Score(NamedTuple):
  """What a set of layers is worth.

  Attributes:
    objective: seconds per verified token at the best depth.
    depth: that depth, at least 1.
    emitted_per_step: expected tokens of a step at that depth.
    agreement: mean chance that a draft token is accepted.
  """

  objective: float
  depth: int
  emitted_per_step: float
  agreement: float


def fit_line(
  numbers: Sequence[float], seconds: Sequence[float]
) -> tuple[float, float]:
  """Returns (intercept, slope) of least squares, neither below 0."""
  slope, intercept = np.polyfit(numbers, seconds, 1)
  return max(float(intercept), 0.0), max(float(slope), 0.0)


def expect(
  agreement: Sequence[float], depth: int, step: Callable[[int], float]
) -> tuple[float, float]:
  """Returns expected (steps, cost) of writing one text.

  Each step drafts `d = min(depth, tokens left - 1)` tokens; token `i` of the
  text is accepted with chance `agreement[i]` where those before it were, and
  one more token follows. Worked back from the end of the text:
  `V(t) = step(d) + sum_j P(j accepted) V(t + j + 1)`. Where the chances are 0
  and 1 this is a replay. For agreement (1, 0, 1) and depth 2: the first step
  keeps token 0 and corrects token 1, the second has one token left, which
  needs no draft: 2 steps.

  Args:
    agreement: chance of each token of the text.
    depth: `K`.
    step: cost of a step that drafts so many tokens.
  """
  T = len(agreement)
  steps, cost = np.zeros(T + 1), np.zeros(T + 1)
  for t in reversed(range(T)):
    d = min(depth, T - t - 1)
    reached = np.cumprod([1.0, *agreement[t : t + d]])
    # Exactly j of d: reached j, then refused; all d: nothing to refuse.
    exactly = reached - np.append(reached[1:], 0.0)
    after = slice(t + 1, t + d + 2)
    steps[t] = 1 + exactly @ steps[after]
    cost[t] = step(d) + exactly @ cost[after]
  return float(steps[0]), float(cost[0])


def score(
  agreements: Sequence[Sequence[float]], num_layers: int, costs: Costs
) -> Score:
  """Returns what a draft is worth on some texts, at its best depth.

  A step that drafts `d` tokens costs `d` passes of the draft and one of the
  target over `d + 1` tokens. Not drafting is no choice, so that sets that do
  not pay can be compared too; it costs `costs.target[0]` a token.

  Args:
    agreements: by text, the chance of each of its tokens.
    num_layers: of the draft.
    costs: measured; its widths bound the depth.
  """
  draft = costs.draft(num_layers)
  num_tokens = sum(map(len, agreements))
  mean = sum(map(sum, agreements)) / num_tokens
  best = None
  for depth in range(1, len(costs.target)):
    both = [
      expect(a, depth, lambda d: d * draft + costs.target[d])
      for a in agreements
    ]
    steps, seconds = np.sum(both, 0)
    found = Score(seconds / num_tokens, depth, num_tokens / steps, mean)
    if best is None or found.objective < best.objective:
      best = found
  assert best is not None
  return Score(
    float(best.objective), best.depth, float(best.emitted_per_step), mean
  )


# --- searches ---------------------------------------------------------------

Evaluate = Callable[[Layers], float]
METHODS = ("greedy", "bayesian")


class Spent(Exception):
  """All evaluations that were allowed are made."""


def greedy_search(evaluate: Evaluate, num_layers: int) -> None:
  """Drops the layer whose removal helps most, again and again, to the last.

  Args:
    evaluate: returns the objective of a set, smaller is better; raises `Spent`
      when no more are allowed.
    num_layers: of the target.
  """
  kept: Layers = tuple(range(num_layers))
  evaluate(kept)
  while len(kept) > 1:
    fewer = [tuple(i for i in kept if i != out) for out in kept]
    kept = min(fewer, key=evaluate)


def bayesian_search(
  evaluate: Evaluate, num_layers: int, *, seed: int = 0, initial: int = 12
) -> None:
  """Asks where a Gaussian process expects the most improvement, for ever.

  The kernel is `exp(-h / l)` of the Hamming distance `h` between two sets, `l`
  the one of a few lengths under which what is known is likeliest. Candidates
  are random sets, and the best ones with one to three layers changed.

  Args:
    evaluate: see `greedy_search`.
    num_layers: of the target.
    seed: of the random sets.
    initial: random sets to begin with.
  """
  random = np.random.default_rng(seed)
  known: dict[Layers, float] = {}

  def ask(vector: np.ndarray) -> None:
    layers = tuple(int(i) for i in np.flatnonzero(vector))
    if layers and layers not in known:
      known[layers] = math.log(evaluate(layers))

  def some(count: int) -> np.ndarray:
    """Returns random sets of all sizes."""
    share = random.uniform(0.1, 1.0, (count, 1))
    return random.uniform(size=(count, num_layers)) < share

  for vector in [np.ones(num_layers, bool), *some(initial)]:
    ask(vector)
  # Fewer than this many sets can be there to ask for.
  while len(known) < 2**num_layers - 1:
    X = np.array([np.isin(np.arange(num_layers), k) for k in known])
    y = np.array(list(known.values()))
    near = X[np.argsort(y)[:5]].repeat(64, 0)
    flips = random.integers(1, 4, (len(near), 1))
    order = random.uniform(size=near.shape).argsort(1).argsort(1)
    pool = np.concatenate([some(256), near ^ (order < flips)])
    pool = np.unique(pool[pool.any(1)], axis=0)
    fresh = ~(pool[:, None] == X[None]).all(-1).any(1)
    if not fresh.any():
      continue
    pool = pool[fresh]
    ask(pool[np.argmax(expected_improvement(X, y, pool))])


def expected_improvement(
  X: np.ndarray, y: np.ndarray, pool: np.ndarray
) -> np.ndarray:
  """Returns how far below the best value each new point is expected to come.

  Args:
    X: `[n, L]` bool, points that are known.
    y: `[n]` their values.
    pool: `[m, L]` bool, new points.

  Returns:
    `[m]`, in units of the values' spread.

  Reference: Jones et al. 1998 (expected improvement).
  """
  spread = y.std() or 1.0
  z = (y - y.mean()) / spread

  def distance(a, b):
    return (a[:, None] != b[None]).sum(-1)

  own, across = distance(X, X), distance(pool, X)
  best = None
  for length in np.array([0.1, 0.25, 0.5, 1.0, 2.0]) * X.shape[1]:
    # 1e-4: what the texts leave uncertain, and it keeps the factor regular.
    factor = np.linalg.cholesky(np.exp(-own / length) + 1e-4 * np.eye(len(y)))
    half = np.linalg.solve(factor, z)
    likely = -0.5 * half @ half - np.log(np.diag(factor)).sum()
    if best is None or likely > best[0]:
      best = likely, length, factor, half
  assert best is not None
  _, length, factor, half = best
  cross = np.linalg.solve(factor, np.exp(-across / length).T)
  mean = cross.T @ half
  deviation = np.sqrt(np.maximum(1 + 1e-4 - (cross**2).sum(0), 1e-12))
  gain = (z.min() - mean) / deviation
  density = np.exp(-0.5 * gain**2) / math.sqrt(2 * math.pi)
  below = np.array([0.5 * (1 + math.erf(g / math.sqrt(2))) for g in gain])
  return deviation * (gain * below + density)


def search(
  method: str, evaluate: Evaluate, num_layers: int, *, seed: int
) -> None:
  """Searches by one of `METHODS` until all is tried or allowed.

  Raises:
    ValueError: for another method.
  """
  if method not in METHODS:
    raise ValueError(
      f"method must be one of {', '.join(METHODS)}, got {method!r}"
    )
  try:
    if method == "greedy":
      greedy_search(evaluate, num_layers)
    else:
      bayesian_search(evaluate, num_layers, seed=seed)
  except Spent:
    pass
