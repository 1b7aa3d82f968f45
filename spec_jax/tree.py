"""Shapes of draft trees, as numpy: built once, closed over by a drafter."""

from collections.abc import Sequence

import numpy as np

from spec_jax.base import Tree

# Nodes a tree may have: what a row sees is a table of nodes by nodes.
MAX_NODES = 1024


def check_size(num_nodes: int) -> None:
  """Checks a number of nodes, the root included.

  Raises:
    ValueError: if a tree may not have so many.
  """
  if num_nodes > MAX_NODES:
    raise ValueError(
      f"a draft tree has at most {MAX_NODES} nodes, got {num_nodes}"
    )


def from_parents(parents: Sequence[int]) -> Tree:
  """Builds a tree from its parent list.

  `[-1, 0, 0, 1]`: a root, its children 1 and 2, and node 3 under node 1.

  Args:
    parents: `parents[0] = -1`; `0 <= parents[i] < i`, breadth first.

  Raises:
    ValueError: if the list is not such a tree.
  """
  check_size(len(parents))
  ids = [int(i) for i in parents]
  if not ids or ids[0] != -1:
    raise ValueError(f"parents must be a list that starts with -1: {parents}")
  if not all(0 <= parent < i for i, parent in enumerate(ids[1:], 1)):
    raise ValueError(f"a parent must come before its child: {parents}")
  p, n = np.asarray(ids, np.int32), len(ids)
  depths = np.zeros(n, np.int32)
  visible = np.eye(n, dtype=bool)
  for i in range(1, n):
    depths[i] = depths[p[i]] + 1
    visible[i] |= visible[p[i]]
  if (np.diff(depths) < 0).any():
    raise ValueError(f"nodes must be listed level by level: {parents}")
  return Tree(p, depths, visible)


def chain(depth: int) -> Tree:
  """Builds a path of `depth` nodes below the root.

  Raises:
    ValueError: if `depth < 0`.
  """
  if depth < 0:
    raise ValueError(f"depth must be at least 0, got {depth}")
  check_size(depth + 1)
  return from_parents(range(-1, depth))


def branching(widths: Sequence[int]) -> Tree:
  """Builds a tree in which every node at depth `d` has `widths[d]` children.

  `[2, 1]`: parents `[-1, 0, 0, 1, 2]`.

  Raises:
    ValueError: if a width is below 1.
  """
  if any(w < 1 for w in widths):
    raise ValueError(f"widths must be at least 1, got {list(widths)}")
  parents, level = [-1], [0]
  for width in widths:
    check_size(len(parents) + len(level) * width)
    children = [node for node in level for _ in range(width)]
    level = list(range(len(parents), len(parents) + len(children)))
    parents += children
  return from_parents(parents)


def from_paths(paths: Sequence[Sequence[int]]) -> Tree:
  """Builds a tree from paths of child ranks, the way Medusa writes one.

  `[(0,), (1,), (0, 0)]`: the root's best and second-best child, and the best
  child of the first. Prefixes that are not listed are added.

  Reference: Cai et al. 2024 (Medusa), section 2.1.2.

  Raises:
    ValueError: if a rank is negative, or a sibling of lower rank is missing
      (siblings are drawn in order, so rank 1 needs rank 0).
  """
  nodes = {tuple(p[:i]) for p in paths for i in range(1, len(p) + 1)}
  order = sorted(nodes, key=lambda path: (len(path), path))
  index: dict[tuple[int, ...], int] = {(): 0}
  parents = [-1]
  for path in order:
    rank = path[-1]
    if rank < 0:
      raise ValueError(f"ranks must be at least 0, got path {path}")
    if rank > 0 and (*path[:-1], rank - 1) not in nodes:
      raise ValueError(f"path {path} needs its sibling of rank {rank - 1}")
    index[path] = len(parents)
    parents.append(index[path[:-1]])
  return from_parents(parents)


def ranks(tree: Tree) -> np.ndarray:
  """Returns `[N]` int32: how many earlier siblings a node has."""
  out = np.zeros(tree.num_nodes, np.int32)
  for i in range(1, tree.num_nodes):
    out[i] = (tree.parents[1:i] == tree.parents[i]).sum()
  return out


def check_children(tree: Tree, vocab_size: int) -> None:
  """Checks that no node has more children than there are tokens.

  Raises:
    ValueError: if one has.
  """
  most = 1 + int(ranks(tree).max())
  if most > vocab_size:
    raise ValueError(
      f"a node of the tree has {most} children, but there are {vocab_size} "
      f"tokens"
    )
