"""Measures what a user gets: tokens/s with the defaults against plain decoding.

  python -m experiments.end_to_end --out=experiments/results/end_to_end.json

Prompts that ask for an edit of a text or a code (`edit_prompts.jsonl`, much is
copied) and chat prompts (little is), greedy, the drafter with its own defaults
and the length policy that drafts only where it pays. Plain and speculative
runs take turns; the first round warms up. Nothing else should run.
"""

import functools
import json
from pathlib import Path
import statistics
import sys
from typing import Any

from absl import flags

from experiments import (
  checks,
  launch,
  prompts as prompt_files,
  results,
  timing,
)
from spec_jax import Settings, drafters, hub, length, metrics, shipped
from spec_jax.generate import make_engine, run
from spec_jax.work import Work

_MODEL = flags.DEFINE_string("model", "smollm2-135m-instruct", "The target.")
_OUT = flags.DEFINE_string("out", "", "JSON file to write.")
_DRAFTER = flags.DEFINE_string("drafter", "prompt_lookup", "Drafter.")
_POLICY = flags.DEFINE_string("policy", "cost", "Length policy.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Counted rounds.")
_TOKENS = flags.DEFINE_integer("tokens", 128, "Tokens of an answer at most.")
_ROWS = flags.DEFINE_multi_integer("rows", [1, 8], "Batch sizes.")
_SLOTS = 512


def measure(loaded, work: Work, rows: int) -> dict[str, Any]:
  """Decodes the prompts plainly and speculatively, in turn.

  Returns:
    Per engine the tokens/s of each round, emitted per step and what the
    policy did; the ratio of the medians; how many texts are identical.
  """
  common: dict[str, Any] = {"batch_size": rows, "slots": _SLOTS}
  with launch.user_errors():
    engines = {
      "plain": make_engine(loaded, work, **common),
      "speculative": make_engine(
        loaded, work, drafter=_DRAFTER.value, policy=_POLICY.value, **common
      ),
    }
  texts: dict[str, dict[int, list[int]]] = {}
  found: dict[str, Any] = {}

  def decode(name: str) -> float:
    engine = engines[name]
    engine.timing = metrics.Timing()
    done = list(run(engine, work))
    report = metrics.report(
      metrics.Counts.sum([c.counts for c in done]),
      engine.timing,
      engine.policy_report(),
    )
    texts[name] = {c.prompt: c.ids for c in done}
    found[name] = {
      key: report[key]
      for key in ("emitted", "steps", "emitted_per_step", "policy")
    }
    return engine.timing.decode_s

  cases = {name: functools.partial(decode, name) for name in engines}
  for name, seconds in timing.take_turns(cases, _ROUNDS.value).items():
    found[name]["tokens_per_s"] = [found[name]["emitted"] / s for s in seconds]
  medians = {
    name: statistics.median(found[name]["tokens_per_s"]) for name in engines
  }
  return {
    **found,
    "ratio": medians["speculative"] / medians["plain"],
    "identical": sum(
      texts["plain"][n] == texts["speculative"][n] for n in texts["plain"]
    ),
    "prompts": len(work.jobs),
  }


def main() -> None:
  """Measures each kind at each batch size; writes after each."""
  checks.at_least(1, _ROWS, _ROUNDS, _TOKENS)
  with launch.user_errors():
    if _DRAFTER.value != shipped.AUTO:
      drafters.options(_DRAFTER.value)
    length.options(_POLICY.value)
  checks.out_file(_OUT.value)
  opened = hub.inspect(_MODEL.value)
  checks.slots(opened.loaded, _SLOTS)
  settings = Settings(max_new_tokens=_TOKENS.value)
  works = {
    kind: prompt_files.work_of(opened.loaded, x, settings, slots=_SLOTS)
    for kind, x in prompt_files.bench_sets().items()
  }
  loaded = opened.read()
  record: dict[str, Any] = {
    "environment": results.environment(),
    "model": _MODEL.value,
    "drafter": _DRAFTER.value,
    "policy": _POLICY.value,
    "slots": _SLOTS,
    "cases": [],
  }
  for kind, work in works.items():
    for rows in _ROWS.value:
      case = {"kind": kind, "rows": rows, **measure(loaded, work, rows)}
      record["cases"].append(case)
      print(
        f"{kind}, {rows} rows: {case['ratio']:.2f} x plain, "
        f"{case['speculative']['emitted_per_step']:.2f} tokens a step, "
        f"identical {case['identical']} of {case['prompts']}",
        flush=True,
      )
      if _OUT.value:
        Path(_OUT.value).write_text(json.dumps(record, indent=2) + "\n")
  print("done", file=sys.stderr)


if __name__ == "__main__":
  launch.run(main)
