"""Checks that commands make before a model is read; each is one plain line."""

from collections.abc import Iterable
import os
from pathlib import Path
import re
from typing import Any

from absl import flags

from experiments.launch import UserError
from spec_jax.hub import Loaded


def at_least(least: int, *holders: flags.FlagHolder[Any]) -> None:
  """Checks flags that hold a number, or several.

  Raises:
    UserError: naming the flag, the least and what it holds.
  """
  for flag in holders:
    several = isinstance(flag.value, list)
    for value in flag.value if several else [flag.value]:
      if value < least:
        raise UserError(f"{flag.name} must be at least {least}, got {value}")
    if several and not flag.value:
      raise UserError(f"{flag.name} must hold a number, got none")


def matching(flag: flags.FlagHolder[Any], names: Iterable[str]) -> list[str]:
  """Returns the names that the regular expression of a flag matches.

  Raises:
    UserError: if it is no regular expression, or matches none of them.
  """
  try:
    wanted = re.compile(flag.value)
  except re.error as error:
    raise UserError(
      f"--{flag.name} is no regular expression: {error}"
    ) from error
  names = list(names)
  found = [name for name in names if wanted.search(name)]
  if not found:
    raise UserError(
      f"--{flag.name}={flag.value!r} matches none of {', '.join(names)}"
    )
  return found


def out_file(path: str | os.PathLike) -> None:
  """Checks that a file can be written; "" stands for none.

  What is there stays as it is; where nothing is, nothing is left.

  Raises:
    UserError: if it cannot.
  """
  if not os.fspath(path):
    return
  place = Path(path)
  try:
    if place.is_dir():
      raise UserError(f"cannot write {path}: it is a folder")
    folder = place.resolve().parent
    if not folder.is_dir():
      raise UserError(f"cannot write {path}: {folder} is no folder")
    made = not os.path.lexists(place)
    with place.open("ab"):
      pass
    if made:
      place.unlink()
  except OSError as error:
    raise UserError(f"cannot write {path}: {error.strerror}") from error


def picture(path: str) -> None:
  """Checks that a plot can be written; "" stands for none.

  Raises:
    UserError: if it cannot, or its name ends in no kind of picture.
  """
  if not path:
    return
  from matplotlib.backend_bases import FigureCanvasBase

  known = FigureCanvasBase.get_supported_filetypes()
  if Path(path).suffix.removeprefix(".").lower() not in known:
    raise UserError(
      f"cannot draw to {path}: its name must end in one of "
      f"{', '.join('.' + kind for kind in sorted(known))}"
    )
  out_file(path)


def slots(loaded: Loaded, given: int, least: int = 1) -> None:
  """Checks the tokens a row has room for against a model's context.

  Raises:
    UserError: naming the range and the number.
  """
  context = loaded.model.config.max_length
  if not least <= given <= context:
    raise UserError(
      f"slots must be at least {least} and at most the model's context of "
      f"{context}, got {given}"
    )
