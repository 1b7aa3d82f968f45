"""Token recycling: the target's runners-up become the next drafts.

A row keeps a table of the target's `k` best successors of each token, as it
last saw them: every pass gives them for every node it reads, accepted or not,
at no cost. A static tree is filled from the root by looking them up. The
prompt's own bigrams are put first where the table does not know better yet.

Reference: Luo et al. 2024, "Turning Trash into Treasure" (Token Recycling).
"""

from collections.abc import Sequence

from jax import lax
import jax.numpy as jnp
import numpy as np

from spec_jax import tree as trees
from spec_jax.base import DETERMINISTIC, Array, Draft, Drafter, Model
from spec_jax.drafting import root_token, static_tree
from spec_jax.sampling import largest

# Eight nodes, which a CPU reads at about the price of one: the root's 3 best
# successors, 2 of the best one, and best successors from there on.
_PARENTS = (-1, 0, 0, 0, 1, 1, 4, 6)


def merge(first: Array, second: Array) -> Array:
  """Puts the entries of `first` before those of `second`, each token once.

  `[4, -1, -1]` and `[2, 4, 7]`: `[4, 2, 7]`.

  Args:
    first: `[..., k]` int32 tokens, -1 = none.
    second: like `first`.

  Returns:
    `[..., k]` int32, the first `k` distinct tokens, then -1.
  """
  k = first.shape[-1]
  both = jnp.concatenate([first, second], -1)
  ones = (1,) * (first.ndim - 1)
  earlier = np.tril(np.ones((*ones, 2 * k, 2 * k), bool), -1)
  ranks = np.arange(k).reshape(*ones, k, 1)
  same = both[..., :, None] == both[..., None, :]
  kept = (both >= 0) & ~(same & earlier).any(-1)
  rank = jnp.cumsum(kept, -1) - 1
  here = kept[..., None, :] & (rank[..., None, :] == ranks)
  return jnp.where(here, both[..., None, :], -1).max(-1)


def add_bigrams(
  table_BVk: Array, first_BC: Array, second_BC: Array, real_BC: Array
) -> Array:
  """Puts what followed first: of several, the most recent, then the older.

  Text 5 6 5 7: the successors of 5 begin with 7, 6.

  Args:
    table_BVk: successors by token, -1 = unknown.
    first_BC: tokens in the order of the text.
    second_BC: what followed each.
    real_BC: bool, which of them count.

  Returns:
    The new table.
  """
  B, V, k = table_BVk.shape
  C = first_BC.shape[1]
  rows = jnp.arange(B)[:, None]
  later = np.triu(np.ones((1, C, C), bool), 1)
  same = (first_BC[:, :, None] == first_BC[:, None]) & real_BC[:, None]
  again = same & (second_BC[:, :, None] == second_BC[:, None]) & later
  counts = real_BC & ~again.any(-1)  # not seen once more later on
  same = same & counts[:, None]
  rank = (same & later).sum(-1)
  followed = jnp.stack(
    [
      jnp.where(same & (rank == r)[:, None], second_BC[:, None], -1).max(-1)
      for r in range(k)
    ],
    -1,
  )
  entries = merge(followed, table_BVk[rows, jnp.clip(first_BC, 0, V - 1)])
  # One writes for all that have the token in common: the order in which equal
  # indices are written is not defined.
  index = jnp.where(counts & (rank == 0), first_BC, V)
  return table_BVk.at[rows, index].set(entries, mode="drop")


def build(
  target: Model,
  draft: Model | None,
  *,
  slots: int,
  tree: Sequence[int] | None = None,
  parents: Sequence[int] | None = None,
  persistent: bool = True,
) -> Drafter:
  """Builds token recycling.

  The table holds as many successors as the widest node of the tree has
  children: `[B, V, k]` int32, 0.6 MB a row for a vocabulary of 49,152 and the
  default tree.

  A step reads the logits of all nodes that could have been accepted, as the
  paper does: the refused ones are where a text goes on that may be met again.
  That is one pass over `[N, V]` numbers for the `k` largest of each, next to
  a pass of the target over `N` tokens; in a step that drafted nothing, over
  the root's.

  Args:
    target: whose vocabulary it is.
    draft: unused.
    slots: unused.
    tree: children per node at each depth, e.g. `(3, 2, 1)`.
    parents: any other tree, see `tree.from_parents`; not together with `tree`.
      Without either 8 nodes, which suit a CPU; the paper has 80.
    persistent: whether a row's table outlives its prompt, as in the paper;
      the next prompt's bigrams are then put first. The text does not depend
      on it, the number of steps does.

  Raises:
    ValueError: if both `tree` and `parents` are given, the tree has no node
      besides the root, or a node has more children than there are tokens.
  """
  del draft, slots
  if tree is not None and parents is not None:
    raise ValueError("give tree or parents, not both")
  shape = (
    trees.branching(tree)
    if tree is not None
    else trees.from_parents(_PARENTS if parents is None else parents)
  )
  V, N, K = target.config.vocab_size, shape.num_nodes, shape.depth
  if N < 2:
    raise ValueError("the tree must have a node besides the root, got 1 node")
  trees.check_children(shape, V)
  ranks = trees.ranks(shape)
  k = 1 + int(ranks.max())
  levels = [np.flatnonzero(shape.depths == d) for d in range(1, K + 1)]

  def init(batch):
    return jnp.full((batch, V, k), -1, jnp.int32)

  def prefill(params, table, chunk, output):
    C, W = chunk.tokens.shape[1], chunk.all_tokens.shape[1]
    index = jnp.minimum(chunk.positions + 1, W - 1)
    # Up to `upto`, the last token of the prompt: that one is known too.
    after = jnp.take_along_axis(chunk.all_tokens, index, 1)
    real = jnp.arange(C)[None] < chunk.num[:, None]
    return add_bigrams(table, chunk.tokens, after, real)

  def propose(params, noise, table, context):
    B = context.length.shape[0]
    rows = jnp.arange(B)[:, None]
    tokens = root_token(context)
    known = jnp.ones((B, 1), bool)
    for level in levels:  # breadth first: parents are there already
      above = shape.parents[level]
      found = table[rows, tokens[:, above], ranks[level][None]]
      known = jnp.concatenate([known, known[:, above] & (found >= 0)], 1)
      tokens = jnp.concatenate([tokens, jnp.maximum(found, 0)], 1)
    return Draft(
      tokens=tokens,
      **static_tree(shape, B),
      law=jnp.full((B, N), DETERMINISTIC, jnp.int32),
      probs=None,
      acceptable=known.at[:, 0].set(False),
    ), table

  def update(params, table, draft, verdict, output):
    B = draft.tokens.shape[0]
    rows = jnp.arange(B)[:, None]

    def best(num):
      logits = output.logits[:, :num]
      found = largest(logits.reshape(B * num, V), k).reshape(B, num, k)
      return jnp.pad(found, ((0, 0), (0, N - num), (0, 0)))

    drafted = draft.acceptable.any()
    entries = lax.cond(drafted, lambda: best(N), lambda: best(1))
    # What was acceptable was read with its true ancestors; so was the root.
    root = (np.arange(N) == 0)[None]
    read = draft.acceptable | (root & (verdict.num_tokens > 0)[:, None])
    # A token at several nodes: the text itself counts, the latest first.
    on_path = (verdict.path[:, :, None] == np.arange(N)[None, None]).any(1)
    weight = on_path * N + np.arange(N)[None]
    same = draft.tokens[:, :, None] == draft.tokens[:, None]
    heavier = read[:, None] & (weight[:, None] > weight[:, :, None])
    writes = read & ~(same & heavier).any(-1)
    index = jnp.where(writes, draft.tokens, V)
    return table.at[rows, index].set(entries, mode="drop")

  def keep(old, new):
    return merge(new, old)

  return Drafter(
    init=init,
    prefill=prefill,
    propose=propose,
    update=update,
    num_nodes=N,
    depth=K,
    keep=keep if persistent else None,
  )
