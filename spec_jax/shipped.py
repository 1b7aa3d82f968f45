"""Trained drafts that come with this package, and which one is the default.

`assets/` holds a folder for each target that has some, and in it folders as
`train.main` writes them. A draft belongs to the exact weights it was trained
for: another quantisation of the same model is another target.
"""

from collections.abc import Mapping
import os
from pathlib import Path
from typing import Any, NamedTuple

from spec_jax import drafters, hub, trained
from spec_jax.hub import Loaded

__all__ = [
  "ALONE",
  "AUTO",
  "HEAD_OPTIONS",
  "Choice",
  "choose",
  "draft_for",
  "find",
  "folder_of",
]

_ASSETS = Path(__file__).parent / "assets"
# Before the name of a draft here, which is the same on every machine.
_PREFIX = "shipped:"
# Stands for the best drafter that a target can have here without more files.
AUTO = "auto"
# The drafter that needs nothing, and the one that needs an EAGLE head.
ALONE = "prompt_lookup"
_WITH_HEAD = "merge"
HEAD_OPTIONS = {
  "first": "prompt_lookup",
  "second": "eagle(num_nodes=8, depth=4)",
}


class Choice(NamedTuple):
  """A drafter and what it is built with.

  Attributes:
    drafter: its name.
    options: its options.
    draft: the name of its draft, or None.
  """

  drafter: str
  options: dict[str, Any]
  draft: str | None


def find(loaded: Loaded, kind: str) -> str | None:
  """Returns the name of a target's shipped draft, or None.

  For example `shipped:smollm2-135m-instruct/eagle`, see `folder_of`.

  Args:
    loaded: the target; its weights need not be read yet.
    kind: of the draft, as a card says: "layers", "medusa" or "eagle".
  """
  for path in sorted(_ASSETS.glob(f"*/*/{trained.CARD}")):
    try:
      trained.read_card(path.parent, loaded, (kind,))
    except hub.LoadError:
      continue  # of another target, or it cannot be used
    return f"{_PREFIX}{path.parent.relative_to(_ASSETS).as_posix()}"
  return None


def folder_of(name: str | os.PathLike) -> str | os.PathLike:
  """Returns the folder of a shipped draft; another path as it is.

  Raises:
    LoadError: if no such draft ships.
  """
  if not str(name).startswith(_PREFIX):
    return name
  cards = _ASSETS.glob(f"*/*/{trained.CARD}")
  names = [x.parent.relative_to(_ASSETS).as_posix() for x in sorted(cards)]
  wanted = str(name).removeprefix(_PREFIX)
  if wanted not in names:
    there = ", ".join(_PREFIX + x for x in names)
    raise hub.LoadError(f"no draft {str(name)!r} ships; there are {there}")
  return _ASSETS / wanted


def choose(loaded: Loaded) -> Choice:
  """Returns the drafter that `AUTO` stands for with a target."""
  name = find(loaded, "eagle")
  if name is None:
    return Choice(ALONE, {}, None)
  return Choice(_WITH_HEAD, dict(HEAD_OPTIONS), name)


def draft_for(
  loaded: Loaded, drafter: str, options: Mapping[str, Any] | None
) -> str | None:
  """Returns the shipped draft for a drafter that was given none, or None."""
  if drafter not in drafters.names():
    return None
  if not drafters.takes_draft(drafter, options):
    return None
  kind = drafters.takes_heads(drafter, options) or "layers"
  return find(loaded, kind)
