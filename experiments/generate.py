"""Decodes prompts plainly and speculatively, and shows both side by side.

  python -m experiments.generate
  python -m experiments.generate --prompt="Tell me a joke." --prompt="Why?"
  python -m experiments.generate --prompts=questions.jsonl --out=answers.jsonl
  python -m experiments.generate --chat

Every field of the configuration can be overridden: `--config.drafter.name=...`
(see configs/generate.py). The text is the target model's own: speculation
changes its speed, not its law, unless a lossy verifier is asked for.
"""

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import time
from typing import Any

from absl import flags
import jax
import ml_collections
from ml_collections import config_flags
from tqdm import tqdm

from experiments import (
  draft as draft_lib,
  launch,
  prompts as prompt_files,
  results,
  show,
)
from experiments.launch import UserError
from spec_jax import hub, kernels, metrics, stops
from spec_jax.generate import Work, make_engine, plan, run
from spec_jax.settings import Settings
from spec_jax.trained_draft import TrainedDraft

_CONFIG = config_flags.DEFINE_config_file(
  "config",
  None,
  "Configuration file, configs/generate.py if not given; override its fields "
  "with --config.x.y=value.",
)
_PROMPT = flags.DEFINE_multi_string(
  "prompt", [], "A prompt; may be given several times."
)
_PROMPTS = flags.DEFINE_string(
  "prompts",
  "",
  "A file of prompts: text, one a line, or JSONL with a field prompt, text, "
  "messages, turns (the first), question or instruction.",
)
_CHAT = flags.DEFINE_bool("chat", False, "Hold a conversation.")
_OUT = flags.DEFINE_string(
  "out", "", "JSON-lines file to write; resumed if it is of the same run."
)
_TRACE = flags.DEFINE_bool(
  "trace", False, "Record each step: drafted, p, q, accepted, residual."
)
_COMPARE = flags.DEFINE_bool(
  "compare", True, "Decode plainly too; --nocompare only speculates."
)
_DRY_RUN = flags.DEFINE_bool(
  "dry_run", False, "Print the resolved configuration and stop."
)

# Up to so many samples are streamed one after the other; of more, so many run
# side by side.
_STREAMED, _ROWS = 4, 8


def _wanted_rows(work: Work) -> int:
  """Returns the rows of a batch that nobody has set."""
  return 1 if len(work.jobs) <= _STREAMED else min(len(work.jobs), _ROWS)


class Runner:
  """The two engines of a run and what they have counted.

  Attributes:
    names: of the engines, plain first.
  """

  def __init__(self, target, draft, config, options, mesh, work):
    self.target = target
    self.work = work
    common = {
      "batch_size": launch.rows_of(config, _wanted_rows(work), mesh),
      "slots": config.engine.slots,
      "chunk": config.engine.chunk,
      "refill_rows": config.engine.refill_rows,
      "logprobs": config.logprobs or None,
      "mesh": mesh,
      "replicate_draft": config.replicate_draft,
    }
    self.engines = {}
    name = config.drafter.name
    if _COMPARE.value and name != "none":
      self.engines["plain"] = make_engine(target, work, **common)
    self.engines["speculative" if name != "none" else "plain"] = make_engine(
      target,
      work,
      drafter=name,
      draft=draft,
      options=options,
      **launch.policy_arguments(config),
      trace=_TRACE.value,
      **common,
    )
    self.counts = {name: metrics.Counts() for name in self.engines}

  @property
  def main(self) -> str:
    """The engine whose text is streamed: the speculative one if any."""
    return list(self.engines)[-1]

  @property
  def rows(self) -> int:
    """Rows of a batch."""
    return self.engines[self.main].config.batch_size

  def run(self, name, numbers, on_text=None, on_trace=None):
    """Runs some jobs on one engine; yields their completions."""
    work = self.work._replace(
      jobs=[self.work.jobs[n] for n in numbers],
      origin=[self.work.origin[n] for n in numbers],
    )
    for done in run(
      self.engines[name], work, on_text=on_text, on_trace=on_trace
    ):
      self.counts[name] = metrics.Counts.sum([self.counts[name], done.counts])
      yield done

  def reports(self) -> dict[str, dict[str, Any]]:
    """Returns each engine's report."""

    def known(value):  # nan where nothing was measured; JSON has none
      return None if value != value else value

    return {
      name: {
        key: known(value)
        for key, value in metrics.report(
          self.counts[name], engine.timing, engine.policy_report()
        ).items()
      }
      for name, engine in self.engines.items()
    }


def _groups(work: Work, skip: set[int], size: int) -> Iterator[list[int]]:
  """Yields job numbers, whole prompts together, `size` prompts at a time."""
  by_prompt: dict[int, list[int]] = {}
  for number, (prompt, _) in enumerate(work.origin):
    if prompt not in skip:
      by_prompt.setdefault(prompt, []).append(number)
  todo = list(by_prompt.values())
  for start in range(0, len(todo), size):
    yield [n for jobs in todo[start : start + size] for n in jobs]


def _record(target, samples, plain, traces) -> dict[str, Any]:
  """Returns the line of one prompt."""
  first = samples[0]
  record = {
    "prompt": first.prompt,
    "prompt_tokens": len(first.prompt_ids),
    "lossy": first.counts.divergence is not None,
    "samples": [],
  }
  for sample in samples:
    entry = {
      "text": sample.text,
      "ids": sample.ids,
      "finish_reason": sample.finish_reason,
      "emitted": sample.counts.emitted,
      "steps": sample.counts.steps,
      "drafted": sample.counts.drafted,
      "accepted": sample.counts.accepted,
      "first_token_s": sample.first_token_s,
    }
    if sample.counts.divergence is not None:  # of all its tokens, added up
      entry["divergence"] = sample.counts.divergence
    if sample.logprobs is not None:
      entry["logprobs"] = sample.logprobs
    if traces is not None:
      entry["trace"] = traces.get((sample.prompt, sample.sample), [])
    record["samples"].append(entry)
  record["text"] = first.text
  record["identical"] = None
  if plain:
    same = [
      sample.ids == other.ids
      for sample, other in zip(samples, plain, strict=True)
    ]
    record["identical"] = all(same)
    for entry, other, equal in zip(record["samples"], plain, same, strict=True):
      if not equal:
        entry["plain_text"], entry["plain_ids"] = other.text, other.ids
  return record


def _decode(runner: Runner, texts, out, streaming: bool) -> list[dict]:
  """Runs everything that is not done yet; returns all lines in order."""
  done = dict(out.done) if out else {}
  prompts = len({p for p, _ in runner.work.origin})
  bar = None
  if not streaming:
    bar = tqdm(total=prompts, initial=len(done), unit="prompt", disable=None)
  size = 1 if streaming else 2 * runner.rows
  try:
    for numbers in _groups(runner.work, set(done), size):
      traces: dict[tuple[int, int], list] | None = None
      on_trace = None
      if _TRACE.value:
        traces = {}

        def on_trace(owner, info, traces=traces, numbers=numbers):
          for row, index in owner.items():
            origin = runner.work.origin[numbers[index]]
            step = show.trace_step(info, row, runner.work.token_bytes)
            traces.setdefault(origin, []).append(step)

      printer = None
      if streaming:
        printer = show.Printer(texts[runner.work.origin[numbers[0]][0]])
      found = {}
      for name in reversed(runner.engines):
        main = name == runner.main
        found[name] = sorted(
          runner.run(
            name,
            numbers,
            on_text=printer if main else None,
            on_trace=on_trace if main else None,
          ),
          key=lambda c: (c.prompt, c.sample),
        )
        if printer is not None and main:
          printer.end()
          if len(runner.engines) > 1:
            show.note("decoding it plainly too, to compare")
      for prompt in sorted({runner.work.origin[n][0] for n in numbers}):
        mine = {
          name: [c for c in completions if c.prompt == prompt]
          for name, completions in found.items()
        }
        plain = mine.get("plain") if len(mine) > 1 else None
        record = _record(runner.target, mine[runner.main], plain, traces)
        done[prompt] = record
        if out:
          out.write(record)
        elif not streaming:
          show.print_texts(texts[prompt], record)
        if traces is not None and not out:
          show.print_trace(record)
      if bar is not None:
        bar.update(len({runner.work.origin[n][0] for n in numbers}))
        if bar.disable:  # not a terminal: a line now and then
          show.progress(len(done), prompts)
  finally:
    if bar is not None:
      bar.close()
  return [done[p] for p in sorted(done)]


def _check_flags(config: ml_collections.ConfigDict) -> None:
  for name, values in (
    ("logprobs", ("", "raw", "warped")),
    ("chat_template", ("auto", "yes", "no")),
  ):
    if config[name] not in values:
      raise UserError(
        f"{name} must be one of {', '.join(map(repr, values))}, got "
        f"{config[name]!r}"
      )
  if _CHAT.value and (_PROMPT.value or _PROMPTS.value or _OUT.value):
    raise UserError("--chat takes no --prompt, --prompts or --out")
  if _CHAT.value:
    for is_set, name in (
      (_TRACE.value, "--trace"),
      (not _COMPARE.value, "--nocompare"),
      (config.logprobs, "--config.logprobs"),
      (config.engine.batch_size > 1, "--config.engine.batch_size"),
      (config.engine.refill_rows > 1, "--config.engine.refill_rows"),
      (config.mesh and config.mesh[0] != "1", "--config.mesh of several rows"),
    ):
      if is_set:
        raise UserError(f"--chat holds one conversation: it takes no {name}")


def main() -> int | None:
  """Runs the command."""
  config: ml_collections.ConfigDict = _CONFIG.value
  settings = launch.settings_of(config.sampling)
  options = draft_lib.drafter_options(config.drafter)
  _check_flags(config)
  texts: Sequence[Any] = prompt_files.read(_PROMPT.value, _PROMPTS.value)
  resolved = launch.plain_dict(config)
  if _DRY_RUN.value:
    print(show.yaml(resolved))
    print(show.yaml({"drafter_options": draft_lib.effective(config, options)}))
    print(f"# {len(texts)} prompts")
    return 0
  mesh = launch.mesh_of(config.mesh)
  if _CHAT.value:
    return _chat(config, settings, mesh)
  if not _OUT.value:
    return _generate(config, settings, mesh, texts, None)
  identity = {
    "config": resolved,
    "prompts": texts,
    "compare": _COMPARE.value,
    "trace": _TRACE.value,
  }
  with contextlib.closing(
    results.ResultFile(
      _OUT.value,
      identity,
      keys=range(len(texts)),
      fields=("samples", "text", "identical"),
    )
  ) as out:
    return _generate(config, settings, mesh, texts, out)


def _chat(config, settings: Settings, mesh) -> int:
  from experiments import chat

  opened = launch.inspect(config.model, config)
  options = draft_lib.choose_drafter(config, opened)
  draft = draft_lib.inspect_draft(config, opened)
  draft_lib.check_sizes(opened, draft, config, options)
  chat.check(opened.loaded, config, settings)
  target, read = opened.read(), draft_lib.read_draft(draft)
  with launch.user_errors():
    return chat.converse(target, read, config, options, settings, mesh)


def _generate(config, settings: Settings, mesh, texts, out) -> int:
  begin = time.perf_counter()
  opened = launch.inspect(config.model, config)
  options = draft_lib.choose_drafter(config, opened)
  draft = draft_lib.inspect_draft(config, opened)
  draft_lib.check_sizes(opened, draft, config, options)
  with launch.user_errors():
    prompts = prompt_files.with_template(
      opened.loaded.tokenizer, texts, config.chat_template, config.system
    )
    work = plan(opened.loaded, prompts, settings, config.seed)
    prompt_files.check_fits(opened.loaded, work, config.engine.slots)
    launch.rows_of(config, _wanted_rows(work), mesh)
    if work.stop_strings:  # that they are not too many
      stops.build_automaton(work.stop_strings, work.token_bytes or ())
  target, read = opened.read(), draft_lib.read_draft(draft)
  with launch.user_errors():
    runner = Runner(target, read, config, options, mesh, work)
  load_s = time.perf_counter() - begin
  manifest: dict[str, Any] = {}
  if out:
    manifest = _manifest(config, options, runner, read, len(texts))
    for name in ("weights_sha256", "draft_weights_sha256", "tokenizer_sha256"):
      out.check_same(name, manifest[name])
    out.write_manifest(manifest)
  streaming = len(work.jobs) <= _STREAMED and runner.rows == 1
  show.header(config, runner, load_s)
  lines = []
  try:
    lines = _decode(runner, texts, out, streaming)
  finally:
    reports = runner.reports()
    finished = list(out.done.values()) if out else lines
    if any(report["steps"] for report in reports.values()):
      programs = runner.engines[runner.main].programs
      greedy = config.sampling.temperature == 0
      must_agree = programs.same_text(greedy=greedy)
      show.table(reports, finished, load_s, must_agree)
    elif finished:
      print("nothing was left to do")
    if out:
      summary = {"load_s": load_s, "reports": reports}
      out.write_manifest({**manifest, **summary})
      print(f"{len(out.done)} of {len(texts)} prompts in {out.path}")
  return 0


def _manifest(config, options, runner, draft, num_prompts) -> dict[str, Any]:
  """Returns what a result file was made with, defaults filled in."""
  draft_hash = None
  if isinstance(draft, hub.Loaded):
    draft_hash = hub.weights_hash(draft)
  elif isinstance(draft, TrainedDraft):
    draft_hash = draft.weights_sha256
  static = dataclasses.asdict(runner.engines[runner.main].config)
  sizes = ("batch_size", "slots", "chunk", "refill_rows")
  return {
    "command": "experiments.generate",
    "config": launch.plain_dict(config),
    "drafter_options": draft_lib.effective(config, options),
    "engine": {name: static[name] for name in sizes},
    "cpu_kernel": kernels.is_packed(runner.target.params),
    "dtype": str(jax.tree.leaves(runner.target.params)[0].dtype),
    "seed": runner.work.seed,
    "lossy": runner.engines[runner.main].programs.lossy,
    "weights_rounded": config.execution.weights != "float32",
    "num_prompts": num_prompts,
    "weights_sha256": hub.weights_hash(runner.target),
    "draft_weights_sha256": draft_hash,
    "tokenizer_sha256": runner.target.hashes.get("tokenizer"),
    "environment": results.environment(),
  }


if __name__ == "__main__":
  launch.run(main, prompt_files.root("configs/generate.py"))
