"""The loop: sums, meshes, resuming, and runs that go wrong."""

import os
from pathlib import Path
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.launch import UserError
from spec_jax import sharding
from tests import fakes, train_resume_cases, train_rig
from train import loop
from train.checkpoint import RunFolder
from train.report import Reporter, read_metrics
from train.stopping import stop_asked

_ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def recipe():
  """A first layer that learns from two."""
  return train_rig.recipe(train_rig.target())


_MOVING = ("distill_words", "medusa_words", "medusa_joint")
each = pytest.mark.parametrize("name", train_rig.RECIPES)


def _gradient(recipe, batch, accumulate):
  """The gradient of a step, read off a step of plain descent at rate 1."""
  optimizer = optax.sgd(1.0)
  state = loop.make_state(recipe, optimizer, 0)
  step = loop.make_step(recipe.loss, optimizer, lambda i: 1.0, accumulate)
  parts = {
    name: x.reshape(accumulate, -1, *x.shape[1:]) for name, x in batch.items()
  }
  new, metrics = fakes.jit(step)(state, recipe.frozen, parts)
  slope = jax.tree.map(lambda a, b: a - b, state.params, new.params)
  return train_rig.as_numpy(slope), metrics


@each
def test_pieces_of_a_batch_are_the_batch(name):
  """Rows with 10 and 2 valid tokens, at once and one after the other."""
  recipe = train_rig.RECIPES[name](train_rig.target())
  batch = train_rig.stack(train_rig.rows(2))
  batch["weights"][1, :-3] = 0
  counts = batch["weights"].sum(-1)
  assert counts.tolist() == [10, 2]
  whole, metrics = _gradient(recipe, batch, 1)
  pieces, again = _gradient(recipe, batch, 2)
  for a, b in zip(whole, pieces, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-6)
  for name in ("loss", "acceptance", "tokens"):
    np.testing.assert_allclose(metrics[name], again[name], rtol=1e-6)
  # Twin: the mean of the pieces' means is another gradient.
  rows = [{k: v[i : i + 1] for k, v in batch.items()} for i in range(2)]
  each = [_gradient(recipe, row, 1)[0] for row in rows]
  means = [(a + b) / 2 for a, b in zip(*each, strict=True)]
  assert max(abs(a - b).max() for a, b in zip(whole, means, strict=True)) > 1e-3


@each
def test_a_batch_with_nothing_to_predict_changes_nothing(name):
  recipe = train_rig.RECIPES[name](train_rig.target())
  batch = train_rig.stack(train_rig.rows(2))
  batch["weights"][:] = 0
  slope, metrics = _gradient(recipe, batch, 1)
  assert metrics["loss"] == 0
  assert not any(x.any() for x in slope)


@each
@pytest.mark.parametrize("shape", [(2, 4), (8, 1)])
def test_a_mesh_gives_the_loss_and_gradient_of_one_device(shape, name):
  """8 fake devices; 2 key/value heads do not divide 4: whole by rule."""
  recipe = train_rig.RECIPES[name](train_rig.target(meshable=True))
  recipe = recipe._replace(rates=None)  # the gradient itself is compared
  batch = train_rig.stack(train_rig.rows(8, vocab=16))
  batch["weights"][3] = 0  # one device has nothing
  alone, metrics = _gradient(recipe, batch, 1)
  mesh = sharding.make_mesh(*shape)
  optimizer = optax.sgd(1.0)
  state = loop.make_state(recipe, optimizer, 0)
  before = train_rig.as_numpy(state.params)
  device = loop._Device(recipe, optimizer, lambda i: 1.0, state, mesh, 1)
  if name == "distill":
    placed = device.state.params["layers"][0]["wq"].sharding.spec
    assert "model" in placed
  found = device.run(batch)
  np.testing.assert_allclose(found["loss"], metrics["loss"], rtol=1e-5)
  after = train_rig.as_numpy(device.state.params)
  for old, new, slope in zip(before, after, alone, strict=True):
    np.testing.assert_allclose(old - new, slope, atol=1e-5)


@pytest.mark.parametrize(
  "name",
  # Without heads that lack words of the data, and a target that moves.
  [*(n for n in train_rig.RECIPES if n not in _MOVING), "tvd"],
)
def test_one_batch_is_learned_by_heart(name):
  """Acceptance above 99 %; frozen parameters have no optimiser state."""
  if name == "tvd":
    recipe = train_rig.recipe(train_rig.target(), name=name)
  else:
    recipe = train_rig.RECIPES[name](train_rig.target())
  batch = train_rig.stack(train_rig.rows(1))
  steps = 500
  optimizer, schedule = loop.Optimizer(1e-2, warmup=10).build(steps)
  state = loop.make_state(recipe, optimizer, 0)
  sizes = [x.size for x in jax.tree.leaves(state.params)]
  moments = sum(x.size for x in jax.tree.leaves(state.opt_state))
  assert 2 * sum(sizes) <= moments < 2 * sum(sizes) + 8
  step = jax.jit(loop.make_step(recipe.loss, optimizer, schedule))
  parts = {k: jnp.asarray(v)[None] for k, v in batch.items()}
  for _ in range(steps):
    state, metrics = step(state, recipe.frozen, parts)
  assert metrics["acceptance"] > 0.99


def _run(*words):
  env = {**os.environ, "PYTHONPATH": str(_ROOT), "JAX_PLATFORMS": "cpu"}
  done = subprocess.run(
    [sys.executable, "-m", "tests.train_resume_cases", *map(str, words)],
    env=env,
    cwd=_ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-3000:]


def test_a_run_in_two_processes_is_the_run_in_one(tmp_path, recipe):
  """8 steps = 4, stop, 4 in a new process: every bit, data and metrics too."""
  steps = train_resume_cases.STEPS
  _run(tmp_path / "whole", 0, tmp_path / "parts", steps // 2)
  half, _ = train_rig.last_state(tmp_path / "parts", recipe, steps)
  assert half.step == steps // 2
  _run(tmp_path / "parts", 0)
  found = [
    train_rig.last_state(tmp_path / name, recipe, steps)
    for name in ("whole", "parts")
  ]
  assert found[0][0].step == steps
  assert fakes.same(found[0][0], found[1][0])
  assert not fakes.same(found[0][0].params, half.params)
  assert found[0][1]["data"] == found[1][1]["data"]
  assert found[0][1]["data"]["next_index"] == steps
  lines = [
    [
      {k: v for k, v in x.items() if k != "tokens_per_s"}
      for x in read_metrics(f)
    ]
    for f in (tmp_path / "whole", tmp_path / "parts")
  ]
  assert [x["step"] for x in lines[0]] == list(range(1, steps + 1))
  assert lines[0] == lines[1]


def test_a_checkpoint_is_restored_onto_another_mesh(tmp_path):
  recipe = train_rig.recipe(train_rig.target(meshable=True))
  mesh = sharding.make_mesh(2, 2)
  schedule = loop.Schedule(2)
  train_rig.train(tmp_path, recipe, schedule, mesh=mesh)
  optimizer, rate = loop.Optimizer(warmup=2).build(2)
  state = loop.make_state(recipe, optimizer, 0)
  alone, _ = train_rig.last_state(tmp_path, recipe, 2)
  assert not fakes.same(alone.params, state.params)
  for shape in ((1, 2), (2, 4)):
    other = sharding.make_mesh(*shape)
    like = loop._Device(recipe, optimizer, rate, state, other, 1).state
    found, _ = train_rig.last_state(tmp_path, recipe, 2, like)
    assert fakes.same(found, alone)
    places = jax.tree.map(lambda x: x.sharding, (found, like))
    assert jax.tree.all(jax.tree.map(lambda a, b: a == b, *places))


def test_nan_ends_the_run_and_keeps_what_was_saved(tmp_path, recipe):
  """3 good steps, then a loss of NaN: the run can go on from step 3."""
  train_rig.train(tmp_path, recipe, loop.Schedule(8, 3, save_every=3))
  kept, _ = train_rig.last_state(tmp_path, recipe, 8)
  nan = recipe._replace(
    loss=lambda *args: jax.tree.map(lambda x: x * jnp.nan, recipe.loss(*args))
  )
  with pytest.raises(
    loop.Diverged, match=r"at step 4 the loss is nan.*of step 3"
  ):
    train_rig.train(tmp_path, nan, loop.Schedule(8, save_every=3))
  again, _ = train_rig.last_state(tmp_path, recipe, 8)
  assert fakes.same(kept, again)
  assert [x["step"] for x in read_metrics(tmp_path)] == [3]
  train_rig.train(tmp_path, recipe, loop.Schedule(8, save_every=3))
  end, _ = train_rig.last_state(tmp_path, recipe, 8)
  assert end.step == 8


def test_a_run_that_shall_not_hear_ctrl_c_does_not(tmp_path, recipe):
  """A script's background jobs ignore it, and so does the training."""
  usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
  try:
    with stop_asked() as stop:
      signal.raise_signal(signal.SIGINT)
      assert not stop.is_set()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
  finally:
    signal.signal(signal.SIGINT, usual)


def test_ctrl_c_in_the_last_step_loses_nothing(tmp_path, recipe, monkeypatch):
  """The run is complete: it ends as any other."""
  truly = loop._Device.run

  def run(device, batch):
    if int(device.state.step) == 2:
      signal.raise_signal(signal.SIGINT)
    return truly(device, batch)

  monkeypatch.setattr(loop._Device, "run", run)
  train_rig.train(tmp_path, recipe, loop.Schedule(3))
  kept, _ = train_rig.last_state(tmp_path, recipe, 3)
  assert kept.step == 3


def test_ctrl_c_saves_the_step_under_way(tmp_path, recipe, monkeypatch, capsys):
  """And the run that goes on is the run that was never stopped."""
  truly = loop._Device.run

  def run(device, batch):
    if int(device.state.step) == 2:
      signal.raise_signal(signal.SIGINT)
    return truly(device, batch)

  train_rig.train(tmp_path / "whole", recipe, loop.Schedule(5))
  usual = signal.getsignal(signal.SIGINT)
  with monkeypatch.context() as patch:
    patch.setattr(loop._Device, "run", run)
    with pytest.raises(KeyboardInterrupt):
      train_rig.train(tmp_path / "parts", recipe, loop.Schedule(5))
  assert signal.getsignal(signal.SIGINT) is usual
  assert "step 3 is saved" in capsys.readouterr().err
  kept, _ = train_rig.last_state(tmp_path / "parts", recipe, 5)
  assert kept.step == 3
  train_rig.train(tmp_path / "parts", recipe, loop.Schedule(5))
  found = [
    train_rig.last_state(tmp_path / name, recipe, 5)[0]
    for name in ("whole", "parts")
  ]
  assert found[0].step == 5 and fakes.same(*found)


def test_a_step_that_is_not_finite_changes_nothing(recipe):
  optimizer, schedule = loop.Optimizer().build(9)
  state = loop.make_state(recipe, optimizer, 0)
  nan = lambda *args: jax.tree.map(lambda x: x * jnp.nan, recipe.loss(*args))
  batch = {k: v[None] for k, v in train_rig.stack(train_rig.rows(2)).items()}
  step = fakes.jit(loop.make_step(nan, optimizer, schedule))
  new, metrics = step(state, recipe.frozen, batch)
  assert np.isnan(metrics["loss"])
  assert fakes.same(new, state)


def test_the_best_is_kept_by_what_the_decoder_measured(tmp_path, recipe):
  """Measured 1, 3, 2, 3 of 8 steps: step 4 stays, also in a resumed run."""
  values, saved = iter([1.0, 3.0, 2.0, 3.0]), []
  made = recipe._replace(
    measure=lambda params: {"emitted_per_step": next(values)},
    save=lambda params, folder, info: saved.append((folder.name, info)),
  )
  first = loop.Schedule(8, stop_after=4, eval_every=2)
  train_rig.train(tmp_path, made, first)
  best = train_rig.train(tmp_path, made, loop.Schedule(8, eval_every=2))
  assert best == {"step": 4, "emitted_per_step": 3.0}
  assert [(name, x["steps"]) for name, x in saved] == [("best", 2), ("best", 4)]
  measured = [
    (x["step"], x["eval_emitted_per_step"])
    for x in read_metrics(tmp_path)
    if "eval_s" in x
  ]
  assert measured == [(2, 1.0), (4, 3.0), (6, 2.0), (8, 3.0)]


def test_the_rate_counts_optimiser_steps():
  """4 micro-batches a step: the cosine still ends at the last step."""
  _, schedule = loop.Optimizer(1.0, warmup=4, final=0.1).build(20)
  rates = [float(schedule(i)) for i in (0, 2, 4, 12, 20)]
  np.testing.assert_allclose(rates, [0.2, 0.6, 1, 0.55, 0.1], atol=1e-6)


def test_a_rate_without_a_rise_begins_at_its_highest(caplog):
  """Also of a single step; nobody is warned of it."""
  _, schedule = loop.Optimizer(1.0, warmup=0, final=0.1).build(8)
  rates = [float(schedule(i)) for i in (0, 4, 8)]
  np.testing.assert_allclose(rates, [1, 0.55, 0.1], atol=1e-6)
  _, schedule = loop.Optimizer(1.0, warmup=4).build(1)
  assert float(schedule(0)) == 1 and not caplog.records


@pytest.mark.parametrize("name", ["b1", "b2"])
@pytest.mark.parametrize("value", [0.0, 1.0, 1.5, float("nan")])
def test_a_decay_that_is_none_is_refused(name, value):
  with pytest.raises(ValueError, match=f"optimizer.{name} must be in .0, 1.,"):
    loop.Optimizer(**{name: value}).build(8)


def test_tensorboard_is_told_if_it_is_installed(tmp_path, monkeypatch):
  """A stand-in for `tensorboardX` that writes what it is told."""
  (tmp_path / "tensorboardX.py").write_text(
    "class SummaryWriter:\n"
    "  def __init__(self, folder, purge_step):\n"
    "    self.told = [(folder, purge_step)]\n"
    "  def add_scalar(self, *what):\n"
    "    self.told.append(what)\n"
    "  def close(self):\n"
    "    pass\n"
  )
  monkeypatch.syspath_prepend(str(tmp_path))
  reporter = Reporter(tmp_path, quiet=True)
  reporter.start(2, 9)
  told = reporter._board.told
  reporter.step(3, {"loss": 0.5}, 7, write=True)
  reporter.close()
  monkeypatch.delitem(sys.modules, "tensorboardX")
  assert told == [(str(tmp_path / "tensorboard"), 3), ("loss", 0.5, 3)]


def test_metrics_of_steps_that_come_again_are_cut_off(tmp_path):
  reporter = Reporter(tmp_path, quiet=True)
  reporter.start(0, 9)
  for step in (1, 2, 3):
    reporter.step(step, {"loss": step}, 5, write=True)
  reporter.close()
  with open(tmp_path / "metrics.jsonl", "a") as file:
    file.write('{"step": 4, "lo')
  reporter = Reporter(tmp_path, quiet=True)
  reporter.start(2, 9)
  reporter.step(3, {"loss": 30.0}, 5, write=True)
  reporter.close()
  found = [(x["step"], x["loss"]) for x in read_metrics(tmp_path)]
  assert found == [(1, 1), (2, 2), (3, 30)]


def test_a_folder_belongs_to_one_run(tmp_path):
  mine, other = {"x": {"y": 1}, "z": (1, 2)}, {"x": {"y": 2}, "z": (1, 2)}
  first = RunFolder(tmp_path / "a", mine)
  with pytest.raises(UserError, match="another run is writing"):
    RunFolder(tmp_path / "a", mine)
  first.close()
  # Nothing was trained yet: whatever was wrong may be mended.
  second = RunFolder(tmp_path / "a", other)
  second.begin()
  second.close()
  RunFolder(tmp_path / "a", other).close()
  with pytest.raises(UserError, match=r"holds a run with x\.y = 2, not 1"):
    RunFolder(tmp_path / "a", mine)
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match="cannot write"):
    RunFolder(tmp_path / "file" / "a", {})


@pytest.mark.parametrize("text", ["[]", "3", "null", "{", "\x00"])
def test_a_damaged_configuration_of_a_run_is_said(tmp_path, text):
  (tmp_path / "config.json").write_text(text)
  with pytest.raises(UserError, match="is damaged"):
    RunFolder(tmp_path, {})


@pytest.mark.parametrize("text", ["xx", "[1]", '{"loss": 3}'])
def test_a_damaged_line_of_metrics_is_named(tmp_path, text):
  (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{text}\n')
  with pytest.raises(ValueError, match="line 2 is no metric"):
    read_metrics(tmp_path)


def test_one_field_of_a_folder_may_grow(tmp_path):
  def opened(length, other=0):
    identity = {"run": {"length": length, "other": other}}
    return RunFolder(tmp_path, identity, length="run.length")

  for length, ended_at in ((2, None), (4, 2), (4, None), (8, 4)):
    folder = opened(length)
    assert folder.ended_at == ended_at
    folder.begin()
    folder.close()
  assert folder.lengths == [2, 4]
  with pytest.raises(UserError, match=r"run\.length = 8, not 4"):
    opened(4)
  with pytest.raises(UserError, match=r"run\.other = 0, not 1"):
    opened(9, other=1)


@pytest.mark.parametrize(
  "make, words",
  [
    (lambda: loop.Optimizer(learning_rate=0.0).build(9), "learning_rate must"),
    (lambda: loop.Optimizer(clip=-1.0).build(9), "clip must be at least 0"),
    (lambda: loop.Schedule(0), "steps must be at least 1, got 0"),
    (lambda: loop.Schedule(9, save_every=-1), "save_every must be at least 0"),
  ],
)
def test_numbers_out_of_range_are_refused(make, words):
  with pytest.raises(ValueError, match=words):
    make()
