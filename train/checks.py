"""Checks of numbers in a configuration; a NaN is in no range."""

from collections.abc import Iterable
from typing import Any

__all__ = ["above", "at_least", "chunk_and_file", "integers"]

_LARGEST = 1e30


def at_least(part: str, values: Any, names: Iterable[str], low: float) -> None:
  """Checks that fields are numbers from `low` on.

  Args:
    part: of the configuration, for messages.
    values: the part; fields are read as `values[name]`.
    names: fields.
    low: the least.

  Raises:
    ValueError: naming the first that is not.
  """
  for name in names:
    if not low <= values[name] <= _LARGEST:
      raise ValueError(
        f"{part}.{name} must be at least {low}, got {values[name]}"
      )


def above(part: str, values: Any, names: Iterable[str], low: float) -> None:
  """Checks that fields are numbers above `low`, as `at_least`."""
  for name in names:
    if not low < values[name] <= _LARGEST:
      raise ValueError(f"{part}.{name} must be above {low}, got {values[name]}")


def integers(name: str, values: Iterable[Any]) -> tuple[int, ...]:
  """Returns values that are integers.

  Raises:
    ValueError: if one is not.
  """
  found = tuple(values)
  if not all(type(i) is int for i in found):
    raise ValueError(f"{name} holds integers, got {found}")
  return found


def chunk_and_file(config: Any) -> None:
  """Checks `loss.chunk` and `dtype_saved`, which every recipe has.

  Raises:
    ValueError: naming the field.
  """
  chunk, length = config.loss.chunk, config.data.length
  if chunk < 0 or (chunk and length % chunk):
    raise ValueError(
      f"loss.chunk must divide data.length {length}, got {chunk}"
    )
  if config.dtype_saved not in ("bfloat16", "float32"):
    raise ValueError(
      f"dtype_saved must be bfloat16 or float32, got {config.dtype_saved!r}"
    )
