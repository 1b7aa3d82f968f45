"""Trains a draft for a target.

  python -m train.main --config=configs/distill.py --out=runs/draft
  python -m train.main --out=runs/draft --config.data.files='("answers.jsonl",)'

The same command again goes on where the last one stopped; with more
`--config.train.steps` a run that has ended goes on to that length, its learning
rate as if it had always been so long. The best draft by tokens emitted per step
lies in `OUT/best`:

  python -m experiments.generate --config.drafter.name=vanilla \\
    --config.drafter.draft=runs/draft/best
"""

import sys
from typing import Any

from absl import flags
import ml_collections
from ml_collections import config_flags

from experiments import launch, prompts as prompt_files, results
from experiments.launch import UserError
from spec_jax import trained
from train import data, features, loop, on_policy, recipe as recipes
from train.checkpoint import Checkpoints, RunFolder
from train.checks import at_least
from train.report import Reporter

_CONFIG = config_flags.DEFINE_config_file(
  "config",
  None,
  "Configuration file, configs/distill.py if not given; override its fields "
  "with --config.x.y=value.",
)
_OUT = flags.DEFINE_string(
  "out", "", "Folder of the run; resumed if it is one."
)
_STOP_AFTER = flags.DEFINE_integer(
  "stop_after", 0, "Leave after this step, to be resumed; 0 = do not."
)

# What may be changed when a run is resumed: nothing that it computes.
_FREE = {"train": ("log_every", "keep")}


def _identity(config: ml_collections.ConfigDict, loaded: Any) -> dict[str, Any]:
  """Returns what a run is: target, configuration; not where it is run."""
  plain = launch.plain_dict(config)
  plain.pop("mesh")
  # Where states lie changes nothing, that they are rounded does.
  plain["data"]["features"] = bool(plain["data"]["features"])
  for part, names in _FREE.items():
    plain[part] = {k: v for k, v in plain[part].items() if k not in names}
  return {**plain, "target": trained.target_identity(loaded)}


def read_data(
  config: ml_collections.ConfigDict, loaded: Any
) -> tuple[list[data.Example], list[list[int]]]:
  """Returns examples to learn from and prompts held out.

  Raises:
    UserError: naming the file and the line, or the field.
  """
  part = config.data
  modes = {"auto": None, "yes": True, "no": False}
  if part.chat_template not in modes:
    raise UserError(
      f"data.chat_template must be auto, yes or no, got {part.chat_template!r}"
    )
  most = loaded.model.config.max_length
  if not 2 <= part.length <= most:
    raise UserError(f"data.length must be in [2, {most}], got {part.length}")
  with launch.user_errors():
    examples = data.read_examples(
      part.files,
      loaded,
      length=part.length,
      template=modes[part.chat_template],
      system=part.system,
      limit=part.limit,
    )
    learn, held = data.hold_out(examples, config.eval.prompts)
  room = most - config.eval.max_new_tokens
  if held and room < 1:
    raise UserError(
      f"eval.max_new_tokens must be below the context of {most}, got "
      f"{config.eval.max_new_tokens}"
    )
  return learn, [x.prompt[-room:] for x in held]


def main() -> int | None:
  """Runs the command."""
  config: ml_collections.ConfigDict = _CONFIG.value
  if not _OUT.value:
    raise UserError("--out is needed: the folder of the run")
  with launch.user_errors():
    recipe_file = recipes.load(config.recipe)
    recipe_file.check(config)
    optimizer = loop.Optimizer(**config.optimizer)
    optimizer.build(config.train.steps)
    schedule = loop.Schedule(
      steps=config.train.steps,
      stop_after=_STOP_AFTER.value,
      accumulate=config.train.accumulate,
      log_every=config.train.log_every,
      eval_every=config.eval.every,
      save_every=config.train.save_every,
    )
    at_least("train", config.train, ("batch_size", "keep"), 1)
    at_least("eval", config.eval, ("batch_size", "max_new_tokens"), 1)
    at_least("data", config.data, ("limit",), 0)
    at_least("config", config, ("seed",), 0)
  if config.execution.cpu_kernel == "on":
    raise UserError(
      "training needs plain arrays: execution.cpu_kernel must be off"
    )
  mesh = launch.mesh_of(config.mesh)
  if mesh is not None and config.train.batch_size % mesh.shape["data"]:
    raise UserError(
      f"train.batch_size {config.train.batch_size} is not a multiple of the "
      f"mesh's {mesh.shape['data']} row devices"
    )
  opened = launch.inspect(config.model, config)
  identity = _identity(config, opened.loaded)
  folder = RunFolder(_OUT.value, identity, length="train.steps")
  try:
    return _train(
      config, opened, recipe_file, optimizer, schedule, mesh, folder
    )
  finally:
    folder.close()


def _train(config, opened, recipe_file, optimizer, schedule, mesh, folder):
  learn, held_out = read_data(config, opened.loaded)
  rows = data.pack(learn, config.data.length)
  with launch.user_errors():
    fixed, drafted = on_policy.make_fixed(config, rows, schedule.accumulate)
  loaded = opened.read()
  with launch.user_errors():
    recipe = recipe_file.build(config, loaded, mesh, held_out, learn)
  if config.data.features:
    _keep_states(config, loaded, recipe, rows, fixed, drafted, folder)
  with launch.user_errors():
    batches = on_policy.mix(config, fixed, drafted, learn, recipe, folder.path)
  tokens = sum(float(row["weights"].sum()) for row in rows)
  print(
    f"{len(learn)} examples in {len(rows)} rows of {config.data.length}, "
    f"{tokens:.0f} tokens to predict, {batches.epoch} steps an epoch of data; "
    f"{len(held_out)} prompts held out",
    file=sys.stderr,
  )
  info = {
    "target": folder.identity["target"],
    "recipe": config.recipe,
    "config": launch.plain_dict(config),
    "tokens": tokens,
    "environment": results.environment(),
  }
  checkpoints = Checkpoints(folder.path / "checkpoints", config.train.keep)
  try:
    if folder.ended_at not in (None, checkpoints.latest()):
      raise UserError(
        f"a run is prolonged when it has ended: {folder.path} stands at step "
        f"{checkpoints.latest() or 0} of {folder.ended_at}"
      )
    if folder.lengths:
      info["prolonged_from"] = folder.lengths
    with launch.user_errors():
      best = loop.train(
        recipe,
        batches,
        optimizer,
        schedule,
        out=folder.path,
        checkpoints=checkpoints,
        reporter=Reporter(folder.path),
        seed=config.seed,
        mesh=mesh,
        info=info,
        begin=folder.begin,
      )
  finally:
    checkpoints.close()
  if best:
    words = ", ".join(f"{k} {v:.4g}" for k, v in best.items())
    print(f"best: {words}; {folder.path / 'best'}")
  return 0


def _keep_states(config, loaded, recipe, rows, fixed, drafted, folder):
  """Lets batches bring the target's states from disk."""
  if drafted or recipe.target is None:
    raise UserError(
      "data.features keeps the target's states of data that stays: not with "
      f"on_policy.part or recipe {config.recipe!r}"
    )
  dtype = loaded.params["final_norm"].dtype.name
  how = {"dtype": dtype, "precision": config.execution.matmul_precision}
  fixed.bring(
    features.FIELD,
    features.keep(
      config.data.features,
      recipe.target,
      recipe.taps,
      loaded.params,
      rows,
      {**folder.identity["target"], **how},
    ),
  )


if __name__ == "__main__":
  launch.run(main, prompt_files.root("configs/distill.py"))
