"""The contract of every drafter, found by its file, on a decoder with rings.

One batch of four rows is enough for most of it: greedy, sampled, filtered and
penalised, with prompts of 1 to 20 tokens read in chunks of 8.
"""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import drafters, rows as rows_lib
from spec_jax.base import DETERMINISTIC, IID, LENGTH, STOP_ID
from spec_jax.settings import Settings, in_use
from tests import cases as cases_lib, fakes, laws, reference

V, SLOTS, NEW = 13, 64, 24
CASES = cases_lib.cases()
PROMPTS = [
  [5],
  [1, 2, 3, 1, 2, 3, 1, 2],
  [4, 4, 9],
  [7, 1, 7, 2, 7, 1, 7, 2, 7, 1, 0, 3, 5, 6, 7, 1, 7, 2, 7, 1],
]
SETTINGS = [
  Settings(temperature=0, max_new_tokens=NEW),
  Settings(temperature=1, max_new_tokens=NEW - 5),
  Settings(
    temperature=0.7, top_k=5, top_p=0.9, banned_tokens=(0,), max_new_tokens=NEW
  ),
  Settings(
    repetition_penalty=1.3,
    frequency_penalty=0.2,
    min_new_tokens=7,
    stop_ids=(7, 6),
    max_new_tokens=NEW,
  ),
]
SEEDS = [11, 12, 13, 14]


@functools.cache
def rig_of(key):
  """The case on a target whose draft is a noisy copy of it."""
  model, params = fakes.tiny(V)
  draft = (model, fakes.noisy(params))
  return cases_lib.rig_of(
    CASES[key],
    (model, params),
    draft,
    slots=SLOTS,
    use=in_use(SETTINGS),
    logprobs="raw",
    trace=True,
  )


@functools.cache
def record_of(key):
  """Runs the four rows; returns (final state, [(state, info), ...])."""
  rig = rig_of(key)
  state = rig.start(PROMPTS, SETTINGS, seeds=SEEDS)
  steps_ = []
  while not state.done.all():
    after, info = rig.step(rig.params, state)
    steps_.append((state, info))
    state = after
  return state, steps_


def run_rows(key, rows, others=3):
  """Runs some of the rows, the rest of the batch being of another kind."""
  spare = [r for r in range(4) if r not in rows][: 4 - len(rows)]
  order = [*rows, *spare]
  settings = [
    SETTINGS[r] if r in rows else Settings(max_new_tokens=others) for r in order
  ]
  rig = rig_of(key)
  prompts = [PROMPTS[r] if r in rows else [others] for r in order]
  state = rig.run(prompts, settings, seeds=[SEEDS[r] for r in order])
  return fakes.outputs(state)[: len(rows)]


_take = jax.jit(rows_lib.take_rows)
_put = jax.jit(rows_lib.put_rows)
_forward = jax.jit(
  lambda params, tokens: (
    fakes.tiny(V)[0]
    .apply(params, tokens, jnp.arange(SLOTS)[None] + 0 * tokens)
    .logits
  )
)
every = pytest.mark.parametrize("key", CASES)


@every
def test_greedy_and_deterministic_texts_are_plains(key):
  """D4, R7, L11: greedy rows always, every row if no draft is drawn."""
  state, record = record_of(key)
  found = fakes.outputs(state)
  expected = fakes.outputs(record_of("none")[0])
  for row, settings in enumerate(SETTINGS):
    if CASES[key].deterministic or settings.temperature == 0:
      assert found[row] == expected[row], row
  assert state.finish_reason.tolist() == [LENGTH] * 3 + [STOP_ID]
  assert len(found[3]) >= 7  # Not before the minimum.
  if key != "none":  # Else the test says nothing.
    accepted = int(state.tally.num_accepted.sum())
    assert 0 < accepted < int(state.tally.num_drafted.sum())
    assert len(record) < NEW


@every
def test_logprobs_are_those_of_a_forward_over_the_text(key):
  """M5, K3: raw, for accepted, corrected and bonus tokens, in every row."""
  state, _ = record_of(key)
  logits = _forward(rig_of(key).params["target"], state.tokens)
  expected = np.asarray(jax.nn.log_softmax(logits, -1))
  tokens, logprobs = np.asarray(state.tokens), np.asarray(state.logprobs)
  for row, prompt in enumerate(PROMPTS):
    p = np.arange(len(prompt), int(state.length[row]))
    np.testing.assert_allclose(
      logprobs[row, p],
      expected[row, p - 1, tokens[row, p]],
      atol=1e-4,  # Logits of 10, summed in another order.
    )


@every
def test_drafts_keep_the_rules(key):
  """The tree is one, the root is the last token, laws are laws."""
  rig = rig_of(key)
  N, K = rig.drafter.num_nodes, rig.drafter.depth
  reached = 0
  for state, info in record_of(key)[1]:
    draft = jax.tree.map(np.asarray, info.draft)
    length, tokens = np.asarray(state.length), np.asarray(state.tokens)
    rows = np.arange(4)
    assert (draft.tokens[:, 0] == tokens[rows, length - 1]).all()
    assert ((draft.tokens >= 0) & (draft.tokens < V)).all()
    assert (draft.parents[:, 0] == -1).all()
    # Nodes that are only read may lie deeper.
    deepest = draft.depths[draft.acceptable].max(initial=0)
    assert deepest <= K
    reached = max(reached, draft.depths.max())
    assert draft.tokens.shape == (4, N)
    assert rig.drafter.reads == (draft.read is not None)
    if draft.read is not None:
      assert not (draft.read & draft.acceptable).any()
      assert not draft.read[np.asarray(state.done)].any()
    for i in range(1, N):
      parent = draft.parents[:, i]
      assert ((parent >= 0) & (parent < i)).all()
      assert (draft.depths[:, i] == draft.depths[rows, parent] + 1).all()
      seen = draft.visible[rows, parent].copy()
      seen[:, i] = True
      assert (draft.visible[:, i] == seen).all()
      room = np.asarray(state.limit) - length - 1
      usable = draft.acceptable[:, i]
      assert (draft.depths[:, i] <= room)[usable].all()
      assert not usable[np.asarray(state.done)].any()
      if draft.probs is None:
        assert (draft.law[usable, i] == DETERMINISTIC).all()
        continue
      q = draft.probs[rows, parent]
      drawn = usable & (draft.law[:, i] != DETERMINISTIC)
      np.testing.assert_allclose(q[drawn].sum(-1), 1, atol=1e-5)
      once = drawn & (draft.law[:, i] == IID)
      assert (q[rows, draft.tokens[:, i]] > 0)[once].all()
      assert not (drawn & [s.temperature == 0 for s in SETTINGS]).any()
  assert K <= reached


@every
def test_the_cache_holds_all_but_the_last_token(key):
  """Invariant 1, K2, and nothing is NaN or infinite."""
  final, record = record_of(key)
  for state in [*(s for s, _ in record), final]:
    assert (state.target.length == state.length - 1).all()
    assert (state.length <= state.limit).all()
    for leaf in jax.tree.leaves((state.target, state.draft, state.logprobs)):
      assert np.isfinite(leaf).all()


@every
def test_a_done_row_does_not_change(key):
  """Invariant 6: bit for bit, its caches and its drafter's state included."""
  rig, (final, record) = rig_of(key), record_of(key)
  again, info = rig.step(rig.params, final)
  assert fakes.same(again, final)
  assert info.num_tokens.tolist() == info.num_drafted.tolist() == [0] * 4
  done_before = next(s for s, _ in record if s.done.any())
  row = jnp.flatnonzero(done_before.done)[:1]
  assert fakes.same(_take(done_before, row), _take(final, row))


@every
def test_what_lies_past_the_length_influences_nothing(key):
  """Invariant 3, K13: 1e4 in every empty slot and junk tokens, to the bit."""
  rig, (final, _) = rig_of(key), record_of(key)

  @jax.jit
  def spoil(state):
    state = fakes.map_caches(lambda c: fakes.poison(c, 1e4), state)
    past = jnp.arange(SLOTS)[None] >= state.length[:, None]
    return state.replace(tokens=jnp.where(past, 3, state.tokens))

  state = rig.start(PROMPTS, SETTINGS, seeds=SEEDS)
  while not state.done.all():
    state, _ = rig.step(rig.params, spoil(state))
  assert fakes.outputs(state) == fakes.outputs(final)
  assert fakes.same(state.logprobs, final.logprobs)
  assert fakes.same(state.tally, final.tally)


@every
def test_a_rows_text_depends_on_its_seed_alone(key):
  """M6, B1, B6: in another order, among others, and by itself."""
  expected = fakes.outputs(record_of(key)[0])
  order = [2, 0, 3, 1]
  assert run_rows(key, order) == [expected[r] for r in order]
  for row in range(4):
    assert run_rows(key, [row]) == [expected[row]]


def test_a_batch_of_one_gives_what_a_batch_of_three_gives():
  """B1, B8: other array shapes, prompts of 3 and 9 tokens, to the token."""
  settings = [Settings(temperature=t, max_new_tokens=9) for t in (0, 1, 0.8)]
  prompts = [[1, 2, 3], [4, 5, 4] * 3, [6]]
  model, params = fakes.tables(V, period=4)
  rig = cases_lib.rig_of(
    CASES["vanilla-tree_iid"],
    (model, params),
    (model, fakes.noisy(params)),
    slots=SLOTS,
    use=in_use(settings),
  )
  together = rig.texts(prompts, settings, seeds=SEEDS[:3])
  for i in range(3):
    alone = rig.texts([prompts[i]], settings[i], seeds=[SEEDS[i]])
    assert alone == [together[i]]


@every
def test_a_refilled_row_is_as_alone(key):
  """M6, D23: row 1 starts when row 2 of another request is done."""
  rig = rig_of(key)
  expected = fakes.outputs(record_of(key)[0])
  short = list(SETTINGS)
  short[2] = Settings(max_new_tokens=4)
  state = rig.start(PROMPTS, short, seeds=SEEDS)
  while not state.done[2]:
    state, _ = rig.step(rig.params, state)
  order = [1, 0, 2, 3]
  request = rig.request(
    [PROMPTS[r] for r in order],
    [SETTINGS[r] for r in order],
    seeds=[SEEDS[r] for r in order],
  )
  rows = jnp.array([2, 4, 4, 4])  # One prompt for row 2; the rest left out.
  with mock.patch.object(rows_lib, "put_rows", _put):
    refilled = rows_lib.make_refill(rig.init)(rig.params, state, request, rows)
  state = rig.finish(refilled)
  found = fakes.outputs(state)
  assert found[2] == expected[1]
  assert [found[r] for r in (0, 1, 3)] == [expected[r] for r in (0, 1, 3)]


@every
def test_a_continued_state_is_as_a_fresh_one(key):
  """K17, D8: five tokens more, other settings, penalties included."""
  rig, final = rig_of(key), record_of(key)[0]
  text = [p + o for p, o in zip(PROMPTS, fakes.outputs(final), strict=True)]
  longer = [t + [3, 3, 1, 2, 9] for t in text]
  order = [SETTINGS[i] for i in (3, 2, 1, 0)]
  order = [dataclasses.replace(s, max_new_tokens=12) for s in order]
  request = rig.request(longer, order, seeds=[5, 6, 7, 8])
  continued = rig.resume(rig.params, final, request)
  fresh = rig.init(rig.params, request)
  assert fakes.same(continued.counts, fresh.counts)
  assert fakes.outputs(rig.finish(continued)) == fakes.outputs(
    rig.finish(fresh)
  )


@every
def test_init_and_step_return_the_same_types_and_compile_once(key):
  """Invariant 5, J3, J13: shapes, dtypes, weak types; one program for all."""
  rig = rig_of(key)

  request = rig.request(PROMPTS, SETTINGS)
  first = jax.eval_shape(rig.raw_init, rig.params, request)
  after = jax.eval_shape(rig.raw_step, rig.params, first)[0]
  assert jax.tree.structure(first) == jax.tree.structure(after)
  types = lambda x: (x.shape, x.dtype, x.weak_type)
  first, after = map(jax.tree.leaves, (first, after))
  assert list(map(types, first)) == list(map(types, after))
  assert not any(x.weak_type for x in first)
  record_of(key)
  sizes = rig.init._cache_size(), rig.step._cache_size()
  for length in (1, 2, 7, 8, 9, 31):
    prompts = [[1] * length, [2] * (length + 1), [3], [4]]
    numbers = Settings(temperature=length, top_k=length, max_new_tokens=2)
    rig.run(prompts, numbers)
  assert sizes == (rig.init._cache_size(), rig.step._cache_size()) == (1, 1)


@pytest.mark.parametrize("name", drafters.names())
def test_a_fair_coin_stays_fair_and_a_tie_goes_to_the_first(name):
  """L8, L10, S3: logits 1, 3, 3, 0 through top-2, at temperature 1 and 0.

  2,000 seeds, three tokens: 5 standard errors are 112.
  """
  model, _ = fakes.tables(4, period=1)
  logits = jnp.broadcast_to(jnp.array([1.0, 3.0, 3.0, 0.0]), (1, 4, 4))
  coin = (model, {"table": logits})
  warm = Settings(temperature=1, top_k=2, max_new_tokens=3)
  if drafters.takes_heads(name) == "eagle":  # It looks at a decoder's layers.
    model, params = fakes.tiny(4)
    coin = model, {**params, "head": jnp.zeros_like(params["head"])}
    bias = ((0, 1.0), (1, 3.0), (2, 3.0))
    warm = dataclasses.replace(warm, logit_bias=bias)
  settings = [warm] * 2000 + [dataclasses.replace(warm, temperature=0)]
  case = next(case for case in CASES.values() if case.name == name)
  rig = cases_lib.rig_of(case, coin, coin, slots=8, use=in_use(settings))
  state = rig.run([[1, 1]] * 2001, settings)
  found = np.array(fakes.outputs(state))
  assert found.shape == (2001, 3) and set(found.ravel()) == {1, 2}
  assert (np.abs((found[:2000] == 1).sum(0) - 1000) < 112).all()
  assert (found[2000] == 1).all()
  tally = state.tally  # Of siblings one is accepted at most.
  # A corpus says other things; of equals slem takes its own first.
  if name not in ("ngram", "suffix", "slem"):
    assert (tally.accepted_at[2000] == tally.drafted_at[2000]).all()


def test_warped_logprobs_are_those_of_the_sampling_law():
  """M5: of the law by sorting at each position of a random table."""
  setting = {"temperature": 0.7, "top_k": 3}
  settings = [Settings(max_new_tokens=NEW, **setting)] * 2
  model, params = fakes.tables(V, period=2)
  rig = fakes.Rig(
    (model, params),
    "prompt_lookup",
    slots=SLOTS,
    use=in_use(settings),
    logprobs="warped",
  )
  state = rig.run(PROMPTS[:2], settings)
  assert (state.tally.num_accepted > 0).all()
  table, tokens = np.asarray(params["table"]), np.asarray(state.tokens)
  for row, prompt in enumerate(PROMPTS[:2]):
    for p in range(len(prompt), int(state.length[row])):
      logits = table[(p - 1) % 2, tokens[row, p - 1]]
      law = reference.warp(logits, setting)
      expected = pytest.approx(np.log(law[tokens[row, p]]), abs=1e-5)
      assert state.logprobs[row, p] == expected


def test_every_drafter_has_its_joint_law_enumerated():
  """A drafter with a file here has a case in the enumeration."""
  assert {kind for kind, _ in laws.DRAFTERS.values()} == {*drafters.names()}


@pytest.mark.parametrize(
  ("name", "options", "words"),
  [
    ("beam", {}, "unknown drafter 'beam'; there are best_first"),
    ("none", {"depth": 3}, "no option 'depth'; it has none"),
    ("prompt_lookup", {"ngram": 3}, "no option 'ngram'; it has num_draft"),
  ],
)
def test_an_unknown_drafter_or_option_is_refused(name, options, words):
  """The message lists what there is."""
  model, _ = fakes.tables()
  with pytest.raises(ValueError, match=words):
    drafters.build(name, model, None, slots=8, **options)
