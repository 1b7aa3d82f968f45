"""The decoder's options: training, taps, some logits, bfloat16, refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_decoder import (
  CONFIGS,
  PLAIN,
  TOLERANCE,
  make,
  random_tokens,
  read,
  train,
)

from spec_jax.models import decoder


@pytest.mark.parametrize(
  "options", [{"remat": True}, {"scan_layers": True}, {"taps": (0, 1, 2)}]
)
def test_options_change_no_loss_and_no_gradient(options):
  """Rematerialised, scanned and tapped models are the plain one."""
  tokens = random_tokens(2, 6)

  def loss_and_gradient(**options):
    model, params = make("plain", **options)

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
  model, params = make("plain", remat=True)
  jaxpr = jax.make_jaxpr(lambda p: train(model, p, random_tokens(1, 4)).logits)(
    params
  )
  assert str(jaxpr).count("prevent_cse") == 2


@pytest.mark.parametrize("scan_layers", [False, True])
def test_taps_are_residual_streams(scan_layers):
  """Tap `t` equals what a model of the first `t` layers normalises.

  With the final norm and output matrix on it, it is that model's logits.
  """
  model, params = make("plain", taps=(0, 1, 2), scan_layers=scan_layers)
  _, plain = make("plain")
  tokens = random_tokens(2, 5)
  hidden = train(model, params, tokens).hidden
  assert hidden.shape == (2, 5, 3, 16)
  np.testing.assert_array_equal(hidden[:, :, 0], model.embed(params, tokens))
  for a, t in ((1, 1), (2, 2)):
    cut = decoder.build(dataclasses.replace(PLAIN, num_layers=t, windows=()))
    short = plain | {"layers": plain["layers"][:t]}
    out = train(cut, short, tokens)
    x = np.asarray(hidden[:, :, a], np.float64)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + PLAIN.norm_eps)
    x = x * np.asarray(plain["final_norm"])[None, None]
    np.testing.assert_allclose(x, out.hidden[:, :, 0], **TOLERANCE)
    np.testing.assert_allclose(
      x @ np.asarray(plain["head"]), out.logits, **TOLERANCE
    )


@pytest.mark.parametrize("name", ["plain", "local"])
def test_logits_only_where_asked(name):
  """`logits_at` picks rows; none asked for skips the output matrix."""
  model, params = make(name)
  tokens = random_tokens(2, 6)
  whole = train(model, params, tokens)
  at = jnp.array([[5, 0], [3, 3]])
  some = train(model, params, tokens, logits_at=at).logits
  expected = np.stack([whole.logits[0, [5, 0]], whole.logits[1, [3, 3]]])
  np.testing.assert_allclose(some, expected, **TOLERANCE)
  none = jnp.zeros((2, 0), jnp.int32)
  assert train(model, params, tokens, logits_at=none).logits.shape == (
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


def test_bfloat16_keeps_float32_logits():
  """Weights, activations and cache are bfloat16, logits are not."""
  model, _ = make("local", dtype=jnp.bfloat16)
  params = model.init(jax.random.key(0))
  exact = decoder.build(CONFIGS["local"])
  tokens = random_tokens(2, 6)
  cache, out = read(model, params, model.init_cache(2, 8), tokens)
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
  assert cache.k[0].dtype == out.hidden.dtype == jnp.bfloat16
  assert out.logits.dtype == jnp.float32
  wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
  expected = train(exact, wide, tokens).logits
  # bfloat16 keeps 8 bits: 0.4 % a rounding, some 20 of them, of logits near 1.
  np.testing.assert_allclose(out.logits, expected, atol=0.15)
  untied = decoder.build(PLAIN, dtype=jnp.bfloat16)
  made = jax.eval_shape(untied.init, jax.random.key(0))
  logits = jax.eval_shape(untied.unembed, made, out.hidden)
  assert logits.dtype == jnp.float32
  narrow = decoder.build(CONFIGS["local"], cache_dtype=jnp.bfloat16)
  assert narrow.init_cache(1, 4).k[0].dtype == jnp.bfloat16


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("name", ["plain", "learned"])
def test_axes_name_every_dimension(name, scan_layers):
  """`axes` has a name or None for each dimension of each parameter."""
  model = decoder.build(CONFIGS[name], scan_layers=scan_layers)
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


def test_what_cannot_be_is_refused():
  """Errors name both values, before anything runs."""
  model, params = make("plain")
  with pytest.raises(ValueError, match=r"41 slots .* 40"):
    model.init_cache(1, 41)
  with pytest.raises(ValueError, match="window"):
    decoder.build(CONFIGS["local"], scan_layers=True)
  with pytest.raises(ValueError, match=r"\(4,\).*2"):
    decoder.build(PLAIN, taps=(4,))
  with pytest.raises(ValueError, match="together"):
    model.apply(
      params, random_tokens(1, 2), random_tokens(1, 2), model.init_cache(1, 4)
    )
  for change, match in (
    ({"num_kv_heads": 3}, "4 heads"),
    ({"windows": (4,)}, "1 windows for 2"),
    ({"windows": (0, None)}, "at least 1"),
    ({"head_dim": 8}, "3 rope frequencies"),
    ({"norm": "batch"}, "batch"),
    ({"activation": "relu6"}, "relu6"),
  ):
    with pytest.raises(ValueError, match=match):
      dataclasses.replace(PLAIN, **change)
