"""Tests of states of `generate`: continued, refused, shared by prompts."""

import functools

from generating import (
  PENALTIES,
  SAMPLED,
  changed,
  generate_small,
  ids_of,
  loaded as loaded,
)
import pytest

from spec_jax.generate import shared_prefix
from spec_jax.settings import Settings
from spec_jax.work import plan


@pytest.mark.parametrize(
  ("drafter", "settings"),
  [
    ("prompt_lookup", Settings(max_new_tokens=12)),
    ("prompt_lookup", PENALTIES),
    ("vanilla", SAMPLED),
  ],
)
def test_continuing_says_what_a_fresh_run_says(loaded, drafter, settings):
  """Greedy, sampled and with penalties; only what is new is read."""
  more = {"draft": 1} if drafter == "vanilla" else {}
  settings = changed(settings, stop_ids=())
  run = functools.partial(
    generate_small, loaded, drafter=drafter, settings=settings, seed=3, **more
  )
  first = run("abcabc", keep_state=True)
  (done,) = first.completions
  longer = [*done.prompt_ids, *done.ids, *ids_of("hello")]
  fresh, further = run(longer), run(longer, start=done.state)
  assert further.ids == fresh.ids and len(fresh.ids[0]) == 12
  assert further.texts == fresh.texts
  assert fresh.report["prompt_tokens"] == len(longer)
  assert further.report["prompt_tokens"] == 6  # the last one and five
  assert run("abcabc").completions[0].state is None


def test_a_state_of_another_kind_is_refused(loaded):
  """Another drafter, another size of cache, another text."""
  settings = Settings(max_new_tokens=4)
  run = functools.partial(generate_small, loaded, settings=settings, seed=0)
  (done,) = run("abc", keep_state=True).completions
  longer = [*done.prompt_ids, *done.ids, 1]
  for change in (
    {"drafter": "none"},
    {"drafter": "vanilla", "draft": 1},
    {"slots": 128},
    {"settings": SAMPLED},
  ):
    with pytest.raises(ValueError, match="cannot be continued here"):
      run(longer, start=done.state, **change)
  with pytest.raises(ValueError, match="does not continue the state's"):
    run("xyz abc", start=done.state)


def test_a_shared_prefix_is_read_once(loaded):
  """Prompts that begin with the same 40 tokens: one reading, same ids."""
  head = "h" * 40
  prompts = [head + tail for tail in ("a", "bc", "def")]
  settings = Settings(max_new_tokens=8)
  run = functools.partial(generate_small, loaded, settings=settings, seed=0)
  together = run(prompts)
  alone = [run(p) for p in prompts]
  assert together.ids == [x.ids[0] for x in alone]
  assert sum(x.report["prompt_tokens"] for x in alone) == 41 + 42 + 43
  # 41 for the prefix (its last token is not kept), then what differs.
  assert together.report["prompt_tokens"] == 41 + 1 + 2 + 3


def test_prompts_that_hardly_agree_share_nothing(loaded):
  """Few shared tokens, or one prompt alone, are not worth a pass."""
  jobs = plan(loaded, ["a" * 20 + c for c in "bc"], Settings(), 0).jobs
  assert shared_prefix(jobs) == 0
  jobs = plan(loaded, ["a" * 50, "a" * 60], Settings(), 0).jobs
  assert shared_prefix(jobs[:1]) == 0
  # A token is left to read, for the shorter too.
  assert shared_prefix(jobs) == 49
