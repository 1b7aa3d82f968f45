"""Trees: parents, depths and visibility by hand and by walking."""

from hypothesis import given, settings, strategies as st
import numpy as np
import pytest

from spec_jax import tree as trees
from tests.fakes import path_to


def test_the_worked_example_of_from_parents():
  """A root, its children 1 and 2, node 3 under node 1."""
  tree = trees.from_parents([-1, 0, 0, 1])
  assert tree.depths.tolist() == [0, 1, 1, 2]
  assert tree.visible.astype(int).tolist() == [
    [1, 0, 0, 0],
    [1, 1, 0, 0],
    [1, 0, 1, 0],
    [1, 1, 0, 1],
  ]
  assert (tree.num_nodes, tree.depth) == (4, 2)


def test_a_chain_of_none_is_the_root_alone():
  """Plain decoding's tree has one node and depth 0."""
  tree = trees.chain(0)
  assert tree.parents.tolist() == [-1]
  assert (tree.num_nodes, tree.depth) == (1, 0)


def test_a_chain_is_a_path():
  """Each node's parent is the node before it and it sees all before it."""
  tree = trees.chain(3)
  assert tree.parents.tolist() == [-1, 0, 1, 2]
  assert tree.depths.tolist() == [0, 1, 2, 3]
  assert (tree.visible == np.tri(4, dtype=bool)).all()


def test_branching_has_the_widths_product_of_nodes_at_each_depth():
  """Widths 3, 2, 1 give 1, 3, 6 and 6 nodes; children lie side by side."""
  assert trees.branching([2, 1]).parents.tolist() == [-1, 0, 0, 1, 2]
  tree = trees.branching([3, 2, 1])
  assert np.bincount(tree.depths).tolist() == [1, 3, 6, 6]
  assert tree.parents[4:10].tolist() == [1, 1, 2, 2, 3, 3]
  assert trees.branching([]).num_nodes == 1


def test_paths_of_ranks_make_a_tree_and_prefixes_are_added():
  """The docstring's three paths, and a leaf whose ancestor is not listed."""
  tree = trees.from_paths([(0,), (1,), (0, 0)])
  assert tree.parents.tolist() == [-1, 0, 0, 1]
  assert trees.from_paths([(0, 0, 0)]).parents.tolist() == [-1, 0, 1, 2]
  assert trees.from_paths([]).num_nodes == 1


def test_paths_of_all_ranks_are_a_branching():
  """Every path of ranks below the widths is the tree of these widths."""
  paths = [(a, b) for a in range(3) for b in range(2)]
  expected = trees.branching([3, 2])
  assert trees.from_paths(paths).parents.tolist() == expected.parents.tolist()


def test_ranks_count_earlier_siblings():
  """Children 1, 2 of the root, 3 and 4 of node 1, 5 of node 2."""
  tree = trees.from_parents([-1, 0, 0, 1, 1, 2])
  assert trees.ranks(tree).tolist() == [0, 0, 1, 0, 1, 0]


@pytest.mark.parametrize(
  ("make", "argument", "words"),
  [
    (trees.from_parents, [], "starts with -1"),
    (trees.from_parents, [0, 0], "starts with -1"),
    (trees.from_parents, [-1, 1], "before its child"),
    (trees.from_parents, [-1, 0, 3, 1], "before its child"),
    (trees.from_parents, [-1, -1], "before its child"),
    (trees.from_parents, [-1, 0, 1, 0], "level by level"),
    (trees.chain, -1, "got -1"),
    (trees.branching, [2, 0], r"got \[2, 0\]"),
    (trees.from_paths, [(-1,)], "at least 0"),
    (trees.from_paths, [(1,)], "sibling of rank 0"),
  ],
)
def test_what_is_no_tree_is_refused(make, argument, words):
  """The message says which rule was broken."""
  with pytest.raises(ValueError, match=words):
    make(argument)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 10**6), max_size=14))
def test_a_node_sees_itself_and_its_ancestors(numbers):
  """Visibility and depth are what walking to the root finds."""
  parents = [-1]
  for i, number in enumerate(numbers, 1):
    low = max(0, parents[-1])  # Non-decreasing: breadth first.
    parents.append(low + number % (i - low))
  tree = trees.from_parents(parents)
  for i in range(tree.num_nodes):
    path = path_to(tree, i)
    assert np.flatnonzero(tree.visible[i]).tolist() == path
    assert tree.depths[i] == len(path) - 1
