"""Distils a shallow copy of the target into a draft.

The draft is made of some layers of the target; embedding, output matrix and
learned positions stay the target's own, frozen and shared, so that only the
layers and the final norm are trained, saved and moved. The target's law is
computed anew in each step, in the same program, piece by piece: nothing of
size `[B, T, V]` is kept.

Reference: Zhou et al. 2024 (DistillSpec).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import (
  architecture,
  pairing,
  sharding,
  shipped,
  trained,
  trained_draft,
)
from spec_jax.base import Model, PyTree
from spec_jax.generate import generate
from spec_jax.hub import Loaded
from spec_jax.models import decoder
from spec_jax.settings import Settings
from train import features, losses
from train.checks import above, at_least, chunk_and_file
from train.measure import HeldOut, cast, precision_of, rows_for
from train.pieces import sum_pieces
from train.recipe import Recipe
from train.records import Example

__all__ = ["build", "check", "make_loss"]

_CROSS_ENTROPY = "cross_entropy"


def check(config: Any) -> None:
  """Checks what can be known before the target is read.

  Raises:
    ValueError: naming the field, its range and what it got.
  """
  loss = config.loss
  names = (*losses.LOSSES, _CROSS_ENTROPY)
  if loss.name not in names:
    raise ValueError(
      f"loss.name must be one of {', '.join(names)}, got {loss.name!r}"
    )
  above("loss", loss, ("temperature",), 0)
  at_least("draft", config.draft, ("words",), 0)
  if not 0 < loss.beta < 1:
    raise ValueError(f"loss.beta must be in (0, 1), got {loss.beta}")
  at_least("loss", loss, ("top_k",), 0)
  usual = {"beta": 0.5} if loss.name != "jsd" else {}
  if loss.name == _CROSS_ENTROPY:
    usual |= {"temperature": 1.0, "top_k": 0}
  for name, value in usual.items():
    if loss[name] != value:
      raise ValueError(
        f"loss.{name} has no use with loss.name={loss.name!r}, got {loss[name]}"
      )
  chunk_and_file(config)


def layers_of(config: Any, target: Any) -> list[int]:
  """Returns the layers that `config.draft.layers` names.

  Raises:
    ValueError: if it names none.
  """
  parsed = pairing.parse_draft(str(config.draft.layers))
  if isinstance(parsed, str):
    raise ValueError(
      "draft.layers must be a number of first layers, or layers like 0,10,20 "
      f"or 0-3,28-29, got {parsed!r}"
    )
  return architecture.check_layers(target, parsed)


def read_start(path: str, layers: Sequence[int], loaded: Loaded) -> PyTree:
  """Returns the parameters of a trained draft to go on from.

  Args:
    path: its folder, or a name of one that ships.
    layers: of the target that it must be made of.
    loaded: the target.

  Raises:
    LoadError: if it is damaged or another target's.
    ValueError: if it is no copy of these layers.
  """
  draft = trained_draft.inspect_trained(shipped.folder_of(path), loaded)
  made_of = draft.card.info.get("layers")
  if draft.card.kind != "layers" or list(made_of or ()) != list(layers):
    what = f"layers {made_of}" if made_of else f"{draft.card.kind} heads"
    raise ValueError(
      f"draft.start: {path} holds {what}, not layers {list(layers)}"
    )
  return draft.build(loaded)[1]


def make_loss(
  target: Model,
  draft: Model,
  *,
  name: str,
  temperature: float = 1.0,
  beta: float = 0.5,
  top_k: int = 0,
  chunk: int = 0,
  compact: bool = False,
):
  """Makes the recipe's loss, see `Recipe.loss`.

  Args:
    target: whose parameters are the frozen ones.
    draft: shares those that are not trained.
    name: one of `losses.LOSSES`, or "cross_entropy" with the data's tokens.
    temperature: see `losses.divergence`.
    beta: see `losses.divergence`.
    top_k: see `losses.divergence`.
    chunk: positions whose logits exist at a time, a divisor of `T`; 0 = all.
    compact: see `sum_pieces`.
  """
  words = draft.config.num_words

  def loss(params, frozen, batch, key):
    del key  # nothing is drawn
    head = words_head(draft, frozen)
    own = {**frozen, **cast(params, frozen["final_norm"].dtype), **head}
    return sum_pieces(
      judge,
      chunk,
      learned={"ours": features.read(draft, own, batch)[:, :, 0]},
      given={
        "theirs": features.of_batch(target, frozen, batch)[:, :, 0],
        "weights": batch["weights"],
        "labels": batch["labels"],
      },
      frozen={"target": frozen, "draft": {**frozen, **head}},
      counted=batch["weights"] != 0,
      compact=compact,
    )

  def judge(params, learned, given, frozen):
    del params  # output matrix and embedding are the target's, frozen
    logits = target.unembed(frozen["target"], given["theirs"])
    guess = draft.unembed(frozen["draft"], learned["ours"])
    weights = given["weights"]
    if words:
      guess = guess[..., :words]
      logits, weights = losses.keep_ids(logits, words, weights)
    value, alpha = losses.divergence(
      "tvd" if name == _CROSS_ENTROPY else name,
      logits,
      guess,
      weights,
      temperature=temperature,
      beta=beta,
      top_k=top_k,
    )
    if name == _CROSS_ENTROPY:
      value = losses.cross_entropy(guess, given["labels"], weights)
    return {
      "loss": value.sum(),
      "acceptance": alpha.sum(),
      "agreement": losses.agreement(logits, guess, weights).sum(),
      "tokens": given["weights"].sum(),
    }

  return loss


def words_head(draft: Model, frozen: PyTree) -> PyTree:
  """Returns the output matrix of a draft that knows some words only, or {}."""
  words = draft.config.num_words
  if not words:
    return {}
  if "head" in frozen:
    return {"head": frozen["head"][:, :words]}
  return {"head": frozen["embed"][:words].T}


def unstack_layers(stacked: PyTree) -> tuple[PyTree, ...]:
  """Undoes `decoder.stack_layers` for the layers."""
  count = jax.tree.leaves(stacked)[0].shape[0]
  take = lambda i: jax.tree.map(lambda x: x[i], stacked)
  return tuple(take(i) for i in range(count))


def build(
  config: Any,
  loaded: Loaded,
  mesh: Any,
  held_out: Sequence[Sequence[int]],
  learn: Sequence[Example] = (),
) -> Recipe:
  """Builds the recipe.

  Args:
    config: see configs/distill.py.
    loaded: the target, its parameters plain arrays.
    mesh: of axes 'data' and 'model', or None.
    held_out: prompts for the decoder, as token ids.
    learn: the examples; not looked at.

  Raises:
    ValueError: see `check`; or if the layers are out of range, or the draft to
      go on from is of others.
    LoadError: if it cannot be read.
  """
  del learn
  check(config)
  shape, frozen = loaded.model.config, loaded.params
  layers = layers_of(config, shape)
  if config.draft.start:
    start = read_start(config.draft.start, layers, loaded)
  else:
    _, start = pairing.choose_layers(shape, frozen, layers)
  words = config.draft.words
  if words >= shape.vocab_size:
    words = 0
  short = architecture.shallow_config(shape, layers, words)
  stacked = isinstance(frozen["layers"], dict)
  dtype = frozen["final_norm"].dtype
  options = {
    "dtype": dtype,
    "scan_layers": stacked,
    "precision": precision_of(config),
  }
  decoding = decoder.build(short, **options)
  options["remat"] = config.train.remat
  draft = decoder.build(short, **options)
  chosen = {n: x for n, x in start.items() if n not in trained_draft.SHARED}
  saved = jnp.dtype(config.dtype_saved)

  def init(key):
    del key  # it starts as the target's own layers
    return cast(chosen, jnp.float32)

  def shardings(mesh):
    of_draft = sharding.params_shardings(draft, mesh)
    own = {n: s for n, s in of_draft.items() if n not in trained_draft.SHARED}
    return own, sharding.params_shardings(loaded.model, mesh)

  def as_loaded(params) -> Loaded:
    # What is saved is measured: rounded.
    rounded = cast(params, saved)
    return Loaded(
      decoding,
      {
        **frozen,
        **cast(rounded, dtype),
        **words_head(decoding, frozen),
      },
      tokenizer=None,  # the target's
      config={},
      name="the draft in training",
      hashes={},
      stop_ids=loaded.stop_ids,
      files=(),
    )

  asked = HeldOut(loaded, held_out, config.eval, config.seed, mesh)

  options_of_draft = {"num_draft": config.eval.num_draft}
  asked.check("vanilla", decoding, options_of_draft)

  def measure(params) -> dict[str, float]:
    return asked.rates("vanilla", as_loaded(params), options_of_draft)

  def sample(params, prompts, seed) -> list[list[int]]:
    length = config.data.length
    settings = [
      Settings(
        temperature=config.on_policy.temperature,
        max_new_tokens=length - len(prompt),
      )
      for prompt in prompts
    ]
    out = generate(
      as_loaded(params),
      prompts,
      settings=settings,
      batch_size=rows_for(len(prompts), config.eval.batch_size, mesh),
      slots=length,
      seed=seed,
      mesh=mesh,
    )
    return out.ids

  def save(params, folder: Path, info: dict[str, Any]) -> None:
    plain = params
    if stacked:
      plain = {**params, "layers": unstack_layers(params["layers"])}
    tensors = {
      name: np.asarray(x.astype(saved))
      for name, x in trained.flatten(plain).items()
    }
    own = {"layers": layers, "words": short.num_words}
    trained.save(folder, "layers", tensors, {**own, **info})

  return Recipe(
    init=init,
    loss=make_loss(
      loaded.model,
      draft,
      name=config.loss.name,
      temperature=config.loss.temperature,
      beta=config.loss.beta,
      top_k=config.loss.top_k,
      chunk=config.loss.chunk,
      compact=mesh is None,
    ),
    frozen=frozen,
    target=loaded.model,
    shardings=shardings,
    measure=measure if held_out else None,
    save=save,
    sample=sample,
  )
