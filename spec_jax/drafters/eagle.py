"""EAGLE: a trained head drafts from the target's features and its own.

By default the tree grows where the head is most sure (EAGLE-2, and EAGLE-3 with
a head of version 3); a static tree is EAGLE-1, and a chain may be drawn from
the head's law. How the head keeps up with the text is told in `eagle_model.py`.

Reference: Li et al. 2024 (EAGLE, EAGLE-2), 2025 (EAGLE-3).
"""

from collections.abc import Sequence
from typing import Any

from spec_jax import tree as trees
from spec_jax.base import Drafter, Model
from spec_jax.draft_model import check_temperature
from spec_jax.drafters.best_first import grown
from spec_jax.drafters.vanilla import SIBLINGS, StaticTree
from spec_jax.eagle_model import EagleModel
from spec_jax.options import check_unused

TAKES_DRAFT = True
TAKES_HEADS = "eagle"


def build(
  target: Model,
  draft: Any,
  *,
  slots: int,
  num_nodes: int = 16,
  depth: int = 5,
  width: int = 4,
  num_draft: int = 0,
  tree: Sequence[int] | None = None,
  parents: Sequence[int] | None = None,
  siblings: str = "",
  draft_temperature: float | None = None,
) -> Drafter:
  """Builds EAGLE.

  Args:
    target: the target; its vocabulary rules.
    draft: a trained head; `params["draft"]` are its parameters.
    slots: `S`.
    num_nodes: `N` of a tree that grows, root included. The papers take 60.
    depth: its deepest node; the head makes as many passes at most. The papers
      take 6 to 8.
    width: nodes read in a pass, and children each is given. The papers take 10.
    num_draft: a chain of so many tokens drawn from the head's law instead.
    tree: children per node at each depth of a static tree instead, the head's
      likeliest tokens, e.g. `(3, 2, 1)`.
    parents: any other static tree, see `tree.from_parents`.
    siblings: how nodes of a chain or static tree are drawn: "iid",
      "without_replacement" or "top_k"; "" = a chain from the law, a tree top-k.
    draft_temperature: the head's own where the row's is not 0, of nodes that
      are drawn; None = the row's.

  Raises:
    ValueError: if there is no EAGLE head, a number is out of range or has no
      use beside the others, or two kinds of tree are asked for.
  """
  asks = EagleModel("eagle", target, draft, slots=slots)
  if sum((num_draft != 0, tree is not None, parents is not None)) > 1:
    raise ValueError("give one of num_draft, tree and parents")
  if num_draft < 0:
    raise ValueError(f"num_draft must be at least 0, got {num_draft}")
  if siblings not in ("", *SIBLINGS):
    raise ValueError(
      f"siblings must be one of {', '.join(SIBLINGS)}, got {siblings!r}"
    )
  check_temperature(draft_temperature)
  grows = not num_draft and tree is None and parents is None
  if grows and (siblings or draft_temperature is not None):
    raise ValueError(
      "a tree that grows is certain: siblings and draft_temperature are for "
      "num_draft, tree or parents"
    )
  if not grows:
    given = {"num_nodes": num_nodes, "depth": depth, "width": width}
    check_unused(build, given, "where num_draft, tree or parents is given")
  taps = asks.heads.config.taps

  def static(shape, usual: str) -> Drafter:
    how = SIBLINGS[siblings or usual]
    return StaticTree(asks, shape, how, draft_temperature).drafter()

  if num_draft:
    made = static(trees.chain(num_draft), "iid")
  elif tree is not None or parents is not None:
    if tree is not None:
      shape = trees.branching(tree)
    else:
      shape = trees.from_parents(parents or ())
    trees.check_children(shape, asks.vocab_size)
    if shape.depth < 1:
      raise ValueError("the tree must have a node below its root")
    made = static(shape, "top_k")
  else:
    made = grown(asks, num_nodes=num_nodes, depth=depth, width=width)
  return made._replace(taps=taps, catches_up=False)
