"""The exercise from end to end, in a few steps."""

import json

from commands import built_once as built_once, fresh, run_command
import numpy as np
import pytest


@pytest.fixture
def text(tmp_path):
  """A text that repeats itself, as texts do."""
  path = tmp_path / "text.txt"
  path.write_text("the quick brown fox jumps over the lazy dog. " * 400)
  return path


def test_it_trains_compares_and_goes_on(text, tmp_path, monkeypatch, capsys):
  """A table, a record and a plot; the second call trains nothing anew."""
  out = tmp_path / "run"
  words = (
    f"--out={out}",
    f"--text={text}",
    "--steps=12",
    "--head_steps=12",
    "--heads=2",
  )
  done = run_command(monkeypatch, capsys, "tiny_medusa", *words)
  assert done.code == 0, done.err
  assert "identical to plain decoding: 16 of 16" in done.out
  record = json.loads((out / "result.json").read_text())
  names = [line["case"] for line in record["lines"]]
  assert names == [
    "plain",
    "first 2 layers, chain of 2",
    "Medusa, chain of 2",
    "Medusa, tree of 16",
  ]
  for line in record["lines"][1:]:
    assert len(line["accept_cond"]) == 2
    assert line["emitted_per_step"] >= 1
  chain, tree = record["lines"][2:]
  assert tree["emitted_per_step"] >= chain["emitted_per_step"]
  assert (out / "result.png").stat().st_size > 5000
  again = run_command(monkeypatch, capsys, "tiny_medusa", *words)
  assert again.code == 0 and "step 1 of" not in again.err


def test_pieces_are_held_out(monkeypatch):
  """No prompt, nor what follows it, is learned from."""
  tiny = fresh("tiny_medusa")
  text = np.random.default_rng(0).integers(0, 256, 40_000).astype(np.int32)
  learn, prompts = tiny.split(text)
  assert len(prompts) == 16 and {len(p) for p in prompts} == {64}
  joined = b"".join(x.ids.astype(np.uint8).tobytes() for x in learn)
  assert not any(bytes(p) in joined for p in prompts)
  assert sum(len(x.ids) for x in learn) > 0.9 * (len(text) - 16 * 160)


@pytest.mark.parametrize(
  "words,message",
  [
    ((), "--out is needed"),
    (("--out=x", "--heads=0"), "--heads must be in"),
    (("--out=x", "--draft_layers=5"), "--draft_layers must be in"),
    (("--out=x", "--text=/nowhere"), "cannot read /nowhere"),
  ],
)
def test_bad_flags_are_one_line(words, message, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  done = run_command(monkeypatch, capsys, "tiny_medusa", *words)
  assert done.code == 2 and message in done.err
