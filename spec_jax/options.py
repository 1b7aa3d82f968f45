"""Options of things that are chosen by name: found in signatures, checked."""

from collections.abc import Callable, Collection, Iterable
import inspect
import types
from typing import Any, Union, get_args, get_origin, get_type_hints


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
