"""Measures what drafters emit per step over all of Spec-Bench, in batches.

  python -m experiments.acceptance --questions=PATH/question.jsonl
    --drafts=FOLDER --out=experiments/results/acceptance.jsonl

Counts, not seconds: `experiments.spec_bench` has those, for fewer prompts and
one row. The cases are the same, those of a fixed length; `--cases` chooses some
of them. One line a case and temperature: tokens a step over all first turns, by
subtask, and over texts of which less than 20 % of the runs of four tokens stood
there before (a greedy text that goes round in a loop flatters every draft); how
often each depth was accepted where the one before was. Each text that must be
plain decoding's is compared with it. A run that was killed goes on.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags
from tqdm import tqdm

from experiments import (
  bench_cases,
  bench_summary as summary,
  checks,
  launch,
  prompts as prompt_files,
  results,
  spec_bench,
)
from experiments.bench_engines import PLAIN
from spec_jax import Settings, metrics
from spec_jax.generate import Completion, make_engine, read_shared, run
from spec_jax.work import Work

_ROWS = flags.DEFINE_integer("rows", 8, "Prompts that are decoded together.")

# What a line must hold to be shown and gone on with.
_FIELDS = (
  "arguments",
  "other_draft",
  "corpus",
  "emitted_per_step",
  "accept_cond",
  "by_subtask",
  "varied",
  "text_must_agree",
  "texts",
  "different",
)

for _module in bench_cases, spec_bench:  # for --help
  flags.adopt_module_key_flags(_module)


def per_step(counts: Sequence[metrics.Counts]) -> float | None:
  """Returns tokens a step over some prompts, None if there is none."""
  return metrics.Counts.sum(counts).rates()["emitted_per_step"]


def line_of(
  case: str, tasks: Sequence[str], found: Sequence[Completion], must_agree: bool
) -> dict[str, Any]:
  """Returns what is recorded of a case.

  Args:
    case: its name.
    tasks: subtask of each prompt.
    found: what was decoded, in the order of prompts; edits count apart.
    must_agree: whether the texts must be plain decoding's.
  """
  counts = [done.counts for done in found]
  main = [c for c, t in zip(counts, tasks, strict=True) if t != summary.EDITING]
  varied = [
    done.counts
    for done, task in zip(found, tasks, strict=True)
    if task != summary.EDITING and summary.repeated(done.ids) < summary.VARIED
  ]
  rates = metrics.Counts.sum(main).rates()
  return {
    "case": case,
    "prompts": len(main),
    **rates,
    "by_subtask": {
      task: per_step(
        [c for c, t in zip(counts, tasks, strict=True) if t == task]
      )
      for task in dict.fromkeys(tasks)
    },
    "varied": {"prompts": len(varied), "emitted_per_step": per_step(varied)},
    "text_must_agree": must_agree,
    # Short hashes, to compare texts with others'.
    "texts": [results.digest(list(done.ids))[:12] for done in found],
  }


def decode(loaded, work: Work, case: Mapping[str, Any], title: str):
  """Returns (completions in order, whether texts must be plain's)."""
  engine = make_engine(loaded, work, batch_size=_ROWS.value, **case)
  greedy = work.jobs[0].settings.temperature == 0
  found = []
  bar = tqdm(total=len(work.jobs), desc=title, unit="prompt", disable=None)
  with bar:
    for done in run(engine, work, start=read_shared(engine, work.jobs)):
      found.append(done)
      bar.update()
  found.sort(key=lambda done: done.prompt)
  return found, engine.programs.same_text(greedy=greedy)


def markdown(lines: Sequence[Mapping[str, Any]]) -> str:
  """Returns a table: tokens a step by case, subtask and temperature.

  `varied` leaves edits out too; `accepted by depth` is how often each depth was
  where the one before was.
  """
  columns = list(lines[0]["by_subtask"])
  text = [
    "| T | case | "
    + " | ".join(columns)
    + " | all but editing | varied | accepted by depth |",
    "|---" * (len(columns) + 5) + "|",
  ]
  for line in lines:
    cells = [f"{line['by_subtask'][c]:.2f}" for c in columns]
    depths = [f"{x:.2f}" for x in line["accept_cond"] if x is not None]
    varied = line["varied"]["emitted_per_step"]
    ends = [
      f"{line['emitted_per_step']:.2f}",
      "-" if varied is None else f"{varied:.2f}",
      " ".join(depths),
    ]
    cells = [f"{line['temperature']:g}", line["case"], *cells, *ends]
    text.append("| " + " | ".join(cells) + " |")
  return "\n".join(text)


def _key(line: Mapping[str, Any]) -> tuple[str, float]:
  return line["case"], float(line["temperature"])


def main() -> int:
  """Measures what the file lacks; returns 1 if a text is wrong."""
  given = flags.FLAGS
  checks.at_least(1, _ROWS)
  if given.write_readme:
    raise launch.UserError("--write_readme is for experiments.spec_bench")
  command = "experiments.acceptance"
  rows = {"rows": _ROWS.value}
  with spec_bench.opened(command, _key, _FIELDS, rows) as (out, loaded, tasks):
    for temperature in given.temperatures:
      measure(out, loaded, tasks, temperature)
    lines = list(out.done.values())
  print(markdown(lines))
  wrong = [x for x in lines if x["text_must_agree"] and x["different"]]
  for line in wrong:
    print(
      f"!!! TEXT DIFFERS FROM PLAIN DECODING: {line['case']}, "
      f"T={line['temperature']:g}, prompts {line['different']}"
    )
  return int(bool(wrong))


def measure(out: results.ResultFile, loaded, tasks, temperature: float) -> None:
  """Runs the cases that the file lacks at a temperature."""
  given = flags.FLAGS
  named = [(task, text) for task, items in tasks.items() for _, text in items]
  texts = [text for _, text in named]
  settings = Settings(
    temperature=temperature, max_new_tokens=given.max_new_tokens
  )
  work = prompt_files.work_of(loaded, texts, settings, seed=given.seed)
  usable = bench_cases.usable_cases(loaded, work, given.cases)
  # A policy drafts as deep as pays here: of seconds, not of counts.
  fixed = {n: case for n, case in usable.items() if "policy" not in case}
  if not fixed:
    raise launch.UserError(
      f"no case of --cases={given.cases!r} has a fixed length"
    )
  known = {k: x for k, x in out.done.items() if x["case"] != PLAIN}
  bench_cases.check_arguments(known, fixed)
  cases: dict[str, dict[str, Any]] = {PLAIN: {}, **fixed}
  for name, case in cases.items():
    if (name, temperature) in out.done:
      continue
    title = f"T={temperature:g} {name}"
    found, must_agree = decode(loaded, work, case, title)
    line = line_of(name, [task for task, _ in named], found, must_agree)
    plain = out.done.get((PLAIN, temperature), line)["texts"]
    line |= {
      "temperature": temperature,
      **bench_cases.recorded(name),
      "commit": results.environment()["commit"],
      "different": [i for i, x in enumerate(plain) if x != line["texts"][i]],
    }
    out.write(line)
    print(f"{title}: {line['emitted_per_step']:.3f} tokens a step", flush=True)


if __name__ == "__main__":
  launch.run(main)
