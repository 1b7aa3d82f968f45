"""The grid of losses and sources, on the tiny model."""

import json

from commands import built_once as built_once, run_command
import pytest
from tiny_model import tiny_model

import spec_jax
from train import data


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
  assert [x["source"] for x in lines] == ["", "truth", "mix", "own"]
  for line in lines:
    assert 0 < line["alpha_1"] <= 1 and 0 <= line["alpha_0"] <= 1
    assert line["emitted_per_step"] >= 1
  assert "| tvd | 0." in done.out
  assert "Before the first step: 0." in done.out
  wrote = {x.parent.name for x in out.glob("*/on_policy")}
  assert wrote == {"tvd-mix", "tvd-own"}
  # Another evaluation set is another grid.
  done = _run(folder, out, monkeypatch, capsys, "--losses=tvd", "--held_out=3")
  assert done.code == 2 and "held_out" in done.err


def test_a_source_gives_its_own_text(folder, tmp_path, monkeypatch, capsys):
  """What is learned from is the data's or the target's, never held out."""
  packed, real = [], data.pack

  def pack(examples, length):
    packed.append({tuple(x.ids.tolist()) for x in examples})
    return real(examples, length)

  monkeypatch.setattr(data, "pack", pack)
  words = "--losses=tvd", "--sources=truth,answers", "--steps=1"
  done = _run(folder, tmp_path / "x", monkeypatch, capsys, *words)
  assert done.code == 0, done.err
  held, truth, answers = packed
  assert len(held) == 2 and len(truth) == 10 and len(answers) == 8
  loaded = spec_jax.load(folder / "model", cpu_kernel="off")
  files = (str(folder / "answers.jsonl"),)
  own = data.read_examples(files, loaded, length=48)
  assert held | answers == {tuple(x.ids.tolist()) for x in own}
  assert not held & answers and not truth & (held | answers)


def test_half_of_an_odd_batch_is_refused(folder, tmp_path, monkeypatch, capsys):
  words = "--sources=mix", "--batch_size=1"
  done = _run(folder, tmp_path / "x", monkeypatch, capsys, *words)
  assert done.code == 2 and "of the 1 rows of a step" in done.err


@pytest.mark.parametrize(
  "words,message",
  [
    (("--steps=0",), "steps must be at least 1, got 0"),
    (("--batch_size=0",), "batch_size must be at least 1, got 0"),
    (("--learning_rate=nan",), "learning_rate must be above 0, got nan"),
    (("--start=nowhere",), "nowhere"),
    (("--losses=mse",), "--losses must be of forward_kl"),
    (("--sources=luck",), "--sources must be of truth"),
    (("--losses=",), "tvd, got none"),
    (("--sources=",), "mix, got none"),
    (("--truth=",), "needs --truth"),
    (("--answers=",), "--answers are needed"),
  ],
)
def test_bad_flags_are_one_line(
  words, message, folder, tmp_path, monkeypatch, capsys
):
  done = _run(folder, tmp_path / "x", monkeypatch, capsys, *words)
  assert done.code == 2 and message in done.err
  assert done.err.count("\n") == 1 and not (tmp_path / "x").exists()
