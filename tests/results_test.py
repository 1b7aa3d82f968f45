"""Tests of result files: lines that survive a kill, beside a manifest."""

import json
import os

import pytest

from experiments import results
from experiments.launch import UserError
from experiments.results import ResultFile

_RUN = {"config": {"seed": 0}, "prompts": ["a", "b"]}


def _write(path, records, identity=_RUN, **manifest):
  """Writes a result file and closes it."""
  out = ResultFile(path, identity)
  out.write_manifest(manifest)
  for record in records:
    out.write(record)
  out.close()
  return path


def _record(number, text="x"):
  return {"prompt": number, "text": text}


def _reopened(path, identity=_RUN):
  """Opens a file, closes it, and returns what it held."""
  out = ResultFile(path, identity)
  out.close()
  return out


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path):
  """A kill after `write` loses nothing: another reader sees the line."""
  out = ResultFile(tmp_path / "x.jsonl", _RUN)
  out.write(_record(0, "é😀\u2028\n"))
  seen = (tmp_path / "x.jsonl").read_bytes()
  out.close()
  assert seen.endswith(b"\n") and seen.count(b"\n") == 1
  assert json.loads(seen)["text"] == "é😀\u2028\n"


@pytest.mark.parametrize("kept", range(0, 47, 5))
def test_wherever_a_kill_tears_whole_lines_are_kept(tmp_path, kept):
  """A file cut at any byte is resumed with its whole lines, and goes on."""
  path = _write(tmp_path / "x.jsonl", [_record(0), _record(1), _record(2)])
  whole = path.read_bytes()
  assert len(whole) == 3 * 27
  path.write_bytes(whole[:kept])
  out = ResultFile(path, _RUN)
  assert sorted(out.done) == list(range(kept // 27))
  for number in range(3):
    if number not in out.done:
      out.write(_record(number))
  out.close()
  assert path.read_bytes() == whole


def test_lines_may_be_in_any_order(tmp_path):
  """Lines are found by their prompt's number."""
  path = _write(tmp_path / "x.jsonl", [_record(4, "four"), _record(1, "one")])
  done = _reopened(path).done
  assert {n: r["text"] for n, r in done.items()} == {4: "four", 1: "one"}


def test_a_file_of_another_run_is_refused_and_left(tmp_path):
  """Another configuration, other prompts or no manifest: not our file."""
  path = _write(tmp_path / "x.jsonl", [_record(0)])
  before = path.read_bytes()
  for other in ({**_RUN, "prompts": ["a"]}, {"config": {"seed": 1}}):
    with pytest.raises(UserError, match="another configuration or other"):
      ResultFile(path, other)
  (tmp_path / "x.manifest.json").unlink()
  with pytest.raises(UserError, match="another configuration or other"):
    ResultFile(path, _RUN)
  assert path.read_bytes() == before


def test_a_manifest_that_is_no_manifest_is_no_traceback(tmp_path):
  """Damaged or of another shape: refused in words."""
  path = _write(tmp_path / "x.jsonl", [_record(0)])
  for text in ("{", "[]", "3", ""):
    (tmp_path / "x.manifest.json").write_text(text)
    with pytest.raises(UserError, match="another configuration or other"):
      ResultFile(path, _RUN)


@pytest.mark.parametrize(
  "line",
  [
    "{",
    "[]",
    "{}",
    '{"prompt": "x"}',
    '{"prompt": true}',
    '{"prompt": 1.5}',
    "3",
    "",
    "[" * 100_000,
  ],
)
def test_a_whole_line_that_is_no_result_is_refused(tmp_path, line):
  """Only a torn last line is cut off; anything else is for the user."""
  path = _write(tmp_path / "x.jsonl", [_record(0)])
  text = path.read_text() + line + "\n"
  path.write_text(text)
  with pytest.raises(UserError, match="holds a line that is no result"):
    ResultFile(path, _RUN)
  assert path.read_text() == text


@pytest.mark.parametrize(
  "line",
  [
    '{"prompt": 2, "text": "x"}',
    '{"prompt": -1, "text": "x"}',
    '{"prompt": 1}',
  ],
)
def test_a_line_of_no_prompt_or_without_its_fields_is_refused(tmp_path, line):
  """Two prompts, and each line holds a text."""
  path = _write(tmp_path / "x.jsonl", [_record(0)])
  kept = {"keys": range(2), "fields": ("text",)}
  out = ResultFile(path, _RUN, **kept)
  assert list(out.done) == [0]
  out.close()
  text = path.read_text() + line + "\n"
  path.write_text(text)
  _reopened(path)  # nothing was asked of a line
  with pytest.raises(UserError, match="holds a line that is no result"):
    ResultFile(path, _RUN, **kept)
  assert path.read_text() == text


def test_a_value_that_must_be_the_same_is_compared(tmp_path):
  """Other weights under the same name are another run; none is no news."""
  path = _write(tmp_path / "x.jsonl", [_record(0)], weights="abc", draft=None)
  out = _reopened(path)
  out.check_same("weights", "abc")
  out.check_same("draft", None)
  out.check_same("unknown", "anything")
  with pytest.raises(UserError, match="results with another weights"):
    out.check_same("weights", "abd")
  with pytest.raises(UserError, match="results with another draft"):
    out.check_same("draft", "abd")


def test_the_manifest_is_old_or_new_never_half(tmp_path, monkeypatch):
  """A kill while it is written leaves the one before."""
  out = ResultFile(tmp_path / "x.jsonl", _RUN)
  out.write_manifest({"number": 1})

  def killed(*args):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
      out.write_manifest({"number": 2})
  held = json.loads((tmp_path / "x.manifest.json").read_text())
  assert held["number"] == 1
  out.write_manifest({"number": 3})
  out.close()
  held = json.loads((tmp_path / "x.manifest.json").read_text())
  assert held["number"] == 3 and len(held["identity"]) == 64


def test_what_cannot_be_written_is_said_at_once(tmp_path):
  """No folder, a folder, a file where a folder should be."""
  (tmp_path / "file").write_text("")
  for path, message in (
    (tmp_path / "none" / "x.jsonl", "none is no folder"),
    (tmp_path / "file" / "x.jsonl", "file is no folder"),
    (tmp_path, "it is a folder"),
  ):
    with pytest.raises(UserError, match=message):
      ResultFile(path, _RUN)


@pytest.mark.parametrize("name", ["x.manifest.json", "x.manifest.json.tmp"])
def test_a_folder_where_the_manifest_goes_is_said_at_once(tmp_path, name):
  (tmp_path / name).mkdir()
  with pytest.raises(UserError, match=f"{name}: it is a folder"):
    ResultFile(tmp_path / "x.jsonl", _RUN)
  assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_folder_without_write_permission_is_said_at_once(
  tmp_path, monkeypatch
):
  """The manifest could not be put beside the file."""
  monkeypatch.setattr(os, "access", lambda path, mode: False)
  with pytest.raises(UserError, match="is read-only"):
    ResultFile(tmp_path / "x.jsonl", _RUN)
  assert list(tmp_path.iterdir()) == []


def test_an_empty_new_file_is_taken_away_others_are_not(tmp_path):
  """A run that came to nothing leaves nothing; what was there stays."""
  _reopened(tmp_path / "new.jsonl")
  (tmp_path / "old.jsonl").write_text("")
  _reopened(tmp_path / "old.jsonl")
  assert [p.name for p in tmp_path.iterdir()] == ["old.jsonl"]


def test_the_order_of_keys_does_not_make_another_run():
  """Two spellings of one configuration are one; other values are not."""
  a, b = {"x": 1, "y": [1, 2]}, {"y": [1, 2], "x": 1}
  assert results.digest(a) == results.digest(b)
  assert results.digest(a) != results.digest({"x": 1, "y": [2, 1]})


def test_the_environment_needs_no_repository(monkeypatch, tmp_path):
  """Without git, or outside a repository, the commit is None."""
  found = results.environment()
  assert found["platform"] == "cpu" and found["num_devices"] >= 8
  assert found["matmul_precision"] == "highest"
  assert found["commit"] is None or len(found["commit"].rstrip("+")) == 40
  monkeypatch.setenv("PATH", str(tmp_path))
  assert results.environment()["commit"] is None
