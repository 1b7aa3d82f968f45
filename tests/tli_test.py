"""Token-level intersection: its law, what the draft reads, its limits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import draft_stream, drafters
from spec_jax.drafters import tli
from spec_jax.models import table
from spec_jax.settings import Settings, in_use
from spec_jax.vocabulary_map import VocabularyMap
from tests import fakes, laws, reference, two_vocabularies
from tests.enumeration import midpoints

V, SLOTS, K = 13, 128, 3
ROOMY = Settings(max_new_tokens=60)
WARM = Settings(temperature=1, max_new_tokens=60)
PROMPTS = [[5], [1, 2, 3, 1, 2], [4] * 11, [7, 3, 0]]

# --- the law ---------------------------------------------------------------


def test_a_draft_that_is_a_transformer_leaves_the_law_as_it_is(monkeypatch):
  """In a chain, with penalties, which look at the target's ids."""

  def pair():
    model, params, next_logits = laws.transformer_pair()
    draft, weights = two_vocabularies.transformer_draft(model.config, 32)
    return model, {**params, "draft": weights}, next_logits, draft

  monkeypatch.setitem(laws.MODELS, "two_transformers", pair)
  found = laws.distances("two_transformers", "tli", ["penalties"])
  assert found["penalties"] < 1e-5


def _mass_not_given_back(monkeypatch):
  """The draft's law on the shared tokens is not renormalised."""
  real = tli.law
  monkeypatch.setattr(tli, "law", lambda rest, s: 0.6 * real(rest, s))


def _draft_ids_as_ours(monkeypatch):
  """The law that is verified is over the draft's ids."""
  real = tli.Draft
  order = np.maximum(two_vocabularies.WORDS.draft_ids, 0) % laws.V

  def unmapped(**fields):
    return real(**{**fields, "probs": fields["probs"][:, :, order]})

  monkeypatch.setattr(tli, "Draft", unmapped)


@pytest.mark.parametrize("plant", [_mass_not_given_back, _draft_ids_as_ours])
def test_a_planted_fault_of_the_intersection_is_seen(plant, monkeypatch):
  plant(monkeypatch)
  assert laws.distances("two_tables", "tli", ["t0.7"])["t0.7"] > 1e-3


def test_acceptance_is_the_overlap_with_the_restricted_law():
  """Sum over shared tokens of min(p, q'), q' by hand; banned tokens too."""
  model, params = fakes.tables(3, period=2)
  draft, weights = two_vocabularies.table_draft()
  words = two_vocabularies.WORDS
  settings = [
    Settings(temperature=0.7, max_new_tokens=5),
    Settings(temperature=1, banned_tokens=(2,), max_new_tokens=5),
  ]
  rig = fakes.Rig(
    (model, params),
    "tli",
    draft=(draft, weights),
    options={"num_draft": 1, "vocabulary_map": words},
    slots=16,
    use=in_use(settings),
    trace=True,
  )
  # Draft streams of "1 0" and "2 1 2": 0 2 3 and 1 0 2 1.
  state = rig.start([[1, 0], [2, 1, 2]], settings)
  ours, theirs = np.asarray(params["table"]), np.asarray(weights["table"])
  laws = [(ours[1, 0], theirs[2 % 2, 3]), (ours[0, 2], theirs[3 % 2, 1])]
  chances = []
  for row, (p, q) in enumerate(laws):
    q = np.where(words.draft_ids >= 0, q[words.draft_ids], -np.inf)
    p = p.astype(np.float64)
    if row == 1:
      p[2] = q[2] = -np.inf
    setting = {"temperature": [0.7, 1.0][row]}
    p, q = reference.warp(p, setting), reference.warp(q, setting)
    chance = 0.0
    for token in np.flatnonzero(q > 0):
      u = np.full((2, 2), midpoints(q[None])[0, token], np.float32)
      _, info = rig.step(
        rig.params, state, fakes.noise(rig.drafter, 2, draft=u)
      )
      assert info.draft.tokens[row, 1] == token
      np.testing.assert_allclose(info.draft.probs[row, 0], q, atol=1e-6)
      chance += q[token] * info.verdict.accept_prob[row, 1]
    assert chance == pytest.approx(np.minimum(p, q).sum(), abs=1e-5)
    chances.append(chance)
  assert 0 < chances[0] < 1


def test_nothing_is_proposed_where_every_shared_token_is_banned():
  """Greedy and sampled; the text is plain decoding's, and finite."""
  settings = [
    Settings(temperature=t, banned_tokens=(0, 2), max_new_tokens=6)
    for t in (0.0, 1.0)
  ] + [Settings(max_new_tokens=6)]
  rig = fakes.Rig(
    fakes.tables(3),
    "tli",
    draft=two_vocabularies.table_draft(),
    options={"vocabulary_map": two_vocabularies.WORDS},
    slots=16,
    use=in_use(settings),
  )
  state = rig.run([[1], [1], [1]], settings)
  assert fakes.outputs(state)[:2] == [[1] * 6] * 2
  drafted = state.tally.num_drafted.tolist()
  assert drafted[:2] == [0, 0] and drafted[2] > 0


# --- what the draft reads --------------------------------------------------


def renamed(params, ids):
  """Returns a decoder's parameters whose token `ids[i]` is what `i` was."""
  embed, head = np.array(params["embed"]), np.array(params["head"])
  embed[ids], head[:, ids] = embed.copy(), head.copy()
  return {**params, "embed": jnp.asarray(embed), "head": jnp.asarray(head)}


@pytest.mark.parametrize("shift", [0, 4])
def test_the_target_in_other_ids_is_always_accepted(shift):
  """K1, D14: greedy and sampled, ids the same or all renamed."""
  model, params = fakes.tiny(V)
  ids = (np.arange(V) + shift) % V
  words = VocabularyMap(ids, ids[:, None], np.ones(V))
  rig = fakes.Rig(
    (model, params),
    "tli",
    draft=(model, renamed(params, ids)),
    options={"num_draft": K, "vocabulary_map": words},
    slots=SLOTS,
    use=in_use([WARM]),
  )
  state = rig.start(PROMPTS, [ROOMY, WARM, WARM, ROOMY], seeds=[1, 2, 3, 4])
  steps = 0
  while not state.done.all():
    state, info = rig.step(rig.params, state)
    assert info.num_accepted.tolist() == info.num_drafted.tolist()
    steps += 1
  assert steps == 15 and state.tally.num_drafted.tolist() == [45] * 4


# Token 0 is said by 11 draft tokens, more than a chunk; 3 and 4 by two each;
# nine draft ids stand for target ids in another order.
PIECES = [[9, 3, 9, 5, 1, 2, 3, 4, 9, 8, 7], [2], [1], [6, 0], [0, 9]]
PIECES += [[(5 * i) % V] for i in range(5, V)]
IDS = [p[0] if len(p) == 1 else -1 for p in PIECES]
LONG = two_vocabularies.letters_map(IDS, PIECES)


@functools.cache
def long_rig(draft_slots=0, max_length=256):
  """Streams about twice as long as their text; targets that say 0 often."""
  model, params = fakes.tiny(V)
  params = {**params, "head": params["head"].at[:, 0].add(0.3)}
  draft, weights = fakes.tiny(V, windows=(3, None), max_length=max_length)
  weights = renamed(fakes.noisy(weights), np.array(IDS) % V)
  return fakes.Rig(
    (model, params),
    "tli",
    draft=(draft, weights),
    options={
      "num_draft": K,
      "vocabulary_map": LONG,
      "draft_slots": draft_slots,
    },
    slots=SLOTS,
    use=frozenset(),
  )


@functools.cache
def plain_texts():
  """What the target of `long_rig` says by itself."""
  rig = long_rig()
  target = rig.model, rig.params["target"]
  return fakes.Rig(target, "none", slots=SLOTS, use=frozenset()).texts(
    PROMPTS, ROOMY
  )


@jax.jit
def _draft_logits(tokens):
  rig = long_rig()
  positions = jnp.arange(256)[None]
  out = rig.draft_model.apply(
    rig.params["draft"], tokens[None], positions, None, None, None
  )
  return out.logits[0]


def _said(text):
  return [j for i in text for j in PIECES[i]]


def replay(prompt, text):
  """Counts in plain Python: (steps, drafted, accepted) of a greedy row."""
  whole = [*prompt, *text]
  length, steps, drafted, accepted = len(prompt), 0, 0, 0
  while length < len(whole):
    context, guess = _said(whole[:length]), []
    for _ in range(min(K, len(whole) - length - 1)):
      padded = np.zeros(256, np.int32)
      padded[: len(context)] = context
      logits = np.asarray(_draft_logits(padded))[len(context) - 1]
      ours = np.where(np.array(IDS) >= 0, logits[IDS], -np.inf)
      guess.append(int(ours.argmax()))
      context.append(IDS[guess[-1]])
    right = [g == t for g, t in zip(guess, whole[length:], strict=False)]
    good = right.index(False) if False in right else len(right)
    steps, drafted, accepted = steps + 1, drafted + len(guess), accepted + good
    length += good + 1
  return steps, drafted, accepted


def test_the_draft_reads_the_text_in_its_own_tokens():
  """V1: steps and acceptances of a replay from scratch, rows of all lengths.

  Words of 11 pieces are read in two passes.
  """
  rig = long_rig()
  state = rig.run(PROMPTS, ROOMY)
  texts = fakes.outputs(state)
  assert texts == plain_texts()
  assert sum(text.count(0) for text in texts) > 3
  tally = state.tally
  counts = [tally.num_steps, tally.num_drafted, tally.num_accepted]
  found = np.array(counts).T.tolist()
  expected = [replay(p, t) for p, t in zip(PROMPTS, texts, strict=True)]
  assert found == list(map(list, expected))
  assert tally.num_accepted.sum() > 3
  # Its cache holds part of the stream, and never of the last token.
  for row in range(4):
    whole = [*PROMPTS[row], *texts[row]]
    assert 0 < state.draft.length[row] <= len(_said(whole[:-1]))


def test_a_long_pause_is_caught_up():
  """Row 0 is asked for nothing for 20 steps, then drafts as it would have."""
  rig = long_rig()
  state = rig.start(PROMPTS, ROOMY)
  hold = lambda s, d: s.replace(policy=s.policy.at[0].set(d))
  while state.length[0] < 21:
    state, info = rig.step(rig.params, hold(state, 0))
    assert info.num_drafted[0] == 0
  assert state.draft.length[0] == 0
  text = plain_texts()[0]
  _, drafted, accepted = replay([5, *text[:20]], text[20:])
  state = rig.finish(hold(state, K))
  assert fakes.outputs(state) == plain_texts()
  assert state.tally.num_drafted[0] == drafted
  assert state.tally.num_accepted[0] == accepted


@pytest.mark.parametrize("limits", [(40, 256), (0, 40)])
def test_a_draft_without_room_stops_and_the_text_goes_on(limits):
  """D7: by its slots or its context; a prompt too long for it is not read."""
  rig = long_rig(*limits)
  prompts = [*PROMPTS[:3], [0, 0, 0, 0, 1]]
  state = rig.start(prompts, ROOMY)
  last = np.zeros(4, int)
  while not state.done.all():
    before = np.asarray(state.length)
    state, info = rig.step(rig.params, state)
    last = np.where(np.asarray(info.num_drafted) > 0, before, last)
    assert (state.draft.length <= 40).all()
  texts = fakes.outputs(state)
  assert texts[:3] == plain_texts()[:3]
  assert state.draft.length[3] == state.tally.num_drafted[3] == 0
  for row in range(3):
    whole = [*prompts[row], *texts[row]]
    fits = len(_said(whole[: last[row]])) + 1 <= 40
    assert last[row] > 0 and fits
    assert len(_said(whole)) > 40  # else the test says nothing


# --- settings --------------------------------------------------------------


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"num_draft": 0}, "num_draft must be at least 1, got 0"),
    ({"draft_slots": 300}, r"draft_slots must be in \[0, 256\], the draft's"),
    ({"draft_slots": -1}, "got -1"),
    ({"vocabulary_map": two_vocabularies.WORDS}, "is for 3 target and more"),
    (
      {"vocabulary_map": VocabularyMap([-1] * V, [[0]] * V, [1] * V)},
      "share no token",
    ),
  ],
)
@pytest.mark.parametrize("name", ["tli", "slem"])
def test_settings_out_of_range_are_refused(name, options, message):
  model, _ = fakes.tiny(V)
  with pytest.raises(ValueError, match=message):
    drafters.build(name, model, model, slots=SLOTS, **options)
  with pytest.raises(ValueError, match=f"drafter '{name}' needs a draft model"):
    drafters.build(name, model, None, slots=SLOTS)


def test_a_drafter_of_one_vocabulary_takes_no_map():
  model = table.build(table.TableConfig(3))
  words = two_vocabularies.WORDS
  with pytest.raises(ValueError, match="'vanilla' takes no vocabulary map"):
    drafters.build("vanilla", model, model, slots=8, vocabulary_map=words)


def test_a_stream_is_laid_out_as_its_docstring_says():
  """Pieces of 1, 3 and 2: position 3 holds the last of the second token."""
  model = table.build(table.TableConfig(3))
  words = VocabularyMap(
    [-1, -1, 2], [[1, 0, 0], [0, 1, 2], [2, 0, 0]], [1, 3, 2]
  )
  stream = draft_stream.DraftStream(
    "tli", model, model, words, depth=1, slots=8, draft_slots=0
  )
  params = {"tables": jax.tree.map(jnp.asarray, stream.tables)}
  length, at = stream.stream(
    params, jnp.array([[0, 1, 2, 1], [2, 2, 2, 2]]), jnp.array([3, 1])
  )
  assert length.tolist() == [6, 2]
  places = jnp.broadcast_to(jnp.arange(6)[None], (2, 6))
  found = at(places)
  assert found[0].tolist() == [1, 0, 1, 2, 2, 0]
  assert found[1, :2].tolist() == [2, 0]
