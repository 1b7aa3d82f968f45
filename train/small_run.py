"""A training of an experiment: a folder in, parameters out."""

from pathlib import Path
from typing import Any

from spec_jax.base import PyTree
from train import loop
from train.checkpoint import Checkpoints
from train.recipe import Recipe
from train.report import Reporter

__all__ = ["train_through"]


def train_through(
  folder: Path,
  recipe: Recipe,
  batches: Any,
  optimizer: loop.Optimizer,
  schedule: loop.Schedule,
  seed: int,
) -> PyTree:
  """Trains to the end, or goes on; measures and saves no draft on the way.

  Args:
    folder: of the run, made if it is not there.
    recipe: what is trained.
    batches: see `loop.train`.
    optimizer: see `loop.train`.
    schedule: see `loop.train`.
    seed: see `loop.train`.

  Returns:
    The parameters at the end, from this run or from one before.
  """
  folder.mkdir(parents=True, exist_ok=True)
  silent = recipe._replace(measure=None, save=lambda params, folder, info: None)
  checkpoints = Checkpoints(folder / "checkpoints", keep=1)
  try:
    loop.train(
      silent,
      batches,
      optimizer,
      schedule,
      out=folder,
      checkpoints=checkpoints,
      reporter=Reporter(folder),
      seed=seed,
    )
    transform, _ = optimizer.build(schedule.steps)
    found = checkpoints.restore(loop.make_state(silent, transform, seed))
  finally:
    checkpoints.close()
  assert found is not None
  return found[0].params
