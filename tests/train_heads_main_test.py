"""The training command for heads, from data to text decoded with them."""

import json
import shutil

from commands import built_once as built_once, run_generate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from train_main_test import _run, folder as folder

import spec_jax
from spec_jax import heads as heads_lib, kernels, pairing, shipped, trained
from spec_jax.builtin import sha256_of

# ml_collections reads configuration files the old way.
pytestmark = pytest.mark.filterwarnings(
  "ignore:.*load_module:DeprecationWarning"
)

_SMALL = (
  "--config.data.length=48",
  "--config.train.steps=4",
  "--config.train.batch_size=2",
  "--config.eval.every=2",
  "--config.eval.max_new_tokens=8",
  "--config.eval.prompts=2",
  "--config.eval.batch_size=2",
  "--config.eval.num_nodes=6",
  "--config.loss.chunk=0",
)
_KINDS = {
  "medusa": ("--config.draft.heads=2", "--config.draft.words=0"),
  "medusa_words": (
    "--config.draft.heads=2",
    "--config.draft.words=40",
    "--config.draft.words_by=count",
  ),
  "eagle": (
    "--config.draft.taps=(0,1,2)",
    "--config.draft.words=32",
    "--config.loss.steps=2",
    "--config.eval.depth=2",
    "--config.eval.width=2",
  ),
  "eagle_1": (
    "--config.draft.version=1",
    "--config.draft.words=0",
    "--config.loss.steps=1",
    "--config.eval.depth=2",
    "--config.eval.width=3",
  ),
}


def _train(folder, name, out, monkeypatch, capsys, *words):
  """Runs a recipe's configuration on the tiny model."""
  return _run(
    "main",
    f"configs/{name}.py",
    monkeypatch,
    capsys,
    f"--config.model={folder / 'model'}",
    f"--config.data.files=('{folder / 'chats.jsonl'}',)",
    f"--out={out}",
    *_SMALL,
    *words,
  )


@pytest.fixture(scope="module")
def trained_folder(folder):
  """Trains a kind once; returns where its best lies."""
  done = {}

  def train(kind, monkeypatch, capsys):
    if kind not in done:
      name = kind.split("_")[0]
      out = folder / f"run_{kind}"
      code, _, err = _train(
        folder,
        name,
        out,
        monkeypatch,
        capsys,
        *_KINDS[kind],
      )
      assert code == 0, err
      done[kind] = out / "best"
    return done[kind]

  return train


def _decode(folder, drafter, draft, monkeypatch, capsys, *words):
  return run_generate(
    monkeypatch,
    capsys,
    f"--config.model={folder / 'model'}",
    f"--config.drafter.name={drafter}",
    f"--config.drafter.draft={draft}",
    "--config.policy.name=fixed",
    "--config.sampling.max_new_tokens=6",
    "--prompt=say one twice",
    *words,
  )


@pytest.mark.parametrize("kind", _KINDS)
def test_heads_are_trained_saved_and_decode(
  kind, folder, trained_folder, monkeypatch, capsys
):
  """From the command to the command; the text stays the target's."""
  best = trained_folder(kind, monkeypatch, capsys)
  card = json.loads((best / trained.CARD).read_text())
  name = kind.split("_")[0]
  assert card["kind"] == name
  assert card["metrics"]["emitted_per_step"] >= 1
  if name == "medusa":
    assert len(card["heads"]["accuracies"]) == 2
  # Nothing of the target is stored: neither embedding nor output matrix.
  assert (best / card["weights"]).stat().st_size < 31_000
  done = _decode(folder, name, best, monkeypatch, capsys)
  assert done.code == 0, done.err
  assert "identical text                     yes" in done.out


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("kernel", ["on", "off"])
def test_what_is_read_is_what_was_trained(
  kind, kernel, folder, trained_folder, monkeypatch, capsys
):
  """Shapes, rounded weights, and the output matrix's own columns."""
  best = trained_folder(kind, monkeypatch, capsys)
  loaded = spec_jax.load(folder / "model", cpu_kernel=kernel)
  plain = spec_jax.load(folder / "model", cpu_kernel="off")
  heads, own = pairing.resolve_draft(loaded, str(best))
  assert isinstance(heads, heads_lib.Heads)
  words = heads.config.words
  if words.own_matrix:
    ids = np.asarray(own.get("ids", np.arange(words.size)))
    assert (np.diff(ids) > 0).all() and ids.max() < words.target_size
    _, flat = pairing.resolve_draft(plain, str(best))
    columns = np.asarray(plain.params["head"])[:, ids]
    np.testing.assert_array_equal(flat["head"], columns)
  again, _ = pairing.resolve_draft(loaded, str(best))
  assert again is heads  # programs are found again
  packed = [
    x
    for x in jax.tree.leaves(
      own, is_leaf=lambda x: isinstance(x, kernels.Packed)
    )
    if isinstance(x, kernels.Packed)
  ]
  assert bool(packed) == (kernel == "on")
  assert all(x.panels.dtype == jnp.bfloat16 for x in packed)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(own))


@pytest.mark.parametrize("kind", ["medusa_words", "eagle"])
def test_heads_are_trained_on_a_mesh(
  kind, folder, tmp_path, monkeypatch, capsys
):
  """2 x 2 devices: trained, measured by the decoder there, and saved."""
  name = kind.split("_")[0]
  code, _, err = _train(
    folder,
    name,
    tmp_path / "run",
    monkeypatch,
    capsys,
    *_KINDS[kind],
    "--config.mesh=2x2",
  )
  assert code == 0, err
  card = json.loads((tmp_path / "run/best" / trained.CARD).read_text())
  assert card["metrics"]["emitted_per_step"] >= 1


def test_heads_beside_copying(folder, trained_folder, monkeypatch, capsys):
  """One tree of prompt lookup and an EAGLE head."""
  best = trained_folder("eagle", monkeypatch, capsys)
  done = _decode(
    folder,
    "merge",
    best,
    monkeypatch,
    capsys,
    "--config.drafter.second=eagle(num_nodes=4, depth=2, width=2)",
  )
  assert done.code == 0, done.err
  assert "identical text                     yes" in done.out


def test_heads_and_target_trained_together_belong_together(
  folder, tmp_path, monkeypatch, capsys
):
  """Medusa-2: another target is written, and its heads are for it alone."""
  out = tmp_path / "joint"
  code, _, err = _train(
    folder,
    "medusa_joint",
    out,
    monkeypatch,
    capsys,
    *_KINDS["medusa"],
    "--config.joint.heads_first=1",
    "--config.optimizer.learning_rate=0.01",
  )
  assert code == 0, err
  best = out / "best"
  args = monkeypatch, capsys
  words = (
    "--config.drafter.name=medusa",
    f"--config.drafter.draft={best}",
    "--config.sampling.max_new_tokens=6",
    "--prompt=say one twice",
  )
  done = run_generate(*args, f"--config.model={best / 'target'}", *words)
  assert done.code == 0, done.err
  assert "identical text                     yes" in done.out
  done = run_generate(*args, f"--config.model={folder / 'model'}", *words)
  assert done.code == 2 and "was trained for another target" in done.err
  before = spec_jax.load(folder / "model", cpu_kernel="off").params
  after = spec_jax.load(best / "target", cpu_kernel="off").params
  np.testing.assert_array_equal(
    np.asarray(before["embed"]).astype("bfloat16"),
    np.asarray(after["embed"]).astype("bfloat16"),
  )
  moved = before["layers"][0]["wq"] - after["layers"][0]["wq"]
  assert np.abs(moved).max() > 1e-3


def test_few_words_and_short_answers_are_no_trouble(
  folder, tmp_path, monkeypatch, capsys
):
  """Heads of two words; one answer token a prompt; more heads than rows."""
  for i, words in enumerate(
    (
      ("--config.draft.words=2", "--config.eval.num_nodes=7"),
      ("--config.draft.words=0", "--config.eval.max_new_tokens=1"),
      ("--config.draft.words=0", "--config.draft.heads=50"),
    )
  ):
    code, _, err = _train(
      folder,
      "medusa",
      tmp_path / str(i),
      monkeypatch,
      capsys,
      "--config.draft.heads=2",
      "--config.train.steps=1",
      *words,
    )
    assert code == 0, err
    if i == 0:
      assert "the draft's 2 words are " in err


@pytest.mark.parametrize(
  "drafter,message",
  [
    ("vanilla", "needs a draft model, got medusa heads"),
    ("eagle", "needs eagle heads, got medusa heads"),
    ("prompt_lookup", "takes no draft model"),
    ("slem", "needs a draft model, got medusa heads"),
    ("tli", "needs a draft model, got medusa heads"),
  ],
)
def test_heads_for_another_drafter_are_one_line(
  drafter, message, folder, trained_folder, monkeypatch, capsys
):
  best = trained_folder("medusa", monkeypatch, capsys)
  done = _decode(folder, drafter, best, monkeypatch, capsys)
  assert done.code == 2 and message in done.err
  assert done.err.count("\n") == 1


def test_heads_for_another_target_are_one_line(
  folder, trained_folder, monkeypatch, capsys
):
  best = trained_folder("eagle", monkeypatch, capsys)
  done = run_generate(
    monkeypatch,
    capsys,
    f"--config.model={folder / 'other'}",
    "--config.drafter.name=eagle",
    f"--config.drafter.draft={best}",
    "--prompt=a",
  )
  assert done.code == 2 and "was trained for another target" in done.err


@pytest.mark.parametrize("wrong", [5000, -7])
def test_words_that_are_none_of_the_targets_are_refused(
  wrong, trained_folder, folder, tmp_path, monkeypatch, capsys
):
  """A file whose hash is right is no sound file yet."""
  best = trained_folder("medusa_words", monkeypatch, capsys)
  draft = tmp_path / "draft"
  shutil.copytree(best, draft)
  card = json.loads((draft / trained.CARD).read_text())
  tensors = load_file(draft / card["weights"])
  tensors["ids"][0] = wrong
  save_file(tensors, draft / card["weights"])
  card["weights_sha256"] = sha256_of(draft / card["weights"])
  (draft / trained.CARD).write_text(json.dumps(card))
  done = _decode(folder, "medusa", draft, monkeypatch, capsys)
  assert done.code == 2 and "must rise within" in done.err


@pytest.mark.parametrize(
  "name,words,message",
  [
    ("medusa", "--config.draft.heads=0", "draft.heads must be at least 1"),
    ("medusa", "--config.draft.words_by=luck", "words_by must be id or count"),
    ("medusa", "--config.loss.head_decay=2", "head_decay must be in"),
    ("eagle", "--config.draft.version=2", "draft.version must be 1 or 3"),
    ("eagle", "--config.loss.steps=0", "loss.steps must be in"),
    ("eagle", "--config.draft.taps=(0,1)", "looks at 3 layers"),
    ("eagle", "--config.draft.taps=(0,1,99)", "are not in [0, "),
    ("eagle", "--config.on_policy.part=0.5", "takes no on_policy.part"),
    ("eagle", "--config.draft.taps=(0.5,1,2)", "draft.taps holds integers"),
    ("eagle", "--config.loss.noise=nan", "loss.noise must be at least 0"),
    ("eagle", "--config.eval.depth=0", "depth must be at least 1"),
    ("eagle", "--config.train.remat=True", "train.remat is for recipes"),
    ("eagle", "--config.draft.words=-1", "draft.words must be at least 0"),
    (
      "medusa",
      "--config.eval.temperature=nan",
      "temperature must be a float32",
    ),
    ("medusa", "--config.draft.heads=65", "draft.heads must be at most 64"),
    ("medusa", "--config.eval.num_nodes=900", "eval.num_nodes must be in"),
    ("medusa", "--config.optimizer.learning_rate=nan", "learning_rate must be"),
    ("medusa", "--config.train.keep=0", "train.keep must be at least 1"),
    ("medusa", "--config.data.limit=-1", "data.limit must be at least 0"),
    ("medusa", "--config.seed=-1", "config.seed must be at least 0"),
    ("medusa", "--config.execution.cpu_kernel=on", "needs plain arrays"),
    ("medusa_joint", "--config.joint.head_rate=nan", "head_rate must be above"),
  ],
)
def test_what_a_user_can_mend_is_one_line(
  name, words, message, folder, tmp_path, monkeypatch, capsys
):
  code, _, err = _train(
    folder,
    name,
    tmp_path / "run",
    monkeypatch,
    capsys,
    *(() if "draft." in words else _KINDS[name.split("_")[0]]),
    words,
  )
  assert code == 2 and message in err, err


def test_a_head_that_comes_with_the_package_is_the_default(
  folder, trained_folder, tmp_path, monkeypatch, capsys
):
  """Merged with prompt lookup, for its own target alone; also from Python."""
  best = trained_folder("eagle", monkeypatch, capsys)
  shutil.copytree(best, tmp_path / "tiny" / "eagle")
  monkeypatch.setattr(shipped, "_ASSETS", tmp_path)

  def run(model, *words):
    done = run_generate(
      monkeypatch,
      capsys,
      f"--config.model={folder / model}",
      "--config.policy.name=fixed",
      "--config.sampling.max_new_tokens=6",
      "--prompt=say one twice",
      *words,
    )
    assert done.code == 0, done.err
    assert "identical text                     yes" in done.out
    return done.err

  assert "| drafter merge" in run("model")
  assert "| drafter prompt_lookup" in run("other")
  assert "| drafter prompt_lookup" in run(
    "model", "--config.drafter.num_draft=2"
  )
  assert "| drafter eagle" in run("model", "--config.drafter.name=eagle")
  other = "--config.drafter.name=eagle", f"--config.model={folder / 'other'}"
  done = run_generate(monkeypatch, capsys, *other)
  assert done.code == 2 and "needs --config.drafter.draft" in done.err
  loaded = spec_jax.load(folder / "model")
  name, _, place = shipped.choose(loaded)
  assert name == "merge" and place == "shipped:tiny/eagle"
  small = {"batch_size": 1, "slots": 64}
  asked = {"settings": spec_jax.Settings(max_new_tokens=6), **small}
  plain = spec_jax.generate(loaded, "one", **asked)
  auto = spec_jax.generate(loaded, "one", drafter="auto", **asked)
  assert auto.ids == plain.ids and auto.report["drafted"] > 0
  with pytest.raises(ValueError, match="'auto' chooses its draft"):
    spec_jax.generate(loaded, "one", drafter="auto", draft=place, **asked)
