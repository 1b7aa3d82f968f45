"""The exact joint law of what `spec_step` emits, by enumerating its noise.

Nothing is sampled: each uniform that a step reads is replaced by one
representative of every outcome it can have (the midpoint of a token's cell of
the CDF, just below 1 or exactly 0 for an acceptance), weighted by the
probability of that outcome as the step itself reports it. Rows with the same
tokens are merged between steps. The code that runs is the code that ships:
`draw`, `verify`, `commit`, the drafter's `update`.
"""

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.base import DETERMINISTIC, WITHOUT_REPLACEMENT, Noise

ALMOST_ONE = np.float32(1) - np.float32(2**-24)


def midpoints(law):
  """Returns for each row and token the middle of its cell of the CDF."""
  law = np.asarray(law, np.float64)
  cdf = np.cumsum(law, -1)
  return ((cdf - law / 2) / cdf[..., -1:]).astype(np.float32)


class Enumerator:
  """Runs a traced `spec_step` over rows in chunks of one size."""

  def __init__(self, step, params, num_nodes, depth, chunk=256):
    self.step = jax.jit(step)
    self.params = params
    self.N, self.K, self.chunk = num_nodes, depth, chunk

  def run(self, state, noise):
    """Steps all rows; returns (state, info) as numpy."""
    rows = len(state.length)
    parts = []
    for start in range(0, rows, self.chunk):
      index = np.minimum(np.arange(start, start + self.chunk), rows - 1)
      pick = lambda x, i=index: jnp.asarray(x[i])
      out = self.step(
        self.params, jax.tree.map(pick, state), jax.tree.map(pick, noise)
      )
      count = min(self.chunk, rows - start)
      parts.append(jax.tree.map(lambda x, c=count: np.asarray(x)[:c], out))
    return jax.tree.map(lambda *xs: np.concatenate(xs), *parts)

  def expand(self, state, weight, origin):
    """Enumerates one step of every row; returns the merged rows after it."""
    rows = len(weight)
    noise = Noise(
      draft=np.full((rows, self.N), 0.5, np.float32),
      accept=np.full((rows, self.N), ALMOST_ONE),
      residual=np.full((rows,), 0.5, np.float32),
      plain=np.full((rows, self.K + 1), 0.5, np.float32),
    )

    def branch(values, chances, field, column):
      """Replaces each row by its outcomes: `values`, `chances` [rows, n]."""
      nonlocal state, weight, origin, noise
      row, outcome = np.nonzero(chances > 0)
      take = lambda x: x[row]
      state = jax.tree.map(take, state)
      noise = jax.tree.map(take, noise)
      weight = weight[row] * chances[row, outcome]
      origin = origin[row]
      array = getattr(noise, field)
      if column is None:
        noise = noise.replace(**{field: values[row, outcome]})
      else:
        array[:, column] = values[row, outcome]

    def sole(x):  # outcomes of rows for which this noise plays no part
      chances = np.zeros_like(x, np.float64)
      chances[:, 0] = 1
      return chances

    for i in range(1, self.N):  # the draft's tokens
      draft = self.run(state, noise)[1].draft
      if draft.probs is None:
        break
      random = (draft.law[:, i] != DETERMINISTIC)[:, None]
      every = np.arange(len(weight))
      parent = draft.parents[:, i]
      q = draft.probs[every, parent].astype(np.float64)
      for j in range(1, i):
        # A sibling that is certain was drawn from nothing.
        gone = (draft.parents[:, j] == parent) & (
          draft.law[:, [i, j]] == WITHOUT_REPLACEMENT
        ).all(1)
        q[every[gone], draft.tokens[gone, j]] = 0
      total = q.sum(-1, keepdims=True)
      empty = total <= 0
      q = np.where(random & ~empty, q / np.where(empty, 1, total), sole(q))
      branch(midpoints(q), q, "draft", i)
    for i in range(1, self.N):  # acceptance
      chance = self.run(state, noise)[1].verdict.accept_prob[:, i]
      chance = chance.astype(np.float64)[:, None]
      values = np.broadcast_to(
        np.array([0, ALMOST_ONE], np.float32), (len(weight), 2)
      )
      branch(values, np.concatenate([chance, 1 - chance], 1), "accept", i)
    for d in range(self.K + 1):  # plain draws
      info = self.run(state, noise)[1]
      plain = info.verdict.plain[:, d, None]
      law = np.where(plain, info.laws[:, d].astype(np.float64), 0)
      law = np.where(plain, law, sole(law))
      branch(midpoints(law), law, "plain", d)
    verdict = self.run(state, noise)[1].verdict  # the residual
    last = np.take_along_axis(verdict.plain, verdict.num_accepted[:, None], 1)
    law = np.where(last, 0, verdict.residual.astype(np.float64))
    law = np.where(last, sole(law), law)
    branch(midpoints(law), law, "residual", None)
    after, _ = self.run(state, noise)
    return _merge(after, weight, origin)

  def joint_law(self, state):
    """Runs every row to its limit.

    Args:
      state: SpecState of `R` rows (from `init`), each an experiment of its own;
        all rows have the same number of tokens to go.

    Returns:
      `[R, V ** n]` float64, the law of the output in base-V order, and the
      number of steps taken.
    """
    new = state.limit - state.prompt_length
    n = int(new[0])
    assert (np.asarray(new) == n).all()
    V = self.step_vocab(state)
    state = state.replace(keys=jnp.zeros_like(state.length))
    state = jax.tree.map(np.asarray, state)
    weight = np.ones(len(state.length))
    origin = np.arange(len(weight))
    laws = np.zeros((len(weight), V**n))
    steps = 0
    while len(weight):
      state, weight, origin = self.expand(state, weight, origin)
      steps += 1
      done = state.done
      for r in np.flatnonzero(done):
        start = state.prompt_length[r]
        code = 0
        for token in state.tokens[r, start : start + n]:
          code = code * V + int(token)
        laws[origin[r], code] += weight[r]
      keep = np.flatnonzero(~done)
      state = jax.tree.map(lambda x, k=keep: x[k], state)
      weight, origin = weight[keep], origin[keep]
    return laws, steps

  def step_vocab(self, state):
    noise = Noise(
      draft=jnp.zeros((1, self.N)),
      accept=jnp.zeros((1, self.N)),
      residual=jnp.zeros((1,)),
      plain=jnp.zeros((1, self.K + 1)),
    )
    one = jax.tree.map(lambda x: x[:1], state)
    shapes = jax.eval_shape(self.step, self.params, one, noise)
    return shapes[1].laws.shape[-1]


def _merge(state, weight, origin):
  """Adds up rows whose text is the same; their states are then the same."""
  width = state.tokens.shape[1]
  live = np.arange(width)[None] < state.length[:, None]
  text = np.where(live, state.tokens, -1)
  table = np.concatenate([origin[:, None], text], 1)
  _, first, group = np.unique(
    table, axis=0, return_index=True, return_inverse=True
  )
  total = np.zeros(len(first))
  np.add.at(total, group.reshape(-1), weight)
  return (
    jax.tree.map(lambda x: x[first], state),
    total,
    origin[first],
  )
