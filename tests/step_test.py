"""One step: stops, limits, positions and counts, on scripted models."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import step as steps, tree as trees
from spec_jax.base import LENGTH, STOP_ID, STOP_STRING
from spec_jax.drafters import names
from spec_jax.metrics import Counts
from spec_jax.settings import Settings, in_use
from spec_jax.stops import build_automaton
from tests import fakes

V, K, SLOTS = 16, 4, 32
TEXT = list(range(V))  # The model says token p at position p.


@functools.cache
def rig_of(drafts, strings=()):
  """A scripted model with drafts of its own text, or without.

  With stop strings it records log-probabilities, too.
  """
  return fakes.Rig(
    fakes.scripted(TEXT, V),
    fakes.scripted_drafter(trees.chain(K)) if drafts else "none",
    slots=SLOTS,
    use=frozenset({"min_new_tokens"}) if strings else fakes.GREEDY,
    logprobs="raw" if strings else None,
    stops=build_automaton(strings, PIECES) if strings else None,
  )


def set_text(rig, text, rows, wrong=()):
  """Makes the rig say `text`; `wrong`: (row, position) drafted wrongly."""
  target = fakes.scripted(text, V)[1]
  script = np.stack([fakes.oracle(text, K, SLOTS)] * rows)
  for row, position in wrong:
    for d in range(1, K + 1):
      if position - d + 1 > 0:
        script[row, position - d + 1, d] = (text[position % V] + 1) % V
  rig.params = rig.params | {"target": target, "draft": jnp.asarray(script)}
  return rig


def decode(text, settings, *, prompts=None, **kwargs):
  """Runs with drafts and plainly; asserts equal results; returns the former."""
  prompts = prompts or [[text[0]]] * len(settings)
  found = []
  for drafts in (True, False):
    rig = set_text(rig_of(drafts), text, len(settings), **kwargs)
    found.append(rig.run(prompts, settings))
    kwargs = {}
  speculative, plain = found
  assert fakes.outputs(speculative) == fakes.outputs(plain)
  reasons = speculative.finish_reason.tolist()
  assert reasons == plain.finish_reason.tolist()
  # T8: what is counted is what is there.
  emitted = (speculative.length - speculative.prompt_length).tolist()
  assert emitted == [len(x) for x in fakes.outputs(speculative)]
  return fakes.outputs(speculative), reasons, speculative


# --- stops and limits ------------------------------------------------------


def test_a_stop_id_ends_the_text_wherever_it_lies_in_a_block():
  """T1, T2, T8: first to eleventh token, twice a bonus token, and none."""
  settings = [Settings(stop_ids=(i,), max_new_tokens=12) for i in range(1, 12)]
  settings.append(Settings(max_new_tokens=12))
  found, reasons, _ = decode(TEXT, settings)
  assert found == [TEXT[1 : i + 1] for i in range(1, 12)] + [TEXT[1:13]]
  assert reasons == [STOP_ID] * 11 + [LENGTH]


def test_a_stop_within_the_limit_wins_and_one_past_it_does_not_count():
  """T6: block 3, stop, 8, 9 with 3, 1 and 2 tokens left."""
  text = [0, 3, 7, 8, 9, 1, *TEXT[6:]]
  settings = [
    Settings(stop_ids=(7, 12), max_new_tokens=n) for n in (3, 1, 2)
  ] + [Settings(max_new_tokens=5)] * 9
  found, reasons, state = decode(text, settings)
  assert found[:3] == [[3, 7], [3], [3, 7]]
  assert reasons[:3] == [STOP_ID, LENGTH, STOP_ID]
  # Accepted: 3 and the stop, though the stop was the last allowed token.
  assert state.tally.num_accepted[:3].tolist() == [2, 0, 1]


PIECES = [b"", b"ab", b"c", b"d", b"e", b"x", b"yz", b"w"] + [b"."] * 8


def test_stop_strings_are_found_inside_and_across_blocks():
  """T4, T5: ids and logprobs are kept up to the token that completes one."""
  strings = ("bc", "de", "xy", "abcdexyz")
  rows = [
    (0b0001, 0, [1, 2]),
    (0b0011, 0, [1, 2]),  # Two in one block: the first counts.
    (0b0010, 0, [1, 2, 3, 4]),
    (0b0100, 0, [1, 2, 3, 4, 5, 6]),  # Begins in the last token of a block.
    (0b1000, 0, [1, 2, 3, 4, 5, 6]),  # Longer than a block.
    (0b0000, 0, TEXT[1:11]),
    (0b0011, 3, [1, 2, 3, 4]),  # The first comes before the minimum.
  ]
  settings = [
    Settings(max_new_tokens=10, min_new_tokens=first) for _, first, _ in rows
  ]
  for drafts in (True, False):
    rig = set_text(rig_of(drafts, strings), TEXT, len(rows))
    state = rig.run([[0]] * len(rows), settings, patterns=[r[0] for r in rows])
    assert fakes.outputs(state) == [r[2] for r in rows]
    reasons = [LENGTH if r[0] == 0 else STOP_STRING for r in rows]
    assert state.finish_reason.tolist() == reasons
    recorded = (state.logprobs != 0).sum(1).tolist()
    assert recorded == [len(r[2]) for r in rows]


def test_drafting_stops_before_the_limit():
  """T9, S9, D8: with n tokens left, min(K, n - 1) are drafted."""
  news = list(range(1, 13))
  rig = set_text(rig_of(True), TEXT, len(news))
  state = rig.start([[0]] * 12, [Settings(max_new_tokens=n) for n in news])
  while not state.done.all():
    left = np.asarray(state.limit - state.length)
    expected = np.clip(left - 1, 0, K)
    state, info = rig.step(rig.params, state)
    assert info.num_drafted.tolist() == expected.tolist()
    assert info.num_tokens.tolist() == np.minimum(left, K + 1).tolist()
  assert fakes.outputs(state) == [TEXT[1 : n + 1] for n in news]
  # With 1, 3 and 7 tokens: none; two deep; four deep, then one.
  at = state.tally.drafted_at[jnp.array([0, 2, 6])]
  assert at.tolist() == [[0, 0, 0, 0], [1, 1, 0, 0], [2, 1, 1, 1]]


def test_a_prompt_that_fills_its_limit_is_done_at_once():
  """T9: zero slots left, no step is taken."""
  rig = set_text(rig_of(False), TEXT, 2)
  state = rig.start([TEXT * 2, [0]], Settings(max_new_tokens=1))
  assert state.done.tolist() == [True, False]
  assert state.finish_reason.tolist() == [LENGTH, 0]
  final = rig.finish(state)
  assert final.tally.num_steps.tolist() == [0, 1]
  assert fakes.outputs(final) == [[], [1]]


def test_the_tally_of_steps_that_accept_two_none_and_four():
  """M1: acceptance .50, accepted 2.0 and emitted 3.0 a step, by depth."""
  settings = [Settings(max_new_tokens=10)] * 12
  # Tokens 1 2 (3), (4), 5 6 7 8 (9), then one alone: room for none.
  rig = set_text(rig_of(True), TEXT, 12, wrong=[(0, 3), (0, 4)])
  state = rig.start([[0]] * 12, settings)
  for _ in range(3):
    state, _ = rig.step(rig.params, state)
  row = jax.tree.map(lambda x: np.asarray(x)[0].tolist(), state.tally)
  assert (row.num_steps, row.num_drafted, row.num_accepted) == (3, 12, 6)
  assert row.accepted_at == [2, 2, 1, 1]
  assert row.drafted_at == [3, 2, 2, 1]
  counts = Counts(9, 3, 12, 6, tuple(row.drafted_at), tuple(row.accepted_at))
  assert int(state.length[0] - state.prompt_length[0]) == counts.emitted
  assert fakes.outputs(state)[0] == TEXT[1:10]


def test_rows_keep_their_own_pace():
  """B1, B7: rows that accept 0, 2 and 4 a step take the steps they need."""
  every = [(0, p) for p in range(1, 32)]
  third = [(1, p) for p in range(3, 32, 3)]
  settings = [Settings(max_new_tokens=15)] * 12
  found, _, state = decode(TEXT, settings, wrong=every + third)
  assert found == [TEXT[1:16]] * 12
  assert state.tally.num_steps[:3].tolist() == [15, 5, 3]
  assert state.tally.num_accepted[:3].tolist() == [0, 10, 12]


@functools.cache
def small_rig():
  """A decoder with a ring, a scripted chain, and room for 16 tokens."""
  drafter = fakes.scripted_drafter(trees.chain(K))
  return fakes.Rig(fakes.tiny(V), drafter, slots=16, use=fakes.GREEDY)


def test_what_was_refused_leaves_no_trace():
  """B7: other refused ids, and junk past the text, give the same text."""
  rig, found = small_rig(), []
  prompts = [[1, 2, 3], [4]]
  for drafts, junk in ((-1, 0), (3, 3), (11, 7)):
    rig.params["draft"] = jnp.full((2, 16, K + 1), drafts)
    state = rig.run(prompts, Settings(max_new_tokens=12), junk=junk)
    found.append(fakes.outputs(state))
  assert found[0] == found[1] == found[2]


def test_the_last_slots_are_used_without_touching_the_others():
  """K9: capacity 16, 14 tokens committed, blocks of 5."""
  rig = small_rig()
  rig.params["draft"] = jnp.full((2, 16, K + 1), 5)
  before = rig.start([TEXT[:14], [3]], Settings(max_new_tokens=40))
  assert before.limit.tolist() == [16, 16]
  after = rig.finish(before)
  assert after.length.tolist() == [16, 16]
  assert after.target.length.tolist() == [15, 15]
  assert after.finish_reason.tolist() == [LENGTH] * 2
  old, new = fakes.held(before.target)[0], fakes.held(after.target)[0]
  assert {at for at in old if at[0] == 0} <= set(new)  # The global layer's.
  for at in set(old) & set(new):
    assert fakes.same([*old[at]], [*new[at]])


def test_positions_go_on_from_the_cache_and_siblings_share_one():
  """K10, R3: a prompt of one token, a tree of two branches."""
  model, params = fakes.scripted(TEXT, V)
  seen = []

  def apply(params, tokens, positions, *args, **kwargs):
    jax.debug.callback(lambda x: seen.append(np.asarray(x)), positions)
    return model.apply(params, tokens, positions, *args, **kwargs)

  tree = trees.from_parents([-1, 0, 0, 1, 2])
  rig = fakes.Rig(
    (model._replace(apply=apply), params),
    fakes.scripted_drafter(tree),
    slots=SLOTS,
    use=fakes.GREEDY,
  )
  rig.params["draft"] = jnp.full((2, SLOTS, 5), 1)
  state = rig.start([[0], [0, 1, 2]], Settings(max_new_tokens=9))
  expected = []
  for _ in range(3):
    held = np.asarray(state.target.length)
    expected.append(held[:, None] + np.array([0, 1, 1, 2, 2]))
    assert held.tolist() == (state.length - 1).tolist()
    state, _ = rig.step(rig.params, state)
  jax.effects_barrier()
  assert fakes.same(seen[-3:], expected)
  assert expected[0].tolist() == [[0, 1, 1, 2, 2], [2, 3, 3, 4, 4]]


# --- penalties inside a step -----------------------------------------------


def test_laws_along_a_path_count_the_tokens_before_them():
  """S1, S4: penalties on logits of 2 for 3 and 5; prompts 5 and 3."""
  settings = [
    Settings(temperature=1, repetition_penalty=2.0, max_new_tokens=9),
    Settings(temperature=1, frequency_penalty=0.5, max_new_tokens=9),
  ]
  size = 6
  table = np.zeros((1, size, size), np.float32)
  table[:, :, [3, 5]] = 2.0
  model, _ = fakes.tables(size, period=1)
  rig = fakes.Rig(
    (model, {"table": jnp.asarray(table)}),
    fakes.scripted_drafter(trees.chain(2)),
    slots=SLOTS,
    use=in_use(settings),
    trace=True,
  )
  rig.params["draft"] = jnp.full((2, SLOTS, 3), 3)
  state = rig.start([[5], [3]], settings)
  # .5 and .4 lie in the cells of token 3, .999 in those of token 5.
  noise = fakes.noise(rig.drafter, 2, plain=[0.5, 0.4, 0.999])
  after, info = rig.step(rig.params, state, noise)
  assert fakes.outputs(after) == [[3, 3, 5]] * 2
  laws = np.asarray(info.laws)
  # The prompt counts for the repetition penalty alone.
  five = np.log(laws[:, :, 5] / laws[:, :, 0])
  np.testing.assert_allclose(five, [[1, 1, 1], [2, 2, 2]], rtol=1e-5)
  logits = np.log(laws[:, :, 3] / laws[:, :, 0])
  np.testing.assert_allclose(logits, [[2, 1, 1], [2, 1.5, 1]], rtol=1e-5)
  _, info = rig.step(rig.params, after)
  logits = np.log(np.asarray(info.laws[1, 0]) / info.laws[1, 0, 0])
  np.testing.assert_allclose(logits, [0, 0, 0, 1, 0, 1.5], atol=1e-5)


# --- the loop and the state ------------------------------------------------


def test_the_loop_stops_at_its_steps_or_when_enough_rows_are_done():
  """Rows of 3, 9 and 14 tokens, 5 a step; steps are counted."""
  rig = set_text(rig_of(True), TEXT, 12)
  news = [3, 9, 14] + [14] * 9
  state = rig.start([[0]] * 12, [Settings(max_new_tokens=n) for n in news])
  decode = jax.jit(functools.partial(steps.decode, rig.raw_step))
  for limit, until, taken, lengths in (
    (99, 1, 1, [4, 6, 6]),
    (99, 2, 2, [4, 10, 11]),
    (2, 12, 2, [4, 10, 11]),
    (99, 12, 3, [4, 10, 15]),
    (0, 12, 0, [1, 1, 1]),
  ):
    counts = jnp.int32(limit), jnp.int32(until)
    after, number = decode(rig.params, state, *counts)
    assert int(number) == taken
    assert after.length[:3].tolist() == lengths
  assert decode._cache_size() == 1


def test_a_donated_state_is_used_up_without_a_warning():
  """J4: every buffer is taken over; a second use of the state is an error."""
  rig = small_rig()
  rig.params["draft"] = jnp.full((2, 16, K + 1), 5)
  expected = rig.texts([[1, 2], [3]], Settings(max_new_tokens=9))
  state = rig.start([[1, 2], [3]], Settings(max_new_tokens=9))
  # A buffer that two leaves share cannot be given away twice.
  state = jax.tree.map(lambda x: x.copy(), state)
  decode = jax.jit(
    functools.partial(steps.decode, rig.raw_step), donate_argnums=1
  )
  counts = jnp.int32(99), jnp.int32(2)
  after, _ = decode(rig.params, state, *counts)
  assert fakes.outputs(after) == expected
  assert all(x.is_deleted() for x in jax.tree.leaves(state.target))
  with pytest.raises((RuntimeError, ValueError), match=r"deleted|donated"):
    decode(rig.params, state, *counts)


def test_a_drafter_is_told_what_was_kept():
  """Invariant 7: paths and counts are cut by the stop and by the limit."""
  drafter = fakes.scripted_drafter(trees.chain(K))
  drafter = drafter._replace(
    init=lambda batch: jnp.full((batch, K + 3), -7),
    update=lambda params, state, draft, verdict, output: jnp.concatenate(
      [
        verdict.path,
        verdict.num_tokens[:, None],
        verdict.num_accepted[:, None],
      ],
      1,
    ),
  )
  rig = fakes.Rig(
    fakes.scripted(TEXT, V), drafter, slots=SLOTS, use=fakes.GREEDY
  )
  set_text(rig, TEXT, 4)
  settings = [
    Settings(max_new_tokens=20),
    Settings(max_new_tokens=20, stop_ids=(2,)),
    Settings(max_new_tokens=3),
    Settings(max_new_tokens=1),
  ]
  state, _ = rig.step(rig.params, rig.start([[0]] * 4, settings))
  assert state.draft.tolist() == [
    [0, 1, 2, 3, 4, 5, 4],
    [0, 1, -1, -1, -1, 2, 2],
    [0, 1, 2, -1, -1, 3, 2],
    [0, -1, -1, -1, -1, 1, 0],
  ]
  state, _ = rig.step(rig.params, state)
  assert state.draft[1].tolist() == [-1] * 5 + [0, 0]  # A done row.


def test_an_unknown_kind_of_logprobs_is_refused():
  """The message holds what was given."""
  with pytest.raises(ValueError, match="'cooked'"):
    fakes.Rig(fakes.tables(), logprobs="cooked")


def test_there_are_drafters_to_test():
  """The contract tests find plain decoding and others by their files."""
  assert "none" in names() and len(names()) > 2
