"""DistillSpec in small: which loss and whose text make a good draft.

  python -m experiments.distillspec --answers=answers.jsonl --truth=data.jsonl
    --out=runs/distillspec

Distils the first layers of the target by every loss of `--losses` on every
source of `--sources`: `truth`, the data's own answers; `answers`, the target's
(`python -m train.generate`); `own`, the draft's, written as it learns; `mix`,
half of the target's and half of the draft's. All runs have the same number of
steps. Reported on the target's answers to prompts held out: alpha at T = 1
(mean of the sum of min(p, q)) and at T = 0 (how often both have the same
likeliest token), and what the decoder emits a step, greedy.

`--start=shipped:smollm2-135m-instruct/distill` goes on from a draft that is
trained already, as the paper does: one that knows nothing yet writes nothing
worth learning from. A grid that was stopped goes on. Published (Zhou et al.
2024, section 5): no loss is best everywhere, the draft's own text and the
target's are about as good, and both better than the data's.
"""

import json
from pathlib import Path
import sys
from typing import Any

from absl import flags
import jax
import numpy as np

from configs import distill as defaults
from experiments import checks, launch, results
from experiments.launch import UserError
import spec_jax
from spec_jax import trained
from spec_jax.builtin import sha256_of
from train import data, distill, loop, losses, on_policy
from train.checkpoint import RunFolder
from train.recipe import Recipe
from train.small_run import train_through

_MODEL = flags.DEFINE_string("model", "smollm2-135m-instruct", "The target.")
_ANSWERS = flags.DEFINE_string(
  "answers", "", "The target's answers, from train.generate."
)
_TRUTH = flags.DEFINE_string("truth", "", "Data with answers of its own.")
_OUT = flags.DEFINE_string("out", "", "Folder of the runs; resumed.")
_LOSSES = flags.DEFINE_list(
  "losses", ["forward_kl", "reverse_kl", "jsd", "tvd"], "Losses to try."
)
_SOURCES = flags.DEFINE_list(
  "sources", ["truth", "answers", "own", "mix"], "Whose text to learn from."
)
_START = flags.DEFINE_string(
  "start",
  "",
  "A trained draft of these layers to go on from, its folder or 'shipped:...'; "
  "the target's own layers if not given.",
)
_RATE = flags.DEFINE_float(
  "learning_rate",
  1e-3,
  "At its highest; a draft that is trained already wants less, 1e-4 say.",
)
_LAYERS = flags.DEFINE_integer("layers", 2, "Layers of the draft.")
_STEPS = flags.DEFINE_integer("steps", 150, "Steps of each run.")
_LENGTH = flags.DEFINE_integer("length", 192, "Tokens of a row.")
_BATCH = flags.DEFINE_integer("batch_size", 4, "Rows of a step.")
_HELD = flags.DEFINE_integer("held_out", 16, "Answers held out.")
_SEED = flags.DEFINE_integer("seed", 0, "Of everything.")

# The cell of the draft that nothing was taught: no loss, no source.
_UNTRAINED = "", ""
# Part of a batch that the draft writes itself.
SOURCES = {"truth": 0.0, "answers": 0.0, "own": 1.0, "mix": 0.5}


def config_of(name: str, source: str = "answers") -> Any:
  """Returns the configuration of a run with a loss on a source."""
  config = defaults.get_config().unlock()
  config.model = _MODEL.value
  config.draft.layers = str(_LAYERS.value)
  config.draft.start = _START.value
  config.draft.words = 0  # the laws of all words are compared
  config.loss.name = name
  config.data.length = _LENGTH.value
  config.loss.chunk = 0
  config.train.steps = _STEPS.value
  config.train.batch_size = _BATCH.value
  config.optimizer.learning_rate = _RATE.value
  config.eval.max_new_tokens = 64
  config.seed = _SEED.value
  config.on_policy.part = SOURCES[source]
  return config.lock()


def _recorded() -> dict[str, Any]:
  """Returns what all runs of a grid have in common."""
  found = launch.plain_dict(config_of(""))
  # Given by the grid: losses, parts, data and what is held out.
  for part, name in (
    ("loss", "name"),
    ("on_policy", "part"),
    ("data", "files"),
    ("eval", "prompts"),
  ):
    found[part].pop(name)
  return found


def evaluate(recipe: Recipe, params: Any, rows: list[dict]) -> dict[str, float]:
  """Returns alpha at T = 1 and T = 0 on rows, and what the decoder emits."""
  step = jax.jit(
    lambda params, frozen, batch: recipe.loss(params, frozen, batch, None)[1]
  )
  total: dict[str, float] = {}
  for row in rows:
    batch = {name: x[None] for name, x in row.items()}
    for name, value in jax.device_get(
      step(params, recipe.frozen, batch)
    ).items():
      total[name] = total.get(name, 0.0) + float(value)
  tokens = max(total["tokens"], 1.0)
  assert recipe.measure is not None
  return {
    "alpha_1": total["acceptance"] / tokens,
    "alpha_0": total["agreement"] / tokens,
    **recipe.measure(params),
  }


def run_one(
  folder: Path, loss: str, source: str, loaded, learn, held, rows
) -> dict[str, float]:
  """Trains one draft, or goes on, and evaluates it."""
  config = config_of(loss, source)
  recipe = distill.build(config, loaded, None, [x.prompt for x in held])
  text = learn["truth" if source == "truth" else "answers"]
  packed = data.pack(text, config.data.length)
  fixed, drafted = on_policy.make_fixed(config, packed, 1)
  params = train_through(
    folder,
    recipe,
    on_policy.mix(config, fixed, drafted, text, recipe, folder),
    loop.Optimizer(**config.optimizer),
    loop.Schedule(steps=config.train.steps, log_every=10, save_every=50),
    config.seed,
  )
  return evaluate(recipe, params, rows)


def cell(line: dict[str, Any]) -> str:
  """Returns alpha at T = 1, at T = 0, and tokens a step."""
  rates = f"{line['alpha_1']:.3f}, {line['alpha_0']:.3f}"
  return f"{rates}, {line['emitted_per_step']:.2f}"


def table(lines: list[dict[str, Any]]) -> str:
  """Returns the grid as markdown: alpha at T = 1, at T = 0, tokens a step."""
  found = {(x["loss"], x["source"]): x for x in lines}
  names = list(dict.fromkeys(loss for loss, _ in found if loss))
  sources = list(dict.fromkeys(source for _, source in found if source))
  text = [
    f"| loss | {' | '.join(sources)} |",
    "|---|" + "---|" * len(sources),
  ]
  for name in names:
    cells = []
    for source in sources:
      x = found.get((name, source))
      cells.append(cell(x) if x else "-")
    text.append(f"| {name} | {' | '.join(cells)} |")
  if _UNTRAINED in found:
    text += ["", f"Before the first step: {cell(found[_UNTRAINED])}"]
  return "\n".join(text)


def main() -> int:
  """Runs the grid."""
  if not _OUT.value or not _ANSWERS.value:
    raise UserError("--out and --answers are needed")
  for flag, allowed in ((_LOSSES, losses.LOSSES), (_SOURCES, SOURCES)):
    wrong = [repr(name) for name in flag.value if name not in allowed]
    if wrong or not flag.value:
      raise UserError(
        f"--{flag.name} must be of {', '.join(allowed)}, got "
        f"{wrong[0] if wrong else 'none'}"
      )
  if "truth" in _SOURCES.value and not _TRUTH.value:
    raise UserError("the source 'truth' needs --truth")
  checks.at_least(1, _LAYERS, _STEPS, _LENGTH, _BATCH, _HELD)
  checks.at_least(0, _SEED)
  with launch.user_errors():
    loop.Optimizer(**config_of("").optimizer).build(_STEPS.value)
    for source in _SOURCES.value:
      on_policy.drafted_rows(config_of("", source), 1)
  loaded = spec_jax.load(_MODEL.value, cpu_kernel="off")
  with launch.user_errors():
    # That the draft can be built, before data is read.
    distill.build(config_of(_LOSSES.value[0]), loaded, None, [])
    length = _LENGTH.value
    examples = data.read_examples((_ANSWERS.value,), loaded, length=length)
    answers, held = data.hold_out(examples, _HELD.value, "--held_out")
    learn = {"answers": answers}
    if "truth" in _SOURCES.value:
      known = {tuple(x.prompt) for x in held}
      learn["truth"] = [
        x
        for x in data.read_examples((_TRUTH.value,), loaded, length=length)
        if tuple(x.prompt) not in known
      ]
  prompts = [x.prompt for x in held]
  first = distill.build(config_of(_LOSSES.value[0]), loaded, None, prompts)
  rows = data.pack(held, length)
  identity = {
    "command": "experiments.distillspec",
    "target": trained.target_identity(loaded),
    "config": _recorded(),
    "held_out": _HELD.value,
    "files": {
      name: file and sha256_of(Path(file))
      for name, file in (("answers", _ANSWERS.value), ("truth", _TRUTH.value))
    },
  }
  folder = RunFolder(_OUT.value, identity)
  path = folder.path / "grid.jsonl"
  try:
    folder.begin()
    lines = []
    if path.exists():
      lines = [json.loads(x) for x in path.read_text().splitlines()]
    done = {(x["loss"], x["source"]) for x in lines}

    def add(loss: str, source: str, steps: int, found: dict[str, float]):
      line = {
        "loss": loss,
        "source": source,
        "steps": steps,
        **{k: float(np.round(v, 5)) for k, v in found.items()},
        "environment": results.environment(),
      }
      lines.append(line)
      with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")

    if _UNTRAINED not in done:
      add(*_UNTRAINED, 0, evaluate(first, first.init(None), rows))
    for loss in _LOSSES.value:
      for source in _SOURCES.value:
        if (loss, source) in done:
          continue
        print(f"{loss} on {source}", file=sys.stderr, flush=True)
        run = folder.path / f"{loss}-{source}"
        found = run_one(run, loss, source, loaded, learn, held, rows)
        add(loss, source, _STEPS.value, found)
  finally:
    folder.close()
  print("alpha at T = 1, at T = 0, tokens a step (greedy)")
  print(table(lines))
  return 0


if __name__ == "__main__":
  launch.run(main)
