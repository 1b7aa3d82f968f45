"""Tests of the command that searches draft layers, and of using its file."""

import json

from commands import (
  SMALL,
  VANILLA,
  built_once as built_once,
  read_lines,
  run_command,
  run_generate,
)
import pytest
from tiny_model import tiny_model

from experiments import layer_search

# ml_collections reads a configuration file with it.
pytestmark = pytest.mark.filterwarnings(
  "ignore:.*load_module:DeprecationWarning"
)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
  """A model folder of three layers."""
  folder = tmp_path_factory.mktemp("models") / "three"
  return tiny_model(folder, num_hidden_layers=3)


@pytest.fixture
def search(three, tmp_path, monkeypatch, capsys):
  """Runs the command on the tiny model with these words."""
  prompts = tmp_path / "p.txt"
  prompts.write_text("ab cd\nxyz\n")

  def run(*words):
    return run_command(
      monkeypatch,
      capsys,
      "search_layers",
      f"--model={three}",
      f"--prompts={prompts}",
      f"--out={tmp_path / 'x.jsonl'}",
      "--tokens=10",
      "--max_depth=2",
      "--rounds=1",
      *words,
    )

  return run


def test_a_search_resumes_and_its_file_drafts(
  search, three, tmp_path, monkeypatch, capsys
):
  """All 7 sets are lines; a kill loses none; `generate` takes the best."""
  out, best = tmp_path / "x.jsonl", tmp_path / "x.best.json"
  ran = search("--method=greedy", "--iterations=3")
  assert ran.code in (0, None), ran.err
  first = out.read_text()
  assert [tuple(x["layers"]) for x in read_lines(out)] == [
    (0, 1, 2),
    (1, 2),
    (0, 2),
  ]
  costs = json.loads((tmp_path / "x.manifest.json").read_text())["costs"]
  assert len(costs["target"]) == 3 and min(costs["target"]) > 0
  out.write_text(first + '{"layers": [0,')  # killed
  ran = search("--method=bayesian", "--iterations=50")
  assert ran.code in (0, None), ran.err
  lines = read_lines(out)
  assert out.read_text().startswith(first) and len(lines) == 7
  assert len({tuple(x["layers"]) for x in lines}) == 7
  again = json.loads((tmp_path / "x.manifest.json").read_text())["costs"]
  assert again == costs  # so that the objectives can be compared

  record = json.loads(best.read_text())
  top = min(lines, key=lambda x: x["objective"])
  assert record["layers"] == top["layers"]
  assert record["objective"] == top["objective"]
  assert record["predicted_ratio"] == pytest.approx(
    costs["target"][0] / top["objective"]
  )
  # The whole model is always right: 10 tokens in 4 steps of 3, 3, 3 and 1.
  (whole,) = [x for x in lines if len(x["layers"]) == 3]
  assert whole["agreement"] == 1 and whole["depth"] in (1, 2)
  assert whole["emitted_per_step"] in (2.0, 2.5)
  passes = layer_search.Costs(**costs).draft(3)
  expected = {
    2: (3 * (2 * passes + costs["target"][2]) + costs["target"][0]) / 10,
    1: (5 * (passes + costs["target"][1])) / 10,
  }[whole["depth"]]
  assert whole["objective"] == pytest.approx(expected)
  # Texts are teacher-forced, so what is measured is what was expected.
  assert record["measured"]["emitted_per_step"] == pytest.approx(
    record["emitted_per_step"]
  )

  def generate(draft):
    model = f"--config.model={three}"
    draft = f"--config.drafter.draft={draft}"
    words = (VANILLA, draft, model, "--prompt=a", *SMALL)
    return run_generate(monkeypatch, capsys, *words, "--nocompare")

  for draft in (f"@{best}", str(best)):
    ran = generate(draft)
    assert ran.code in (0, None), ran.err
  for change, message in (
    ({"layers": [0, 9]}, "layers must be in [0, 2], one at least, got [0, 9]"),
    ({"weights_sha256": "0" * 64, "model": "m"}, "was made for m with weights"),
  ):
    other = tmp_path / "other.json"
    other.write_text(json.dumps(record | change))
    ran = generate(f"@{other}")
    assert ran.code == 2 and ran.err.count("\n") == 1
    assert message in ran.err


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (["--out=x.json"], "give --out=FILE.jsonl, got 'x.json'"),
    (["--method=x"], "method must be one of greedy, bayesian, got 'x'"),
    (["--iterations=0"], "iterations must be at least 1, got 0"),
  ],
)
def test_bad_input_is_one_line(search, words, message):
  """Before the model is read."""
  ran = search(*words)
  assert ran.code == 2 and message in ran.err and ran.err.count("\n") == 1
