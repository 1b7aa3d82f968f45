"""Laws and draws against sorting, numbers by hand and the inverse CDF."""

from hypothesis import given, settings, strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import sampling
from spec_jax.base import Counts, Noise, Sampling
from tests import fakes, reference

ALMOST_ONE = fakes.ALMOST_ONE
OFF = {
  "temperature": 1.0,
  "top_k": 0,
  "top_p": 1.0,
  "min_p": 0.0,
}
_law = jax.jit(sampling.law)
_draw = jax.jit(sampling.draw)


def arrays(rows, names=OFF):
  """Returns a `Sampling` with one array a setting; missing ones are off."""
  return Sampling(
    **{
      name: jnp.array(
        [row.get(name, OFF[name]) for row in rows],
        jnp.int32 if name == "top_k" else jnp.float32,
      )
      for name in names
    }
  )


def law_of(probs, **setting):
  """Returns the law of one row whose law before warping is `probs`."""
  with np.errstate(divide="ignore"):
    logits = np.log(np.array([probs], np.float64)).astype(np.float32)
  return np.asarray(_law(jnp.asarray(logits), arrays([setting])))[0]


def kept(law):
  return np.flatnonzero(law).tolist()


# --- the law ---------------------------------------------------------------

FOUR = [0.5, 0.3, 0.15, 0.05]


@pytest.mark.parametrize(
  ("top_p", "tokens"),
  [
    (0.6, [0, 1]),
    (0.85, [0, 1, 2]),
    (0.4, [0]),
    (0.0, [0]),
    (1.0, [0, 1, 2, 3]),
  ],
)
def test_the_nucleus_keeps_the_token_that_crosses(top_p, tokens):
  """S6: in this order and in another."""
  assert kept(law_of(FOUR, top_p=top_p)) == tokens
  order = [2, 0, 3, 1]
  shuffled = law_of([FOUR[i] for i in order], top_p=top_p)
  assert sorted(order[i] for i in kept(shuffled)) == tokens


def test_top_p_one_keeps_what_rounding_would_drop():
  """S6: the float32 sum of 1,000 tenths of a percent is not 1."""
  law = law_of([0.001] * 999 + [0.001 + 1e-9], top_p=1.0)
  assert len(kept(law)) == 1000


@pytest.mark.parametrize(
  ("setting", "tokens"),
  [
    ({"top_k": 1}, [0]),
    ({"top_k": 1, "top_p": 0.8}, [0]),
    ({"top_k": 2}, [0, 1]),
    ({"top_k": 4}, [0, 1, 2, 3]),
    ({"top_k": 9}, [0, 1, 2, 3]),
    ({"top_k": 0}, [0, 1, 2, 3]),
    # Of .5 and .3 the first is .625 of the rest: not enough for .7.
    ({"top_k": 2, "top_p": 0.7}, [0, 1]),
    ({"top_k": 2, "top_p": 0.6}, [0]),
    ({"min_p": 0.31}, [0, 1]),
    ({"min_p": 0.29}, [0, 1, 2]),
    ({"min_p": 1.0}, [0]),
    ({"temperature": 0.0, "top_k": 3}, [0]),
  ],
)
def test_top_k_top_p_and_min_p_by_hand(setting, tokens):
  """S7: each filter sees what the one before it left, renormalised."""
  law = law_of(FOUR, **setting)
  assert kept(law) == tokens
  assert law.sum() == pytest.approx(1, abs=1e-6)


def test_ties_at_a_threshold_are_kept():
  """S7: the documented rule, for top-k and for top-p."""
  tied = [0.1, 0.25, 0.25, 0.25, 0.15]
  assert kept(law_of(tied, top_k=2)) == [1, 2, 3]
  assert kept(law_of(tied, top_p=0.3)) == [1, 2, 3]


def test_a_greedy_row_takes_the_first_of_equals():
  """L10: logits 1, 3, 3, 0 give token 1, whatever else is set."""
  logits = jnp.array([[1.0, 3.0, 3.0, 0.0]])
  for setting in ({}, {"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.9}):
    law = _law(logits, arrays([{"temperature": 0.0, **setting}]))
    assert law.tolist() == [[0, 1, 0, 0]]
  assert _law(logits, Sampling()).tolist() == [[0, 1, 0, 0]]
  assert _draw(_law(logits, Sampling()), jnp.array([0.9])).tolist() == [1]


def test_a_temperature_raises_probabilities_to_a_power():
  """Temperature 1/2 squares: 25, 9, 2.25 and .25 of 36.5."""
  expected = np.array([25, 9, 2.25, 0.25]) / 36.5
  np.testing.assert_allclose(law_of(FOUR, temperature=0.5), expected, rtol=1e-5)


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e6, 1e30])
def test_extreme_temperatures_give_numbers(temperature):
  """Neither overflow nor NaN, with a banned token and large logits."""
  logits = jnp.array([[3e30, 1e30, -jnp.inf, -3e30]])
  law = np.asarray(_law(logits, arrays([{"temperature": temperature}])))[0]
  assert np.isfinite(law).all() and law.sum() == pytest.approx(1)
  assert law[0] >= law[1] >= law[3] and law[2] == 0


GRID = [
  {"top_k": 5},
  {"top_p": 0.0787},
  {"top_p": 0.51},
  {"top_p": 0.987},
  {"min_p": 0.203},
  {"temperature": 0.6, "top_k": 40, "top_p": 0.77},
  {"temperature": 1.7, "top_p": 0.9, "min_p": 0.05},
  {"temperature": 0.0, "top_k": 4},
]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.3, 2.0, 8.0]))
def test_bisection_finds_the_thresholds_that_sorting_finds(seed, spread):
  """Random logits of many spreads, with exact ties, against a numpy sort."""
  rng = np.random.default_rng(seed)
  logits = (spread * rng.normal(size=(len(GRID), 300))).astype(np.float32)
  logits[:, ::7] = logits[:, 1::7][:, : logits[:, ::7].shape[1]]
  found = np.asarray(_law(jnp.asarray(logits), arrays(GRID)))
  for row, z, setting in zip(found, logits, GRID, strict=True):
    setting = {"temperature": 1.0, **setting}
    np.testing.assert_allclose(
      row, reference.warp(z, setting), rtol=2e-4, atol=1e-7
    )


def test_a_setting_that_is_off_equals_one_that_is_compiled_out():
  """S3: leaving a field out changes nothing, to the bit."""
  logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, 50)))
  for name in ("top_k", "top_p", "min_p"):
    full = sampling.law(logits, arrays([{}] * 3))
    names = [n for n in OFF if n != name]
    assert fakes.same(full, sampling.law(logits, arrays([{}] * 3, names)))
  greedy = sampling.law(logits, arrays([{"temperature": 0.0}] * 3))
  assert fakes.same(greedy, sampling.law(logits, Sampling()))


def test_a_rows_law_does_not_depend_on_its_batch():
  """B6: each row of the grid alone and among the others, to the bit."""
  logits = jnp.asarray(np.random.default_rng(1).normal(size=(8, 64)) * 3)
  together = _law(logits, arrays(GRID))
  for i, setting in enumerate(GRID):
    alone = _law(logits[i : i + 1], arrays([setting]))
    assert fakes.same(alone[0], together[i])


# --- penalties, bias and bans -------------------------------------------------


def counts_of(prompt, output, V):
  table = np.zeros((1, V), np.int32)
  np.add.at(table[0], list(output), 1)
  seen = np.isin(np.arange(V), list(prompt))[None]
  return Counts(
    prompt=jnp.asarray(seen),
    output=jnp.asarray(table),
    num_output=jnp.array([len(output)]),
    stop_ids=jnp.array([[1, -1]]),
  )


def test_each_verified_row_is_penalised_with_its_own_prefix():
  """S4: context [5], drafts [3, 3], penalty 2, logit 2: 2, 1 and 1."""
  row = Sampling(repetition_penalty=jnp.array([2.0]))
  logits = jnp.zeros((1, 6)).at[0, 3].set(2.0)
  tokens = jnp.array([[5, 3, 3]])
  found = []
  for node in range(3):
    visible = jnp.arange(3)[None] <= node
    after = sampling.path_counts(counts_of([5], [], 6), tokens, visible)
    found.append(float(sampling.scores(logits, row, after)[0, 3]))
  assert found == [2.0, 1.0, 1.0]


def test_penalties_count_every_token_of_a_step():
  """S1: after 7, 7, 8 a penalty of .5 takes 1.0 off 7 and .5 off 8."""
  row = Sampling(frequency_penalty=jnp.array([0.5]))
  before = counts_of([7], [], 10)
  tokens, live = jnp.array([[7, 7, 8, 9]]), jnp.array([[True] * 3 + [False]])
  after = sampling.add_counts(before, tokens, live)
  found = sampling.scores(jnp.zeros((1, 10)), row, after)[0]
  assert found.tolist() == [0] * 7 + [-1.0, -0.5, 0]
  assert after.num_output.tolist() == [3]


def test_the_three_penalties_differ_in_what_they_count():
  """Prompt [0], output [1, 1]; logits 2 and, for token 1, -2."""
  logits = jnp.array([[2.0, -2.0, 2.0]])
  counts = counts_of([0], [1, 1], 3)
  expected = {
    "repetition_penalty": [1.0, -4.0, 2.0],  # Divides or multiplies by 2.
    "presence_penalty": [2.0, -4.0, 2.0],
    "frequency_penalty": [2.0, -6.0, 2.0],
  }
  for name, values in expected.items():
    row = Sampling(**{name: jnp.array([2.0])})
    assert sampling.scores(logits, row, counts)[0].tolist() == values
  every = Sampling(**{name: jnp.array([2.0]) for name in expected})
  assert sampling.scores(logits, every, counts)[0].tolist() == [1, -10, 2]


def test_stop_ids_are_banned_before_the_minimum_and_not_at_it():
  """Two output tokens: a minimum of 3 bans id 1, one of 2 does not."""
  counts = counts_of([], [0, 0], 3)
  for minimum, banned in ((3, True), (2, False)):
    row = Sampling(min_new_tokens=jnp.array([minimum]))
    z = sampling.scores(jnp.zeros((1, 3)), row, counts)[0]
    assert np.isneginf(z).tolist() == [False, banned, False]


def test_a_ban_stands_whatever_the_logit_and_the_penalties():
  """The largest logit is banned: no mass on it, none of NaN."""
  bias = jnp.array([[0.0, -jnp.inf, 1.5]])
  row = Sampling(
    temperature=jnp.array([1.0]),
    bias=bias,
    repetition_penalty=jnp.array([2.0]),
  )
  law = sampling.warp(
    jnp.array([[0.0, 50.0, 0.0]]), row, counts_of([1], [1], 3)
  )
  expected = np.array([1, 0, np.exp(1.5)]) / (1 + np.exp(1.5))
  np.testing.assert_allclose(law[0], expected, rtol=1e-6)


# --- draws -----------------------------------------------------------------


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_a_draw_is_the_plain_inverse_cdf(data):
  """Whole weights and binary fractions: every float32 sum is exact.

  300 weights of at most 1,000 sum to less than 2^19; with uniforms of 5 bits
  the products fit float32's 24.
  """
  V = data.draw(st.sampled_from([1, 2, 127, 128, 129, 300]))
  seed = data.draw(st.integers(0, 2**32 - 1))
  rng = np.random.default_rng(seed)
  weights = rng.integers(0, 1001, (32, V)) * (rng.random((32, V)) < 0.3)
  weights[:, data.draw(st.integers(0, V - 1))] += 1
  uniform = np.arange(32) / 32
  found = np.asarray(
    _draw(jnp.asarray(weights, jnp.float32), jnp.asarray(uniform, jnp.float32))
  )
  for token, w, u in zip(found, weights, uniform, strict=True):
    assert token == int(np.argmax(np.cumsum(w) > u * w.sum()))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.sampled_from([3, 128, 300]))
def test_a_token_of_probability_zero_is_never_drawn(seed, V):
  """Random sparse laws, tiny ones too; uniforms 0, just below 1, between."""
  rng = np.random.default_rng(seed)
  probs = rng.random((48, V)) ** 20 * (rng.random((48, V)) < 0.1)
  probs[np.arange(48), rng.integers(0, V, 48)] += 10.0 ** rng.integers(-30, 1)
  uniform = rng.random(48)
  uniform[:16], uniform[16:32] = 0, ALMOST_ONE
  found = np.asarray(
    _draw(jnp.asarray(probs, jnp.float32), jnp.asarray(uniform, jnp.float32))
  )
  assert (probs.astype(np.float32)[np.arange(48), found] > 0).all()


@pytest.mark.parametrize(("V", "k"), [(1, 1), (7, 7), (300, 5), (1000, 200)])
def test_the_largest_are_those_of_a_sort(V, k):
  """One block and several, a last one in part, ties and rows of -inf."""
  rng = np.random.default_rng(V)
  scores = rng.integers(-3, 3, (6, V)).astype(np.float32)
  scores[0], scores[1] = rng.normal(size=V), -np.inf
  scores[2, ::2] = -np.inf
  found = jax.jit(sampling.largest, static_argnums=1)(jnp.asarray(scores), k)
  expected = np.argsort(-scores, -1, kind="stable")[:, :k]
  assert (np.asarray(found) == expected).all()


def test_rounding_between_blocks_does_not_draw_an_empty_token():
  """Two blocks of 1 + 2^-23 and 2^-24 sum to 1 + 2^-22: 2^-23 too much."""
  probs = np.zeros((1, 200), np.float32)
  probs[0, 5], probs[0, 135] = 1 + 2.0**-23, 2.0**-24
  found = _draw(jnp.asarray(probs), jnp.array([ALMOST_ONE]))
  assert found.tolist() == [135]


# --- noise -----------------------------------------------------------------


def test_noise_is_uniform_below_one_and_shaped_as_documented():
  """Means of 12,000 draws lie within 5 standard errors of a half."""
  keys = jax.random.split(jax.random.key(0), 2000)
  noise = sampling.draw_noise(keys, jnp.arange(2000), 6, 4)
  assert noise.draft.shape == noise.accept.shape == (2000, 6)
  assert noise.residual.shape == (2000,) and noise.plain.shape == (2000, 5)
  for x in jax.tree.leaves(noise):
    assert (x >= 0).all() and (x < 1).all()
    assert abs(float(x.mean()) - 0.5) < 5 * 12**-0.5 * x.size**-0.5


def test_plain_noise_belongs_to_a_position_and_the_rest_to_a_step():
  """D8: at length 5 and 7 plain draws of 7 and 8 agree, for trees of any size.

  Else a deterministic drafter's text at a temperature were not plain's.
  """
  key = jax.random.split(jax.random.key(3), 1)
  at = lambda length, nodes, depth: sampling.draw_noise(
    key[jnp.array([0])], jnp.array([length]), nodes, depth
  )
  a, b = at(5, 4, 3), at(7, 9, 1)
  assert fakes.same(a.plain[:, 2:], b.plain)
  assert fakes.same(at(7, 1, 0).plain, b.plain[:, :1])
  for name in ("draft", "accept", "residual"):
    x, y = getattr(a, name), getattr(b, name)
    assert not np.isin(np.asarray(x), np.asarray(y)).any()


def test_noise_of_a_row_depends_on_its_key_and_length_alone():
  """M6: the same row in a batch of three, at another place."""
  keys = jax.random.split(jax.random.key(4), 3)
  pick = lambda order: sampling.draw_noise(
    keys[jnp.array(order)], jnp.array(order) + 5, 3, 2
  )
  first, other = pick([0, 1, 2]), pick([2, 0, 1])
  assert isinstance(first, Noise)
  assert fakes.same(
    jax.tree.map(lambda x: x[jnp.array([2, 0, 1])], first), other
  )
