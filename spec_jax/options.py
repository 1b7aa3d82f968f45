"""Options of things that are chosen by name: found in signatures, checked."""

from collections.abc import Callable, Collection, Iterable, Mapping
import inspect
import numbers
import types
from typing import Any, Union, get_args, get_origin, get_type_hints

# What is accepted for a type; a sequence may be anything that is no text.
_TAKEN: dict[type, Any] = {
  bool: bool,
  int: numbers.Integral,
  float: numbers.Real,
  str: str,
}
_NAMES = {
  bool: "True or False",
  int: "an integer",
  float: "a number",
  str: "a text",
  tuple: "a sequence",
}


def options_of(function: Callable, leave_out: Collection[str] = ()) -> dict:
  """Returns a function's keyword-only parameters and their defaults."""
  parameters = inspect.signature(function).parameters.values()
  return {
    p.name: p.default
    for p in parameters
    if p.kind == p.KEYWORD_ONLY and p.name not in leave_out
  }


def types_of(function: Callable, leave_out: Collection[str] = ()) -> dict:
  """Returns the type that each keyword-only parameter takes.

  One of bool, int, float, str, or tuple for any sequence; None in a union says
  that the parameter may be left alone.
  """
  hints = get_type_hints(function)
  return {
    name: _simple(hints[name]) for name in options_of(function, leave_out)
  }


def _simple(hint: Any) -> type:
  if get_origin(hint) in (Union, types.UnionType):
    kinds = [a for a in get_args(hint) if a is not types.NoneType]
    return _simple(kinds[0])
  if hint in (bool, int, float, str):
    return hint
  return tuple


def check_options(
  kind: str,
  given: Mapping[str, Any],
  function: Callable,
  leave_out: Collection[str] = (),
) -> None:
  """Checks names and types of options, see `check_known` and `check_types`.

  Raises:
    ValueError: naming the first that is unknown or of another type.
  """
  check_known(kind, given, options_of(function, leave_out))
  check_types(kind, given, function)


def check_unused(
  function: Callable, given: Mapping[str, Any], reason: str
) -> None:
  """Checks that options which have no use beside others were left alone.

  Args:
    function: whose keyword-only parameters they are.
    given: their values.
    reason: why they have no use, for example "where a tree is given".

  Raises:
    ValueError: naming the first that is not its default.
  """
  defaults = options_of(function)
  for name, value in given.items():
    if value != defaults[name]:
      raise ValueError(f"{name} has no use {reason}, got {value}")


def check_types(
  kind: str, given: Mapping[str, Any], function: Callable
) -> None:
  """Checks the types of options against a function's annotations.

  Args:
    kind: what they are given to, for example "drafter 'vanilla'".
    given: options by name, all of which it has.
    function: whose keyword-only parameters they are; None is allowed where it
      is the default.

  Raises:
    ValueError: naming the first that is of another type.
  """
  defaults, wanted = options_of(function), types_of(function)
  for name, value in given.items():
    if value is None and defaults[name] is None:
      continue
    kinds = _TAKEN.get(wanted[name])
    truth = isinstance(value, bool) and wanted[name] is not bool
    if kinds is None:
      wrong = isinstance(value, str | bool | numbers.Number)
    else:
      wrong = truth or not isinstance(value, kinds)
    if wrong:
      what = _NAMES[wanted[name]]
      raise ValueError(f"{name} of {kind} must be {what}, got {value!r}")


def check_known(kind: str, given: Iterable[str], known: dict[str, Any]) -> None:
  """Checks the names of options.

  Args:
    kind: what they are given to, for example "drafter 'vanilla'".
    given: their names.
    known: the options it has.

  Raises:
    ValueError: naming the first that it does not have, and all that it has.
  """
  unknown = sorted(set(given) - set(known))
  if unknown:
    raise ValueError(
      f"{kind} has no option {unknown[0]!r}; it has "
      f"{', '.join(known) or 'none'}"
    )
