"""What several drafters need: the root token, trees as arrays, a layout."""

from typing import NamedTuple

from jax import lax
import jax.numpy as jnp
import numpy as np

from spec_jax.base import Array, Context, Draft, Drafter, Model, Tree


def root_token(context: Context) -> Array:
  """Returns `[B, 1]`, the last committed token of each row."""
  return jnp.take_along_axis(context.tokens, (context.length - 1)[:, None], 1)


def wanted(draft: Draft) -> Array:
  """Returns `[B, N]` bool, nodes that the target must read besides the root."""
  if draft.read is None:
    return draft.acceptable
  return draft.acceptable | draft.read


def static_tree(tree: Tree, batch: int) -> dict[str, Array]:
  """Returns the fields of `Draft` that a static tree gives `batch` rows."""
  return {
    name: jnp.broadcast_to(jnp.asarray(x)[None], (batch, *x.shape))
    for name, x in tree._asdict().items()
  }


def dynamic_tree(parents_BN: Array) -> dict[str, Array]:
  """Returns the fields of `Draft` for trees that differ between rows.

  Args:
    parents_BN: -1 for the root, `parents[i] < i`.

  Returns:
    `parents [B, N]`, `depths [B, N]` and `visible [B, N, N]`, as a static tree
    has them.
  """
  B, N = parents_BN.shape
  rows = jnp.arange(B)

  def add(i, carry):
    depths, visible = carry
    parent = jnp.maximum(parents_BN[:, i], 0)
    return (
      depths.at[:, i].set(depths[rows, parent] + 1),
      visible.at[:, i].set(visible[:, i] | visible[rows, parent]),
    )

  depths = jnp.zeros((B, N), jnp.int32)
  visible = jnp.broadcast_to(jnp.eye(N, dtype=bool)[None], (B, N, N))
  depths, visible = lax.fori_loop(1, N, add, (depths, visible))
  return {"parents": parents_BN, "depths": depths, "visible": visible}


def shown_to(drafter: Drafter, model: Model) -> Model:
  """Returns the target whose `Output.hidden` is what a drafter looks at.

  Raises:
    ValueError: if it is to show layers and has none.
  """
  if not drafter.taps:
    return model
  if model.tap is None:
    raise ValueError("the drafter looks at layers, this target shows none")
  return model.tap(drafter.taps)


def check_fit(
  name: str, drafter: Drafter, *, sampled: bool, vocabulary: str | None
) -> None:
  """Checks that a drafter goes with a model's tokenizer and the settings.

  Args:
    name: of the drafter.
    drafter: as built.
    sampled: whether a prompt is sampled at a temperature above 0.
    vocabulary: hash of the target's tokenizer, None if it has none.

  Raises:
    ValueError: if its tables were made with another tokenizer, or it is for
      greedy decoding only and a prompt is sampled.
  """
  if drafter.vocabulary not in (None, vocabulary):
    raise ValueError(
      f"the index of drafter {name!r} was made with another tokenizer than the "
      f"model's: make it again with this model"
    )
  if drafter.greedy_only and sampled:
    raise ValueError(
      f"drafter {name!r} is for greedy decoding only: set temperature 0"
    )


# Tokens a draft model reads at the start of a step: the root and one pending
# token.
CATCH_UP = 2


class TreePlan(NamedTuple):
  """Which nodes the draft reads at each level, and where they lie.

  Level 0 is the root, read with the pending tokens. `W` is the most nodes
  read at a later level, `R` the most children of a node.

  Attributes:
    read: `[K, W]` nodes with children by level, -1 padded; row 0 is unused.
    start: `[K]` block index of each level's first node.
    children: `[K, W, R]` their children by rank, -1 padded.
    block_index: `[N]` where a node lies in the block, -1 if it is not read.
    block_size: nodes of the block, the padding of the last level included.
  """

  read: np.ndarray
  start: np.ndarray
  children: np.ndarray
  block_index: np.ndarray
  block_size: int


def plan_tree(tree: Tree, lead: int = CATCH_UP) -> TreePlan:
  """Lays out how a draft model reads a tree, level by level.

  Args:
    tree: the tree.
    lead: first nodes of the block; the root is the last of them.
  """
  kids = [np.flatnonzero(tree.parents == i) for i in range(tree.num_nodes)]
  levels = [
    [i for i in np.flatnonzero(tree.depths == d) if len(kids[i])]
    for d in range(tree.depth)
  ]
  W = max([len(level) for level in levels[1:]], default=1)
  R = max(len(k) for k in kids)
  read = np.full((tree.depth, W), -1, np.int32)
  start = np.zeros(tree.depth, np.int32)
  children = np.full((tree.depth, W, R), -1, np.int32)
  block_index = np.full(tree.num_nodes, -1, np.int32)
  block_index[0] = lead - 1
  end = lead
  for d, level in enumerate(levels):
    if d:
      start[d] = end
      read[d, : len(level)] = level
      block_index[level] = end + np.arange(len(level))
      end += len(level)
    for w, node in enumerate(level):
      children[d, w, : len(kids[node])] = kids[node]
  size = max(end, int(start.max()) + W if tree.depth > 1 else end)
  return TreePlan(read, start, children, block_index, size)
