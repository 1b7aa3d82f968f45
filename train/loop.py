"""One training loop for every recipe.

A step takes `accumulate` micro-batches, adds up gradients and sums, and divides
once by the positions that counted: a batch in pieces is the same batch. Steps
are optimiser steps wherever a number of steps is meant. Metrics are read one
step late, so the device never waits for the host. A step whose loss or
gradient is not finite leaves parameters and optimiser as they were, and ends
the run.
"""

from collections.abc import Callable, Mapping
import dataclasses
from pathlib import Path
import sys
import time
from typing import Any

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import numpy as np
import optax

from spec_jax.base import Array, PyTree
from train.checkpoint import Checkpoints
from train.checks import above, at_least
from train.data import Batches
from train.on_policy import OnPolicyBatches
from train.recipe import Recipe
from train.report import Reporter
from train.stopping import stop_asked

__all__ = [
  "Diverged",
  "Optimizer",
  "Schedule",
  "TrainState",
  "make_state",
  "make_step",
  "train",
]


class Diverged(ValueError):
  """Training ended with a loss or gradient that is not finite."""


@flax.struct.dataclass
class TrainState:
  """Everything the next step needs, besides the data.

  Attributes:
    step: int32, optimiser steps taken.
    params: what is trained.
    opt_state: of the optimiser; only trained parameters have any.
    key: `[2]` uint32, the run's key data; folded with the step, never split.
  """

  step: Array
  params: PyTree
  opt_state: PyTree
  key: Array


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """AdamW with clipping, a linear warm-up and a cosine.

  Attributes:
    learning_rate: at its highest.
    warmup: steps it rises over.
    final: at the last step, as a fraction of the highest.
    clip: largest norm of the gradient; 0 = none.
    weight_decay: of matrices.
    b1: decay of the mean.
    b2: decay of the mean square.
  """

  learning_rate: float = 1e-3
  warmup: int = 50
  final: float = 0.1
  clip: float = 1.0
  weight_decay: float = 0.0
  b1: float = 0.9
  b2: float = 0.95

  def build(self, steps: int):
    """Returns (optax transformation, schedule) of a run of so many steps.

    Raises:
      ValueError: for a number out of range.
    """
    mine = dataclasses.asdict(self)
    above("optimizer", mine, ("learning_rate",), 0)
    for name in ("b1", "b2"):
      if not 0 < mine[name] < 1:
        raise ValueError(
          f"optimizer.{name} must be in (0, 1), got {mine[name]}"
        )
    names = ("warmup", "clip", "weight_decay", "final")
    at_least("optimizer", mine, names, 0)
    if steps < 1:
      raise ValueError(f"steps must be at least 1, got {steps}")
    rise, top = min(self.warmup, steps - 1), self.learning_rate
    schedule = optax.cosine_decay_schedule(top, steps - rise, alpha=self.final)
    if rise:
      # Above 0, or the first step would do nothing.
      up = optax.linear_schedule(top / (self.warmup + 1), top, rise)
      schedule = optax.join_schedules([up, schedule], [rise])
    adam = optax.adamw(
      schedule,
      b1=self.b1,
      b2=self.b2,
      weight_decay=self.weight_decay,
      mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    )
    clip = [optax.clip_by_global_norm(self.clip)] if self.clip else []
    return optax.chain(*clip, adam), schedule


@dataclasses.dataclass(frozen=True)
class Schedule:
  """How long, and how often what happens, in optimiser steps.

  Attributes:
    steps: of the whole run.
    stop_after: leave after this step, to be resumed; 0 = do not.
    accumulate: micro-batches a step.
    log_every: steps between lines of metrics.
    eval_every: steps between measurements by the decoder; 0 = at the end only.
    save_every: steps between checkpoints; 0 = at the end only.
  """

  steps: int
  stop_after: int = 0
  accumulate: int = 1
  log_every: int = 10
  eval_every: int = 0
  save_every: int = 0

  def __post_init__(self):
    for name in ("steps", "accumulate", "log_every"):
      if getattr(self, name) < 1:
        raise ValueError(
          f"{name} must be at least 1, got {getattr(self, name)}"
        )
    for name in ("stop_after", "eval_every", "save_every"):
      if getattr(self, name) < 0:
        raise ValueError(
          f"{name} must be at least 0, got {getattr(self, name)}"
        )


def make_step(
  loss: Callable,
  optimizer: Any,
  schedule: Callable,
  accumulate: int = 1,
  rates: Callable | None = None,
) -> Callable:
  """Makes `step(state, frozen, batch) -> (state, metrics)`.

  Args:
    loss: see `Recipe.loss`.
    optimizer: of optax.
    schedule: step -> learning rate, for the metrics.
    accumulate: `A`; the batch's arrays are `[A, b, T]`.
    rates: see `Recipe.rates`.
  """

  def gradient(params, frozen, batch, key):
    (total, sums), grads = jax.value_and_grad(loss, has_aux=True)(
      params, frozen, batch, key
    )
    return grads, {"loss": total, **sums}

  def step(state: TrainState, frozen: PyTree, batch: Mapping[str, Array]):
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
    keys = jax.random.split(key, accumulate)

    def one(i):
      piece = jax.tree.map(lambda x: x[i], dict(batch))
      return gradient(state.params, frozen, piece, keys[i])

    if accumulate == 1:
      found = one(0)
    else:
      zero = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, 0)
      )

      def body(total, i):
        return jax.tree.map(jnp.add, total, one(i)), None

      found, _ = lax.scan(body, zero, jnp.arange(accumulate))
    grads, sums = found
    tokens = sums.pop("tokens")
    each = 1 / jnp.maximum(tokens, 1)
    grads = jax.tree.map(lambda g: g * each.astype(g.dtype), grads)
    metrics = {name: value * each for name, value in sums.items()}
    norm = optax.tree.norm(grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    if rates is not None:
      updates = jax.tree.map(
        lambda rate, part: jax.tree.map(lambda u: rate * u, part),
        rates(state.step),
        updates,
      )
    params = optax.apply_updates(state.params, updates)
    fine = jnp.isfinite(norm) & jnp.isfinite(metrics["loss"])
    fine = fine & jnp.isfinite(optax.tree.norm(updates))
    params, opt_state = jax.tree.map(
      lambda new, old: jnp.where(fine, new, old),
      (params, opt_state),
      (state.params, state.opt_state),
    )
    metrics |= {
      "tokens": tokens,
      "grad_norm": norm,
      "learning_rate": schedule(state.step),
    }
    new = TrainState(state.step + fine, params, opt_state, state.key)
    return new, metrics

  return step


def make_state(recipe: Recipe, optimizer: Any, seed: int) -> TrainState:
  """Returns the state a run starts with, on the default device."""
  own, run = jax.random.split(jax.random.key(seed))
  # A copy: it may be part of the target, and a step donates its state.
  params = jax.tree.map(jnp.array, recipe.init(own))
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    params=params,
    opt_state=optimizer.init(params),
    key=jax.random.key_data(run),
  )


def state_shardings(
  state: TrainState, of_params: PyTree, optimizer: Any, mesh: Mesh
) -> TrainState:
  """Returns a sharding for each leaf; moments lie with their parameter."""
  whole = NamedSharding(mesh, P())
  return TrainState(  # of shardings
    step=whole,  # type: ignore[arg-type]
    params=of_params,
    opt_state=optax.tree.map_params(
      optimizer,
      lambda _, sharding: sharding,
      state.opt_state,
      of_params,
      transform_non_params=lambda _: whole,
    ),
    key=whole,  # type: ignore[arg-type]
  )


class _Device:
  """Where state, frozen parameters and batches lie, and the compiled step."""

  def __init__(self, recipe, optimizer, rate, state, mesh, accumulate):
    step = make_step(recipe.loss, optimizer, rate, accumulate, recipe.rates)
    self._rows = None
    self.accumulate = accumulate
    self.frozen, self.state = recipe.frozen, state
    if mesh is None:
      # A copy again: the caller's state is not donated.
      self.state = jax.tree.map(jnp.array, state)
      self._step = jax.jit(step, donate_argnums=0)
      return
    of_params, of_frozen = recipe.shardings(mesh)
    places = state_shardings(state, of_params, optimizer, mesh)
    self._rows = NamedSharding(mesh, P(None, "data"))
    self.frozen = jax.device_put(recipe.frozen, of_frozen)
    self.state = jax.device_put(state, places)
    self._step = jax.jit(
      step,
      in_shardings=(places, of_frozen, self._rows),
      out_shardings=(places, None),
      donate_argnums=0,
    )

  def run(self, batch: Mapping[str, np.ndarray]) -> dict[str, Array]:
    """Starts a step; returns its metrics, not yet there."""
    A = self.accumulate
    parts: dict[str, Any] = {
      name: x.reshape(A, -1, *x.shape[1:]) for name, x in batch.items()
    }
    if self._rows is not None:  # each process places its own rows
      parts = {
        name: jax.make_array_from_callback(x.shape, self._rows, x.__getitem__)
        for name, x in parts.items()
      }
    self.state, metrics = self._step(self.state, self.frozen, parts)
    return metrics


def train(
  recipe: Recipe,
  batches: Batches | OnPolicyBatches,
  optimizer: Optimizer,
  schedule: Schedule,
  *,
  out: Path,
  checkpoints: Checkpoints,
  reporter: Reporter,
  seed: int = 0,
  mesh: Mesh | None = None,
  info: Mapping[str, Any] | None = None,
  begin: Callable[[], None] | None = None,
) -> dict[str, Any]:
  """Trains from the last checkpoint, or from the start.

  Args:
    recipe: what is trained.
    batches: of `accumulate` micro-batches each.
    optimizer: and its schedule.
    schedule: how long.
    out: the best draft goes to `out / "best"`.
    checkpoints: where the run is kept.
    reporter: who is told.
    seed: of initial parameters and of the steps' keys.
    mesh: of axes 'data' and 'model', or None.
    info: for the draft's card.
    begin: called when all is read and nothing was written yet.

  Returns:
    The best measurement: "step" and what `Recipe.measure` said.

  Raises:
    Diverged: if loss or gradient are not finite; the last checkpoint and the
      best draft are kept.
    KeyboardInterrupt: after Ctrl-C, with the step saved that was under way; a
      second one does not wait for it.
  """
  transform, rate = optimizer.build(schedule.steps)
  state = make_state(recipe, transform, seed)
  device = _Device(recipe, transform, rate, state, mesh, schedule.accumulate)
  best: dict[str, Any] = {}
  done, seconds = 0, 0.0
  found = checkpoints.restore(device.state)
  if found is not None:
    device.state, kept = found
    if not {"data", "best", "seconds"} <= set(kept or ()):
      raise ValueError("the last checkpoint is damaged: it names no data")
    batches.restore(kept["data"])
    best, done = kept["best"], int(device.state.step)
    seconds = kept["seconds"]
  if begin is not None:
    begin()
  since = time.perf_counter() - seconds
  last = min(schedule.stop_after or schedule.steps, schedule.steps)
  reporter.start(done, schedule.steps)
  pending: tuple[int, dict[str, Array], int] | None = None

  def settle() -> None:
    """Reads the metrics of the step before."""
    nonlocal pending
    if pending is None:
      return
    step, arrays, read = pending
    pending = None
    metrics = {k: float(v) for k, v in jax.device_get(arrays).items()}
    if not np.isfinite([metrics["loss"], metrics["grad_norm"]]).all():
      kept = checkpoints.latest()
      where = (
        f"the checkpoint of step {kept} is kept" if kept else "none is kept"
      )
      raise Diverged(
        f"at step {step} the loss is {metrics['loss']} and the gradient's norm "
        f"{metrics['grad_norm']}: training ends, {where}; a smaller "
        "optimizer.learning_rate may help"
      )
    every = schedule.log_every
    reporter.step(step, metrics, read, write=step % every == 0 or step == last)

  def due(step: int, every: int) -> bool:
    return step == schedule.steps or bool(every and step % every == 0)

  try:
    with stop_asked() as stop:
      for step in range(done + 1, last + 1):
        batches.before(step, device.state.params)
        batch = next(batches)
        metrics = device.run(batch)
        settle()
        pending = step, metrics, int((batch["segment_ids"] > 0).sum())
        measured = due(step, schedule.eval_every)
        saved = measured or step == last or due(step, schedule.save_every)
        saved = saved or stop.is_set()
        if measured or saved:
          settle()
        if measured:
          seconds = time.perf_counter() - since
          card = {**(info or {}), "steps": step, "seconds": round(seconds, 1)}
          best = _measure(recipe, device, step, best, out, reporter, card)
        if saved:
          kept = {
            "data": batches.position(),
            "best": best,
            "seconds": time.perf_counter() - since,
          }
          checkpoints.save(step, device.state, kept)
        if stop.is_set() and saved and step < last:
          print(f"step {step} is saved", file=sys.stderr)
          raise KeyboardInterrupt
    settle()
  finally:
    reporter.close()
    checkpoints.wait()
  return best


def _measure(recipe, device, step, best, out, reporter, info):
  """Measures the draft, keeps it if it is the best, and returns the best."""
  params = device.state.params
  found: dict[str, float] = {}
  if recipe.measure is not None:
    begin = time.perf_counter()
    found = recipe.measure(params)
    reporter.measured(step, found, time.perf_counter() - begin)
    value = found["emitted_per_step"]
    if best and value <= best["emitted_per_step"]:
      return best
  best = {"step": step, **found}
  recipe.save(params, Path(out) / "best", {**info, "metrics": best})
  return best
