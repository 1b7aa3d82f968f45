"""Tests of the counts over all of Spec-Bench."""

from commands import (
  built_once as built_once,
  model as model,
  read_lines,
  run_command,
)
import pytest
from spec_bench_test import _questions

from experiments import bench_summary as summary


@pytest.fixture
def counts(model, tmp_path, monkeypatch, capsys):
  """Runs the command on the tiny model with these words."""
  questions = _questions(tmp_path)

  def run(*words):
    return run_command(
      monkeypatch,
      capsys,
      "acceptance",
      f"--model={model}",
      f"--questions={questions}",
      f"--out={tmp_path / 'x.jsonl'}",
      "--per_task=2",
      "--max_new_tokens=12",
      "--temperatures=0",
      "--rows=3",
      *words,
    )

  return run


def test_counts_are_recorded_resumed_and_shown(counts, tmp_path):
  out = tmp_path / "x.jsonl"
  ran = counts("--cases=lookup (3|cost)")
  assert ran.code in (0, None), ran.err
  plain, lookup = read_lines(out)
  assert plain["case"] == "plain" and plain["emitted_per_step"] == 1
  assert lookup["case"] == "lookup 3"  # a policy is not counted
  assert plain["prompts"] == 6 and len(plain["texts"]) == 8
  assert lookup["text_must_agree"] and lookup["different"] == []
  assert lookup["texts"] == plain["texts"]
  assert 1 < lookup["emitted_per_step"] <= 4
  assert set(lookup["by_subtask"]) == {*summary.SUBTASKS[:3], summary.EDITING}
  assert lookup["varied"]["prompts"] <= 6
  assert "| 0 | lookup 3 |" in ran.out
  # What is there stays; a text that is not plain's is said loudly.
  lines = out.read_text().splitlines(keepends=True)
  out.write_text(lines[0].replace(plain["texts"][1], "0" * 12) + lines[1][:60])
  ran = counts("--cases=lookup 3")
  assert ran.code == 1 and "TEXT DIFFERS FROM PLAIN DECODING" in ran.out
  assert read_lines(out)[1]["different"] == [1]
  ran = counts("--cases=lookup cost")
  assert ran.code == 2 and "has a fixed length" in ran.err
  ran = counts("--cases=(")
  assert ran.code == 2 and "no regular expression" in ran.err
  out.write_text(out.read_text().replace('"num_draft": 3', '"num_draft": 2'))
  ran = counts("--cases=lookup 3")
  assert ran.code == 2 and "was measured with" in ran.err
  out.write_text(out.read_text().replace('"texts"', '"text"'))
  ran = counts("--cases=lookup 3")
  assert ran.code == 2 and "holds a line that is no result" in ran.err
  ran = counts("--cases=lookup 3", "--rows=0")
  assert ran.code == 2 and "rows must be at least 1" in ran.err
