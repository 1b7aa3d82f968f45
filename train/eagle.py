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
from jax import lax
import jax.numpy as jnp

from spec_jax import eagle
from spec_jax.base import Array, Model
from spec_jax.cache import LONG
from spec_jax.drafters import best_first
from spec_jax.heads import Heads
from spec_jax.hub import Loaded
from spec_jax.models.decoder import FINAL, PRECISION
from train import features as features_lib, heads as heads_lib, losses
from train.checks import at_least, chunk_and_file, integers
from train.heads import earlier, later, weights_later, words_of
from train.measure import HeldOut, cast, no_remat, precision_of
from train.pieces import sum_pieces
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
  f32 = jnp.float32
  q = q.reshape(B, T, G, H // G, E).astype(f32)
  k, v = (jnp.stack(x).astype(f32) for x in (keys, values))  # [S, B, T, G, E]

  def together(q, k, v, visible):
    whole = jnp.einsum("btghe,bsge->btghs", q, k[0]) * scale
    whole = jnp.where(visible[:, :, None, None], whole, _MASKED)
    own = jnp.einsum("btghe,sbtge->btghs", q, k[1:]) * scale
    weights = jax.nn.softmax(jnp.concatenate([whole, own], -1), -1)
    out = jnp.einsum("btghs,bsge->btghe", weights[..., :T], v[0])
    return out + jnp.einsum("btghs,sbtge->btghe", weights[..., T:], v[1:])

  @jax.checkpoint
  def one(x):
    q, k, v, visible = x  # [T, H / G, E], [S, T, E], [S, T, E], [T, T]
    whole = (q.reshape(-1, E) @ k[0].T).reshape(T, -1, T) * scale
    whole = jnp.where(visible[:, None], whole, _MASKED)
    own = [(q * x[:, None]).sum(-1, keepdims=True) * scale for x in k[1:]]
    weights = jax.nn.softmax(jnp.concatenate([whole, *own], -1), -1)
    out = (weights[..., :T].reshape(-1, T) @ v[0]).reshape(T, -1, E)
    for s, x in enumerate(v[1:]):
      out = out + weights[..., T + s, None] * x[:, None]
    return out

  def in_turn(q, k, v, visible):
    q = jnp.moveaxis(q, 2, 1).reshape(B * G, T, H // G, E)
    k, v = (jnp.moveaxis(x, (1, 3), (0, 1)) for x in (k, v))
    k, v = (x.reshape(B * G, *x.shape[2:]) for x in (k, v))
    out = lax.map(one, (q, k, v, jnp.repeat(visible, G, 0)))
    return jnp.moveaxis(out.reshape(B, G, T, H // G, E), 1, 2)

  if T < LONG or jax.device_count() > 1:
    out = together(q, k, v, visible)
  else:  # see `cache.attend_alone`
    out = lax.platform_dependent(
      q, k, v, visible, cpu=in_turn, default=together
    )
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
  compact: bool = False,
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
    compact: see `sum_pieces`.
    precision: of products, see `decoder.build`.
  """
  config = heads.config
  layer = eagle.make_layer(config, precision)
  version = config.version

  def loss(params, frozen, batch, key):
    own = {**frozen["words"], **cast(params, heads.dtype)}
    theirs = frozen["target"]
    B, T = batch["tokens"].shape
    taps = features_lib.of_batch(target, theirs, batch)
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
    learned: list[dict[str, Array]] = []
    counts: list[Array] = []
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
      found = {"state": state}
      if version == 1:
        found["feature"] = feature
      learned.append({k: earlier(x, s + 1) for k, x in found.items()})
      counts.append(earlier(weights, s + 1))
    weights = jnp.stack(counts, -1)
    return sum_pieces(
      judge,
      chunk,
      learned=learned,
      given={"final": final, "weights": weights},
      frozen=frozen,
      counted=(weights != 0).any(-1),
      compact=compact,
    )

  def judge(params, learned, given, frozen):
    """Compares every pass with the target's law, and its state, there."""
    del params  # words are frozen
    mine, words = config.words, frozen["words"]
    logits = target.unembed(frozen["target"], given["final"])
    counted = jnp.ones(logits.shape[:-1])
    if mine.own_matrix:
      ids = words["ids"] if mine.mapped else mine.size
      logits, counted = losses.keep_ids(logits, ids, counted)
    law = losses.law(logits)
    total: dict[str, Array] = {}
    for s, found in enumerate(learned):
      weights = given["weights"][..., s]
      guess = mine.logits(words, target, frozen["target"], found["state"])
      value, alpha = losses.divergence(
        "forward_kl", law, guess, weights * counted
      )
      value = value.sum()
      if version == 1:
        away = found["feature"].astype(jnp.float32) - given["final"]
        away = jnp.where(weights[..., None] != 0, away, 0.0)
        size = jnp.abs(away)
        smooth = jnp.where(size < 1, 0.5 * away**2, size - 0.5).mean(-1)
        total["feature_loss"] = (smooth * weights).sum()
        value = total["feature_loss"] + law_weight * value
      total["loss"] = total.get("loss", 0.0) + step_decay**s * value
      if s:
        total[f"acceptance_{s + 1}"] = alpha.sum()
        continue
      agree = losses.agreement(logits, guess, weights * counted)
      total["acceptance"] = alpha.sum()
      total["agreement"] = agree.sum()
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

  sizes = ("num_nodes", "depth", "width")
  options = {name: config.eval[name] for name in sizes}
  asked.check("eagle", heads, options)

  def measure(params) -> dict[str, float]:
    draft = heads_lib.draft_of(heads, params, with_words, saved)
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

  looked_at = shown(target, heads)
  return Recipe(
    init=functools.partial(heads_lib.start, heads),
    loss=make_loss(
      looked_at,
      heads,
      steps=config.loss.steps,
      step_decay=config.loss.step_decay,
      law_weight=config.loss.law_weight,
      noise=config.loss.noise,
      chunk=config.loss.chunk,
      compact=mesh is None,
      precision=precision_of(config),
    ),
    frozen={"target": frozen, "words": with_words},
    target=looked_at,
    taps=(*heads.config.taps, FINAL),
    shardings=functools.partial(heads_lib.shardings, heads, target, with_words),
    measure=measure if held_out else None,
    save=save,
  )
