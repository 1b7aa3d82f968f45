"""The cache: slots by hand, logits against forwards from scratch."""

from functools import partial

from hypothesis import given, settings, strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import cache as cache_lib, tree as trees
from spec_jax.base import Block, Cache
from spec_jax.cache import (
  attend,
  commit,
  empty_block,
  make_cache,
  slot_positions,
  write_nodes,
)
from tests import fakes

make = partial(make_cache, num_kv_heads=1, head_dim=1, dtype=jnp.float32)
_commit = jax.jit(commit)
_attend = jax.jit(attend, static_argnames="scale")

# --- by hand ---------------------------------------------------------------


def test_a_layer_has_a_slot_for_each_token_it_may_see():
  """Global 8; window 4 needs 3; window 1 none but an array has one."""
  cache = make(2, 8, windows=(None, 4, 1, 30))
  assert [x.shape for x in cache.k] == [(2, 1, n, 1) for n in (8, 3, 1, 8)]
  assert cache.length.tolist() == [0, 0]


def test_stacked_layers_share_one_array():
  """Layers first, rows second."""
  cache = make(2, 8, windows=(4, 4), stacked=True)
  assert [x.shape for x in cache.v] == [(2, 2, 1, 3, 1)]
  block = empty_block(cache, 5)
  assert [x.shape for x in block.v] == [(2, 2, 5, 1, 1)]


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    ({"slots": 0, "windows": (None,)}, "at least 1, got 0"),
    ({"slots": 8, "windows": (None, 4), "stacked": True}, r"\[8, 3\]"),
  ],
)
def test_an_impossible_cache_is_refused(arguments, words):
  """The message holds the numbers."""
  with pytest.raises(ValueError, match=words):
    make(1, **arguments)


def test_slots_hold_the_last_positions():
  """The docstring's example; empty slots are negative; a full global layer."""
  length = jnp.array([5, 0, 1, 3])
  assert slot_positions(length, 3)[0].tolist() == [3, 4, 2]
  assert (slot_positions(length, 3)[1] < 0).all()
  assert (slot_positions(length, 3)[2] >= 0).tolist() == [True, False, False]
  assert slot_positions(length, 3)[3].tolist() == [0, 1, 2]


def filled(slots, windows, lengths, num_nodes):
  """A cache whose slots hold 0 and a block whose node `i` holds `100 + i`."""
  B = len(lengths)
  cache = make(B, slots, windows=windows)
  cache = cache.replace(length=jnp.asarray(lengths, jnp.int32))
  nodes = 100 + jnp.arange(num_nodes, dtype=jnp.float32)
  nodes = jnp.broadcast_to(nodes[None, :, None, None], (B, num_nodes, 1, 1))
  return cache, Block(
    k=tuple(nodes for _ in windows),
    v=tuple(-nodes for _ in windows),
    positions=jnp.zeros((B, num_nodes), jnp.int32),
  )


def test_a_path_goes_behind_the_text_and_a_ring_keeps_its_end():
  """The docstring's example: nodes 0, 2, 5 to positions 5, 6, 7."""
  cache, block = filled(9, (None, 3), [5], 6)
  path = jnp.array([[0, 2, 5, -1]])
  after = _commit(cache, block, path, jnp.array([3]))
  assert after.k[0][0, 0, :, 0].tolist() == [0] * 5 + [100, 102, 105, 0]
  assert after.v[0][0, 0, :, 0].tolist() == [0] * 5 + [-100, -102, -105, 0]
  assert after.k[1][0, 0, :, 0].tolist() == [102, 105]  # Positions 6 and 7.
  assert after.length.tolist() == [8]


def test_a_row_that_keeps_nothing_is_unchanged():
  """Counts 0 and 2 side by side; junk in the path is not looked at."""
  cache, block = filled(6, (None, 4), [2, 2], 3)
  path = jnp.array([[7, -5, 9], [0, 1, 99]])
  after = _commit(cache, block, path, jnp.array([0, 2]))
  assert (after.k[0][0] == 0).all() and (after.k[1][0] == 0).all()
  assert after.k[0][1, 0, :, 0].tolist() == [0, 0, 100, 101, 0, 0]
  assert after.length.tolist() == [2, 4]


def test_the_last_slots_are_filled_without_moving_back():
  """K9: a commit that ends at the capacity writes the last two slots only."""
  cache, block = filled(6, (None,), [4], 5)
  path = jnp.array([[0, 1, 2, 3, 4]])
  after = _commit(cache, block, path, jnp.array([2]))
  assert after.k[0][0, 0, :, 0].tolist() == [0, 0, 0, 0, 100, 101]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_a_ring_holds_what_a_list_would(data):
  """Random commits against a Python list of everything committed."""
  slots, windows, nodes = 40, (None, 2, 5), 6
  text: list[list[float]] = [[], []]
  cache, block = filled(slots, windows, [0, 0], nodes)
  for _ in range(5):
    num = [data.draw(st.integers(0, nodes)) for _ in text]
    path = [data.draw(st.permutations(range(nodes))) for _ in text]
    cache = _commit(cache, block, jnp.array(path), jnp.array(num))
    for row, n, nodes_of in zip(text, num, path, strict=True):
      row += [100.0 + i for i in nodes_of[:n]]
  for found, row in zip(fakes.held(cache), text, strict=True):
    for (_, position), (key, value) in found.items():
      assert key == row[position] and value == -row[position]
    for layer, window in enumerate(windows):
      size = slots if window is None else window - 1
      expected = set(range(max(0, len(row) - size), len(row)))
      assert {p for at, p in found if at == layer} == expected


def test_nodes_are_written_from_the_start_given():
  """Nodes 2 and 3 of five, converted to the block's dtype."""
  old = jnp.zeros((1, 5), jnp.bfloat16)
  new = write_nodes(old, jnp.ones((1, 2), jnp.float32), 2)
  assert new.dtype == jnp.bfloat16
  assert new[0].tolist() == [0, 0, 1, 1, 0]


# --- attention -------------------------------------------------------------


def test_attention_is_one_softmax_over_what_is_visible():
  """Cache and block joined in numpy; 4 heads read 2 key heads in pairs."""
  rng = np.random.default_rng(0)
  B, T, H, G, E, R, N = 2, 3, 4, 2, 5, 6, 4
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  q, ck, cv = draw(B, T, H, E), draw(B, G, R, E), draw(B, G, R, E)
  bk, bv = draw(B, N, G, E), draw(B, N, G, E)
  see_cache = rng.random((B, T, R)) < 0.5
  see_block = rng.random((B, T, N)) < 0.5
  see_block[:, :, 0] = True
  out = _attend(q, ck, cv, bk, bv, see_cache, see_block, scale=0.3)
  out = np.asarray(out)
  for b, t, h in np.ndindex(B, T, H):
    keys = np.concatenate([ck[b, h // 2], bk[b, :, h // 2]])
    values = np.concatenate([cv[b, h // 2], bv[b, :, h // 2]])
    see = np.concatenate([see_cache[b, t], see_block[b, t]])
    score = np.exp(keys[see] @ q[b, t, h] * 0.3)
    expected = score @ values[see] / score.sum()
    found = out[b, t, h * E : (h + 1) * E]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_query_that_sees_nothing_is_finite():
  """J6, B8: fully masked rows give numbers, whatever lies in the slots."""
  one = lambda *shape: jnp.full(shape, 1e4)
  no = lambda n: jnp.zeros((1, 2, n), bool)
  out = _attend(
    *(one(1, 2, 2, 4), one(1, 1, 3, 4), one(1, 1, 3, 4)),
    *(one(1, 2, 1, 4), one(1, 2, 1, 4), no(3), no(2)),
    scale=1.0,
  )
  assert np.isfinite(out).all()


def test_a_long_text_alone_is_attended_as_a_short_one():
  """By row and head on CPU: as under one softmax, gradients too."""
  rng = np.random.default_rng(1)
  B, T, H, G, E = 2, cache_lib.LONG, 4, 2, 5
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  q, k, v = draw(B, T, H, E), draw(B, T, G, E), draw(B, T, G, E)
  see = jnp.asarray(rng.random((B, T, T)) < 0.5).at[:, :, 0].set(True)
  nothing = jnp.zeros((B, G, 1, E)), jnp.zeros((B, G, 1, E))
  no = jnp.zeros((1, 1, 1), bool)
  out = draw(B, T, H * E)

  def alone(q, k, v):
    return (out * cache_lib.attend_alone(q, k, v, see, scale=0.3)).sum()

  def joined(q, k, v):
    found = cache_lib.attend(q, *nothing, k, v, no, see, scale=0.3)
    return (out * found).sum()

  ours, theirs = (
    jax.jit(jax.value_and_grad(f, (0, 1, 2)))(q, k, v) for f in (alone, joined)
  )
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4),
    ours,
    theirs,
  )


def test_a_long_text_alone_keeps_float32_in_its_softmax():
  """bfloat16 products are summed and weighed in float32, as with a cache."""
  rng = np.random.default_rng(2)
  B, T, H, E = 1, cache_lib.LONG, 2, 8
  draw = lambda *s: jnp.asarray(rng.normal(size=s) * 9, jnp.bfloat16)
  q, k, v = draw(B, T, H, E), draw(B, T, H, E), draw(B, T, H, E)
  nothing = jnp.zeros((B, H, 1, E), jnp.bfloat16)
  see = jnp.tril(jnp.ones((1, T, T), bool))
  no = jnp.zeros((1, 1, 1), bool)
  theirs = cache_lib.attend(q, nothing, nothing, k, v, no, see, scale=1.0)
  ours = cache_lib.attend_alone(q, k, v, see, scale=1.0)
  assert ours.dtype == jnp.bfloat16
  difference = np.abs(np.asarray(ours - theirs, np.float32))
  assert difference.max() <= 0.125  # a last bit of values up to 32


def test_a_long_batch_needs_no_segments():
  """A mask that all rows share is every row's."""
  T = cache_lib.LONG
  model, params = fakes.tiny(windows=(None, None), max_length=2 * T)
  tokens = jnp.arange(2 * T).reshape(2, T) % 7
  positions = jnp.broadcast_to(jnp.arange(T), (2, T))
  both = model.apply(params, tokens, positions, None, None, None).logits
  one = model.apply(params, tokens[1:], positions[1:], None, None, None).logits
  np.testing.assert_allclose(both[1:], one, rtol=1e-4, atol=1e-4)


# --- a decoder with rings against forwards from scratch ----------------------

WINDOWS = (None, 1, 3, 7)
WIDTH, ROWS = 96, 4
# Both sides sum some tens of float32 terms in another order: 1e-6 of logits
# of at most 20. A wrong key shows as 1e-1.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def target():
  """A decoder with a global layer and windows 1, 3 and 7."""
  model, params = fakes.tiny(11, windows=WINDOWS)
  positions = jnp.broadcast_to(jnp.arange(WIDTH)[None], (ROWS, WIDTH))
  whole = jax.jit(lambda tokens: model.apply(params, tokens, positions).logits)
  return model, params, whole


def spoil(cache):
  """Fills what no query may read with 1e4: empty slots, too old positions."""
  layers = zip(cache.k, cache.v, WINDOWS, strict=True)
  keys, values = [], []
  for k, v, window in layers:
    position = slot_positions(cache.length, k.shape[2])
    bad = position < 0
    if window is not None:
      bad = bad | (position <= cache.length[:, None] - window)
    bad = bad[:, None, :, None]
    keys.append(jnp.where(bad, 1e4, k))
    values.append(jnp.where(bad, 1e4, v))
  return cache.replace(k=tuple(keys), v=tuple(values))


def largest_error(target, tree, *, cache=None, rounds=6, seed=0):
  """Commits random paths; returns the largest error of any node's logits.

  Each node's logits are compared with a forward of the row's text and the path
  to that node.
  """
  model, params, whole = target
  rng = np.random.default_rng(seed)
  N, K = tree.num_nodes, tree.depth

  @jax.jit
  def read(cache, tokens):
    positions = cache.length[:, None] + jnp.asarray(tree.depths)[None]
    visible = jnp.broadcast_to(jnp.asarray(tree.visible), (ROWS, N, N))
    block = empty_block(cache, N)
    out = model.apply(params, tokens, positions, spoil(cache), block, visible)
    return out.logits, out.block

  cache = cache or model.init_cache(ROWS, WIDTH)
  text = rng.integers(0, 11, (ROWS, WIDTH))
  length, worst = np.ones(ROWS, int), 0.0  # The root is not cached yet.
  for _ in range(rounds):
    nodes = rng.integers(0, 11, (ROWS, N))
    nodes[:, 0] = text[np.arange(ROWS), length - 1]
    logits, block = read(cache, jnp.asarray(nodes, jnp.int32))
    for n in range(N):
      path = fakes.path_to(tree, n)
      guess = text.copy()
      for b in range(ROWS):
        guess[b, length[b] - 1 : length[b] - 1 + len(path)] = nodes[b, path]
      expected = np.asarray(whole(jnp.asarray(guess, jnp.int32)))
      for b in range(ROWS):
        error = expected[b, length[b] - 1 + tree.depths[n]] - logits[b, n]
        worst = max(worst, float(np.abs(error).max()))
    chosen = np.full((ROWS, K + 1), -1)
    num = np.zeros(ROWS, int)
    for b in range(ROWS):
      path = fakes.path_to(tree, rng.integers(0, N))
      chosen[b, : len(path)], num[b] = path, len(path)
      text[b, length[b] : length[b] + len(path) - 1] = nodes[b, path[1:]]
    num_B = jnp.asarray(num, jnp.int32)
    cache = _commit(cache, block, jnp.asarray(chosen, jnp.int32), num_B)
    length += num
    assert cache.length.tolist() == (length - 1).tolist()
  return worst


@pytest.mark.parametrize(
  "tree",
  [
    trees.chain(9),  # Longer than every ring.
    fakes.random_tree(np.random.default_rng(3), 12),
    trees.branching([5, 1]),
  ],
  ids=["chain", "twelve_nodes", "wide"],
)
def test_nodes_see_their_path_and_the_text_whatever_was_accepted(target, tree):
  """R2, R3, R4, K3, K13: random paths, spoilt slots, rings of 0 to 6 slots."""
  assert largest_error(target, tree) < TOLERANCE


def test_a_ring_of_one_slot_less_is_seen_to_fail(target):
  """Window 7 in 5 slots: the sweep above would notice."""
  cache = make_cache(
    ROWS,
    WIDTH,
    windows=(None, 1, 3, 6),
    num_kv_heads=2,
    head_dim=4,
    dtype=jnp.float32,
  )
  tree = trees.chain(2)
  assert largest_error(target, tree, rounds=8) < TOLERANCE
  assert largest_error(target, tree, cache=cache, rounds=8) > 0.01


def test_the_committed_keys_are_those_of_any_other_reading(target):
  """R4: a text read as tree paths and in one piece leaves the same cache."""
  model, params, _ = target
  t = np.random.default_rng(1).integers(0, 11, 12).tolist()

  @jax.jit
  def read(cache, tokens, depths, visible, path):
    block = empty_block(cache, tokens.shape[1])
    positions = cache.length[:, None] + depths[None]
    out = model.apply(params, tokens, positions, cache, block, visible[None])
    return commit(cache, out.block, path, jnp.array([path.shape[1]]))

  def feed(cache, tree, tokens, path):
    arrays = jnp.array([tokens]), jnp.asarray(tree.depths)
    return read(cache, *arrays, jnp.asarray(tree.visible), jnp.array([path]))

  # Path [0, 3, 7] of the same tree, four times.
  tree = trees.from_parents([-1, 0, 0, 0, 1, 1, 3, 3])
  cache = model.init_cache(1, 16)
  for i in range(0, 12, 3):
    tokens = [t[i], 9, 9, t[i + 1], 9, 9, 9, t[i + 2]]
    cache = feed(cache, tree, tokens, [0, 3, 7])
  whole = feed(model.init_cache(1, 16), trees.chain(11), t, list(range(12)))
  found, expected = fakes.held(cache)[0], fakes.held(whole)[0]
  assert found.keys() == expected.keys()
  for at, (key, value) in expected.items():
    np.testing.assert_allclose(found[at][0], key, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[at][1], value, rtol=1e-4, atol=1e-5)


def test_a_cache_is_a_pytree_of_its_arrays():
  """Rows can be taken, placed and donated: no leaf hides."""
  cache = make(1, 4, windows=(None, 2))
  assert len(jax.tree.leaves(cache)) == 5
  assert isinstance(jax.tree.map(lambda x: x, cache), Cache)
