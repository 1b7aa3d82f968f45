"""Tests of the length policies; that the law stays is laws_test.py's."""

import dataclasses

import fakes
import jax
import jax.numpy as jnp
import numpy as np
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


FLAT = [1.0, 1.0, 1.0, 1.0, 1.0]
STEEP = [1.0, 3.0, 5.0, 7.0, 9.0]


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


def test_cost_drafts_where_it_pays():
  """All is accepted: deep when flat, never when each token costs two."""
  policy = cost(4, prior=0.9)
  state = policy.init(2)
  assert depths(policy, state, FLAT) == [4, 4]
  assert depths(policy, state, STEEP) == [0, 0]


def test_cost_bears_a_drafter_that_never_drafts():
  policy = cost(0)
  assert depths(policy, policy.init(2), [1.0]) == [0, 0]


def test_cost_takes_the_depth_of_the_largest_rate():
  """Accepted half of the time: E = 1, 1.5, 1.75, 1.875, 1.9375."""
  policy = cost(4, prior=0.5)
  costs = [1.0, 1.2, 1.3, 1.45, 1.6]
  rates = np.array([1, 1.5, 1.75, 1.875, 1.9375]) / costs
  assert depths(policy, policy.init(1), costs) == [int(rates.argmax())] == [2]


def test_cost_learns_from_refusals_and_looks_again():
  policy = cost(2, probe=5, memory=10.0, budget=1.0)
  costs = [1.0, 1.2, 1.3]
  state = policy.init(1)
  asked = []
  for _ in range(40):
    depth = depths(policy, state, costs)
    asked += depth
    chance = [[depth[0] > 0, False]]
    state = policy.update(state, outcome(depth, chance, [[False, False]]))
  assert asked[0] == 2  # tries first
  first_off = asked.index(0)
  assert first_off < 15
  probes = [i for i in range(first_off, 40) if asked[i]]
  assert np.diff(probes).tolist() == [6] * (len(probes) - 1) and len(probes) > 2
  said = length.report("cost", Levels((2,)), state, costs)
  assert said["num_probes"] == len(probes)
  assert sum(said["steps_at_depth"]) == 40
  assert "accepted 0 % of times" in said["alarm"]
  assert "1.20 to 1.30" in said["alarm"]


def test_cost_asks_on_until_somebody_has_something_to_propose():
  """Asking costs nothing then; a draft of any row ends the probe of all."""
  policy = cost(2, probe=3, budget=1.0)
  state = policy.init(2)
  state = state.replace(chances=jnp.full((2, 2), 50.0))
  costs = [1.0, 1.2, 1.3]
  nothing = [[False, False]] * 2
  for step in range(6):
    asked = depths(policy, state, costs)
    assert (asked[0] > 0) == (step >= 3) and asked[0] == asked[1]
    state = policy.update(state, outcome(asked, nothing, nothing))
  state = policy.update(
    state, outcome([1, 1], [[False, False], [True, False]], nothing)
  )
  assert depths(policy, state, costs) == [0, 0]
  assert state.num_probes.tolist() == [0, 1]


def test_cost_probes_within_its_budget():
  """A probe that costs 4 steps more, at 2 % of the time: every 200 steps."""
  policy = cost(1, probe=32, budget=0.02)
  state = policy.init(1).replace(chances=jnp.full((1, 1), 1e6))
  for idle, asked in ((199, 0), (200, 1)):
    state = state.replace(idle=jnp.full((1, 1), idle, jnp.int32))
    assert depths(policy, state, [1.0, 5.0]) == [asked]
  # It is wider in a tenth of the steps only: every 20, but 32 is the least.
  often = {"asks": jnp.full((1, 1), 1e6), "widens": jnp.full((1, 1), 1e5)}
  state = state.replace(**often)
  for idle, asked in ((31, 0), (32, 1)):
    state = state.replace(idle=jnp.full((1, 1), idle, jnp.int32))
    assert depths(policy, state, [1.0, 5.0]) == [asked]


def test_a_draft_that_fell_behind_is_asked_again_at_the_next_prompt():
  """Each token of catching up costs .05 steps, more than the budget of .02."""
  policy = cost(1, probe=8, budget=0.02)
  state = policy.init(1).replace(chances=jnp.full((1, 1), 1e6))
  costs = [1.0, 1.2, 0.05]
  for _ in range(300):
    assert depths(policy, state, costs) == [0]
    state = policy.update(state, outcome([0], [[False]], [[False]]))
  assert int(state.behind[0]) == 300
  state = policy.restart(state)
  assert depths(policy, state, costs) == [1]
  state = policy.update(state, outcome([1], [[True]], [[False]]))
  assert int(state.behind[0]) == 0 and depths(policy, state, costs) == [0]
  # Cheap to catch up: within the prompt too.
  state = state.replace(idle=jnp.array([[25]]), behind=jnp.array([20]))
  assert depths(policy, state, [1.0, 1.2, 0.01]) == [1]
  assert depths(policy, state, costs) == [0]


def test_hope_ends_where_it_has_lost_its_budget():
  """Short prompts without use for drafts: they are not all tried anew.

  Each step in vain costs .6 more: 1 % of the last 200 steps is 2 steps.
  """
  policy = cost(2, budget=0.01)
  costs = jnp.array([1.0, 1.6, 1.7])

  @jax.jit
  def run(state):
    def step(state, i):
      state = jax.lax.cond(i % 30 == 0, policy.restart, lambda x: x, state)
      asked = policy.level(state, jnp.ones((1,), bool), costs)
      none = jnp.zeros((1, 2), bool)
      drafted = none.at[:, 0].set(asked > 0)
      done = Outcome(
        asked=asked,
        running=jnp.ones((1,), bool),
        chance=drafted,
        accepted=none,
        widened=drafted[:, 0],
        num_tokens=jnp.ones((1,), jnp.int32),
      )
      return policy.update(state, done), asked[0]

    return jax.lax.scan(step, state, jnp.arange(600))

  state, asked = run(policy.init(1))
  lost = 0.6 * np.count_nonzero(asked)
  assert 5 < lost < 0.03 * 600
  # Of a row that draws well hope is no question.
  good = jnp.full((1, 2), 1e3)
  state = dataclasses.replace(state, hits=good, chances=good)
  assert depths(policy, state, costs.tolist()) == [2]


def test_a_prompt_without_use_for_drafts_does_not_forbid_the_next():
  """Of 50 chances none was taken; a copy costs a tenth of a step."""
  policy = cost(3)
  state = policy.init(1).replace(
    chances=jnp.array([[50.0, 0.0, 0.0]]), asks=jnp.array([[50.0]])
  )
  state = state.replace(offers=state.asks, widens=state.asks)
  costs = [1.0, 1.1, 1.1, 1.1]
  assert depths(policy, state, costs) == [0]
  state = policy.restart(state)
  assert depths(policy, state, costs) == [3]
  np.testing.assert_allclose(state.chances, [[15.0, 0, 0]])
  # Two prompts of use are not forgotten at the third.
  state = state.replace(hits=jnp.array([[25.0, 0, 0]]))
  state = state.replace(chances=jnp.array([[50.0, 0, 0]]))
  after = policy.restart(policy.restart(state))
  assert 0.5 < float(after.hits[0, 0] / after.chances[0, 0]) + 0.01 < 0.52


def test_a_policy_that_does_well_tries_to_do_better():
  """Depths 1 and 2 are always accepted: 5 tokens for 6 s beat 3 for 4."""
  policy, costs = cost(4), jnp.array([2.0, 3, 4, 5, 6])
  state = policy.init(1)
  for step in range(12):
    (asked,) = depths(policy, state, costs)
    assert asked == 4 or step < 6
    taken = np.arange(4)[None] < asked
    state = policy.update(state, outcome([asked], taken, taken))
  assert depths(policy, state, costs) == [4]


def test_a_row_begins_with_what_the_others_know():
  """One bad step of 16 rows is enough; of one row it is not."""
  policy = cost(2)
  costs = [1.0, 1.5, 1.5]
  for rows, expected in ((1, 2), (16, 0)):
    state = policy.init(rows)
    assert set(depths(policy, state, costs)) == {2}
    refused = [[True, False]] * rows
    state = policy.update(
      state, outcome([2] * rows, refused, [[False, False]] * rows)
    )
    assert set(depths(policy, state, costs)) == {expected}


def test_cost_counts_rows_that_have_nothing_to_propose():
  """One row of eight proposes in half of the steps: a wide pass for one."""
  policy = cost(1, margin=0.02)
  state = policy.init(8)
  never = jnp.arange(8)[:, None] > 0
  state = state.replace(
    hits=jnp.full((8, 1), 1e6),
    chances=jnp.full((8, 1), 1e6),
    asks=jnp.full((8, 1), 1e6),
    offers=jnp.where(never, 0.0, 5e5),
    widens=jnp.where(never, 0.0, 5e5),
  )
  assert depths(policy, state, [1.0, 1.2])[0] == 0
  assert depths(policy, state, [1.0, 1.05])[0] == 1


def test_cost_counts_passes_that_are_wide_without_a_draft():
  """A drafter that reads for itself and proposes in one step of four."""
  policy = cost(1)
  state = policy.init(1)
  for step in range(200):
    chance = [[step % 4 == 0]]
    state = policy.update(state, outcome([1], chance, chance, widened=[True]))
  # 1.25 tokens a step: pays at 1.1 a step, not at 1.5, whatever was proposed.
  assert depths(policy, state, [1.0, 1.1]) == [1]
  assert depths(policy, state, [1.0, 1.5]) == [0]
  assert int(state.asked_at[0, 1]) == 200


def test_done_rows_have_no_say():
  policy = cost(2)
  state = policy.init(2)
  good = jnp.array([[50.0, 50.0], [0.0, 0.0]])
  state = state.replace(hits=good, chances=good * 0 + 50)
  costs = [1.0, 1.5, 1.9]
  only = lambda row: jnp.arange(2) == row
  assert depths(policy, state, costs, only(0)) == [2, 2]
  assert depths(policy, state, costs, only(1)) == [0, 0]


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
