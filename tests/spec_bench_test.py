"""Tests of the Spec-Bench table: prompts, what is measured, summaries."""

import json

from commands import (
  built_once as built_once,
  model as model,
  read_lines,
  run_command,
  unread as unread,
)
import pytest

from experiments import bench_engines, bench_summary as summary, bench_tasks
from experiments.launch import UserError
import spec_jax
from spec_jax import Settings, metrics
from spec_jax.levels import WAYS
from spec_jax.requests import Job
from spec_jax.work import Work, plan

_TASKS = summary.SUBTASKS


def _questions(folder, per_task=2):
  """Writes a question.jsonl whose MT-bench part has two categories."""
  lines = []
  for task in ("writing", "coding", *_TASKS[1:3]):
    for i in range(per_task):
      turns = [f"{task} {i} ab ab ab", "never read"]
      number = len(lines)
      lines.append({"question_id": number, "category": task, "turns": turns})
  path = folder / "question.jsonl"
  path.write_text("".join(json.dumps(x) + "\n" for x in lines))
  return path


# --- texts that repeat themselves ---------------------------------------------


def test_repeated_runs_are_counted():
  assert summary.repeated([1, 2, 3, 4, 5, 1, 2, 3, 4]) == pytest.approx(1 / 6)
  assert summary.repeated([7] * 13) == pytest.approx(0.9)
  assert summary.repeated([1, 2, 3]) == 0


def test_varied_texts_are_reported_apart():
  """Two texts of 8 and 4 tokens in 2 and 4 steps; the first is a loop."""
  line = {
    "case": "x",
    "temperature": 0.0,
    "tokens": [8, 4],
    "prompts": [
      {"steps": 2, "repeated": 0.5},
      {"steps": 4, "repeated": 0.0},
    ],
  }
  text = summary.report_varied([line])
  assert "x, T=0: 2.00 of 2 texts, 1.00 of 1" in text
  assert summary.report_varied([]) == ""


# --- prompts ------------------------------------------------------------------


def test_prompts_are_picked_evenly():
  """One of each five of forty, so one of each category of MT-bench."""
  assert bench_tasks.pick(range(40), 8) == [0, 5, 10, 15, 20, 25, 30, 35]
  assert bench_tasks.pick("abc", 2) == ["a", "b"]
  assert bench_tasks.pick("abc", 9) == ["a", "b", "c"]


def test_categories_of_mt_bench_are_one_subtask(tmp_path):
  """First turns only; edits are this repository's own."""
  tasks = bench_tasks.read_tasks(str(_questions(tmp_path)), 8)
  assert list(tasks) == [*_TASKS[:3], summary.EDITING]
  assert [name for name, _ in tasks["multi-turn"]] == ["0", "1", "2", "3"]
  assert tasks["multi-turn"][2][1] == "coding 0 ab ab ab"
  assert len(tasks["translation"]) == 2 and len(tasks["editing"]) == 10
  few = bench_tasks.read_tasks(str(_questions(tmp_path)), 1)
  assert {len(items) for items in few.values()} == {1}


@pytest.mark.parametrize(
  ("text", "message"),
  [
    (None, "cannot read"),
    ("\n", "holds no question"),
    (b"\xff", "is not UTF-8"),
  ],
)
def test_a_file_without_questions_is_refused(tmp_path, text, message):
  """In words, whatever is wrong with it."""
  path = tmp_path / "q.jsonl"
  if text is not None:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
  with pytest.raises(UserError, match=message):
    bench_tasks.read_tasks(str(path), 8)


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ("{", " is not JSON: "),
    ("3", ": a question is an object with"),
    ('["qa"]', ": a question is an object with"),
    ({"category": 3}, ": its category is no text"),
    ({"category": ["qa"]}, ": its category is no text"),
    ({"category": None}, ": its category is no text"),
    ({"question_id": None}, ": its question_id is no number and no text"),
    ({"turns": []}, ": its turns are no list of texts"),
    ({"turns": "why?"}, ": its turns are no list of texts"),
    ({"turns": [3]}, ": its first turn is no text, or empty"),
    ({"turns": [" "]}, ": its first turn is no text, or empty"),
  ],
)
def test_a_line_that_is_no_question_is_named(tmp_path, line, message):
  """File, line and what is wrong, and no name of an exception."""
  path = tmp_path / "q.jsonl"
  good = {"question_id": 1, "category": "qa", "turns": ["why?"]}
  if isinstance(line, dict):
    line = json.dumps(good | line)
  path.write_text(f"{json.dumps(good)}\n{line}\n")
  with pytest.raises(UserError) as raised:
    bench_tasks.read_tasks(str(path), 8)
  said = str(raised.value)
  assert said.startswith(f"{path} line 2{message}") and "Error" not in said


# --- measuring ----------------------------------------------------------------


@pytest.fixture
def bench(model, tmp_path, monkeypatch, capsys):
  """Runs the command on the tiny model with these words."""
  questions = _questions(tmp_path)

  def run(*words):
    return run_command(
      monkeypatch,
      capsys,
      "spec_bench",
      f"--model={model}",
      f"--questions={questions}",
      f"--out={tmp_path / 'x.jsonl'}",
      "--per_task=1",
      "--max_new_tokens=12",
      "--temperatures=0.7",
      *words,
    )

  return run


@pytest.mark.parametrize(
  "word",
  [
    "--temperatures=nan",
    "--temperatures=-1",
    "--max_new_tokens=0",
    "--seed=-1",
  ],
)
def test_numbers_out_of_range_are_refused_before_anything(
  bench, tmp_path, word
):
  done = bench(word)
  assert done.code == 2 and "must be" in done.err
  assert not (tmp_path / "x.jsonl").exists()


def test_a_run_measures_resumes_and_adds_cases(bench, tmp_path):
  """Lines hold what they say; a torn file and a new case are completed."""
  out = tmp_path / "x.jsonl"
  ran = bench("--cases=lookup 3|8 layers|suffix of nobody")
  assert ran.code in (0, None), ran.err
  assert "left out: 8 layers cost: the draft's layers must be in" in ran.err
  lines = read_lines(out)
  tasks = [*_TASKS[:3], summary.EDITING]
  assert [x["subtask"] for x in lines] == tasks
  for line in lines:
    assert line["case"] == "lookup 3" and line["temperature"] == 0.7
    assert line["tokens"] == line["plain_tokens"] == [12]
    # Deterministic drafts: the same text, though it is sampled.
    assert line["text_must_agree"] and line["identical"] == 1
    assert line["emitted_per_step"] == 12 / line["steps"] >= 1
    assert line["prompts"][0]["steps"] == line["steps"] <= 12
    # The prompt was read once, for both.
    assert line["prefill_s"] == line["plain_prefill_s"]
    ratio = line["plain_decode_s"][0] / line["decode_s"][0]
    assert line["ratio"] == pytest.approx(ratio)
    assert line["interval"] == pytest.approx([ratio, ratio])
    assert line["total_ratio"] < ratio or ratio < 1
  manifest = json.loads((tmp_path / "x.manifest.json").read_text())
  assert manifest["prompts"]["multi-turn"] == ["0"]

  whole = out.read_text().splitlines(keepends=True)
  out.write_text("".join(whole[:2]) + whole[2][:50])  # killed
  ran = bench("--cases=lookup (3|cost)")
  assert ran.code in (0, None), ran.err
  after = out.read_text().splitlines(keepends=True)
  assert after[:2] == whole[:2] and len(after) == 8
  keys = [(x["case"], x["subtask"]) for x in map(json.loads, after)]
  assert len(set(keys)) == 8 and set(keys) == {
    (case, task) for case in ("lookup 3", "lookup cost") for task in tasks
  }
  costs = [x["costs_s"] for x in map(json.loads, after) if "cost" in x["case"]]
  assert all(len(c) == 8 and min(c) > 0 for c in costs)
  # Nothing is left to do: the file stays as it is, and the table is shown.
  ran = bench("--cases=lookup (3|cost)")
  assert "".join(after) == out.read_text()
  assert ran.out.count("| lookup") == 2
  # Of the cost-aware case there is no fixed one with the same tree.
  assert "Modelled" not in ran.out
  ran = bench("--cases=lookup 3", "--max_new_tokens=13")
  assert ran.code == 2 and "another configuration or other" in ran.err


def test_flags_that_cannot_be_used_are_refused_before_weights(
  bench, unread, tmp_path
):
  for word, message in (
    ("--cases=nobody", "matches none of lookup 3"),
    ("--cases=(", "no regular expression"),
    (f"--corpus={tmp_path}/none.npz", "cannot read the corpus index"),
    (f"--out={tmp_path}", "it is a folder"),
  ):
    ran = bench(word)
    assert ran.code == 2 and message in ran.err, ran.err
    assert ran.err.count("\n") == 1


def test_a_case_that_has_changed_is_refused(bench, tmp_path):
  """Lines of other options are not taken for the case's."""
  out = tmp_path / "x.jsonl"
  assert bench("--cases=lookup 3").code in (0, None)
  whole = out.read_text()
  out.write_text(whole.replace('"num_draft": 3', '"num_draft": 2'))
  ran = bench("--cases=lookup 3")
  assert ran.code == 2 and "case 'lookup 3' was measured with" in ran.err
  out.write_text(whole.replace('"ratio"', '"ration"'))
  ran = bench("--cases=lookup 3")
  assert ran.code == 2 and "holds a line that is no result" in ran.err


def test_only_drafters_without_a_state_take_over_a_prefix(model):
  """Prompt lookup goes on from plain's; a draft model reads for itself."""
  loaded = spec_jax.load(str(model))
  work = plan(loaded, ["ab ab ab ab"], Settings(max_new_tokens=8), 0)
  cases = {
    "lookup": {"drafter": "prompt_lookup"},
    "vanilla": {"drafter": "vanilla", "draft": 1},
  }
  bench = bench_engines.Bench(loaded, work, cases)
  prefix = bench.engine("plain", 512).prefix(work.jobs[0].ids)
  assert bench_engines.adopt(bench.engine("vanilla", 512), prefix) is None
  engine = bench.engine("lookup", 512)
  state = bench_engines.adopt(engine, prefix)
  (here,) = engine.run(work.jobs, start=state)
  (afresh,) = engine.run(work.jobs)
  assert here.ids == afresh.ids and here.counts == afresh.counts


class _Slowing:
  """An engine on a machine that takes a second more for each run."""

  runs = 0

  def __init__(self, name):
    self.name, self.timing = name, metrics.Timing()

  def prefix(self, ids):
    return ids

  def run(self, jobs, start):
    _Slowing.runs += 1
    self.timing = metrics.Timing(decode_s=float(_Slowing.runs))
    return [self.name]


def test_a_case_is_held_against_the_plain_runs_next_to_it(monkeypatch):
  """Plain, four cases, plain, the other two, plain: seconds 1 to 9."""
  jobs = [Job([1, 2], Settings(), (0, 0))]
  cases = {name: {} for name in "abcdef"}
  bench = bench_engines.Bench(None, Work(jobs, [(0, 0)], (), None, 0), cases)
  engines = {name: _Slowing(name) for name in ("plain", *cases)}
  monkeypatch.setattr(bench, "engine", lambda case, slots: engines[case])
  monkeypatch.setattr(bench_engines, "adopt", lambda engine, prefix: None)
  monkeypatch.setattr(_Slowing, "runs", 0)
  found = {
    case: (ours.spent.decode_s, plain.spent.decode_s)
    for case, ours, plain in bench.decode(0, list(cases), 8, 512)
  }
  assert list(found) == list("cdefab")  # the turn
  assert found == {
    **{case: (2.0 + i, 3.5) for i, case in enumerate("cdef")},
    **{case: (7.0 + i, 7.5) for i, case in enumerate("ab")},
  }


# --- summaries ----------------------------------------------------------------


def _line(case, subtask="rag", *, seconds=(1.0, 1.0), policy=None, **more):
  """Returns a line of two prompts of 10 tokens, plainly 2 seconds each."""
  raw = {
    "tokens": [10, 10],
    "plain_tokens": [10, 10],
    "decode_s": list(seconds),
    "plain_decode_s": [2.0, 2.0],
    "prefill_s": [1.0, 1.0],
    "plain_prefill_s": [1.0, 1.0],
  }
  arguments = {"drafter": "prompt_lookup"}
  return {
    "case": case,
    "temperature": 0.0,
    "subtask": subtask,
    "arguments": arguments | ({"policy": policy} if policy else {}),
    **raw,
    **summary.ratios([raw]),
    "tokens_per_s": 20 / sum(seconds),
    "emitted": 20,
    "steps": 10,
    "emitted_per_step": 2.0,
    "accept_cond": [0.5],
    "identical": 2,
    "different": [],
    "text_must_agree": True,
    "costs_s": None,
    **more,
  }


def test_ratios_count_reading_apart():
  """Decoding twice as fast; with a second of reading each, 6 to 4."""
  line = _line("x")
  assert line["ratio"] == 2 and line["total_ratio"] == 1.5


def test_bars_hold_the_policy_against_plain_and_the_best_fixed_setting():
  """Values by hand; plain counts as a fixed setting."""
  lines = [
    _line("lookup 3", seconds=(1.0, 1.0)),
    _line("lookup 7", seconds=(2.0, 2.0)),
    _line(summary.DEFAULT, seconds=(1.25, 1.25), policy="cost"),
    _line("lookup 3", "qa", seconds=(4.0, 4.0)),
    _line(summary.DEFAULT, "qa", seconds=(2.5, 2.5), policy="cost"),
    # Another drafter is no sibling.
    _line("other", seconds=(0.1, 0.1)) | {"arguments": {"drafter": "suffix"}},
  ]
  found = [(b.value, b.floor, b.met) for b in summary.bars(lines)]
  assert found == [
    (pytest.approx(1.6), 0.95, True),
    (pytest.approx(0.8), 0.95, False),  # 1.6 of 2.0
    (pytest.approx(1.6), 1.15, True),
    (pytest.approx(0.8), 0.95, False),
    (pytest.approx(0.8), 0.95, False),  # of plain: 3 was worse
  ]
  text = summary.report_bars(lines).splitlines()
  assert text[1].startswith("MISSED  0.80 (>= 0.95)")
  assert "x best fixed (lookup 3)" in text[1] and "(plain)" in text[4]


def test_the_oracle_takes_each_prompts_best_depth():
  """The docstring's example, and one prompt that should not be drafted for."""
  good = {"steps": 10, "drafted_at": [8, 6], "accepted_at": [6, 3]}
  bad = {"steps": 10, "drafted_at": [10, 0], "accepted_at": [0, 0]}
  costs = [1.0, 1.5, 2.0]
  times = [summary.time_per_token(good, costs, d) for d in range(3)]
  assert times == pytest.approx([1.0, 1.4 / 1.6, 1.8 / 1.9])
  assert summary.time_per_token(bad, costs, 1) == 1.5
  deep = _line("lookup 2", prompts=[good, bad])
  ours = _line("lookup cost", policy="cost", costs_s=costs)
  # 10 tokens at .875 and 10 at 1 instead of 20 at 1.
  assert summary.oracle(ours, deep) == pytest.approx(20 / 18.75)
  # Both parts cost 4 a step; the copies alone what they cost above.
  merged = _line("merged", costs_s=[1.0, 4.0]) | {
    "arguments": {
      "drafter": "merge",
      "policy": "cost",
      "options": {"first": "prompt_lookup", "second": "eagle(num_nodes=8)"},
    },
    "policy": {"ways": {WAYS[1]: {"relative_costs": [1.5, 2.0]}}},
  }
  both = _line("fixed", prompts=[bad, bad]) | {
    "arguments": {**merged["arguments"], "policy": "fixed"}
  }
  assert summary.oracle(merged, both) == pytest.approx(1.0)
  assert summary.oracle(merged, both, deep) == pytest.approx(20 / 18.75)
  # Of the fixed settings the one with the same tree, not the deepest.
  other = _line("lookup 9", prompts=[bad, bad], accept_cond=[0.0] * 9) | {
    "arguments": {"drafter": "prompt_lookup", "options": {"num_draft": 9}}
  }
  text = summary.report_oracle([other, deep, ours])
  assert "lookup cost, T=0, rag: 2.00 of 1.07 (188 %)" in text
  # A corpus among the options is no drafter.
  indexed = dict(ours) | {
    "arguments": {"drafter": "suffix", "policy": "cost"}
    | {"options": {"corpus": "--corpus"}}
  }
  assert "suffix" not in summary.report_oracle([deep, indexed])
  text = summary.report_oracle([deep, both, merged])
  assert "merged, T=0, rag: 2.00 of 1.07 (188 %)" in text
  text = summary.report_oracle([deep, ours])
  assert "lookup cost, T=0, rag: 2.00 of 1.07 (188 %)" in text


def test_a_table_has_a_row_a_case_and_pools_the_prompts():
  """Edits are not in the overall; what is missing is a dash."""
  lines = [
    _line("a", "qa", seconds=(1.0, 1.0)),
    _line("a", "rag", seconds=(4.0, 4.0)),
    _line("a", summary.EDITING, seconds=(0.1, 0.1)),
    _line("b", "rag", different=["7"], identical=1),
  ]
  table = summary.markdown(lines).splitlines()
  assert table[0] == "| greedy | qa | rag | editing | overall |"
  # 40 tokens in 10 s against 8 s.
  assert table[2].startswith(
    "| a | 2.00, 2.0 | 0.50, 2.0 | 20.00, 2.0 | 0.80 ["
  )
  assert table[2].endswith("], 2.0 |")
  assert table[3] == "| b | - | 2.00, 2.0! | - | - |"


def test_a_text_that_differs_is_shown_loudly():
  """Unless random drafts make it another sample of the same law."""
  wrong = _line("b", different=["7"], identical=1)
  assert "!!! TEXT DIFFERS" in summary.one_line(wrong)
  assert "b, T=0, rag, questions 7" in summary.one_line(wrong)
  assert "!!!" not in summary.one_line(wrong | {"text_must_agree": False})
  assert "!!!" not in summary.one_line(_line("a"))


def test_the_table_goes_between_the_markers(tmp_path):
  """Nothing else changes, twice gives the same; no markers, no writing."""
  path = tmp_path / "README.md"
  begin, end = "<!-- spec-bench -->", "<!-- /spec-bench -->"
  path.write_text(f"a\n{begin}\nold\n{end}\nb\n")
  for _ in range(2):
    summary.write_between(path, "| new \\1 |\n")
    assert path.read_text() == f"a\n{begin}\n| new \\1 |\n{end}\nb\n"
  path.write_text("a\nb\n")
  with pytest.raises(UserError, match="needs <!-- spec-bench -->"):
    summary.write_between(path, "x")
