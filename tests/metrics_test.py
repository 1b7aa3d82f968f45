"""Rates by hand, under the names that say which convention they follow."""

import pytest

from spec_jax.metrics import Counts, Timing, report


def three_steps(**changes):
  """Steps that draft 4 and accept 2, 0 and 4."""
  counts = {
    "emitted": 9,
    "steps": 3,
    "drafted": 12,
    "accepted": 6,
    "drafted_at": (3, 2, 2, 1),
    "accepted_at": (2, 2, 1, 1),
  }
  return Counts(**(counts | changes))


def test_the_three_means_have_three_names():
  """M1: 6 of 12 accepted, 2.0 accepted and 3.0 emitted a step."""
  rates = three_steps().rates()
  assert rates["acceptance_rate"] == 0.5
  assert rates["accepted_per_step"] == 2.0
  assert rates["emitted_per_step"] == 3.0
  assert rates["drafted_per_step"] == 4.0


def test_acceptance_by_depth_is_given_the_chance_and_of_all_steps():
  """M3: depth 3 had its chance twice and was accepted once in three steps."""
  rates = three_steps().rates()
  assert rates["accept_cond"] == [2 / 3, 1, 0.5, 1]
  assert rates["accept_joint"] == [2 / 3, 2 / 3, 1 / 3, 1 / 3]


def test_nothing_counted_is_none_and_not_zero():
  """Plain decoding has no acceptance rate; an empty run has no rates."""
  plain = Counts(emitted=5, steps=5).rates()
  assert plain["acceptance_rate"] is None
  assert plain["emitted_per_step"] == 1.0
  assert plain["accept_cond"] == []
  empty = Counts().rates()
  assert all(x is None or x == [] for x in empty.values())
  never = Counts(steps=1, drafted_at=(1, 0), accepted_at=(0, 0)).rates()
  assert never["accept_cond"] == [0.0, None]


def test_counts_of_other_depths_add_up():
  """Depths that one lacks count as nothing; no parts give nothing."""
  short = Counts(3, 2, 2, 1, (2,), (1,))
  total = Counts.sum([short, three_steps(), Counts(1, 1)])
  assert total == Counts(13, 6, 14, 7, (5, 2, 2, 1), (3, 2, 1, 1))
  assert Counts.sum([]) == Counts()


def test_a_report_divides_totals():
  """M10: 9 tokens in 2 s; compile time and prefill are apart."""
  timing = Timing(
    compile_s=50.0,
    prefill_s=0.5,
    decode_s=2.0,
    first_token_s=(0.1, 0.2, 0.9),
    num_prompt_tokens=40,
  )
  found = report(three_steps(), timing)
  assert found["decode_tokens_per_s"] == 4.5
  assert found["prefill_tokens_per_s"] == 80.0
  assert found["first_token_s"] == pytest.approx(0.2)
  assert found["first_token_s_p95"] == pytest.approx(0.83)  # .2 + .9 of .7
  assert (found["steps"], found["compile_s"]) == (3, 50.0)


def test_a_report_of_nothing_has_no_speed():
  """Division by no time is None, not infinity, and warns of nothing."""
  found = report(Counts(), Timing())
  assert found["decode_tokens_per_s"] is None
  assert found["prefill_tokens_per_s"] is None
