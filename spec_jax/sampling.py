"""From logits to a law, and from a law and a uniform to a token.

Plain decoding, drafting and verification all call these functions; nobody
re-implements a piece, so a draft's law and the target's are warped alike.
"""

import dataclasses
import functools

import jax
from jax import lax
import jax.numpy as jnp

from spec_jax.base import Array, Counts, Noise, Sampling

# Purposes of random numbers, folded into a row's key.
_DRAFT, _ACCEPT, _RESIDUAL, _PLAIN = range(4)

# Block of two-level searches: a vocabulary of 49,152 is 384 blocks.
_BLOCK = 128
# Numbers of largest entries in which thresholds are sought first, on CPU.
_NUM_LARGEST = (32, 256)


def scores(
  logits_BV: Array, sampling: Sampling, counts: Counts | None = None
) -> Array:
  """Applies penalties, bias, bans and the ban on early stops.

  Repetition (Keskar et al. 2019): a positive logit of a token that occurs in
  prompt or output is divided by the penalty, a negative one multiplied.
  Frequency: minus penalty times occurrences in the output. Presence: minus
  penalty if it occurs in the output.

  Args:
    logits_BV: `[B, V]`.
    sampling: settings per row.
    counts: what came before; needed where a setting in use looks at it.

  Returns:
    `[B, V]` float32 logits.
  """
  z = logits_BV.astype(jnp.float32)
  V = z.shape[-1]
  if sampling.repetition_penalty is not None:
    assert counts is not None and counts.output is not None
    assert counts.prompt is not None
    penalty = sampling.repetition_penalty[:, None]
    seen = counts.prompt | (counts.output > 0)
    z = jnp.where(seen, jnp.where(z > 0, z / penalty, z * penalty), z)
  if sampling.frequency_penalty is not None:
    assert counts is not None and counts.output is not None
    z = z - sampling.frequency_penalty[:, None] * counts.output
  if sampling.presence_penalty is not None:
    assert counts is not None and counts.output is not None
    z = z - sampling.presence_penalty[:, None] * (counts.output > 0)
  if sampling.bias is not None:
    z = z + sampling.bias
  if sampling.min_new_tokens is not None:
    assert counts is not None and counts.stop_ids is not None
    assert counts.num_output is not None
    early = counts.num_output < sampling.min_new_tokens
    ids = jnp.where(early[:, None] & (counts.stop_ids >= 0), counts.stop_ids, V)
    z = jax.vmap(lambda z, i: z.at[i].set(-jnp.inf, mode="drop"))(z, ids)
  return z


def is_greedy(sampling: Sampling) -> Array:
  """Returns `[B]` bool, rows that take the first largest logit.

  Settings without a temperature (every row greedy) have no rows to tell.
  """
  assert sampling.temperature is not None
  return sampling.temperature <= 0


def _blocks(x_BV: Array, fill) -> Array:
  """Returns `x` in blocks, `[B, num, size]`, padded with `fill`."""
  B, V = x_BV.shape
  size = min(_BLOCK, V)
  num = -(-V // size)
  x = jnp.pad(x_BV, ((0, 0), (0, num * size - V)), constant_values=fill)
  return x.reshape(B, num, size)


def first_largest(scores_BV: Array) -> Array:
  """Returns the index of each row's first largest entry, `[B]` int32.

  `argmax` in two levels: in XLA on CPU 4 times as fast, with 8 rows 8 times.
  A row that holds NaN gives any index.
  """
  blocks = _blocks(scores_BV, -jnp.inf)
  block = jnp.argmax(blocks.max(-1), -1)
  inside = jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0]
  index = block * blocks.shape[-1] + jnp.argmax(inside, -1)
  return index.astype(jnp.int32)


def largest(scores_BV: Array, k: int) -> Array:
  """Returns the indices of each row's `k` largest entries, `[B, k]` int32.

  In falling order and the first of equals first, like `lax.top_k`, in two
  levels: the k largest entries lie in the k blocks with the largest maxima.

  Args:
    scores_BV: `[B, V]`.
    k: at most `V`.
  """
  blocks = _blocks(scores_BV, -jnp.inf)
  B, num, size = blocks.shape
  block = lax.top_k(blocks.max(-1), min(k, num))[1]
  block = jnp.sort(block, -1)  # of equals the first must stay the first
  inside = jnp.take_along_axis(blocks, block[:, :, None], 1).reshape(B, -1)
  index = lax.top_k(inside, k)[1]
  block = jnp.take_along_axis(block, index // size, 1)
  return (block * size + index % size).astype(jnp.int32)


def _bisect(enough, rows: int) -> Array:
  """Returns the largest float t >= 0 for which `enough(t_B1)` holds, `[B, 1]`.

  Bisects the bit pattern: non-negative floats are ordered like their bits, so
  30 rounds are exact for t < 2, where every probability lies. `enough` must
  hold at 0 and be monotone.
  """

  def body(i, low):
    middle = low | lax.shift_left(jnp.int32(1), jnp.int32(29) - i)
    t = lax.bitcast_convert_type(middle, jnp.float32)[:, None]
    return jnp.where(enough(t), middle, low)

  low = lax.fori_loop(0, 30, body, jnp.zeros((rows,), jnp.int32))
  return lax.bitcast_convert_type(low, jnp.float32)[:, None]


def _threshold(weights: Array, enough, enough_of_first, everything) -> Array:
  """Returns the largest float t >= 0 for which `enough(t_B1)` holds, `[B, 1]`.

  On CPU few of the largest entries are looked at first, then more, a tenth of
  the work; rows that need still more are bisected. Each row's threshold comes
  from the first of them that finds it, whatever the other rows need.

  Args:
    weights: `[B, V]`.
    enough: see `_bisect`; holds for t if and only if it holds for the smallest
      entry that is at least t.
    enough_of_first: of `[B, n]`, the largest entries in falling order,
      `[B, n]` bool, whether so many of them are enough.
    everything: `[B]` bool, rows whose threshold is 0.
  """
  B, V = weights.shape
  everything = everything[:, None]

  def bisect():
    return _bisect(enough, B)

  def look(num, otherwise):
    """Looks at the `num` largest, and otherwise where those do not do."""
    entries = jnp.take_along_axis(weights, largest(weights, num), -1)
    good = enough_of_first(entries)
    found = good.any(-1, keepdims=True) | everything
    index = jnp.argmax(good, -1)[:, None]
    t = jnp.take_along_axis(entries, index, -1)
    return lax.cond(
      found.all(), lambda: t, lambda: jnp.where(found, t, otherwise())
    )

  def look_first():
    find = bisect
    for num in reversed([n for n in _NUM_LARGEST if n < V]):
      find = functools.partial(look, num, find)
    return find()

  t = lax.platform_dependent(cpu=look_first, default=bisect)
  return jnp.where(everything, 0.0, t)


def law(scores_BV: Array, sampling: Sampling) -> Array:
  """Turns processed logits into the law tokens are drawn from.

  Temperature, top-k, top-p, min-p, each on the renormalised rest. A greedy
  row is the point mass at the first largest logit.

  Args:
    scores_BV: `[B, V]` float32 from `scores`.
    sampling: settings per row.

  Returns:
    `[B, V]` float32, rows sum to 1.
  """
  V = scores_BV.shape[1]
  first = first_largest(scores_BV)
  point = one_hot(first, V)
  if sampling.temperature is None:
    return point
  greedy = is_greedy(sampling)
  temperature = jnp.where(greedy, 1.0, sampling.temperature)
  # The largest score is subtracted before the division: a tiny temperature
  # would overflow to inf and inf - inf is NaN. The largest weight is then 1.
  top = jnp.take_along_axis(scores_BV, first[:, None], -1)
  weights = jnp.exp((scores_BV - top) / temperature[:, None])
  # What is kept depends on ratios alone: it is normalised once, at the end.
  if sampling.top_k is not None:
    k, everything = sampling.top_k, greedy | (sampling.top_k <= 0)
    before_top_k = weights

    def enough_kept(t):
      return (before_top_k >= t).sum(-1) >= jnp.minimum(k, V)

    def enough_first(entries):
      return jnp.arange(1, entries.shape[-1] + 1)[None] >= k[:, None]

    t = _threshold(before_top_k, enough_kept, enough_first, everything)
    weights = jnp.where(weights >= t, weights, 0.0)
  if sampling.top_p is not None:
    before_top_p = weights
    mass = sampling.top_p * before_top_p.sum(-1)
    # top_p = 1 keeps all, even what rounding would leave out of the sum.
    everything = greedy | (sampling.top_p >= 1)

    def enough_mass(t):
      return jnp.where(before_top_p >= t, before_top_p, 0).sum(-1) >= mass

    def enough_first_mass(entries):
      return jnp.cumsum(entries, -1) >= mass[:, None]

    # top_p = 0 is met by nothing: keep the largest.
    t = _threshold(before_top_p, enough_mass, enough_first_mass, everything)
    t = jnp.minimum(t, before_top_p.max(-1, keepdims=True))
    weights = jnp.where(weights >= t, weights, 0.0)
  if sampling.min_p is not None:
    floor = sampling.min_p[:, None] * weights.max(-1, keepdims=True)
    weights = jnp.where(weights >= floor, weights, 0.0)
  probs = weights / weights.sum(-1, keepdims=True)
  return jnp.where(greedy[:, None], point, probs)


def warp(
  logits_BV: Array, sampling: Sampling, counts: Counts | None = None
) -> Array:
  """Turns raw logits into the law tokens are drawn from: `law(scores(...))`.

  Args:
    logits_BV: `[B, V]`.
    sampling: settings per row.
    counts: see `scores`.

  Returns:
    `[B, V]` float32, rows sum to 1.
  """
  return law(scores(logits_BV, sampling, counts), sampling)


def draw(probs_BV: Array, uniform_B: Array) -> Array:
  """Draws a token by the inverse CDF; never one of probability zero.

  The first index whose CDF exceeds `uniform * total` and whose probability is
  above 0, else the last whose probability is. In two levels, blocks of 128
  and inside one: a running sum over the vocabulary costs 8 times as much.

  Args:
    probs_BV: `[B, V]` float32 >= 0, not necessarily normalised, not all 0.
    uniform_B: `[B]` float32 in [0, 1).

  Returns:
    `[B]` int32.
  """
  V = probs_BV.shape[1]
  blocks = _blocks(probs_BV, 0)
  size = blocks.shape[-1]
  sums = blocks.sum(-1)
  cdf = jnp.cumsum(sums, -1)
  target = uniform_B[:, None] * cdf[:, -1:]

  def first(good):  # first true of each row, else -1
    return jnp.where(good.any(-1), jnp.argmax(good, -1), -1)

  def last(good):
    return good.shape[-1] - 1 - jnp.argmax(good[:, ::-1], -1)

  block = first((cdf > target) & (sums > 0))
  block = jnp.where(block < 0, last(sums > 0), block)
  inside = jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0]
  before = jnp.take_along_axis(cdf - sums, block[:, None], 1)
  good = inside > 0
  index = first((jnp.cumsum(inside, -1) > target - before) & good)
  index = jnp.where(index < 0, last(good), index)
  # A law that is no number must not lead past the vocabulary.
  return jnp.minimum(block * size + index, V - 1).astype(jnp.int32)


def add_counts(counts: Counts, tokens_BJ: Array, live_BJ: Array) -> Counts:
  """Counts more output tokens.

  Args:
    counts: so far.
    tokens_BJ: `[B, J]` int32.
    live_BJ: `[B, J]` bool; the other entries are left out.

  Returns:
    Counts of the same shapes.
  """
  changes: dict[str, Array] = {}
  if counts.output is not None:
    V = counts.output.shape[-1]
    where = jnp.where(live_BJ, tokens_BJ, V)
    changes["output"] = jax.vmap(lambda c, t: c.at[t].add(1, mode="drop"))(
      counts.output, where
    )
  if counts.num_output is not None:
    changes["num_output"] = counts.num_output + live_BJ.sum(1)
  return dataclasses.replace(counts, **changes)


def path_counts(counts: Counts, tokens_BN: Array, visible_BN: Array) -> Counts:
  """Returns the counts after the path to a node (the root is counted).

  Args:
    counts: up to and with the root.
    tokens_BN: `[B, N]` int32, the tree's tokens.
    visible_BN: `[B, N]` bool, each row's node and its ancestors.
  """
  below_root = jnp.arange(tokens_BN.shape[1])[None] > 0
  return add_counts(counts, tokens_BN, visible_BN & below_root)


def prob_of(probs_BV: Array, token_B: Array) -> Array:
  """Returns `[B]`, each row's probability of its token."""
  return jnp.take_along_axis(probs_BV, token_B[:, None], -1)[:, 0]


def one_hot(token_B: Array, vocab_size: int) -> Array:
  """Returns `[B, V]` float32 point masses."""
  ids = jnp.arange(vocab_size)[None]
  return (ids == token_B[:, None]).astype(jnp.float32)


def draw_noise(keys_B: Array, length_B: Array, nodes: int, depth: int) -> Noise:
  """Draws the uniforms of one step.

  Keyed by the row's key, a purpose, and the length at the start of the step,
  which rises strictly: nothing is drawn twice, a row's noise depends neither on
  its batch nor on when it was refilled, and a continued row equals a fresh
  one. (Its law does by a last bit, where a device adds up otherwise in a
  larger batch.) Plain draws are keyed by the position of their token and used
  only when that token is emitted, so text drawn plainly is the same at any
  draft length.
  Keying every draw by position is wrong: after a refusal the next step would
  reuse noise that the refusal depended on.

  Args:
    keys_B: `[B]` typed random keys; folded, not consumed.
    length_B: `[B]` int32 committed tokens.
    nodes: `N`.
    depth: `K`.

  Returns:
    Noise.
  """

  # One batch of streams: each call of a generator is hundreds of operations
  # to compile. Partitionable: then the first of N uniforms does not depend on
  # N, so plain draws are the same under every drafter.
  purposes = jnp.array([_DRAFT, _ACCEPT, _RESIDUAL] + [_PLAIN] * (depth + 1))
  offsets = jnp.array([0, 0, 0, *range(depth + 1)])

  def stream(key, length, purpose, offset):
    folded = jax.random.fold_in(
      jax.random.fold_in(key, purpose), length + offset
    )
    return jax.random.uniform(folded, (nodes,))

  def row(key, length):
    return jax.vmap(stream, (None, None, 0, 0))(key, length, purposes, offsets)

  with jax.threefry_partitionable(True):
    uniforms = jax.vmap(row)(keys_B, length_B)
  return Noise(
    draft=uniforms[:, 0],
    accept=uniforms[:, 1],
    residual=uniforms[:, 2, 0],
    plain=uniforms[:, 3:, 0],
  )


def no_noise(batch: int, nodes: int, depth: int) -> Noise:
  """Returns zeros, for rows that are all greedy.

  Their laws are point masses, from which every uniform draws the same token.

  Args:
    batch: `B`.
    nodes: `N`.
    depth: `K`.
  """
  return Noise(
    draft=jnp.zeros((batch, nodes)),
    accept=jnp.zeros((batch, nodes)),
    residual=jnp.zeros((batch,)),
    plain=jnp.zeros((batch, depth + 1)),
  )
