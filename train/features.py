"""The target's states that recipes read, made in each step or kept on disk.

By default the target runs in the same program as what is trained: nothing is
stored, and at real sizes nothing could be. For a small target and several
epochs or recipes `data.features` names a folder instead: the states of every
row are written there once, bfloat16, and read again by whichever run has the
same target, the same rows and taps. A state is then rounded to 8 bits of
mantissa; decoding is not touched by it.
"""

from collections.abc import Mapping, Sequence
import contextlib
import hashlib
import json
import os
from pathlib import Path
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from tqdm import tqdm

from experiments.launch import UserError
from experiments.results import lock_file
from spec_jax.base import Array, Model, PyTree
from spec_jax.models.decoder import FINAL

__all__ = ["FIELD", "Features", "keep", "of_batch", "read"]

# The field of a batch that holds states.
FIELD = "features"


def read(target: Model, params: PyTree, batch: Mapping[str, Array]) -> Array:
  """Returns `[B, T, n, D]`, the states that a target shows over a batch.

  Args:
    target: shows its final state, or the taps it was built with.
    params: its parameters.
    batch: see `data.pack`.
  """
  return target.apply(
    params,
    batch["tokens"],
    positions_BT=batch["positions"],
    segment_ids=batch["segment_ids"],
    logits_at=jnp.zeros((batch["tokens"].shape[0], 0), jnp.int32),
  ).hidden


def of_batch(
  target: Model, params: PyTree, batch: Mapping[str, Array]
) -> Array:
  """Returns what `read` does, from the batch if it brings it; no gradient."""
  if FIELD in batch:
    return batch[FIELD].astype(params["final_norm"].dtype)
  return jax.lax.stop_gradient(read(target, params, batch))


class Features(Sequence):
  """States of rows on disk; `features[i]` is `[T, n, D]` bfloat16."""

  def __init__(self, arrays: Sequence[np.ndarray]):
    """Takes one `[rows, T, D]` array for each tap."""
    self._arrays = tuple(arrays)

  def __len__(self) -> int:
    """Returns how many rows there are."""
    return len(self._arrays[0])

  def __getitem__(self, i):
    """Returns the states of row `i`."""
    return np.stack([x[i] for x in self._arrays], 1)


def keep(
  folder: str | os.PathLike,
  target: Model,
  taps: Sequence[int],
  params: PyTree,
  rows: Sequence[Mapping[str, np.ndarray]],
  identity: Mapping[str, Any],
) -> Features:
  """Returns the states of rows, written now where they are not there yet.

  Each tap is a file that grows by whole rows, so what was killed goes on.

  Args:
    folder: of all caches; each target and data have a folder of their own.
    target: shows `taps`.
    taps: layers, or `FINAL`.
    params: of the target.
    rows: see `data.pack`.
    identity: of the target and of how it computes, as plain JSON.

  Raises:
    UserError: one line, if the folder cannot be written, is too small, or
      another run writes it.
  """
  shape = len(rows), len(rows[0]["tokens"]), target.config.width
  about = {"target": dict(identity), "rows": _digest(rows), "shape": shape}
  written = json.dumps(about, sort_keys=True)
  place = (
    Path(folder).expanduser()
    / hashlib.sha256(written.encode()).hexdigest()[:16]
  )
  names = ["final" if tap == FINAL else str(tap) for tap in taps]
  paths = [place / f"tap_{name}.bfloat16" for name in names]
  size = shape[1] * shape[2] * 2  # bytes of a row
  if any(_rows_in(path, size) != shape[0] for path in paths):
    try:
      place.mkdir(parents=True, exist_ok=True)
      with open(place / "lock", "a") as lock:
        lock_file(lock, place)
        (place / "about.json").write_text(json.dumps(about, indent=2) + "\n")
        _write(paths, target, params, rows, size)
    except OSError as error:
      raise UserError(f"cannot write {place}: {error.strerror}") from error
  return Features(
    [np.memmap(path, ml_dtypes.bfloat16, "r", shape=shape) for path in paths]
  )


def _rows_in(path: Path, size: int) -> float:
  """Returns how many rows of `size` bytes a file holds."""
  return path.stat().st_size / size if path.exists() else 0


def _digest(rows: Sequence[Mapping[str, np.ndarray]]) -> str:
  """Returns a hash of all that the target's states depend on."""
  found = hashlib.sha256()
  for row in rows:
    for name in ("tokens", "segment_ids", "positions"):
      found.update(row[name].tobytes())
  return found.hexdigest()


# Rows that are read together.
_ROWS = 4


def _write(
  paths: Sequence[Path],
  target: Model,
  params: PyTree,
  rows: Sequence[Mapping[str, np.ndarray]],
  size: int,
) -> None:
  """Appends to each file the rows it lacks, of `size` bytes each."""
  T = len(rows[0]["tokens"])
  # A tap may be asked for twice; it is one file.
  held = {path: int(_rows_in(path, size)) for path in paths}
  start = min(held.values())
  need = sum(len(rows) - n for n in held.values()) * size
  free = shutil.disk_usage(paths[0].parent).free
  if need > free:
    raise UserError(
      f"the states of {len(rows)} rows take {need / 1e9:.1f} GB more in "
      f"{paths[0].parent}, where {free / 1e9:.1f} GB are free"
    )
  run = jax.jit(
    lambda params, batch: read(target, params, batch).astype(jnp.bfloat16)
  )
  bar = tqdm(
    total=len(rows) * T,
    initial=start * T,
    unit="tok",
    unit_scale=True,
    desc="states",
    disable=None,
  )
  with contextlib.ExitStack() as stack:
    stack.enter_context(bar)
    files = {p: stack.enter_context(open(p, "ab")) for p in held}
    for path, file in files.items():
      file.truncate(held[path] * size)
    for first in range(start, len(rows), _ROWS):
      some = rows[first : first + _ROWS]
      few = [some[min(i, len(some) - 1)] for i in range(_ROWS)]
      batch = {
        name: np.stack([row[name] for row in few])
        for name in ("tokens", "segment_ids", "positions")
      }
      states = np.asarray(run(params, batch))[: len(some)]
      for path, file in files.items():
        new = states[max(0, held[path] - first) :, :, paths.index(path)]
        file.write(np.ascontiguousarray(new).tobytes())
        file.flush()
      bar.update(len(some) * T)
