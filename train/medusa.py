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
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import medusa
from spec_jax.base import Array, Model, PyTree
from spec_jax.heads import Heads
from spec_jax.hub import Loaded
from spec_jax.sampling import largest
from spec_jax.trained_draft import BuiltDraft
from train import data, features, heads as heads_lib, losses
from train.checks import at_least, chunk_and_file
from train.heads import later, weights_later, words_of
from train.measure import HeldOut, cast, no_remat, precision_of
from train.pieces import sum_pieces
from train.recipe import Recipe
from train.records import Example, example_of
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
  at_least("draft", draft, ("heads", "layers"), 1)
  check_words(draft)
  if draft.heads > medusa.MOST_HEADS:
    raise ValueError(
      f"draft.heads must be at most {medusa.MOST_HEADS}, got {draft.heads}"
    )
  ranks = min(_RANKS, draft.words or _RANKS)
  most = sum(ranks**k for k in range(draft.heads + 1))
  if not 2 <= config.eval.num_nodes <= most:
    raise ValueError(
      f"eval.num_nodes must be in [2, {most}] with {draft.heads} heads, got "
      f"{config.eval.num_nodes}"
    )
  if not 0 < loss.head_decay <= 1:
    raise ValueError(
      f"loss.head_decay must be in (0, 1], got {loss.head_decay}"
    )
  chunk_and_file(config)


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
  return later(batch["labels"], k), weights_later(batch, k)


def make_loss(
  target: Model,
  heads: Heads,
  *,
  decay: float,
  chunk: int = 0,
  compact: bool = False,
):
  """Makes the recipe's loss, see `Recipe.loss`.

  Args:
    target: whose parameters are the frozen ones.
    heads: what is trained.
    decay: `lambda`; the paper takes .8.
    chunk: positions whose logits exist at a time, a divisor of `T`; 0 = all.
    compact: see `sum_pieces`.
  """

  def loss(params, frozen, batch, key):
    del key  # nothing is drawn
    own = cast(params, heads.dtype)
    known = told(heads, frozen["words"], batch)
    hidden = features.of_batch(target, frozen["target"], batch)
    return sum_pieces(
      judge_piece,
      chunk,
      params=own,
      learned={},
      given={"hidden": hidden[:, :, 0], **known},
      frozen=frozen,
      counted=(known["weights"] != 0).any(-1),
      compact=compact,
    )

  def judge_piece(params, learned, given, frozen):
    del learned  # all that is learned stands in `params`
    own = {**frozen["words"], **params}
    return judge(target, heads, own, frozen["target"], decay, given)

  return loss


def told(
  heads: Heads, own: PyTree, batch: dict[str, Array]
) -> dict[str, Array]:
  """Returns what all heads are to say: labels and weights, `[B, T, K]`."""
  known = _known(own, heads.config.words)
  pairs = [shifted(batch, k) for k in range(1, heads.config.num_heads + 1)]
  return {
    "labels": known(jnp.stack([x for x, _ in pairs], -1)),
    "weights": jnp.stack([w for _, w in pairs], -1),
  }


def judge(
  target: Model,
  heads: Heads,
  own: PyTree,
  target_params: PyTree,
  decay: float,
  x: dict[str, Array],
) -> dict[str, Array]:
  """Returns the sums of a piece: the heads' loss and how often they are right.

  Args:
    target: whose output matrix the heads may use.
    heads: who is judged.
    own: their parameters, words included.
    target_params: of the target.
    decay: weight of head `k` is `decay ** k`.
    x: "hidden" `[B, t, D]`, "labels" and "weights" from `told`.
  """
  K = heads.config.num_heads
  states = heads.apply(own, x["hidden"])
  logits = medusa.logits_of(heads, own, target, target_params, states)
  value = losses.cross_entropy(logits, x["labels"], x["weights"])
  right = losses.is_likeliest(logits, x["labels"]) * x["weights"]
  scale = decay ** jnp.arange(1, K + 1)[None, None]
  return {
    "loss": (value * scale).sum(),
    # How often the first guess is kept by a greedy target, on its own answers.
    "acceptance": right[..., 0].sum(),
    "tokens": x["weights"][..., 0].sum(),
    **{f"accuracy_{k + 1}": right[..., k].sum() for k in range(K)},
  }


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
  counts: Any = 0
  seen: Any = 0
  hits = _hits(target, heads)
  for row in rows:
    batch = {name: x[None] for name, x in row.items()}
    right, total = jax.device_get(hits(params, target_params, batch))
    counts, seen = counts + right, seen + total
  rates = counts / np.maximum(seen, 1)[:, None]
  # Downwards: ranks of a head must not add up to more than 1.
  rates = np.floor(rates * 1e4) / 1e4
  return tuple(tuple(map(float, row)) for row in rates)


@functools.lru_cache(maxsize=8)
def _hits(target: Model, heads: Heads):
  """Returns a compiled function that counts by head and rank."""
  K, R = heads.config.num_heads, min(_RANKS, heads.config.words.size)

  @jax.jit
  def hits(params, target_params, batch):
    states = heads.apply(
      params, features.read(target, target_params, batch)[:, :, 0]
    )
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

  return hits


def make_heads(
  config: Any, loaded: Loaded, learn: Sequence[Example]
) -> tuple[Heads, PyTree]:
  """Returns the heads that a configuration names, and their words' parameters.

  Args:
    config: see configs/medusa.py.
    loaded: the target.
    learn: the examples, to count words.
  """
  shape = loaded.model.config
  words, ids = choose_words(config.draft, shape.vocab_size, learn)
  heads = medusa.build(
    medusa.MedusaConfig(
      width=shape.width,
      num_heads=config.draft.heads,
      num_layers=config.draft.layers,
      words=words,
      max_length=shape.max_length,
    ),
    dtype=loaded.params["final_norm"].dtype,
    precision=precision_of(config),
  )
  return heads, words_of(heads, ids, loaded)


class Measured:
  """Measures heads with the decoder, and saves them with what it found.

  Attributes:
    asked: the prompts and the target, which may change before each measuring.
    words: the parameters of the heads' words, which follow the target.
    accuracies: `[K][R]` of the last measuring.
  """

  def __init__(
    self,
    asked: HeldOut,
    heads: Heads,
    words: PyTree,
    saved: Any,
  ):
    """Takes what stays.

    Args:
      asked: see `Measured`.
      heads: what is trained.
      words: their words' parameters.
      saved: dtype of the file.
    """
    self.asked = asked
    self.accuracies: tuple[tuple[float, ...], ...] = ()
    self._heads, self.words, self._saved = heads, words, saved
    self._written: tuple[HeldOut, list[dict]] | None = None

  def _draft(self, params: PyTree, rates) -> BuiltDraft:
    """Returns heads as they would be loaded: rounded, with a tree."""
    config = dataclasses.replace(self._heads.config, accuracies=rates)
    made = medusa.build(config, dtype=self._heads.dtype)
    return heads_lib.draft_of(made, params, self.words, self._saved)

  def _answers(self) -> list[dict]:
    """Returns the target's own answers, packed; written once a target."""
    if self._written is None or self._written[0] is not self.asked:
      examples = [
        example_of(c.prompt_ids, c.ids)
        for c in self.asked.decode(drafter="none").completions
      ]
      rows = data.pack(examples, max(len(x.ids) for x in examples))
      self._written = self.asked, rows
    return self._written[1]

  def measure(self, params: PyTree) -> dict[str, float]:
    """Returns what `Recipe.measure` does; `params` is `{"heads": ...}`."""
    loaded = self.asked.loaded
    self.accuracies = measure_accuracies(
      loaded.model,
      self._heads,
      self._draft(params, ()).params,
      loaded.params,
      self._answers(),
    )
    found = self.asked.rates(
      "medusa",
      self._draft(params, self.accuracies),
      {"num_nodes": self.asked.eval.num_nodes},
    )
    each = {f"accuracy_{k + 1}": r[0] for k, r in enumerate(self.accuracies)}
    return {**found, **each}

  def save(self, params: PyTree, folder: Path, info: dict[str, Any]) -> None:
    """Writes what `Recipe.save` does; `params` is `{"heads": ...}`."""
    config = self._heads.config
    own = {
      "num_heads": config.num_heads,
      "num_layers": config.num_layers,
      "own_matrices": False,
      "accuracies": self.accuracies,
    }
    heads_lib.save(
      folder, self._heads, params, self.words, self._saved, own, info
    )


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
  no_remat(config)
  target, frozen = loaded.model, loaded.params
  heads, with_words = make_heads(config, loaded, learn)

  asked = HeldOut(loaded, held_out, config.eval, config.seed, mesh)
  asked.check("medusa", heads, {"num_nodes": config.eval.num_nodes})
  kept = Measured(asked, heads, with_words, jnp.dtype(config.dtype_saved))

  return Recipe(
    init=functools.partial(heads_lib.start, heads),
    loss=make_loss(
      target,
      heads,
      decay=config.loss.head_decay,
      chunk=config.loss.chunk,
      compact=mesh is None,
    ),
    frozen={"target": frozen, "words": with_words},
    target=target,
    shardings=functools.partial(heads_lib.shardings, heads, target, with_words),
    measure=kept.measure if held_out else None,
    save=kept.save,
  )
