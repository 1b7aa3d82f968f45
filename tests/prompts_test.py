"""Tests of prompts: defaults, files of two kinds, chat templates, lengths."""

import json

import pytest
from tiny_tokenizer import byte_level_tokenizer

from experiments import prompts
from experiments.launch import UserError


def _read(tmp_path, text, name="x.txt", given=()):
  """Writes a file, byte for byte, and reads it as a command does."""
  (tmp_path / name).write_bytes(text.encode())
  return prompts.read(given, str(tmp_path / name))


def test_without_any_prompt_there_are_three():
  """The defaults are for nobody who gave one, or a file."""
  assert prompts.read([], "") == list(prompts.DEFAULT)
  assert len(set(prompts.DEFAULT)) == 3
  assert prompts.read(["a"], "") == ["a"]


def test_a_text_file_has_one_prompt_a_line(tmp_path):
  """Blank lines are none; ends of lines of any system; no byte-order mark."""
  assert _read(tmp_path, "\ufeffa b\r\n\r\n  \n c\n") == ["a b", " c"]


def test_given_prompts_come_before_those_of_the_file(tmp_path):
  """Both may be given."""
  assert _read(tmp_path, "b\nc", given=["a"]) == ["a", "b", "c"]


@pytest.mark.parametrize(
  ("record", "prompt"),
  [
    ({"prompt": "a", "id": 7}, "a"),
    ({"text": "a"}, "a"),
    ({"question": "a", "answer": "b"}, "a"),
    ({"instruction": "a"}, "a"),
    ({"turns": ["a", "b"], "category": "x"}, "a"),
    ({"turns": "ab"}, "ab"),
    ({"prompt": "", "text": "a"}, "a"),
    ("a", "a"),
    (
      {"messages": [{"role": "user", "content": "a"}]},
      [{"role": "user", "content": "a"}],
    ),
  ],
)
def test_a_json_line_may_name_its_prompt_in_many_ways(tmp_path, record, prompt):
  """The fields of the benchmarks' own files, and messages as they are."""
  assert _read(tmp_path, json.dumps(record), "x.jsonl") == [prompt]


def test_a_json_line_ends_at_its_newline_only(tmp_path):
  """U+2028, U+0085 and form feeds may stand in a line as they are."""
  text = "a\u2028b\u0085c\x0cd"
  lines = json.dumps({"text": text}, ensure_ascii=False) + '\n"e"\n'
  assert _read(tmp_path, lines, "x.jsonl") == [text, "e"]


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ("{", "x.jsonl line 2 is not JSON"),
    ("{}", "x.jsonl line 2 has no text in any of messages, prompt"),
    ("3", "x.jsonl line 2 has no text"),
    ('{"prompt": 3}', "x.jsonl line 2 has no text"),
    ('{"turns": [3]}', "x.jsonl line 2 has no text"),
    ('{"turns": {"a": "b"}}', "x.jsonl line 2 has no text"),
    ('{"messages": "a"}', "line 2: messages need a role and a content"),
    ('{"messages": [{"role": "user"}]}', "line 2: messages need a role"),
    ('{"messages": [{"role": 1, "content": "a"}]}', "line 2: messages need"),
  ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
  """The file, the line and what is wrong."""
  with pytest.raises(UserError, match=message):
    _read(tmp_path, '{"text": "a"}\n' + line, "x.jsonl")


def test_an_empty_prompt_is_refused(tmp_path):
  """Given, or a line of JSON; so is a file without any."""
  for given in (["a", ""], ["a", " \n"]):
    with pytest.raises(UserError, match="prompt 1 is empty"):
      prompts.read(given, "")
  with pytest.raises(UserError, match="prompt 1 is empty"):
    _read(tmp_path, '"a"\n"  "\n', "x.jsonl")
  with pytest.raises(UserError, match=r"x\.txt holds no prompt"):
    _read(tmp_path, "\n \n")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
  """Missing, a folder, not UTF-8."""
  with pytest.raises(UserError, match=r"none\.txt: No such file"):
    prompts.read([], str(tmp_path / "none.txt"))
  with pytest.raises(UserError, match="Is a directory"):
    prompts.read([], str(tmp_path))
  (tmp_path / "x.txt").write_bytes(b"a\xff")
  with pytest.raises(UserError, match=r"x\.txt is not UTF-8"):
    prompts.read([], str(tmp_path / "x.txt"))


def test_texts_become_messages_where_there_is_a_template():
  """auto asks the tokenizer; yes and no overrule; messages stay."""
  chat, plain = (
    byte_level_tokenizer(),
    byte_level_tokenizer(chat_template=None),
  )
  user = [{"role": "user", "content": "a"}]
  system = {"role": "system", "content": "s"}
  template = prompts.with_template
  assert template(chat, ["a", user], "auto", "") == [user, user]
  assert template(chat, ["a"], "yes", "s") == [[system, *user]]
  assert template(chat, ["a"], "no", "") == ["a"]
  assert template(plain, ["a"], "auto", "") == ["a"]
  assert template(None, ["a"], "auto", "") == ["a"]
  with pytest.raises(UserError, match="no chat template"):
    template(plain, ["a"], "yes", "")
  with pytest.raises(UserError, match="a system message needs"):
    template(chat, ["a"], "no", "s")


def test_the_default_configuration_is_found_from_anywhere(
  tmp_path, monkeypatch
):
  """Paths of the source tree do not depend on the working folder."""
  monkeypatch.chdir(tmp_path)
  with open(prompts.root("configs/generate.py")) as file:
    assert "def get_config()" in file.read()
