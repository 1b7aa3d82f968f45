"""Tests of the length policies; that the law stays is laws_test.py's."""

import fakes
import jax
import jax.numpy as jnp
import pytest

from spec_jax import length
from spec_jax.base import Outcome
from spec_jax.engine import Engine
from spec_jax.generate import Settings
from spec_jax.levels import Levels
from spec_jax.programs import EngineConfig
from spec_jax.requests import Job

NAN = float("nan")


def outcome(asked, chance, accepted, running=None, widened=None):
  """Returns an outcome of rows given as lists."""
  rows = len(asked)
  return Outcome(
    asked=jnp.asarray(asked, jnp.int32),
    running=jnp.ones((rows,), bool) if running is None else running,
    chance=jnp.asarray(chance, bool),
    accepted=jnp.asarray(accepted, bool),
    widened=jnp.asarray(chance, bool).any(-1)
    if widened is None
    else jnp.asarray(widened, bool),
    num_tokens=1 + jnp.asarray(accepted, jnp.int32).sum(-1),
  )


def depths(policy, state, costs=None, running=None):
  """Returns the depth of each row."""
  rows = jax.tree.leaves(state)[0].shape[0]
  running = jnp.ones((rows,), bool) if running is None else running
  costs = None if costs is None else jnp.asarray(costs, jnp.float32)
  return policy.level(state, running, costs).tolist()


def test_fixed_asks_for_its_depth():
  policy = length.fixed(3)
  assert depths(policy, policy.init(2)) == [3, 3]


def test_confidence_looks_at_the_largest_probability():
  policy = length.confidence(4, threshold=0.5)
  law = jnp.array([[[0.5, 0.25, 0.25], [0.4, 0.3, 0.3]]])
  assert policy.extend(policy.init(1), law).tolist() == [[True, False]]


def test_entropy_is_in_nats():
  """Two equal tokens: ln 2 = .693, 1 - sqrt(.2 x .693) = .628."""
  law = jnp.array([[[0.5, 0.5, 0.0, 0.0]]])
  for threshold, goes_on in ((0.62, True), (0.64, False)):
    policy = length.entropy(4, threshold=threshold)
    assert policy.extend(policy.init(1), law).tolist() == [[goes_on]]


def cost(depth, **options):
  return length.cost(Levels((depth,)), **options)


def test_average_grows_by_two_and_falls_by_one():
  policy = length.average(5, start=2)
  state = policy.init(1)
  none, all_ = [[False] * 5], [[True, True, False, False, False]]
  state = policy.update(state, outcome([2], all_, all_))
  assert depths(policy, state) == [4]
  one = [[True, False, False, False, False]]
  state = policy.update(state, outcome([4], one, none))
  assert depths(policy, state) == [3]
  state = policy.update(state, outcome([3], none, none))
  assert depths(policy, state) == [3]


def test_average_begins_anew_with_each_prompt():
  """D8: what a row drew before has no part in what it draws next."""
  policy = length.average(5, start=2)
  state = policy.init(1)
  state = policy.update(state, outcome([2], [[True] * 2], [[True] * 2]))
  assert depths(policy, state) == [4]
  assert depths(policy, policy.restart(state)) == [2]


def test_a_report_may_leave_out_what_came_before():
  """40 steps that drafted, then 10 that did not: only these are told."""
  policy = cost(1)
  state = policy.init(1)
  for _ in range(40):
    state = policy.update(state, outcome([1], [[True]], [[True]]))
  costs = [1.0, 1.2]
  before = length.report("cost", Levels((1,)), state, costs)
  assert before["alarm"] is None and length.since(before, None) == before
  for _ in range(10):
    state = policy.update(state, outcome([0], [[False]], [[False]]))
  said = length.since(length.report("cost", Levels((1,)), state, costs), before)
  assert said["steps_at_depth"] == [10, 0] and said["num_probes"] == 0
  assert said["alarm"].startswith("no draft in 100 % of steps")
  assert length.since(None, None) is None


@pytest.mark.parametrize(
  "name,options,message",
  [
    ("other", {}, "unknown length policy 'other'; there are fixed, confidence"),
    ("cost", {"probes": 1}, "'cost' has no option 'probes'; it has probe"),
    ("cost", {"probe": 0}, "probe must be at least 1"),
    ("cost", {"budget": 0.0}, "budget must be in"),
    ("cost", {"margin": -1.0}, "margin must be at least 0"),
    ("cost", {"carry": 1.5}, r"carry must be in \[0, 1\]"),
    ("cost", {"memory": 1.0}, "memory must be above 1"),
    ("cost", {"prior": 1.0}, "prior must be in"),
    ("confidence", {"threshold": 1.1}, "threshold must be in"),
    ("entropy", {"threshold": -0.1}, "threshold must be in"),
    ("entropy", {"scale": 0.0}, "scale must be above 0"),
    ("average", {"start": 5}, "start must be in"),
    # What compares false with everything is in no range.
    ("cost", {"budget": NAN}, "budget must be in"),
    ("cost", {"margin": NAN}, "margin must be at least 0"),
    ("cost", {"carry": NAN}, "carry must be in"),
    ("cost", {"memory": NAN}, "memory must be above 1"),
    ("cost", {"prior": NAN}, "prior must be in"),
    ("confidence", {"threshold": NAN}, "threshold must be in"),
    ("entropy", {"threshold": NAN}, "threshold must be in"),
    ("entropy", {"scale": NAN}, "scale must be above 0"),
  ],
)
def test_what_is_out_of_range_is_named(name, options, message):
  with pytest.raises(ValueError, match=message):
    length.build(name, Levels((4,)), **options)


# --- in an engine -----------------------------------------------------------


def engine(policy, costs=None, drafter="vanilla", batch=2, slots=48, **options):
  model, params = fakes.tiny()
  asks = drafter in ("vanilla", "first_of")
  draft = fakes.tiny(seed=1) if asks else (None, None)
  config = EngineConfig(
    drafter=drafter,
    policy=policy,
    policy_options=tuple(sorted(options.items())),
    batch_size=batch,
    slots=slots,
  )
  return Engine(
    model,
    params,
    config,
    draft=draft[0],
    draft_params=draft[1],
    costs=costs,
  )


JOBS = [
  Job(ids, Settings(max_new_tokens=24), (0, i))
  for i, ids in enumerate(([1, 2, 3], [4], [5, 6], [1, 2, 1, 2, 1]))
]


def texts(machine):
  return {x.job: x.ids for x in machine.run(JOBS)}


def test_greedy_text_is_plain_text():
  """In an engine that refills its rows; the others: drafters_test.py."""
  costs = [1.0, 1.1, 1.2, 1.3, 1.4, 0.01]
  assert texts(engine("cost", costs)) == texts(engine("fixed", drafter="none"))


def test_steps_that_do_not_pay_are_plain_steps():
  """Costs that forbid drafting: one token a step, but for the probes."""
  machine = engine("cost", [1.0, 50.0, 50.0, 50.0, 50.0, 0.1], probe=1000)
  found = list(machine.run(JOBS))
  assert all(x.counts.drafted == 0 for x in found)
  assert all(x.counts.steps == len(x.ids) for x in found)
  said = machine.policy_report()
  assert said["steps_at_depth"][0] == sum(x.counts.steps for x in found)
  assert "none was asked for" in said["alarm"]


def test_what_a_policy_knows_outlives_prompts_and_runs():
  machine = engine("cost", [1.0, 1.1, 1.2, 1.3, 1.4, 0.01], batch=1)
  list(machine.run(JOBS[:1]))
  before = machine.policy_report()["steps_at_depth"]
  list(machine.run(JOBS))
  after = machine.policy_report()["steps_at_depth"]
  assert sum(after) > sum(before) > 0


def test_a_run_broken_off_inside_a_step_takes_nothing_along(monkeypatch):
  """Ctrl-C while the device works: the engine keeps a state of its own."""
  machine = engine("cost", [1.0, 1.1, 1.2, 1.3, 1.4, 0.01])
  list(machine.run(JOBS))
  before = machine.policy_report()
  truly, decode = machine.timed, machine.programs.decode

  def stopped(program, *args):
    out = truly(program, *args)
    if program is decode:
      raise KeyboardInterrupt
    return out

  with monkeypatch.context() as patch:
    patch.setattr(machine, "timed", stopped)
    with pytest.raises(KeyboardInterrupt):
      list(machine.run(JOBS))
  assert machine.policy_report() == before
  assert texts(machine) == texts(engine("fixed", drafter="none"))


def test_a_model_that_proposes_nothing_is_not_free():
  """It took its time: the policy counts the step as one with a draft."""
  model, params = fakes.tiny()
  silent = fakes.tiny(seed=1)
  rig = fakes.Rig(
    (model, params),
    "vanilla",
    draft=silent,
    options={"num_draft": 2},
    policy=length.cost(Levels((2,)))._replace(
      # The draft is never sure enough to propose.
      extend=lambda state, law: jnp.zeros(law.shape[:-1], bool)
    ),
    slots=32,
    use=fakes.GREEDY,
  )
  state = rig.start([[1, 2, 3]], Settings(max_new_tokens=4))
  state, info = rig.step(rig.params, state)
  assert not info.num_drafted.any()
  assert int(state.policy.reads_at[0, 1:].sum()) == 1
  assert state.policy.idle.tolist() == [[0]]


def test_a_drafter_without_a_law_is_refused_where_one_is_needed():
  with pytest.raises(ValueError, match="it copies tokens"):
    engine("confidence", drafter="prompt_lookup")


def test_a_policy_on_plain_decoding_changes_nothing():
  machine = engine("cost", drafter="none")
  assert texts(machine) == texts(engine("fixed", drafter="none"))
  assert machine.costs is None
