"""Trains Medusa heads and their target together (Medusa-2).

The target's layers and final norm learn too; its embedding and output matrix
stay, so that heads and target go on sharing them. The loss is

  law_weight KL(target as it was || target) + token_weight cross-entropy
    + heads_weight sum_k head_decay^k cross-entropy of head k

whose first term, self-distillation, keeps the target what it was. Heads learn
`head_rate` times as fast, and alone for the first `heads_first` steps.

The result is another target: it is written beside the heads, as a folder that
any command loads as its model, and the heads belong to that one alone.

Reference: Cai et al. 2024 (Medusa), sections 2.2.2 and 2.3.2.
"""

from collections.abc import Sequence
import os
from pathlib import Path
import shutil
import tempfile
from typing import Any

import jax.numpy as jnp

from spec_jax import hub, hub_write, trained, trained_draft
from spec_jax.base import Model
from spec_jax.heads import Heads
from spec_jax.hub import Loaded
from spec_jax.models import decoder
from train import features, heads as heads_lib, losses, medusa as medusa_1
from train.checks import above, at_least
from train.distill import unstack_layers
from train.heads import words_of
from train.measure import HeldOut, cast, precision_of
from train.pieces import sum_pieces
from train.recipe import Recipe
from train.records import Example

__all__ = ["build", "check", "make_loss"]

# Where the target lies in the folder of the best.
TARGET = "target"


def check(config: Any) -> None:
  """Checks what can be known before the target is read.

  Raises:
    ValueError: naming the field, its range and what it got.
  """
  medusa_1.check(config)
  joint = config.joint
  names = ("law_weight", "token_weight", "heads_weight", "heads_first")
  at_least("joint", joint, names, 0)
  above("joint", joint, ("head_rate",), 0)
  if not joint.law_weight + joint.token_weight > 0:
    raise ValueError(
      "joint.law_weight or joint.token_weight must be above 0, or nothing "
      "holds the target"
    )


def make_loss(
  target: Model,
  heads: Heads,
  *,
  decay: float,
  law_weight: float,
  token_weight: float,
  heads_weight: float,
  chunk: int = 0,
  compact: bool = False,
):
  """Makes the recipe's loss, see `Recipe.loss` and this file's page.

  Args:
    target: trained from, and taught by, the frozen parameters.
    heads: trained with it.
    decay: weight of head `k` is `decay ** k`.
    law_weight: of the self-distillation.
    token_weight: of the data's next token.
    heads_weight: of the heads' loss; the paper's lambda_0.
    chunk: positions whose logits exist at a time, a divisor of `T`; 0 = all.
    compact: see `sum_pieces`.
  """

  def loss(params, frozen, batch, key):
    del key  # nothing is drawn
    before = frozen["target"]
    now = {**before, **cast(params["target"], heads.dtype)}
    teacher = features.of_batch(target, before, batch)[:, :, 0]
    hidden = features.read(target, now, batch)[:, :, 0]
    known = medusa_1.told(heads, frozen["words"], batch)
    weights = batch["weights"]
    return sum_pieces(
      judge,
      chunk,
      params={"heads": cast(params["heads"], heads.dtype)},
      learned={"hidden": hidden},
      given={
        "heads": known,
        "teacher": teacher,
        "labels": batch["labels"],
        "weights": weights,
      },
      frozen=frozen,
      counted=(weights != 0) | (known["weights"] != 0).any(-1),
      compact=compact,
    )

  def judge(params, learned, given, frozen):
    # Embedding and output matrix are the target's before and now.
    before, own = frozen["target"], {**frozen["words"], **params}
    hidden, weights = learned["hidden"], given["weights"]
    found = medusa_1.judge(
      target, heads, own, before, decay, {"hidden": hidden, **given["heads"]}
    )
    wanted = target.unembed(before, given["teacher"])
    mine = target.unembed(before, hidden)
    law, alpha = losses.divergence("forward_kl", wanted, mine, weights)
    token = losses.cross_entropy(mine, given["labels"], weights)
    total = law_weight * law.sum() + token_weight * token.sum()
    return {
      **found,
      "heads_loss": found["loss"],
      "loss": total + heads_weight * found["loss"],
      "law_loss": law.sum(),
      "same_law": alpha.sum(),
      "tokens": weights.sum(),
    }

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
    config: see configs/medusa_joint.py.
    loaded: the target, its parameters plain arrays.
    mesh: of axes 'data' and 'model', or None.
    held_out: prompts for the decoder, as token ids.
    learn: the examples, to count words.

  Raises:
    ValueError: see `check`.
  """
  check(config)
  frozen = loaded.params
  joint, dtype = config.joint, frozen["final_norm"].dtype
  target = decoder.build(
    loaded.model.config,
    dtype=dtype,
    scan_layers=isinstance(frozen["layers"], dict),
    remat=config.train.remat,
    precision=precision_of(config),
  )
  heads, with_words = medusa_1.make_heads(config, loaded, learn)
  saved = jnp.dtype(config.dtype_saved)
  tuned = [n for n in frozen if n not in trained_draft.SHARED]
  asked = HeldOut(loaded, held_out, config.eval, config.seed, mesh)
  asked.check("medusa", heads, {"num_nodes": config.eval.num_nodes})
  kept = medusa_1.Measured(asked, heads, with_words, saved)
  ids = with_words.get("ids")

  def init(key):
    return {
      **heads_lib.start(heads, key),
      "target": cast({n: frozen[n] for n in tuned}, jnp.float32),
    }

  def shardings(mesh):
    own, frozen = heads_lib.shardings(heads, target, with_words, mesh)
    return {**own, "target": {n: frozen["target"][n] for n in tuned}}, frozen

  def rates(step):
    alone = step < joint.heads_first
    return {
      "heads": jnp.float32(joint.head_rate),
      "target": jnp.where(alone, 0.0, 1.0),
    }

  def target_of(params) -> Loaded:
    """Returns the tuned target as it is written: all of it rounded."""
    whole = {**frozen, **cast(params["target"], dtype)}
    return loaded._replace(params=cast(cast(whole, saved), dtype))

  def measure(params) -> dict[str, float]:
    now = target_of(params)
    kept.asked = asked._replace(loaded=now)
    kept.words = words_of(heads, ids, now)
    return kept.measure({"heads": params["heads"]})

  def save(params, folder: Path, info: dict[str, Any]) -> None:
    whole = dict(target_of(params).params)
    if isinstance(whole["layers"], dict):
      whole["layers"] = unstack_layers(whole["layers"])
    folder.mkdir(parents=True, exist_ok=True)
    # The card names one target and the link leads to it: whatever is killed,
    # the target before is there until the new one is whole.
    for left in folder.glob("part-*"):  # of a save that was killed
      shutil.rmtree(left)
    part = Path(tempfile.mkdtemp(dir=folder, prefix="part-"))
    part.chmod(0o755)
    hub_write.write_model(part, loaded, whole, dtype=saved)
    written = hub.inspect(str(part), cpu_kernel="off").loaded
    of_target = trained.target_identity(written)
    place = folder / f"{TARGET}-{of_target['weights_sha256'][:12]}"
    if place.exists():
      shutil.rmtree(part)
    else:
      os.replace(part, place)
    of_target = {**of_target, "name": str(place)}
    own = {**info, "made_from": info.get("target"), "target": of_target}
    kept.save({"heads": params["heads"]}, folder, own)
    link = folder / f"{TARGET}.tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(place.name)
    os.replace(link, folder / TARGET)
    for old in folder.glob(f"{TARGET}-*"):
      if old != place:
        shutil.rmtree(old)

  return Recipe(
    init=init,
    loss=make_loss(
      target,
      heads,
      decay=config.loss.head_decay,
      law_weight=joint.law_weight,
      token_weight=joint.token_weight,
      heads_weight=joint.heads_weight,
      chunk=config.loss.chunk,
      compact=mesh is None,
    ),
    frozen={"target": frozen, "words": with_words},
    target=target,
    shardings=shardings,
    measure=measure if held_out else None,
    save=save,
    rates=rates,
  )
