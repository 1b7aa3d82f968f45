"""Tests of `generate`: prompts to text, reports, refusals."""

import functools

from fakes import noisy
from generating import (
  EOS,
  WORDS,
  generate_small,
  ids_of,
  loaded as loaded,
  spoken,
)
import numpy as np
import pytest
from tiny_model import tiny_model

import spec_jax
from spec_jax.generate import generate
from spec_jax.settings import Settings

# --- text ---------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["none", "prompt_lookup"])
def test_streamed_pieces_join_to_the_text_without_half_characters(drafter):
  """Characters of two to four bytes come whole, one token a byte."""
  text = "naïve 😀👍🏽 — the end, 😀👍🏽 again"
  pieces = []
  out = generate(
    spoken(text),
    [[0]],
    drafter=drafter,
    settings=Settings(max_new_tokens=100),
    on_text=lambda prompt, sample, piece: pieces.append(piece),
    seed=0,
  )
  (done,) = out.completions
  assert out.texts == [text] and "".join(pieces) == text
  assert "\ufffd" not in "".join(pieces)
  assert done.ids == [*ids_of(text), EOS] and done.finish_reason == "stop"
  assert out.report["emitted"] == len(done.ids) == done.counts.emitted


def test_a_text_cut_in_a_character_shows_it_once():
  """A limit inside an emoji gives one U+FFFD, streamed as returned."""
  pieces = []
  out = generate(
    spoken("ab😀"),
    [[0]],
    settings=Settings(max_new_tokens=4),
    on_text=lambda *piece: pieces.append(piece),
    seed=0,
  )
  assert out.texts == ["ab\ufffd"] and out.ids == [ids_of("ab😀")[:4]]
  assert pieces[-1] == (0, 0, "\ufffd")
  assert "".join(p for *_, p in pieces) == "ab\ufffd"


@pytest.mark.parametrize("drafter", ["none", "vanilla"])
@pytest.mark.parametrize(
  ("stops", "text", "num"),
  [
    (("cd",), "ab", 4),
    (("de", "abcde"), "", 5),
    (("xyz", "f"), "abcde", 6),
    (("bcdefg",), "a", 7),
  ],
)
def test_a_stop_string_cuts_text_but_not_ids(drafter, stops, text, num):
  """Ids and log-probabilities go up to the token that completes it."""
  loaded = spoken("abcdefghij")
  more = {"draft": "target"} if drafter == "vanilla" else {}
  out = generate(
    loaded,
    [[0]],
    drafter=drafter,
    settings=Settings(stop_strings=stops, max_new_tokens=10),
    logprobs="raw",
    seed=0,
    **more,
  )
  (done,) = out.completions
  assert (done.text, done.finish_reason) == (text, "stop_string")
  assert done.ids == ids_of("abcdefghij")[:num]
  assert len(done.logprobs) == num == out.report["emitted"]


def test_each_row_has_its_own_stop_strings():
  """Rows of one batch end at their own; one has none."""
  settings = [
    Settings(stop_strings=("c",), max_new_tokens=6),
    Settings(stop_strings="ef", max_new_tokens=6),
    Settings(max_new_tokens=6),
    Settings(stop_strings=("c", "b"), min_new_tokens=3, max_new_tokens=6),
  ]
  out = generate(spoken("abcdefghij"), [[0]] * 4, settings=settings, seed=0)
  assert out.texts == ["ab", "abcd", "abcdef", "ab"]


def test_ids_are_the_same_for_plain_and_speculative(loaded):
  """Raw text, chat messages and ids reach both as the same tokens."""
  chat = [{"role": "user", "content": "the end"}]
  raw = "the <|im_end|>\u00e9"
  prompts = [raw, chat, [5, 6, 7]]
  expected = [
    WORDS(raw)["input_ids"],
    WORDS(
      "<|im_start|>user\nthe end<|im_end|>\n<|im_start|>assistant\n",
      add_special_tokens=False,
    )["input_ids"],
    [5, 6, 7],
  ]
  settings = Settings(max_new_tokens=6)
  for drafter in ("none", "prompt_lookup"):
    out = generate_small(
      loaded, prompts, settings=settings, drafter=drafter, seed=0
    )
    assert [list(c.prompt_ids) for c in out.completions] == expected


def test_one_prompt_need_not_be_a_list(loaded):
  """Text, ids (a list, a tuple, an array) and a chat stand for themselves."""
  settings = Settings(max_new_tokens=3)
  run = functools.partial(generate_small, loaded, settings=settings, seed=0)
  ids = ids_of("abc")
  wanted = run(["abc"]).ids
  for prompt in ("abc", ids, tuple(ids), np.array(ids), [ids]):
    assert run(prompt).ids == wanted
  assert len(run([{"role": "user", "content": "a"}]).ids) == 1


# --- reports and refusals -----------------------------------------------------


def test_the_report_adds_up(loaded):
  """Its counts are the completions'; its rates are their quotients."""
  noisy_draft = loaded._replace(params=noisy(loaded.params))
  streamed = []
  out = generate_small(
    loaded,
    ["abc", "defg", "h"],
    settings=Settings(max_new_tokens=15),
    drafter="vanilla",
    draft=noisy_draft,
    on_text=lambda *piece: streamed.append(piece),
    seed=0,
  )
  report = out.report
  assert report["emitted"] == sum(map(len, out.ids))
  for prompt, text in enumerate(out.texts):
    assert "".join(x for p, _, x in streamed if p == prompt) == text
  counts = [c.counts for c in out.completions]
  for name in ("emitted", "steps", "drafted", "accepted"):
    assert report[name] == sum(getattr(c, name) for c in counts)
  assert 0 < report["accepted"] < report["drafted"]
  for rate, above, below in (
    ("acceptance_rate", "accepted", "drafted"),
    ("accepted_per_step", "accepted", "steps"),
    ("emitted_per_step", "emitted", "steps"),
    ("drafted_per_step", "drafted", "steps"),
  ):
    assert report[rate] == report[above] / report[below]
  joint = report["accept_joint"]
  assert len(joint) == 4 and joint == sorted(joint, reverse=True)
  assert abs(sum(joint) - report["accepted_per_step"]) < 1e-9
  assert report["prompt_tokens"] == 3 + 4 + 1
  assert report["decode_tokens_per_s"] == pytest.approx(
    report["emitted"] / report["decode_s"]
  )
  assert report["compile_s"] >= 0 and report["first_token_s"] > 0


def test_a_text_ends_at_the_models_context(tmp_path):
  """Asked for more than the context holds, it says so by its reason."""
  loaded = spec_jax.load(tiny_model(tmp_path, max_position_embeddings=32))
  settings = Settings(max_new_tokens=500, stop_ids=())
  out = generate(loaded, "abcd", settings=settings, seed=0)
  (done,) = out.completions
  assert (len(done.ids), done.finish_reason) == (28, "context")
  with pytest.raises(ValueError, match="32 tokens does not fit a context of"):
    generate(loaded, "a" * 32, settings=settings, seed=0)
  with pytest.raises(ValueError, match="33 slots, the model's context is 32"):
    generate(loaded, "a", slots=33, seed=0)


def test_slots_bound_prompt_and_text(loaded):
  """Too few for the prompt is an error, for the text an earlier end."""
  settings = Settings(max_new_tokens=50, stop_ids=())
  out = generate(spoken("abcdefg"), [1] * 4, settings=settings, slots=16)
  assert len(out.ids[0]) == 12
  assert out.completions[0].finish_reason == "context"
  with pytest.raises(ValueError, match="4 tokens does not fit a context of 4"):
    generate(loaded, "abcd", settings=settings, slots=4)


@pytest.mark.parametrize(
  ("prompts", "more", "message"),
  [
    ([], {}, "there is no prompt"),
    ([[]], {}, "a prompt is empty"),
    ([[1, 300]], {}, "prompt 0 holds id 300, the vocabulary has 300 ids"),
    ([[-1]], {}, "prompt 0 holds id -1"),
    ("a", {"seed": -1}, "seed must be in"),
    ("a", {"seed": 1 << 63}, "seed must be in"),
    ("a", {"settings": [Settings()] * 2}, "2 settings for 1 prompts"),
    ("a", {"settings": Settings(top_p=0)}, "top_p must be in"),
    ("a", {"drafter": "magic"}, "unknown drafter 'magic'"),
    ("a", {"drafter": "vanilla"}, "needs a draft model"),
    ("a", {"drafter": "vanilla", "draft": 3}, r"in \[1, 2\], got 3"),
    ("a", {"drafter": "vanilla", "draft": "me"}, "draft must be a loaded"),
    ("a", {"logprobs": "both"}, "logprobs must be None, raw or warped"),
    (
      "a",
      {"settings": Settings(stop_strings=("<|eos|>",))},
      "is a special token, which no text shows: use stop_ids with 264",
    ),
  ],
)
def test_what_does_not_fit_is_an_error_at_once(loaded, prompts, more, message):
  """No setting is ignored in silence, none fails in the middle."""
  with pytest.raises(ValueError, match=message):
    generate(loaded, prompts, **{"seed": 0, **more})


def test_without_a_tokenizer_ids_still_work(loaded):
  """Text, chats and stop strings need one; ids do not."""
  bare = loaded._replace(tokenizer=None)
  settings = Settings(max_new_tokens=3)
  out = generate_small(bare, [[1, 2]], settings=settings, seed=0)
  assert (
    out.ids == generate_small(loaded, [[1, 2]], settings=settings, seed=0).ids
  )
  assert out.texts == [""]
  with pytest.raises(ValueError, match="no tokenizer: give prompts as token"):
    generate(bare, "a", seed=0)
  with pytest.raises(ValueError, match="stop strings need a tokenizer"):
    generate(bare, [[1]], settings=Settings(stop_strings="a"), seed=0)


def test_an_empty_text_starts_with_bos(loaded):
  """There is a BOS token here, so "" is a prompt of one token."""
  out = generate_small(loaded, "", settings=Settings(max_new_tokens=2), seed=0)
  assert out.completions[0].prompt_ids == (WORDS.bos_token_id,)
