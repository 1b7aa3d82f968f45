"""Tests of what steps are measured to cost."""

from length_test import engine, texts
import numpy as np
import pytest

from spec_jax.costs import measure_costs


def with_clock(machine, monkeypatch, seconds):
  """Lets calls of steps take `seconds(state, number of steps)`."""
  truly, decode = machine.timed, machine.programs.decode

  def timed(program, *args):
    if program is not decode:
      return truly(program, *args)
    spent = seconds(args[0], int(args[1]))  # before the state is given away
    return truly(program, *args)[0], spent

  monkeypatch.setattr(machine, "timed", timed)


def drafting(state):
  """Returns how deep a state is made to draft, and what it catches up with."""
  depth = int(state.policy.force.max())
  return depth, int(state.policy.behind.max()) if depth else 0


def test_costs_are_measured_and_can_be_given_again():
  machine = engine("cost")
  first = texts(machine)
  costs = machine.costs
  assert len(costs) == 6 and min(costs) > 0
  assert costs[:5] == sorted(costs[:5])
  assert machine.timing.measure_s > 0
  # Reading prompts and stepping: once each, measuring and later runs included,
  # if another test has not compiled them already.
  compiled = machine.num_compiles
  assert compiled <= 2 and texts(machine) == first
  assert machine.num_compiles == compiled
  again = engine("cost", costs)
  assert texts(again) == first and again.costs == costs
  assert again.timing.measure_s == 0


def test_what_a_call_takes_is_no_cost_of_a_step(monkeypatch):
  """Steps of 1 + d seconds and .5 of catching up, in calls of 7 seconds."""
  machine = engine("cost")

  def seconds(state, steps):
    depth, late = drafting(state)
    return 7 + steps * (1 + depth + late / 2)

  with_clock(machine, monkeypatch, seconds)
  found, call_s = measure_costs(machine)
  np.testing.assert_allclose(found, [1, 2, 3, 4, 5, 0.5], rtol=1e-6)
  assert call_s == 7


@pytest.mark.parametrize("drafter", ["vanilla", "prompt_lookup"])
def test_what_a_first_step_takes_more_is_no_cost_of_a_step(
  drafter, monkeypatch
):
  """Calls of 7 seconds whose first step finds nothing near, for 2 more."""
  machine = engine("cost", drafter=drafter, slots=160)

  def seconds(state, steps):
    depth, _ = drafting(state)
    return 7 + 2 * (steps > 0) + steps * (1 + depth)

  with_clock(machine, monkeypatch, seconds)
  found, call_s = measure_costs(machine)
  K = machine.depth
  np.testing.assert_allclose(found[: K + 1], 1 + np.arange(K + 1), rtol=1e-6)
  assert call_s == 7


def test_the_dearer_part_is_measured_where_parts_serve_by_turns(monkeypatch):
  """A prompt that repeats itself is served by lookup, another by the draft."""
  machine = engine("cost", drafter="first_of")

  def seconds(state, steps):
    depth, late = drafting(state)
    repeats = bool((state.tokens[0, 8] == state.tokens[0, 0]).all())
    return steps * (1 + depth * (1 if repeats else 3) + late / 2)

  with_clock(machine, monkeypatch, seconds)
  found, _ = measure_costs(machine)
  depth = machine.depth
  np.testing.assert_allclose(found[:-1], 1 + 3 * np.arange(depth + 1))
  np.testing.assert_allclose(found[-1], 0.5)


def test_costs_that_do_not_fit_are_refused():
  with pytest.raises(ValueError, match="6 costs above 0 are needed"):
    engine("cost", [1.0, 2.0])
  for wrong in (float("nan"), float("inf"), 0.0, 1e-50):
    with pytest.raises(ValueError, match="6 costs above 0 are needed"):
      engine("cost", [1.0, 1.0, 1.0, 1.0, wrong, 1.0])
  with pytest.raises(ValueError, match="'fixed' takes no costs"):
    engine("fixed", [1.0] * 5)
