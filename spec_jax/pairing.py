"""Which draft goes with a target: another model, itself, its first layers."""

import functools
from typing import Any

from spec_jax.drafters import vanilla
from spec_jax.hub import Loaded
from spec_jax.models import decoder


@functools.lru_cache(maxsize=8)
def _build_short(config, dtype, scan_layers):
  return decoder.build(config, dtype=dtype, scan_layers=scan_layers)


def resolve_draft(loaded: Loaded, draft: Loaded | str | int | None):
  """Returns (model, params) of the draft, or (None, None).

  Args:
    loaded: the target.
    draft: see `make_engine`.

  Raises:
    ValueError: if it names nothing, the layers are out of range, or the
      vocabularies differ.
  """
  if draft is None:
    return None, None
  if isinstance(draft, Loaded):
    if loaded.tokenizer is not None and draft.tokenizer is not None:
      check_same_vocabulary(loaded.tokenizer, draft.tokenizer)
    return draft.model, draft.params
  if draft == "target":
    return loaded.model, loaded.params
  if isinstance(draft, int) and not isinstance(draft, bool):
    short, params = vanilla.first_layers(
      loaded.model.config, loaded.params, draft
    )
    stacked = isinstance(params["layers"], dict)
    dtype = params["final_norm"].dtype
    return _build_short(short, dtype, stacked), params
  raise ValueError(
    f"draft must be a loaded model, 'target' or a number of layers, got "
    f"{draft!r}"
  )


def check_same_vocabulary(target: Any, draft: Any) -> None:
  """Checks that two tokenizers give the same ids the same tokens.

  Ids that only one of them has are allowed (padding differs between sizes of
  a family); an id that means two things is not.

  Raises:
    ValueError: naming the first id that differs.
  """
  ours = {i: token for token, i in target.get_vocab().items()}
  theirs = {i: token for token, i in draft.get_vocab().items()}
  for i in range(min(len(ours), len(theirs))):
    if ours.get(i) != theirs.get(i):
      raise ValueError(
        f"target and draft vocabularies differ first at id {i}: "
        f"{ours.get(i)!r} and {theirs.get(i)!r}"
      )
