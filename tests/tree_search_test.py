"""Best trees: published values, brute force, and what is drafted with them."""

import functools
import itertools

import pytest

from spec_jax import drafters, tree as trees
from spec_jax.tree_search import (
  best_size,
  greedy_tree,
  optimal_tree,
  tree_value,
)
from tests import fakes

RATES = (0.6, 0.2, 0.1, 0.05)
# Values of Sequoia's trees with these rates, by nodes (papers.md, 9.4).
VALUES = {
  1: 1,
  2: 1.6,
  3: 1.96,
  4: 2.176,
  5: 2.376,
  8: 2.7456,
  16: 3.3094,
  32: 3.8685,
  64: 4.4201,
}


@pytest.mark.parametrize("n", VALUES)
def test_the_best_tree_of_any_depth_has_the_published_value(n):
  """By the programme, best first, and as the sum over the tree's nodes."""
  tree, value = optimal_tree(RATES, n)
  greedy, greedy_value = greedy_tree([RATES] * 12, n)
  assert value == pytest.approx(VALUES[n], abs=5e-5)
  assert greedy_value == pytest.approx(value, abs=1e-12)
  for found in (tree, greedy):
    assert found.num_nodes == n
    assert tree_value(found, RATES) == pytest.approx(value, abs=1e-12)


def test_four_levels_are_a_root_and_three_below_it():
  """The published values for 4 levels; with 4 below the root there is more."""
  for n, value in ((8, 2.716), (16, 3.178), (32, 3.524)):
    tree, found = optimal_tree(RATES, n, max_depth=3)
    assert found == pytest.approx(value, abs=5e-4) and tree.depth == 3
    assert tree_value(tree, RATES) == pytest.approx(found, abs=1e-12)
    assert optimal_tree(RATES, n, max_depth=4)[1] > value + 0.02


def test_chains_have_their_published_values():
  """Chains of 4, 8 and 16 nodes, the root included."""
  for n, value in ((4, 2.176), (8, 2.458), (16, 2.499)):
    found = tree_value(trees.chain(n - 1), RATES)
    assert found == pytest.approx(value, abs=6e-4)
    assert optimal_tree(RATES[:1], n)[1] == pytest.approx(found, abs=1e-12)


@functools.cache
def every_tree(n):
  """Returns all shapes of n nodes: the root's subtrees in order, by paths."""

  def forests(m, rank):
    if m == 0:
      yield ()
    for first in range(1, m + 1):
      for a, b in itertools.product(
        subtrees(first), forests(m - first, rank + 1)
      ):
        yield (*((rank, *path) for path in a), *b)

  @functools.cache
  def subtrees(m):
    return [((), *forest) for forest in forests(m - 1, 0)]

  return [trees.from_paths(paths) for paths in subtrees(n)]


@pytest.mark.parametrize("rates", [RATES, (0.3, 0.3, 0.3), (0.1, 0.5, 0.0)])
@pytest.mark.parametrize("max_depth", [None, 2])
def test_no_tree_is_worth_more(rates, max_depth):
  """All 132 shapes of up to 7 nodes, rates that do not fall included."""
  assert [len(every_tree(n)) for n in range(1, 8)] == [1, 1, 2, 5, 14, 42, 132]
  for n in range(1, 8):
    best = max(
      tree_value(t, rates)
      for t in every_tree(n)
      if t.depth <= (max_depth or n) and trees.ranks(t).max() < len(rates)
    )
    tree, value = optimal_tree(rates, n, max_depth)
    assert value == pytest.approx(best, abs=1e-12)
    assert tree_value(tree, rates) == pytest.approx(best, abs=1e-12)


def test_a_greedy_tree_follows_a_table_by_depth():
  """Six nodes by hand: products .5, .4, .3, .24, .16."""
  table = [[0.5, 0.3], [0.8, 0.1], [0.4, 0.2]]
  tree, value = greedy_tree(table, 6)
  # Children .5 and .3; below the first .4, then .16; below the second .24.
  assert tree.parents.tolist() == [-1, 0, 0, 1, 2, 3]
  assert value == pytest.approx(1 + 0.5 + 0.3 + 0.4 + 0.24 + 0.16)
  assert tree_value(tree, table) == pytest.approx(value)
  # The best of its size, by brute force.
  fits = [t for t in every_tree(6) if t.depth <= 3 and trees.ranks(t).max() < 2]
  assert max(tree_value(t, table) for t in fits) == pytest.approx(value)


def test_a_programme_of_128_nodes_is_quick_enough_to_be_run():
  """The largest size, deep and wide: about a second."""
  rates = (0.9, *[0.005] * 15)
  tree, value = optimal_tree(rates, 128)
  assert tree.num_nodes == 128
  assert value == pytest.approx(greedy_tree([rates] * 127, 128)[1], abs=1e-9)


def test_the_best_size_is_the_best_of_all():
  """Each size and depth tried by hand, with costs that bend at 8 nodes."""
  cost = {1: 1.0, 2: 1.02, 4: 1.05, 8: 1.1, 16: 1.9, 32: 3.6}
  found = best_size(RATES, cost, 0.05)
  rates = {
    (n, d): optimal_tree(RATES, n, d)[1] / (d * 0.05 + t)
    for n, t in cost.items()
    for d in range(8)
    if n <= sum(4**level for level in range(d + 1))
  }
  n, d = max(rates, key=rates.__getitem__)
  assert (found.tree.num_nodes, found.tree.depth) == (n, d) == (8, 3)
  assert found.rate == pytest.approx(rates[n, d])
  assert found.value == pytest.approx(tree_value(found.tree, RATES))
  # A shallow tree if the draft is slow, none if it is too slow to pay.
  assert best_size(RATES, cost, 0.6).tree.depth == 1
  assert best_size(RATES, cost, 2.0).tree.num_nodes == 1
  # Costs as a function, sizes and depths bounded.
  bound = best_size(RATES, lambda n: 1.0, 0.0, max_nodes=20, max_depth=2)
  assert (bound.tree.num_nodes, bound.tree.depth) == (20, 2)


@pytest.mark.parametrize(
  ("call", "words"),
  [
    (lambda: optimal_tree([], 4), "must have 1 axes"),
    (lambda: optimal_tree([[0.5]], 4), "must have 1 axes"),
    (lambda: optimal_tree([1.2], 4), r"must be in \[0, 1\]"),
    (lambda: optimal_tree([float("nan")], 4), r"must be in \[0, 1\]"),
    (lambda: optimal_tree([0.6, 0.8], 4), "at most 1, got 1.4"),
    (lambda: optimal_tree([0.5], 0), "num_nodes must be at least 1, got 0"),
    (lambda: optimal_tree([0.5], 2, -1), "max_depth must be at least 0"),
    (lambda: optimal_tree([0.5, 0.2], 8, 2), "no tree of 8 nodes is 2 deep"),
    (lambda: greedy_tree([[0.5, 0.2]], 4), "no tree of 4 nodes is 1 deep"),
    (lambda: greedy_tree([0.5], 2), "must have 2 axes"),
    (lambda: tree_value(trees.chain(1), [2.0]), r"must be in \[0, 1\]"),
    (lambda: best_size([0.5], {2: 1.0}, 0.1), "cost of 1 node must be given"),
    (lambda: best_size([0.5], {1: 0.0}, 0.1), "costs must be above 0"),
    (lambda: best_size([0.5], {1: 1.0}, -1), "costs must be above 0"),
  ],
)
def test_what_makes_no_tree_is_refused(call, words):
  """The message says what was given."""
  with pytest.raises(ValueError, match=words):
    call()


@pytest.mark.parametrize("by", ["tree", "parents"])
def test_a_found_tree_is_drafted(by):
  """`vanilla` takes it as the docstring says: as it is, or its parents."""
  tree, _ = optimal_tree(RATES, 8)
  parents = tuple(tree.parents.tolist())
  options = {"tree": tree} if by == "tree" else {"parents": parents}
  model, params = fakes.tables()
  drafter = drafters.build("vanilla", model, model, slots=32, **options)
  assert (drafter.num_nodes, drafter.depth) == (8, tree.depth)
  rig = fakes.Rig(
    (model, params),
    drafter,
    draft=(model, fakes.noisy(params)),
    slots=32,
    use=fakes.GREEDY,
  )
  plain = fakes.Rig((model, params), slots=32, use=fakes.GREEDY)
  settings = fakes.Settings(temperature=0, max_new_tokens=12)
  state = rig.run([[1]], settings)
  assert fakes.outputs(state) == plain.texts([[1]], settings)
  assert int(state.tally.num_steps[0]) < 12
