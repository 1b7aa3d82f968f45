"""Measures decoding on this machine: medians, interleaved, in one run.

  python -m experiments.speed --out=experiments/results/speed.json \
    --torch_python=/path/to/python/with/torch

Nothing else should run. Four claims, each a ratio within the run:

* plain decoding against the transformers library's greedy `generate`, in
  float32 and in bfloat16 (only with --torch_python: an interpreter that has
  torch, transformers and gguf);
* one step against the sum of its parts timed alone: the target's pass of that
  width and the draft's passes;
* tokens/s of a batch of 8 against a batch of 1;
* compiles after the first call, over 30 prompts of different lengths.
"""

from collections.abc import Callable
import functools
import json
from pathlib import Path
import sys
import time
from typing import Any

from absl import flags
import jax
import jax.numpy as jnp

from experiments import checks, launch, results, timing
from experiments.timing import medians, take_turns
from experiments.torch_peer import TorchPeer
import spec_jax
from spec_jax import Settings, hub
from spec_jax.engine import Engine
from spec_jax.pairing import resolve_draft
from spec_jax.programs import EngineConfig
from spec_jax.requests import Job, make_request
from spec_jax.settings import in_use

_MODEL = flags.DEFINE_string("model", "smollm2-135m-instruct", "The target.")
_OUT = flags.DEFINE_string("out", "", "JSON file to write.")
_TORCH = flags.DEFINE_string("torch_python", "", "Python that has torch.")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Interleaved repetitions.")
_SLOTS = flags.DEFINE_integer("slots", 512, "Cache slots, S.")
_STEPS = 16  # decoded per timing
_HELD = 200  # tokens behind a timed pass or step
_WIDEST = 5  # tokens of a step's pass

PROMPT = [1, 4093, 198, 57, 5248, 2, 198, 1, 520, 9531, 198]


def pass_of(model, params, width: int, rows: int):
  """Returns a function that times one pass of `width` tokens."""
  return timing.pass_of(
    model, params, width, rows, slots=_SLOTS.value, held=_HELD
  )


def engine_of(loaded, settings, rows, drafter="none", draft=None, **options):
  """Returns an engine with the run's cache size."""
  model, params = resolve_draft(loaded, draft)
  config = EngineConfig(
    drafter=drafter,
    options=tuple(sorted(options.items())),
    batch_size=rows,
    refill_rows=rows,
    slots=_SLOTS.value,
    use=in_use([settings]),
  )
  return Engine(
    loaded.model, loaded.params, config, draft=model, draft_params=params
  )


class Stepper:
  """Times steps of an engine from one state, whose length stays near 200."""

  def __init__(self, engine: Engine, settings: Settings):
    self.engine = engine
    config = engine.config
    ids = (PROMPT * 20)[:_HELD]
    job = Job(ids, settings, (0, 0, 0))
    request = make_request([job], config, engine.model, config.batch_size)
    programs = engine._programs
    rows = jnp.arange(config.batch_size, dtype=jnp.int32)
    self.refill = lambda: programs.refill(
      engine.params, programs.empty(), request, rows
    )
    self.decode = programs.decode

  def __call__(self) -> float:
    """Returns seconds a step over `_STEPS` steps."""
    state = jax.block_until_ready(self.refill())
    limits = jnp.int32(_STEPS), jnp.int32(1 << 30)
    begin = time.perf_counter()
    state, taken = self.decode(self.engine.params, state, *limits)
    jax.block_until_ready(state)
    return (time.perf_counter() - begin) / int(taken)


def step_against_parts(loaded) -> list[dict[str, Any]]:
  """Times steps and their parts in turn; returns one record a case."""
  greedy = Settings(max_new_tokens=256, stop_ids=())
  sampled = Settings(
    temperature=0.7, top_p=0.9, max_new_tokens=256, stop_ids=()
  )
  draft_layers, k = 8, 3
  short, short_params = resolve_draft(loaded, draft_layers)
  model, params = loaded.model, loaded.params
  cases: dict[str, Callable[[], float]] = {
    "target 1": pass_of(model, params, 1, 1),
    "target 5": pass_of(model, params, 5, 1),
    f"target {k + 1}": pass_of(model, params, k + 1, 1),
    "draft 2": pass_of(short, short_params, 2, 1),
    "draft 1": pass_of(short, short_params, 1, 1),
  }
  kinds: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "none": ({"drafter": "none"}, {"target 1": 1}),
    "lookup k=4": (
      {"drafter": "prompt_lookup", "num_draft": 4},
      {"target 5": 1},
    ),
    f"{draft_layers} layers k={k}": (
      {"drafter": "vanilla", "draft": draft_layers, "num_draft": k},
      {f"target {k + 1}": 1, "draft 2": 1, "draft 1": k - 1},
    ),
  }
  for law, settings in (("greedy", greedy), ("T=.7 top-p .9", sampled)):
    for name, (arguments, _) in kinds.items():
      engine = engine_of(loaded, settings, 1, **arguments)
      cases[f"step {name} {law}"] = Stepper(engine, settings)
  times = medians(take_turns(cases, _ROUNDS.value))
  records = []
  for law in ("greedy", "T=.7 top-p .9"):
    for name, (_, parts) in kinds.items():
      total = sum(times[part] * count for part, count in parts.items())
      step = times[f"step {name} {law}"]
      records.append(
        {
          "drafter": name,
          "law": law,
          "step_ms": step,
          "parts_ms": {part: times[part] for part in parts},
          "sum_of_parts_ms": total,
          "ratio": step / total,
        }
      )
  return records


def batches(loaded) -> dict[str, Any]:
  """Times plain steps at several batch sizes."""
  settings = Settings(max_new_tokens=256, stop_ids=())
  steppers = {
    str(rows): Stepper(engine_of(loaded, settings, rows), settings)
    for rows in (1, 8)
  }
  times = medians(take_turns(dict(steppers), _ROUNDS.value))
  speed = {rows: int(rows) * 1e3 / ms for rows, ms in times.items()}
  return {
    "step_ms": times,
    "tokens_per_s": speed,
    "ratio": speed["8"] / speed["1"],
  }


def compiles(loaded) -> dict[str, Any]:
  """Counts compiles over 30 prompts of different lengths, after the first."""
  settings = Settings(max_new_tokens=8, stop_ids=())
  # A draft length that no other part uses: the first call must compile.
  engine = engine_of(loaded, settings, 1, "prompt_lookup", num_draft=6)
  list(engine.run([Job(PROMPT, settings, (0, 0, 0))]))
  first = engine.num_compiles
  jobs = [
    Job((PROMPT * 20)[: 1 + 7 * i], settings, (0, i, 0)) for i in range(30)
  ]
  list(engine.run(jobs))
  return {"first_call": first, "later": engine.num_compiles - first}


def itself(loaded) -> dict[str, Any]:
  """Decodes with the target as its own draft."""
  out = spec_jax.generate(
    loaded,
    [PROMPT],
    drafter="vanilla",
    draft="target",
    options={"num_draft": 3},
    settings=Settings(max_new_tokens=48),
    seed=0,
    slots=_SLOTS.value,
  )
  return {"acceptance_rate": out.report["acceptance_rate"]}


def against_torch(loaded, path: Path) -> dict[str, Any]:
  """Decodes 64 tokens here and with the transformers library, in turn."""
  peers = {
    dtype: TorchPeer(_TORCH.value, path, dtype)
    for dtype in ("float32", "bfloat16")
  }
  tokens = 64
  settings = Settings(max_new_tokens=tokens, stop_ids=())
  engine = engine_of(loaded, settings, 1)
  jobs = [Job(PROMPT, settings, (0, 0, 0))]
  texts: dict[str, list[int]] = {}

  def ours() -> float:
    begin = time.perf_counter()
    texts["ours"] = next(iter(list(engine.run(jobs)))).ids
    return time.perf_counter() - begin

  def theirs(dtype: str) -> float:
    seconds, texts[dtype] = peers[dtype].generate(PROMPT, tokens)
    return seconds

  cases: dict[str, Callable[[], float]] = {"ours": ours}
  for dtype in peers:
    cases[dtype] = functools.partial(theirs, dtype)
  times = medians(take_turns(cases, _ROUNDS.value))
  for peer in peers.values():
    peer.close()
  speed = {name: tokens * 1e3 / ms for name, ms in times.items()}
  return {
    "torch": peers["float32"].version,
    "tokens": tokens,
    "prompt_tokens": len(PROMPT),
    "tokens_per_s": speed,
    "ratio": speed["ours"] / speed["float32"],
    "ratio_to_best": speed["ours"] / max(speed["float32"], speed["bfloat16"]),
    "same_text": texts["ours"] == texts["float32"],
    "note": "prefill and host work included on both sides",
  }


def main() -> None:
  """Measures and writes the file after each part."""
  checks.at_least(1, _ROUNDS)
  checks.out_file(_OUT.value)
  opened = hub.inspect(_MODEL.value)
  checks.slots(opened.loaded, _SLOTS.value, _HELD + _STEPS * _WIDEST)
  record: dict[str, Any] = {
    "environment": results.environment(),
    "model": _MODEL.value,
    "slots": _SLOTS.value,
    "rounds": _ROUNDS.value,
  }
  loaded = opened.read()
  parts: dict[str, Callable[[], Any]] = {
    "step_against_parts": lambda: step_against_parts(loaded),
    "batch": lambda: batches(loaded),
    "compiles": lambda: compiles(loaded),
    "draft_is_target": lambda: itself(loaded),
  }
  if _TORCH.value:
    path = loaded.files[0]
    parts = {
      "transformers": lambda: against_torch(loaded, path),
      **parts,
    }
  for name, part in parts.items():
    print(f"{name} ...", file=sys.stderr)
    with launch.user_errors():
      record[name] = part()
    print(json.dumps({name: record[name]}, indent=2), flush=True)
    if _OUT.value:
      Path(_OUT.value).write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
  launch.run(main)
