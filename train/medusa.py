"""Trains Medusa heads on a frozen target (Medusa-1).

Head `k` learns, from the target's state at token `i`, the token at `i + k + 1`,
wherever that is part of an answer. The loss is the sum over heads of
`lambda ^ k` times the cross-entropy. Words the heads do not know teach nothing.

The tree that is drafted follows from how often each rank of each head is right,
which is measured on the target's own answers to prompts held out.

Reference: Cai et al. 2024 (Medusa), sections 2.1 and 2.3.3.
"""

from collections.abc import Sequence
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import medusa, sharding, trained, trained_draft
from spec_jax.base import Array, Model, PyTree
from spec_jax.heads import Heads
from spec_jax.hub import Loaded
from spec_jax.sampling import largest
from spec_jax.trained_draft import BuiltDraft
from train import data, losses
from train.measure import HeldOut, cast
from train.recipe import Recipe
from train.records import Example
from train.words import check_words, choose_words

__all__ = ["build", "check", "make_loss", "shifted"]

# Ranks whose accuracy is measured, for the tree.
_RANKS = 8


def check(config: Any) -> None:
  """Checks what can be known before the target is read.

  Raises:
    ValueError: naming the field, its range and what it got.
  """
  draft, loss = config.draft, config.loss
  for name in ("heads", "layers"):
    if draft[name] < 1:
      raise ValueError(f"draft.{name} must be at least 1, got {draft[name]}")
  check_words(draft)
  if not 0 < loss.head_decay <= 1:
    raise ValueError(
      f"loss.head_decay must be in (0, 1], got {loss.head_decay}"
    )
  if loss.chunk < 0 or (loss.chunk and config.data.length % loss.chunk):
    raise ValueError(
      f"loss.chunk must divide data.length {config.data.length}, got "
      f"{loss.chunk}"
    )
  if config.dtype_saved not in ("bfloat16", "float32"):
    raise ValueError(
      f"dtype_saved must be bfloat16 or float32, got {config.dtype_saved!r}"
    )


def shifted(batch: dict[str, Array], k: int) -> tuple[Array, Array]:
  """Returns what head `k` is to say at each position, and its weight.

  At position `i` the token at `i + k + 1`; weight 0 where that is no part of an
  answer, or of another example.

  Args:
    batch: see `data.pack`, `[B, T]` arrays.
    k: 0 for the target's own output, 1 for the first head, ...

  Returns:
    (labels `[B, T]` int32, weights `[B, T]`).
  """

  def later(x):
    return jnp.pad(x[:, k:], ((0, 0), (0, k)))

  segment = batch["segment_ids"]
  same = (later(segment) == segment) & (segment > 0)
  return later(batch["labels"]), jnp.where(same, later(batch["weights"]), 0.0)


def make_loss(target: Model, heads: Heads, *, decay: float, chunk: int = 0):
  """Makes the recipe's loss, see `Recipe.loss`.

  Args:
    target: whose parameters are the frozen ones.
    heads: what is trained.
    decay: `lambda`; the paper takes .8.
    chunk: positions whose logits exist at a time, a divisor of `T`; 0 = all.
  """
  K = heads.config.num_heads

  def loss(params, frozen, batch, key):
    del key  # nothing is drawn
    own = {**frozen["words"], **cast(params, heads.dtype)}
    hidden = target.apply(
      frozen["target"],
      batch["tokens"],
      positions_BT=batch["positions"],
      segment_ids=batch["segment_ids"],
      logits_at=jnp.zeros((batch["tokens"].shape[0], 0), jnp.int32),
    ).hidden[:, :, 0]
    known = _known(own, heads.config.words)
    pairs = [shifted(batch, k) for k in range(1, K + 1)]
    labels = known(jnp.stack([x for x, _ in pairs], -1))
    weights = jnp.stack([w for _, w in pairs], -1)

    def piece(x):
      states = heads.apply(own, x["hidden"])
      logits = medusa.logits_of(heads, own, target, frozen["target"], states)
      value = losses.cross_entropy(logits, x["labels"], x["weights"])
      right = (logits.argmax(-1) == x["labels"]) * x["weights"]
      scale = decay ** jnp.arange(1, K + 1)[None, None]
      found = {f"accuracy_{k + 1}": right[..., k].sum() for k in range(K)}
      return {
        "loss": (value * scale).sum(),
        # How often the first guess is kept by a greedy target.
        "acceptance": right[..., 0].sum(),
        "tokens": x["weights"][..., 0].sum(),
        **found,
      }

    arrays = {
      "hidden": jax.lax.stop_gradient(hidden),
      "labels": labels,
      "weights": weights,
    }
    sums = losses.sum_chunks(piece, arrays, chunk)
    return sums.pop("loss"), sums

  return loss


def _known(own: PyTree, words):
  """Returns a function from the target's ids to the heads', -1 = no word."""
  if not words.mapped:
    return lambda ids: jnp.where(ids < words.size, ids, -1)
  table = jnp.full((words.target_size,), -1, jnp.int32)
  table = table.at[own["ids"]].set(jnp.arange(words.size, dtype=jnp.int32))
  return lambda ids: table[ids]


def measure_accuracies(
  target: Model,
  heads: Heads,
  params: PyTree,
  target_params: PyTree,
  rows: Sequence[dict],
) -> tuple[tuple[float, ...], ...]:
  """Returns how often the guess of each rank is right, `[K][R]`.

  Args:
    target: the target.
    heads: what guesses.
    params: of the heads, words included.
    target_params: of the target.
    rows: packed answers of the target.
  """
  K, R = heads.config.num_heads, min(_RANKS, heads.config.words.size)

  @jax.jit
  def hits(params, target_params, batch):
    hidden = target.apply(
      target_params,
      batch["tokens"],
      positions_BT=batch["positions"],
      segment_ids=batch["segment_ids"],
      logits_at=jnp.zeros((batch["tokens"].shape[0], 0), jnp.int32),
    ).hidden[:, :, 0]
    states = heads.apply(params, hidden)
    known = _known(params, heads.config.words)
    right, total = [], []
    for k in range(1, K + 1):
      labels, weights = shifted(batch, k)
      logits = medusa.logits_of(heads, params, target, target_params, states)
      guess = largest(logits[:, :, k - 1].reshape(-1, logits.shape[-1]), R)
      hit = guess == known(labels).reshape(-1, 1)
      weight = weights.reshape(-1, 1)
      right.append((hit * weight).sum(0))
      total.append(weight.sum())
    return jnp.stack(right), jnp.stack(total)

  counts: Any = 0
  seen: Any = 0
  for row in rows:
    batch = {name: x[None] for name, x in row.items()}
    right, total = jax.device_get(hits(params, target_params, batch))
    counts, seen = counts + right, seen + total
  rates = counts / np.maximum(seen, 1)[:, None]
  return tuple(tuple(round(float(x), 4) for x in row) for row in rates)


def build(
  config: Any,
  loaded: Loaded,
  mesh: Any,
  held_out: Sequence[Sequence[int]],
  learn: Sequence[Example] = (),
) -> Recipe:
  """Builds the recipe.

  Args:
    config: see configs/medusa.py.
    loaded: the target, its parameters plain arrays.
    mesh: of axes 'data' and 'model', or None.
    held_out: prompts for the decoder, as token ids.
    learn: the examples, to count words.

  Raises:
    ValueError: see `check`.
  """
  check(config)
  target, frozen = loaded.model, loaded.params
  shape = target.config
  words, ids = choose_words(config.draft, shape.vocab_size, learn)
  heads = medusa.build(
    medusa.MedusaConfig(
      width=shape.width,
      num_heads=config.draft.heads,
      num_layers=config.draft.layers,
      words=words,
      max_length=shape.max_length,
    ),
    dtype=frozen["final_norm"].dtype,
  )
  saved = jnp.dtype(config.dtype_saved)
  fixed = {} if ids is None else {"ids": ids}
  _, with_words = trained_draft.build_heads(heads, dict(fixed), loaded)

  def init(key):
    start = heads.init(key)
    return {"heads": cast(start["heads"], jnp.float32)}

  def shardings(mesh):
    own = sharding.params_shardings(heads, mesh, replicate=True)
    of_words = {name: own[name] for name in with_words}
    of_target = sharding.params_shardings(target, mesh)
    return {"heads": own["heads"]}, {"target": of_target, "words": of_words}

  def decoding(params, rates) -> BuiltDraft:
    """Returns heads as they would be loaded: rounded, with a tree."""
    own = cast(cast(params, saved), heads.dtype)
    made = heads
    if rates:
      made = medusa.build(
        dataclasses.replace(heads.config, accuracies=rates), dtype=heads.dtype
      )
    return BuiltDraft(made, {**with_words, **own})

  asked = HeldOut(loaded, held_out, config.eval, config.seed, mesh)
  answers: list[dict] = []  # of the target, written once
  measured: dict[str, Any] = {}

  def measure(params) -> dict[str, float]:
    if not answers:
      out = asked.decode(drafter="none")
      length = max(len(c.prompt_ids) + len(c.ids) for c in out.completions)
      examples = []
      for c in out.completions:
        both = np.asarray([*c.prompt_ids, *c.ids], np.int32)
        examples.append(
          Example(both, np.arange(len(both)) >= len(c.prompt_ids))
        )
      answers.extend(data.pack(examples, length))
    made = decoding(params, ())
    rates = measure_accuracies(target, heads, made.params, frozen, answers)
    measured["accuracies"] = rates
    found = asked.rates(
      "medusa",
      decoding(params, rates),
      {"num_nodes": config.eval.num_nodes},
    )
    each = {f"accuracy_{k + 1}": row[0] for k, row in enumerate(rates)}
    return {**found, **each}

  def save(params, folder: Path, info: dict[str, Any]) -> None:
    tensors = {
      name: np.asarray(x)
      for name, x in trained.flatten(cast(params, saved)).items()
    }
    if ids is not None:
      tensors["ids"] = np.asarray(ids)
    own = {
      "num_heads": heads.config.num_heads,
      "num_layers": heads.config.num_layers,
      "own_matrices": False,
      **trained_draft.words_info(words),
      "accuracies": measured.get("accuracies", ()),
    }
    trained.save(folder, "medusa", tensors, {"heads": own, **info})

  return Recipe(
    init=init,
    loss=make_loss(
      target, heads, decay=config.loss.head_decay, chunk=config.loss.chunk
    ),
    frozen={"target": frozen, "words": with_words},
    shardings=shardings,
    measure=measure if held_out else None,
    save=save,
  )
