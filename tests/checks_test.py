"""Tests of what commands check before a model is read."""

from commands import (
  built_once as built_once,
  model as model,
  run_command,
  unread as unread,
)
import pytest

from experiments import checks
from experiments.launch import UserError


def test_a_file_that_can_be_written_is_left_as_it_was(tmp_path):
  """Nothing is made where nothing is; what is there keeps its bytes."""
  checks.out_file("")
  checks.out_file(tmp_path / "new.json")
  assert list(tmp_path.iterdir()) == []
  (tmp_path / "old.json").write_text("kept")
  checks.out_file(str(tmp_path / "old.json"))
  assert (tmp_path / "old.json").read_text() == "kept"


def test_a_file_that_cannot_be_written_is_said(tmp_path):
  """A folder, no folder, a file for a folder, a name no system takes."""
  (tmp_path / "file").write_text("")
  for name, message in (
    ("", "it is a folder"),
    ("none/x", "none is no folder"),
    ("file/x", "file is no folder"),
    ("n" * 300, "name too long"),
  ):
    with pytest.raises(UserError, match=f"(?i)cannot write .*{message}"):
      checks.out_file(tmp_path / name)


def test_a_file_without_permission_is_said(tmp_path, monkeypatch):
  def refused(*args):
    raise PermissionError(13, "Permission denied")

  monkeypatch.setattr(type(tmp_path), "open", refused)
  with pytest.raises(UserError, match="x: Permission denied"):
    checks.out_file(tmp_path / "x")


def test_a_picture_has_a_kind(tmp_path):
  """What matplotlib would refuse in the end is refused at once."""
  checks.picture("")
  checks.picture(str(tmp_path / "x.PNG"))
  for name in ("x.json", "x"):
    with pytest.raises(UserError, match="must end in one of"):
      checks.picture(str(tmp_path / name))
  with pytest.raises(UserError, match="none is no folder"):
    checks.picture(str(tmp_path / "none" / "x.png"))


_MISTAKES = {
  "sweep": {
    "it is a folder": [["--out={0}"], ["--plot={0}/folder.png"]],
    "none is no folder": [["--out={0}/none/x"], ["--plot={0}/none/x.png"]],
    "must end in one of": [["--plot={0}/x.json"]],
    "rows must be at least 1, got 0": [["--rows=1", "--rows=0"]],
    "rounds must be at least 1, got 0": [["--rounds=0"]],
    "tokens must be at least 1, got -1": [["--tokens=-1"]],
    "the model's context of 640, got": [["--slots=641"], ["--slots=0"]],
    "tokens; the context is 10": [["--slots=10"]],
    "--cases is no regular expression": [["--cases=("]],
    "matches none of depth 3, depth 7, cost": [["--cases=deepest"]],
    "cannot read": [["--prompts={0}/none.txt"]],
  },
  "overheads": {
    "it is a folder": [["--out={0}"]],
    "none is no folder": [["--out={0}/none/x"]],
    "rounds must be at least 1, got 0": [["--rounds=0"]],
    "the model's context of 640, got": [["--slots=641"], ["--slots=263"]],
    "--drafters is no regular expression": [["--drafters=*"]],
    "matches none of": [["--drafters=nobody"]],
    "cannot read the corpus index": [["--corpus={0}/none.npz"]],
    "damaged": [["--corpus={0}/bad.npz"]],
  },
  "speed": {
    "it is a folder": [["--out={0}"]],
    "rounds must be at least 1, got 0": [["--rounds=0"]],
    "the model's context of 640, got": [["--slots=641"], ["--slots=279"]],
  },
  "cpu_kernel": {
    "it is a folder": [["--out={0}"], ["--plot={0}/folder.png"]],
    "repeats must be at least 1, got 0": [["--repeats=0"]],
    "rows must be at least 1, got 0": [["--rows=0"]],
    "--parts must be of floor, stream, model, got": [
      ["--parts="],
      ["--parts=floor,roof"],
    ],
    "the model's context of 640, got": [["--slots=641"], ["--slots=1"]],
  },
  "end_to_end": {
    "it is a folder": [["--out={0}"]],
    "rounds must be at least 1, got 0": [["--rounds=0"]],
    "rows must be at least 1, got 0": [["--rows=0"]],
    "tokens must be at least 1, got 0": [["--tokens=0"]],
    "unknown drafter 'nobody'": [["--drafter=nobody"]],
    "unknown length policy 'nobody'": [["--policy=nobody"]],
  },
  "same_text": {
    "it is a folder": [["--out={0}"]],
    "batch must be at least 1, got 0": [["--batch=0"]],
    "--cases is no regular expression": [["--cases=("]],
    "matches none of plain, lookup k=1": [["--cases=nobody"]],
    "holds a line that is no result": [
      ["--out={0}/bad.jsonl", "--cases=plain"],
    ],
  },
}


@pytest.mark.parametrize(
  ("command", "message"),
  [(name, message) for name, found in _MISTAKES.items() for message in found],
)
def test_bad_flags_are_one_line_before_weights(
  model, tmp_path, monkeypatch, capsys, unread, command, message
):
  """Code 2, and nothing is written."""
  (tmp_path / "folder.png").mkdir()
  (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04 no archive")
  (tmp_path / "bad.jsonl").write_text("{}\n[]\n")
  before = sorted(tmp_path.iterdir())
  for words in _MISTAKES[command][message]:
    words = [word.format(tmp_path) for word in words]
    ran = run_command(monkeypatch, capsys, command, f"--model={model}", *words)
    assert ran.code == 2, (words, ran.err)
    assert message in ran.err and ran.err.count("\n") == 1, (words, ran.err)
  assert sorted(tmp_path.iterdir()) == before
