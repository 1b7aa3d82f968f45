"""Options of things that are chosen by name: found in signatures, checked."""

from collections.abc import Callable, Collection, Iterable
import inspect
from typing import Any


def options_of(function: Callable, leave_out: Collection[str] = ()) -> dict:
  """Returns a function's keyword-only parameters and their defaults."""
  parameters = inspect.signature(function).parameters.values()
  return {
    p.name: p.default
    for p in parameters
    if p.kind == p.KEYWORD_ONLY and p.name not in leave_out
  }


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
