"""Trains an EAGLE head on a frozen target.

Version 1 learns the target's next feature (smooth L1) and, with less weight,
the target's law; noise is added to the features it reads. Version 3 learns the
target's law alone, by training-time test: `steps` passes, of which each reads
the features that the one before made, as the head does when it drafts. In pass
`s` the pair at place `i` stands for the `s`-th of a chain that began at `i`: it
sees the target's features up to `i` and its own chain's after that. Its token
is the data's, not the head's.

Where the likeliest token is no word of the head, its law teaches nothing.

Reference: Li et al. 2024 (EAGLE, section 3.2), 2025 (EAGLE-3, section 3).
"""

from collections.abc import Sequence
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from spec_jax import eagle
from spec_jax.base import Array, Model
from spec_jax.drafters import best_first
from spec_jax.heads import Heads
from spec_jax.hub import Loaded
from spec_jax.models.decoder import FINAL, PRECISION
from train import heads as heads_lib, losses
from train.checks import at_least, chunk_and_file, integers
from train.heads import earlier, later, weights_later, words_of
from train.measure import HeldOut, cast, no_remat, precision_of
from train.recipe import Recipe
from train.records import Example
from train.words import check_words, choose_words

__all__ = ["attend_chains", "build", "check", "make_loss", "pairs_of"]

_MASKED = -1e30  # finite: a row that sees nothing must not become NaN


def check(config: Any) -> None:
  """Checks what can be known before the target is read.

  Raises:
    ValueError: naming the field, its range and what it got.
  """
  draft, loss = config.draft, config.loss
  if draft.version not in eagle.VERSIONS:
    raise ValueError(f"draft.version must be 1 or 3, got {draft.version}")
  check_words(draft)
  at_least("draft", draft, ("ffn_width",), 0)
  integers("draft.taps", draft.taps)
  if not 1 <= loss.steps <= 16:
    raise ValueError(f"loss.steps must be in [1, 16], got {loss.steps}")
  if draft.version == 1 and loss.steps > 1:
    raise ValueError(
      f"version 1 is trained with loss.steps=1, got {loss.steps}"
    )
  if not 0 < loss.step_decay <= 1:
    raise ValueError(
      f"loss.step_decay must be in (0, 1], got {loss.step_decay}"
    )
  at_least("loss", loss, ("law_weight", "noise"), 0)
  best_first.check_sizes(
    *(config.eval[name] for name in ("num_nodes", "depth", "width"))
  )
  no_remat(config)
  chunk_and_file(config)


def pairs_of(batch: dict[str, Array], s: int) -> tuple[Array, Array]:
  """Returns the tokens of pass `s` and the weights of what follows them.

  Place `i` holds the token `i + s + 1`, and is to say the law of the token
  after it, which counts if it is part of an answer of the same example.

  Args:
    batch: see `data.pack`.
    s: pass, from 0.

  Returns:
    (tokens `[B, T]`, weights `[B, T]`).
  """
  return later(batch["tokens"], s + 1), weights_later(batch, s + 1)


def attend_chains(
  q: Array,
  keys: Sequence[Array],
  values: Sequence[Array],
  visible: Array,
  scale: float,
) -> Array:
  """Attends over the pairs of the text and over each place's own chain.

  Args:
    q: `[B, T, H, E]` of the last pass.
    keys: of each pass, `[B, T, G, E]`; those of pass 0 are seen by `visible`,
      of later ones each place sees its own.
    values: like `keys`.
    visible: `[B, T, T]` bool.
    scale: of the scores.

  Returns:
    `[B, T, H * E]`.
  """
  B, T, H, E = q.shape
  G = keys[0].shape[2]
  q = q.reshape(B, T, G, H // G, E).astype(jnp.float32)
  whole = jnp.einsum("btghe,bsge->bghts", q, keys[0].astype(jnp.float32))
  whole = jnp.where(visible[:, None, None], whole * scale, _MASKED)
  own = [
    jnp.einsum("btghe,btge->bght", q, k.astype(jnp.float32)) * scale
    for k in keys[1:]
  ]
  both = jnp.concatenate([whole, *(x[..., None] for x in own)], -1)
  weights = jax.nn.softmax(both, -1)
  out = jnp.einsum(
    "bghts,bsge->btghe", weights[..., :T], values[0].astype(jnp.float32)
  )
  for s, v in enumerate(values[1:]):
    share = jnp.moveaxis(weights[..., T + s], 3, 1)  # [B, T, G, H / G]
    out = out + share[..., None] * v.astype(jnp.float32)[:, :, :, None]
  return out.reshape(B, T, H * E)


def shown(target: Model, heads: Heads) -> Model:
  """Returns the target that shows a head's taps, and its final state last.

  Raises:
    ValueError: if it shows no layers.
  """
  if not heads.config.taps:
    return target
  if target.tap is None:
    raise ValueError("this target shows no layers: train version 1")
  return target.tap((*heads.config.taps, FINAL))


def make_loss(
  target: Model,
  heads: Heads,
  *,
  steps: int = 1,
  step_decay: float = 0.8,
  law_weight: float = 0.1,
  noise: float = 0.0,
  chunk: int = 0,
  precision: str | None = PRECISION,
):
  """Makes the recipe's loss, see `Recipe.loss`.

  Args:
    target: whose parameters are the frozen ones, see `shown`.
    heads: what is trained.
    steps: passes of version 3, `S`.
    step_decay: weight of pass `s` is `step_decay ** s`; the paper takes .8.
    law_weight: of version 1, of the law beside the feature; the paper takes .1.
    noise: of version 1, the largest that is added to a feature.
    chunk: positions whose logits exist at a time, a divisor of `T`; 0 = all.
    precision: of products, see `decoder.build`.
  """
  config = heads.config
  layer = eagle.make_layer(config, precision)
  version = config.version

  def loss(params, frozen, batch, key):
    own = {**frozen["words"], **cast(params, heads.dtype)}
    theirs = frozen["target"]
    B, T = batch["tokens"].shape
    out = target.apply(
      theirs,
      batch["tokens"],
      positions_BT=batch["positions"],
      segment_ids=batch["segment_ids"],
      logits_at=jnp.zeros((B, 0), jnp.int32),
    )
    taps = jax.lax.stop_gradient(out.hidden)
    final = taps[:, :, -1]
    features = taps[:, :, : taps.shape[2] - (version == 3)]
    features = features.reshape(B, T, -1)
    if version == 1 and noise:
      spread = jax.random.uniform(key, features.shape, minval=-1, maxval=1)
      features = features + noise * spread.astype(features.dtype)
    segment = batch["segment_ids"]
    visible = (segment[:, :, None] == segment[:, None]) & jnp.tril(
      jnp.ones((T, T), bool)
    )[None]
    feature = layer.fuse(own, features)
    keys: list[Array] = []
    values: list[Array] = []
    passes: list[dict[str, Array]] = []
    for s in range(steps):
      tokens, weights = pairs_of(batch, s)
      embeds = target.embed(theirs, tokens).astype(heads.dtype)
      made = layer.project(own, embeds, feature, batch["positions"] + s)
      keys.append(made.k)
      values.append(made.v)
      with jax.default_matmul_precision(precision):
        y = attend_chains(made.q, keys, values, visible, layer.scale)
      y = y.astype(made.residual.dtype)
      feature, state = layer.finish(own, made.residual, y)
      # Where the target said the same: its law is then made once for all.
      found = {"feature": feature, "state": state, "weights": weights}
      passes.append({k: earlier(x, s + 1) for k, x in found.items()})
    piece = functools.partial(judge, own, theirs)
    arrays = {"final": final, "passes": passes}
    sums = losses.sum_chunks(piece, arrays, chunk)
    return sums.pop("loss"), sums

  def judge(own, theirs, x):
    """Compares every pass with the target's law, and its state, there."""
    mine = config.words
    logits = jax.lax.stop_gradient(target.unembed(theirs, x["final"]))
    counted = jnp.ones(logits.shape[:-1])
    if mine.own_matrix:
      ids = own["ids"] if mine.mapped else jnp.arange(mine.size)
      logits, counted = losses.keep_ids(logits, ids, counted)
    total: dict[str, Array] = {}
    for s, found in enumerate(x["passes"]):
      weights = found["weights"]
      guess = mine.logits(own, target, theirs, found["state"])
      value, alpha = losses.divergence(
        "forward_kl", logits, guess, weights * counted
      )
      value = value.sum()
      if version == 1:
        away = found["feature"].astype(jnp.float32) - x["final"]
        away = jnp.where(weights[..., None] != 0, away, 0.0)
        size = jnp.abs(away)
        smooth = jnp.where(size < 1, 0.5 * away**2, size - 0.5).mean(-1)
        total["feature_loss"] = (smooth * weights).sum()
        value = total["feature_loss"] + law_weight * value
      total["loss"] = total.get("loss", 0.0) + step_decay**s * value
      if s:
        total[f"acceptance_{s + 1}"] = alpha.sum()
        continue
      agree = logits.argmax(-1) == guess.argmax(-1)
      total["acceptance"] = alpha.sum()
      total["agreement"] = (agree * weights * counted).sum()
      total["tokens"] = weights.sum()
    return total

  return loss


def build(
  config: Any,
  loaded: Loaded,
  mesh: Any,
  held_out: Sequence[Sequence[int]],
  learn: Sequence[Example] = (),
) -> Recipe:
  """Builds the recipe.

  Args:
    config: see configs/eagle.py.
    loaded: the target, its parameters plain arrays.
    mesh: of axes 'data' and 'model', or None.
    held_out: prompts for the decoder, as token ids.
    learn: the examples, to count words.

  Raises:
    ValueError: see `check`; or if the target cannot have such a head.
  """
  check(config)
  target, frozen = loaded.model, loaded.params
  words, ids = choose_words(config.draft, target.config.vocab_size, learn)
  taps = tuple(config.draft.taps)
  L = target.config.num_layers
  if not all(0 <= tap <= L for tap in taps):
    raise ValueError(f"draft.taps {taps} are not in [0, {L}]")
  heads = eagle.build(
    eagle.config_of(
      target.config,
      config.draft.version,
      words,
      taps=taps,
      ffn_width=config.draft.ffn_width,
    ),
    dtype=frozen["final_norm"].dtype,
    precision=precision_of(config),
  )
  saved = jnp.dtype(config.dtype_saved)
  with_words = words_of(heads, ids, loaded)
  asked = HeldOut(loaded, held_out, config.eval, config.seed, mesh)

  def measure(params) -> dict[str, float]:
    draft = heads_lib.draft_of(heads, params, with_words, saved)
    options = {
      name: config.eval[name] for name in ("num_nodes", "depth", "width")
    }
    return asked.rates("eagle", draft, options)

  def save(params, folder: Path, info: dict[str, Any]) -> None:
    c = heads.config
    own = {
      "version": c.version,
      "taps": list(c.taps),
      "ffn_width": c.ffn_width,
      "fc_bias": c.fc_bias,
    }
    heads_lib.save(folder, heads, params, with_words, saved, own, info)

  return Recipe(
    init=functools.partial(heads_lib.start, heads),
    loss=make_loss(
      shown(target, heads),
      heads,
      steps=config.loss.steps,
      step_decay=config.loss.step_decay,
      law_weight=config.loss.law_weight,
      noise=config.loss.noise,
      chunk=config.loss.chunk,
      precision=precision_of(config),
    ),
    frozen={"target": frozen, "words": with_words},
    shardings=functools.partial(heads_lib.shardings, heads, target, with_words),
    measure=measure if held_out else None,
    save=save,
  )
