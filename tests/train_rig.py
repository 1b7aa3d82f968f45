"""A tiny distillation without commands: what the training tests share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import pairing, sharding, trained_draft
from spec_jax.architecture import shallow_config
from spec_jax.models import decoder
from spec_jax.rope import Rope
from tests import fakes
from train import data, distill, eagle, loop, medusa, medusa_joint
from train.checkpoint import Checkpoints
from train.recipe import Recipe
from train.records import Example
from train.report import Reporter

LENGTH = 12
# Of a loss: pieces, as at real sizes; on one device also `compact`.
PIECES = {"chunk": 4}


def target(*, meshable: bool = False):
  """Returns (model, params) of two layers; 8 heads where a mesh wants them."""
  if not meshable:
    return fakes.tiny(windows=(None, None))
  config = decoder.DecoderConfig(
    vocab_size=16,
    width=32,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=4,
    ffn_width=32,
    max_length=64,
    rope=Rope((1.0, 0.1)),
  )
  return fakes._seeded(decoder.build(config), 3)


def rows(count: int, vocab: int = 13, seed: int = 0) -> list[dict]:
  """Returns packed rows of random examples, one a row."""
  rng = np.random.default_rng(seed)
  examples = []
  for i in range(count):
    ids = rng.integers(0, vocab, LENGTH).astype(np.int32)
    examples.append(Example(ids, np.arange(LENGTH) >= 2 + i % 3))
  return data.pack(examples, LENGTH)


def recipe(
  pair, *, name: str = "forward_kl", words: int = 0, pieces=PIECES, **change
) -> Recipe:
  """Returns a recipe that trains the first layer; measures nothing."""
  model, params = pair
  _, start = pairing.choose_layers(model.config, params, 1)
  draft = decoder.build(shallow_config(model.config, [0], words))
  chosen = {n: x for n, x in start.items() if n not in trained_draft.SHARED}

  def shardings(mesh):
    places = sharding.params_shardings(draft, mesh)
    own = {n: s for n, s in places.items() if n not in trained_draft.SHARED}
    return own, sharding.params_shardings(model, mesh)

  found = Recipe(
    init=lambda key: fakes.noisy(chosen),
    loss=distill.make_loss(model, draft, name=name, **pieces),
    frozen=params,
    shardings=shardings,
    measure=None,
    save=lambda params, folder, info: None,
  )
  return found._replace(**change)


def heads_recipe(
  kind: str, pair, *, version: int = 3, ids=None, pieces=PIECES
) -> Recipe:
  """Returns a recipe that trains heads from where training starts."""
  model, params = pair
  made, drawn = fakes.heads_of(kind, pair, version=version, ids=ids)
  words = {n: x for n, x in drawn.items() if n in ("head", "ids")}
  start = {n: x for n, x in drawn.items() if n not in words}
  if kind == "medusa":
    start = {"heads": made.init(None)["heads"]}
    loss = medusa.make_loss(model, made, decay=0.8, **pieces)
  else:
    steps = 3 if version == 3 else 1
    shown = eagle.shown(model, made)
    loss = eagle.make_loss(shown, made, steps=steps, **pieces)

  def shardings(mesh):
    own = sharding.params_shardings(made, mesh, replicate=True)
    return (
      {n: own[n] for n in start},
      {
        "target": sharding.params_shardings(model, mesh),
        "words": {n: own[n] for n in words},
      },
    )

  return Recipe(
    init=lambda key: start,
    loss=loss,
    frozen={"target": params, "words": words},
    shardings=shardings,
    measure=None,
    save=lambda params, folder, info: None,
  )


def joint_recipe(pair, *, pieces=PIECES) -> Recipe:
  """Returns a recipe that trains heads and their target."""
  model, params = pair
  made, _ = fakes.heads_of("medusa", pair)
  tuned = [n for n in params if n not in trained_draft.SHARED]

  def shardings(mesh):
    of_target = sharding.params_shardings(model, mesh)
    own = sharding.params_shardings(made, mesh, replicate=True)
    return (
      {"heads": own["heads"], "target": {n: of_target[n] for n in tuned}},
      {"target": of_target, "words": {}},
    )

  return Recipe(
    init=lambda key: {
      "heads": made.init(None)["heads"],
      "target": {n: params[n] for n in tuned},
    },
    loss=medusa_joint.make_loss(
      model,
      made,
      decay=0.8,
      law_weight=1.0,
      token_weight=0.5,
      heads_weight=0.3,
      **pieces,
    ),
    frozen={"target": params, "words": {}},
    shardings=shardings,
    measure=None,
    save=lambda params, folder, info: None,
    rates=lambda step: {"heads": jnp.float32(4), "target": jnp.float32(1)},
  )


# Every recipe, on a target that the caller gives.
RECIPES = {
  "distill": recipe,
  "distill_words": functools.partial(recipe, words=9),
  "medusa": functools.partial(heads_recipe, "medusa"),
  "medusa_words": functools.partial(
    heads_recipe, "medusa", ids=(0, 1, 2, 4, 5, 7, 8, 10, 11)
  ),
  "medusa_joint": joint_recipe,
  "eagle_1": functools.partial(heads_recipe, "eagle", version=1),
  "eagle_3": functools.partial(heads_recipe, "eagle"),
  "eagle_words": functools.partial(
    heads_recipe, "eagle", ids=(0, 1, 2, 4, 5, 7, 8, 10, 11)
  ),
}


def stack(some: list[dict]) -> dict[str, np.ndarray]:
  """Returns rows as one batch."""
  return {name: np.stack([row[name] for row in some]) for name in some[0]}


def train(
  folder, made: Recipe, schedule: loop.Schedule, *, mesh=None, rate=3e-3, **more
):
  """Trains in a folder; returns what `loop.train` does."""
  folder.mkdir(exist_ok=True)
  checkpoints = Checkpoints(folder / "checkpoints")
  try:
    return loop.train(
      made,
      data.Batches(rows(6), 2 * schedule.accumulate, 0),
      loop.Optimizer(learning_rate=rate, warmup=2, **more),
      schedule,
      out=folder,
      checkpoints=checkpoints,
      reporter=Reporter(folder, quiet=True),
      mesh=mesh,
    )
  finally:
    checkpoints.close()


def last_state(folder, made: Recipe, steps: int, like=None):
  """Restores the last checkpoint of a folder."""
  if like is None:
    optimizer, _ = loop.Optimizer(warmup=2).build(steps)
    like = loop.make_state(made, optimizer, 0)
  checkpoints = Checkpoints(folder / "checkpoints")
  try:
    return checkpoints.restore(like)
  finally:
    checkpoints.close()


def as_numpy(tree):
  """Returns a pytree's leaves as numpy arrays."""
  return [np.asarray(x) for x in jax.tree.leaves(tree)]
