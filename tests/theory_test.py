"""The papers' formulas give the papers' tables."""

import numpy as np
import pytest

from spec_jax import theory


@pytest.mark.parametrize(
  ("alpha", "gamma", "operations", "speed"),
  [
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
  ],
)
def test_leviathans_table_1(alpha, gamma, operations, speed):
  """To the printed digit, c = c_hat = 0."""
  found = theory.operations_factor(alpha, gamma, 0)
  assert found == pytest.approx(operations, abs=0.00501)
  found = theory.walltime_factor(alpha, gamma, 0)
  assert found == pytest.approx(speed, abs=0.00501)
  assert found == theory.expected_tokens(alpha, gamma)


@pytest.mark.parametrize(
  ("c", "alpha", "gamma", "speed"),
  [
    (0.02, 0.75, 7, 3.2),
    (0.04, 0.8, 7, 3.3),
    (0.11, 0.82, 7, 2.5),
    (0.02, 0.62, 7, 2.3),
    (0.04, 0.68, 5, 2.4),
    (0.11, 0.71, 3, 2.0),
    (0.02, 0.65, 5, 2.4),
    (0.04, 0.73, 5, 2.6),
    (0.11, 0.74, 3, 2.0),
    (0.02, 0.53, 5, 1.9),
    (0.04, 0.55, 3, 1.8),
    (0.11, 0.56, 3, 1.6),
  ],
)
def test_leviathans_table_4(c, alpha, gamma, speed):
  """Expected speeds; the printed alphas are rounded, hence .07."""
  found = theory.walltime_factor(alpha, gamma, c)
  assert found == pytest.approx(speed, abs=0.07)


def test_the_best_number_of_drafts():
  """The grid of the largest walltime factors, and against a search."""
  alphas = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
  grid = {
    0.01: (5, 7, 9, 14, 24, 40),
    0.02: (4, 6, 8, 11, 19, 31),
    0.05: (3, 4, 6, 8, 13, 21),
    0.10: (2, 3, 4, 6, 10, 15),
  }
  for c, best in grid.items():
    assert tuple(theory.optimal_gamma(a, c) for a in alphas) == best
  for a, c in [(0.3, 0.07), (0.77, 0.2), (0.1, 0.2), (0.0, 0.1)]:
    factors = [theory.walltime_factor(a, g, c) for g in range(200)]
    assert theory.optimal_gamma(a, c) == np.argmax(factors)
  assert theory.optimal_gamma(0.1, 0.2) == 0  # alpha < c never pays


def test_some_drafting_pays_if_alpha_is_above_c():
  """Corollary 3.9: one draft token gives (1 + alpha) / (1 + c)."""
  for a, c in [(0.3, 0.2), (0.9, 0.5), (0.21, 0.2)]:
    factor = theory.walltime_factor(a, 1, c)
    assert factor == pytest.approx((1 + a) / (1 + c))
    best = theory.walltime_factor(a, theory.optimal_gamma(a, c), c)
    assert best >= factor > 1


def test_operations_count_the_draft_too():
  """Theorem 3.11 by hand: alpha = .5, gamma = 1, c_hat = .5: 2.5 / 1.5."""
  assert theory.operations_factor(0.5, 1, 0.5) == pytest.approx(2.5 / 1.5)


@pytest.mark.parametrize(
  ("b", "expected"), [(1, 1.9375), (3, 2.9592), (7, 3.8295), (15, 4.4719)]
)
def test_lookaheads_tokens_per_good_step(b, expected):
  """alpha = .5, gamma = 4; b = 1 is Leviathan's equation 1."""
  found = theory.lookahead_expected(0.5, 4, b)
  assert found == pytest.approx(expected, abs=0.00005)
  if b == 1:
    assert found == theory.expected_tokens(0.5, 4)


def test_lookaheads_formula_is_that_of_a_simulation():
  """The longest of b guesses; 40,000 steps, 5 standard errors are .035."""
  rng = np.random.default_rng(0)
  right = rng.random((40_000, 3, 4)) < 0.5
  longest = np.cumprod(right, -1).sum(-1).max(-1)
  found = theory.lookahead_expected(0.5, 4, 3)
  assert abs(1 + longest.mean() - found) < 0.035


def test_lookaheads_compression():
  """S = (f - 1 + E) / f: every step good is E, every other less."""
  E = theory.lookahead_expected(0.5, 4, 3)
  assert theory.lookahead_compression(0.5, 4, 3, 1) == E
  assert theory.lookahead_compression(0.5, 4, 3, 4) == (3 + E) / 4


def test_the_limits_of_the_formulas():
  """alpha 0 and 1, and no draft at all."""
  assert theory.expected_tokens(1, 7) == 8
  assert theory.expected_tokens(0, 7) == 1
  assert theory.expected_tokens(0.3, 0) == 1
  assert theory.lookahead_expected(0.5, 4, 0) == 1
  assert theory.lookahead_expected(1, 4, 2) == 5
  # 1 / (1 - alpha) at most.
  assert theory.expected_tokens(0.8, 500) == pytest.approx(5)


@pytest.mark.parametrize(
  ("call", "words"),
  [
    (lambda: theory.expected_tokens(1.5, 2), "alpha .* got 1.5"),
    (lambda: theory.expected_tokens(0.5, -1), "gamma .* got -1"),
    (lambda: theory.walltime_factor(0.5, 1, -0.1), "c must .* got -0.1"),
    (lambda: theory.operations_factor(0.5, 1, -0.1), "c_hat .* got -0.1"),
    (lambda: theory.optimal_gamma(1, 0.1), "alpha 1 and c 0.1"),
    (lambda: theory.optimal_gamma(0.5, 0), "alpha 0.5 and c 0"),
    (lambda: theory.lookahead_expected(0.5, 4, -1), "b must .* got -1"),
    (lambda: theory.lookahead_compression(0.5, 4, 1, 0.5), "every .* got 0.5"),
  ],
)
def test_arguments_out_of_range_are_refused(call, words):
  """The message holds the value."""
  with pytest.raises(ValueError, match=words):
    call()
