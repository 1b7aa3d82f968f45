"""A draft that fell behind: what it reads, when, and at what cost."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import cache as cache_lib, step as step_lib
from spec_jax.settings import Settings
from tests import fakes

V, SLOTS = 13, 64
PROMPTS = [[4, 1, 2, 6, 3, 1, 9, 8, 7, 1, 2], [5, 6], [1], [2]]
ROOMY = Settings(max_new_tokens=30)


@functools.cache
def counting_rig():
  """The target as its own draft, and a list of the draft's passes."""
  model, params = fakes.tiny(V)
  calls = []

  def apply(*args, **kwargs):
    size = args[1].shape[1]
    jax.debug.callback(lambda: calls.append(size))
    return model.apply(*args, **kwargs)

  rig = fakes.Rig(
    (model, params),
    "vanilla",
    draft=(model._replace(apply=apply), params),
    options={"num_draft": 3},
    slots=SLOTS,
    use=fakes.GREEDY,
  )
  return rig, calls


def passes(rig, calls, state):
  """Steps; returns the state, what was drafted and the passes' tokens."""
  jax.effects_barrier()
  calls.clear()
  state, info = rig.step(rig.params, state)
  jax.effects_barrier()
  return state, info, list(calls)


@pytest.mark.parametrize(
  ("held", "chunks"), [(0, 2), (1, 1), (8, 1), (9, 0), (10, 0)]
)
def test_a_draft_that_fell_behind_drafts_in_the_same_step(held, chunks):
  """Of 11 tokens it holds so many: chunks of 8, then it drafts as ever.

  What it then holds is what a fresh reading holds, and the draft, which is
  the target, is accepted.
  """
  rig, calls = counting_rig()
  before = rig.start(PROMPTS, ROOMY)
  length = before.draft.length.at[0].set(held)
  state = before.replace(draft=before.draft.replace(length=length))
  state = state.replace(  # What it does not hold is not there.
    draft=fakes.poison(state.draft, 1e4)
  )
  state, info, sizes = passes(rig, calls, state)
  assert sizes == [8] * chunks + [2, 1, 1]
  assert info.num_drafted.tolist() == info.num_accepted.tolist() == [3] * 4
  usual, _ = rig.step(rig.params, before)
  assert (state.draft.length == usual.draft.length).all()
  pairs = map(fakes.held, (state.draft, usual.draft))
  for found, expected in zip(*pairs, strict=True):
    assert found.keys() == expected.keys()
    for at in found:
      np.testing.assert_allclose(found[at], expected[at], atol=1e-4)
  final = rig.finish(before)
  assert fakes.outputs(rig.finish(state)) == fakes.outputs(final)


def test_a_row_that_is_not_asked_stays_behind_and_costs_nothing():
  """Depth 0 by its limit, done, or with nobody who wants a draft."""
  rig, calls = counting_rig()
  settings = [Settings(max_new_tokens=n) for n in (1, 30, 30, 30)]
  state = rig.start(PROMPTS, settings)
  emptied = state.draft.length.at[0].set(0)
  state = state.replace(draft=state.draft.replace(length=emptied))
  state, info, sizes = passes(rig, calls, state)
  assert sizes == [2, 1, 1] and info.num_drafted.tolist() == [0, 3, 3, 3]
  # It read two of its tokens with the others' first pass.
  assert int(state.draft.length[0]) == 2
  alone = rig.start(PROMPTS, Settings(max_new_tokens=1))
  alone = alone.replace(draft=alone.draft.replace(length=emptied))
  assert passes(rig, calls, alone)[2] == []


def loop_copies(function, *args):
  """Returns how often a compiled program's loops copy an array of a cache."""
  fresh = lambda *args: function(*args)  # Else the twin's trace is reused.
  text = jax.jit(fresh, donate_argnums=1).lower(*args).compile().as_text()
  found, inside = 0, False
  for line in text.splitlines():
    if line and not line.startswith(" ") and "{" in line:
      inside = not line.startswith("ENTRY")
    found += inside and bool(re.search(rf",{SLOTS},4\]\S* copy\(", line))
  return found


@pytest.mark.skipif(
  jax.default_backend() != "cpu", reason="the copies of XLA on CPU"
)
@pytest.mark.parametrize(
  ("name", "options"),
  [
    ("vanilla", {"num_draft": 2}),
    ("tli", {"num_draft": 2, "draft_slots": SLOTS}),
  ],
)
def test_no_loop_copies_a_cache(name, options, monkeypatch):
  """D6: neither catching up, nor a step, nor a prompt's reading.

  The twin: a path that does not wait for the end of the pass.
  """
  model, params = fakes.tiny(V, windows=(None, None))
  rig = fakes.Rig(
    (model, params),
    name,
    draft=(model, params),
    options=options,
    slots=SLOTS,
    use=fakes.GREEDY,
  )
  request = rig.request([[1], [2]])
  state = jax.eval_shape(rig.raw_init, rig.params, request)

  def decode(params, state):
    most = jnp.int32(9)
    return step_lib.decode(rig.raw_step, params, state, most, jnp.int32(2))

  def init(params, request):
    return rig.raw_init(params, request)

  assert loop_copies(decode, rig.params, state) == 0
  assert loop_copies(init, rig.params, request) == 0
  monkeypatch.setattr(cache_lib, "after_pass", lambda path, hidden: path)
  assert loop_copies(decode, rig.params, state) > 0
  assert loop_copies(init, rig.params, request) > 0
