"""Which draft goes with a target: another model, itself, some of its layers."""

from collections.abc import Sequence
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spec_jax import drafters, shipped, trained
from spec_jax.architecture import check_layers, shallow_config
from spec_jax.hub import Loaded, weights_hash
from spec_jax.public_heads import inspect_public, is_public
from spec_jax.trained_draft import (
  BuiltDraft,
  TrainedDraft,
  build_short,
  inspect_trained,
)
from spec_jax.vocabulary_map import VocabularyMap, map_vocabularies


def choose_layers(config: Any, params: dict, draft: int | Sequence[int]):
  """Returns (config, params) of a model made of some layers of another.

  Embedding, final norm, output matrix and the layers' parameters are shared
  with the target: nothing is copied (unless its layers are stacked for a scan:
  then the slice is a copy). The first layers alone are an early exit, a subset
  from all depths is layer skipping.

  Args:
    config: of the target.
    params: of the target.
    draft: the layers to keep, see `check_layers`.

  Raises:
    ValueError: see `check_layers`.

  Reference: Zhang et al. 2024 (Draft & Verify); Elhoushi et al. 2024
    (LayerSkip).
  """
  layers = check_layers(config, draft)
  short = shallow_config(config, layers)
  own = params["layers"]
  if isinstance(own, dict):
    own = jax.tree.map(lambda x: x[np.asarray(layers)], own)
  else:
    own = type(own)(own[i] for i in layers)
  return short, {**params, "layers": own}


# No model has so many; a range of them would fill the memory.
_MAX_LAYER = 9999


def parse_draft(text: str) -> str | int | tuple[int, ...]:
  """Returns the draft that a word names, if it is no model's name.

  "8" = the first 8 layers; "0-5,24-29" = those 12 layers; anything else
  ("target", a model, a file of layers) is returned as it is.

  Raises:
    ValueError: if it names a layer that no model has.
  """
  if text.isascii() and text.isdigit():
    return int(text)
  layers: list[int] = []
  for part in text.split(","):
    first, _, last = part.partition("-")
    ends = [first, last or first]
    if not all(x.isascii() and x.isdigit() for x in ends):
      return text
    if max(map(int, ends)) > _MAX_LAYER:
      raise ValueError(f"{text!r} names layers above {_MAX_LAYER}")
    layers += range(int(ends[0]), int(ends[1]) + 1)
  return tuple(layers)


def names_layers_file(text: str) -> bool:
  """Tells whether a word names a file of layers: "@FILE", or "FILE.json"."""
  return text.startswith("@") or text.endswith(".json")


def read_layers(text: str, loaded: Loaded) -> tuple[int, ...]:
  """Reads which layers draft from a file that a search has written.

  Args:
    text: its path, perhaps after "@": JSON with `layers`, and `model` and
      `weights_sha256` of the model that was searched.
    loaded: the target; its weights need not be read yet.

  Raises:
    ValueError: in one line, if it cannot be read, is no such file, was made
      for another model, or names layers that the model does not have.
  """
  path = text.removeprefix("@")
  try:
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    layers = tuple(found["layers"])
    model, made_for = found["model"], found["weights_sha256"]
    if not all(type(i) is int for i in layers):
      raise ValueError(f"layers must be integers, got {layers}")
  except OSError as error:
    raise ValueError(
      f"cannot read the layers in {path}: {error.strerror}"
    ) from error
  except (ValueError, TypeError, KeyError) as error:
    raise ValueError(
      f"{path} is no file of layers (JSON with layers, model and "
      f"weights_sha256): {error}"
    ) from error
  ours = weights_hash(loaded)
  if made_for != ours:
    raise ValueError(
      f"{path} was made for {model} with weights {str(made_for)[:12]}, the "
      f"target {loaded.name} has {ours[:12]}"
    )
  try:
    return tuple(check_layers(loaded.model.config, layers))
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error


def open_folder(path: str | os.PathLike, loaded: Loaded) -> TrainedDraft | None:
  """Opens a folder that holds a trained draft or published heads.

  Args:
    path: perhaps such a folder, or the name of a draft that ships.
    loaded: the target; its weights need not be read yet.

  Returns:
    None if it is no such folder.

  Raises:
    LoadError: if it is one that cannot be used for this target.
  """
  path = shipped.folder_of(path)
  if trained.is_trained(path):
    return inspect_trained(path, loaded)
  return inspect_public(path, loaded) if is_public(path) else None


def resolve_draft(
  loaded: Loaded,
  draft: Loaded | TrainedDraft | BuiltDraft | str | int | Sequence[int] | None,
  *,
  any_vocabulary: bool = False,
):
  """Returns (model, params) of the draft, or (None, None).

  Args:
    loaded: the target.
    draft: see `make_engine`.
    any_vocabulary: whether another vocabulary than the target's will do.

  Raises:
    ValueError: if it names nothing, the layers are out of range, or the
      vocabularies differ and may not.
  """
  if draft is None:
    return None, None
  if isinstance(draft, Loaded):
    known = loaded.tokenizer is not None and draft.tokenizer is not None
    if known and not any_vocabulary:
      check_same_vocabulary(loaded.tokenizer, draft.tokenizer)
    return draft.model, draft.params
  if draft == "target":
    return loaded.model, loaded.params
  if isinstance(draft, str) and names_layers_file(draft):
    draft = read_layers(draft, loaded)
  if isinstance(draft, str | os.PathLike):
    draft = open_folder(draft, loaded) or draft
  if isinstance(draft, TrainedDraft):
    return draft.build(loaded)
  if isinstance(draft, BuiltDraft):
    return draft
  if isinstance(draft, int | list | tuple) and not isinstance(draft, bool):
    short, params = choose_layers(loaded.model.config, loaded.params, draft)
    stacked = isinstance(params["layers"], dict)
    dtype = params["final_norm"].dtype
    return build_short(short, dtype, stacked), params
  raise ValueError(
    f"draft must be a loaded model, 'target', a number of layers, a list of "
    f"them, a file of layers or the folder of a trained draft, got {draft!r}"
  )


def vocabulary_map_of(target: Loaded, draft: Any) -> VocabularyMap | None:
  """Returns the map of a target and its draft; None if ids mean the same.

  Args:
    target: the target; its weights may not have been read.
    draft: another model, or anything else for parts of the target.

  Raises:
    ValueError: if a tokenizer's spelling is unknown.
  """
  if not isinstance(draft, Loaded):
    return None
  if target.tokenizer is None or draft.tokenizer is None:
    return None
  return map_vocabularies(
    target.tokenizer,
    draft.tokenizer,
    target.model.config.vocab_size,
    draft.model.config.vocab_size,
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
      able = filter(drafters.takes_vocabulary_map, drafters.names())
      raise ValueError(
        f"target and draft vocabularies differ first at id {i}: "
        f"{ours.get(i)!r} and {theirs.get(i)!r}; drafters for such a draft are "
        f"{', '.join(able)}"
      )
