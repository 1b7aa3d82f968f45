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
import json
from pathlib import Path
import re
from typing import Any

from absl import flags
from tqdm import tqdm

from experiments import (
  bench_summary as summary,
  bench_tasks,
  checks,
  launch,
  prompts as prompt_files,
  results,
  show,
)
from experiments.bench_engines import Bench, Run
from experiments.launch import UserError
import spec_jax
from spec_jax import (
  Settings,
  corpus,
  drafters,
  length,
  metrics,
  shipped,
  trained,
)
from spec_jax.generate import make_engine
from spec_jax.work import Work

_MODEL = flags.DEFINE_string("model", "smollm2-135m-instruct", "The target.")
_OTHER = flags.DEFINE_string(
  "other_draft", "", "A small model with another tokenizer, for cases with one."
)
_CORPUS = flags.DEFINE_string(
  "corpus", "", "An index of a corpus, for cases with one."
)
_DRAFTS = flags.DEFINE_string(
  "drafts",
  "",
  "Folder of trained drafts, distill, medusa and eagle, for cases with one; "
  "those that ship if not given.",
)
_QUESTIONS = flags.DEFINE_string(
  "questions", "", "Spec-Bench's question.jsonl (category, turns)."
)
_OUT = flags.DEFINE_string("out", "", "JSON-lines file to write or go on with.")
_CASES = flags.DEFINE_string("cases", "", "Regular expression: cases to run.")
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

# Stand for the values of the flags of these names.
OTHER, CORPUS = "--other_draft", "--corpus"
# Stands for a folder of trained drafts; "--drafts/eagle" for one of them.
TRAINED = "--drafts"
TRAINED_DRAFTS = _DISTILLED, _MEDUSA, _EAGLE = tuple(
  f"{TRAINED}/{name}" for name in ("distill", "medusa", "eagle")
)
_COST, _INDEX = {"policy": "cost"}, {"corpus": CORPUS}
_LOOKUP_AND = {"first": "prompt_lookup", "second": "recycling"}
_CHAIN, _TREE = {"num_draft": 4}, {"tree": (4, 2, 1), "siblings": "top_k"}
# Name -> keyword arguments of `make_engine`; a case is one line. Those whose
# drafter has no file, or needs what is not there, are left out and said.
CASES: dict[str, dict[str, Any]] = {
  "lookup 3": {"drafter": "prompt_lookup", "options": {"num_draft": 3}},
  "lookup 7": {"drafter": "prompt_lookup", "options": {"num_draft": 7}},
  summary.DEFAULT: {"drafter": "prompt_lookup", "policy": "cost"},
  "suffix cost": {"drafter": "suffix", "policy": "cost"},
  "suffix corpus": {**_COST, "drafter": "suffix", "options": _INDEX},
  "ngram cost": {**_COST, "drafter": "ngram", "options": _INDEX},
  "recycling cost": {"drafter": "recycling", "policy": "cost"},
  "lookahead cost": {"drafter": "lookahead", "policy": "cost"},
  "first of cost": {**_COST, "drafter": "first_of", "options": _LOOKUP_AND},
  "merge cost": {**_COST, "drafter": "merge", "options": _LOOKUP_AND},
  "cascade cost": {"drafter": "cascade", "draft": 8, "policy": "cost"},
  "8 layers cost": {"drafter": "vanilla", "draft": 8, "policy": "cost"},
  "best first": {"drafter": "best_first", "draft": 8, "policy": "cost"},
  "tli cost": {"drafter": "tli", "draft": OTHER, "policy": "cost"},
  "slem cost": {"drafter": "slem", "draft": OTHER, "policy": "cost"},
  "distilled chain": {
    "drafter": "vanilla",
    "draft": _DISTILLED,
    "options": _CHAIN,
  },
  "distilled tree": {
    "drafter": "vanilla",
    "draft": _DISTILLED,
    "options": _TREE,
  },
  "distilled best first": {
    "drafter": "best_first",
    "draft": _DISTILLED,
    "options": {"num_nodes": 16, "depth": 5, "width": 4},
  },
  "distilled cost": {**_COST, "drafter": "vanilla", "draft": _DISTILLED},
  "medusa chain": {
    "drafter": "medusa",
    "draft": _MEDUSA,
    "options": {"tree": (1, 1, 1, 1)},
  },
  "medusa tree": {"drafter": "medusa", "draft": _MEDUSA},
  "medusa cost": {**_COST, "drafter": "medusa", "draft": _MEDUSA},
  "eagle chain": {"drafter": "eagle", "draft": _EAGLE, "options": _CHAIN},
  "eagle tree": {"drafter": "eagle", "draft": _EAGLE},
  "eagle cost": {**_COST, "drafter": "eagle", "draft": _EAGLE},
  "lookup and eagle": {
    "drafter": "merge",
    "draft": _EAGLE,
    "options": shipped.HEAD_OPTIONS,
  },
  "lookup and eagle 16": {
    "drafter": "merge",
    "draft": _EAGLE,
    "options": {"first": "prompt_lookup", "second": "eagle"},
  },
  "lookup and eagle cost": {
    **_COST,
    "drafter": "merge",
    "draft": _EAGLE,
    "options": shipped.HEAD_OPTIONS,
  },
}


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


def trained_folder(name: str) -> str:
  """Returns the folder of "--drafts/NAME", or "" if there is none.

  A run of `train.main` serves too: its best is taken. Without the flag it is
  the draft that ships for the model.
  """
  own = name.removeprefix(f"{TRAINED}/")
  if not _DRAFTS.value:
    try:
      return str(shipped.folder_of(f"shipped:{_MODEL.value}/{own}"))
    except spec_jax.LoadError:
      return ""
  folder = Path(_DRAFTS.value) / own
  for place in (folder, folder / "best"):
    if (place / trained.CARD).is_file():
      return str(place)
  return ""


def draft_hash(case: str) -> str | None:
  """Returns the hash of the weights of a case's trained draft, or None."""
  name = CASES.get(case, {}).get("draft")
  folder = trained_folder(name) if name in TRAINED_DRAFTS else ""
  if not folder:
    return None
  card = json.loads((Path(folder) / trained.CARD).read_text("utf-8"))
  return card["weights_sha256"]


def usable_cases(
  loaded: spec_jax.Loaded, work: Work, pattern: str
) -> dict[str, dict[str, Any]]:
  """Returns the cases that can run here, drafts loaded; says which cannot.

  Raises:
    UserError: if there is none.
  """
  given = {OTHER: _OTHER.value, CORPUS: _CORPUS.value}
  given |= {name: trained_folder(name) for name in TRAINED_DRAFTS}
  found = {}
  for name, case in CASES.items():
    if not re.search(pattern, name):
      continue
    made = {**case, "options": dict(case.get("options", {}))}
    asked = [made.get("draft"), *made["options"].values()]
    needs = {x for x in asked if isinstance(x, str) and x in given}
    try:
      if case["drafter"] not in drafters.names():
        raise ValueError(f"there is no drafter {case['drafter']!r}")
      if missing := sorted(x for x in needs if not given[x]):
        raise ValueError(f"it needs {missing[0]}")
      if made.get("draft") == OTHER:
        made["draft"] = spec_jax.load(_OTHER.value)
      if made.get("draft") in TRAINED_DRAFTS:
        made["draft"] = given[made["draft"]]
      if CORPUS in needs:
        made["options"]["corpus"] = _CORPUS.value
      make_engine(loaded, work, batch_size=1, **made)
      found[name] = made
    except (ValueError, spec_jax.LoadError) as error:
      show.note(f"left out: {name}: {error}")
  if not found:
    raise UserError(f"no case of --cases={pattern!r} can run")
  return found


def _key(record) -> tuple[str, float, str]:
  return record["case"], float(record["temperature"]), record["subtask"]


def check_arguments(done: Mapping[Any, Mapping], cases: Mapping) -> None:
  """Checks that the lines there are were measured as the cases now say.

  Raises:
    UserError: naming the case that has changed.
  """
  given = {"other_draft": _OTHER.value or None, "corpus": _CORPUS.value or None}
  for line in done.values():
    case = line["case"]
    wanted = CASES.get(case)
    for name, value in given.items():
      if case in cases and f"--{name}" in json.dumps(wanted):
        if line[name] != value:
          raise UserError(
            f"case {case!r} was measured with --{name}={line[name]}, not "
            f"{value}"
          )
    if case in cases and line.get("draft_sha256") != draft_hash(case):
      raise UserError(
        f"case {case!r} was measured with another draft than that of --drafts: "
        f"take its lines out of the file"
      )
    if case in cases and line["arguments"] != json.loads(json.dumps(wanted)):
      raise UserError(
        f"case {case!r} was measured with {line['arguments']}, now it is "
        f"{wanted}: give it another name or take its lines out of the file"
      )


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
    cases = usable_cases(loaded, work, _CASES.value)
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
          "arguments": CASES[case],
          "other_draft": _OTHER.value or None,
          "corpus": _CORPUS.value or None,
          "draft_sha256": draft_hash(case),
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
  checks.matching(_CASES, CASES)
  with launch.user_errors():
    for temperature in _TEMPERATURES.value:
      Settings(
        temperature=temperature,
        max_new_tokens=_TOKENS.value,
        seed=_SEED.value,
        stop_ids=(),
      ).check(1)
    if _CORPUS.value:
      corpus.load(_CORPUS.value)
  tasks = bench_tasks.read_tasks(_QUESTIONS.value, _PER_TASK.value)
  if not _OUT.value:
    raise UserError("give --out=FILE: it holds the lines, and resumes a run")
  checks.out_file(_OUT.value)
  loaded = spec_jax.load(_MODEL.value)
  about = {
    "command": command,
    "model": _MODEL.value,
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
