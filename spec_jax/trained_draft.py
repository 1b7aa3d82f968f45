"""Trained drafts: opened, checked against their target, and built for it.

What training wrote is a folder with a card (`trained.py`). By its kind it is a
shallow copy of the target ("layers"), Medusa heads ("medusa") or an EAGLE head
("eagle").
"""

from collections.abc import Mapping
import functools
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import eagle, heads as heads_lib, kernels, medusa, trained
from spec_jax.architecture import check_layers, shallow_config
from spec_jax.base import Model, PyTree
from spec_jax.heads import Heads, Words
from spec_jax.hub import Loaded
from spec_jax.models import decoder
from spec_jax.safetensors_io import LoadError

# What a trained shallow copy shares with its target, by name.
SHARED = frozenset({"embed", "head", "position"})
# What decoding makes of the target's output matrix, and no file holds.
_DERIVED = frozenset({"head"})


class TrainedDraft(NamedTuple):
  """A trained draft, checked for its target, not yet read.

  Attributes:
    model: the draft in float32; `build` makes the one that fits.
    card: what it was read from.
  """

  model: Model | Heads
  card: trained.Card

  @property
  def weights_sha256(self) -> str:
    """SHA-256 of the weights' file."""
    return self.card.info["weights_sha256"]

  def build(self, loaded: Loaded) -> tuple[Model | Heads, PyTree]:
    """Reads the weights, held as the target's are; the rest is shared.

    Packed matrices of a file in bfloat16 stay so, half the bytes to read; the
    target's columns for its words are then rounded too. It is a draft: the law
    of what is emitted does not change.

    Raises:
      LoadError: if its words are none of the target's.
    """
    target = loaded.params
    matrices = [t for t in self.card.tensors.values() if len(t.shape) > 1]
    rounded = bool(matrices) and all(t.dtype == jnp.bfloat16 for t in matrices)
    dtype = target["final_norm"].dtype
    own = trained.unflatten(
      {
        name: jnp.asarray(tensor.read(0, tensor.shape[0]), dtype)
        if name != "ids"
        else jnp.asarray(tensor.read(0, tensor.shape[0]), jnp.int32)
        for name, tensor in self.card.tensors.items()
      }
    )
    V = loaded.model.config.vocab_size
    if "ids" in own and not heads_lib.are_words(np.asarray(own["ids"]), V):
      raise LoadError(
        f"ids of the draft's words must rise within [0, {V}), and do not"
      )
    if isinstance(self.model, Heads):
      return build_heads(self.model, own, loaded, rounded=rounded)
    stacked = isinstance(target["layers"], dict)
    if stacked:
      own = decoder.stack_layers(own)
    if words := self.model.config.num_words:
      ids = jnp.arange(words, dtype=jnp.int32)
      head = heads_lib.output_columns(loaded.model, target, ids)
      own["head"] = head.astype(dtype)
    own = _held_as(target, own, rounded)
    model = build_short(self.model.config, dtype, stacked)
    return model, {**target, **own}


class BuiltDraft(NamedTuple):
  """A draft in memory, for example one in training.

  Attributes:
    model: the draft.
    params: its parameters, held as the target's are.
  """

  model: Model | Heads
  params: PyTree


@functools.lru_cache(maxsize=8)
def build_short(config, dtype, scan_layers) -> Model:
  """Builds a shallow copy's model; the same arguments give the same one."""
  return decoder.build(config, dtype=dtype, scan_layers=scan_layers)


def _held_as(target: PyTree, own: PyTree, rounded: bool) -> PyTree:
  """Packs matrices if the target's are; as they are, or in bfloat16."""
  if not kernels.is_packed(target):
    return own
  stored = target["layers"][0]["wq"].panels.dtype
  return kernels.pack_params(
    own, weights="bfloat16" if rounded else stored.name
  )


def build_heads(
  model: Heads, own: PyTree, loaded: Loaded, *, rounded: bool = False
) -> tuple[Heads, PyTree]:
  """Returns heads that fit a target, and their parameters.

  Args:
    model: the heads.
    own: their parameters as they were trained.
    loaded: the target, its weights read.
    rounded: whether packed matrices are held in bfloat16, the target's columns
      for the heads' words too.
  """
  target = loaded.params
  dtype = target["final_norm"].dtype
  words = model.config.words
  if words.own_matrix and "head" not in own:
    ids = own.get("ids", jnp.arange(words.size, dtype=jnp.int32))
    own = {
      **own,
      "head": heads_lib.output_columns(loaded.model, target, ids).astype(dtype),
    }
  build = _BUILDERS[model.kind]
  return build(model.config, dtype=dtype), _held_as(target, own, rounded)


_BUILDERS = {"medusa": medusa.build, "eagle": eagle.build}


def inspect_trained(path: str | os.PathLike, loaded: Loaded) -> TrainedDraft:
  """Opens a trained draft of the target; reads no weight.

  Args:
    path: the folder that training wrote.
    loaded: the target; its parameters are not looked at.

  Raises:
    LoadError: one line, if it is damaged, of another kind, or was trained for
      another target.
  """
  card = trained.read_card(path, loaded, ("layers", *_BUILDERS))
  try:
    model, shared = _MODELS[card.kind](card.info, loaded)
  except KeyError as error:
    raise LoadError(
      f"{card.folder / trained.CARD} lacks the field {error}"
    ) from error
  except (ValueError, OverflowError) as error:
    raise LoadError(f"{card.folder / trained.CARD}: {error}") from error
  except (TypeError, AttributeError) as error:
    raise LoadError(
      f"{card.folder / trained.CARD} has a field of another kind than a draft "
      f"of kind {card.kind!r} has: {error}"
    ) from error
  shapes = trained.flatten(
    jax.eval_shape(lambda: model.init(jax.random.key(0)))
  )
  wanted = {n: x.shape for n, x in shapes.items() if n not in shared}
  given = {n: t.shape for n, t in card.tensors.items()}
  if isinstance(model, Heads) and "head" in given:  # it may bring its own
    wanted["head"] = shapes["head"].shape if "head" in shapes else ()
  for name in sorted(wanted.keys() | given.keys()):
    if wanted.get(name) != given.get(name):
      raise LoadError(
        f"{card.folder}: tensor {name} has shape {given.get(name)}, the target "
        f"asks for {wanted.get(name)}"
      )
  return TrainedDraft(model, card)


def _layers(info: Mapping[str, Any], loaded: Loaded):
  target = loaded.model.config
  layers = check_layers(target, info["layers"])
  words = int(info.get("words", 0))
  return decoder.build(shallow_config(target, layers, words)), SHARED


def words_of(info: Mapping[str, Any], vocab_size: int) -> Words:
  """Returns the words that a card's "heads" names."""
  return Words(
    size=int(info["words"]),
    target_size=vocab_size,
    own_matrix=bool(info["own_matrix"]),
    mapped=bool(info["mapped"]),
  )


def words_info(words: Words) -> dict[str, Any]:
  """Returns what `words_of` reads."""
  return {
    "words": words.size,
    "own_matrix": words.own_matrix,
    "mapped": words.mapped,
  }


def _medusa(info: Mapping[str, Any], loaded: Loaded):
  own, target = info["heads"], loaded.model.config
  rates = own.get("accuracies", ())
  config = medusa.MedusaConfig(
    width=target.width,
    num_heads=int(own["num_heads"]),
    num_layers=int(own["num_layers"]),
    own_matrices=bool(own["own_matrices"]),
    words=words_of(own, target.vocab_size),
    max_length=target.max_length,
    accuracies=tuple(tuple(map(float, row)) for row in rates),
  )
  return medusa.build(config), _DERIVED


def _eagle(info: Mapping[str, Any], loaded: Loaded):
  own, target = info["heads"], loaded.model.config
  config = eagle.config_of(
    target,
    int(own["version"]),
    words_of(own, target.vocab_size),
    taps=tuple(map(int, own["taps"])),
    ffn_width=int(own["ffn_width"]),
    fc_bias=bool(own["fc_bias"]),
  )
  if any(not 0 <= tap <= target.num_layers for tap in config.taps):
    raise ValueError(f"taps {config.taps} are not in [0, {target.num_layers}]")
  return eagle.build(config), _DERIVED


_MODELS = {"layers": _layers, "medusa": _medusa, "eagle": _eagle}
