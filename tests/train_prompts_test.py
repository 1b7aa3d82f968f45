"""Prompts to train on: mixed, and none that is evaluated on."""

import gzip
import importlib
import json
import sys
import zipfile

from absl import flags
import pytest

from experiments.launch import UserError


@pytest.fixture
def prompts():
  """The module, its flags taken away afterwards."""
  sys.modules.pop("train.prompts", None)
  for name in ("data", "out", "scale", "seed"):
    if name in flags.FLAGS:
      delattr(flags.FLAGS, name)
  yield importlib.import_module("train.prompts")
  sys.modules.pop("train.prompts", None)
  for name in ("data", "out", "scale", "seed"):
    delattr(flags.FLAGS, name)
  flags.FLAGS.unparse_flags()


LONG = "one two three four five six seven eight nine ten eleven twelve thirteen"
SPEECH = (
  "My friends, the nation asks for peace. " * 8
  + "The Senate and the House of Congress agreed on it in the spring. " * 12
)


@pytest.fixture
def folder(tmp_path):
  """A folder of the names that are read, a few records each."""

  def lines(name, records):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    text = "".join(json.dumps(x) + "\n" for x in records)
    if name.endswith(".gz"):
      path.write_bytes(gzip.compress(text.encode()))
    else:
      path.write_text(text)

  lines("spec_bench/q.jsonl", [{"turns": [f"Say: {LONG}!", "short one"]}])
  lines("mt_bench/question.jsonl", [{"turns": ["a"]}])
  lines("eagle_eval/qa.jsonl", [{"turns": ["b"]}])
  lines("humaneval/H.jsonl.gz", [{"prompt": "def f(x):"}])
  lines("gsm8k/test.jsonl", [{"question": "How many apples?"}])
  lines(
    "gsm8k/train.jsonl", [{"question": f"Add {i} and 2."} for i in range(9)]
  )
  lines(
    "self_instruct/s.jsonl",
    [{"instruction": "Do it.", "instances": [{"input": "this"}]}],
  )
  (tmp_path / "alpaca_eval").mkdir()
  (tmp_path / "alpaca_eval/zephyr-7b-beta.json").write_text(
    json.dumps(
      [
        {"instruction": f"Please repeat {LONG.upper()} loudly"},
        {"instruction": "SHORT, one."},
        {"instruction": "Something else", "input": "more"},
      ]
    )
  )
  (tmp_path / "gpteacher").mkdir()
  for name in ("codegen-x", "roleplay-x"):
    (tmp_path / f"gpteacher/{name}.json").write_text(
      json.dumps([{"instruction": f"{name} now", "input": ""}])
    )
  (tmp_path / "multi30k").mkdir()
  (tmp_path / "multi30k/train.de.gz").write_bytes(
    gzip.compress(b"Ein Hund.\nZwei Katzen.\n")
  )
  lines("t0_summarization/c.jsonl", [{"prompt": "Sum up: A fire broke out."}])
  (tmp_path / "nltk_corpora").mkdir()
  for name in ("state_union", "movie_reviews", "inaugural"):
    with zipfile.ZipFile(tmp_path / f"nltk_corpora/{name}.zip", "w") as file:
      file.writestr(f"{name}/a.txt", SPEECH.replace("nation", name) * 4)
  return tmp_path


def test_what_is_evaluated_on_is_left_out(prompts, folder):
  """Thirteen words in a row, or the whole of a shorter text, in any case."""
  found, dropped = prompts.gather(folder, 1.0, 0)
  texts = [text for source, text in found if source == "chat"]
  assert texts == ["Something else\n\nmore"]
  assert dropped["chat"] == 2


def test_every_source_gives_prompts_in_its_own_words(prompts, folder):
  found, _ = prompts.gather(folder, 1.0, 0)
  by_source = {name: text for name, text in found}
  assert by_source.keys() == prompts.SOURCES.keys()
  assert by_source["tasks"] == "Do it.\n\nthis"
  assert by_source["translation"].startswith("Translate German to English: Ein")
  assert by_source["speeches"].startswith("Summarize")
  assert by_source["retrieval"].splitlines()[-1].endswith("?")
  assert sum(name == "mathematics" for name, _ in found) == 9


def test_a_scale_takes_a_part_and_a_seed_the_same(prompts, folder):
  half, _ = prompts.gather(folder, 0.005, 1)
  assert sum(name == "mathematics" for name, _ in half) == 7
  assert prompts.gather(folder, 1.0, 1) == prompts.gather(folder, 1.0, 1)
  assert prompts.gather(folder, 1.0, 1) != prompts.gather(folder, 1.0, 2)


def test_what_is_missing_is_one_line(prompts, folder):
  (folder / "gsm8k/test.jsonl").unlink()
  with pytest.raises(UserError, match=r"gsm8k/test\.jsonl is missing"):
    prompts.gather(folder, 1.0, 0)


@pytest.mark.parametrize(
  "name,content,message",
  [
    # With no time in it: it is the test's name too, in each worker.
    (
      "multi30k/train.de.gz",
      gzip.compress(b"Ein Hund.", mtime=0)[:-9],
      "cannot read",
    ),
    ("multi30k/train.de.gz", b"no archive", "cannot read"),
    ("alpaca_eval/zephyr-7b-beta.json", b'[{"x": 1}]', "record 1 is not as"),
    ("alpaca_eval/zephyr-7b-beta.json", b'{"x": 1}', "no list of records"),
    ("nltk_corpora/inaugural.zip", b"no archive", "cannot read"),
  ],
)
def test_a_damaged_file_is_one_line(prompts, folder, name, content, message):
  (folder / name).write_bytes(content)
  with pytest.raises(UserError, match=message):
    prompts.gather(folder, 1.0, 0)


def test_a_file_that_is_no_json_is_one_line(prompts, folder):
  (folder / "gsm8k/train.jsonl").write_text("{")
  with pytest.raises(UserError, match=r"train\.jsonl is not JSON"):
    prompts.gather(folder, 1.0, 0)
