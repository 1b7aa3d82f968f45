"""The key/value cache: allocate, attend over cache and block, commit a path.

The cache is read-only while a model runs. New keys and values go to a small
`Block`; attention joins both under one softmax; `commit` alone writes, once a
step, and only the accepted nodes. Rolling back is dropping the block.

Every layer is a ring: the token at position `p` lies in slot `p % R`. A global
layer has `R = S` slots and never wraps, since `length <= S`. A sliding-window
layer needs `window - 1` slots, for the token being read sees itself and
`window - 1` tokens before it (`window - 2` slots fail).
"""

from collections.abc import Callable, Sequence
import dataclasses

import jax
from jax import lax
import jax.numpy as jnp

from spec_jax.base import Array, Block, Cache, Output

# Scores of invisible keys. Finite: -inf - -inf is NaN in a row that sees
# nothing.
_MASKED = -1e30


def make_cache(
  batch: int,
  slots: int,
  *,
  windows: Sequence[int | None],
  num_kv_heads: int,
  head_dim: int,
  dtype,
  stacked: bool = False,
) -> Cache:
  """Allocates an empty cache.

  Args:
    batch: rows.
    slots: tokens a row may hold.
    windows: per layer the sliding window in tokens, or None.
    num_kv_heads: `G`.
    head_dim: `E`.
    dtype: of keys and values.
    stacked: one array `[L, ...]` for all layers (they must be alike).

  Returns:
    Cache with `length` 0.

  Raises:
    ValueError: if `slots < 1`, or layers to be stacked differ in window.
  """
  if slots < 1:
    raise ValueError(f"slots must be at least 1, got {slots}")
  sizes = [slots if w is None else max(1, min(slots, w - 1)) for w in windows]

  def zeros():
    if stacked:
      if len(set(sizes)) != 1:
        raise ValueError(f"stacked layers differ in slots: {sizes}")
      shape = (len(sizes), batch, num_kv_heads, sizes[0], head_dim)
      return (jnp.zeros(shape, dtype),)
    return tuple(
      jnp.zeros((batch, num_kv_heads, size, head_dim), dtype) for size in sizes
    )

  return Cache(zeros(), zeros(), jnp.zeros((batch,), jnp.int32))


def empty_block(cache: Cache, num_nodes: int) -> Block:
  """Returns a block of `num_nodes` unread nodes that fits `cache`."""

  def zeros(x):
    *lead, heads, _, width = x.shape
    return jnp.zeros((*lead, num_nodes, heads, width), x.dtype)

  batch = cache.length.shape[0]
  return Block(
    k=tuple(map(zeros, cache.k)),
    v=tuple(map(zeros, cache.v)),
    positions=jnp.zeros((batch, num_nodes), jnp.int32),
  )


def write_nodes(old: Array, new: Array, start) -> Array:
  """Writes `new: [B, T, ...]` over nodes `start ..` of `old: [B, N, ...]`.

  The caller keeps `start + T <= N`: XLA would move a later start back over
  live nodes without a word.
  """
  return lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), start, 1)


def slot_positions(length_B: Array, num_slots: int) -> Array:
  """Returns the position each slot holds, `[B, R]`; negative = nothing.

  For length 5 and 3 slots: positions 3, 4, 2.
  """
  last = length_B[:, None] - 1
  return last - (last - jnp.arange(num_slots)[None]) % num_slots


def attend(
  query_BTHE: Array,
  cache_k: Array,
  cache_v: Array,
  block_k: Array,
  block_v: Array,
  mask_cache: Array,
  mask_block: Array,
  *,
  scale: float,
) -> Array:
  """Attends over cache and block under one softmax, without joining them.

  Args:
    query_BTHE: queries; head `h` reads key/value head `h // (H / G)`.
    cache_k: `[B, G, R, E]`, and `cache_v` alike.
    cache_v: see `cache_k`.
    block_k: `[B, N, G, E]`, and `block_v` alike.
    block_v: see `block_k`.
    mask_cache: bool, broadcasts to `[B, T, R]`.
    mask_block: bool, `[B, T, N]`.
    scale: multiplies the scores.

  Returns:
    `[B, T, H * E]` in the queries' dtype.
  """
  B, T, H, E = query_BTHE.shape
  G = block_k.shape[2]
  query = query_BTHE.reshape(B, T, G, H // G, E)
  f32 = jnp.float32

  def scores(keys, layout, mask):
    s = jnp.einsum(
      f"btghe,{layout}->bghts", query, keys, preferred_element_type=f32
    )
    return jnp.where(mask[:, None, None], s * scale, _MASKED)

  score_cache = scores(cache_k, "bgse", mask_cache)
  score_block = scores(block_k, "bsge", mask_block)
  top = jnp.maximum(score_cache.max(-1), score_block.max(-1))[..., None]
  exp_cache = jnp.exp(score_cache - top)
  exp_block = jnp.exp(score_block - top)
  total = exp_cache.sum(-1) + exp_block.sum(-1)  # [B, G, H/G, T]

  def values(weights, layout, v):
    return jnp.einsum(
      f"bghts,{layout}->bghte",
      weights.astype(v.dtype),
      v,
      preferred_element_type=f32,
    )

  out = values(exp_cache, "bgse", cache_v) + values(exp_block, "bsge", block_v)
  out = jnp.moveaxis(out / total[..., None], 3, 1)
  return out.reshape(B, T, H * E).astype(query_BTHE.dtype)


# Tokens from which on rows and heads go one by one on a single CPU.
LONG = 128


def attend_alone(
  query_BTHE: Array, k: Array, v: Array, mask: Array, *, scale: float
) -> Array:
  """Attends over a block without a cache, as training does.

  XLA's products of many small matrices are slow on CPU: on a single one a long
  text goes by row and head, and its scores are made again for the gradient (49
  ms against 153 for a layer of 4 x 512 tokens and its gradient).

  Args:
    query_BTHE: queries; head `h` reads key/value head `h // (H / G)`.
    k: `[B, T, G, E]`, and `v` alike.
    v: see `k`.
    mask: bool, broadcasts to `[B, T, T]`.
    scale: multiplies the scores.

  Returns:
    `[B, T, H * E]` in the queries' dtype.
  """
  B, T, H, E = query_BTHE.shape
  G, f32 = k.shape[2], jnp.float32

  def together(query, k, v, mask):
    # One masked slot: training then runs the code that decoding runs.
    nothing = jnp.zeros((B, G, 1, E), k.dtype)
    no = jnp.zeros((1, 1, 1), bool)
    return attend(query, nothing, nothing, k, v, no, mask, scale=scale)

  @jax.checkpoint
  def one(x):
    query, k, v, mask = x  # [T, H / G, E], [T, E], [T, E], [T, T]
    scores = jnp.dot(query.reshape(-1, E), k.T, preferred_element_type=f32)
    scores = scores.reshape(T, -1, T) * scale
    scores = jnp.where(mask[:, None], scores, _MASKED)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    out = jnp.dot(
      weights.astype(v.dtype).reshape(-1, T), v, preferred_element_type=f32
    )
    return out.reshape(T, -1, E) / weights.sum(-1)[..., None]

  def in_turn(query, k, v, mask):
    query = query.reshape(B, T, G, H // G, E)
    each = [jnp.moveaxis(x, 2, 1) for x in (query, k, v)]
    each = [x.reshape(B * G, *x.shape[2:]) for x in each]
    out = lax.map(one, (*each, jnp.repeat(mask, G, 0)))
    out = jnp.moveaxis(out.reshape(B, G, T, H // G, E), 1, 2)
    return out.reshape(B, T, H * E).astype(query.dtype)

  mask = jnp.broadcast_to(mask, (B, T, T))
  if T < LONG or jax.device_count() > 1:
    return together(query_BTHE, k, v, mask)
  return lax.platform_dependent(
    query_BTHE, k, v, mask, cpu=in_turn, default=together
  )


def after_pass(path_BJ: Array, hidden_BTAD: Array) -> Array:
  """Returns the path, made to depend on what a pass computed.

  Where the next values of a loop's cache do not depend on the end of the pass
  that reads the old ones, XLA on CPU copies it: 117 ms against 62 at 2,048
  slots. An optimisation barrier is gone before copies are placed, so the path
  looks at one number that no model reaches.

  Args:
    path_BJ: `[B, J]` int32.
    hidden_BTAD: `[B, T, A, D]`, `Output.hidden` of that pass.
  """
  hidden = hidden_BTAD[:, 0, -1, 0].astype(jnp.float32)
  return path_BJ + (hidden > 3e38).astype(jnp.int32)[:, None]


def read_on(
  read: Callable[..., Output], tokens_BC: Array, cache: Cache, num_B: Array
) -> tuple[Cache, Output]:
  """Reads tokens that go on behind a cache, and commits the first of them.

  Args:
    read: `read(tokens, positions, cache, block, visible, logits_at=...)`, a
      model's `apply` with its parameters; it is asked for no logits.
    tokens_BC: the tokens at `cache.length` and after.
    cache: what is held.
    num_B: how many of them to commit, `<= C`.

  Returns:
    (the cache after them, what the model returned).
  """
  B, C = tokens_BC.shape
  offsets = jnp.broadcast_to(jnp.arange(C)[None], (B, C))
  visible = jnp.tril(jnp.ones((C, C), bool))[None]
  output = read(
    tokens_BC,
    cache.length[:, None] + offsets,
    cache,
    empty_block(cache, C),
    jnp.broadcast_to(visible, (B, C, C)),
    logits_at=jnp.zeros((B, 0), jnp.int32),
  )
  assert output.block is not None
  path = after_pass(offsets, output.hidden)
  return commit(cache, output.block, path, num_B), output


def commit(cache: Cache, block: Block, path_BJ: Array, num_B: Array) -> Cache:
  """Writes block nodes `path[:, :num]` behind the cache: the only writer.

  For length 5 and path [0, 2, 5], num 3: nodes 0, 2, 5 go to positions 5, 6,
  7 and the length becomes 8. In a ring of 2 slots only 6 and 7 are written.

  Args:
    cache: what the block was read with.
    block: keys and values of the nodes.
    path_BJ: `[B, J]` int32 node indices; entries at or past `num` are ignored.
    num_B: `[B]` int32 nodes to keep, in `[0, J]`; the caller keeps
      `length + num <= S`.

  Returns:
    Cache of the same shapes. Slots that hold no position below the new length
    are junk.
  """
  J = path_BJ.shape[1]
  j = jnp.arange(J)[None]
  live = j < num_B[:, None]
  source = jnp.where(live, path_BJ, 0)
  position = cache.length[:, None] + j

  def put(slots_BGRE, nodes_BNGE):
    R = slots_BGRE.shape[2]
    keep = live & (j >= num_B[:, None] - R)
    target = jnp.where(keep, position % R, R)  # R: dropped

    def row(slots_GRE, nodes_NGE, source_J, target_J):
      values = jnp.swapaxes(nodes_NGE[source_J], 0, 1)
      return slots_GRE.at[:, target_J].set(values, mode="drop")

    return jax.vmap(row)(slots_BGRE, nodes_BNGE, source, target)

  def write(old, new):
    return jax.vmap(put)(old, new) if old.ndim == 5 else put(old, new)

  return dataclasses.replace(
    cache,
    k=tuple(map(write, cache.k, block.k)),
    v=tuple(map(write, cache.v, block.v)),
    length=cache.length + num_B,
  )
