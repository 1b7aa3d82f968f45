"""The CPU kernels for attention and row sums, and both in a model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import cache as cache_lib, kernels
from spec_jax.models import decoder
from spec_jax.rope import Rope, rope_angles, rotate
from tests.fakes import tiny


@pytest.fixture(autouse=True)
def _needs_kernel():
  if (reason := kernels.why_not()) is not None:
    pytest.skip(reason)


def _case(seed, B, T, N, H, G, E, R, window):
  """Returns the arguments of `attend`, and the masks of `cache.attend`."""
  rng = np.random.default_rng(seed)

  def normal(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)

  length = jnp.asarray(rng.integers(0, 2 * R if window else R + 1, B))
  length = length.astype(jnp.int32)
  positions = length[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
  visible = jnp.asarray(rng.random((B, T, N)) < 0.6)
  visible = visible.at[:, :, 0].set(True)
  first = positions - (window or 10**6) + 1
  held = cache_lib.slot_positions(length, R)[:, None]
  seen = (held >= 0) & (held >= first[:, :, None])
  arrays = (
    normal(B, T, H, E),
    normal(B, G, R, E),
    normal(B, G, R, E),
    normal(B, N, G, E),
    normal(B, N, G, E),
  )
  return arrays, (visible, length, first), (seen, visible)


@pytest.mark.parametrize(
  "shape",
  [
    (1, 1, 1, 4, 2, 16, 8, None),
    (2, 3, 5, 6, 3, 64, 33, None),
    (3, 4, 4, 4, 4, 20, 7, 8),  # a ring, and a width that is not 16 n
    (1, 7, 9, 9, 3, 80, 130, None),
  ],
)
def test_attention_equals_the_einsums(shape):
  arrays, given, masks = _case(3, *shape)
  ours = jax.jit(lambda *a: kernels.attend(*a, scale=0.3))(*arrays, *given)
  theirs = cache_lib.attend(*arrays, *masks, scale=0.3)
  # float32 sums of up to 140 terms in another order.
  np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


def test_slots_that_hold_nothing_are_not_read():
  arrays, given, _ = _case(5, 2, 2, 3, 4, 2, 16, 40, None)
  length = np.asarray(given[1])
  held = cache_lib.slot_positions(given[1], 40) >= 0
  poison = jnp.where(held[:, None, :, None], 0.0, jnp.nan)
  spoiled = [arrays[0], arrays[1] + poison, arrays[2] + poison, *arrays[3:]]
  assert (length < 40).any()
  same = kernels.attend(*arrays, *given, scale=1.0)
  np.testing.assert_array_equal(
    kernels.attend(*spoiled, *given, scale=1.0), same
  )


def test_a_query_that_sees_nothing_gives_zeros():
  arrays, (visible, length, first), _ = _case(1, 1, 2, 3, 2, 1, 16, 8, None)
  nothing = jnp.zeros_like(visible), jnp.zeros_like(length), first
  out = kernels.attend(*arrays, *nothing, scale=1.0)
  np.testing.assert_array_equal(out, np.zeros((1, 2, 32), np.float32))


def test_large_scores_do_not_overflow():
  arrays, given, masks = _case(2, 1, 2, 3, 2, 1, 16, 8, None)
  big = (arrays[0] * 1e3, *arrays[1:])
  ours = kernels.attend(*big, *given, scale=1.0)
  theirs = cache_lib.attend(*big, *masks, scale=1.0)
  np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [1, 15, 16, 17, 576, 1000])
def test_row_sums_equal_float64_and_do_not_depend_on_the_rows(width):
  x = np.random.default_rng(width).standard_normal((37, width))
  x = x.astype(np.float32)
  sums = np.asarray(jax.jit(kernels.row_sums)(x))[:, 0]
  scale = np.abs(x).astype(np.float64).sum(1)
  assert (np.abs(sums - x.astype(np.float64).sum(1)) / scale).max() < 1e-6
  alone = [float(kernels.row_sums(x[i : i + 1])[0, 0]) for i in range(37)]
  np.testing.assert_array_equal(sums, np.asarray(alone, np.float32))


@pytest.mark.parametrize("width", [2, 20, 64, 96])
def test_rotations_equal_those_of_plain_weights(width):
  rope = Rope(tuple(10.0 ** (-np.arange(width // 2) / 5)))
  x = np.random.default_rng(width).standard_normal((2, 5, 3, width))
  positions = jnp.array([[0, 1, 2, 3, 4], [7, 900, 31, 2, 5]])
  angles = rope_angles(rope, positions)
  ours = jax.jit(kernels.rotate)(jnp.asarray(x, jnp.float32), angles)
  theirs = rotate(jnp.asarray(x, jnp.float32), angles)
  np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


def _blocks(model, params, tokens, width):
  """Returns the logits of `tokens` read in blocks of `width`, each kept."""
  visible = jnp.tril(jnp.ones((width, width), bool))[None]

  @jax.jit
  def read(cache, piece):
    positions = cache.length[:, None] + jnp.arange(width)[None]
    out = model.apply(
      params,
      piece,
      positions,
      cache,
      cache_lib.empty_block(cache, width),
      visible,
    )
    path = jnp.arange(width)[None]
    num = jnp.full((1,), width, jnp.int32)
    return out.logits, cache_lib.commit(cache, out.block, path, num)

  cache, found = model.init_cache(1, 64), []
  for start in range(0, tokens.shape[1], width):
    logits, cache = read(cache, tokens[:, start : start + width])
    found.append(np.asarray(logits[0]))
  return np.concatenate(found)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_a_pass_over_16_tokens_has_the_bits_of_16_passes(norm):
  config = decoder.DecoderConfig(
    vocab_size=50,
    width=72,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=20,
    ffn_width=100,
    max_length=64,
    rope=Rope(tuple(10.0 ** (-np.arange(10) / 5))),
    windows=(None, 8, None),
    norm=norm,
    qk_norm=norm == "rms",
  )
  model = decoder.build(config)
  params = kernels.pack_params(model.init(jax.random.key(3)))
  tokens = np.random.default_rng(0).integers(0, 50, (1, 48)).astype(np.int32)
  alone = _blocks(model, params, tokens, 1)
  for width in (2, 8, 16, 48):
    np.testing.assert_array_equal(_blocks(model, params, tokens, width), alone)


def test_packed_and_plain_weights_give_the_same_logits():
  model, params = tiny()
  tokens = np.random.default_rng(1).integers(0, 8, (1, 24)).astype(np.int32)
  plain = _blocks(model, params, tokens, 4)
  packed = _blocks(model, kernels.pack_params(params), tokens, 4)
  np.testing.assert_allclose(packed, plain, rtol=1e-4, atol=1e-4)
