"""A small GPT, three Medusa heads, and a draft made by truncating the GPT.

  python -m experiments.tiny_medusa --out=runs/tiny
  python -m experiments.tiny_medusa --out=runs/shakespeare --text=input.txt

Trains a GPT of bytes on a text (by default the English of Python's own help
pages), then three Medusa heads on it, frozen, and compares, on pieces of text
that were held out: how often a draft is accepted, by depth, and what a step
emits, for the heads in a chain and in a tree, and for the GPT's own first
layers. All decode the same text. It takes some minutes on two cores, downloads
nothing, goes on after a stop, and leaves a table, `result.json` and
`result.png` in its folder.
"""

import dataclasses
import json
from pathlib import Path
import sys
from typing import Any

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from experiments import launch, results
from experiments.launch import UserError
from spec_jax import Settings, medusa, sharding
from spec_jax.architecture import DecoderConfig
from spec_jax.generate import generate
from spec_jax.heads import Words
from spec_jax.hub import Loaded
from spec_jax.models import decoder
from spec_jax.rope import make_rope
from spec_jax.trained_draft import BuiltDraft
from train import data, loop, losses, medusa as recipe_file
from train.checkpoint import RunFolder
from train.recipe import Recipe
from train.records import Example, example_of
from train.small_run import train_through

_OUT = flags.DEFINE_string(
  "out", "", "Folder of the run; resumed if it is one."
)
_TEXT = flags.DEFINE_string(
  "text", "", "A text file; Python's help pages if not given."
)
_STEPS = flags.DEFINE_integer("steps", 900, "Steps of the GPT.")
_HEAD_STEPS = flags.DEFINE_integer("head_steps", 300, "Steps of the heads.")
_HEADS = flags.DEFINE_integer("heads", 3, "Medusa heads.")
_LAYERS = flags.DEFINE_integer("draft_layers", 2, "Layers of the draft.")
_SEED = flags.DEFINE_integer("seed", 0, "Of everything.")

_VOCAB, _LENGTH, _BATCH = 256, 128, 16
_PROMPTS, _PROMPT, _ANSWER = 16, 64, 96


def config_of_gpt() -> DecoderConfig:
  """Returns a GPT of 4 layers and 1.1 million parameters."""
  return DecoderConfig(
    vocab_size=_VOCAB,
    width=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=4,
    head_dim=32,
    ffn_width=384,
    max_length=512,
    rope=make_rope(32, {"rope_theta": 10000.0}),
    tied=True,
  )


def read_text(path: str) -> np.ndarray:
  """Returns a text's bytes.

  Raises:
    UserError: if it cannot be read or is too short.
  """
  if path:
    try:
      raw = Path(path).expanduser().read_bytes()
    except OSError as error:
      raise UserError(f"cannot read {path}: {error.strerror}") from error
  else:
    from pydoc_data import topics

    raw = "\n".join(x for _, x in sorted(topics.topics.items())).encode()
  least = 4 * _PROMPTS * (_PROMPT + _ANSWER)
  if len(raw) < least:
    raise UserError(f"the text has {len(raw)} bytes, at least {least} needed")
  return np.frombuffer(raw, np.uint8).astype(np.int32)


def split(text: np.ndarray) -> tuple[list[Example], list[list[int]]]:
  """Returns examples to learn from, and prompts out of held-out pieces."""
  piece = len(text) // (2 * _PROMPTS)
  learn: list[Example] = []
  prompts: list[list[int]] = []
  for i in range(2 * _PROMPTS):
    part = text[i * piece : (i + 1) * piece]
    if i % 2 == 0:
      cut = len(part) - (_PROMPT + _ANSWER)
      prompts.append(part[cut : cut + _PROMPT].tolist())
      part = part[:cut]
    learn += Example(part, np.ones(len(part), bool)).pieces(_LENGTH)
  return learn, prompts


def language_recipe(model) -> Recipe:
  """Returns the recipe of the GPT itself: the next byte."""

  def loss(params, frozen, batch, key):
    del frozen, key
    logits = model.apply(
      params,
      batch["tokens"],
      batch["positions"],
      segment_ids=batch["segment_ids"],
    ).logits
    weights = batch["weights"]
    value = losses.cross_entropy(logits, batch["labels"], weights)
    right = (logits.argmax(-1) == batch["labels"]) * weights
    return value.sum(), {"acceptance": right.sum(), "tokens": weights.sum()}

  return Recipe(
    init=model.init,
    loss=loss,
    frozen={},
    shardings=lambda mesh: (sharding.params_shardings(model, mesh), {}),
    measure=None,
    save=lambda params, folder, info: None,
  )


def heads_recipe(model, params, heads) -> Recipe:
  """Returns the recipe of the heads on the trained GPT."""
  return Recipe(
    init=heads.init,
    loss=recipe_file.make_loss(model, heads, decay=0.8),
    frozen={"target": params, "words": {}},
    shardings=lambda mesh: (sharding.params_shardings(heads, mesh), {}),
    measure=None,
    save=lambda params, folder, info: None,
  )


def train(
  folder: Path, name: str, recipe: Recipe, rows: list[dict], steps: int
) -> Any:
  """Trains, or goes on; returns the parameters at the end."""
  print(f"training {name}, {steps} steps", file=sys.stderr, flush=True)
  return train_through(
    folder / name,
    recipe,
    data.Batches(rows, _BATCH, _SEED.value),
    loop.Optimizer(learning_rate=3e-3, warmup=min(50, max(1, steps // 10))),
    loop.Schedule(steps=steps, log_every=20, save_every=100),
    _SEED.value,
  )


def decode(loaded: Loaded, prompts: list[list[int]], **how) -> Any:
  """Decodes the prompts, one row at a time."""
  return generate(
    loaded,
    prompts,
    settings=Settings(max_new_tokens=_ANSWER, stop_ids=()),
    batch_size=1,
    seed=0,
    **how,
  )


def answers_of(loaded: Loaded, prompts: list[list[int]]) -> list[dict]:
  """Returns the GPT's own answers to the prompts, packed."""
  examples = [
    example_of(done.prompt_ids, done.ids)
    for done in decode(loaded, prompts).completions
  ]
  return data.pack(examples, _PROMPT + _ANSWER)


def compare(
  loaded: Loaded, prompts: list[list[int]], heads
) -> list[dict[str, Any]]:
  """Decodes the prompts by every draft; returns a line each."""
  made, own = heads
  rates = recipe_file.measure_accuracies(
    loaded.model, made, own, loaded.params, answers_of(loaded, prompts)
  )
  tree = dataclasses.replace(made.config, accuracies=rates)
  in_tree = BuiltDraft(medusa.build(tree, dtype=made.dtype), own)
  K = made.config.num_heads
  num_nodes = min(16, 1 + K * len(rates[0]))
  cases: dict[str, dict[str, Any]] = {
    "plain": {},
    f"first {_LAYERS.value} layers, chain of {K}": {
      "drafter": "vanilla",
      "draft": _LAYERS.value,
      "options": {"num_draft": K},
    },
    f"Medusa, chain of {K}": {
      "drafter": "medusa",
      "draft": in_tree,
      "options": {"tree": (1,) * K},
    },
    f"Medusa, tree of {num_nodes}": {
      "drafter": "medusa",
      "draft": in_tree,
      "options": {"num_nodes": num_nodes},
    },
  }
  lines, plain = [], None
  for name, how in cases.items():
    for _ in range(2):  # the first compiles
      out = decode(loaded, prompts, **how)
    plain = plain or out
    report = out.report
    lines.append(
      {
        "case": name,
        "emitted_per_step": report["emitted_per_step"],
        "accept_cond": report["accept_cond"],
        "tokens_per_s": report["decode_tokens_per_s"],
        "x_plain": report["decode_tokens_per_s"]
        / plain.report["decode_tokens_per_s"],
        "identical": sum(
          a == b for a, b in zip(out.ids, plain.ids, strict=True)
        ),
        "prompts": len(prompts),
      }
    )
  lines[-1]["accuracies"] = rates
  return lines


def draw(lines: list[dict[str, Any]], path: Path) -> None:
  """Plots acceptance by depth, and tokens a step."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(9, 3.6), layout="constrained")
  left, right = figure.subplots(1, 2)
  drafts = [line for line in lines if line["accept_cond"]]
  for line in drafts:
    rates = [np.nan if x is None else x for x in line["accept_cond"]]
    left.plot(range(1, len(rates) + 1), rates, marker="o", label=line["case"])
  left.set_xlabel("depth")
  left.set_ylabel("accepted, if the one before was")
  left.set_ylim(0, 1)
  left.legend(fontsize=8)
  names = [line["case"] for line in lines]
  right.barh(names, [line["emitted_per_step"] for line in lines])
  right.invert_yaxis()
  right.set_xlabel("tokens a step")
  figure.savefig(path, dpi=120)


def show(lines: list[dict[str, Any]]) -> None:
  """Prints the table."""
  print(f"{'draft':32} {'a step':>7} {'x plain':>8}  accepted by depth")
  for line in lines:
    rates = " ".join(
      "-" if x is None else f"{x:.2f}" for x in line["accept_cond"]
    )
    print(
      f"{line['case']:32} {line['emitted_per_step']:7.2f} "
      f"{line['x_plain']:8.2f}  {rates}"
    )
  same = min(line["identical"] for line in lines)
  print(f"identical to plain decoding: {same} of {lines[0]['prompts']}")


def main() -> int:
  """Runs the command.

  Returns:
    1 if a text is not plain decoding's, else 0.
  """
  if not _OUT.value:
    raise UserError("--out is needed: the folder of the run")
  config = config_of_gpt()
  for name, value, most in (
    ("steps", _STEPS.value, 1 << 30),
    ("head_steps", _HEAD_STEPS.value, 1 << 30),
    ("heads", _HEADS.value, 16),
    ("draft_layers", _LAYERS.value, config.num_layers),
  ):
    if not 1 <= value <= most:
      raise UserError(f"--{name} must be in [1, {most}], got {value}")
  text = read_text(_TEXT.value)
  identity = {
    "command": "experiments.tiny_medusa",
    "text": results.digest(text.tolist()),
    "steps": _STEPS.value,
    "head_steps": _HEAD_STEPS.value,
    "heads": _HEADS.value,
    "seed": _SEED.value,
  }
  folder = RunFolder(_OUT.value, identity)
  try:
    folder.begin()
    learn, prompts = split(text)
    rows = data.pack(learn, _LENGTH)
    model = decoder.build(config)
    params = train(
      folder.path, "gpt", language_recipe(model), rows, _STEPS.value
    )
    heads = medusa.build(
      medusa.MedusaConfig(
        width=config.width,
        num_heads=_HEADS.value,
        words=Words(_VOCAB, _VOCAB),
        max_length=config.max_length,
      )
    )
    own = train(
      folder.path,
      "heads",
      heads_recipe(model, params, heads),
      rows,
      _HEAD_STEPS.value,
    )
    loaded = Loaded(
      model,
      jax.tree.map(jnp.asarray, params),
      tokenizer=None,
      config={},
      name="tiny GPT",
      hashes={},
      stop_ids=(),
      files=(),
    )
    lines = compare(loaded, prompts, (heads, own))
    record = {"environment": results.environment(), "lines": lines}
    path = folder.path / "result.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    draw(lines, folder.path / "result.png")
  finally:
    folder.close()
  show(lines)
  print(f"{path} and result.png beside it")
  return int(any(line["identical"] < line["prompts"] for line in lines))


if __name__ == "__main__":
  launch.run(main)
