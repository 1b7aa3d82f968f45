"""The grid of losses and sources, on the tiny model."""

import json

from commands import built_once as built_once, run_command
import pytest
from tiny_model import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A model, its 'answers', and data with answers of its own."""
  path = tmp_path_factory.mktemp("grid")
  tiny_model(path / "model")
  words = "one two three four five six seven eight nine ten".split()
  for name in ("answers", "truth"):
    lines = [{"prompt": f"{name} {w}", "answer": f"{w} {w} {w}"} for w in words]
    text = "".join(json.dumps(x) + "\n" for x in lines)
    (path / f"{name}.jsonl").write_text(text)
  return path


def _run(folder, out, monkeypatch, capsys, *words):
  return run_command(
    monkeypatch,
    capsys,
    "distillspec",
    f"--model={folder / 'model'}",
    f"--answers={folder / 'answers.jsonl'}",
    f"--truth={folder / 'truth.jsonl'}",
    f"--out={out}",
    "--layers=1",
    "--length=48",
    "--steps=3",
    "--batch_size=2",
    "--held_out=2",
    *words,
  )


def test_the_grid_is_filled_and_goes_on(folder, tmp_path, monkeypatch, capsys):
  """Two losses on three sources; a second call runs only what is missing."""
  out = tmp_path / "grid"
  done = _run(
    folder, out, monkeypatch, capsys, "--losses=tvd", "--sources=truth,mix"
  )
  assert done.code == 0, done.err
  done = _run(
    folder, out, monkeypatch, capsys, "--losses=tvd", "--sources=truth,mix,own"
  )
  assert done.code == 0, done.err
  assert "tvd on own" in done.err and "tvd on mix" not in done.err
  lines = [json.loads(x) for x in (out / "grid.jsonl").read_text().splitlines()]
  assert [x["source"] for x in lines] == ["truth", "mix", "own"]
  for line in lines:
    assert 0 < line["alpha_1"] <= 1 and 0 <= line["alpha_0"] <= 1
    assert line["emitted_per_step"] >= 1
  assert "| tvd | 0." in done.out


@pytest.mark.parametrize(
  "words,message",
  [
    (("--losses=mse",), "--losses must be of forward_kl"),
    (("--sources=luck",), "--sources must be of truth"),
    (("--truth=",), "needs --truth"),
    (("--answers=",), "--answers are needed"),
  ],
)
def test_bad_flags_are_one_line(
  words, message, folder, tmp_path, monkeypatch, capsys
):
  done = _run(folder, tmp_path / "x", monkeypatch, capsys, *words)
  assert done.code == 2 and message in done.err
