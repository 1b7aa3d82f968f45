"""Which tree to draft: the best shape for an acceptance vector, on the host.

The value of a tree is the number of tokens a step emits on average, the bonus
token included: the sum over its nodes of the product of acceptances along
their path (1 for the root). An acceptance is the chance that the child of a
rank is the one accepted, so those of one node add up to at most 1.

Any drafter with the option `tree` drafts such a tree; one with `parents` takes
`tree.parents`:

    tree, value = optimal_tree([0.6, 0.2, 0.1], num_nodes=16)
    spec_jax.generate(..., drafter="vanilla", options={"tree": tree})

Reference: Chen et al. 2024 (Sequoia), section 3 (`optimal_tree`, `best_size`);
  Cai et al. 2024 (Medusa), section 2.3.3 (`greedy_tree`).
"""

from collections.abc import Callable, Mapping, Sequence
import heapq
from typing import NamedTuple

import numpy as np

from spec_jax import tree as trees
from spec_jax.base import Tree

# What sums of measured rates may be above 1 by rounding.
_ROUNDING = 1e-6


def _check_rates(name: str, rates: np.ndarray, ndim: int) -> None:
  if rates.ndim != ndim or rates.size == 0:
    raise ValueError(f"{name} must have {ndim} axes and entries: {rates}")
  if not ((rates >= 0) & (rates <= 1)).all():
    raise ValueError(f"{name} must be in [0, 1], got {rates}")
  most = rates.sum(-1).max()
  if most > 1 + _ROUNDING:
    raise ValueError(
      f"{name} of one node's children must add up to at most 1, got {most}: "
      "give each rank's own, not of all ranks up to it"
    )


def _check_size(num_nodes: int) -> None:
  if num_nodes < 1:
    raise ValueError(f"num_nodes must be at least 1, got {num_nodes}")


class _Program:
  """Sequoia's dynamic programme, filled level by level.

  `best[l][m]` is the most a tree of m nodes no deeper than l is worth, -inf if
  there is none. `forest[b]` holds, for one l, the most that a root with
  children of ranks below b is worth; its next child, of y nodes, adds `rate[b]
  best[l - 1][y]`.

  Attributes:
    best: `[l][m]`, m up to `num_nodes`.
    took: `[l][b][m]`, nodes in the subtree of the child of rank b - 1 where
      that root has b children; 0 where there is no such tree.
    width: `[l][m]`, children of the root of the best tree.
  """

  def __init__(self, rates: np.ndarray, num_nodes: int, max_depth: int | None):
    n = num_nodes
    alone = np.full(n + 1, -np.inf)
    alone[1] = 1.0
    self.best = [alone]
    self.took: list[list[np.ndarray]] = [[]]
    self.width = [np.zeros(n + 1, int)]
    for _ in range(n - 1 if max_depth is None else min(max_depth, n - 1)):
      forest, took = [alone], [np.zeros(n + 1, int)]
      for rate in rates:
        child = self.best[-1].copy()
        child[np.isfinite(child)] *= rate  # 0 * -inf would be NaN
        value, size = _add_child(forest[-1], child)
        forest.append(value)
        took.append(size)
      table = np.stack(forest)
      best = table.max(0)
      if np.array_equal(best, self.best[-1]):
        break  # another level changes nothing
      self.best.append(best)
      self.took.append(took)
      self.width.append(table.argmax(0))

  def tree(self, depth: int, num_nodes: int) -> Tree:
    """Returns the best tree of so many nodes no deeper than `depth`."""
    paths = []
    todo: list[tuple[tuple[int, ...], int, int]] = [((), depth, num_nodes)]
    while todo:
      path, depth, m = todo.pop()
      paths.append(path)
      for b in range(int(self.width[depth][m]), 0, -1):
        size = int(self.took[depth][b][m])
        todo.append(((*path, b - 1), depth - 1, size))
        m -= size
    return trees.from_paths(paths)


def _add_child(before: np.ndarray, child: np.ndarray):
  """Returns the most of `before[m - y] + child[y]` over y, and that y."""
  n = len(before) - 1
  value, size = np.full(n + 1, -np.inf), np.zeros(n + 1, int)
  for m in range(2, n + 1):
    sums = before[m - 1 : 0 : -1] + child[1:m]
    y = int(np.argmax(sums))
    value[m], size[m] = sums[y], y + 1
  size[np.isneginf(value)] = 0
  return value, size


def optimal_tree(
  acceptance: Sequence[float], num_nodes: int, max_depth: int | None = None
) -> tuple[Tree, float]:
  """Finds the tree of most value, by Sequoia's dynamic programme.

  With (.6, .2, .1, .05): 2 nodes are worth 1.6 (the root and its first child),
  3 are worth 1.96 (a chain), 4 2.176, 5 2.376 (a second child of the root).

  Args:
    acceptance: by rank, the chance that a node's child of that rank is the one
      accepted, the same at every depth.
    num_nodes: root included.
    max_depth: levels below the root; None = any.

  Returns:
    (tree, its value).

  Raises:
    ValueError: if an argument is out of range, or no tree is that large.
  """
  rates = np.asarray(acceptance, float)
  _check_rates("acceptance", rates, 1)
  _check_size(num_nodes)
  if max_depth is not None and max_depth < 0:
    raise ValueError(f"max_depth must be at least 0, got {max_depth}")
  program = _Program(rates, num_nodes, max_depth)
  value = float(program.best[-1][num_nodes])
  if value == -np.inf:
    raise ValueError(
      f"no tree of {num_nodes} nodes is {max_depth} deep at most, with "
      f"{len(rates)} children a node"
    )
  return program.tree(len(program.best) - 1, num_nodes), value


def greedy_tree(
  accuracies: Sequence[Sequence[float]], num_nodes: int
) -> tuple[Tree, float]:
  """Adds the node of the largest product along its path, again and again.

  A node can be added if its parent and its earlier siblings are there. Where
  accuracies fall with the rank, the tree is the best of its size.

  Args:
    accuracies: `[depth, rank]`, how often the guess of that rank is right at
      that depth (of Medusa, by head).
    num_nodes: root included.

  Returns:
    (tree, its value).

  Raises:
    ValueError: if an argument is out of range, or no tree is that large.
  """
  rates = np.asarray(accuracies, float)
  _check_rates("accuracies", rates, 2)
  _check_size(num_nodes)
  depth, ranks = rates.shape
  paths: list[tuple[int, ...]] = [()]
  value = 1.0
  # (-product, depth, path, product of the parent), so the largest comes first;
  # of equals the shallowest, then the lowest rank.
  frontier: list[tuple[float, int, tuple[int, ...], float]]
  frontier = [(-rates[0, 0], 1, (0,), 1.0)]
  while len(paths) < num_nodes:
    if not frontier:
      raise ValueError(
        f"no tree of {num_nodes} nodes is {depth} deep at most, with {ranks} "
        "children a node"
      )
    product, level, path, above = heapq.heappop(frontier)
    paths.append(path)
    value -= product
    if level < depth:
      child = product * rates[level, 0], level + 1, (*path, 0), -product
      heapq.heappush(frontier, child)
    if (rank := path[-1] + 1) < ranks:
      chance = -above * rates[level - 1, rank]
      heapq.heappush(frontier, (chance, level, (*path[:-1], rank), above))
  return trees.from_paths(paths), float(value)


def tree_value(
  tree: Tree, acceptance: Sequence[float] | Sequence[Sequence[float]]
) -> float:
  """Returns the tokens a step emits on average with this tree.

  Args:
    tree: any.
    acceptance: by rank, or `[depth, rank]`; beyond its end 0.

  Raises:
    ValueError: if a rate is out of range.
  """
  rates = np.asarray(acceptance, float)
  if rates.ndim != 2:
    _check_rates("acceptance", rates, 1)
    rates = np.tile(rates, (max(1, tree.depth), 1))
  _check_rates("acceptance", rates, 2)
  ranks = trees.ranks(tree)
  product = np.ones(tree.num_nodes)
  for i in range(1, tree.num_nodes):
    level, rank = tree.depths[i] - 1, ranks[i]
    known = level < rates.shape[0] and rank < rates.shape[1]
    rate = rates[level, rank] if known else 0.0
    product[i] = product[tree.parents[i]] * rate
  return float(product.sum())


class Size(NamedTuple):
  """A tree for given costs.

  Attributes:
    tree: the tree.
    value: tokens a step emits on average.
    rate: tokens by unit of time.
  """

  tree: Tree
  value: float
  rate: float


def best_size(
  acceptance: Sequence[float],
  target_cost: Mapping[int, float] | Callable[[int], float],
  draft_cost: float,
  *,
  max_nodes: int = 128,
  max_depth: int | None = None,
) -> Size:
  """Finds the tree of most tokens by time: `F(n, d) / (d c + t(n))`.

  The root alone, plain decoding, is among what is compared, so nothing slower
  than that is returned.

  Args:
    acceptance: see `optimal_tree`.
    target_cost: t, seconds of a pass of the target over n nodes as measured: a
      mapping of the sizes that were measured, 1 among them, or a function.
    draft_cost: c, seconds of the draft for one level.
    max_nodes: most nodes tried, root included.
    max_depth: most levels tried; None = any.

  Returns:
    Size.

  Raises:
    ValueError: if a cost is not above 0 (c: not at least 0), or t(1) is not
      given, or an argument is out of range.
  """
  rates = np.asarray(acceptance, float)
  _check_rates("acceptance", rates, 1)
  _check_size(max_nodes)
  if max_depth is not None and max_depth < 0:
    raise ValueError(f"max_depth must be at least 0, got {max_depth}")
  if callable(target_cost):
    costs = {n: target_cost(n) for n in range(1, max_nodes + 1)}
  else:
    costs = {n: t for n, t in target_cost.items() if n <= max_nodes}
  if 1 not in costs:
    raise ValueError(f"the cost of 1 node must be given, got {sorted(costs)}")
  if not all(t > 0 for t in costs.values()) or not draft_cost >= 0:
    raise ValueError(
      f"costs must be above 0, a level's at least 0, got {dict(costs)} and "
      f"{draft_cost}"
    )
  program = _Program(rates, max(costs), max_depth)
  # Of equal rates the shallowest, then the smallest.
  _, depth, n = max(
    (best[n] / (depth * draft_cost + t), -depth, -n)
    for depth, best in enumerate(program.best)
    for n, t in costs.items()
  )
  depth, n = -depth, -n
  value = float(program.best[depth][n])
  rate = value / (depth * draft_cost + costs[n])
  return Size(program.tree(depth, n), value, rate)
