"""Data: what is read, which tokens count, how it is packed and resumed."""

import gzip
import importlib.util
import json
import lzma
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_tokenizer import byte_level_tokenizer

from spec_jax import text
from spec_jax.hub import Loaded
from tests import fakes
from train import data, distill
from train.data import Example

_WORDS = byte_level_tokenizer()
_END = _WORDS.convert_tokens_to_ids("<|im_end|>")


@pytest.fixture(scope="module")
def loaded():
  """A target that is never run, with a chat tokenizer."""
  model, _ = fakes.tiny(300)
  return Loaded(model, None, _WORDS, {}, "tiny", {}, (_END,), ())


def _read(loaded, tmp_path, *lines, name="x.jsonl", **options):
  path = tmp_path / name
  texts = [x if isinstance(x, str) else json.dumps(x) for x in lines]
  path.write_text("\n".join(texts), encoding="utf-8")
  options = {"length": 400} | options
  return data.read_examples((str(path),), loaded, **options)


def _example(prompt, answer):
  ids = np.array([*prompt, *answer], np.int32)
  return Example(ids, np.arange(len(ids)) >= len(prompt))


def _said(example):
  return text.decode(
    text.token_bytes(_WORDS, 300), example.ids[example.answer].tolist()
  )


def test_pairs_of_input_and_label_are_those_of_the_answer():
  """Prompt of 3, answer of 2: the boundary position 2 predicts token 8."""
  (row,) = data.pack([_example([5, 6, 7], [8, 9])], 7)
  pairs = [
    (i, int(row["labels"][i])) for i in range(7) if row["weights"][i] != 0
  ]
  assert pairs == [(2, 8), (3, 9)]
  assert row["segment_ids"].tolist() == [1, 1, 1, 1, 1, 0, 0]
  assert row["positions"].tolist() == [0, 1, 2, 3, 4, 0, 0]


def test_no_label_comes_from_the_next_example():
  examples = [_example([1], [2, 3]), _example([4, 5], [6])]
  (row,) = data.pack(examples, 6)
  assert row["tokens"].tolist() == [1, 2, 3, 4, 5, 6]
  assert row["labels"].tolist() == [2, 3, 0, 0, 6, 0]
  assert row["weights"].tolist() == [1, 1, 0, 0, 1, 0]
  assert row["segment_ids"].tolist() == [1, 1, 1, 2, 2, 2]


def test_packing_loses_nothing_and_leaves_little_room():
  rng = np.random.default_rng(0)
  examples = [
    _example([1], rng.integers(2, 99, rng.integers(1, 40)).tolist())
    for _ in range(300)
  ]
  rows = data.pack(examples, 64)
  found = [
    tuple(row["tokens"][row["segment_ids"] == s].tolist())
    for row in rows
    for s in range(1, row["segment_ids"].max() + 1)
  ]
  assert sorted(found) == sorted(tuple(x.ids.tolist()) for x in examples)
  used = sum(len(x.ids) for x in examples)
  assert used / (64 * len(rows)) > 0.9
  with pytest.raises(ValueError, match="65 tokens, rows hold 64"):
    data.pack([_example([1] * 64, [2])], 64)


def test_a_packed_sequence_sees_no_other_and_padding_changes_nothing():
  """Loss and gradient of three packed examples are the sums of each alone."""
  model, params = fakes.tiny(windows=(None, 4))
  draft = {k: v for k, v in params.items() if k not in ("embed", "head")}
  draft = fakes.noisy(draft)
  loss = distill.make_loss(model, model, name="forward_kl")
  both = fakes.jit(jax.value_and_grad(loss, has_aux=True))
  rng = np.random.default_rng(1)
  examples = [
    _example(rng.integers(0, 13, p).tolist(), rng.integers(0, 13, n).tolist())
    for p, n in ((3, 2), (1, 6), (2, 2))
  ]

  def run(examples, length):
    rows = data.pack(examples, length)
    batch = {k: jnp.stack([r[k] for r in rows]) for k in rows[0]}
    return both(draft, params, batch, jax.random.key(0))

  alone = [run([x], 16) for x in examples]
  total = sum(x[0][0] for x in alone)
  slope = jax.tree.map(lambda *g: sum(g), *[x[1] for x in alone])
  for length in (16, 64):
    (value, sums), grad = run(examples, length)
    np.testing.assert_allclose(value, total, rtol=1e-5)
    assert sums["tokens"] == 2 + 6 + 2
    for ours, theirs in zip(*map(jax.tree.leaves, (grad, slope)), strict=True):
      np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
  # Twin: without segments the packed loss is another.
  rows = data.pack(examples, 16)
  batch = {k: jnp.stack([r[k] for r in rows]) for k in rows[0]}
  batch["segment_ids"] = jnp.ones_like(batch["segment_ids"])
  (value, _), _ = both(draft, params, batch, jax.random.key(0))
  assert abs(value - total) > 1e-3


_TURNS = [
  {"role": "user", "content": "how are you"},
  {"role": "assistant", "content": "fine"},
  {"role": "user", "content": "really"},
  {"role": "assistant", "content": "no"},
]


def test_a_chats_prompt_is_the_one_decoding_would_read(loaded, tmp_path):
  (example,) = _read(loaded, tmp_path, {"messages": _TURNS[:2]})
  prompt = text.encode_chat(_WORDS, _TURNS[:1])
  assert example.prompt == prompt
  assert example.ids[-1] == _END and example.answer[-1]
  assert _said(example) == "fine"
  assert not example.answer[: len(prompt)].any()


def test_all_answers_of_a_conversation_count_and_nothing_else(loaded, tmp_path):
  (example,) = _read(loaded, tmp_path, {"messages": _TURNS})
  assert _said(example) == "fineno"
  assert (example.ids[example.answer] == _END).sum() == 2
  second = len(text.encode_chat(_WORDS, _TURNS[:3]))
  assert example.ids[:second].tolist() == text.encode_chat(_WORDS, _TURNS[:3])


def test_sharegpt_and_pairs_are_the_same_as_messages(loaded, tmp_path):
  messages = {"messages": _TURNS[:2]}
  human = {"from": "human", "value": "how are you"}
  sharegpt = {"conversations": [human, {"from": "gpt", "value": "fine"}]}
  pair = {"prompt": "how are you", "answer": "fine"}
  alpaca = {"instruction": "how are you", "input": "", "output": "fine"}
  found = _read(loaded, tmp_path, messages, sharegpt, pair, alpaca)
  assert len(found) == 4
  for other in found[1:]:
    assert other.ids.tolist() == found[0].ids.tolist()
    assert other.answer.tolist() == found[0].answer.tolist()


def test_ids_that_generate_wrote_are_taken_as_they_are(loaded, tmp_path):
  record = {"prompt": 3, "prompt_ids": [1, 2], "ids": [9, 8], "text": "x"}
  (example,) = _read(loaded, tmp_path, record)
  assert example.ids.tolist() == [1, 2, 9, 8]
  assert example.answer.tolist() == [False, False, True, True]


@pytest.mark.parametrize("pack", [gzip, lzma])
def test_packed_lines_are_lines(pack, loaded, tmp_path):
  line = json.dumps({"prompt_ids": [1, 2], "ids": [9, 8]}) + "\r\n"
  path = tmp_path / f"x.jsonl.{'gz' if pack is gzip else 'xz'}"
  path.write_bytes(pack.compress(2 * line.encode()))
  found = data.read_examples((str(path),), loaded, length=8)
  assert [x.ids.tolist() for x in found] == [[1, 2, 9, 8]] * 2
  path.write_bytes(path.read_bytes()[:-9])
  with pytest.raises(data.DataError, match=r"cannot read .*x\.jsonl"):
    data.read_examples((str(path),), loaded, length=8)


def test_all_streams_of_a_packed_file_are_read(loaded, tmp_path):
  """And what is none of its streams is no reason to stop early."""
  line = json.dumps({"prompt_ids": [1, 2], "ids": [9, 8]}) + "\n"
  one = lzma.compress(line.encode())
  path = tmp_path / "x.JSONL.xz"
  path.write_bytes(one + bytes(4) + one + one)
  assert len(data.read_examples((str(path),), loaded, length=8)) == 3
  for tail in (b"garbage", b"\xff" + one[1:]):
    path.write_bytes(one + tail)
    with pytest.raises(data.DataError, match=r"cannot read .*x\.JSONL"):
      data.read_examples((str(path),), loaded, length=8)


def test_raw_prompts_without_the_template(loaded, tmp_path):
  pair = {"prompt": "ab", "answer": "cd"}
  (example,) = _read(loaded, tmp_path, pair, template=False)
  assert example.prompt == text.encode_prompt(_WORDS, "ab")
  assert _said(example) == "cd" and example.ids[-1] == _END


def test_a_long_chat_is_cut_and_a_long_text_is_split(loaded, tmp_path):
  (chat,) = _read(loaded, tmp_path, {"messages": _TURNS}, length=60)
  assert len(chat.ids) == len(chat.answer) == 60
  (row,) = data.pack([chat], 60)
  assert row["weights"][-1] == 0
  pieces = _read(loaded, tmp_path, "abcdefghij" * 9, name="x.txt", length=32)
  joined = np.concatenate([x.ids for x in pieces]).tolist()
  assert joined == text.encode_prompt(_WORDS, "abcdefghij" * 9)
  assert all(len(x.ids) <= 32 and x.answer.all() for x in pieces)
  # A prompt that fills the row leaves nothing to learn.
  with pytest.raises(data.DataError, match="holds no example"):
    _read(loaded, tmp_path, {"messages": _TURNS}, length=8)


def test_the_english_of_python_is_there(loaded):
  found = data.read_examples(("python",), loaded, length=64, limit=5)
  assert len(found) == 5


_BAD = {
  "not JSON": (['{"text": "a b c"}', '{"text": '], "line 2 is not JSON"),
  "number": (["3"], "line 1 is neither a text nor an object"),
  "unknown": ([{"story": "x"}], "line 1 has none of messages, .* it has story"),
  "no answer": ([{"prompt": "x"}], "line 1 has none of messages"),
  "no text": ([{"prompt": 3, "answer": "x"}], "line 1: prompt is no text"),
  "role": (
    [{"messages": [{"role": "judge", "content": "x"}]}],
    "line 1: a turn needs a role .* got 'judge' and str",
  ),
  "roles": (
    [{"messages": [{"role": ["user"], "content": "x"}]}],
    r"line 1: a turn needs a role .* got \['user'\] and str",
  ),
  "turns": ([{"conversations": "x"}], "line 1: a conversation is a list"),
  "ids": ([{"prompt_ids": [1], "ids": [301]}], "line 1 holds id 301"),
  "words": ([{"prompt_ids": [1], "ids": "x"}], "line 1: ids is no list"),
  "empty": ([], "x.jsonl holds no example"),
}


@pytest.mark.parametrize("case", _BAD)
def test_bad_data_is_one_line_with_its_place(case, loaded, tmp_path):
  lines, words = _BAD[case]
  with pytest.raises(data.DataError, match=words) as error:
    _read(loaded, tmp_path, *lines)
  assert "\n" not in str(error.value)


def test_sources_that_are_not_there_are_named(loaded, tmp_path):
  read = lambda *names: data.read_examples(names, loaded, length=8)
  with pytest.raises(data.DataError, match=r"cannot read .*none\.jsonl"):
    read(str(tmp_path / "none.jsonl"))
  with pytest.raises(data.DataError, match="'x y' is no "):
    read("x y")
  with pytest.raises(data.DataError, match="no data is given"):
    read()
  (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
  with pytest.raises(data.DataError, match="is not UTF-8"):
    read(str(tmp_path / "latin.txt"))
  if importlib.util.find_spec("datasets") is None:
    with pytest.raises(data.DataError, match="package datasets"):
      read("someone/something")


def test_hub_data_is_read_by_the_package_if_it_is_there(
  loaded, tmp_path, monkeypatch
):
  """A stand-in for the package `datasets`: one good split, one error."""
  (tmp_path / "datasets.py").write_text(
    "def load_dataset(name, split):\n"
    "  if split == 'none':\n"
    "    raise OSError('no such split\\nand more')\n"
    "  return [{'prompt': name, 'answer': split}, {'story': 'x'}]\n"
  )
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.delitem(sys.modules, "datasets", raising=False)
  read = lambda name, **how: data.read_examples(
    (name,), loaded, length=400, **how
  )
  (example,) = read("some/thing", limit=1)
  assert _said(example) == "train"
  assert _said(read("some/thing:test", limit=1)[0]) == "test"
  with pytest.raises(data.DataError, match="some/thing record 2 has none of"):
    read("some/thing")
  with pytest.raises(data.DataError, match=r"OSError: no such split$"):
    read("some/thing:none")
  monkeypatch.delitem(sys.modules, "datasets")


def _rows(count=7):
  return data.pack([_example([i], [i, i]) for i in range(count)], 3)


def test_order_is_that_of_the_seed_and_every_epoch_has_its_own():
  def first(batches, n):
    return [next(batches)["tokens"][:, 0].tolist() for _ in range(n)]

  a, b = (data.Batches(_rows(6), 2, seed=1) for _ in range(2))
  epochs = first(a, 6)
  assert first(b, 6) == epochs
  for epoch in (epochs[:3], epochs[3:]):
    assert sorted(i for batch in epoch for i in batch) == [*range(6)]
  assert epochs[:3] != epochs[3:]
  assert first(data.Batches(_rows(6), 2, seed=2), 3) != epochs[:3]


def test_a_position_is_json_and_goes_on_where_it_was():
  a = data.Batches(_rows(), 3, seed=1)
  for _ in range(4):
    next(a)
  kept = json.loads(json.dumps(a.position()))
  expected = [next(a)["tokens"].tolist() for _ in range(4)]
  b = data.Batches(_rows(), 3, seed=1)
  b.restore(kept)
  assert [next(b)["tokens"].tolist() for _ in range(4)] == expected
  with pytest.raises(data.DataError, match="the data has changed"):
    data.Batches(_rows(6), 3, seed=1).restore(kept)


def test_data_without_an_answer_is_refused():
  rows = data.pack([Example(np.arange(3), np.zeros(3, bool))], 3)
  with pytest.raises(data.DataError, match="no answer token"):
    data.Batches(rows, 1, 0)


def test_prompts_are_held_out_evenly():
  examples = [_example([i], [i]) for i in range(10)]
  learn, held = data.hold_out(examples, 3)
  assert [x.prompt[0] for x in held] == [0, 3, 6]
  assert len(learn) == 7
  with pytest.raises(data.DataError, match="10 examples are to be held out"):
    data.hold_out(examples, 10)


def test_a_prompt_that_is_held_out_is_nowhere_learned_from():
  """M12: ten prompts with three answers each; of those held out one counts."""
  examples = [_example([i], [i, j]) for i in range(10) for j in range(3)]
  learn, held = data.hold_out(examples, 4)
  prompts = [int(x.prompt[0]) for x in held]
  assert prompts == [0, 2, 5, 7]
  assert sorted({int(x.prompt[0]) for x in learn}) == [1, 3, 4, 6, 8, 9]
  assert len(learn) == 18
  assert data.hold_out(examples, 0) == (examples, [])
  with pytest.raises(data.DataError, match="the data has 10 prompts"):
    data.hold_out(examples, 10)
