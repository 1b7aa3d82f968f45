"""Reads GGUF files; see `gguf_hf` for what their contents mean.

The header is parsed here: the `gguf` package's own reader makes an object of
every word of the vocabulary (686 MB and 16 s for Gemma's 262,144 words). The
package supplies the block formats and the arithmetic of dequantisation.
"""

import functools
import math
from pathlib import Path
import struct
from typing import Any, NamedTuple

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
import numpy as np

from spec_jax.safetensors_io import LoadError, Tensor

__all__ = ["GGUF", "read_gguf"]

# Value types of the metadata: struct letters by the format's numbers.
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GGUF(NamedTuple):
  """The header of a GGUF file.

  Attributes:
    path: the file.
    metadata: values by key.
    tensors: tensors by GGUF name, shapes in Hugging Face's order.
    header: its bytes up to the list of tensors, for a hash of the vocabulary.
  """

  path: Path
  metadata: dict[str, Any]
  tensors: dict[str, Tensor]
  header: bytes


class _Cursor:
  """Reads values off a file one after the other."""

  def __init__(self, file, size: int):
    self.file, self.size = file, size

  def take(self, num_bytes: int) -> bytes:
    if num_bytes > self.size - self.file.tell():
      raise EOFError
    return self.file.read(num_bytes)

  def scalar(self, letter: str) -> Any:
    return struct.unpack("<" + letter, self.take(struct.calcsize(letter)))[0]

  def string(self) -> str:
    # Byte pieces of a vocabulary may be no UTF-8 of their own.
    return self.take(self.scalar("Q")).decode("utf-8", "replace")

  def value(self, kind: int) -> Any:
    if kind in _SCALARS:
      return self.scalar(_SCALARS[kind])
    if kind == _STRING:
      return self.string()
    if kind != _ARRAY:
      raise ValueError(f"unknown type {kind} of a metadata value")
    kind, count = self.scalar("I"), self.scalar("Q")
    if kind in _SCALARS:
      letter = _SCALARS[kind]
      data = self.take(count * struct.calcsize(letter))
      return np.frombuffer(data, np.dtype("<" + letter)).tolist()
    if count > self.size:  # each entry takes 8 bytes or more
      raise EOFError
    return [self.value(kind) for _ in range(count)]


def read_gguf(path: Path) -> GGUF:
  """Reads a header; tensors are read and dequantised when asked for.

  Args:
    path: the file.

  Returns:
    The header; its tensors read as float32.

  Raises:
    LoadError: if the file is no GGUF of version 2 or 3, is truncated, or holds
      a block format that is not known.
  """
  try:
    with open(path, "rb") as file:
      size = file.seek(0, 2)
      file.seek(0)
      return _parse(path, _Cursor(file, size))
  except EOFError as error:
    raise LoadError(
      f"{path} is truncated: it ends inside its header, at {size} bytes"
    ) from error
  except OSError as error:
    raise LoadError(f"cannot read {path}: {error.strerror}") from error
  except LoadError:
    raise
  except ValueError as error:
    raise LoadError(f"{path} is damaged: {error}") from error


def _parse(path: Path, cursor: _Cursor) -> GGUF:
  if cursor.take(4) != b"GGUF":
    raise LoadError(f"{path} is no GGUF file")
  version = cursor.scalar("I")
  if version not in (2, 3):
    raise LoadError(f"{path} is GGUF version {version}; 2 and 3 are read")
  num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
  metadata = {}
  for _ in range(num_values):
    key = cursor.string()
    metadata[key] = cursor.value(cursor.scalar("I"))
  vocabulary_end = cursor.file.tell()
  entries = []
  for _ in range(num_tensors):
    name, num_axes = cursor.string(), cursor.scalar("I")
    axes = [cursor.scalar("Q") for _ in range(num_axes)]
    entries.append((name, axes[::-1], cursor.scalar("I"), cursor.scalar("Q")))
  alignment = metadata.get("general.alignment", 32)
  if not isinstance(alignment, int) or alignment < 1:
    raise LoadError(f"{path}: general.alignment is {alignment}")
  start = -(-cursor.file.tell() // alignment) * alignment

  tensors = {}
  for name, shape, kind, offset in entries:
    if name in tensors:
      raise LoadError(f"{path}: tensor {name!r} occurs twice")
    tensor, end = _tensor(path, name, tuple(shape), kind, start + offset)
    if end > cursor.size:
      raise LoadError(
        f"{path} is truncated: tensor {name!r} ends at byte {end}, the file"
        f" at {cursor.size}"
      )
    tensors[name] = tensor
  cursor.file.seek(0)
  return GGUF(path, metadata, tensors, cursor.take(vocabulary_end))


def _tensor(path, name, shape, kind, offset) -> tuple[Tensor, int]:
  """Returns a tensor of dequantised rows, and where it ends."""
  try:
    block, block_bytes = _block_format(kind)
  except (KeyError, ValueError, NotImplementedError) as error:
    raise LoadError(
      f"{path}: tensor {name!r} has unknown type {kind}"
    ) from error
  if not shape or shape[-1] % block:
    raise LoadError(
      f"{path}: rows of tensor {name!r} {shape} are no multiple of {block}"
    )
  row_bytes = math.prod(shape[1:]) // block * block_bytes
  if len(shape) == 1:  # one row, read whole: vectors are short
    row_bytes = shape[0] // block * block_bytes

  def read(begin, end):
    first, last = (0, 1) if len(shape) == 1 else (begin, end)
    count, at = (last - first) * row_bytes, offset + first * row_bytes
    data = np.fromfile(path, np.uint8, count, offset=at)
    if data.nbytes != count:
      raise LoadError(f"{path} became shorter while it was read")
    kind_of = GGMLQuantizationType(kind)
    rows = quants.dequantize(data.reshape(last - first, row_bytes), kind_of)
    if len(shape) == 1:
      return rows[0, begin:end]
    return rows.reshape(end - begin, *shape[1:])

  end = offset + math.prod(shape) // block * block_bytes
  return Tensor(shape, np.dtype(np.float32), read), end


@functools.cache
def _block_format(kind: int) -> tuple[int, int]:
  """Returns values and bytes of a block, having tried to dequantise one."""
  block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
  one = np.zeros((1, block_bytes), np.uint8)
  quants.dequantize(one, GGMLQuantizationType(kind))
  return block, block_bytes
