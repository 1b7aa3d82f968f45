"""Searches the layers of a model that draft best for the whole of it.

  python -m experiments.search_layers --out=experiments/results/layers.jsonl
  python -m experiments.generate --config.drafter.name=vanilla
    --config.drafter.draft=@experiments/results/layers.best.json

The target answers some prompts once. A set of layers then reads prompt and
answer in one pass, which says where it agrees: greedily by the likeliest token,
at a temperature by the overlap of the two laws. With the seconds of passes
measured here, that is the expected time per verified token at the best draft
length: what the search makes small. A run that was killed goes on: each set
that was tried is a line. The best set so far is kept in `<out>.best.json`, and
decoded with in the end.
"""

from collections.abc import Sequence
import contextlib
import functools
import json
import os
from pathlib import Path
from typing import Any

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from experiments import (
  checks,
  launch,
  layer_search,
  prompts as prompt_files,
  results,
  show,
  timing,
)
from experiments.launch import UserError
from experiments.layer_search import Costs, Layers, Score, Spent
import spec_jax
from spec_jax import Settings, hub
from spec_jax.generate import generate
from spec_jax.pairing import resolve_draft
from spec_jax.sampling import warp
from spec_jax.settings import in_use, to_arrays

_MODEL = flags.DEFINE_string("model", "smollm2-135m-instruct", "The target.")
_OUT = flags.DEFINE_string("out", "", "JSON-lines file of the sets tried.")
_PROMPTS = flags.DEFINE_string(
  "prompts", "", "A file of prompts instead of four edits and four chats."
)
_METHOD = flags.DEFINE_string("method", "bayesian", "greedy or bayesian.")
_ITERATIONS = flags.DEFINE_integer("iterations", 200, "Sets tried at most.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the search and of sampled texts.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "Of the texts.")
_TOKENS = flags.DEFINE_integer("tokens", 64, "Tokens of an answer at most.")
_DEPTH = flags.DEFINE_integer("max_depth", 8, "Longest draft considered.")
_ROUNDS = flags.DEFINE_integer("rounds", 15, "Rounds of timing passes.")
_HELD, _SLOTS = 200, 512  # of the passes that are timed


def measure_costs(loaded, depth: int, rounds: int) -> Costs:
  """Times the target's passes by width and drafts by number of layers."""
  L = loaded.model.config.num_layers
  slots = min(_SLOTS, loaded.model.config.max_length)
  held = min(_HELD, slots // 2)
  numbers = sorted({1, max(1, L // 4), max(1, L // 2), L})

  def timer(draft, width):
    model, params = resolve_draft(loaded, draft)
    return timing.pass_of(model, params, width, 1, slots=slots, held=held)

  cases = {("target", n): timer("target", n) for n in range(1, depth + 2)}
  cases |= {("draft", n): timer(n, 1) for n in numbers}
  ms = timing.medians(timing.take_turns(cases, rounds))
  target = np.maximum.accumulate([ms["target", n] for n in range(1, depth + 2)])
  base, layer = layer_search.fit_line(
    numbers, [ms["draft", n] / 1e3 for n in numbers]
  )
  return Costs(tuple((target / 1e3).tolist()), base, layer)


@functools.partial(jax.jit, static_argnums=0)
def _laws(model, params, tokens, at, sampling):
  """Returns `[R, V]`, the law after each of `at`, by one causal pass."""
  positions = jnp.arange(tokens.shape[1])[None]
  out = model.apply(
    params, tokens, positions, None, None, None, logits_at=at[None]
  )
  R = at.shape[0]
  rows = jax.tree.map(
    lambda x: jnp.broadcast_to(x, (R, *x.shape[1:])), sampling
  )
  return warp(out.logits[0], rows)


@jax.jit
def _overlap(p, q):
  return jnp.minimum(p, q).sum(-1)


class Texts:
  """The target's answers and its laws at their tokens, read once.

  A greedy law is a point mass, so the overlap of two is 1 where they agree.

  Attributes:
    outputs: ids of each answer.
  """

  def __init__(self, loaded, prompts, settings: Settings, seed: int):
    self._loaded = loaded
    chats = prompt_files.with_template(loaded.tokenizer, prompts, "auto", "")
    out = generate(loaded, chats, settings=settings, seed=seed)
    self.outputs = out.ids
    self._sampling = to_arrays(
      [settings], in_use([settings]), loaded.model.config.vocab_size
    )
    whole = [[*c.prompt_ids, *c.ids] for c in out.completions]
    # One length for all, so that a number of layers is one program.
    width = max(map(len, whole))
    tokens = np.zeros((len(whole), width), np.int32)
    at = np.zeros((len(whole), max(map(len, out.ids))), np.int32)
    for row, c in enumerate(out.completions):
      tokens[row, : len(whole[row])] = whole[row]
      last = len(c.prompt_ids) - 1
      at[row] = np.minimum(last + np.arange(at.shape[1]), width - 1)
    self._tokens, self._at = tokens, at
    self._targets = [
      self._law(loaded.model, loaded.params, row) for row in range(len(whole))
    ]

  def _law(self, model, params, row: int):
    tokens, at = self._tokens[row][None], self._at[row]
    return _laws(model, params, tokens, at, self._sampling)

  def agreements(self, layers: Sequence[int]) -> list[list[float]]:
    """Returns, by text, the chance that each token's draft is accepted."""
    model, params = resolve_draft(self._loaded, list(layers))
    found = []
    for row, output in enumerate(self.outputs):
      chance = _overlap(self._targets[row], self._law(model, params, row))
      kept = np.asarray(chance, float)[: len(output)]
      found.append(np.clip(kept, 0.0, 1.0).tolist())
    return found


def words(layers: Sequence[int]) -> str:
  """Returns layers as the command line takes them: (0, 1, 2, 5) is 0-2,5."""
  parts: list[list[int]] = []
  for i in layers:
    if parts and parts[-1][1] == i - 1:
      parts[-1][1] = i
    else:
      parts.append([i, i])
  return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in parts)


def write_json(path: Path, record: dict[str, Any]) -> None:
  """Writes a file in one piece."""
  temporary = path.with_name(path.name + ".tmp")
  temporary.write_text(json.dumps(record, indent=2) + "\n")
  os.replace(temporary, path)


class Tried:
  """The sets tried so far: those of the file, and new ones as they are asked.

  Attributes:
    best: the best set and its score, of those that this search asked for.
  """

  def __init__(self, out, texts: Texts, costs: Costs, most: int, bar, keep):
    """Begins with no set asked for.

    Args:
      out: the file.
      texts: of the target.
      costs: of passes.
      most: sets that may be asked for.
      bar: shows how many were.
      keep: called with each best set and its score.
    """
    self._out, self._texts, self._costs = out, texts, costs
    self._most, self._bar, self._keep = most, bar, keep
    self._asked: set[Layers] = set()
    self.best: tuple[Layers, Score] | None = None

  def __call__(self, layers: Layers) -> float:
    """Returns the objective of a set; raises `Spent` after the last one."""
    new = layers not in self._asked
    if new and len(self._asked) >= self._most:
      raise Spent
    if layers not in self._out.done:
      agreements = self._texts.agreements(layers)
      score = layer_search.score(agreements, len(layers), self._costs)
      self._out.write({"layers": layers, **score._asdict()})
    line = self._out.done[layers]
    score = Score(**{name: line[name] for name in Score._fields})
    if new:
      self._asked.add(layers)
      self._bar.update()
    if self.best is None or score.objective < self.best[1].objective:
      self.best = layers, score
      self._keep(layers, score)
      plain = self._costs.target[0]
      with tqdm.external_write_mode():
        print(
          f"{len(self._asked)}: {plain / score.objective:.3f} x plain with "
          f"{len(layers)} layers {words(layers)}, {score.depth} deep, "
          f"{score.emitted_per_step:.2f} tokens a step",
          flush=True,
        )
    elif new and self._bar.disable and len(self._asked) % 20 == 0:
      show.note(f"{len(self._asked)} of {self._most} sets")
    return score.objective


def _measure(loaded, prompts, settings, layers: Layers, depth: int) -> dict:
  """Decodes with the best set; returns what was accepted."""
  chats = prompt_files.with_template(loaded.tokenizer, prompts, "auto", "")
  out = generate(
    loaded,
    chats,
    settings=settings,
    seed=_SEED.value,
    drafter="vanilla",
    draft=list(layers),
    options={"num_draft": depth},
    batch_size=1,
  )
  names = ("acceptance_rate", "emitted_per_step", "accept_cond")
  return {name: out.report[name] for name in names}


def _prompts() -> list[Any]:
  if _PROMPTS.value:
    return prompt_files.read((), _PROMPTS.value)
  return [p for x in prompt_files.bench_sets().values() for p in x[:4]]


def main() -> None:
  """Searches, and writes the best set and what it was measured to accept."""
  if not _OUT.value.endswith(".jsonl"):
    raise UserError(f"give --out=FILE.jsonl, got {_OUT.value!r}")
  checks.at_least(1, _ITERATIONS, _TOKENS, _DEPTH, _ROUNDS)
  if _METHOD.value not in layer_search.METHODS:
    raise UserError(
      f"method must be one of {', '.join(layer_search.METHODS)}, got "
      f"{_METHOD.value!r}"
    )
  best_file = Path(_OUT.value.removesuffix(".jsonl") + ".best.json")
  checks.out_file(best_file)
  prompts = _prompts()
  loaded = spec_jax.load(_MODEL.value)
  L = loaded.model.config.num_layers
  if L < 2:
    raise UserError(f"a model of {L} layer has no smaller set of layers")
  settings = Settings(
    temperature=_TEMPERATURE.value, max_new_tokens=_TOKENS.value
  )
  with launch.user_errors():
    settings.check(loaded.model.config.vocab_size)
  prompt_files.work_of(loaded, prompts, settings, seed=_SEED.value)
  fixed = {
    "command": "experiments.search_layers",
    "model": _MODEL.value,
    "weights_sha256": hub.weights_hash(loaded),
    "config_sha256": loaded.hashes.get("config"),
    "num_layers": L,
    "temperature": _TEMPERATURE.value,
    "tokens": _TOKENS.value,
    "max_depth": _DEPTH.value,
    "seed": _SEED.value,
  }
  identity = {**fixed, "prompts": prompts}
  with contextlib.closing(
    results.ResultFile(
      _OUT.value,
      identity,
      lambda x: tuple(x["layers"]),
      fields=Score._fields,
    )
  ) as out:
    costs = out.manifest.get("costs")
    if costs is None:
      show.note("timing passes")
      costs = measure_costs(loaded, _DEPTH.value, _ROUNDS.value)._asdict()
      out.write_manifest(
        {**fixed, "costs": costs, "environment": results.environment()}
      )
    costs = Costs(**{**costs, "target": tuple(costs["target"])})
    show.note("the target answers the prompts")
    with launch.user_errors():
      texts = Texts(loaded, prompts, settings, _SEED.value)

    def keep(layers, score, **more):
      record = {
        **fixed,
        "method": _METHOD.value,
        "layers": layers,
        **score._asdict(),
        "plain_s": costs.target[0],
        "predicted_ratio": costs.target[0] / score.objective,
        **more,
      }
      write_json(best_file, record)
      return record

    with tqdm(total=_ITERATIONS.value, unit="set", disable=None) as bar:
      tried = Tried(out, texts, costs, _ITERATIONS.value, bar, keep)
      layer_search.search(_METHOD.value, tried, L, seed=_SEED.value)
    assert tried.best is not None
    layers, score = tried.best
    measured = _measure(loaded, prompts, settings, layers, score.depth)
    record = keep(
      layers, score, measured=measured, environment=results.environment()
    )
  print(
    f"best: {words(layers)} ({len(layers)} of {L} layers), "
    f"{score.depth} deep, predicted {record['predicted_ratio']:.3f} x plain, "
    f"{score.emitted_per_step:.2f} tokens a step (measured "
    f"{measured['emitted_per_step']:.2f}); in {best_file}"
  )
  if record["predicted_ratio"] <= 1:
    print(
      f"of {len(out.done)} sets none is predicted to pay: decoding is best "
      "left plain"
    )


if __name__ == "__main__":
  launch.run(main)
