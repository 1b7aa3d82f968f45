"""Losses against numpy, their gradients against finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train import losses

_T, _BETA = 0.7, 0.3


def _softmax(x):
  x = np.asarray(x, np.float64)
  e = np.where(np.isneginf(x), 0, np.exp(x - x.max(-1, keepdims=True)))
  return e / e.sum(-1, keepdims=True)


def _by_hand(name, target, draft):
  """The loss of one position in float64; 0 log 0 = 0."""
  p, q = _softmax(np.asarray(target) / _T), _softmax(np.asarray(draft) / _T)

  def kl(a, b):
    there = a > 0
    b = np.where(b > 0, b, np.exp(losses.LOG_FLOOR))
    return (a[there] * np.log(a[there] / b[there])).sum()

  m = _BETA * p + (1 - _BETA) * q
  return {
    "forward_kl": lambda: kl(p, q),
    "reverse_kl": lambda: kl(q, p),
    "jsd": lambda: _BETA * kl(p, m) + (1 - _BETA) * kl(q, m),
    "tvd": lambda: abs(p - q).sum() / 2,
  }[name]()


def _logits(rows=6, vocab=7, seed=0, refused=0):
  rng = np.random.default_rng(seed)
  target = rng.normal(size=(rows, vocab)).astype(np.float32) * 2
  for row in range(rows):
    target[row, rng.permutation(vocab)[:refused]] = -np.inf
  draft = rng.normal(size=(rows, vocab)).astype(np.float32) * 2
  return target, draft


def _total(name, target, draft, weights, **options):
  options = {"temperature": _T, "beta": _BETA} | options
  return losses.divergence(name, target, draft, weights, **options)[0].sum()


@pytest.mark.parametrize("refused", [0, 3])
@pytest.mark.parametrize("name", losses.LOSSES)
def test_losses_and_gradients_are_those_of_numpy(name, refused):
  """Value in float64 by hand; gradient by central differences of that."""
  target, draft = _logits(refused=refused)
  weights = np.array([1, 0.5, 2, 0, 1, 1], np.float32)
  value, grad = jax.value_and_grad(_total, 2)(name, target, draft, weights)
  expected = sum(
    w * _by_hand(name, t, d)
    for w, t, d in zip(weights, target, draft, strict=True)
  )
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  step = 1e-6
  for row, column in np.ndindex(draft.shape):
    up, down = (np.array(draft[row], np.float64) for _ in range(2))
    up[column] += step
    down[column] -= step
    slope = _by_hand(name, target[row], up) - _by_hand(name, target[row], down)
    slope *= weights[row] / (2 * step)
    np.testing.assert_allclose(grad[row, column], slope, atol=2e-5)


def test_acceptance_is_one_less_the_total_variation():
  target, draft = _logits(rows=50)
  ones = jnp.ones(50)
  tvd, alpha = losses.divergence("tvd", target, draft, ones)
  np.testing.assert_allclose(alpha, 1 - tvd, atol=1e-6)
  p, q = _softmax(target), _softmax(draft)
  np.testing.assert_allclose(alpha, np.minimum(p, q).sum(-1), atol=1e-6)


def test_jsd_tends_to_both_divergences():
  target, draft = (0.3 * x for x in _logits())
  ones = jnp.ones(6)
  for beta, name in ((1e-3, "forward_kl"), (1 - 1e-3, "reverse_kl")):
    jsd = _total("jsd", target, draft, ones, beta=beta) / 1e-3
    np.testing.assert_allclose(
      jsd, _total(name, target, draft, ones), rtol=1e-2
    )


@pytest.mark.parametrize("name", losses.LOSSES)
def test_what_does_not_count_gives_neither_loss_nor_gradient(name):
  """Refused tokens, rows of nothing, NaN where the weight is 0."""
  target, draft = _logits(refused=4)
  target[1] = -np.inf  # no law at all, and it counts
  target[2], draft[2] = np.nan, np.nan
  draft[3], target[3] = np.inf, -np.inf
  weights = np.array([1, 1, 0, 0, 1, 1], np.float32)
  both = jax.value_and_grad(_total, (1, 2))
  value, (of_target, of_draft) = both(name, target, draft, weights)
  assert np.isfinite(value)
  assert np.isfinite(of_draft).all()
  assert not np.asarray(of_draft)[2:4].any()
  assert not np.asarray(of_target).any()  # the target is not trained
  nothing = _total(name, target, draft, np.zeros(6, np.float32))
  assert nothing == 0


def test_one_where_is_not_enough():
  """Twin: masking the loss alone leaves a gradient of NaN."""
  target, draft = _logits(refused=4)
  target[2] = -np.inf
  weights = np.array([1, 1, 0, 1, 1, 1], np.float32)

  def naive(draft):
    log_p = jax.nn.log_softmax(target)
    log_q = jax.nn.log_softmax(draft)
    each = (jnp.exp(log_p) * (log_p - log_q)).sum(-1)
    return jnp.where(weights > 0, each, 0).sum()

  assert not np.isfinite(jax.grad(naive)(draft)).all()


@pytest.mark.parametrize("name", losses.LOSSES)
def test_nan_that_counts_is_seen(name):
  target, draft = _logits()
  draft[1, 2] = np.nan
  assert np.isnan(_total(name, target, draft, jnp.ones(6)))


def test_cross_entropy_of_labels():
  _, draft = _logits()
  labels = np.array([0, 6, 3, -1, 7, 2])
  weights = np.array([1, 2, 0, 1, 1, 1], np.float32)
  found = losses.cross_entropy(draft, labels, weights)
  q = _softmax(draft)
  expected = [-np.log(q[0, 0]), -2 * np.log(q[1, 6]), 0, 0, 0, -np.log(q[5, 2])]
  np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_top_k_teacher_is_renormalised():
  target = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
  draft = jnp.log(jnp.array([[0.25, 0.25, 0.25, 0.25]]))
  options = {"temperature": 1.0, "top_k": 2}
  loss, alpha = losses.divergence(
    "forward_kl", target, draft, jnp.ones(1), **options
  )
  expected = 0.625 * np.log(0.625 / 0.25) + 0.375 * np.log(0.375 / 0.25)
  np.testing.assert_allclose(loss, [expected], rtol=1e-5)
  np.testing.assert_allclose(alpha, [0.25 + 0.25 + 0.15 + 0.05], rtol=1e-5)


def test_smaller_vocabulary_keeps_the_law_and_drops_what_cannot_be_said():
  probs = np.array([[0.4, 0.3, 0.2, 0.1], [0.1, 0.6, 0.1, 0.2]])
  ids = np.array([0, 2, 3])
  kept, weights = losses.keep_ids(jnp.log(probs), ids, jnp.ones(2))
  np.testing.assert_allclose(weights, [1, 0])
  expected = np.array([4, 2, 1]) / 7
  np.testing.assert_allclose(losses.law(kept).probs[0], expected, rtol=1e-5)


def test_forward_kl_is_exact_where_the_draft_is_almost_sure():
  """ln q below the floor costs what it costs; what is refused costs 30."""
  target = jnp.log(jnp.array([[0.5, 0.5, 0.0], [0.5, 0.25, 0.25]]))
  draft = jnp.array([[0.0, -40.0, 0.0], [0.0, -jnp.inf, 0.0]])
  for top_k in (0, 3):
    value, _ = losses.divergence(
      "forward_kl", target, draft, jnp.ones(2), top_k=top_k
    )
    log_2 = np.log(2)
    first = -log_2 + log_2 + 20  # q = 1/2, e^-40 / 2, 1/2
    second = -0.5 * log_2 - 0.5 * 2 * log_2 + 0.75 * log_2 + 0.25 * 30
    np.testing.assert_allclose(value, [first, second], rtol=1e-5)
  slope = jax.grad(
    lambda x: losses.divergence("forward_kl", target, x, jnp.ones(2))[0].sum()
  )(draft)
  np.testing.assert_allclose(slope[0], [0, -0.5, 0.5], atol=1e-5)
  assert np.isfinite(slope).all()


def test_agreement_counts_the_likeliest_tokens():
  """Ties agree; a law that is not a number agrees with nothing."""
  target = jnp.array([[1.0, 2.0, 0.0], [2.0, 2.0, 0.0], [0.0, 1.0, 0.0]])
  draft = jnp.array([[0.0, 3.0, 1.0], [0.0, 1.0, 0.0], [5.0, jnp.nan, 0.0]])
  found = losses.agreement(target, draft, jnp.array([0.5, 1.0, 1.0]))
  np.testing.assert_array_equal(found, [0.5, 1.0, 0.0])
  labels = jnp.array([1, 0, 2])
  likely = losses.is_likeliest(target, labels)
  np.testing.assert_array_equal(likely, [True, True, False])
  outside = losses.is_likeliest(target, jnp.array([-1, 3, 1]))
  np.testing.assert_array_equal(outside, [False, False, True])


@pytest.mark.parametrize(
  "options, words",
  [
    ({"name": "mse"}, "unknown loss 'mse'"),
    ({"beta": 1.0}, r"beta must be in \(0, 1\), got 1.0"),
    ({"temperature": 0.0}, "temperature must be above 0, got 0.0"),
    ({"top_k": -1}, "top_k must be at least 1, got -1"),
  ],
)
def test_numbers_out_of_range_are_refused(options, words):
  target, draft = _logits()
  options = {"name": "jsd"} | options
  name = options.pop("name")
  with pytest.raises(ValueError, match=words):
    losses.divergence(name, target, draft, jnp.ones(6), **options)
