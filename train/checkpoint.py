"""A run's folder: what it may be resumed with, and its checkpoints (orbax)."""

from collections.abc import Mapping
import json
import logging
import os
from pathlib import Path
import tempfile
from typing import Any

import jax

from experiments.launch import UserError
from experiments.results import lock_file

__all__ = ["Checkpoints", "RunFolder"]

_LENGTHS = "prolonged_from"  # a run's earlier lengths, in its config.json


class RunFolder:
  """A folder that one run owns; another configuration is refused.

  Attributes:
    path: of the folder.
    identity: of the run, as JSON gives it back.
    lengths: that the run had before it was prolonged, oldest first.
    ended_at: how long it must be already, as it is to be prolonged now, or
      None.
  """

  def __init__(
    self,
    path: str | os.PathLike,
    identity: Mapping[str, Any],
    length: str = "",
  ):
    """Makes and locks the folder.

    Args:
      path: of the folder.
      identity: what must be equal for the run to be resumed, as plain JSON.
      length: the field (names joined by dots) that may be larger than in the
        folder: the run is prolonged.

    Raises:
      UserError: one line, if it cannot be written, another run writes it, or
        it holds another run.
    """
    self.path = Path(path).expanduser().resolve()
    self.identity = json.loads(json.dumps(identity))
    self.lengths: list[int] = []
    self.ended_at: int | None = None
    self._length = length
    self._file = self.path / "config.json"
    try:
      self.path.mkdir(parents=True, exist_ok=True)
      with tempfile.TemporaryFile(dir=self.path):
        pass  # a folder that takes no file is found now, not hours later
      self._lock = open(self.path / "lock", "a")
    except OSError as error:
      raise UserError(f"cannot write {path}: {error.strerror}") from error
    try:
      lock_file(self._lock, self.path)
      self._check()
    except UserError:
      self._lock.close()
      raise

  def _check(self) -> None:
    if not self._file.exists():
      return
    try:
      theirs = json.loads(self._file.read_text())
      self.lengths = theirs.pop(_LENGTHS, [])
    except (OSError, ValueError, AttributeError, TypeError) as error:
      raise UserError(f"{self._file} is damaged; give another --out") from error
    for name, old, new in _differences(theirs, self.identity):
      longer = name == self._length and type(old) is type(new) and old < new
      if longer:
        self.ended_at, self.lengths = old, [*self.lengths, old]
        continue
      raise UserError(
        f"{self.path} holds a run with {name} = {old!r}, not {new!r}; give "
        "another --out or move it away"
      )

  def begin(self) -> None:
    """Makes the folder this run's: all that could be wrong was checked."""
    if self._file.exists() and self.ended_at is None:
      return
    whole = self.identity | ({_LENGTHS: self.lengths} if self.lengths else {})
    temporary = self._file.with_name("config.json.tmp")
    temporary.write_text(json.dumps(whole, indent=2) + "\n")
    os.replace(temporary, self._file)

  def close(self) -> None:
    """Lets another run have the folder."""
    self._lock.close()


def _differences(a: Any, b: Any, name: str = ""):
  """Yields (name, old, new) where two JSON values differ."""
  if isinstance(a, dict) and isinstance(b, dict):
    for key in sorted(a.keys() | b.keys()):
      inner = f"{name}.{key}" if name else key
      yield from _differences(a.get(key), b.get(key), inner)
  elif a != b:
    yield name, a, b


class Checkpoints:
  """Checkpoints of a training state; a save is whole or not there."""

  def __init__(self, folder: str | os.PathLike, keep: int = 2):
    """Opens a folder, made if it is not there; `keep` of the last are kept."""
    import orbax.checkpoint as ocp

    # It reports every save; the loop does that.
    logging.getLogger("absl").setLevel(logging.WARNING)
    self._ocp = ocp
    self._manager = ocp.CheckpointManager(
      Path(folder).resolve(),
      options=ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        cleanup_tmp_directories=True,
        # Drafts are small, and a failure must be seen where it happens.
        enable_async_checkpointing=False,
      ),
    )

  def latest(self) -> int | None:
    """Returns the step of the last whole checkpoint."""
    return self._manager.latest_step()

  def save(self, step: int, state: Any, extra: Mapping[str, Any]) -> None:
    """Saves a state and a JSON value.

    Raises:
      UserError: if it cannot be written; older checkpoints stay.
    """
    if self.latest() == step:
      return
    args = self._ocp.args
    try:
      self._manager.save(
        step,
        args=args.Composite(
          state=args.StandardSave(state), extra=args.JsonSave(dict(extra))
        ),
      )
    except (OSError, ValueError) as error:
      why = getattr(error, "strerror", None) or error
      raise UserError(f"cannot save step {step}: {why}") from error

  def restore(self, like: Any) -> tuple[Any, dict[str, Any]] | None:
    """Restores the last checkpoint, or returns None if there is none.

    Args:
      like: a state; shapes, dtypes and where each leaf is to lie are taken
        from it, whatever mesh it was saved on.

    Raises:
      UserError: if the checkpoint is of another recipe or draft, or damaged.
    """
    step = self.latest()
    if step is None:
      return None
    args = self._ocp.args
    shapes = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
      like,
    )
    try:
      found = self._manager.restore(
        step,
        args=args.Composite(
          state=args.StandardRestore(shapes), extra=args.JsonRestore()
        ),
      )
    except (OSError, ValueError, KeyError, TypeError) as error:
      why = str(error).strip().partition("\n")[0][:200]
      raise UserError(
        f"the checkpoint of step {step} does not fit this run, or is damaged "
        f"(without {self._manager.directory / str(step)} the one before it is "
        f"taken): {why}"
      ) from error
    return found["state"], found["extra"]

  def wait(self) -> None:
    """Waits until what was saved is on disk."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    """Ends the manager."""
    self._manager.close()
