"""What a run says while it trains: a bar, JSON lines, TensorBoard."""

from collections.abc import Mapping
import importlib
import importlib.util
import json
import os
from pathlib import Path
import sys
import time
from typing import Any

from tqdm import tqdm

__all__ = ["Reporter", "read_metrics"]

METRICS = "metrics.jsonl"


def read_metrics(folder: str | os.PathLike) -> list[dict[str, Any]]:
  """Returns the lines of a run's metrics; a torn last line is left out."""
  found = []
  try:
    lines = (Path(folder) / METRICS).read_text("utf-8").split("\n")
  except FileNotFoundError:
    return []
  for number, line in enumerate(lines[:-1], 1):
    try:
      found.append(json.loads(line))
      found[-1]["step"]  # what its readers go by
    except (ValueError, TypeError, KeyError) as error:
      raise ValueError(
        f"{Path(folder) / METRICS} line {number} is no metric of a run"
      ) from error
  return found


class Reporter:
  """Tells of a run in three ways; `metrics.jsonl` has no step twice."""

  def __init__(self, folder: str | os.PathLike, *, quiet: bool = False):
    """Args: the run's folder; `quiet` shows nothing on the screen."""
    self._folder, self._quiet = Path(folder), quiet
    self._bar: Any = None
    self._file: Any = None
    self._board: Any = None
    self._shown: dict[str, str] = {}
    self._compiled = False
    # Tokens and seconds since the last line.
    self._tokens, self._since = 0, time.perf_counter()

  def start(self, done: int, steps: int) -> None:
    """Begins at `done` steps of `steps`; lines of later steps are cut off.

    They are of a run that was killed after its last checkpoint, and come
    again.
    """
    if done and not self._quiet:
      print(f"goes on after step {done} of {steps}", file=sys.stderr)
    kept = [x for x in read_metrics(self._folder) if x["step"] <= done]
    path = self._folder / METRICS
    temporary = path.with_name(f"{METRICS}.tmp")
    temporary.write_text("".join(json.dumps(x) + "\n" for x in kept))
    os.replace(temporary, path)
    self._file = open(path, "a", encoding="utf-8")
    if importlib.util.find_spec("tensorboardX") is not None:
      writer = importlib.import_module("tensorboardX").SummaryWriter
      self._board = writer(
        str(self._folder / "tensorboard"), purge_step=done + 1
      )
    if not self._quiet:
      self._bar = tqdm(total=steps, initial=done, unit="step", disable=None)
    self._since = time.perf_counter()

  def step(
    self, step: int, metrics: Mapping[str, float], read: int, *, write: bool
  ) -> None:
    """Tells of a step.

    Args:
      step: its number, from 1.
      metrics: of the step.
      read: tokens it read, padding left out.
      write: whether it gets a line.
    """
    if self._compiled:
      self._tokens += read
    else:  # the first step compiled: no measure of speed
      self._compiled, self._since = True, time.perf_counter()
    if self._bar is not None:
      self._bar.update(1)
    if not write:
      return
    now = time.perf_counter()
    line = dict(metrics)
    self._shown |= {
      "loss": f"{metrics['loss']:.3f}",
      "acc": f"{metrics.get('acceptance', float('nan')):.3f}",
    }
    if self._tokens:
      speed = self._tokens / max(now - self._since, 1e-9)
      line["tokens_per_s"] = speed
      self._shown["tok/s"] = f"{speed:.0f}"
    self._tokens, self._since = 0, now
    self._write(step, line)
    self._show(step)

  def measured(
    self, step: int, found: Mapping[str, float], seconds: float
  ) -> None:
    """Tells what the decoder measured."""
    line = {f"eval_{k}": v for k, v in found.items()}
    self._write(step, {**line, "eval_s": seconds})
    self._shown["tok/step"] = f"{found['emitted_per_step']:.2f}"
    self._show(step)
    self._since += seconds  # measuring is not training

  def _write(self, step: int, values: Mapping[str, Any]) -> None:
    if self._file is not None:
      self._file.write(json.dumps({"step": step, **values}) + "\n")
      self._file.flush()
    if self._board is not None:
      for name, value in values.items():
        self._board.add_scalar(name, value, step)

  def _show(self, step: int) -> None:
    if self._bar is None:
      return
    self._bar.set_postfix(self._shown, refresh=False)
    if self._bar.disable:  # not a terminal: a line now and then
      words = ", ".join(f"{k} {v}" for k, v in self._shown.items())
      print(f"step {step} of {self._bar.total}: {words}", file=sys.stderr)

  def close(self) -> None:
    """Ends the bar and the files."""
    for one in (self._bar, self._file, self._board):
      if one is not None:
        one.close()
    self._bar = self._file = self._board = None
