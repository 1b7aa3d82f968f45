"""Tests of `python -m experiments.index`, and of its file in a run."""

import json

from commands import (
  SMALL,
  built_once as built_once,
  cells,
  command as command,
  fresh,
  model as model,
  run_command,
  unread as unread,
)
import pytest
from tiny_model import tiny_model
from tiny_tokenizer import byte_level_tokenizer

from spec_jax import corpus

# ml_collections reads a configuration file with it.
pytestmark = pytest.mark.filterwarnings(
  "ignore:.*load_module:DeprecationWarning"
)


@pytest.fixture
def make_read(model, monkeypatch, capsys):
  """Runs the command with the tiny model's tokenizer."""

  def run(*words):
    words = (f"--model={model}", *words)
    return run_command(monkeypatch, capsys, "index", *words, takes_files=True)

  return run


@pytest.fixture
def make(make_read, unread):
  """The same, where reading any weight is a failure."""
  return make_read


def text_of(index):
  """Returns the documents of an index as text."""
  found, ids = [], []
  for token in index.tokens[1:].tolist():
    if token < 0:
      found.append(byte_level_tokenizer().decode(ids))
    ids = [] if token < 0 else [*ids, token]
  return found


def test_files_become_documents(make, tmp_path):
  """Text, lines of JSON and conversations, one document each."""
  (tmp_path / "a.txt").write_text("\ufeffthe first\nand the last line\n")
  (tmp_path / "b.txt").write_text("over there")
  lines = [
    {"text": "one"},
    {"messages": [{"role": "user", "content": "two"}] * 2},
    {"turns": ["three", "unread"]},
  ]
  jsonl = tmp_path / "c.jsonl"
  jsonl.write_text("".join(json.dumps(x) + "\n" for x in lines))
  out = tmp_path / "x.npz"
  ran = make(f"--out={out}", str(jsonl), f"--text={tmp_path}/*.txt")
  assert ran.code == 0, ran.err
  made = corpus.load(out)
  texts = ["one", "two", "two", "three"]
  texts += ["the first\nand the last line\n", "over there"]
  assert text_of(made) == texts
  assert made.vocab_size == 300 and made.num_documents == 6
  assert f"{out}: {made.num_tokens:,} tokens of 6 documents, " in ran.out
  said = "[fields of JSON lines: text, messages, turns (the first); not read: "
  assert f"{said}none]\n" in ran.err


def test_answers_are_documents_too(make, tmp_path):
  """Beside their prompts; what is not read is said, once for all files."""
  lines = [
    {"prompt": "one", "answer": "two", "id": 3},
    {"instruction": "three", "output": "four", "input": "five"},
    # As `train.generate` writes them.
    {"prompt": 0, "prompt_ids": [1], "ids": [2], "text": "six"},
    {"prompt": "seven", "answer": ["eight"]},
  ]
  for number, line in enumerate(lines):
    (tmp_path / f"{number}.jsonl").write_text(json.dumps(line))
  ran = make(f"--out={tmp_path / 'x.npz'}", f"--text={tmp_path}/*.jsonl")
  assert ran.code == 0, ran.err
  made = text_of(corpus.load(tmp_path / "x.npz"))
  assert made == ["one", "two", "three", "four", "six", "seven"]
  assert ran.err == (
    "[fields of JSON lines: prompt, answer, instruction, output, text; not "
    "read: id, input, prompt, prompt_ids, ids, answer]\n"
  )


def test_long_texts_are_cut_between_lines(monkeypatch):
  """At most so many characters at a time, none lost."""
  text = "ab\ncdefgh\n\nijklmnopqrstuv\nw"
  module = fresh("index")
  monkeypatch.setattr(module, "_PIECE", 6)
  pieces = list(module._pieces(text))
  assert "".join(pieces) == text and max(map(len, pieces)) <= 6
  assert pieces[:2] == ["ab\n", "cdefgh"]


_MISTAKES = {
  "no out": (["x.txt"], "say where to write the index: --out=index.npz"),
  "no folder": (["--out=nowhere/x.npz"], "nowhere is no folder"),
  "no file": (["--out={0}/x.npz"], "give text files, or --text=PATTERN"),
  "no match": (["--out={0}/x.npz", "--text={0}/*.md"], "no file matches"),
  "unreadable": (["--out={0}/x.npz", "{0}/no.txt"], "cannot read"),
  "not UTF-8": (["--out={0}/x.npz", "{0}/bytes.txt"], "is not UTF-8"),
  "not JSON": (["--out={0}/x.npz", "{0}/bad.jsonl"], "line 1 is not JSON"),
  "no record": (["--out={0}/x.npz", "{0}/no.jsonl"], "holds no document"),
  "no field": (["--out={0}/x.npz", "{0}/x.jsonl"], "line 1 has no text in any"),
  "folder": (["--out={0}", "{0}/a.txt"], "it is a folder"),
  "empty": (["--out={0}/x.npz", "{0}/empty.txt"], "the corpus is empty"),
  "there": (["--out={0}/empty.txt", "{0}/a.txt"], "--overwrite replaces it"),
  "depth": (
    ["--out={0}/x.npz", "--max_match=0", "{0}/a.txt"],
    "max_match must be at least 1, got 0",
  ),
  "model": (
    ["--model=/nothing", "--out={0}/x.npz", "{0}/a.txt"],
    "is no folder, no .gguf file, no built-in model",
  ),
}


@pytest.mark.parametrize("name", _MISTAKES)
def test_bad_input_is_one_line(make, tmp_path, name):
  """Code 2, one line (and no traceback), and no file is left."""
  (tmp_path / "a.txt").write_text("some text")
  (tmp_path / "empty.txt").write_text("")
  (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
  (tmp_path / "bad.jsonl").write_text("{\n")
  (tmp_path / "no.jsonl").write_text("\n")
  (tmp_path / "x.jsonl").write_text('{"answer": "alone"}\n')
  before = sorted(tmp_path.iterdir())
  words, message = _MISTAKES[name]
  ran = make(*[word.format(tmp_path) for word in words])
  (line,) = [x for x in ran.err.splitlines() if x.startswith("error: ")]
  assert ran.code == 2 and ran.out == "" and message in line
  assert "Traceback" not in ran.err
  assert sorted(tmp_path.iterdir()) == before


def test_an_index_of_the_texts_saves_steps(make_read, command, tmp_path):
  """The texts stay plain decoding's, in a quarter of the steps."""
  out = tmp_path / "x.jsonl"
  words = ("--prompt=abc", *SMALL[:2], "--config.policy.name=fixed")
  plain = "--config.drafter.name=none"
  ran = command(f"--out={out}", plain, "--prompt=abc", *SMALL[:2])
  assert ran.code == 0, ran.err
  (tmp_path / "a.txt").write_text("\n" + json.loads(out.read_text())["text"])
  file = tmp_path / "x.npz"
  made = make_read(f"--out={file}", f"{tmp_path}/a.txt")
  assert made.code == 0, made.err
  ran = command(
    *words,
    "--config.drafter.name=suffix",
    "--config.drafter.factor=12.0",
    f"--config.drafter.corpus={file}",
  )
  assert ran.code == 0, ran.err
  assert cells(ran.out, "identical text")[0] == "yes"
  steps = [int(x) for x in cells(ran.out, "steps")]
  assert steps[0] == 12 and steps[1] <= 4


@pytest.mark.parametrize("drafter", ["suffix", "ngram"])
def test_an_index_of_another_tokenizer_is_refused(
  make, command, tmp_path, unread, drafter
):
  """One line, before a weight is read: two words have changed places."""
  other = tiny_model(tmp_path / "other")
  words = json.loads((other / "tokenizer.json").read_text())
  vocab = words["model"]["vocab"]
  vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
  (other / "tokenizer.json").write_text(json.dumps(words))
  (tmp_path / "a.txt").write_text("some text")
  file = tmp_path / "x.npz"
  made = make(f"--model={other}", f"--out={file}", f"{tmp_path}/a.txt")
  assert made.code == 0, made.err
  chosen = (f"--config.drafter.name={drafter}", "--prompt=a")
  ran = command(*chosen, f"--config.drafter.corpus={file}")
  assert ran.code == 2 and ran.out == "" and ran.err.count("\n") == 1
  assert "was made with another tokenizer than the model's" in ran.err
  file.write_bytes(file.read_bytes()[:-50])
  ran = command(*chosen, f"--config.drafter.corpus={file}")
  assert ran.code == 2 and ran.err.count("\n") == 1 and "damaged" in ran.err
