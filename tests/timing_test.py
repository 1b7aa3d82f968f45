"""Tests of timing in turn and of what ratios are worth."""

import numpy as np
import pytest

from experiments import timing


def test_cases_take_turns_and_the_first_round_does_not_count():
  """Order of calls, and seconds a case measured itself."""
  calls = []
  own = iter([100.0, 1.0, 3.0])

  def measured():
    calls.append("a")
    return next(own)

  times = timing.take_turns({"a": measured, "b": lambda: calls.append("b")}, 2)
  assert "".join(calls) == "ababab"
  assert times["a"] == [1.0, 3.0]
  assert len(times["b"]) == 2 and all(0 < t < 1 for t in times["b"])
  assert timing.medians({"a": times["a"]}) == {"a": 2000.0}


def test_a_ratio_is_of_sums_not_a_mean_of_ratios():
  """The docstring's example; the mean of the two ratios would be 1.67."""
  ratio, (low, high) = timing.speed_ratio([10, 10], [1, 3], [10, 10], [2, 4])
  assert ratio == pytest.approx(1.5)
  # Of two prompts, a quarter of the resamples is one of them alone.
  assert (low, high) == pytest.approx((4 / 3, 2.0))


def test_the_interval_covers_the_truth_as_often_as_it_says():
  """Prompts whose times scatter: the true ratio 2 lies inside 95 % of times.

  40 prompts, 120 draws: the bootstrap's own coverage is .93 or so, and three
  standard deviations of a share of .93 in 120 are .07.
  """
  random = np.random.default_rng(3)
  hit = 0
  for seed in range(120):
    tokens = random.integers(20, 128, 40)
    plain = tokens * random.lognormal(0, 0.2, 40)
    ours = tokens * random.lognormal(0, 0.2, 40) / 2
    _, (low, high) = timing.speed_ratio(tokens, ours, tokens, plain, seed)
    hit += low <= 2 <= high
    assert high - low < 0.6  # an interval that always covers says nothing
  assert hit / 120 >= 0.86
