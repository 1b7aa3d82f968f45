"""Trees that grow best first: against all candidates, and step by step."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import drafters, growth, length, step as step_lib
from spec_jax.settings import Settings
from tests import fakes
from tests.vanilla_test import accept, forced

V, B = 5, 4
NEW = 40


def random_laws(seed, *, factorised):
  """Returns `[B, K + 1, V, V]`: a row's law by depth and last token."""
  rng = np.random.default_rng(seed)
  shape = (B, 5, 1 if factorised else V)
  laws = rng.dirichlet(np.full(V, 0.5), shape)
  return np.broadcast_to(laws, (B, 5, V, V)).astype(np.float32)


def grow(laws, max_depth, **sizes):
  """Grows trees from laws; returns (Grown, levels read)."""
  laws = jnp.log(jnp.asarray(laws))

  def expand(level, num):
    rows = jnp.arange(B)[:, None]
    return laws[rows, level.depth, level.tokens], num + 1

  @jax.jit
  def run():
    return growth.best_first(
      laws[:, 0, 0],
      expand,
      jnp.int32(0),
      jnp.asarray(max_depth, jnp.int32),
      **sizes,
    )

  grown, num = run()
  return jax.tree.map(np.asarray, grown), int(num)


def paths(grown, row):
  """Returns each kept node's tokens from the root down."""
  found: list[tuple] = [()]
  for i in range(1, grown.parents.shape[1]):
    above = found[grown.parents[row, i]]
    found.append((*above, int(grown.tokens[row, i - 1])))
  return [p for p, kept in zip(found, grown.kept[row], strict=True) if kept]


def value(laws, row, path):
  """The product of probabilities along a path."""
  out, last = 1.0, 0
  for d, token in enumerate(path):
    out *= float(laws[row, d, last if d else 0, token])
    last = token
  return out


@pytest.mark.parametrize("factorised", [True, False])
def test_the_tree_is_the_best_of_all_candidates(factorised):
  """Rows with laws and depths of their own; all V + V^2 + V^3 candidates.

  With a width of `N - 1` nothing is cut off while growing.
  """
  for seed in range(3):
    laws = random_laws(seed, factorised=factorised)
    depths = [3, 2, 0, 3]
    grown, _ = grow(laws, depths, num_nodes=6, depth=3, width=5)
    for row, depth in enumerate(depths):
      every = [
        p
        for n in range(1, depth + 1)
        for p in itertools.product(range(V), repeat=n)
      ]
      every.sort(key=lambda p, row=row, laws=laws: -value(laws, row, p))
      found = paths(grown, row)
      assert sorted(found) == sorted(every[:5])
      # Breadth first: parents in order, so no depth comes before a smaller.
      kept = grown.parents[row][grown.kept[row]]
      assert (np.diff(kept) >= 0).all()
    shapes = {tuple(grown.parents[r]) for r in range(B)}
    assert len(shapes) > 1  # Else a static tree would do.


def replay(laws, row, depth, num_nodes, width):
  """The paper's two phases with lists, every level in full."""
  level, pool = [()], []
  for _ in range(depth):
    more = []
    for path in level:
      children = [(*path, t) for t in range(V)]
      children.sort(key=lambda p: -value(laws, row, p))
      more += children[:width]
    pool += more
    level = sorted(more, key=lambda p: -value(laws, row, p))[:width]
  return sorted(pool, key=lambda p: -value(laws, row, p))[: num_nodes - 1]


@pytest.mark.parametrize("sizes", [(8, 4, 2), (12, 3, 3), (20, 3, 3)])
def test_a_narrow_tree_is_that_of_expanding_and_reranking(sizes):
  """Li et al. 2024: levels that cannot change the tree are left out here."""
  num_nodes, depth, width = sizes
  laws = random_laws(7, factorised=False)
  kind = {"num_nodes": num_nodes, "depth": depth, "width": width}
  grown, _ = grow(laws, [depth] * B, **kind)
  for row in range(B):
    expected = replay(laws, row, depth, num_nodes, width)
    assert sorted(paths(grown, row)) == sorted(expected)


def test_ties_go_to_the_earlier_candidate():
  """A fair die: 4 faces, all shallow ones first, and no level too many."""
  laws = np.full((B, 5, V, V), 0.25, np.float32)
  laws[..., 4] = 0
  grown, levels = grow(laws, [3] * B, num_nodes=7, depth=3, width=4)
  assert paths(grown, 0) == [(0,), (1,), (2,), (3,), (0, 0), (0, 1)]
  assert levels == 1
  _, levels = grow(laws, [3] * B, num_nodes=5, depth=3, width=4)
  assert levels == 0


def test_what_is_certain_is_a_chain_and_the_rest_is_left_over():
  """Probability 1: a child is worth as much as its parent."""
  laws = np.zeros((B, 5, V, V), np.float32)
  laws[..., 2] = 1
  grown, levels = grow(laws, [4, 3, 0, 1], num_nodes=6, depth=4, width=2)
  assert levels == 3
  for row, depth in enumerate([4, 3, 0, 1]):
    assert paths(grown, row) == [(2,) * n for n in range(1, depth + 1)]
    assert grown.parents[row, 1 + depth :].tolist() == [0] * (5 - depth)
  # The deepest one is not read.
  assert (grown.read[0] >= 0).tolist() == [False] + [True] * 3 + [False] * 2


# --- the drafter -----------------------------------------------------------


def steps_of(name, options, *, seed=1):
  """Returns the steps that a noisy draft needs for greedy texts."""
  model, params = fakes.tables(13, period=3, seed=2)
  rig = fakes.Rig(
    (model, params),
    name,
    draft=(model, fakes.noisy(params, seed, size=0.6)),
    options=options,
    slots=64,
    use=fakes.GREEDY,
  )
  prompts = [[i % 13, (3 * i) % 13] for i in range(24)]
  state = rig.run(prompts, Settings(max_new_tokens=NEW))
  return int(state.tally.num_steps.sum()), int(state.tally.num_accepted.sum())


def test_a_tree_accepts_at_least_what_a_chain_of_as_many_nodes_does():
  """On 24 texts of a draft that is right two times in three."""
  chain, kept = steps_of("vanilla", {"num_draft": 5})
  tree, more = steps_of("best_first", {"num_nodes": 6, "depth": 5, "width": 3})
  assert 0 < kept < more and tree < chain


def test_caches_are_those_of_a_fresh_reading():
  """K2, K3: rings too; the accepted path is committed, wherever it lay."""
  model, params = fakes.tiny(13, windows=(None, 3))
  rig = fakes.Rig(
    (model, params),
    "best_first",
    draft=(model, fakes.noisy(params)),
    options={"num_nodes": 8, "depth": 4, "width": 2},
    slots=128,
    use=fakes.GREEDY,
    verifier=forced,
  )
  rng, roomy = np.random.default_rng(0), Settings(max_new_tokens=100)
  state = rig.start([[5], [1, 2, 3, 1, 2], [4] * 11], roomy)
  lags = set()
  for number in range(12):
    counts = rng.choice([0, 1, 4, rng.integers(0, 5)], 3)
    state, info = accept(rig, state, counts)
    assert (info.num_accepted > 0).tolist() == (counts > 0).tolist()
    lags |= set((state.length - state.draft.length).tolist())
    if number % 4 != 3:
      continue
    tokens = np.asarray(state.tokens)
    texts = [tokens[i, :n].tolist() for i, n in enumerate(state.length)]
    fresh = rig.start(texts, roomy)
    pairs = map(fakes.held, (state.draft, fresh.draft))
    for found, expected in zip(*pairs, strict=True):
      common = found.keys() & expected.keys()
      assert len(common) >= len(found) - 2
      for at in common:
        np.testing.assert_allclose(found[at], expected[at], atol=1e-4)
  assert lags == {1, 2}  # It never has more to read than one pass takes.


def test_the_policy_says_where_a_tree_ends():
  """A threshold above every probability: nothing is drafted."""
  model, params = fakes.tables(13, period=3)
  drafter = drafters.build(
    "best_first", model, model, slots=32, num_nodes=6, depth=2, width=2
  )
  for threshold, drafts in ((0.0, True), (1.0, False)):
    policy = length.confidence(2, threshold=threshold)
    length.check(policy, drafter)
    rig = fakes.Rig((model, params), drafter, draft=(model, params), slots=32)
    state = rig.start([[1], [2]])
    step = fakes.jit(step_lib.make_step(model, drafter, policy))
    _, info = step(rig.params, state)
    assert bool((info.num_drafted > 0).all()) == drafts


@pytest.mark.parametrize(
  ("options", "words"),
  [
    ({"num_nodes": 1}, "num_nodes must be at least 2, got 1"),
    ({"depth": 0}, "depth must be at least 1, got 0"),
    ({"width": 0}, "width must be at least 1, got 0"),
    ({"num_nodes": 8, "depth": 2, "width": 2}, "must be at most 7 .* got 8"),
    ({"num_nodes": 4, "depth": 4}, "depth must be below num_nodes"),
  ],
)
def test_options_out_of_range_are_refused(options, words):
  """The message holds the value."""
  model, _ = fakes.tables()
  with pytest.raises(ValueError, match=words):
    drafters.build("best_first", model, model, slots=8, **options)
