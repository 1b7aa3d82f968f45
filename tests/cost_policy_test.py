"""The cost-aware policy: what it asks for, and what it learns from."""

import dataclasses

import jax
import jax.numpy as jnp
from length_test import cost, depths, outcome
import numpy as np

from spec_jax import length
from spec_jax.base import Outcome
from spec_jax.levels import Levels

FLAT = [1.0, 1.0, 1.0, 1.0, 1.0]
STEEP = [1.0, 3.0, 5.0, 7.0, 9.0]


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
