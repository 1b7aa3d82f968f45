"""Drafters, one file each, found by name.

A file has `build(target, draft, *, slots, **options) -> Drafter`, whose
keyword options are the drafter's settings, and `TAKES_DRAFT = True` if it asks
a draft model.
"""

import importlib
import inspect
import pkgutil
from typing import Any

from spec_jax.base import Drafter, Model


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
  return {
    key: parameter.default
    for key, parameter in inspect.signature(module.build).parameters.items()
    if parameter.kind == parameter.KEYWORD_ONLY and key != "slots"
  }


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
  known = options(name)
  unknown = sorted(set(settings) - set(known))
  if unknown:
    raise ValueError(
      f"drafter {name!r} has no option {unknown[0]!r}; it has "
      f"{', '.join(known) or 'none'}"
    )
  module = importlib.import_module(f"{__name__}.{name}")
  return module.build(target, draft, slots=slots, **settings)
