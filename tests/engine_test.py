"""Tests of the engine: rows are refilled, and nothing depends on neighbours."""

import functools

from fakes import scripted, tiny
import numpy as np
import pytest

from spec_jax.engine import Engine
from spec_jax.programs import EngineConfig
from spec_jax.requests import Job, slots_for
from spec_jax.settings import Settings, in_use

_SLOTS = 64
# Greedy, sampled with its own filters, and one that must not say token 0.
_MIXED = (
  Settings(max_new_tokens=9),
  Settings(temperature=1.0, top_k=3, max_new_tokens=14),
  Settings(temperature=0.8, banned_tokens=(0,), max_new_tokens=5),
)
_USE = in_use(_MIXED)
_target = functools.cache(tiny)


def _engine(drafter="prompt_lookup", rows=3, **config):
  """Returns an engine on the tiny decoder; programs are kept by JAX."""
  model, params = _target()
  draft = {}
  if drafter == "vanilla":
    draft = {"draft": model, "draft_params": params}
    config = {"options": (("num_draft", 3),)} | config
  config = {"slots": _SLOTS, "chunk": 8, "use": _USE} | config
  return Engine(
    model,
    params,
    EngineConfig(drafter=drafter, batch_size=rows, **config),
    **draft,
  )


def _jobs(count=30, seed=0):
  """Returns jobs of many lengths and all three settings, each with a seed."""
  rng = np.random.default_rng(seed)
  return [
    Job(
      rng.integers(0, 13, rng.integers(1, 30)).tolist(),
      _MIXED[i % 3],
      (100 + i,),
      (12,),
    )
    for i in range(count)
  ]


def _run(engine, jobs, **kwargs):
  """Runs jobs; returns what finished, in the order of the jobs."""
  return sorted(engine.run(jobs, **kwargs), key=lambda x: x.job)


def test_thirty_prompts_on_three_rows_are_each_as_alone():
  """Refilled rows give what a batch of one gives, and compile once."""
  engine, alone = _engine(), _engine(rows=1)
  jobs = _jobs()
  together = _run(engine, jobs)
  assert [x.job for x in together] == list(range(30))
  # Reading prompts and decoding: two programs for thirty lengths.
  assert engine.num_compiles <= 2
  for job, found in zip(jobs, together, strict=True):
    (single,) = _run(alone, [job])
    assert (found.ids, found.finish_reason, found.counts) == (
      single.ids,
      single.finish_reason,
      single.counts,
    )
    assert all(i != 0 for i in found.ids) or job.settings is not _MIXED[2]
    limit = job.settings.max_new_tokens
    if found.finish_reason == "length":
      assert len(found.ids) == limit and 12 not in found.ids
    else:
      assert found.finish_reason == "stop" and found.ids.index(12) + 1 == len(
        found.ids
      )
  assert {x.finish_reason for x in together} == {"length", "stop"}
  before = engine.num_compiles
  again = _run(engine, jobs[::-1])
  assert engine.num_compiles == before
  assert [x.ids for x in again] == [x.ids for x in together][::-1]
  assert _engine().num_compiles == 0  # of this engine: there are programs


def test_a_row_needs_no_more_steps_than_alone():
  """Rows that accept 0 and all of the draft do not hold each other up."""
  # Position p says token p % 8; after 8 tokens lookup knows all the rest.
  model, params = scripted(np.arange(8), 8)
  config = EngineConfig(
    drafter="prompt_lookup",
    options=(("num_draft", 8),),
    batch_size=2,
    slots=_SLOTS,
    chunk=16,
  )
  engine = Engine(model, params, config)
  settings = Settings(max_new_tokens=16)
  known = Job([i % 8 for i in range(20)], settings, (0,))
  unknown = Job([0], Settings(max_new_tokens=8), (0,))
  quick, slow = _run(engine, [known, unknown])
  assert quick.ids == [i % 8 for i in range(20, 36)]
  assert slow.ids == [1, 2, 3, 4, 5, 6, 7, 0]
  # 8 drafted and one more a step: 16 tokens in 2 steps.
  assert quick.counts.steps == 2
  assert slow.counts.drafted == slow.counts.accepted == 0
  assert slow.counts.steps == 8


@pytest.mark.parametrize("drafter", ["none", "prompt_lookup", "vanilla"])
def test_without_a_stop_id_texts_end_by_length(drafter):
  """No stop id at all is no crash, and nothing is lost or counted twice."""
  engine = _engine(drafter)
  settings = Settings(max_new_tokens=10)
  jobs = [Job([1, 2, 3], settings, (0,)), Job([4], settings, (1,))]
  seen = {0: [], 1: []}
  found = _run(engine, jobs, on_tokens=lambda i, new: seen[i].extend(new))
  for x in found:
    assert x.finish_reason == "length" and len(x.ids) == 10
    # Output, count and stream say the same.
    assert x.counts.emitted == 10 and seen[x.job] == x.ids
    extra = x.counts.steps + x.counts.accepted - 10
    assert extra == 0


def test_a_draft_equal_to_the_target_is_always_accepted():
  """All drafted tokens are kept, at temperature 0 and above."""
  engine = _engine("vanilla")
  jobs = [
    Job([1, 2, 3], Settings(max_new_tokens=13), (0,)),
    Job([5, 4], Settings(temperature=1.0, max_new_tokens=13), (1,)),
  ]
  for x in _run(engine, jobs):
    assert x.counts.drafted == x.counts.accepted > 0
    # Three drafts and one more a step, the last step has one to go.
    assert x.counts.steps == 4 and x.counts.accepted == 9


def test_tokens_come_in_order_while_rows_are_refilled():
  """The stream of each job joins to its ids; time to first token is known."""
  engine, jobs = _engine(), _jobs(12, seed=3)
  seen = {i: [] for i in range(12)}
  found = _run(engine, jobs, on_tokens=lambda i, new: seen[i].extend(new))
  assert [seen[x.job] for x in found] == [x.ids for x in found]
  assert all(x.first_token_s > 0 for x in found)
  assert len(engine.timing.first_token_s) == 12
  assert engine.timing.num_prompt_tokens == sum(len(j.ids) for j in jobs)


def test_continuing_a_state_is_running_afresh():
  """Kept states go on with five more tokens: less is read, the same said."""
  engine = _engine("vanilla")
  for settings in _MIXED:
    job = Job([3, 1, 4, 1, 5], settings, (7,))
    (first,) = _run(engine, [job], keep_state=True)
    longer = Job([*job.ids, *first.ids, 1, 2, 3, 4, 5], settings, (8,))
    held = int(first.state.target.length[0])
    assert held == len(job.ids) + len(first.ids) - 1
    before = engine.timing.num_prompt_tokens
    (further,) = _run(engine, [longer], start=first.state)
    read = engine.timing.num_prompt_tokens - before
    assert read == len(longer.ids) - held == 6
    (fresh,) = _run(engine, [longer])
    assert further.ids == fresh.ids and further.counts == fresh.counts
  (plain,) = _run(engine, [job])
  assert plain.state is None


def test_a_prefix_is_read_once():
  """Jobs that begin alike go on from one state, and say the same."""
  engine = _engine()
  rng = np.random.default_rng(1)
  head = rng.integers(0, 13, 20).tolist()
  jobs = [
    Job([*head, *rng.integers(0, 13, n).tolist()], _MIXED[n % 3], (n,))
    for n in range(1, 8)
  ]
  apart = _run(engine, jobs)
  total = engine.timing.num_prompt_tokens
  start = engine.prefix(head)
  joined = _run(engine, jobs, start=start)
  assert [x.ids for x in joined] == [x.ids for x in apart]
  # 19 tokens are held: the last of a prefix is not cached.
  read = engine.timing.num_prompt_tokens - total
  assert read == 20 + sum(len(j.ids) - 19 for j in jobs)


def test_a_state_that_does_not_fit_is_refused():
  """Another drafter, size or text: a plain error, before anything runs."""
  engine = _engine()
  settings = Settings(max_new_tokens=4)
  job = Job([1, 2, 3, 4], settings, (0,))
  (found,) = _run(engine, [job], keep_state=True)
  longer = job._replace(ids=[*job.ids, *found.ids, 1])
  for other in (
    _engine("vanilla"),
    _engine("none"),
    _engine(slots=32),
    _engine(logprobs="raw"),
    _engine(use=frozenset()),
  ):
    with pytest.raises(ValueError, match="this state cannot be continued here"):
      other.run([longer], start=found.state)
  for ids in ([1, 2, 3], [9, *longer.ids[1:]]):
    with pytest.raises(ValueError, match="does not continue the state's 7"):
      engine.run([job._replace(ids=ids)], start=found.state)


@pytest.mark.parametrize(
  ("ids", "message"),
  [
    ([], "a prompt of 0 tokens does not fit a context of 64"),
    ([1] * 64, "a prompt of 64 tokens does not fit a context of 64"),
  ],
)
def test_a_prompt_that_does_not_fit_is_refused(ids, message):
  """At once, not when the results are asked for."""
  with pytest.raises(ValueError, match=message):
    _engine().run([Job(ids, Settings(), (0,))])


def test_more_stop_ids_than_there_is_room_for_are_refused():
  """The number of stop ids is static."""
  with pytest.raises(ValueError, match="2 stop ids, room for 1"):
    _engine().run([Job([1], Settings(), (0,), (3, 4))])


def test_texts_end_at_the_context_and_at_the_slots():
  """The smaller of both ends a text that wants more, and the result says so."""
  settings = Settings(max_new_tokens=100)
  for slots, context in ((24, 256), (256, 24)):
    model, params = scripted(np.arange(8), 8, max_length=context)
    config = EngineConfig(
      drafter="prompt_lookup", batch_size=1, slots=slots, chunk=8
    )
    job = Job([0, 1, 2, 3], settings, (0,))
    (found,) = _run(Engine(model, params, config), [job])
    assert found.ids == [i % 8 for i in range(4, 24)]
    assert found.finish_reason == "context"


def test_a_full_context_has_room_for_one_more():
  """The longest prompt gives one token."""
  (found,) = _run(_engine(), [Job([1] * 63, _MIXED[0], (0,))])
  assert (len(found.ids), found.finish_reason) == (1, "context")


@pytest.mark.parametrize(
  ("field", "value", "message"),
  [
    ("batch_size", 0, "batch_size must be at least 1, got 0"),
    ("slots", 0, "slots must be at least 1, got 0"),
    ("chunk", -1, "chunk must be at least 0, got -1"),
    ("refill_rows", -1, "refill_rows must be at least 0, got -1"),
    ("batch_size", 10**9, "batch_size must be at most 65536"),
    ("chunk", 1025, "chunk must be at most the 1024 slots of a row, got 1025"),
    ("drafter", "magic", "unknown drafter 'magic'"),
    ("options", (("k", 1),), "has no option 'k'"),
  ],
)
def test_sizes_out_of_range_are_refused(field, value, message):
  """When the engine is made."""
  model, params = _target()
  with pytest.raises(ValueError, match=message):
    Engine(
      model,
      params,
      EngineConfig(**{"drafter": "prompt_lookup", field: value}),
    )


def test_seeds_are_the_rows_own():
  """The same seeds, the same text, whoever sits beside; others differ."""
  engine = _engine()
  jobs = [
    Job([1, 2], Settings(temperature=1.0, max_new_tokens=20), seeds)
    for seeds in ((7,), (8,), (7, 1), (7,), (7 + (1 << 32),), ((1 << 63) - 1,))
  ]
  found = [tuple(x.ids) for x in _run(engine, jobs)]
  assert found[0] == found[3] and len(set(found)) == 5
  (alone,) = _run(engine, jobs[:1])
  assert tuple(alone.ids) == found[0]
  assert len(set(found[0])) > 2  # not one uniform for every draw


def test_no_jobs_run_to_nothing():
  """An empty queue is no error."""
  assert list(_engine().run([])) == []


def test_sizes_of_caches_are_few():
  """Doubling from 256, so that few programs exist; too long is an error."""
  assert [slots_for(n) for n in (1, 256, 257, 5000)] == [256, 256, 512, 8192]
  with pytest.raises(ValueError, match="tokens a row; the largest cache has"):
    slots_for(1 << 21)


def test_a_trace_shows_each_step_of_each_row():
  """`on_trace` is told whose rows they are; texts are those without it."""
  engine = _engine(trace=True)
  jobs = _jobs(5, seed=4)
  steps = {i: [] for i in range(5)}

  def on_trace(owner, info):
    assert isinstance(info.num_tokens, np.ndarray)
    for row, index in owner.items():
      num = info.num_tokens[row]
      steps[index] += info.verdict.tokens[row, :num].tolist()

  found = _run(engine, jobs, on_trace=on_trace)
  assert [steps[x.job] for x in found] == [x.ids for x in found]
  assert [x.ids for x in _run(_engine(), jobs)] == [x.ids for x in found]


def test_rows_on_a_mesh_say_the_same():
  """Two devices for the rows, two for the heads; sizes must divide."""
  from spec_jax.sharding import make_mesh

  model, params = _target()
  config = EngineConfig(
    drafter="prompt_lookup", batch_size=2, slots=_SLOTS, chunk=8, use=_USE
  )
  jobs = _jobs(4, seed=5)
  mesh = make_mesh(2, 2)
  spread = _run(Engine(model, params, config, mesh=mesh), jobs)
  whole = _run(Engine(model, params, config), jobs)
  assert [x.ids for x in spread] == [x.ids for x in whole]
  with pytest.raises(ValueError, match="batch_size 3 is not a multiple of"):
    _engine_on(mesh, 3)


def _engine_on(mesh, rows):
  model, params = _target()
  config = EngineConfig(batch_size=rows, slots=_SLOTS)
  return Engine(model, params, config, mesh=mesh)
