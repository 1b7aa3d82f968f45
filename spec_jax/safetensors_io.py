"""Reads safetensors files without torch, exact bits, one tensor at a time.

Files are read with plain reads into buffers that are dropped at once, never
mapped: mapped pages would count as this process's memory, and a parameter must
not change when its file does.
"""

from collections.abc import Callable
import json
import math
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

__all__ = ["LoadError", "Tensor", "open_safetensors"]

_DTYPES = {
  "F64": np.dtype(np.float64),
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(ml_dtypes.bfloat16),
  "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
  "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
  "I64": np.dtype(np.int64),
  "I32": np.dtype(np.int32),
  "I16": np.dtype(np.int16),
  "I8": np.dtype(np.int8),
  "U64": np.dtype(np.uint64),
  "U32": np.dtype(np.uint32),
  "U16": np.dtype(np.uint16),
  "U8": np.dtype(np.uint8),
  "BOOL": np.dtype(np.bool_),
}
# The format's own limit on the header, 100 MB.
_MAX_HEADER = 100_000_000


class LoadError(ValueError):
  """A model that cannot be loaded for a reason its user can mend.

  The message is one plain line.
  """

  def __init__(self, message: str):
    super().__init__(" ".join(message.split()))


class Tensor(NamedTuple):
  """A tensor in a file, not yet read.

  Attributes:
    shape: as Hugging Face stores it.
    dtype: numpy dtype of what `read` returns.
    read: `read(start, stop) -> array`, those rows of the first axis; a fresh
      array each time.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  read: Callable[[int, int], np.ndarray]


def open_safetensors(path: Path) -> dict[str, Tensor]:
  """Reads the header of a safetensors file; tensors are read when asked for.

  Args:
    path: the file.

  Returns:
    Tensors by name; bits are those of the file, bfloat16 included.

  Raises:
    LoadError: if the header is damaged, or the file's size is not the one its
      header states.
  """
  header, start, size = _read_header(path)
  tensors, spans = {}, []
  for name, entry in header.items():
    if name == "__metadata__":
      continue
    try:
      dtype = _DTYPES[entry["dtype"]]
      shape = tuple(int(n) for n in entry["shape"])
      begin, end = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
      raise LoadError(f"{path}: bad entry for tensor {name!r}") from error
    num_bytes = math.prod(shape) * dtype.itemsize
    if min((*shape, begin), default=0) < 0 or end - begin != num_bytes:
      raise LoadError(
        f"{path}: tensor {name!r} of shape {shape} and dtype {dtype} takes"
        f" {num_bytes} bytes, the header gives it {begin} to {end}"
      )
    spans.append((begin, end, name))
    tensors[name] = _file_tensor(path, start + begin, shape, dtype)
  position = 0
  for begin, end, name in sorted(spans):
    if begin != position:
      raise LoadError(
        f"{path}: tensor {name!r} starts at byte {begin} of the data,"
        f" expected {position}"
      )
    position = end
  if start + position != size:
    raise LoadError(
      f"{path} is {'truncated' if size < start + position else 'damaged'}:"
      f" {size} bytes, its header says {start + position}"
    )
  return tensors


def _read_header(path: Path) -> tuple[dict, int, int]:
  """Returns the header, where the data starts, and the file's size."""
  try:
    with open(path, "rb") as file:
      size = file.seek(0, 2)
      file.seek(0)
      length = int.from_bytes(file.read(8), "little")
      if size < 8 or length > min(size - 8, _MAX_HEADER):
        raise LoadError(
          f"{path} is truncated or no safetensors file: {size} bytes, a header"
          f" of {length} bytes"
        )
      header = json.loads(file.read(length))
  except OSError as error:
    raise LoadError(f"cannot read {path}: {error.strerror}") from error
  except ValueError as error:
    if isinstance(error, LoadError):
      raise
    raise LoadError(f"{path}: its header is not JSON") from error
  if not isinstance(header, dict):
    raise LoadError(f"{path}: its header is not a JSON object")
  return header, 8 + length, size


def _file_tensor(path, offset, shape, dtype) -> Tensor:
  row = math.prod(shape[1:])

  def read(begin, end):
    count = (end - begin) * row
    at = offset + begin * row * dtype.itemsize
    data = np.fromfile(path, np.uint8, count * dtype.itemsize, offset=at)
    if data.nbytes != count * dtype.itemsize:
      raise LoadError(f"{path} became shorter while it was read")
    return data.view(dtype).reshape((end - begin, *shape[1:]) if shape else ())

  return Tensor(shape, dtype, read)
