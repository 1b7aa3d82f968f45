"""A draft model's chain with a drafter of its own: same law, fewer passes."""

import jax
import numpy as np

from spec_jax import drafters, length, step as step_lib
from spec_jax.settings import Settings, in_use
from tests import fakes
from tests.combining_test import NEW, PROMPTS, SLOTS, V, counting, run

WARM = [
  Settings(max_new_tokens=NEW),
  Settings(temperature=0.6, max_new_tokens=NEW),
  Settings(temperature=1, top_k=4, max_new_tokens=NEW),
  Settings(
    temperature=0.7,
    repetition_penalty=1.2,
    frequency_penalty=0.1,
    max_new_tokens=NEW,
  ),
]


def ahead_before_the_end(alone, cascade):
  """Tells whether the caches' lengths differ while all rows ask for all."""
  return any(
    (a.draft.acceptable[:, 1:].all() and (x.length != y.length).any())
    for (a, x), (_, y) in zip(alone, cascade, strict=True)
  )


def test_a_cascade_is_the_drafts_own_chain_in_fewer_passes():
  """Token for token, law for law, and the caches, in every step of a decode."""
  model, params = fakes.tiny(V, windows=(None, 3))
  noisy = fakes.noisy(params)
  own = {"num_draft": 4, "draft_temperature": 0.9}
  found = {}
  for name, options in (
    ("vanilla", own),
    ("cascade", {**own, "inner": "prompt_lookup(num_draft=2)"}),
  ):
    counted, calls = counting(model)
    rig = fakes.Rig(
      (model, params),
      name,
      draft=(counted, noisy),
      options=options,
      slots=SLOTS,
      use=in_use(WARM),
      trace=True,
    )
    state = rig.start(PROMPTS, WARM, seeds=[3, 4, 5, 6])
    jax.effects_barrier()
    calls.clear()
    record = []
    while not state.done.all():
      state, info = rig.step(rig.params, state)
      cache = state.draft if name == "vanilla" else state.draft["model"]
      record.append((info, cache))
    jax.effects_barrier()
    found[name] = record, list(calls), fakes.outputs(state)
  alone, passes, texts = found["vanilla"]
  cascade, fewer, same = found["cascade"]
  assert same == texts
  for (a, cache_a), (b, cache_b) in zip(alone, cascade, strict=True):
    usable = np.asarray(a.draft.acceptable)
    assert (b.draft.acceptable == usable).all()
    assert (a.draft.law == b.draft.law).all()
    assert (a.draft.tokens == b.draft.tokens)[usable].all()
    q, r = (np.asarray(x.draft.probs)[:, :-1][usable[:, 1:]] for x in (a, b))
    np.testing.assert_allclose(q, r, atol=1e-5)
    assert (a.num_tokens == b.num_tokens).all()
    # A row that asks for less than others: the chain reads its last token.
    ahead = np.asarray(cache_a.length - cache_b.length)
    assert ((ahead == 0) | (ahead == 1)).all()
    pairs = map(fakes.held, (cache_a, cache_b))
    for one, two in zip(*pairs, strict=True):
      for at in one.keys() & two.keys():
        np.testing.assert_allclose(one[at], two[at], atol=1e-4)
  assert not ahead_before_the_end(alone, cascade)
  assert len(fewer) < len(passes)


def test_a_draft_that_copies_itself_takes_one_pass_a_step():
  """A text in a circle: four tokens from one pass of four nodes, not four."""
  model, params = fakes.scripted([1, 2, 3], V)
  own, calls = counting(model)
  prompts = [[1, 2, 3, 1, 2]]
  options = {"inner": "prompt_lookup(num_draft=3)", "num_draft": 4}
  _, record = run("cascade", options, (model, params), (own, params), prompts)
  jax.effects_barrier()
  assert record[0] == ([4], [5])
  # Of the copies the first step has three: 3, 1, 2; from then on as many.
  steps = len(record)
  assert calls[0] == 8 and calls.count(2 + 3) == steps
  assert len(calls) <= 2 * steps


def test_the_policy_ends_a_cascades_chain_as_it_ends_a_draft_models():
  """`extend` sees the same laws."""
  model, params = fakes.tables(V, period=3)
  noisy = fakes.noisy(params)
  found = []
  for name in ("vanilla", "cascade"):
    drafter = drafters.build(name, model, model, slots=SLOTS, num_draft=4)
    rig = fakes.Rig((model, params), drafter, draft=(model, noisy), slots=SLOTS)
    state = rig.start(PROMPTS, WARM)
    found.append(_extended(rig, state))
  assert (found[0] == found[1]).all()
  assert found[0].any() and not found[0].all()


def _extended(rig, state):
  """Returns what is acceptable if a node needs a law above .5 before it."""
  policy = length.confidence(4, threshold=0.5)
  step = fakes.jit(
    step_lib.make_step(rig.model, rig.drafter, policy, trace=True)
  )
  _, info = step(rig.params, state)
  return np.asarray(info.draft.acceptable)
