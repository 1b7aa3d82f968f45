"""Tests of the search for draft layers: objective, searches, texts."""

import functools
import itertools
import math

from commands import fresh
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from experiments import layer_search
from experiments.layer_search import Costs, Spent
from spec_jax.hub import Loaded
from spec_jax.models import decoder
from spec_jax.pairing import choose_layers
from spec_jax.settings import Settings
from tests import fakes

COSTS = Costs(target=(1.0, 1.1, 1.2, 1.3, 1.4), base=0.05, layer=0.2)


def _replay(agrees, depth, step):
  """Counts steps and cost of a text whose agreements are known, by walking."""
  at, steps, cost = 0, 0, 0.0
  while at < len(agrees):
    d = min(depth, len(agrees) - at - 1)
    kept = 0
    while kept < d and agrees[at + kept]:
      kept += 1
    at, steps, cost = at + kept + 1, steps + 1, cost + step(d)
  return steps, cost


def _enumerate(chances, depth, step):
  """Expects steps and cost over all outcomes of all tokens."""
  total = np.zeros(2)
  for outcome in itertools.product((False, True), repeat=len(chances)):
    weight = math.prod(
      c if o else 1 - c for c, o in zip(chances, outcome, strict=True)
    )
    total += weight * np.array(_replay(outcome, depth, step))
  return total


def _step(d):
  return d * 0.3 + COSTS.target[d]


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_expected_steps_are_those_of_a_replay(depth):
  """Every text of 7 tokens that agree or not; fractions by enumeration."""
  for agrees in itertools.product((0, 1), repeat=7):
    found = layer_search.expect(agrees, depth, _step)
    assert found == pytest.approx(_replay(agrees, depth, _step))
  chances = [0.9, 0.2, 1.0, 0.5, 0.7, 0.0, 0.4]
  expected = _enumerate(chances, depth, _step)
  np.testing.assert_allclose(
    layer_search.expect(chances, depth, _step), expected
  )


def test_the_objective_is_time_per_token_at_the_best_depth():
  """Always right: as deep as allowed; never right: 1 and no token more."""
  # Depth 4, 10 tokens: two steps of 5 tokens, one draft pass costs .25.
  right = layer_search.score([[1.0] * 10], 1, COSTS)
  assert right.depth == 4 and right.emitted_per_step == 5
  assert right.objective == pytest.approx(2 * (4 * 0.25 + 1.4) / 10)
  wrong = layer_search.score([[0.0] * 10], 1, COSTS)
  assert wrong.depth == 1 and wrong.emitted_per_step == 1
  # The last token is not drafted for.
  assert wrong.objective == pytest.approx((9 * (0.25 + 1.1) + 1) / 10)
  both = layer_search.score([[1.0] * 10, [0.0] * 10], 1, COSTS)
  assert both.agreement == 0.5
  assert right.objective < both.objective < wrong.objective


def test_a_line_is_fitted():
  """Intercept and slope; neither may be negative."""
  assert layer_search.fit_line([1, 2, 4], [3, 5, 9]) == pytest.approx((1, 2))
  assert layer_search.fit_line([1, 2], [1, 4])[0] == 0


class _Counted:
  """An objective that counts what it is asked, up to a limit."""

  def __init__(self, function, limit):
    self.function, self.limit, self.asked = function, limit, {}

  def __call__(self, layers):
    if layers not in self.asked and len(self.asked) >= self.limit:
      raise Spent
    self.asked[layers] = self.function(layers)
    return self.asked[layers]

  @property
  def best(self):
    return min(self.asked, key=self.asked.get)


_PLANTED = (0, 3, 4, 8, 9)


def _far(layers):
  """Grows with the distance from the planted set, unevenly."""
  return 1 + sum(1 + 0.1 * i for i in set(layers) ^ set(_PLANTED))


def test_the_process_finds_a_planted_set_that_chance_does_not():
  """60 of 1,023 sets: found; 60 random ones hold it 6 % of the time."""
  ours = _Counted(_far, 60)
  layer_search.search("bayesian", ours, 10, seed=1)
  assert ours.best == _PLANTED and len(ours.asked) == 60
  random = np.random.default_rng(1)
  chance = _Counted(_far, 60)
  with pytest.raises(Spent):
    while True:
      chance(tuple(np.flatnonzero(random.integers(0, 2, 10)).tolist()))
  assert chance.function(chance.best) > 2


def test_a_search_is_repeatable_and_ends_when_all_is_tried():
  """The same seed asks the same sets; all 7 sets of 3 layers, then it ends."""
  runs = [_Counted(_far, 30) for _ in range(3)]
  for run, seed in zip(runs, (5, 5, 6), strict=True):
    layer_search.search("bayesian", run, 10, seed=seed)
  assert list(runs[0].asked) == list(runs[1].asked) != list(runs[2].asked)
  small = _Counted(_far, 99)
  layer_search.search("bayesian", small, 3, seed=0)
  assert len(small.asked) == 7
  with pytest.raises(ValueError, match="greedy, bayesian, got 'x'"):
    layer_search.search("x", small, 3, seed=0)


def test_expected_improvement_is_the_textbooks():
  """Against scipy's normal law and a dense inverse, one length at a time."""
  random = np.random.default_rng(0)
  X = np.unique(random.integers(0, 2, (9, 8)).astype(bool), axis=0)
  pool = random.integers(0, 2, (20, 8)).astype(bool)
  y = random.normal(size=len(X))
  z = (y - y.mean()) / y.std()
  likely, expected = [], []
  for length in (0.8, 2, 4, 8, 16):

    def kernel(a, b, length=length):
      return np.exp(-(a[:, None] ^ b[None]).sum(-1) / length)

    K = kernel(X, X) + 1e-4 * np.eye(len(X))
    law = stats.multivariate_normal(np.zeros(len(X)), K)
    likely.append(law.logpdf(z))
    cross = kernel(pool, X)
    mean = cross @ np.linalg.inv(K) @ z
    var = 1 + 1e-4 - np.einsum("ij,jk,ik->i", cross, np.linalg.inv(K), cross)
    deviation = np.sqrt(np.maximum(var, 1e-12))
    gain = (z.min() - mean) / deviation
    expected.append(
      deviation * (gain * stats.norm.cdf(gain) + stats.norm.pdf(gain))
    )
  found = layer_search.expected_improvement(X, y, pool)
  np.testing.assert_allclose(found, expected[np.argmax(likely)], atol=1e-6)


# --- on a model -------------------------------------------------------------


@functools.cache
def _planted():
  """A model of five layers of which 1, 3 and 4 add nothing."""
  model, params = fakes.tiny(13, windows=(None,) * 5)
  layers = [
    layer
    | (
      {name: jnp.zeros_like(layer[name]) for name in ("wo", "w_down")}
      if i in (1, 3, 4)
      else {}
    )
    for i, layer in enumerate(params["layers"])
  ]
  params = params | {"layers": tuple(layers)}
  return Loaded(model, params, None, {}, "planted", {}, (), ())


_IDS = [[1, 2, 3], [7, 5, 3, 2, 1], [4, 4, 9, 0]]


def _texts(temperature):
  module = fresh("search_layers")
  settings = Settings(temperature=temperature, max_new_tokens=24, stop_ids=())
  return module.Texts(_planted(), _IDS, settings, seed=0)


def test_the_greedy_search_drops_the_layers_that_do_nothing():
  """It ends with the two that count, which agree everywhere."""
  texts = _texts(0.0)

  def objective(layers):
    return layer_search.score(
      texts.agreements(layers), len(layers), COSTS
    ).objective

  ours = _Counted(objective, 99)
  layer_search.search("greedy", ours, 5, seed=0)
  assert ours.best == (0, 2)
  # All, then 5 + 4 + 3 + 2 with one fewer.
  assert len(ours.asked) == 1 + 5 + 4 + 3 + 2
  assert texts.agreements((0, 2)) == [[1.0] * 24] * 3
  # A twin without the second layer that counts is wrong somewhere.
  assert min(map(min, texts.agreements((0, 1, 3)))) == 0


def test_agreement_of_sampled_texts_is_the_overlap_of_the_laws():
  """Sum of min(p, q) at each token, with numpy, from whole passes."""
  texts = _texts(0.8)
  loaded = _planted()
  config, params = choose_layers(loaded.model.config, loaded.params, (0, 1))
  short = decoder.build(config)
  for row, output in enumerate(texts.outputs):
    whole = jnp.asarray([[*_IDS[row], *output]])
    at = jnp.arange(whole.shape[1])[None]
    laws = []
    for model, own in ((loaded.model, loaded.params), (short, params)):
      logits = fakes.jit(model.apply)(own, whole, at).logits[0]
      law = np.exp(np.asarray(logits, float) / 0.8)
      laws.append(law / law.sum(-1, keepdims=True))
    first = len(_IDS[row]) - 1
    expected = np.minimum(*laws).sum(-1)[first : first + len(output)]
    found = texts.agreements((0, 1))[row]
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert 0.01 < np.mean(found) < 0.99
