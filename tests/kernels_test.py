"""Tests of the CPU kernel: its arithmetic, and that programs can use it."""

import concurrent.futures

import jax
from jax import lax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from spec_jax import kernels
from spec_jax.models import common, decoder
from spec_jax.rope import make_rope


@pytest.fixture(autouse=True)
def _needs_kernel():
  if (reason := kernels.why_not()) is not None:
    pytest.skip(reason)


def _normal(seed, *shape):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _bits(x):
  return np.asarray(x).view(np.uint32)


_product = jax.jit(kernels.matmul, static_argnames="threads")


def _shapes(count):
  """Yields (rows, K, N): edges of panels, chunks and tiles, then random."""
  yield from ((1, 1, 1), (12, 127, 15), (13, 128, 16), (64, 129, 17))
  rng = np.random.default_rng(7)
  for _ in range(count):
    yield tuple(int(i) for i in rng.integers(1, (65, 700, 300)))


@pytest.mark.parametrize("shape", list(_shapes(12)))
def test_products_agree_with_float64(shape):
  """Each value is within 1e-6 of the norms of its row and column."""
  R, K, N = shape
  x, w, bias = _normal(1, R, K), _normal(2, K, N), _normal(3, N)
  exact = x.astype(np.float64) @ w.astype(np.float64)
  scale = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(w, axis=0)
  error = np.abs(np.asarray(_product(x, kernels.pack(w))) - exact)
  assert (error <= 1e-6 * scale).all()
  # The sum with the bias is rounded once more.
  y = np.asarray(_product(x, kernels.pack(w), bias))
  error = np.abs(y - (exact + bias))
  assert (error <= 1e-6 * (scale + np.abs(bias))).all()


@pytest.mark.parametrize("shape", list(_shapes(4)))
def test_bfloat16_is_float32_on_rounded_weights(shape):
  """Weights stored as bfloat16 change nothing but the weights."""
  R, K, N = shape
  x, w = _normal(1, R, K), _normal(2, K, N)
  rounded = w.astype(ml_dtypes.bfloat16).astype(np.float32)
  assert (rounded != w).any()
  half = kernels.pack(w, weights="bfloat16")
  assert half.panels.dtype == jnp.bfloat16
  np.testing.assert_array_equal(
    _bits(_product(x, half)), _bits(_product(x, kernels.pack(rounded)))
  )


@pytest.mark.parametrize("weights", kernels.WEIGHTS)
def test_a_row_has_the_same_bits_whatever_the_number_of_rows(weights):
  """Products of 1 to 64 rows, and of more, hold the rows of the largest."""
  x, w = _normal(1, 150, 300), _normal(2, 300, 100)
  packed, bias = kernels.pack(w, weights=weights), _normal(3, 100)
  whole = _bits(_product(x, packed, bias))
  for rows in (*range(1, 65), 65, 74, 100, 128):
    some = _bits(_product(x[:rows], packed, bias))
    np.testing.assert_array_equal(some, whole[:rows], err_msg=f"{rows} rows")
    last = _bits(_product(x[-rows:], packed, bias))
    np.testing.assert_array_equal(last, whole[-rows:], err_msg=f"{rows} rows")


def test_the_number_of_threads_changes_no_bit():
  """1, 2, 3 and 8 threads and as many as there are compute the same."""
  packed = kernels.pack(_normal(2, 300, 1000))
  for rows in (1, 8, 20):
    x = _normal(1, rows, 300)
    one = _bits(_product(x, packed, threads=1))
    for threads in (0, 2, 3, 8):
      many = _bits(_product(x, packed, threads=threads))
      np.testing.assert_array_equal(many, one)


@pytest.mark.parametrize("weights", kernels.WEIGHTS)
def test_nan_and_inf_pass_through_and_stay_in_their_row(weights):
  """As numpy: a NaN spoils its row or column, inf less inf is NaN."""
  x, w = _normal(1, 5, 40), _normal(2, 40, 33)
  x[1, 7], x[2, 3], x[4, 0] = np.nan, np.inf, -np.inf
  w[3, 5], w[9, 32], w[0, 0] = 0.0, np.nan, np.inf
  y = np.asarray(_product(x, kernels.pack(w, weights=weights)))
  with np.errstate(invalid="ignore"):
    exact = x.astype(np.float64) @ w.astype(np.float64)
  np.testing.assert_array_equal(np.isnan(y), np.isnan(exact))
  infinite = np.isinf(exact)
  assert infinite.any() and np.isfinite(exact).any()
  np.testing.assert_array_equal(y[infinite], exact[infinite])
  assert np.isfinite(y[np.isfinite(exact)]).all()


def test_several_products_in_one_call_are_those_of_several_calls():
  """Bits, biases and mixed storage included."""
  x = _normal(1, 6, 130)
  shapes = ((48, "float32"), (1, "bfloat16"), (200, "bfloat16"))
  packed = [
    kernels.pack(_normal(i, 130, n), weights=weights)
    for i, (n, weights) in enumerate(shapes)
  ]
  biases = [None, _normal(8, 1), _normal(9, 200)]
  together = jax.jit(kernels.matmuls)(x, packed, biases)
  for y, w, bias in zip(together, packed, biases, strict=True):
    np.testing.assert_array_equal(_bits(y), _bits(_product(x, w, bias)))


def test_products_run_inside_loops_and_branches():
  """`while_loop`, `cond` and `scan` give what calls one by one give."""
  packed = kernels.pack(_normal(2, 24, 24) / 5)
  x = _normal(1, 3, 24)

  @jax.jit
  def loop(x, packed, times):
    def body(carry):
      i, x = carry
      more = lambda: kernels.matmul(x, packed)
      return i + 1, lax.cond(i % 2 == 0, more, lambda: -x)

    return lax.while_loop(lambda c: c[0] < times, body, (0, x))[1]

  @jax.jit
  def scan(x, packed):
    step = lambda x, _: (kernels.matmul(x, packed), None)
    return lax.scan(step, x, None, length=3)[0]

  want = x
  for i in range(5):
    want = np.asarray(_product(want, packed)) if i % 2 == 0 else -want
  np.testing.assert_array_equal(_bits(loop(x, packed, 5)), _bits(want))
  want = x
  for _ in range(3):
    want = np.asarray(_product(want, packed))
  np.testing.assert_array_equal(_bits(scan(x, packed)), _bits(want))


def test_programs_may_run_at_the_same_time():
  """Six threads that multiply at once each get their own result."""
  packed = [kernels.pack(_normal(i, 200, 320)) for i in range(6)]
  xs = [_normal(10 + i, 1 + 3 * i, 200) for i in range(6)]
  want = [_bits(_product(x, w)) for x, w in zip(xs, packed, strict=True)]

  def work(i):
    return [_bits(_product(xs[i], packed[i])) for _ in range(30)]

  with concurrent.futures.ThreadPoolExecutor(6) as pool:
    for i, results in enumerate(pool.map(work, range(6))):
      for y in results:
        np.testing.assert_array_equal(y, want[i])


def test_mapping_and_differentiating_are_refused():
  """JAX says that it cannot, instead of giving something else."""
  packed = kernels.pack(_normal(2, 8, 8))
  x = _normal(1, 2, 3, 8)
  with pytest.raises(NotImplementedError, match="vmap"):
    jax.vmap(lambda x: kernels.matmul(x, packed))(x)
  with pytest.raises(ValueError, match="differentiated"):
    jax.grad(lambda x: kernels.matmul(x, packed).sum())(x[0])


def test_wrong_shapes_are_refused():
  """The message holds both shapes."""
  packed = kernels.pack(_normal(2, 8, 20))
  with pytest.raises(ValueError, match=r"\(3, 7\).*\(8, 20\)"):
    kernels.matmul(_normal(1, 3, 7), packed)
  with pytest.raises(ValueError, match=r"\(8,\).*\(8, 20\)"):
    kernels.matmul(_normal(1, 3, 8), packed, _normal(1, 8))
  with pytest.raises(ValueError, match="2 axes, not 3"):
    kernels.pack(_normal(1, 2, 3, 4))
  with pytest.raises(ValueError, match="float16"):
    kernels.pack(_normal(1, 2, 3), weights="float16")


def test_a_product_of_no_rows_is_empty():
  """Nothing to do, and nothing done."""
  packed = kernels.pack(_normal(2, 8, 20))
  assert _product(_normal(1, 0, 8), packed).shape == (0, 20)


@pytest.mark.parametrize("shape", [(5, 37), (16, 48), (1, 1)])
def test_packing_loses_nothing(shape):
  """Unpacked, a matrix and a transposed one are what was packed."""
  w = _normal(1, *shape)
  packed = kernels.pack(w)
  assert packed.shape == shape
  np.testing.assert_array_equal(kernels.unpack(packed), w)
  pad = np.asarray(packed.panels)[-1, :, (shape[1] - 1) % 16 + 1 :]
  assert (pad == 0).all()
  turned = kernels.pack(w, transpose=True)
  assert turned.shape == shape[::-1]
  np.testing.assert_array_equal(kernels.unpack(turned), w.T)


def test_layers_take_packed_weights_for_plain_ones():
  """`linear`, `linear_transposed` and `embed_rows`, any leading axes."""
  x, w, bias = _normal(1, 2, 3, 40), _normal(2, 40, 50), _normal(3, 50)
  table, index = _normal(4, 50, 40), np.array([[0, 49, 17], [-5, 99, 3]])
  packed = kernels.pack(table, transpose=True)
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)
  y = common.linear(x, kernels.pack(w), bias)
  close(y, common.linear(x, jnp.asarray(w), bias))
  half = common.linear(x.astype(jnp.bfloat16), kernels.pack(w))
  assert half.dtype == jnp.bfloat16
  close(common.linear_transposed(x, packed), x @ table.T)
  for weights in ([w, table.T], [kernels.pack(w), packed]):
    first, second = common.linears(x, weights, [bias, None])
    close(first, y)
    close(second, x @ table.T)
  rows = common.embed_rows(packed, index)
  np.testing.assert_array_equal(rows, table[np.clip(index, 0, 49)])


def _model(tied):
  config = decoder.DecoderConfig(
    vocab_size=70,
    width=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_width=40,
    max_length=64,
    rope=make_rope(8, {"rope_theta": 10000.0}),
    qkv_bias=True,
    tied=tied,
  )
  return decoder.build(config)


@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_model_gives_the_same_logits(tied):
  """Up to rounding: 1e-5 at logits of about 1."""
  model = _model(tied)
  params = model.init(jax.random.key(0))
  packed = kernels.pack_params(params)
  tokens = np.arange(12)[None] * 5 % 70
  run = jax.jit(lambda p: model.apply(p, tokens, jnp.arange(12)[None]).logits)
  np.testing.assert_allclose(run(packed), run(params), rtol=0, atol=1e-5)


def test_a_tied_embedding_is_held_once():
  """Only one leaf has as many values as the embedding."""
  packed = kernels.pack_params(_model(True).init(jax.random.key(0)))
  assert isinstance(packed["embed"], kernels.Packed)
  sizes = [leaf.size for leaf in jax.tree.leaves(packed)]
  assert sum(size >= 70 * 24 for size in sizes) == 1


def test_only_matrices_are_packed():
  """Norms, biases and learned positions stay arrays, in float32."""
  params = _model(False).init(jax.random.key(0))
  params["position"] = jnp.zeros((64, 24))
  packed = kernels.pack_params(params, weights="bfloat16")
  assert packed["position"].dtype == jnp.float32
  assert packed["final_norm"].dtype == jnp.float32
  for layer in packed["layers"]:
    for name, leaf in layer.items():
      matrix = name.startswith("w")
      assert isinstance(leaf, kernels.Packed) == matrix, name
      assert matrix or leaf.dtype == jnp.float32
  for name in ("head", "embed"):
    assert packed[name].panels.dtype == jnp.bfloat16
    assert packed[name].dtype == np.float32


def test_stacked_layers_are_not_packed():
  """A scan would copy each matrix on every pass."""
  params = decoder.stack_layers(_model(True).init(jax.random.key(0)))
  with pytest.raises(ValueError, match="stacked"):
    kernels.pack_params(params)


def test_an_embedding_is_packed_over_itself():
  table = _normal(4, 48, 20)
  want = kernels.pack(table, transpose=True)
  own = table.copy()
  got = kernels.make_packer()(("embed",), own)
  np.testing.assert_array_equal(got.panels, want.panels)
  assert got.columns == 48 and not np.array_equal(own, table)
