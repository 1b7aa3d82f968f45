"""Trees that grow where the draft is most sure, row by row.

A node's value is the product of the draft's probabilities along its path. At
each level the `width` nodes of most value are read and given their `width`
most probable children; of all candidates the `N - 1` of most value are kept.
Value never rises along a path and ties go to the earlier candidate, so a kept
node's parent is kept.

Reference: Li et al. 2024, "EAGLE-2", sections 4.1 and 4.2.
"""

from collections.abc import Callable

import flax.struct
from jax import lax
import jax.numpy as jnp

from spec_jax.base import Array, PyTree
from spec_jax.sampling import largest


@flax.struct.dataclass
class Level:
  """The nodes to be read at one level; read node `r = (d - 1) * W + w`.

  Attributes:
    depth: int32 scalar `d`, 1 below the root.
    start: int32 scalar, the level's first read node.
    tokens: `[B, W]` int32.
    parents: `[B, W]` int32, their parents as read nodes, -1 for the root.
    visible: `[B, W, R]` bool, which of all `R = (K - 1) * W` read nodes are
      the node or its ancestors.
    read_tokens: `[B, R]` int32, the tokens of what is read, this level
      included.
  """

  depth: Array
  start: Array
  tokens: Array
  parents: Array
  visible: Array
  read_tokens: Array


@flax.struct.dataclass
class Grown:
  """A tree for each row, breadth first; what is left over hangs at the root.

  Attributes:
    tokens: `[B, N - 1]` int32 of the nodes below the root; 0 left over.
    parents: `[B, N]` int32, -1 for the root.
    kept: `[B, N]` bool, nodes that are candidates; False for the root.
    read: `[B, N]` int32, which read node it is, -1 if it was not read.
  """

  tokens: Array
  parents: Array
  kept: Array
  read: Array


def num_read(depth: int, width: int) -> int:
  """Returns `R`, the nodes read below the root at most."""
  return (depth - 1) * width


def best_first(
  root_BV: Array,
  expand: Callable[[Level, PyTree], tuple[Array, PyTree]],
  carry: PyTree,
  max_depth: Array,
  *,
  num_nodes: int,
  depth: int,
  width: int,
) -> tuple[Grown, PyTree]:
  """Grows the trees; a level is read only while it can change one.

  Args:
    root_BV: `[B, V]` float32 log-probabilities after the root; -inf for
      tokens that must not be proposed.
    expand: `expand(level, carry) -> (log-probabilities [B, W, V], carry)`,
      reads a level's nodes.
    carry: what `expand` carries from level to level.
    max_depth: `[B]` int32, the deepest node of each row; 0 = none.
    num_nodes: `N`, root included.
    depth: `K`, at least 1.
    width: `W`, nodes read a level and children a node, at most `V`.

  Returns:
    (Grown, carry).
  """
  B = root_BV.shape[0]
  K, W = depth, width
  M, R = K * W * W, num_read(depth, width)
  rows = jnp.arange(B)[:, None]

  def children(log_law, value_BW):
    """Returns the `W * W` children of a level: tokens and values."""
    n = value_BW.shape[1]
    flat = log_law.reshape(B * n, -1)
    token = largest(flat, W)
    best = jnp.take_along_axis(flat, token, 1)
    best = jnp.minimum(best, 0).reshape(B, n, W) + value_BW[:, :, None]
    return token.reshape(B, n * W), best.reshape(B, n * W)

  # Candidates by level, `W * W` places each; the root has `W` children.
  tokens, value = children(root_BV[:, None], jnp.zeros((B, 1)))
  value = jnp.where(max_depth[:, None] > 0, value, -jnp.inf)
  tokens = jnp.zeros((B, M), jnp.int32).at[:, :W].set(tokens)
  value = jnp.full((B, M), -jnp.inf).at[:, :W].set(value)
  parents = jnp.full((B, M), -1, jnp.int32)
  read = jnp.full((B, M), -1, jnp.int32)
  seen = jnp.zeros((B, R, R), bool)
  read_tokens = jnp.zeros((B, R), jnp.int32)

  def choose(value, d):
    """Returns the nodes of level `d` to be read, and which can matter.

    A child of a node that is not above the last one kept would not be kept.
    """
    begin = (d - 1) * W * W
    level = lax.dynamic_slice_in_dim(value, begin, W * W, 1)
    index = jnp.sort(lax.top_k(level, W)[1], 1)
    best = jnp.take_along_axis(level, index, 1)
    last = lax.top_k(value, num_nodes - 1)[0][:, -1:]
    return index + begin, (best > last) & (max_depth[:, None] > d)

  def goes_on(state):
    d, chosen = state[0], state[1]
    return (d < K) & chosen[1].any()

  def level(state):
    d, (nodes, alive), tokens, value, parents, read, seen, texts, carry = state
    start = (d - 1) * W
    here = start + jnp.arange(W)[None]
    above = jnp.take_along_axis(parents, nodes, 1)
    above_read = jnp.take_along_axis(read, jnp.maximum(above, 0), 1)
    above_read = jnp.where(above >= 0, above_read, -1)
    visible = seen[rows, jnp.maximum(above_read, 0)]
    visible = visible & (above_read >= 0)[:, :, None]
    visible = visible | (jnp.arange(R)[None, None] == here[:, :, None])
    chosen = jnp.take_along_axis(tokens, nodes, 1)
    texts = lax.dynamic_update_slice_in_dim(texts, chosen, start, 1)
    seen = lax.dynamic_update_slice_in_dim(seen, visible, start, 1)
    read = read.at[rows, nodes].set(jnp.where(alive, here, -1))
    log_law, carry = expand(
      Level(d, start, chosen, above_read, visible, texts), carry
    )
    own = jnp.take_along_axis(value, nodes, 1)
    own = jnp.where(alive, own, -jnp.inf)
    new_tokens, new_value = children(log_law, own)
    put = lax.dynamic_update_slice_in_dim
    tokens = put(tokens, new_tokens, d * W * W, 1)
    value = put(value, new_value, d * W * W, 1)
    parents = put(parents, jnp.repeat(nodes, W, 1), d * W * W, 1)
    d = d + 1
    after = choose(value, d)
    return d, after, tokens, value, parents, read, seen, texts, carry

  state = (
    jnp.int32(1),
    choose(value, jnp.int32(1)),
    tokens,
    value,
    parents,
    read,
    seen,
    read_tokens,
    carry,
  )
  if K > 1:
    state = lax.while_loop(goes_on, level, state)
  _, _, tokens, value, parents, read, _, _, carry = state
  return _keep(tokens, value, parents, read, num_nodes), carry


def _keep(tokens, value, parents, read, num_nodes) -> Grown:
  """Keeps the candidates of most value, in the order of their places."""
  B, M = value.shape
  n = num_nodes - 1
  best, index = lax.top_k(value, n)
  index = jnp.sort(jnp.where(best > -jnp.inf, index, M), 1)
  index = jnp.pad(index, ((0, 0), (0, num_nodes - 1 - n)), constant_values=M)
  kept = index < M
  at = jnp.minimum(index, M - 1)
  above = jnp.take_along_axis(parents, at, 1)
  same = above[:, :, None] == index[:, None, :]
  node = jnp.where(above >= 0, 1 + jnp.argmax(same, 2), 0)
  root = jnp.zeros((B, 1), jnp.int32)
  which = jnp.where(kept, jnp.take_along_axis(read, at, 1), -1)
  return Grown(
    tokens=jnp.where(kept, jnp.take_along_axis(tokens, at, 1), 0),
    parents=jnp.concatenate(
      [root - 1, jnp.where(kept, node, 0).astype(jnp.int32)], 1
    ),
    kept=jnp.concatenate([root > 0, kept], 1),
    read=jnp.concatenate([root - 1, which], 1),
  )
