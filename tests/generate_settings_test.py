"""Tests of the settings and seeds of `generate`: of rows, samples, laws."""

import copy
import functools

from generating import (
  PENALTIES,
  SAMPLED,
  changed,
  generate_small,
  loaded as loaded,
)
import numpy as np
import pytest

from spec_jax.generate import generate, make_engine, run as run_work
from spec_jax.settings import Settings
from spec_jax.work import plan


def test_settings_belong_to_rows(loaded):
  """Greedy, sampled and banning rows of one batch are as each alone."""
  greedy = Settings(max_new_tokens=10, seed=3)
  said = generate_small(loaded, "abc", settings=greedy, seed=0).ids[0]
  rows = [
    greedy,
    changed(SAMPLED, seed=3),
    changed(greedy, banned_tokens=said[:2]),
    changed(SAMPLED, seed=4),
  ]
  together = generate_small(loaded, ["abc"] * 4, settings=rows, seed=0)
  for s, ids in zip(rows, together.ids, strict=True):
    assert generate_small(loaded, "abc", settings=s, seed=1).ids == [ids]
  assert len(set(map(tuple, together.ids))) == 4


def test_a_seed_gives_one_text_whatever_ran_before(loaded):
  """Alone, in a batch, after other calls: seed 7 says the same."""
  seven = changed(SAMPLED, seed=7)
  run = functools.partial(generate_small, loaded)
  alone = run("abc", settings=seven, seed=1).ids[0]
  others = [changed(SAMPLED, seed=s) for s in (1, 2, 3)]
  for _ in range(2):
    run(["xyz"] * 3, settings=others, seed=5)
  batch = run(["q", "rs", "abc", "t"], settings=[*others, seven], seed=None)
  assert batch.ids[3] != alone  # another prompt
  batch = run(["q", "rs", "t", "abc"], settings=[*others, seven], seed=None)
  assert batch.ids[3] == alone
  assert run("abc", settings=changed(seven, seed=8), seed=1).ids[0] != alone


def test_runs_without_a_seed_differ_and_can_be_repeated(loaded):
  """The seed that was drawn is in the result."""
  run = functools.partial(generate_small, loaded, "abc", settings=SAMPLED)
  first, second = run(), run()
  assert first.seed != second.seed and first.ids != second.ids
  assert run(seed=first.seed).ids == first.ids


def test_samples_of_a_prompt_differ_and_keep_their_order(loaded):
  """Three samples each, in order; one of them is the only sample's text."""
  settings = changed(SAMPLED, num_samples=3)
  out = generate_small(loaded, ["abc", "de"], settings=settings, seed=4)
  assert [(c.prompt, c.sample) for c in out.completions] == [
    (p, s) for p in range(2) for s in range(3)
  ]
  assert len(set(map(tuple, out.ids))) == 6
  single = generate_small(loaded, ["abc", "de"], settings=SAMPLED, seed=4)
  assert single.ids == [out.ids[0], out.ids[3]]
  assert out.report["emitted"] == sum(map(len, out.ids))


def test_deterministic_drafts_say_what_plain_decoding_says(loaded):
  """With the same seed, at every temperature and with penalties."""
  for settings in (Settings(max_new_tokens=20), SAMPLED, PENALTIES):
    prompts = ["abcabcabc", "xyxyxyxy"]
    run = functools.partial(
      generate_small, loaded, prompts, settings=settings, seed=2
    )
    assert run(drafter="none").ids == run().ids


@pytest.mark.parametrize("kind", ["raw", "warped"])
def test_logprobs_are_of_the_law_that_is_asked_for(loaded, kind):
  """Raw: of the model's own logits; warped: of the law drawn from."""
  settings = Settings(temperature=0.5, top_k=4, max_new_tokens=8)
  out = generate(
    loaded,
    "abc",
    settings=settings,
    drafter="prompt_lookup",
    logprobs=kind,
    seed=0,
  )
  (done,) = out.completions
  ids = np.array([*done.prompt_ids, *done.ids])
  logits = np.asarray(
    loaded.model.apply(
      loaded.params,
      ids[None],
      np.arange(len(ids))[None],
      None,
      None,
      None,
    ).logits[0],
    np.float64,
  )
  begin = len(done.prompt_ids)
  for i, value in enumerate(done.logprobs):
    row = logits[begin + i - 1]
    if kind == "warped":
      row = row / 0.5
      row = np.where(row >= np.sort(row)[-4], row, -np.inf)
    # float32 logits near 10: their sums agree to some 1e-5.
    wanted = row[ids[begin + i]] - np.log(np.exp(row - row.max()).sum())
    assert abs(value - (wanted - row.max())) < 1e-4


def test_nothing_of_the_callers_is_changed(loaded):
  """Settings, options, prompts and messages compare equal afterwards."""
  given = {
    "prompts": ["abc", [{"role": "user", "content": "b"}], [1, 2]],
    "settings": [Settings(max_new_tokens=3), SAMPLED, SAMPLED],
    "options": {"num_draft": 8, "max_ngram": 3},
  }
  before = copy.deepcopy(given)
  generate_small(
    loaded,
    given["prompts"],
    settings=given["settings"],
    options=given["options"],
    seed=0,
  )
  assert given == before


def test_a_second_call_compiles_nothing(loaded):
  """Other prompts, lengths, seeds and values of the same settings."""
  run = functools.partial(generate_small, loaded)
  run(["abc", "d"], settings=SAMPLED, seed=0)
  values = [
    Settings(temperature=np.float32(0.5), top_k=np.int64(7), max_new_tokens=5),
    Settings(temperature=2, top_k=1, max_new_tokens=9),
  ]
  work = plan(loaded, ["a" * 40, "b"], values, 1)
  engine = make_engine(
    loaded, work, drafter="prompt_lookup", batch_size=2, slots=256
  )
  assert len(list(run_work(engine, work))) == 2
  assert engine.num_compiles == 0
  again = run(["x" * 30, "yz"], settings=changed(SAMPLED, top_k=3), seed=9)
  assert again.report["compile_s"] == 0
