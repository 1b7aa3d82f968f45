"""The training commands, from data to a draft that decodes."""

import importlib
import json
import re
import shutil
import sys

from absl import flags
from commands import built_once as built_once, read_lines, run_generate
import numpy as np
import pytest
from tiny_model import tiny_model

from experiments import launch, prompts
import spec_jax
from spec_jax import pairing, trained

# ml_collections reads configuration files the old way.
pytestmark = pytest.mark.filterwarnings(
  "ignore:.*load_module:DeprecationWarning"
)

_SMALL = (
  "--config.draft.layers=1",
  "--config.data.length=48",
  "--config.loss.chunk=0",
  "--config.train.steps=6",
  "--config.train.batch_size=2",
  "--config.eval.every=3",
  "--config.eval.max_new_tokens=8",
  "--config.eval.prompts=2",
  "--config.eval.batch_size=2",
  "--config.eval.num_draft=2",
)


def _clear():
  """Takes away what commands defined: flags are global, names the same."""
  for module in ("generate", "main", "plot"):
    sys.modules.pop(f"train.{module}", None)
  own = ("chat", "compare", "dry_run", "out", "prompt", "prompts", "runs")
  own += ("config", "stop_after", "trace")
  for name in list(flags.FLAGS):
    if name in own or name.startswith("config."):
      delattr(flags.FLAGS, name)
  flags.FLAGS.unparse_flags()


def _run(name, config, monkeypatch, capsys, *words):
  """Runs a command of train/ in this process; returns (code, out, err)."""
  monkeypatch.setattr(sys, "argv", [name, *words])
  _clear()
  capsys.readouterr()
  code = 0
  try:
    module = importlib.import_module(f"train.{name}")
    launch.run(module.main, config and prompts.root(config))
  except SystemExit as end:
    code = end.code
  finally:
    _clear()
  shown = capsys.readouterr()
  return code, shown.out, shown.err


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A model, another one of the same shape, data."""
  path = tmp_path_factory.mktemp("train")
  tiny_model(path / "model")
  tiny_model(path / "other", seed=1)
  lines = [
    {"prompt": f"say {word} twice", "answer": f"{word} {word}"}
    for word in "one two three four five six seven eight nine ten".split()
  ]
  text = "".join(json.dumps(x) + "\n" for x in lines)
  (path / "chats.jsonl").write_text(text)
  return path


@pytest.fixture
def train(folder, monkeypatch, capsys):
  """Runs `train.main` on the tiny model."""

  def run(*words):
    return _run(
      "main",
      "configs/distill.py",
      monkeypatch,
      capsys,
      f"--config.model={folder / 'model'}",
      f"--config.data.files=('{folder / 'chats.jsonl'}',)",
      *_SMALL,
      *words,
    )

  return run


@pytest.fixture(scope="module")
def run_folder(folder):
  """Where the run of the first test lies; the others use its draft."""
  return folder / "run"


def test_a_run_ends_with_a_draft_and_goes_on_after_a_stop(train, run_folder):
  code, _, err = train(f"--out={run_folder}", "--stop_after=3")
  assert code == 0, err
  assert "8 examples in" in err and "2 prompts held out" in err
  code, out, err = train(f"--out={run_folder}")
  assert code == 0, err
  assert "best: step " in out
  lines = read_lines(run_folder / "metrics.jsonl")
  measured = [x["step"] for x in lines if "eval_emitted_per_step" in x]
  assert measured == [3, 6]
  card = json.loads((run_folder / "best" / trained.CARD).read_text())
  assert card["layers"] == [0]
  assert card["config"]["loss"]["name"] == "forward_kl"
  assert card["metrics"]["emitted_per_step"] >= 1
  assert {"commit", "date"} <= card["environment"].keys()
  # Nothing that is shared with the target is stored twice.
  file = run_folder / "best" / card["weights"]
  assert file.stat().st_size < 40_000


def test_only_a_run_that_has_ended_is_prolonged(train, folder):
  """Six steps of a cosine, then on at the middle of one of twelve."""
  out = folder / "long"
  longer = f"--out={out}", "--config.train.steps=12"
  assert train(f"--out={out}", "--stop_after=3")[0] == 0
  code, _, err = train(*longer)
  assert code == 2 and "stands at step 3 of 6" in err
  assert train(f"--out={out}")[0] == 0  # it was left as it was
  code, _, err = train(*longer, "--config.optimizer.learning_rate=0.5")
  assert code == 2 and "holds a run with optimizer.learning_rate" in err
  assert train(*longer)[0] == 0
  lines = [x for x in read_lines(out / "metrics.jsonl") if "loss" in x]
  assert lines[-1]["step"] == 12
  assert json.loads((out / "config.json").read_text())["prolonged_from"] == [6]
  code, _, err = train(f"--out={out}")
  assert code == 2 and "train.steps = 12, not 6" in err


def test_a_prolongation_that_fails_leaves_the_run_as_it_was(
  train, folder, run_folder, tmp_path
):
  whole = (folder / "chats.jsonl").read_text()
  held = (run_folder / "config.json").read_text()
  changed = tmp_path / "chats.jsonl"
  changed.write_text(whole.replace('"three three"', '"three four"'))
  try:
    changed.replace(folder / "chats.jsonl")
    code, _, err = train(f"--out={run_folder}", "--config.train.steps=11")
  finally:
    (folder / "chats.jsonl").write_text(whole)
  assert code == 2 and "the data has changed" in err
  assert (run_folder / "config.json").read_text() == held


def test_states_kept_on_disk_train_the_same_draft(train, folder, run_folder):
  states = folder / "states"
  kept = f"--config.data.features={states}"
  code, _, err = train(f"--out={folder / 'kept'}", kept)
  assert code == 0, err
  assert len(list(states.glob("*/tap_final.bfloat16"))) == 1
  losses = [
    [x["loss"] for x in read_lines(run / "metrics.jsonl") if "loss" in x][-1]
    for run in (folder / "kept", run_folder)
  ]
  np.testing.assert_allclose(*losses, rtol=0.05)
  words = "--config.on_policy.part=0.5", f"--out={folder / 'mixed'}"
  code, _, err = train(kept, *words)
  assert code == 2 and "data.features keeps the target's states" in err


def test_the_draft_decodes_and_is_what_was_measured(folder, run_folder):
  """By path, in Python: the held-out prompts give the card's number."""
  loaded = spec_jax.load(folder / "model", cpu_kernel="off")
  card = json.loads((run_folder / "best" / trained.CARD).read_text())
  lines = (folder / "chats.jsonl").read_text().splitlines()
  held_out = [
    [{"role": "user", "content": json.loads(lines[i])["prompt"]}]
    for i in (0, 5)
  ]
  out = spec_jax.generate(
    loaded,
    held_out,
    drafter="vanilla",
    draft=str(run_folder / "best"),
    options={"num_draft": 2},
    settings=spec_jax.Settings(max_new_tokens=8),
    batch_size=2,
  )
  measured = card["metrics"]["emitted_per_step"]
  assert out.report["emitted_per_step"] == pytest.approx(measured)
  model, params = pairing.resolve_draft(loaded, str(run_folder / "best"))
  assert model.config.num_layers == 1
  assert params["embed"] is loaded.params["embed"]
  start = loaded.params["layers"][0]["wq"]
  assert np.abs(params["layers"][0]["wq"] - start).max() > 1e-5


def _decode(folder, draft, monkeypatch, capsys, model="model"):
  return run_generate(
    monkeypatch,
    capsys,
    f"--config.model={folder / model}",
    "--config.drafter.name=vanilla",
    f"--config.drafter.draft={draft}",
    "--config.policy.name=fixed",
    "--config.sampling.max_new_tokens=4",
    "--prompt=a",
  )


def test_the_command_decodes_with_it(folder, run_folder, monkeypatch, capsys):
  done = _decode(folder, run_folder / "best", monkeypatch, capsys)
  assert done.code == 0, done.err
  assert "identical text                     yes" in done.out


def _damage(draft, how):
  card = json.loads((draft / trained.CARD).read_text())
  if how == "weights":
    with open(draft / card["weights"], "r+b") as file:
      file.seek(-1, 2)
      file.write(b"\xff")
  elif how == "card":
    (draft / trained.CARD).write_text('{"format": 1')
  elif how == "kind":
    card["kind"] = "other"
  elif how == "layers":
    card["layers"] = [0, 1]
  elif how == "tokenizer":
    card["target"]["tokenizer_sha256"] = "0" * 64
  elif how == "width":
    card["target"]["width"] = 999
  if how not in ("weights", "card"):
    (draft / trained.CARD).write_text(json.dumps(card))


@pytest.mark.parametrize(
  "how, words",
  [
    ("other", "was trained for another target .* its weights_sha256 is"),
    ("tokenizer", "another target .* its tokenizer_sha256 is 000000000000"),
    ("width", "another target .* its width is 999, that of .* is 32"),
    ("weights", "is missing or damaged"),
    ("card", "is no card of a trained draft"),
    ("kind", "of kind 'other', not layers or medusa or eagle"),
    ("layers", r"tensor layers\.1\..* has shape None"),
  ],
)
def test_a_draft_that_does_not_fit_is_one_line(
  how, words, folder, run_folder, tmp_path, monkeypatch, capsys
):
  draft = tmp_path / "draft"
  shutil.copytree(run_folder / "best", draft)
  _damage(draft, how)
  model = "other" if how == "other" else "model"
  done = _decode(folder, draft, monkeypatch, capsys, model)
  assert done.code == 2
  (line,) = [x for x in done.err.splitlines() if x.startswith("error: ")]
  assert re.search(words, line), line


_WRONG = {
  "no out": ((), "--out is needed"),
  "recipe": (("--config.recipe=magic",), "unknown recipe 'magic'; there is"),
  "loss": (("--config.loss.name=mse",), "loss.name must be one of forward_kl"),
  "beta": (("--config.loss.beta=1.0",), r"loss.beta must be in \(0, 1\)"),
  "chunk": (
    ("--config.loss.chunk=7",),
    "loss.chunk must divide data.length 48",
  ),
  "layers": (
    ("--config.draft.layers=3",),
    r"layers must be in \[1, 2\], got 3",
  ),
  "name": (("--config.draft.layers=x",), "draft.layers must be a number"),
  "steps": (("--config.train.steps=0",), "steps must be at least 1"),
  "length": (("--config.data.length=9999",), r"data.length must be in \[2,"),
  "draft": (("--config.eval.num_draft=0",), "num_draft must be at least 1"),
  "deep": (("--config.eval.num_draft=2000",), "at most 1024 nodes, got 2001"),
  "law": (("--config.eval.temperature=nan",), "temperature must be a float32"),
  "held": (("--config.eval.prompts=99",), "99 examples are to be held out"),
  "mesh": (("--config.mesh=8x1",), "train.batch_size 2 is not a multiple"),
  "field": (("--config.data.colour=1",), "unknown field|colour"),
}


@pytest.mark.parametrize("case", _WRONG)
def test_what_a_user_can_mend_is_one_line(case, train, tmp_path):
  words, expected = _WRONG[case]
  out = () if case == "no out" else (f"--out={tmp_path / 'run'}",)
  code, _, err = train(*out, *words)
  assert code == 2
  (line,) = [x for x in err.splitlines() if x.startswith("error: ")]
  assert re.search(expected, line), line
  # Nothing is begun: the mended command may have the same folder.
  assert {x.name for x in tmp_path.glob("run/*")} <= {"lock"}


def test_a_folder_of_another_run_is_left_alone(train, run_folder, tmp_path):
  before = (run_folder / "metrics.jsonl").read_bytes()
  code, _, err = train(f"--out={run_folder}", "--config.loss.name=tvd")
  assert code == 2
  assert "holds a run with loss.name = 'forward_kl', not 'tvd'" in err
  assert (run_folder / "metrics.jsonl").read_bytes() == before
  (tmp_path / "file").write_text("")
  code, _, err = train(f"--out={tmp_path / 'file' / 'run'}")
  assert code == 2 and "error: cannot write" in err


def test_bad_data_names_file_and_line(train, tmp_path):
  (tmp_path / "bad.jsonl").write_text('{"text": "a b c d"}\n{"text"\n')
  code, _, err = train(
    f"--out={tmp_path / 'run'}",
    f"--config.data.files=('{tmp_path / 'bad.jsonl'}',)",
  )
  assert code == 2
  assert "bad.jsonl line 2 is not JSON" in err


def test_a_run_may_move_to_a_mesh_and_learn_from_its_own_answers(
  train, tmp_path
):
  """Two steps on one device, two on a mesh; the draft wrote twice."""
  words = (
    f"--out={tmp_path / 'run'}",
    "--config.eval.prompts=0",
    "--config.on_policy.part=0.5",
    "--config.on_policy.refresh=2",
    "--config.on_policy.prompts=2",
    "--config.train.steps=4",
    "--config.train.log_every=1",
  )
  code, _, err = train(*words, "--stop_after=2")
  assert code == 0, err
  code, _, err = train(*words, "--config.mesh=2x1")
  assert code == 0, err
  wrote = sorted(x.name for x in (tmp_path / "run" / "on_policy").iterdir())
  assert wrote == ["step-00000000.jsonl", "step-00000002.jsonl"]
  lines = read_lines(tmp_path / "run" / "metrics.jsonl")
  assert [x["step"] for x in lines] == [1, 2, 3, 4]
  assert trained.is_trained(tmp_path / "run" / "best")


def test_answers_are_written_once_and_are_plain_decodings(
  folder, tmp_path, monkeypatch, capsys
):
  """A file whose last line is torn is completed; no answer changes."""
  (tmp_path / "prompts.txt").write_text(
    "".join(f"word {i}\n" for i in range(9))
  )
  out = tmp_path / "answers.jsonl"
  words = (
    f"--config.model={folder / 'model'}",
    f"--prompts={tmp_path / 'prompts.txt'}",
    f"--out={out}",
    "--config.sampling.max_new_tokens=6",
    "--config.sampling.temperature=0.8",
    "--config.sampling.num_samples=2",
    "--config.policy.name=fixed",
    "--config.drafter.name=none",
  )
  run = lambda: _run(
    "generate", "configs/generate.py", monkeypatch, capsys, *words
  )
  code, said, err = run()
  assert code == 0, err
  assert "18 of 18 answers" in said
  first = {x["prompt"]: x for x in read_lines(out)}
  assert sorted(first) == list(range(18))
  assert first[0]["prompt_ids"] == first[1]["prompt_ids"]
  assert first[0]["ids"] != first[1]["ids"]
  lines = out.read_text().splitlines(keepends=True)
  out.write_text("".join(lines[:7]) + lines[7][:9])
  assert run()[0] == 0
  assert {x["prompt"]: x for x in read_lines(out)} == first


def test_answers_that_are_not_the_targets_own_are_refused(
  folder, tmp_path, monkeypatch, capsys
):
  (tmp_path / "prompts.txt").write_text("word\n")
  words = (
    f"--config.model={folder / 'model'}",
    f"--prompts={tmp_path / 'prompts.txt'}",
    f"--out={tmp_path / 'answers.jsonl'}",
    "--config.verifier.name=typical",
    "--config.drafter.name=prompt_lookup",
  )
  code, _, err = _run(
    "generate", "configs/generate.py", monkeypatch, capsys, *words
  )
  assert code == 2 and "would not be the target's own answers" in err


def test_metrics_are_plotted(run_folder, tmp_path, monkeypatch, capsys):
  words = (f"--runs={run_folder}", f"--out={tmp_path / 'plot.png'}")
  code, _, err = _run("plot", "", monkeypatch, capsys, *words)
  assert code == 0, err
  assert (tmp_path / "plot.png").stat().st_size > 5000
  words = (f"--runs={tmp_path}", f"--out={tmp_path / 'plot.png'}")
  code, _, err = _run("plot", "", monkeypatch, capsys, *words)
  assert code == 2 and "holds no metrics.jsonl" in err
