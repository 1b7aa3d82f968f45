"""Tests of a drafter that is asked in two ways, and of who asks which."""

import dataclasses

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import show
from spec_jax import drafters, length
from spec_jax.base import Outcome
from spec_jax.engine import Engine
from spec_jax.levels import WAYS, Levels
from spec_jax.programs import EngineConfig
from spec_jax.requests import Job
from spec_jax.settings import Settings
from tests import fakes
from tests.combining_test import common, look_up

V = 13
# Three depths with all parts, two of the copying part alone.
LEVELS = Levels((3, 2))


def test_levels_and_their_ways_and_depths():
  levels = jnp.arange(6)
  way, depth = LEVELS.split(levels)
  assert (LEVELS.num, LEVELS.num_ways) == (5, 2)
  assert way.tolist() == [0, 0, 0, 0, 1, 1]
  assert depth.tolist() == [0, 1, 2, 3, 1, 2]
  assert LEVELS.join(way, depth).tolist() == levels.tolist()
  # No room is no draft, whatever the way.
  assert LEVELS.join(jnp.array([0, 1]), jnp.array([0, 0])).tolist() == [0, 0]
  parts = np.arange(1, 6)
  assert [parts[s].tolist() for s in LEVELS.slices()] == [[1, 2, 3], [4, 5]]
  assert Levels((0,)).num == 0


@pytest.mark.parametrize(
  ("name", "first", "second", "cheap"),
  [
    ("merge", "prompt_lookup(num_draft=3)", "vanilla(num_draft=5)", 3),
    ("merge", "vanilla(num_draft=5)", "recycling", 4),
    ("merge", "prompt_lookup", "recycling", None),  # nothing is dear
    ("merge", "vanilla(siblings='top_k', tree=(2,))", "best_first", None),
    ("merge", "none", "vanilla", None),  # nothing is left
    ("first_of", "prompt_lookup", "vanilla", None),
  ],
)
def test_what_can_be_asked_alone(name, first, second, cheap):
  model, _ = fakes.tiny(V)
  drafter = drafters.build(
    name, model, model, slots=64, first=first, second=second
  )
  assert drafter.cheap_depth == cheap
  assert Levels.of(drafter).num == drafter.depth + (cheap or 0)


# --- the cost-aware policy ---------------------------------------------------


def outcome(level, accepted):
  """Returns what one row learns: so many accepted of what was asked."""
  level = jnp.asarray(level)
  _, depth = LEVELS.split(level)
  at, kept = jnp.arange(3), jnp.minimum(accepted, depth)
  return Outcome(
    asked=level[None],
    running=jnp.array([True]),
    chance=((at < depth) & (at <= accepted))[None],
    accepted=(at < kept)[None],
    widened=(level > 0)[None],
    num_tokens=1 + kept[None],
  )


def levels_of(policy, costs, accepted, steps, state=None):
  """Returns (levels asked for, state); `accepted` by way."""

  def step(state, _):
    level = policy.level(state, jnp.array([True]), costs)[0]
    kept = jnp.array(accepted)[LEVELS.split(level)[0]]
    return policy.update(state, outcome(level, kept)), level

  state = policy.init(1) if state is None else state
  state, asked = lax.scan(step, state, None, steps)
  return asked.tolist(), state


@pytest.mark.parametrize(
  ("costs", "accepted", "usual"),
  [
    # 4 tokens for 2 against 3 for 1.7, and against 3 for 1.2.
    ([1.0, 1.8, 1.9, 2.0, 1.6, 1.7], (3, 2), 3),
    ([1.0, 1.8, 1.9, 2.0, 1.1, 1.2], (3, 2), 5),
    # What copies is never right.
    ([1.0, 1.3, 1.4, 1.5, 1.1, 1.2], (3, 0), 3),
    ([1.0, 1.3, 1.4, 1.5, 1.1, 1.2], (0, 0), 0),
  ],
)
def test_the_way_that_pays_most_is_taken(costs, accepted, usual):
  """Whatever was thought at first; the other is tried now and then."""
  policy = length.cost(LEVELS, probe=16, budget=0.1)
  costs = jnp.array(costs)
  _, state = levels_of(policy, costs, accepted, 100)
  asked, state = levels_of(policy, costs, accepted, 300, state)
  counts = np.bincount(asked, minlength=6)
  assert counts[usual] > 0.85 * 300
  for way in range(2):
    assert counts[1:][LEVELS.slices()[way]].sum() >= 2
  assert int(state.num_probes[0]) > 1


def test_tries_of_either_way_stay_within_the_budget():
  """In vain, 4 and 2 steps longer: at 1 % of the time each."""
  policy = length.cost(LEVELS, probe=8, budget=0.02)
  costs = jnp.array([1.0, 5.0, 5.0, 5.0, 3.0, 3.0])
  _, state = levels_of(policy, costs, (0, 0), 600)
  asked, _ = levels_of(policy, costs, (0, 0), 1200, state)
  both, cheap = (np.isin(asked, x).sum() for x in ((1, 2, 3), (4, 5)))
  assert 2 <= both <= 1200 / 400 + 1
  assert 4 <= cheap <= 1200 / 200 + 1


def test_only_what_asks_a_model_falls_behind():
  """The copying part alone leaves the model where it was."""
  policy = length.cost(LEVELS)
  state = policy.init(1)
  for level, accepted, behind in ((5, 2, 3), (0, 0, 4), (3, 1, 0), (4, 1, 2)):
    state = policy.update(state, outcome(level, accepted))
    assert state.behind.tolist() == [behind]
  assert state.caught_up.tolist() == [4]
  assert state.reads_at.tolist() == [[1, 0, 0, 1, 1, 1]]
  assert state.chances.tolist()[0] == pytest.approx([1, 1, 0, 1.98, 1])
  assert state.hits.tolist()[0] == pytest.approx([1, 0, 0, 1.98, 1])
  # It is charged to the way that must: 8 tokens for 4 steps each.
  costs = jnp.array([1.0, 1.1, 1.1, 1.1, 1.1, 1.1, 4.0])
  good = jnp.full((1, 5), 1e3)
  state = dataclasses.replace(
    state, hits=good, chances=good, behind=jnp.array([32 * 8])
  )
  assert policy.level(state, jnp.array([True]), costs).tolist() == [5]
  state = dataclasses.replace(state, behind=jnp.array([0]))
  assert policy.level(state, jnp.array([True]), costs).tolist() == [3]


def test_steps_with_all_parts_tell_about_the_cheap_one():
  """It had offered two and one was right; all parts had two accepted."""
  policy = length.cost(LEVELS)
  seen = dataclasses.replace(
    outcome(3, 2),
    cheap=(
      jnp.array([[True, True, False]]),
      jnp.array([[True, False, False]]),
      jnp.array([True]),
    ),
  )
  state = policy.update(policy.init(1), seen)
  assert state.chances.tolist() == [[1, 1, 1, 1, 1]]
  assert state.hits.tolist() == [[1, 1, 0, 1, 0]]
  for counted in (state.asks, state.offers, state.widens):
    assert counted.tolist() == [[1, 1]]
  assert state.idle.tolist() == [[0, 0]]
  # It had nothing to offer, in a step of its own or of all: known all the same.
  none = jnp.zeros((1, 3), bool), jnp.zeros((1, 3), bool), jnp.array([False])
  state = policy.update(state, dataclasses.replace(seen, cheap=none))
  assert state.offers.tolist()[0] == pytest.approx([1.98, 0.98])
  assert state.asks.tolist()[0] == pytest.approx([1.98, 1.98])
  assert state.idle.tolist() == [[0, 0]]
  # Its own steps say nothing of all.
  state = policy.update(policy.init(1), outcome(5, 1))
  assert state.chances.tolist() == [[0, 0, 0, 1, 1]]
  assert state.asks.tolist() == [[0, 1]] and state.idle.tolist() == [[1, 0]]


def told_by(options, target, draft, prompts, settings, use, policy=None):
  """Runs a merge.

  Returns:
    (told of the cheap part by step, nodes drafted by step and row, lengths
    before each step and at last, the last state).
  """
  told = []

  def update(state, outcome):
    jax.debug.callback(lambda *x: told.append(x), *outcome.cheap)
    return state

  model = target[0]
  drafter = drafters.build("merge", model, draft[0], slots=64, **options)
  policy = policy or length.fixed(drafter.depth)
  rig = fakes.Rig(
    target,
    drafter,
    draft=draft,
    use=use,
    policy=policy._replace(update=update),
  )
  state = rig.start(prompts, settings)
  drafted, lengths = [], [state.length.tolist()]
  while not state.done.all():
    state, info = rig.step(rig.params, state)
    drafted.append(info.num_drafted.tolist())
    lengths.append(state.length.tolist())
  jax.effects_barrier()
  return told, drafted, lengths, state


@pytest.mark.parametrize("first", [True, False])
def test_what_the_cheap_part_alone_had_come_to(first):
  """Step by step as lists say, whichever of the two it is."""
  copies = "prompt_lookup(num_draft=4, max_ngram=2)"
  asks = "vanilla(tree=(2, 1, 1), siblings='top_k')"
  model, params = fakes.scripted([1, 2, 1, 3, 1, 1, 2, 4], V)
  other = fakes.tables(V, seed=3)
  options = {
    "first": copies if first else asks,
    "second": asks if first else copies,
  }
  prompts = [[5, 1, 1, 5, 2], [1, 2, 1, 3, 1], [9]]
  told, _, lengths, state = told_by(
    options,
    (model, params),
    other,
    prompts,
    Settings(max_new_tokens=24),
    fakes.GREEDY,
  )
  partly = 0
  for row, prompt in enumerate(prompts):
    text = prompt + fakes.outputs(state)[row]
    for at, after, (chance, accepted, widened) in zip(
      lengths[:-1], lengths[1:], told, strict=True
    ):
      at, num = at[row], after[row] - at[row]
      if not num:
        assert not (chance[row].any() or widened[row])
        continue
      offered = look_up(text[:at], 4, 2, 1)[: len(text) - at - 1]
      kept = common(offered, text[at : at + num])
      assert widened[row] == bool(offered)
      assert accepted[row].sum() == kept
      assert chance[row].sum() == min(kept + 1, len(offered), num)
      partly += 0 < kept < len(offered)
  assert partly > 1


@pytest.mark.parametrize("swapped", [False, True])
def test_what_is_told_does_not_depend_on_who_comes_first(swapped):
  """The model's token is drawn, and taken where the copy has the same."""
  options = ["prompt_lookup(num_draft=2)", "vanilla(num_draft=2)"]
  first, second = reversed(options) if swapped else options
  pair = fakes.scripted([1, 2, 3], V)
  told, *_ = told_by(
    {"first": first, "second": second},
    pair,
    pair,
    [[1, 2, 3, 1, 2]],
    Settings(temperature=0.7, max_new_tokens=24),
    fakes.ALL,
  )
  assert len(told) == 8
  for chance, accepted, widened in told:
    assert chance.all() and accepted.all() and widened.all()


def test_a_part_that_is_spared_proposes_nothing_whatever_it_holds():
  """Within the dearer part is one that copies, and asks nobody how deep."""
  options = {
    "first": "prompt_lookup(num_draft=2)",
    "second": "merge(first='recycling', second='vanilla')",
  }
  pair = fakes.tables(V, seed=3)
  alone = length.fixed(0)._replace(
    level=lambda state, running, costs: state + 6, knows_ways=True
  )
  drafter = drafters.build("merge", pair[0], pair[0], slots=64, **options)
  assert Levels.of(drafter).depths[1] == 2
  assert drafter.depth + 2 == 6  # the level asked for below
  prompts, settings = [[1, 2, 1, 2], [3]], Settings(max_new_tokens=30)
  _, drafted, _, state = told_by(
    options, pair, pair, prompts, settings, fakes.GREEDY, alone
  )
  assert 0 < np.max(drafted) <= 2
  plain = fakes.Rig(pair, use=fakes.GREEDY)
  expected = plain.start(prompts, settings)
  while not expected.done.all():
    expected, _ = plain.step(plain.params, expected)
  assert fakes.outputs(state) == fakes.outputs(expected)


def test_what_the_cheap_part_reads_for_itself_counts():
  """Lookahead widens every step with its window, whatever it proposes."""
  pair = fakes.tables(V, seed=3)
  told, *_ = told_by(
    {
      "first": "lookahead(prompt_as_reference=False)",
      "second": "vanilla(num_draft=2, siblings='top_k')",
    },
    pair,
    fakes.tables(V, seed=4),
    [[1, 2, 3, 4]],
    Settings(max_new_tokens=20),
    fakes.GREEDY,
  )
  assert all(widened.all() for _, _, widened in told[:-1])
  assert not all(chance.any() for chance, _, _ in told)


def test_a_depth_beyond_all_is_no_other_way():
  """A policy that knows of no ways asks for as much as there is."""
  pair = fakes.scripted([1, 2, 3], V)
  options = {
    "first": "prompt_lookup(num_draft=2)",
    "second": "vanilla(num_draft=2, siblings='top_k')",
  }
  settings = Settings(max_new_tokens=12)
  _, drafted, *_ = told_by(
    options, pair, pair, [[4, 1]], settings, fakes.GREEDY, length.fixed(4)
  )
  assert drafted[0] == [2]  # nothing to copy yet


def test_rows_of_two_ways_share_what_they_know():
  """Two rows run: either pays what both do; a done row has no say."""
  policy = length.cost(LEVELS)
  state = policy.init(3)
  known = jnp.array([[9.0, 9, 9, 9, 9], [9, 9, 9, 0, 0], [0.0] * 5])
  state = dataclasses.replace(state, chances=known * 0 + 10, hits=known)
  costs = jnp.array([1.0, 2.6, 2.7, 2.8, 1.1, 1.2])
  on = jnp.array([True, True, False])
  # With all parts about 3 tokens a row, the copies 2.5 and 1.2.
  assert policy.level(state, on, costs).tolist() == [5] * 3
  dear = costs.at[4:].set(1.7)
  assert policy.level(state, on, dear).tolist() == [3] * 3
  step = outcome(3, 2)
  step = jax.tree.map(lambda x: jnp.concatenate([x] * 3), step)
  step = dataclasses.replace(
    step, running=on, asked=jnp.where(on, step.asked, 0)
  )
  step = dataclasses.replace(
    step,
    chance=step.chance & on[:, None],
    accepted=step.accepted & on[:, None],
    num_tokens=step.num_tokens * on,
    widened=step.widened & on,
  )
  after = policy.update(state, step)
  for name in ("hits", "chances", "asks", "offers", "idle", "reads_at"):
    old, new = getattr(state, name), getattr(after, name)
    assert new[2].tolist() == old[2].tolist()
    assert name == "offers" or new[0].tolist() != old[0].tolist()


# --- in an engine ------------------------------------------------------------


def run(policy="cost", costs=None):
  """Returns (texts, how often the model was asked, the engine)."""
  model, params = fakes.scripted([1, 2, 3], V)
  calls = []

  def apply(*args, **kwargs):
    jax.debug.callback(lambda: calls.append(1))
    return model.apply(*args, **kwargs)

  config = EngineConfig(
    drafter="merge",
    options=(
      ("first", "prompt_lookup(num_draft=3)"),
      ("second", "vanilla(num_draft=2, siblings='top_k')"),
    ),
    policy=policy,
    batch_size=1,
    slots=128,
  )
  engine = Engine(
    model,
    params,
    config,
    draft=model._replace(apply=apply),
    draft_params=params,
    costs=costs,
  )
  job = Job([1, 2, 3, 1, 2], Settings(max_new_tokens=90, stop_ids=()), (0,))
  texts = [x.ids for x in engine.run([job])]
  jax.effects_barrier()
  return texts, len(calls), engine


def test_an_engine_asks_the_model_only_where_it_pays():
  """All is accepted: 4 tokens a step either way, dear with the model."""
  text = [[3, *[1, 2, 3] * 30][:90]]
  dear = [1.0, 4.0, 4.0, 4.0, 1.1, 1.1, 1.1, 0.5]
  texts, calls, engine = run(costs=dear)
  assert texts == text
  said = engine.policy_report()
  ways = {name: sum(x["steps_at_depth"]) for name, x in said["ways"].items()}
  assert ways == {WAYS[0]: 0, WAYS[1]: sum(said["steps_at_depth"])}
  assert said["ways"][WAYS[1]]["relative_costs"] == pytest.approx([1.1] * 3)
  assert said["ways"][WAYS[1]]["accept_cond"] == [1.0] * 3
  assert calls == 1  # it has read the prompt
  # The copy is as dear as both: the model has a say.
  same = [1.0, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 0.001]
  texts, calls, engine = run(costs=same)
  assert texts == text and calls > 10
  # Other policies ask for all there is.
  texts, calls, engine = run("fixed")
  assert texts == text and calls > 10


def test_an_engine_measures_both_ways():
  _, _, engine = run()
  assert len(engine.costs) == 1 + 3 + 3 + 1
  plain, *deep, late = engine.costs
  assert deep[:3] == sorted(deep[:3]) and deep[3:] == sorted(deep[3:])
  assert min(deep) >= plain and late > 0
  with pytest.raises(ValueError, match="8 costs above 0 are needed"):
    run(costs=[1.0] * 5)


def test_the_table_says_who_was_asked(capsys):
  dear = [1.0, 4.0, 4.0, 4.0, 1.1, 1.1, 1.1, 0.5]
  policy = run(costs=dear)[2].policy_report()
  show.table(
    {"x": {"decode_tokens_per_s": 1.0, "policy": policy}}, [], 0.0, True
  )
  steps = sum(policy["steps_at_depth"])
  assert (
    f"steps that asked        all parts 0, without a model {steps}, none 0"
    in capsys.readouterr().out
  )
