"""Tests of what `python -m experiments.generate` keeps in files."""

import json
import subprocess

from commands import (
  SMALL,
  VANILLA,
  built_once as built_once,
  cells,
  command as command,
  model as model,
  prompt_file,
  read_lines,
  run_generate,
  unread as unread,
  without_times,
)
import pytest
from tiny_model import tiny_model
from tiny_tokenizer import byte_level_tokenizer

# ml_collections reads a configuration file with it.
pytestmark = pytest.mark.filterwarnings(
  "ignore:.*load_module:DeprecationWarning"
)


def test_a_line_holds_text_ids_counts_and_identical(command, tmp_path):
  """Each prompt is one line, in order; greedy texts are identical."""
  out = tmp_path / "x.jsonl"
  prompts = [f"--prompt={c}" for c in "abcdef"]
  ran = command(f"--out={out}", *prompts, *SMALL)
  assert ran.code == 0, ran.err
  assert f"6 of 6 prompts in {out}\n" in ran.out
  lines = read_lines(out)
  assert [x["prompt"] for x in lines] == list(range(6))
  words = byte_level_tokenizer()
  for line in lines:
    (sample,) = line["samples"]
    assert line["identical"] is True and line["text"] == sample["text"]
    assert words.decode(sample["ids"], skip_special_tokens=True) == line["text"]
    assert len(sample["ids"]) == sample["emitted"] == 12
    # One token a step beside the accepted ones; the limit may cut one.
    assert 0 <= sample["steps"] + sample["accepted"] - sample["emitted"] <= 1


def test_the_manifest_says_what_the_numbers_depend_on(command, tmp_path, model):
  """Configuration and defaults, seed, versions, device, hashes, reports."""
  out = tmp_path / "x.jsonl"
  ran = command(f"--out={out}", "--prompt=a", "--config.seed=5", *SMALL)
  assert ran.code == 0, ran.err
  manifest = json.loads((tmp_path / "x.manifest.json").read_text())
  assert manifest["seed"] == 5 and manifest["lossy"] is False
  assert manifest["config"]["sampling"]["max_new_tokens"] == 12
  # What was not set is there too, at the value that was used.
  assert manifest["drafter_options"] == {
    "num_draft": 3,
    "max_ngram": 3,
    "min_ngram": 1,
    "match": "last",
  }
  assert manifest["engine"]["batch_size"] == 1
  assert manifest["engine"]["slots"] == 256 and manifest["engine"]["chunk"] > 0
  assert manifest["dtype"] == "float32" and manifest["num_prompts"] == 1
  environment = manifest["environment"]
  assert environment["platform"] == "cpu" and environment["device"]
  assert {"jax", "jaxlib", "numpy"} <= environment["versions"].keys()
  assert {"commit", "date", "python", "cpus"} <= environment.keys()
  for name, file in (
    ("weights_sha256", "model.safetensors"),
    ("tokenizer_sha256", "tokenizer.json"),
  ):
    listed = subprocess.run(
      ["sha256sum", model / file], capture_output=True, text=True, check=True
    )
    assert manifest[name] == listed.stdout.split()[0]
  assert manifest["draft_weights_sha256"] is None
  assert manifest["reports"]["speculative"]["emitted"] == 12
  assert manifest["reports"]["plain"]["steps"] == 12


def test_a_run_resumes_after_a_torn_line(command, tmp_path, monkeypatch):
  """Whole lines are kept and not decoded again; the file ends the same."""
  out, prompts = tmp_path / "x.jsonl", prompt_file(tmp_path)
  words = (prompts, f"--out={out}", *SMALL)
  assert command(*words).code == 0
  whole = out.read_bytes().splitlines(keepends=True)
  out.write_bytes(b"".join(whole[:4]) + whole[4][:20])
  ran = command(*words)
  assert ran.code == 0 and f"7 of 7 prompts in {out}\n" in ran.out
  again = out.read_bytes().splitlines(keepends=True)
  assert again[:4] == whole[:4]  # untouched, times and all
  same = [without_times(json.loads(x)) for x in whole]
  assert [without_times(json.loads(x)) for x in again] == same
  # Three prompts were decoded, not seven.
  assert cells(ran.out, "tokens emitted") == ["36", "36"]


def test_a_finished_run_stays_as_it_is(command, tmp_path):
  """Asked again, the command decodes nothing and changes no line."""
  out = tmp_path / "x.jsonl"
  words = ("--prompt=a", f"--out={out}", *SMALL)
  assert command(*words).code == 0
  before = out.read_bytes()
  ran = command(*words)
  assert ran.code == 0 and out.read_bytes() == before
  assert "nothing was left to do" in ran.out and "nan" not in ran.out
  json.loads(
    (tmp_path / "x.manifest.json").read_text(), parse_constant=pytest.fail
  )


@pytest.mark.parametrize(
  "change",
  [
    ["--config.sampling.temperature=0.5"],
    ["--config.seed=1"],
    ["--prompt=b"],
    ["--trace"],
    ["--nocompare"],
  ],
)
def test_another_run_does_not_write_into_a_file(
  command, tmp_path, unread, change
):
  """Settings, seed, prompts and flags belong to a file."""
  out = tmp_path / "x.jsonl"
  manifest = tmp_path / "x.manifest.json"
  from experiments import results

  words = (f"--out={out}", "--prompt=a")
  seen = []
  keep = results.ResultFile.__init__

  def look(self, path, identity, **more):
    seen.append(results.digest(identity))
    keep(self, path, identity, **more)

  results.ResultFile.__init__ = look
  try:
    with pytest.raises(AssertionError, match="weights were read"):
      command(*words)
    out.write_text('{"prompt": 0}\n')
    manifest.write_text(json.dumps({"identity": seen[0]}))
    ran = command(*words, *change)
  finally:
    results.ResultFile.__init__ = keep
  assert ran.code == 2 and "another configuration or other prompts" in ran.err
  assert out.read_text() == '{"prompt": 0}\n'


@pytest.mark.parametrize(
  "line", ['{"prompt": 0}', '{"prompt": 1, "text": "", "samples": []}']
)
def test_a_line_that_is_no_result_is_refused(command, tmp_path, line):
  """It lacks fields, or is of a prompt that there is not."""
  out = tmp_path / "x.jsonl"
  words = ("--prompt=a", f"--out={out}", *SMALL)
  assert command(*words).code == 0
  out.write_text(line[:-1] + ', "identical": null}\n')
  before = out.read_bytes()
  ran = command(*words)
  assert ran.code == 2 and ran.err.count("\n") == 1, ran.err
  assert "holds a line that is no result; give another --out" in ran.err
  assert out.read_bytes() == before


def test_a_file_made_with_other_weights_is_not_continued(
  monkeypatch, capsys, tmp_path
):
  """The same path with other weights is another model."""
  folder, out = tmp_path / "m", tmp_path / "x.jsonl"
  words = (f"--config.model={folder}", f"--out={out}", "--prompt=a", *SMALL)
  tiny_model(folder)
  assert run_generate(monkeypatch, capsys, *words).code == 0
  before = out.read_bytes()
  tiny_model(folder, seed=1)
  ran = run_generate(monkeypatch, capsys, *words)
  assert ran.code == 2 and "with another weights_sha256" in ran.err
  assert out.read_bytes() == before


def test_a_trace_adds_up(command, tmp_path):
  """Tokens of the steps join to the ids; p, q and the last draw are laws."""
  out = tmp_path / "x.jsonl"
  ran = command(
    "--trace",
    "--prompt=a",
    f"--out={out}",
    "--nocompare",
    VANILLA,
    "--config.drafter.draft=1",
    "--config.logprobs=raw",
    "--config.sampling.temperature=1.0",
    "--config.sampling.num_samples=2",
    *SMALL,
  )
  assert ran.code == 0, ran.err
  refused = 0
  for sample in read_lines(out)[0]["samples"]:
    steps = sample["trace"]
    assert len(sample["logprobs"]) == 12 and max(sample["logprobs"]) <= 0
    assert len(steps) == sample["steps"]
    assert [i for s in steps for i in s["ids"]] == sample["ids"]
    assert sum(len(s["drafted"]) for s in steps) == sample["drafted"]
    assert sum(s["num_accepted"] for s in steps) == sample["accepted"]
    for step in steps:
      accepted = [n["token"] for n in step["drafted"] if n["accepted"]]
      last = step["last"]
      walked = [*accepted, last["token"]]
      assert step["ids"] == walked[: step["num_tokens"]]
      assert 0 < last["p"] <= 1 and last["from"] in ("target", "residual")
      for node in step["drafted"]:
        assert 0 < node["q"] <= 1 and node["law"] == "iid"
        known = node["p"] is not None
        # The walk went by the first node after the accepted ones, no deeper.
        assert known == (node["node"] <= len(accepted) + 1)
        assert not known or 0 <= node["p"] <= 1
      if len(accepted) < len(step["drafted"]):
        assert last["from"] == "residual"
        refused += 1
  assert refused


def test_without_a_file_a_trace_is_shown(command):
  """Each step is one line with its drafted words and its last one."""
  ran = command("--trace", "--prompt=aaaa", "--nocompare", *SMALL)
  assert ran.code == 0, ran.err
  steps = [x for x in ran.out.splitlines() if x.startswith("step ")]
  assert len(steps) == int(cells(ran.out, "steps")[0])
  assert all(" -> " in x and " (p=" in x for x in steps)


def test_costs_are_kept_and_can_be_given_again(command, tmp_path):
  """What a step cost on one machine can rule on another."""
  out = tmp_path / "x.jsonl"
  words = (
    "--prompt=abab",
    "--nocompare",
    *SMALL[:3],
    "--config.policy.probe=4",
  )
  assert command(f"--out={out}", *words).code == 0
  manifest = json.loads(out.with_name("x.manifest.json").read_text())
  policy = manifest["reports"]["speculative"]["policy"]
  assert len(policy["costs_s"]) == 4 and min(policy["costs_s"]) > 0
  assert (
    sum(policy["steps_at_depth"]) == manifest["reports"]["speculative"]["steps"]
  )
  again = tmp_path / "y.jsonl"
  costs = tuple(policy["costs_s"])
  ran = command(f"--out={again}", *words, f"--config.policy.costs={costs}")
  assert ran.code == 0, ran.err
  manifest = json.loads(again.with_name("y.manifest.json").read_text())
  report = manifest["reports"]["speculative"]
  assert report["policy"]["costs_s"] == policy["costs_s"]
  assert report["measure_s"] == 0
  bad = command("--prompt=a", *words[1:], "--config.policy.costs=(1.0, 2.0)")
  assert bad.code == 2 and "4 costs above 0 are needed" in bad.err
