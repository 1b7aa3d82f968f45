"""Tests that costs follow a machine that changes while an engine decodes."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import length
from spec_jax.base import Outcome
from spec_jax.engine import Engine
from spec_jax.following import LOOK_STEPS, CostFollower, Seen, seen
from spec_jax.levels import Levels
from spec_jax.programs import EngineConfig
from spec_jax.requests import Job
from spec_jax.settings import Settings
from tests import fakes

# Depths 0 to 2, and a token of catching up.
COSTS, CALL_S = [1.0, 1.2, 1.5, 0.1], 0.3


class Machine:
  """Calls of a follower on a machine with a clock of its own."""

  def __init__(
    self, costs=COSTS, call_s=CALL_S, accepted=(0.0, 0.0, 0.0), widened=1.0
  ):
    self.costs = costs
    self.widened = np.array([0.0, widened, widened])
    self.follower = CostFollower(costs, Levels((2,)), CALL_S)
    zeros = np.zeros((2,), int)
    self.accepted = np.array(accepted)
    first = np.zeros((2, 3), int), zeros, zeros
    self.seen = Seen(*first, self.accepted, self.widened)
    self.follower.begin(self.seen)
    self.plain = self.deep = 1.0  # times what was measured
    self.call_s = call_s

  def call(self, *at, held_up=1.0):
    """Takes steps at each depth, or as the follower says.

    Returns:
      (seconds, None or the kind of step that was looked at).
    """
    depth = self.follower.look()
    if depth is not None:
      at = [LOOK_STEPS * (d == depth) for d in range(3)]
    old = self.seen
    behind, drafted = old.behind[1], sum(at[1:])
    late = int(behind) if drafted else 0
    # Row 0 is done at half of the steps and has caught up with nothing.
    self.seen = Seen(
      old.reads_at + [np.array(at) // 2, at],
      old.caught_up + [0, late],
      np.array([0, at[0] + (0 if drafted else behind)]),
      self.accepted,
      self.widened,
    )
    steps = np.array(at) * self.costs[:3]
    deep = steps[1:].sum() + late * self.costs[3]
    spent = held_up * (steps[0] * self.plain + deep * self.deep)
    seconds = self.call_s + spent
    self.follower.add(seconds, self.seen, depth)
    return seconds, depth


@pytest.mark.parametrize("at", [(0, 0, 20), (20, 0, 0), (12, 8, 0), (5, 3, 9)])
def test_both_kinds_of_steps_are_followed(at):
  """Whatever the policy does, the other kind is looked at now and then."""
  machine = Machine([*COSTS[:3], 0.001])
  machine.call(1, 0, 1)
  for plain, deep in ((1.0, 1.0), (1.5, 1.0), (0.8, 1.1), (1.0, 2.0)):
    machine.plain, machine.deep = plain, deep
    for _ in range(400):
      machine.call(*at)
    found = machine.follower.costs()
    expected = np.array(machine.costs) * [plain, deep, deep, deep]
    np.testing.assert_allclose(
      found, np.maximum(expected, [0, plain, plain, 0]), rtol=1e-3
    )
  assert machine.follower.num_looks > 0


@pytest.mark.parametrize("at", [(20, 0, 0), (0, 0, 20)])
def test_what_is_not_looked_at_moves_along(at):
  """Twice as fast in all: the other kind of step is, before it is looked at.

  What it was relative to this kind was right when both were seen last.
  """
  much = (0.0, 2.0, 4.0)  # so that a look would lose a lot
  accepted = much if at[2] else (0.0, 0.0, 0.0)
  machine = Machine([*COSTS[:3], 0.001], accepted=accepted)
  machine.call(8, 0, 8)
  other = at[::-1]
  machine.plain, machine.deep = 1.5, 1.2
  for _ in range(3):
    machine.call(*other)
    machine.call(*at)
  machine.plain, machine.deep = 0.75, 0.6
  looks = machine.follower.num_looks
  for _ in range(3):
    machine.call(*at)
  assert machine.follower.num_looks == looks
  np.testing.assert_allclose(machine.follower.factors, (0.75, 0.6), rtol=1e-3)


def test_a_draft_that_had_to_catch_up_is_no_dearer():
  """Ten tokens are caught up with in each call: as dear as a step."""
  machine = Machine()
  machine.call(10, 0, 0)
  for _ in range(50):
    machine.call(10, 0, 20)
  np.testing.assert_allclose(machine.follower.costs(), COSTS)
  machine.deep = 1.5
  for _ in range(50):
    machine.call(10, 0, 20)
  np.testing.assert_allclose(
    machine.follower.costs(), [1, 1.8, 2.25, 0.15], rtol=1e-3
  )


@pytest.mark.parametrize("accepted", [0.0, 0.3, 0.5, 2.0])
def test_looks_lose_little_time(accepted):
  """What their tokens would have taken with the other kind of step is no loss.

  A step with a draft takes 1.5: half a token makes it as good as one without.
  """
  for at in ((0, 0, 10), (10, 0, 0)):
    tokens = 1 + accepted
    costs = [*COSTS[:2], 1.5, 0.001]
    machine = Machine(costs, accepted=(0.0, accepted / 2, accepted))
    machine.call(5, 0, 5)
    looks = lost = total = 0.0
    for _ in range(3000):
      seconds, depth = machine.call(*at)
      total += seconds
      if depth is not None:
        assert (depth == 0) == (at[0] == 0)
        looks += 1
        other = 1.5 / tokens if depth == 0 else tokens
        lost += seconds - LOOK_STEPS * other
    assert looks > 5
    # A look is due after some whole call, and a call takes time of its own.
    assert lost / total < 1.3 / 100
    most = at[0] * (1.5 - tokens) + at[2] * (1 - 1.5 / tokens)
    if most > 0:
      assert lost / total > 0.5 / 100
    elif accepted == 0.5:  # nothing is lost: not every call for that
      assert looks == pytest.approx(2 * total / 100, rel=0.3)


def test_what_a_draft_brings_is_taken_from_what_was_counted():
  """Offered in half of the steps, then accepted at .8 and .8 times .5."""
  state = length.cost(Levels((3,))).init(2)
  assert seen(state, Levels((3,))).accepted.tolist() == [0, 0, 0, 0]
  state = dataclasses.replace(
    state,
    asks=jnp.array([[12.0], [8.0]]),
    offers=jnp.array([[6.0], [4.0]]),
    chances=jnp.array([[6.0, 5, 0], [4.0, 3, 0]]),
    hits=jnp.array([[5.0, 3, 0], [3.0, 1, 0]]),
  )
  found = seen(state, Levels((3,))).accepted
  np.testing.assert_allclose(found, [0, 0.4, 0.6, 0.6])
  # And of two ways each one's own, with how often a pass was wide.
  state = dataclasses.replace(
    state,
    asks=jnp.array([[12.0, 4.0], [8.0, 0.0]]),
    offers=jnp.array([[6.0, 2.0], [4.0, 0.0]]),
    widens=jnp.array([[12.0, 3.0], [8.0, 0.0]]),
  )
  state = dataclasses.replace(state, hits=state.hits.at[0, 2].set(2.0))
  state = dataclasses.replace(state, chances=state.chances.at[0, 2].set(4.0))
  found = seen(state, Levels((2, 1)))
  np.testing.assert_allclose(found.accepted, [0, 0.4, 0.6, 0.25])
  np.testing.assert_allclose(found.widened, [0, 1, 1, 0.75])


def test_a_way_that_rests_for_some_prompts_stays_as_dear_as_it_was():
  """Its counts fade with each prompt; the parts that they tell do not."""
  policy = length.cost(Levels((1,)))
  state = dataclasses.replace(
    policy.init(1),
    asks=jnp.array([[4.0]]),
    offers=jnp.array([[2.0]]),
    widens=jnp.array([[3.0]]),
    chances=jnp.array([[2.0]]),
    hits=jnp.array([[1.0]]),
  )
  for _ in range(5):
    state = policy.restart(state)
  assert state.asks.max() < 0.01
  found = seen(state, Levels((1,)))
  np.testing.assert_allclose(found.widened, [0, 0.75], rtol=1e-5)
  np.testing.assert_allclose(found.accepted, [0, 0.25], rtol=1e-5)
  # What was never asked is thought to be wide whenever it is.
  new = seen(policy.init(1), Levels((1,)))
  assert new.widened.tolist() == [0, 1] and new.accepted.tolist() == [0, 0]


def test_a_step_that_found_nothing_to_propose_is_no_dearer():
  """Four tokens are proposed and accepted in each fourth step, for 2 steps.

  All in all two tokens for 1.25, so a step without a draft loses .375.
  """
  machine = Machine(
    [1.0, 1.5, 2.0, 0.001], accepted=(0.0, 0.5, 1.0), widened=0.25
  )
  machine.call(0, 0, 5)
  looks = lost = total = 0.0
  for _ in range(2000):
    seconds, depth = machine.call(15, 0, 5)
    total += seconds
    if depth is not None:
      assert depth == 0
      looks += 1
      lost += seconds - LOOK_STEPS * 1.25 / 2
  assert looks > 5 and 0.5 / 100 < lost / total < 1.3 / 100


def test_copies_alone_have_nothing_to_catch_up_with():
  """A look at both is not to be had for so much; one at the copies is."""
  for usual, looks in ((2, False), (3, True)):
    follower = CostFollower([1.0, 1.2, 1.5, 1.1, 0.1], Levels((2, 1)), CALL_S)
    reads = np.zeros((1, 4), int)
    reads[0, usual] = 1
    behind = np.array([10**6])
    now = Seen(reads, behind * 0, behind, np.zeros(4), np.ones(4))
    follower.begin(now)
    for i in range(1, 300):
      reads = reads + np.array([[20, 0, 0, 0]])
      follower.add(20.3, now._replace(reads_at=reads), None)
      assert i > 1 or follower.look() is None
    assert (follower.look() == usual) == looks


def test_looks_that_cost_nothing_are_no_reason_for_short_calls():
  """A draft for the price of none: calls of their own are what they take."""
  machine = Machine([1.0, 1.0, 1.0, 1e-6])
  machine.call(5, 0, 5)
  calls = [machine.call(10, 0, 0)[1] for _ in range(2000)]
  looks = [depth for depth in calls if depth is not None]
  assert 0 < len(looks) * CALL_S / 2000 / 10 < 0.02


def test_what_costs_too_much_to_catch_up_with_is_not_looked_at():
  """Ten tokens, a step's time, are missed in each call: it gets no cheaper."""
  machine = Machine()
  machine.call(5, 0, 5)
  for _ in range(1000):
    machine.call(10, 0, 0)
  assert machine.follower.num_looks == 0


def test_a_call_that_was_held_up_has_no_say():
  for at in ((0, 0, 10), (10, 0, 0)):
    machine = Machine()
    for i in range(100):
      machine.call(*at, held_up=8.0 if i % 10 == 0 else 1.0)
      np.testing.assert_allclose(machine.follower.costs(), COSTS)


def test_no_call_is_believed_to_be_many_times_as_slow():
  machine = Machine()
  for _ in range(5):
    machine.call(0, 0, 10, held_up=100.0)
  np.testing.assert_allclose(machine.follower.costs()[1:3], [4.8, 6.0])


def test_short_calls_are_taken_together():
  """A step that streams its token says little alone; four say something."""
  machine = Machine([1.0, 1.2, 3.0, 0.1])
  machine.deep = 3.0
  for _ in range(7):  # two sums of four do not yet make a median of three
    machine.call(0, 0, 1)
    np.testing.assert_allclose(machine.follower.costs(), machine.costs)
  machine.call(0, 0, 1)
  np.testing.assert_allclose(machine.follower.costs()[1:], [3.6, 9.0, 0.3])


@pytest.mark.parametrize("truly", [0.1, 0.5])
def test_calls_whose_own_time_is_most_say_nothing(truly):
  """A call was thought to take .3: single steps of 1 would be off by .2."""
  machine = Machine(call_s=truly)
  for _ in range(300):
    machine.call(1, 0, 0)
  # Looks at four steps are off by a quarter of that.
  assert machine.follower.costs()[0] == pytest.approx(1.0, abs=0.051)
  for _ in range(20):
    machine.call(40, 0, 0)
  assert machine.follower.costs()[0] == pytest.approx(1.0, abs=0.01)


def test_without_a_draft_ever_there_is_none_to_look_at():
  machine = Machine()
  for _ in range(200):
    machine.call(10, 0, 0)
  assert machine.follower.num_looks == 0


def test_what_rows_of_different_luck_count():
  """Asked for 3: drafted 3, cut to 1, nothing to propose, and done."""
  policy = length.cost(Levels((3,)))
  state = policy.init(4)
  state = dataclasses.replace(state, behind=jnp.array([2, 9, 5, 30]))
  yes, no = [True] * 3, [False] * 3
  step = Outcome(
    asked=jnp.array([3, 1, 3, 0]),
    running=jnp.array([True, True, True, False]),
    chance=jnp.array([yes, [True, False, False], no, no]),
    accepted=jnp.array([yes, no, no, no]),
    widened=jnp.array([True, True, False, False]),
    num_tokens=jnp.array([4, 1, 1, 0]),
  )
  state = policy.update(state, step)
  # All three pay the deepest draft, and the one that was most behind.
  ran = [0, 0, 0, 1]
  assert state.reads_at.tolist() == [ran, ran, ran, [0] * 4]
  assert state.caught_up.tolist() == [9, 9, 9, 0]
  assert state.behind.tolist() == [0, 0, 0, 30]
  assert state.asked_at.tolist() == [ran, [0, 1, 0, 0], [1, 0, 0, 0], [0] * 4]
  # A step without a draft: nobody catches up.
  step = dataclasses.replace(
    step, asked=jnp.zeros((4,), int), widened=jnp.zeros((4,), bool)
  )
  state = policy.update(state, step)
  assert state.reads_at.tolist()[:3] == [[1, 0, 0, 1]] * 3
  assert state.caught_up.tolist() == [9, 9, 9, 0]
  assert state.behind.tolist() == [4, 1, 1, 30]


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
  """Gives an engine a clock: plain steps as said, each depth 1 s more.

  It takes the steps of a call one by one and looks what each drafted.
  """
  truly, decode = machine.timed, machine.programs.decode

  def timed(program, *args):
    if program is not decode:
      return truly(program, *args)
    state, steps, until = args
    taken = seconds = 0.0
    behind = np.asarray(state.policy.behind)
    while taken < steps and state.done.sum() < until:
      drafted, tokens = (
        np.array(state.tally.num_drafted),
        np.array(state.length),
      )
      (state, _), _ = truly(program, state, jnp.int32(1), until)
      depth = int((np.array(state.tally.num_drafted) - drafted).max())
      behind = behind + np.array(state.length) - tokens
      seconds += 2 + depth + behind.max() / 100 if depth else plain_s()
      behind = behind * (not depth)
      taken += 1
    return (state, jnp.int32(taken)), seconds

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
  if not options:
    return
  # What is said after a measurement holds too.
  other = engine()
  clocked(other, monkeypatch, lambda: 2.0)
  list(other.run(JOBS[:1]))
  other.set_costs(before)
  clocked(other, monkeypatch, lambda: 0.1)
  list(other.run(JOBS))
  assert other.costs == before
