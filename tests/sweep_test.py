"""Tests of the sweep over batch sizes: what it predicts and records."""

import json
import random
import statistics

from commands import (
  built_once as built_once,
  fresh,
  model as model,
  run_command,
)
import pytest


def _simulate(share, costs, depth, rows, emitted, steps=40_000):
  """Draws who drafts in each step; the batch pays if anybody does."""
  draw = random.Random(0)
  seconds = sum(
    costs[depth]
    if any(draw.random() < share for _ in range(rows))
    else costs[0]
    for _ in range(steps)
  )
  return emitted * steps * costs[0] / seconds


def test_a_prediction_is_what_a_batch_of_rows_pays():
  """The docstring's example, a simulation, and the limits."""
  sweep = fresh("sweep")
  costs = [1.0, 1.2, 1.6, 2.0]
  assert sweep.predict(2.1, {3: 0.5}, [1, 1, 1, 2], 2) == pytest.approx(1.2)
  for rows in (1, 4):
    expected = _simulate(0.3, costs, 3, rows, 1.5)
    # 40,000 steps: the share of paid steps scatters by .0025.
    assert sweep.predict(1.5, {3: 0.3}, costs, rows) == pytest.approx(
      expected, rel=0.01
    )
  assert sweep.predict(1.0, {}, costs, 8) == 1.0
  # All rows draft in all steps, half of them deep: never more than that costs.
  both = sweep.predict(1.0, {1: 0.5, 3: 0.5}, costs, 8)
  assert both == pytest.approx(1 / 1.6)
  assert sweep.predict(1.0, {1: 1.0}, costs, 1) == pytest.approx(1 / 1.2)


def test_speculation_pays_up_to_the_first_loss():
  """A later win behind a loss is no promise."""
  sweep = fresh("sweep")
  lines = [
    {"rows": rows, "x": {"ratio": ratio}}
    for rows, ratio in ((8, 1.1), (1, 1.5), (4, 0.9), (2, 1.2))
  ]
  assert sweep.pays_up_to(lines, "x") == 2
  assert sweep.pays_up_to(lines[2:3], "x") == 0


def test_a_sweep_records_ratios_of_the_same_texts(
  model, tmp_path, monkeypatch, capsys
):
  """Ratios follow from the rounds, predictions from shares and costs."""
  out, png = tmp_path / "x.json", tmp_path / "x.png"
  prompts = tmp_path / "own.txt"
  prompts.write_text("ab ab ab ab\nxyz xyz xyz\n")
  ran = run_command(
    monkeypatch,
    capsys,
    "sweep",
    f"--model={model}",
    f"--prompts={prompts}",
    f"--out={out}",
    f"--plot={png}",
    "--rows=2",
    "--rounds=1",
    "--tokens=12",
    "--slots=256",
    "--cases=3|cost",
  )
  assert ran.code in (0, None), ran.err
  sweep = fresh("sweep")
  (line,) = json.loads(out.read_text())["lines"]
  assert line["kind"] == "own" and line["rows"] == 2
  for case, depth in (("depth 3", 3), ("cost", 7)):
    found = line[case]
    base = statistics.median(line["plain_tokens_per_s"])
    assert found["ratio"] == pytest.approx(found["tokens_per_s"][0] / base)
    assert found["identical"] == found["prompts"] == 2
    assert found["emitted_per_step"] >= 1
    assert len(found["costs_s"]) == depth + 1
    shares = {int(d): x for d, x in found["shares"].items()}
    assert set(shares) <= set(range(1, depth + 1))
    assert 0 < sum(shares.values()) <= 1
    assert found["predicted"] == pytest.approx(
      sweep.predict(found["emitted_per_step"], shares, found["costs_s"], 2)
    )
  assert png.read_bytes().startswith(b"\x89PNG")
  assert "own, depth 3: pays up to" in ran.out
