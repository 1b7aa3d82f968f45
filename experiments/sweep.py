"""Measures up to which batch size speculation pays on this device.

  python -m experiments.sweep --out=experiments/results/sweep.json
    --plot=experiments/results/sweep.png

Prompt lookup at fixed depths and with the cost-aware policy against plain
decoding, greedy, at each batch size; edits, where much is copied, and chat.
Beside the measured ratio stands the one that the table of step costs of that
batch size predicts from the acceptance that was measured. Engines take turns;
the first round warms up. Nothing else should run.
"""

from collections.abc import Mapping, Sequence
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
from spec_jax import Settings, hub, metrics
from spec_jax.engine import Engine
from spec_jax.generate import make_engine, run
from spec_jax.work import Work

_MODEL = flags.DEFINE_string("model", "smollm2-135m-instruct", "The target.")
_OUT = flags.DEFINE_string("out", "", "JSON file to write.")
_PLOT = flags.DEFINE_string("plot", "", "PNG file to draw the ratios to.")
_PROMPTS = flags.DEFINE_string(
  "prompts", "", "A file of prompts instead of the edits and the chat."
)
_CASES = flags.DEFINE_string("cases", "", "Regular expression: cases to run.")
_ROWS = flags.DEFINE_multi_integer("rows", [1, 2, 4, 8, 16], "Batch sizes.")
_ROUNDS = flags.DEFINE_integer("rounds", 2, "Counted rounds.")
_TOKENS = flags.DEFINE_integer("tokens", 64, "Tokens of an answer at most.")
_SLOTS = flags.DEFINE_integer("slots", 512, "Tokens a row has room for.")

_LOOKUP = "prompt_lookup"
CASES: dict[str, dict[str, Any]] = {
  "depth 3": {"drafter": _LOOKUP, "options": {"num_draft": 3}},
  "depth 7": {"drafter": _LOOKUP, "options": {"num_draft": 7}},
  "cost": {"drafter": _LOOKUP, "options": {"num_draft": 7}, "policy": "cost"},
}
PLAIN = "plain"


def chosen() -> dict[str, dict[str, Any]]:
  """Returns the cases to run.

  Raises:
    UserError: if there is none.
  """
  return {name: CASES[name] for name in checks.matching(_CASES, CASES)}


def predict(
  emitted_per_step: float,
  shares: Mapping[int, float],
  costs: Sequence[float],
  rows: int,
) -> float:
  """Returns the ratio to plain decoding that a table of step costs predicts.

  A pass as wide as a draft of depth `d` is paid by the whole batch if any row
  has one: in 1 - (1 - share)^rows of the steps. Two rows that each draft 3
  deep in half of their steps pay it in 3/4; at costs 1 and 2 a step costs
  1.75, and 2.1 tokens a step and row give a ratio of 1.2.

  Args:
    emitted_per_step: tokens of a row's step.
    shares: depth -> share of a row's steps that proposed something so deep.
    costs: seconds of a step of the full batch by depth.
    rows: of the batch.
  """
  step = costs[0]
  total = min(sum(shares.values()), 1.0)
  if total:  # In one step all rows draft equally deep.
    extra = sum(s * (costs[d] - costs[0]) for d, s in shares.items()) / total
    step += (1 - (1 - total) ** rows) * extra
  return emitted_per_step * costs[0] / step


def shares_of(engine: Engine, counts: metrics.Counts) -> dict[int, float]:
  """Returns depth -> share of a row's steps that proposed so deep."""
  report = engine.policy_report()
  if report is None or "steps_at_depth" not in report:
    return {engine.depth: counts.drafted_at[0] / counts.steps}
  taken = report["steps_at_depth"]
  return {d: n / sum(taken) for d, n in enumerate(taken) if d and n}


def _fill(work: Work, rows: int) -> Work:
  """Repeats the prompts until each row has two at least."""
  times = -(-2 * rows // len(work.jobs))
  return work._replace(jobs=work.jobs * times, origin=work.origin * times)


def measure(loaded, prompts: Work, rows: int) -> dict[str, Any]:
  """Decodes the prompts by all cases in turn.

  Returns:
    Plain decoding's tokens/s by round, and by case the measured and the
    predicted ratio, tokens a step, the costs and how many texts are plain's.
  """
  work = _fill(prompts, rows)
  make = functools.partial(
    make_engine, loaded, work, batch_size=rows, slots=_SLOTS.value
  )
  with launch.user_errors():
    engines = {PLAIN: make()}
    engines |= {name: make(**case) for name, case in chosen().items()}
  costs: dict[int, list[float]] = {}
  for engine in engines.values():
    if engine.programs.policy.needs_costs:
      costs[engine.depth] = engine.measure_costs(work.jobs)
  for engine in engines.values():
    if engine.depth and engine.depth not in costs:
      options = {"num_draft": engine.depth}
      measured = make(drafter=_LOOKUP, options=options, policy="cost")
      costs[engine.depth] = measured.measure_costs(work.jobs)
  counts: dict[str, metrics.Counts] = {}
  emitted: dict[str, int] = {}
  texts: dict[str, dict[int, list[int]]] = {}

  def decode(name: str) -> float:
    engine = engines[name]
    engine.timing = metrics.Timing()
    done = list(run(engine, work))
    fresh = metrics.Counts.sum([x.counts for x in done])
    # Of all rounds, as is what the policy reports.
    counts[name] = metrics.Counts.sum(
      [*([counts[name]] if name in counts else []), fresh]
    )
    emitted[name] = fresh.emitted
    texts[name] = {x.prompt: x.ids for x in done}
    return engine.timing.decode_s

  turns = {name: functools.partial(decode, name) for name in engines}
  seconds = timing.take_turns(turns, _ROUNDS.value)
  speeds = {name: [emitted[name] / s for s in x] for name, x in seconds.items()}
  base = statistics.median(speeds[PLAIN])
  found: dict[str, Any] = {"rows": rows, "plain_tokens_per_s": speeds[PLAIN]}
  for name in chosen():
    engine, rates = engines[name], counts[name].rates()
    shares = shares_of(engine, counts[name])
    found[name] = {
      "tokens_per_s": speeds[name],
      "ratio": statistics.median(speeds[name]) / base,
      "predicted": predict(
        rates["emitted_per_step"], shares, costs[engine.depth], rows
      ),
      "emitted_per_step": rates["emitted_per_step"],
      "accept_cond": rates["accept_cond"],
      "shares": shares,
      "costs_s": costs[engine.depth],
      "identical": sum(
        texts[name][n] == ids for n, ids in texts[PLAIN].items()
      ),
      "prompts": len(prompts.jobs),
    }
  return found


def pays_up_to(lines: Sequence[Mapping[str, Any]], case: str) -> int:
  """Returns the largest batch before the first one that is slower than plain.

  0 if the smallest already is.
  """
  best = 0
  for line in sorted(lines, key=lambda x: x["rows"]):
    if line[case]["ratio"] <= 1:
      break
    best = line["rows"]
  return best


def plot(lines: Sequence[Mapping[str, Any]], path: str) -> None:
  """Draws measured (solid) and predicted (dashed) ratios by batch size."""
  from matplotlib import pyplot as plt

  kinds = list(dict.fromkeys(x["kind"] for x in lines))
  figure, panels = plt.subplots(
    1, len(kinds), figsize=(1 + 4 * len(kinds), 4), sharey=True, squeeze=False
  )
  for axes, kind in zip(panels[0], kinds, strict=True):
    ours = [x for x in lines if x["kind"] == kind]
    rows = [x["rows"] for x in ours]
    for case in [name for name in CASES if name in lines[0]]:
      (drawn,) = axes.plot(
        rows, [x[case]["ratio"] for x in ours], marker="o", label=case
      )
      axes.plot(
        rows,
        [x[case]["predicted"] for x in ours],
        linestyle="--",
        color=drawn.get_color(),
      )
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows")
    axes.set_title(kind)
  panels[0][0].set_ylabel("tokens/s, x plain (dashed: predicted)")
  panels[0][0].legend(fontsize=8)
  figure.tight_layout()
  figure.savefig(path, dpi=150)
  plt.close(figure)


def main() -> None:
  """Measures each kind at each batch size; writes after each."""
  checks.at_least(1, _ROWS, _ROUNDS, _TOKENS)
  cases = chosen()
  checks.out_file(_OUT.value)
  checks.picture(_PLOT.value)
  sets: Mapping[str, Sequence[Any]] = prompt_files.bench_sets()
  if _PROMPTS.value:
    sets = {Path(_PROMPTS.value).stem: prompt_files.read((), _PROMPTS.value)}
  opened = hub.inspect(_MODEL.value)
  checks.slots(opened.loaded, _SLOTS.value)
  settings = Settings(max_new_tokens=_TOKENS.value)
  works = {
    kind: prompt_files.work_of(opened.loaded, x, settings, slots=_SLOTS.value)
    for kind, x in sets.items()
  }
  loaded = opened.read()
  lines: list[dict[str, Any]] = []
  record = {
    "environment": results.environment(),
    "model": _MODEL.value,
    "slots": _SLOTS.value,
    "tokens": _TOKENS.value,
    "rounds": _ROUNDS.value,
    "lines": lines,
  }
  for kind, work in works.items():
    for rows in _ROWS.value:
      line = {"kind": kind, **measure(loaded, work, rows)}
      lines.append(line)
      for case in cases:
        x = line[case]
        print(
          f"{kind}, {rows} rows, {case}: {x['ratio']:.2f} x plain, predicted "
          f"{x['predicted']:.2f}, {x['emitted_per_step']:.2f} tokens a step, "
          f"identical {x['identical']} of {x['prompts']}",
          flush=True,
        )
      if _OUT.value:
        Path(_OUT.value).write_text(json.dumps(record, indent=1) + "\n")
      if _PLOT.value:
        plot(lines, _PLOT.value)
  for kind in works:
    ours = [x for x in lines if x["kind"] == kind]
    for case in cases:
      print(f"{kind}, {case}: pays up to {pays_up_to(ours, case)} rows")
  print("done", file=sys.stderr)


if __name__ == "__main__":
  launch.run(main)
