"""Tests of `generate`: prompts to text, settings, seeds, states, reports."""

import copy
import functools

from fakes import noisy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import tiny_model
from tiny_tokenizer import byte_level_tokenizer

import spec_jax
from spec_jax.generate import (
  generate,
  make_engine,
  plan,
  run as run_work,
  shared_prefix,
)
from spec_jax.hub import Loaded
from spec_jax.models import table
from spec_jax.pairing import check_same_vocabulary, resolve_draft
from spec_jax.settings import Settings

_WORDS = byte_level_tokenizer()
_EOS = _WORDS.eos_token_id
_SAMPLED = Settings(temperature=1.0, top_k=20, max_new_tokens=12)
_PENALTIES = Settings(
  temperature=0.9,
  repetition_penalty=1.3,
  presence_penalty=0.4,
  frequency_penalty=0.3,
  max_new_tokens=12,
)


# Two rows and one size of cache nearly everywhere: few programs.
_run = functools.partial(
  generate, drafter="prompt_lookup", batch_size=2, slots=256
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
  """A tiny model with a tokenizer."""
  return spec_jax.load(tiny_model(tmp_path_factory.mktemp("m") / "tiny"))


_PERIOD = 64
_table = functools.cache(lambda: table.build(table.TableConfig(300, _PERIOD)))


def _spoken(text):
  """Returns a model that says `text` and then EOS, from position 1 on.

  So the output after a prompt of one token is the text, token by token. All
  are one architecture, so that they share their programs.
  """
  ids = [_EOS, *_bytes(text)]
  ids += [_EOS] * (_PERIOD - len(ids))
  params = {"table": jnp.asarray(table.script(ids, 300))}
  return Loaded(_table(), params, _WORDS, {}, "spoken", {}, (_EOS,), ())


def _bytes(text):
  """Returns the text's ids: each is whole in the tiny tokenizer."""
  return _WORDS(text)["input_ids"]


# --- text ---------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["none", "prompt_lookup"])
def test_streamed_pieces_join_to_the_text_without_half_characters(drafter):
  """Characters of two to four bytes come whole, one token a byte."""
  text = "naïve 😀👍🏽 — the end, 😀👍🏽 again"
  pieces = []
  out = generate(
    _spoken(text),
    [[0]],
    drafter=drafter,
    settings=Settings(max_new_tokens=100),
    on_text=lambda prompt, sample, piece: pieces.append(piece),
    seed=0,
  )
  (done,) = out.completions
  assert out.texts == [text] and "".join(pieces) == text
  assert "\ufffd" not in "".join(pieces)
  assert done.ids == [*_bytes(text), _EOS] and done.finish_reason == "stop"
  assert out.report["emitted"] == len(done.ids) == done.counts.emitted


def test_a_text_cut_in_a_character_shows_it_once():
  """A limit inside an emoji gives one U+FFFD, streamed as returned."""
  pieces = []
  out = generate(
    _spoken("ab😀"),
    [[0]],
    settings=Settings(max_new_tokens=4),
    on_text=lambda *piece: pieces.append(piece),
    seed=0,
  )
  assert out.texts == ["ab\ufffd"] and out.ids == [_bytes("ab😀")[:4]]
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
  loaded = _spoken("abcdefghij")
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
  assert done.ids == _bytes("abcdefghij")[:num]
  assert len(done.logprobs) == num == out.report["emitted"]


def test_each_row_has_its_own_stop_strings():
  """Rows of one batch end at their own; one has none."""
  settings = [
    Settings(stop_strings=("c",), max_new_tokens=6),
    Settings(stop_strings="ef", max_new_tokens=6),
    Settings(max_new_tokens=6),
    Settings(stop_strings=("c", "b"), min_new_tokens=3, max_new_tokens=6),
  ]
  out = generate(_spoken("abcdefghij"), [[0]] * 4, settings=settings, seed=0)
  assert out.texts == ["ab", "abcd", "abcdef", "ab"]


def test_ids_are_the_same_for_plain_and_speculative(loaded):
  """Raw text, chat messages and ids reach both as the same tokens."""
  chat = [{"role": "user", "content": "the end"}]
  raw = "the <|im_end|>\u00e9"
  prompts = [raw, chat, [5, 6, 7]]
  expected = [
    _WORDS(raw)["input_ids"],
    _WORDS(
      "<|im_start|>user\nthe end<|im_end|>\n<|im_start|>assistant\n",
      add_special_tokens=False,
    )["input_ids"],
    [5, 6, 7],
  ]
  settings = Settings(max_new_tokens=6)
  for drafter in ("none", "prompt_lookup"):
    out = _run(loaded, prompts, settings=settings, drafter=drafter, seed=0)
    assert [list(c.prompt_ids) for c in out.completions] == expected


def test_one_prompt_need_not_be_a_list(loaded):
  """Text, ids (a list, a tuple, an array) and a chat stand for themselves."""
  settings = Settings(max_new_tokens=3)
  run = functools.partial(_run, loaded, settings=settings, seed=0)
  ids = _bytes("abc")
  wanted = run(["abc"]).ids
  for prompt in ("abc", ids, tuple(ids), np.array(ids), [ids]):
    assert run(prompt).ids == wanted
  assert len(run([{"role": "user", "content": "a"}]).ids) == 1


# --- settings and seeds -------------------------------------------------------


def test_settings_belong_to_rows(loaded):
  """Greedy, sampled and banning rows of one batch are as each alone."""
  greedy = Settings(max_new_tokens=10, seed=3)
  said = _run(loaded, "abc", settings=greedy, seed=0).ids[0]
  rows = [
    greedy,
    _with(_SAMPLED, seed=3),
    _with(greedy, banned_tokens=said[:2]),
    _with(_SAMPLED, seed=4),
  ]
  together = _run(loaded, ["abc"] * 4, settings=rows, seed=0)
  for s, ids in zip(rows, together.ids, strict=True):
    assert _run(loaded, "abc", settings=s, seed=1).ids == [ids]
  assert len(set(map(tuple, together.ids))) == 4


def test_a_seed_gives_one_text_whatever_ran_before(loaded):
  """Alone, in a batch, after other calls: seed 7 says the same."""
  seven = _with(_SAMPLED, seed=7)
  run = functools.partial(_run, loaded)
  alone = run("abc", settings=seven, seed=1).ids[0]
  others = [_with(_SAMPLED, seed=s) for s in (1, 2, 3)]
  for _ in range(2):
    run(["xyz"] * 3, settings=others, seed=5)
  batch = run(["q", "rs", "abc", "t"], settings=[*others, seven], seed=None)
  assert batch.ids[3] != alone  # another prompt
  batch = run(["q", "rs", "t", "abc"], settings=[*others, seven], seed=None)
  assert batch.ids[3] == alone
  assert run("abc", settings=_with(seven, seed=8), seed=1).ids[0] != alone


def _with(settings, **change):
  return Settings(**{**vars(settings), **change})


def test_runs_without_a_seed_differ_and_can_be_repeated(loaded):
  """The seed that was drawn is in the result."""
  run = functools.partial(_run, loaded, "abc", settings=_SAMPLED)
  first, second = run(), run()
  assert first.seed != second.seed and first.ids != second.ids
  assert run(seed=first.seed).ids == first.ids


def test_samples_of_a_prompt_differ_and_keep_their_order(loaded):
  """Three samples each, in order; one of them is the only sample's text."""
  settings = _with(_SAMPLED, num_samples=3)
  out = _run(loaded, ["abc", "de"], settings=settings, seed=4)
  assert [(c.prompt, c.sample) for c in out.completions] == [
    (p, s) for p in range(2) for s in range(3)
  ]
  assert len(set(map(tuple, out.ids))) == 6
  single = _run(loaded, ["abc", "de"], settings=_SAMPLED, seed=4)
  assert single.ids == [out.ids[0], out.ids[3]]
  assert out.report["emitted"] == sum(map(len, out.ids))


def test_deterministic_drafts_say_what_plain_decoding_says(loaded):
  """With the same seed, at every temperature and with penalties."""
  for settings in (Settings(max_new_tokens=20), _SAMPLED, _PENALTIES):
    prompts = ["abcabcabc", "xyxyxyxy"]
    run = functools.partial(_run, loaded, prompts, settings=settings, seed=2)
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
    "settings": [Settings(max_new_tokens=3), _SAMPLED, _SAMPLED],
    "options": {"num_draft": 8, "max_ngram": 3},
  }
  before = copy.deepcopy(given)
  _run(
    loaded,
    given["prompts"],
    settings=given["settings"],
    options=given["options"],
    seed=0,
  )
  assert given == before


def test_a_second_call_compiles_nothing(loaded):
  """Other prompts, lengths, seeds and values of the same settings."""
  run = functools.partial(_run, loaded)
  run(["abc", "d"], settings=_SAMPLED, seed=0)
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
  again = run(["x" * 30, "yz"], settings=_with(_SAMPLED, top_k=3), seed=9)
  assert again.report["compile_s"] == 0


# --- states -------------------------------------------------------------------


@pytest.mark.parametrize(
  ("drafter", "settings"),
  [
    ("prompt_lookup", Settings(max_new_tokens=12)),
    ("prompt_lookup", _PENALTIES),
    ("vanilla", _SAMPLED),
  ],
)
def test_continuing_says_what_a_fresh_run_says(loaded, drafter, settings):
  """Greedy, sampled and with penalties; only what is new is read."""
  more = {"draft": 1} if drafter == "vanilla" else {}
  settings = _with(settings, stop_ids=())
  run = functools.partial(
    _run, loaded, drafter=drafter, settings=settings, seed=3, **more
  )
  first = run("abcabc", keep_state=True)
  (done,) = first.completions
  longer = [*done.prompt_ids, *done.ids, *_bytes("hello")]
  fresh, further = run(longer), run(longer, start=done.state)
  assert further.ids == fresh.ids and len(fresh.ids[0]) == 12
  assert further.texts == fresh.texts
  assert fresh.report["prompt_tokens"] == len(longer)
  assert further.report["prompt_tokens"] == 6  # the last one and five
  assert run("abcabc").completions[0].state is None


def test_a_state_of_another_kind_is_refused(loaded):
  """Another drafter, another size of cache, another text."""
  settings = Settings(max_new_tokens=4)
  run = functools.partial(_run, loaded, settings=settings, seed=0)
  (done,) = run("abc", keep_state=True).completions
  longer = [*done.prompt_ids, *done.ids, 1]
  for change in (
    {"drafter": "none"},
    {"drafter": "vanilla", "draft": 1},
    {"slots": 128},
    {"settings": _SAMPLED},
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
  run = functools.partial(_run, loaded, settings=settings, seed=0)
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


# --- drafts, reports, refusals ------------------------------------------------


def test_the_target_as_its_own_draft_is_always_right(loaded):
  """Every drafted token is kept, greedy and sampled."""
  for settings in (Settings(), _SAMPLED):
    settings = _with(settings, stop_ids=(), max_new_tokens=11)
    out = _run(
      loaded,
      ["abc", "xy"],
      settings=settings,
      drafter="vanilla",
      draft="target",
      options={"num_draft": 4},
      seed=0,
    )
    assert out.report["acceptance_rate"] == 1.0
    # 5 + 5 + 1 tokens, the last step with nothing left to draft for.
    assert out.report["steps"] == 6 and out.report["emitted"] == 22
    assert out.report["accept_cond"] == [1.0] * 4


def test_the_report_adds_up(loaded):
  """Its counts are the completions'; its rates are their quotients."""
  noisy_draft = loaded._replace(params=noisy(loaded.params))
  streamed = []
  out = _run(
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
  assert (len(done.ids), done.finish_reason) == (28, "length")
  with pytest.raises(ValueError, match="32 tokens does not fit a context of"):
    generate(loaded, "a" * 32, settings=settings, seed=0)
  with pytest.raises(ValueError, match="33 slots, the model's context is 32"):
    generate(loaded, "a", slots=33, seed=0)


def test_slots_bound_prompt_and_text(loaded):
  """Too few for the prompt is an error, for the text an earlier end."""
  settings = Settings(max_new_tokens=50, stop_ids=())
  out = generate(_spoken("abcdefg"), [1] * 4, settings=settings, slots=16)
  assert len(out.ids[0]) == 12
  assert out.completions[0].finish_reason == "length"
  with pytest.raises(ValueError, match="4 tokens does not fit a context of 4"):
    generate(loaded, "abcd", settings=settings, slots=4)


class _Words:
  """A tokenizer that is its vocabulary."""

  def __init__(self, tokens):
    self._tokens = tokens

  def get_vocab(self):
    return {token: i for i, token in self._tokens.items()}


def test_the_first_id_that_means_two_things_is_named():
  """Longer or shorter is allowed; another token under one id is not."""
  ours = {0: "a", 1: "b", 2: "c", 3: "d"}
  check_same_vocabulary(_Words(ours), _Words(ours))
  check_same_vocabulary(_Words(ours), _Words({**ours, 4: "e"}))
  check_same_vocabulary(_Words({**ours, 4: "e"}), _Words(ours))
  for other, message in (
    ({0: "a", 1: "x", 2: "c", 3: "y"}, "first at id 1: 'b' and 'x'"),
    ({0: "a", 1: "c", 2: "b", 3: "d"}, "first at id 1: 'b' and 'c'"),
  ):
    with pytest.raises(ValueError, match=message):
      check_same_vocabulary(_Words(ours), _Words(other))


def test_a_draft_with_other_words_is_refused(loaded):
  """Before any forward pass, by the first id."""
  words = byte_level_tokenizer(bos=None)
  words.add_tokens(["extra"])
  longer = loaded._replace(tokenizer=words)
  assert resolve_draft(loaded, longer)[0] is loaded.model
  other = loaded._replace(tokenizer=_Words({0: "?"}))
  with pytest.raises(ValueError, match="differ first at id 0: '!' and '\\?'"):
    generate(loaded, "a", drafter="vanilla", draft=other, seed=0)


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
  out = _run(bare, [[1, 2]], settings=settings, seed=0)
  assert out.ids == _run(loaded, [[1, 2]], settings=settings, seed=0).ids
  assert out.texts == [""]
  with pytest.raises(ValueError, match="no tokenizer: give prompts as token"):
    generate(bare, "a", seed=0)
  with pytest.raises(ValueError, match="stop strings need a tokenizer"):
    generate(bare, [[1]], settings=Settings(stop_strings="a"), seed=0)


def test_an_empty_text_starts_with_bos(loaded):
  """There is a BOS token here, so "" is a prompt of one token."""
  out = _run(loaded, "", settings=Settings(max_new_tokens=2), seed=0)
  assert out.completions[0].prompt_ids == (_WORDS.bos_token_id,)


def test_parameters_are_not_copied_for_short_drafts(loaded):
  """The target's first layer drafts: its arrays are the target's own."""
  model, params = resolve_draft(loaded, 1)
  assert model.config.num_layers == 1
  ours = {id(x) for x in jax.tree.leaves(loaded.params)}
  assert all(id(x) in ours for x in jax.tree.leaves(params))
  assert resolve_draft(loaded, 1)[0] is model  # so nothing compiles
