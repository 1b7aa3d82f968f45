"""Measures every drafter on Spec-Bench's subtasks and on edits of code.

  python -m experiments.spec_bench --questions=PATH/question.jsonl
    --out=experiments/results/spec_bench.jsonl [--write_readme]

Prompts of the six subtasks (first turns) and own prompts that ask for an edit,
greedy and at temperature .7. Each prompt is decoded plainly and by every case
in turn, within a minute or so, so a disturbance of the machine meets all. The
prompt is read once for plain decoding and all drafters that keep no state.
Seconds are those of decoding, compiling apart; `total_` counts reading too.

One line a case, temperature and subtask; a run that was killed goes on, and
cases that are new are added. What a length policy and a drafter have learnt
stays over the prompts, as in any run. Nothing else should run.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
from pathlib import Path
from typing import Any

from absl import flags
from tqdm import tqdm

from experiments import (
  bench_cases,
  bench_summary as summary,
  bench_tasks,
  checks,
  launch,
  prompts as prompt_files,
  results,
  show,
)
from experiments.bench_cases import (
  CASES,
  check_arguments,
  recorded,
  usable_cases,
)
from experiments.bench_engines import Bench, Run
from experiments.launch import UserError
import spec_jax
from spec_jax import Settings, corpus, length, metrics

_QUESTIONS = flags.DEFINE_string(
  "questions", "", "Spec-Bench's question.jsonl (category, turns)."
)
_OUT = flags.DEFINE_string("out", "", "JSON-lines file to write or go on with.")
_PER_TASK = flags.DEFINE_integer(
  "prompts_per_task", 8, "Prompts of a subtask, evenly from the file."
)
flags.DEFINE_alias("per_task", "prompts_per_task")
_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "Tokens of an answer.")
_TEMPERATURES = flags.DEFINE_multi_float("temperatures", [0.0, 0.7], "Of rows.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the sampled texts.")
_README = flags.DEFINE_bool(
  "write_readme", False, "Write the table into README.md, between its markers."
)
flags.adopt_module_key_flags(bench_cases)  # for --help


def line_of(
  bench: Bench,
  case: str,
  numbers: Sequence[int],
  ours: Sequence[Run],
  plain: Sequence[Run],
  before: Mapping[str, Any] | None,
) -> dict[str, Any]:
  """Returns what is recorded of a case on a subtask, times and ratios.

  `before` is what the length policy had to report when the subtask began.
  """
  engine = bench.engine(case, bench.slots(numbers))
  counts = metrics.Counts.sum([done.counts for done, _ in ours])
  agree = bench.must_agree(case, bench.slots(numbers))
  pairs = zip(ours, plain, strict=True)
  same = [done.ids == other.ids for (done, _), (other, _) in pairs]
  raw: dict[str, list[float]] = {}
  for who, runs in (("", ours), ("plain_", plain)):
    raw[f"{who}tokens"] = [done.counts.emitted for done, _ in runs]
    raw[f"{who}decode_s"] = [spent.decode_s for _, spent in runs]
    raw[f"{who}prefill_s"] = [spent.prefill_s for _, spent in runs]
  costs = engine.costs and engine.costs[: engine.depth + 1]
  return {
    "batch_size": 1,
    **raw,
    **summary.ratios([raw]),
    "tokens_per_s": counts.emitted / sum(raw["decode_s"]),
    "plain_tokens_per_s": sum(raw["plain_tokens"]) / sum(raw["plain_decode_s"]),
    "emitted": counts.emitted,
    "steps": counts.steps,
    **counts.rates(),
    "prompts": [
      {
        "steps": done.counts.steps,
        "drafted_at": done.counts.drafted_at,
        "accepted_at": done.counts.accepted_at,
        "repeated": round(summary.repeated(done.ids), 4),
      }
      for done, _ in ours
    ],
    "text_must_agree": agree,
    "identical": sum(same),
    "different": [n for n, s in zip(numbers, same, strict=True) if not s],
    "costs_s": costs,
    "policy": length.since(engine.policy_report(), before),
  }


def run_subtask(
  bench: Bench, cases: Sequence[str], numbers: Sequence[int], title: str
) -> dict[str, dict[str, Any]]:
  """Decodes a subtask's prompts by all cases; returns their lines."""
  ours: dict[str, list[Run]] = {case: [] for case in cases}
  plain: dict[str, list[Run]] = {case: [] for case in cases}
  total = len(numbers) * len(cases)
  slots = bench.slots(numbers)
  bench.measure(cases, numbers)
  before = {case: bench.engine(case, slots).policy_report() for case in cases}
  with tqdm(total=total, desc=title, unit="run", disable=None) as bar:
    for turn, number in enumerate(numbers):
      for case, run, near in bench.decode(number, cases, turn, slots):
        ours[case].append(run)
        plain[case].append(near)
        bar.update()
      if bar.disable:  # not a terminal
        show.note(f"{title}: prompt {turn + 1} of {len(numbers)}")
  return {
    case: line_of(bench, case, numbers, ours[case], plain[case], before[case])
    for case in cases
  }


def _key(record) -> tuple[str, float, str]:
  return record["case"], float(record["temperature"]), record["subtask"]


def measure(out: results.ResultFile, loaded, tasks) -> None:
  """Runs what the file does not hold yet."""
  named = [(task, *item) for task, items in tasks.items() for item in items]
  texts = [text for _, _, text in named]
  commit = results.environment()["commit"]
  for temperature in _TEMPERATURES.value:
    settings = Settings(temperature=temperature, max_new_tokens=_TOKENS.value)
    work = prompt_files.work_of(loaded, texts, settings, seed=_SEED.value)
    if any(len(job.ids) < 2 for job in work.jobs):
      raise UserError("a prompt of one token cannot be read beforehand")
    cases = usable_cases(loaded, work, bench_cases.PATTERN.value)
    check_arguments(out.done, cases)
    bench = Bench(loaded, work, cases)
    for task in tasks:
      numbers = [i for i, item in enumerate(named) if item[0] == task]
      todo = [c for c in cases if (c, temperature, task) not in out.done]
      if not todo:
        continue
      title = f"T={temperature:g} {task}"
      lines = run_subtask(bench, todo, numbers, title)
      for case, line in lines.items():
        line = {
          "case": case,
          "temperature": temperature,
          "subtask": task,
          "commit": commit,
          "questions": [named[n][1] for n in numbers],
          **line,
          **recorded(case),
          "different": [named[n][1] for n in line["different"]],
        }
        out.write(line)
        print(summary.one_line(line), flush=True)


@contextlib.contextmanager
def opened(
  command: str,
  key: Callable[[Mapping[str, Any]], Any],
  fields: Sequence[str],
  sizes: Mapping[str, Any] | None = None,
  **more,
):
  """Yields result file, target and prompts by subtask, as the flags say.

  Args:
    command: whose lines the file holds.
    key: what tells its lines apart.
    fields: that a line must hold.
    sizes: what else must be equal for a run to be resumed.
    **more: for the manifest.

  Raises:
    UserError: if a flag, the questions or a file cannot be used.
  """
  checks.matching(bench_cases.PATTERN, CASES)
  with launch.user_errors():
    for temperature in _TEMPERATURES.value:
      Settings(
        temperature=temperature,
        max_new_tokens=_TOKENS.value,
        seed=_SEED.value,
        stop_ids=(),
      ).check(1)
    if bench_cases.INDEX.value:
      corpus.load(bench_cases.INDEX.value)
  tasks = bench_tasks.read_tasks(_QUESTIONS.value, _PER_TASK.value)
  if not _OUT.value:
    raise UserError("give --out=FILE: it holds the lines, and resumes a run")
  checks.out_file(_OUT.value)
  loaded = spec_jax.load(bench_cases.MODEL.value)
  about = {
    "command": command,
    "model": bench_cases.MODEL.value,
    "weights_sha256": spec_jax.hub.weights_hash(loaded),
    "max_new_tokens": _TOKENS.value,
    "seed": _SEED.value,
    **(sizes or {}),
  }
  identity = {**about, "tasks": tasks}
  with contextlib.closing(
    results.ResultFile(_OUT.value, identity, key, fields=fields)
  ) as out:
    out.write_manifest(
      {
        **about,
        "prompts": {task: [name for name, _ in x] for task, x in tasks.items()},
        "environment": results.environment(),
        **more,
      }
    )
    yield out, loaded, tasks


def main() -> int:
  """Measures what is missing, then prints table, bars and oracle.

  Returns:
    1 if a text that must be plain decoding's is another, else 0.
  """
  command = "experiments.spec_bench"
  more: dict[str, Any] = {"interval": "95 %, bootstrap over prompts"}
  with opened(command, _key, summary.FIELDS, **more) as (out, loaded, tasks):
    measure(out, loaded, tasks)
    lines = list(out.done.values())
  table = summary.markdown(lines)
  print(table)
  told = summary.report_bars, summary.report_oracle, summary.report_varied
  print("\n".join(filter(None, (report(lines) for report in told))))
  if _README.value:
    summary.write_between(Path(prompt_files.root("README.md")), table)
  if wrong := summary.wrong_texts(lines):
    print("\n".join(["", *wrong]), flush=True)
  return int(bool(wrong))


if __name__ == "__main__":
  launch.run(main)
