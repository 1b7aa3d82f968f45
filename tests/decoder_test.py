"""The decoder against itself: one pass, pieces, trees, segments, heads.

Its options are in decoder_options_test.py, golden logits of real families in
families_test.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_decoder import CONFIGS, TOLERANCE, make, random_tokens, read, train

from spec_jax import cache as cache_lib
from spec_jax.models import decoder


@pytest.mark.parametrize(
  ("name", "scan_layers"),
  [("plain", False), ("plain", True), ("local", False), ("learned", False)],
)
def test_pieces_equal_one_pass(name, scan_layers):
  """12 tokens at once and as 5, three times 1, then 4 give equal outputs."""
  model, params = make(name, scan_layers=scan_layers)
  tokens = random_tokens(2, 12)
  whole = train(model, params, tokens)
  cache, start, logits, hidden = model.init_cache(2, 16), 0, [], []
  for n in (5, 1, 1, 1, 4):
    cache, out = read(model, params, cache, tokens[:, start : start + n])
    logits.append(np.asarray(out.logits))
    hidden.append(np.asarray(out.hidden))
    start += n
  np.testing.assert_allclose(
    np.concatenate(logits, 1), whole.logits, **TOLERANCE
  )
  np.testing.assert_allclose(
    np.concatenate(hidden, 1), whole.hidden, **TOLERANCE
  )


def _random_tree(random, num_nodes):
  parents = [-1] + [int(random.integers(0, i)) for i in range(1, num_nodes)]
  visible = np.eye(num_nodes, dtype=bool)
  for i, p in enumerate(parents[1:], 1):
    visible[i] |= visible[p]
  return parents, visible


@pytest.mark.parametrize("name", ["plain", "local", "learned"])
def test_tree_nodes_equal_their_paths(name):
  """Each of 12 nodes equals a plain forward on context and path to it.

  Rows hold contexts of 3 and 7 tokens and trees of their own; the tree is
  read in two calls, the first 5 nodes and then the other 7.
  """
  model, params = make(name)
  random = np.random.default_rng(7)
  lengths = [3, 7]
  context = random_tokens(2, 7, seed=1)
  cache, _ = read(model, params, model.init_cache(2, 24), context, lengths)
  trees = [_random_tree(random, 12) for _ in lengths]
  nodes = random_tokens(2, 12, seed=2)
  visible = np.stack([v for _, v in trees])
  depths = visible.sum(-1) - 1
  positions = np.array(lengths)[:, None] + depths
  assert any(len(set(row)) < 12 for row in positions)  # siblings share one
  apply = jax.jit(model.apply)
  block, logits = cache_lib.empty_block(cache, 12), []
  for part in (slice(0, 5), slice(5, 12)):
    out = apply(
      params,
      nodes[:, part],
      jnp.asarray(positions[:, part], jnp.int32),
      cache,
      block,
      jnp.asarray(visible[:, part]),
      start=part.start,
    )
    block = out.block
    logits.append(np.asarray(out.logits))
  logits = np.concatenate(logits, 1)
  np.testing.assert_array_equal(block.positions, positions)
  for row, length in enumerate(lengths):
    # All paths as one padded batch; a causal forward ignores what follows.
    paths = [np.flatnonzero(visible[row, i]) for i in range(12)]
    padded = np.zeros((12, length + 12), np.int32)
    for i, path in enumerate(paths):
      text = [*context[row, :length], *nodes[row, path]]
      padded[i, : len(text)] = text
    plain = train(model, params, jnp.asarray(padded)).logits
    ends = [length + len(path) - 1 for path in paths]
    expected = np.asarray(plain)[np.arange(12), ends]
    np.testing.assert_allclose(logits[row], expected, **TOLERANCE)


@pytest.mark.parametrize("name", ["plain", "local"])
def test_slots_past_the_length_change_no_bit(name):
  """Filling free slots and unread nodes with 1e4 leaves logits as they are."""
  model, params = make(name)
  cache, _ = read(
    model, params, model.init_cache(2, 12), random_tokens(2, 6), [2, 6]
  )
  tokens = random_tokens(2, 2, seed=5)
  positions = cache.length[:, None] + jnp.arange(2)[None]
  visible = jnp.broadcast_to(jnp.eye(2, 4, dtype=bool), (2, 2, 4))

  def poison(x_BGRE):
    R = x_BGRE.shape[2]
    free = np.asarray(cache_lib.slot_positions(cache.length, R)) < 0
    return jnp.where(free[:, None, :, None], 1e4, x_BGRE)

  dirty = cache.replace(
    k=tuple(map(poison, cache.k)), v=tuple(map(poison, cache.v))
  )
  assert max(float(x.max()) for x in dirty.k) == 1e4
  block = cache_lib.empty_block(cache, 4)
  junk = block.replace(
    k=tuple(x + 1e4 for x in block.k), v=tuple(x + 1e4 for x in block.v)
  )
  apply = jax.jit(model.apply)
  clean = apply(params, tokens, positions, cache, block, visible).logits
  other = apply(params, tokens, positions, dirty, junk, visible).logits
  np.testing.assert_array_equal(clean, other)


@pytest.mark.parametrize("name", ["plain", "local", "learned"])
def test_padded_nodes_give_finite_numbers(name):
  """A node of position -90 and one that sees nothing, itself included."""
  model, params = make(name)
  cache = model.init_cache(2, 12)
  positions = jnp.array([[-90, 0, 1], [-90, -1, 90]])
  visible = jnp.zeros((2, 3, 3), bool).at[0, 1:, 1].set(True)
  out = jax.jit(model.apply)(
    params,
    random_tokens(2, 3),
    positions,
    cache,
    cache_lib.empty_block(cache, 3),
    visible,
  )
  for x in jax.tree.leaves(out):
    assert np.isfinite(np.asarray(x)).all()


@pytest.mark.parametrize("name", ["plain", "local", "learned"])
def test_segments_are_apart(name):
  """Two sequences packed in one row give what each gives alone."""
  model, params = make(name)
  tokens = random_tokens(1, 13)
  segments = jnp.array([[0] * 5 + [1] * 8])
  positions = jnp.array([[*range(5), *range(8)]])
  packed = jax.jit(model.apply)(params, tokens, positions, segment_ids=segments)
  alone = [
    train(model, params, tokens[:, part]).logits
    for part in (slice(0, 5), slice(5, 13))
  ]
  np.testing.assert_allclose(
    packed.logits, np.concatenate(alone, 1), **TOLERANCE
  )


def test_unembed_takes_the_final_hidden_state():
  """`unembed(hidden)` gives the logits of the same pass, as float32."""
  for name in ("plain", "local"):
    model, params = make(name)
    out = train(model, params, random_tokens(1, 4))
    logits = model.unembed(params, out.hidden[:, :, 0])
    np.testing.assert_allclose(logits, out.logits, **TOLERANCE)


def test_query_heads_read_their_own_group():
  """Heads 0 and 1 read key/value head 0; 2 and 3 read head 1."""
  model, params = make("plain")
  E, tokens = 6, random_tokens(1, 6)

  def logits(heads, changed):
    """Only `heads` reach the output; keys and values of `changed` move."""
    layers = []
    for w in params["layers"]:
      keep = np.zeros((24, 1), np.float32)
      for h in heads:
        keep[h * E : (h + 1) * E] = 1
      move = np.zeros((1, 12), np.float32)
      for g in changed:
        move[:, g * E : (g + 1) * E] = 1
      layers.append(
        w
        | {
          "wo": w["wo"] * keep,
          "wk": w["wk"] + move,
          "wv": w["wv"] - move,
        }
      )
    return np.asarray(
      train(model, params | {"layers": tuple(layers)}, tokens).logits
    )

  for heads, own, other in (((0, 1), 0, 1), ((2, 3), 1, 0)):
    base = logits(heads, ())
    np.testing.assert_array_equal(base, logits(heads, (other,)))
    assert np.abs(base - logits(heads, (own,))).max() > 0.01


def test_one_row_equals_five():
  """Float32 means float32: one token's row is the same in a pass of five."""
  model, params = make("plain")
  tokens = random_tokens(5, 1)
  one = train(model, params, tokens[:1]).logits
  five = train(model, params, tokens).logits
  np.testing.assert_allclose(one, five[:1], atol=1e-5)
  with jax.default_matmul_precision("bfloat16"):
    text = str(jax.make_jaxpr(model.apply)(params, tokens, tokens))
  assert text.count("dot_general") == text.count("(Precision.HIGHEST")


def test_local_layers_hold_a_ring():
  """A window of 4 needs 3 slots; global layers hold all."""
  cache = decoder.build(CONFIGS["local"]).init_cache(2, 10)
  assert [x.shape for x in cache.k] == [(2, 2, 3, 6), (2, 2, 10, 6)]
