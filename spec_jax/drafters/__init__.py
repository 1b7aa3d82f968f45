"""Drafters, one file each, found by name.

A file has `build(target, draft, *, slots, **options) -> Drafter`, whose
keyword options are the drafter's settings, and `TAKES_DRAFT = True` if it asks
a draft model.
"""

import importlib
import pkgutil
from typing import Any

from spec_jax.base import Drafter, Model
from spec_jax.options import check_known, options_of, types_of


def names() -> list[str]:
  """Returns the drafters that have a file here."""
  return sorted(m.name for m in pkgutil.iter_modules(__path__))


def options(name: str) -> dict[str, Any]:
  """Returns a drafter's options and their defaults.

  Raises:
    ValueError: if there is no such drafter.
  """
  if name not in names():
    raise ValueError(
      f"unknown drafter {name!r}; there are {', '.join(names())}"
    )
  module = importlib.import_module(f"{__name__}.{name}")
  return options_of(module.build, leave_out=("slots",))


def option_types() -> dict[str, type]:
  """Returns every option that a drafter has, and its type."""
  found: dict[str, type] = {}
  for name in names():
    module = importlib.import_module(f"{__name__}.{name}")
    found |= types_of(module.build, leave_out=("slots",))
  return found


def takes_draft(name: str) -> bool:
  """Tells whether a drafter asks a draft model: its file says so."""
  module = importlib.import_module(f"{__name__}.{name}")
  return getattr(module, "TAKES_DRAFT", False)


def build(
  name: str, target: Model, draft: Model | None, *, slots: int, **settings
) -> Drafter:
  """Builds a drafter by name.

  Args:
    name: a file of this folder.
    target: the target model.
    draft: the draft model, for drafters that have one.
    slots: `S`, tokens a row may hold.
    **settings: the drafter's options.

  Raises:
    ValueError: for an unknown drafter or option, or an option out of range.
  """
  check_known(f"drafter {name!r}", settings, options(name))
  module = importlib.import_module(f"{__name__}.{name}")
  return module.build(target, draft, slots=slots, **settings)
