"""The decoder against itself: one pass, pieces, trees, training, options.

Golden logits of real families are in families_test.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import cache as cache_lib
from spec_jax.models import decoder
from spec_jax.rope import make_rope

_PLAIN = decoder.DecoderConfig(
  vocab_size=23,
  width=16,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=6,
  ffn_width=20,
  max_length=40,
  rope=make_rope(6, {"rope_theta": 100.0}),
)
_CONFIGS = {
  "plain": _PLAIN,
  "local": dataclasses.replace(
    _PLAIN,
    windows=(4, None),
    rope_local=make_rope(6, {"rope_theta": 10.0}),
    norm="rms_plus_one",
    qk_norm=True,
    post_norms=True,
    tied=True,
    embed_scale=4.0,
    attention_scale=0.3,
  ),
  "learned": dataclasses.replace(
    _PLAIN,
    rope=None,
    norm="layer",
    qkv_bias=True,
    out_bias=True,
    gated=False,
    activation="gelu_new",
  ),
}
# Float32 sums in another order: some 1e-6 of logits near 1.
_TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@functools.cache
def _make(name, **options):
  """Builds a model with random weights, norms and biases included."""
  config = _CONFIGS[name]
  made = decoder.build(config).init(jax.random.key(3))
  leaves, tree = jax.tree.flatten(made)
  random = np.random.default_rng(4)
  leaves = [x + 0.2 * random.normal(size=x.shape) for x in leaves]
  params = jax.tree.unflatten(tree, [x.astype(jnp.float32) for x in leaves])
  if options.get("scan_layers"):
    params = decoder.stack_layers(params)
  return decoder.build(config, **options), params


def _tokens(batch, length, seed=0):
  random = np.random.default_rng(seed)
  return jnp.asarray(random.integers(0, 23, (batch, length)), jnp.int32)


def _train(model, params, tokens, **kwargs):
  """Runs the causal forward without a cache."""
  positions = jnp.arange(tokens.shape[1])[None] + 0 * tokens
  return jax.jit(model.apply)(params, tokens, positions, **kwargs)


@functools.partial(jax.jit, static_argnums=0)
def _read_and_commit(model, params, cache, tokens, num):
  B, n = tokens.shape
  positions = cache.length[:, None] + jnp.arange(n)[None]
  visible = jnp.broadcast_to(jnp.tril(jnp.ones((n, n), bool)), (B, n, n))
  block = cache_lib.empty_block(cache, n)
  out = model.apply(params, tokens, positions, cache, block, visible)
  path = jnp.broadcast_to(jnp.arange(n)[None], (B, n))
  return cache_lib.commit(cache, out.block, path, num), out


def _read(model, params, cache, tokens, num=None):
  """Reads and commits tokens behind each row's own length."""
  num = [tokens.shape[1]] * tokens.shape[0] if num is None else num
  return _read_and_commit(
    model, params, cache, tokens, jnp.asarray(num, jnp.int32)
  )


@pytest.mark.parametrize(
  ("name", "scan_layers"),
  [("plain", False), ("plain", True), ("local", False), ("learned", False)],
)
def test_pieces_equal_one_pass(name, scan_layers):
  """12 tokens at once and as 5, three times 1, then 4 give equal outputs."""
  model, params = _make(name, scan_layers=scan_layers)
  tokens = _tokens(2, 12)
  whole = _train(model, params, tokens)
  cache, start, logits, hidden = model.init_cache(2, 16), 0, [], []
  for n in (5, 1, 1, 1, 4):
    cache, out = _read(model, params, cache, tokens[:, start : start + n])
    logits.append(np.asarray(out.logits))
    hidden.append(np.asarray(out.hidden))
    start += n
  np.testing.assert_allclose(
    np.concatenate(logits, 1), whole.logits, **_TOLERANCE
  )
  np.testing.assert_allclose(
    np.concatenate(hidden, 1), whole.hidden, **_TOLERANCE
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
  model, params = _make(name)
  random = np.random.default_rng(7)
  lengths = [3, 7]
  context = _tokens(2, 7, seed=1)
  cache, _ = _read(model, params, model.init_cache(2, 24), context, lengths)
  trees = [_random_tree(random, 12) for _ in lengths]
  nodes = _tokens(2, 12, seed=2)
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
    plain = _train(model, params, jnp.asarray(padded)).logits
    ends = [length + len(path) - 1 for path in paths]
    expected = np.asarray(plain)[np.arange(12), ends]
    np.testing.assert_allclose(logits[row], expected, **_TOLERANCE)


@pytest.mark.parametrize("name", ["plain", "local"])
def test_slots_past_the_length_change_no_bit(name):
  """Filling free slots and unread nodes with 1e4 leaves logits as they are."""
  model, params = _make(name)
  cache, _ = _read(
    model, params, model.init_cache(2, 12), _tokens(2, 6), [2, 6]
  )
  tokens = _tokens(2, 2, seed=5)
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
  model, params = _make(name)
  cache = model.init_cache(2, 12)
  positions = jnp.array([[-90, 0, 1], [-90, -1, 90]])
  visible = jnp.zeros((2, 3, 3), bool).at[0, 1:, 1].set(True)
  out = jax.jit(model.apply)(
    params,
    _tokens(2, 3),
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
  model, params = _make(name)
  tokens = _tokens(1, 13)
  segments = jnp.array([[0] * 5 + [1] * 8])
  positions = jnp.array([[*range(5), *range(8)]])
  packed = jax.jit(model.apply)(params, tokens, positions, segment_ids=segments)
  alone = [
    _train(model, params, tokens[:, part]).logits
    for part in (slice(0, 5), slice(5, 13))
  ]
  np.testing.assert_allclose(
    packed.logits, np.concatenate(alone, 1), **_TOLERANCE
  )


@pytest.mark.parametrize(
  "options", [{"remat": True}, {"scan_layers": True}, {"taps": (0, 1, 2)}]
)
def test_options_change_no_loss_and_no_gradient(options):
  """Rematerialised, scanned and tapped models are the plain one."""
  tokens = _tokens(2, 6)

  def loss_and_gradient(**options):
    model, params = _make("plain", **options)

    @jax.jit
    @jax.value_and_grad
    def loss(params):
      positions = jnp.arange(6)[None] + 0 * tokens
      logits = model.apply(params, tokens, positions).logits
      laws = jax.nn.log_softmax(logits[:, :-1])
      return -jnp.take_along_axis(laws, tokens[:, 1:, None], 2).mean()

    value, gradient = loss(params)
    if not options.get("scan_layers"):
      gradient = decoder.stack_layers(gradient)
    return value, gradient

  value, gradient = loss_and_gradient(**options)
  expected, expected_gradient = loss_and_gradient()
  np.testing.assert_allclose(value, expected, rtol=1e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
    gradient,
    expected_gradient,
  )


def test_remat_recomputes():
  """The traced gradient holds one checkpoint a layer."""
  model, params = _make("plain", remat=True)
  jaxpr = jax.make_jaxpr(lambda p: _train(model, p, _tokens(1, 4)).logits)(
    params
  )
  assert str(jaxpr).count("prevent_cse") == 2


@pytest.mark.parametrize("scan_layers", [False, True])
def test_taps_are_residual_streams(scan_layers):
  """Tap `t` equals what a model of the first `t` layers normalises.

  With the final norm and output matrix on it, it is that model's logits.
  """
  model, params = _make("plain", taps=(0, 1, 2), scan_layers=scan_layers)
  _, plain = _make("plain")
  tokens = _tokens(2, 5)
  hidden = _train(model, params, tokens).hidden
  assert hidden.shape == (2, 5, 3, 16)
  np.testing.assert_array_equal(hidden[:, :, 0], model.embed(params, tokens))
  for a, t in ((1, 1), (2, 2)):
    cut = decoder.build(dataclasses.replace(_PLAIN, num_layers=t, windows=()))
    short = plain | {"layers": plain["layers"][:t]}
    out = _train(cut, short, tokens)
    x = np.asarray(hidden[:, :, a], np.float64)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + _PLAIN.norm_eps)
    x = x * np.asarray(plain["final_norm"])[None, None]
    np.testing.assert_allclose(x, out.hidden[:, :, 0], **_TOLERANCE)
    np.testing.assert_allclose(
      x @ np.asarray(plain["head"]), out.logits, **_TOLERANCE
    )


@pytest.mark.parametrize("name", ["plain", "local"])
def test_logits_only_where_asked(name):
  """`logits_at` picks rows; none asked for skips the output matrix."""
  model, params = _make(name)
  tokens = _tokens(2, 6)
  whole = _train(model, params, tokens)
  at = jnp.array([[5, 0], [3, 3]])
  some = _train(model, params, tokens, logits_at=at).logits
  expected = np.stack([whole.logits[0, [5, 0]], whole.logits[1, [3, 3]]])
  np.testing.assert_allclose(some, expected, **_TOLERANCE)
  none = jnp.zeros((2, 0), jnp.int32)
  assert _train(model, params, tokens, logits_at=none).logits.shape == (
    2,
    0,
    23,
  )
  products = [
    str(jax.make_jaxpr(model.apply)(params, tokens, tokens, **at)).count(
      "dot_general"
    )
    for at in ({}, {"logits_at": none})
  ]
  assert products[0] == products[1] + 1


def test_unembed_takes_the_final_hidden_state():
  """`unembed(hidden)` gives the logits of the same pass, as float32."""
  for name in ("plain", "local"):
    model, params = _make(name)
    out = _train(model, params, _tokens(1, 4))
    logits = model.unembed(params, out.hidden[:, :, 0])
    np.testing.assert_allclose(logits, out.logits, **_TOLERANCE)


def test_query_heads_read_their_own_group():
  """Heads 0 and 1 read key/value head 0; 2 and 3 read head 1."""
  model, params = _make("plain")
  E, tokens = 6, _tokens(1, 6)

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
      _train(model, params | {"layers": tuple(layers)}, tokens).logits
    )

  for heads, own, other in (((0, 1), 0, 1), ((2, 3), 1, 0)):
    base = logits(heads, ())
    np.testing.assert_array_equal(base, logits(heads, (other,)))
    assert np.abs(base - logits(heads, (own,))).max() > 0.01


def test_one_row_equals_five():
  """Float32 means float32: one token's row is the same in a pass of five."""
  model, params = _make("plain")
  tokens = _tokens(5, 1)
  one = _train(model, params, tokens[:1]).logits
  five = _train(model, params, tokens).logits
  np.testing.assert_allclose(one, five[:1], atol=1e-5)
  with jax.default_matmul_precision("bfloat16"):
    text = str(jax.make_jaxpr(model.apply)(params, tokens, tokens))
  assert text.count("dot_general") == text.count("(Precision.HIGHEST")


def test_bfloat16_keeps_float32_logits():
  """Weights, activations and cache are bfloat16, logits are not."""
  model, _ = _make("local", dtype=jnp.bfloat16)
  params = model.init(jax.random.key(0))
  exact = decoder.build(_CONFIGS["local"])
  tokens = _tokens(2, 6)
  cache, out = _read(model, params, model.init_cache(2, 8), tokens)
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
  assert cache.k[0].dtype == out.hidden.dtype == jnp.bfloat16
  assert out.logits.dtype == jnp.float32
  wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
  expected = _train(exact, wide, tokens).logits
  # bfloat16 keeps 8 bits: 0.4 % a rounding, some 20 of them, of logits near 1.
  np.testing.assert_allclose(out.logits, expected, atol=0.15)
  untied = decoder.build(_PLAIN, dtype=jnp.bfloat16)
  made = jax.eval_shape(untied.init, jax.random.key(0))
  logits = jax.eval_shape(untied.unembed, made, out.hidden)
  assert logits.dtype == jnp.float32
  narrow = decoder.build(_CONFIGS["local"], cache_dtype=jnp.bfloat16)
  assert narrow.init_cache(1, 4).k[0].dtype == jnp.bfloat16


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("name", ["plain", "learned"])
def test_axes_name_every_dimension(name, scan_layers):
  """`axes` has a name or None for each dimension of each parameter."""
  model = decoder.build(_CONFIGS[name], scan_layers=scan_layers)
  made = jax.eval_shape(model.init, jax.random.key(0))
  sizes: dict = {None: None}

  def check(axes, x):
    assert len(axes) == x.ndim
    for axis, size in zip(axes, x.shape, strict=True):
      assert axis is None or sizes.setdefault(axis, size) == size

  jax.tree.map(
    check,
    model.axes(),
    made,
    is_leaf=lambda x: type(x) is tuple and x and not isinstance(x[0], dict),
  )
  expected = {"vocab": 23, "embed": 16, "heads": 24, "kv_heads": 12, "ffn": 20}
  if scan_layers:
    expected["layers"] = 2
  assert sizes == {None: None, **expected}


def test_local_layers_hold_a_ring():
  """A window of 4 needs 3 slots; global layers hold all."""
  cache = decoder.build(_CONFIGS["local"]).init_cache(2, 10)
  assert [x.shape for x in cache.k] == [(2, 2, 3, 6), (2, 2, 10, 6)]


def test_what_cannot_be_is_refused():
  """Errors name both values, before anything runs."""
  model, params = _make("plain")
  with pytest.raises(ValueError, match=r"41 slots .* 40"):
    model.init_cache(1, 41)
  with pytest.raises(ValueError, match="window"):
    decoder.build(_CONFIGS["local"], scan_layers=True)
  with pytest.raises(ValueError, match=r"\(4,\).*2"):
    decoder.build(_PLAIN, taps=(4,))
  with pytest.raises(ValueError, match="together"):
    model.apply(params, _tokens(1, 2), _tokens(1, 2), model.init_cache(1, 4))
  for change, match in (
    ({"num_kv_heads": 3}, "4 heads"),
    ({"windows": (4,)}, "1 windows for 2"),
    ({"windows": (0, None)}, "at least 1"),
    ({"head_dim": 8}, "3 rope frequencies"),
    ({"norm": "batch"}, "batch"),
    ({"activation": "relu6"}, "relu6"),
  ):
    with pytest.raises(ValueError, match=match):
      dataclasses.replace(_PLAIN, **change)
