"""Tests that costs follow a machine that changes while an engine decodes."""

import numpy as np
import pytest

from spec_jax.engine import Engine
from spec_jax.following import LOOK_STEPS, CostFollower, Seen, seen
from spec_jax.programs import EngineConfig
from spec_jax.requests import Job
from spec_jax.settings import Settings
from tests import fakes

# Depths 0 to 2, and a token of catching up.
COSTS, CALL_S = [1.0, 1.2, 1.5, 0.1], 0.3


class Machine:
  """Calls of a follower on a machine with a clock of its own."""

  def __init__(self, costs=COSTS):
    self.follower = CostFollower(costs, 2, CALL_S)
    self.seen = Seen(np.zeros((2, 3), int), np.zeros((2,), int))
    self.plain = self.deep = 1.0  # times what was measured

  def call(self, *at, late=0, held_up=1.0):
    """Takes steps at each depth, or as the follower says; returns seconds."""
    depth = self.follower.look()
    if depth is not None:
      at = [LOOK_STEPS * (d == depth) for d in range(3)]
    before = self.seen
    # Row 0 is done at half of the steps and has caught up with nothing.
    each = np.array([np.array(at) // 2, at])
    self.seen = Seen(before.reads_at + each, before.caught_up + [0, late])
    steps = np.array(at) * COSTS[:3]
    deep = steps[1:].sum() + late * COSTS[3]
    seconds = CALL_S + held_up * (steps[0] * self.plain + deep * self.deep)
    self.follower.add(seconds, before, self.seen, depth is not None)
    return seconds, depth is not None


@pytest.mark.parametrize("at", [(0, 0, 20), (20, 0, 0), (12, 8, 0), (5, 3, 9)])
def test_both_kinds_of_steps_are_followed(at):
  """Whatever the policy does, the other kind is looked at now and then."""
  machine = Machine()
  machine.call(1, 0, 1)
  for plain, deep in ((1.0, 1.0), (1.5, 1.0), (0.8, 1.1), (1.0, 2.0)):
    machine.plain, machine.deep = plain, deep
    for _ in range(300):
      machine.call(*at)
    found = machine.follower.costs()
    expected = np.array(COSTS) * [plain, deep, deep, deep]
    np.testing.assert_allclose(
      found, np.maximum(expected, [0, plain, plain, 0]), rtol=1e-3
    )
  assert machine.follower.num_looks > 0


def test_a_draft_that_had_to_catch_up_is_no_dearer():
  machine = Machine()
  for _ in range(50):
    machine.call(2, 0, 10, late=30)
  np.testing.assert_allclose(machine.follower.costs(), COSTS)
  machine.deep = 1.5
  for _ in range(50):
    machine.call(2, 0, 10, late=30)
  np.testing.assert_allclose(
    machine.follower.costs(), [1, 1.8, 2.25, 0.15], rtol=1e-3
  )


def test_looks_take_little_of_the_time():
  machine = Machine()
  looks, total = [], 0.0
  for _ in range(3000):
    seconds, looked = machine.call(0, 0, 10)
    total += seconds
    looks += [seconds] * looked
  assert 0.02 < sum(looks) / total < 0.04


def test_a_call_that_was_held_up_has_no_say():
  machine = Machine()
  for i in range(100):
    machine.call(0, 0, 10, held_up=8.0 if i % 10 == 9 else 1.0)
    np.testing.assert_allclose(machine.follower.costs(), COSTS)


def test_short_calls_are_taken_together():
  """A step that streams its token says little alone; four say something."""
  machine = Machine()
  machine.deep = 3.0
  for _ in range(3):
    machine.call(0, 0, 1)
    np.testing.assert_allclose(machine.follower.costs(), COSTS)
  for _ in range(40):
    machine.call(0, 0, 1)
  np.testing.assert_allclose(machine.follower.costs()[1:], [3.6, 4.5, 0.3])


def test_without_a_draft_ever_there_is_none_to_look_at():
  machine = Machine()
  for _ in range(200):
    machine.call(10, 0, 0)
  assert machine.follower.num_looks == 0


# --- in an engine -----------------------------------------------------------


def engine(costs=None, drafter="vanilla", **options):
  model, params = fakes.tiny()
  config = EngineConfig(
    drafter=drafter,
    policy="fixed" if drafter == "none" else "cost",
    policy_options=tuple(sorted(options.items())),
    batch_size=2,
    slots=96,
  )
  draft = (None, None) if drafter == "none" else (model, params)
  return Engine(
    model, params, config, draft=draft[0], draft_params=draft[1], costs=costs
  )


JOBS = [
  Job([1 + i, 2, 3], Settings(max_new_tokens=80, stop_ids=()), (0, i))
  for i in range(12)
]


def clocked(machine, monkeypatch, plain_s):
  """Gives an engine a clock: plain steps as said, each depth 1 s more."""
  truly, decode = machine.timed, machine.programs.decode

  def timed(program, *args):
    if program is not decode:
      return truly(program, *args)
    before = seen(args[0].policy)
    out, _ = truly(program, *args)
    at, late = seen(out[0].policy).since(before)
    costs = np.arange(len(at)) + 2.0
    costs[0] = plain_s()
    return out, float(at @ costs + late / 100)

  monkeypatch.setattr(machine, "timed", timed)


def test_an_engine_stops_drafting_when_plain_steps_get_cheap(monkeypatch):
  """All drafts are accepted: 5 tokens for 6 s against 1 for 2, then for .1."""
  machine = engine()
  plain_s = [2.0]
  clocked(machine, monkeypatch, lambda: plain_s[0])
  plain = [x.ids for x in sorted(engine(drafter="none").run(JOBS))]

  def shares():
    before = np.asarray(machine.policy_report()["steps_at_depth"])
    texts = [x.ids for x in sorted(machine.run(JOBS), key=lambda x: x.job)]
    assert texts == plain
    at = np.asarray(machine.policy_report()["steps_at_depth"]) - before
    return at / at.sum()

  list(machine.run(JOBS[:1]))
  assert shares()[-1] > 0.8
  plain_s[0] = 0.1
  shares()  # in the course of these it is noticed
  assert shares()[0] > 0.8
  plain_s[0] = 2.0
  for _ in range(4):
    shares()
  assert shares()[-1] > 0.8
  said = machine.policy_report()
  assert said["num_looks"] > 0
  assert said["measured_costs_s"][0] == pytest.approx(2.0)
  assert said["costs_s"] == machine.costs


@pytest.mark.parametrize("options", [{"follow": False}, {"costs": True}])
def test_costs_that_were_given_stay(options, monkeypatch):
  given = [2.0, 3.0, 4.0, 5.0, 6.0, 0.01] if options.pop("costs", 0) else None
  machine = engine(given, **options)
  clocked(machine, monkeypatch, lambda: 2.0)
  list(machine.run(JOBS[:2]))
  before = machine.costs
  clocked(machine, monkeypatch, lambda: 0.1)
  list(machine.run(JOBS))
  assert machine.costs == before
  assert "num_looks" not in machine.policy_report()
