"""Drafters, one file each, found by name.

A file has `build(target, draft, *, slots, **options) -> Drafter`, whose
keyword options are the drafter's settings, and `TAKES_DRAFT = True` if it asks
a draft model, or a function of its options, `takes_draft(**options) -> bool`.
`TAKES_HEADS` (or `takes_heads`) names the kind of trained heads its draft is.
`TAKES_VOCABULARY_MAP = True` says that the draft's tokenizer may differ from
the target's: `build` is then given a `vocabulary_map`, which is no option of
the command line.
"""

import ast
from collections.abc import Mapping
import importlib
import pkgutil
from typing import Any

from spec_jax.base import Drafter, Model
from spec_jax.heads import Heads
from spec_jax.options import (
  check_known,
  check_options,
  options_of,
  types_of,
)
from spec_jax.vocabulary_map import VocabularyMap

# Arguments of `build` that are no options: found out, not chosen.
_FOUND = ("slots", "vocabulary_map")


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
  return options_of(module.build, leave_out=_FOUND)


def option_types() -> dict[str, type]:
  """Returns every option that a drafter has, and its type."""
  found: dict[str, type] = {}
  for name in names():
    module = importlib.import_module(f"{__name__}.{name}")
    found |= types_of(module.build, leave_out=_FOUND)
  return found


def takes_draft(name: str, options: Mapping[str, Any] | None = None) -> bool:
  """Tells whether a drafter asks a draft model: its file says so.

  Args:
    name: a file of this folder.
    options: the drafter's options; those that are missing have their defaults.

  Raises:
    ValueError: if an option that decides is no drafter.
  """
  return _said(name, "takes_draft", options, False)


def takes_heads(
  name: str, options: Mapping[str, Any] | None = None
) -> str | None:
  """Returns the kind of heads that a drafter takes as its draft, or None.

  Args:
    name: a file of this folder.
    options: as of `takes_draft`.

  Raises:
    ValueError: if an option that decides is no drafter.
  """
  return _said(name, "takes_heads", options, None)


def _said(
  name: str, what: str, options: Mapping[str, Any] | None, usual: Any
) -> Any:
  """Returns what a drafter's file says: a function, a constant, or nothing."""
  module = importlib.import_module(f"{__name__}.{name}")
  decides = getattr(module, what, None)
  if decides is None:
    return getattr(module, what.upper(), usual)
  known = options_of(decides)
  return decides(**{k: v for k, v in (options or {}).items() if k in known})


def parse(spec: str) -> tuple[str, dict[str, Any]]:
  """Reads a drafter with options, as they are given to another drafter.

  `"prompt_lookup(num_draft=7, match='first')"` gives
  `("prompt_lookup", {"num_draft": 7, "match": "first"})`, `"none"` gives
  `("none", {})`.

  Raises:
    ValueError: if it is not of this form, or there is no such drafter or
      option.
  """
  wrong = f"a drafter is given as name or name(option=value, ...), got {spec!r}"
  try:
    call = ast.parse(spec.strip(), mode="eval").body
  except SyntaxError as error:
    raise ValueError(wrong) from error
  settings: dict[str, Any] = {}
  if isinstance(call, ast.Call):
    if call.args:
      raise ValueError(wrong)
    for keyword in call.keywords:
      if keyword.arg is None or keyword.arg in settings:
        raise ValueError(wrong)
      try:
        settings[keyword.arg] = ast.literal_eval(keyword.value)
      except (ValueError, TypeError) as error:
        raise ValueError(
          f"option {keyword.arg!r} in {spec!r} must be a number, a text in "
          f"quotes, True, False, None or a tuple of those"
        ) from error
    call = call.func
  if not isinstance(call, ast.Name):
    raise ValueError(wrong)
  check_known(f"drafter {call.id!r}", settings, options(call.id))
  return call.id, settings


def takes_vocabulary_map(name: str) -> bool:
  """Tells whether a drafter's draft may have a tokenizer of its own."""
  module = importlib.import_module(f"{__name__}.{name}")
  return getattr(module, "TAKES_VOCABULARY_MAP", False)


def build(
  name: str,
  target: Model,
  draft: Model | Heads | None,
  *,
  slots: int,
  vocabulary_map: VocabularyMap | None = None,
  **settings,
) -> Drafter:
  """Builds a drafter by name.

  Args:
    name: a file of this folder.
    target: the target model.
    draft: the draft model, for drafters that have one.
    slots: `S`, tokens a row may hold.
    vocabulary_map: of target and draft, if their tokenizers may differ.
    **settings: the drafter's options.

  Raises:
    ValueError: for an unknown drafter or option, an option out of range, or a
      map for a drafter that takes none.
  """
  options(name)  # refuses a name that there is not
  module = importlib.import_module(f"{__name__}.{name}")
  check_options(f"drafter {name!r}", settings, module.build, _FOUND)
  if vocabulary_map is not None:
    if not takes_vocabulary_map(name):
      raise ValueError(f"drafter {name!r} takes no vocabulary map")
    settings["vocabulary_map"] = vocabulary_map
  return module.build(target, draft, slots=slots, **settings)
