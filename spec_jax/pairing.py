"""Which draft goes with a target: another model, itself, some of its layers."""

from collections.abc import Sequence
import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import drafters, kernels, trained
from spec_jax.base import Model, PyTree
from spec_jax.hub import Loaded, weights_hash
from spec_jax.models import decoder
from spec_jax.safetensors_io import LoadError
from spec_jax.vocabulary_map import VocabularyMap, map_vocabularies


@functools.lru_cache(maxsize=8)
def _build_short(config, dtype, scan_layers):
  return decoder.build(config, dtype=dtype, scan_layers=scan_layers)


def check_layers(config: Any, draft: int | Sequence[int]) -> list[int]:
  """Returns the layers that a number of first layers, or a list, stands for.

  Args:
    config: of the target.
    draft: a number, or numbers of layers that rise.

  Raises:
    ValueError: if there is none, one is out of range, or they do not rise.
  """
  L = config.num_layers
  if isinstance(draft, int):
    if not 1 <= draft <= L:
      raise ValueError(f"the draft's layers must be in [1, {L}], got {draft}")
    return list(range(draft))
  layers = [int(i) for i in draft]
  if not layers or not all(0 <= i < L for i in layers):
    raise ValueError(
      f"the draft's layers must be in [0, {L - 1}], one at least, got {layers}"
    )
  if sorted(set(layers)) != layers:
    raise ValueError(f"the draft's layers must rise, got {layers}")
  return layers


def shallow_config(config: Any, layers: Sequence[int]) -> Any:
  """Returns the architecture of a model made of some layers of another."""
  return dataclasses.replace(
    config,
    num_layers=len(layers),
    windows=tuple(config.windows[i] for i in layers),
  )


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


class TrainedDraft(NamedTuple):
  """A trained shallow copy of a target, checked for it, not yet read.

  Attributes:
    model: the draft in float32; `build` makes the one that fits.
    card: what it was read from.
  """

  model: Model
  card: trained.Card

  @property
  def weights_sha256(self) -> str:
    """SHA-256 of the weights' file."""
    return self.card.info["weights_sha256"]

  def build(self, loaded: Loaded) -> tuple[Model, PyTree]:
    """Reads the weights, held as the target's are; the rest is shared."""
    target = loaded.params
    stacked = isinstance(target["layers"], dict)
    dtype = target["final_norm"].dtype
    own = trained.unflatten(
      {
        name: jnp.asarray(tensor.read(0, tensor.shape[0]), dtype)
        for name, tensor in self.card.tensors.items()
      }
    )
    if stacked:
      own = decoder.stack_layers(own)
    elif kernels.is_packed(target):
      stored = target["layers"][0]["wq"].panels.dtype
      own = kernels.pack_params(own, weights=stored.name)
    model = _build_short(self.model.config, dtype, stacked)
    return model, {**target, **own}


# What a trained shallow copy shares with its target, by name.
SHARED = ("embed", "head", "position")


def inspect_trained(path: str | os.PathLike, loaded: Loaded) -> TrainedDraft:
  """Opens a trained shallow copy of the target; reads no weight.

  Args:
    path: the folder that training wrote.
    loaded: the target; its parameters are not looked at.

  Raises:
    LoadError: one line, if it is damaged, of another kind, or was trained for
      another target.
  """
  card = trained.read_card(path, loaded, ("layers",))
  try:
    layers = check_layers(loaded.model.config, card.info["layers"])
  except (ValueError, TypeError, KeyError) as error:
    raise LoadError(f"{card.folder / trained.CARD}: {error}") from error
  model = decoder.build(shallow_config(loaded.model.config, layers))
  shapes = trained.flatten(
    jax.eval_shape(lambda: model.init(jax.random.key(0)))
  )
  wanted = {n: x.shape for n, x in shapes.items() if n not in SHARED}
  given = {n: t.shape for n, t in card.tensors.items()}
  for name in sorted(wanted.keys() | given.keys()):
    if wanted.get(name) != given.get(name):
      raise LoadError(
        f"{card.folder}: tensor {name} has shape {given.get(name)}, the target "
        f"asks for {wanted.get(name)}"
      )
  return TrainedDraft(model, card)


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


def resolve_draft(
  loaded: Loaded,
  draft: Loaded | TrainedDraft | str | int | Sequence[int] | None,
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
  if isinstance(draft, str | os.PathLike) and trained.is_trained(draft):
    draft = inspect_trained(draft, loaded)
  if isinstance(draft, TrainedDraft):
    return draft.build(loaded)
  if isinstance(draft, int | list | tuple) and not isinstance(draft, bool):
    short, params = choose_layers(loaded.model.config, loaded.params, draft)
    stacked = isinstance(params["layers"], dict)
    dtype = params["final_norm"].dtype
    return _build_short(short, dtype, stacked), params
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
