"""Decodes prompts plainly and speculatively, and shows both side by side.

  python -m experiments.generate
  python -m experiments.generate --prompt="Tell me a joke." --prompt="Why?"
  python -m experiments.generate --prompts=questions.jsonl --out=answers.jsonl
  python -m experiments.generate --chat

Every field of the configuration can be overridden: `--config.drafter.name=...`
(see configs/generate.py). The text is the target model's own: speculation
changes its speed, not its law.
"""

from collections.abc import Iterator, Sequence
import time
from typing import Any

from absl import flags
import ml_collections
from ml_collections import config_flags
from tqdm import tqdm

from experiments import launch, prompts as prompt_files, results, show
from experiments.launch import UserError
from spec_jax import hub, metrics
from spec_jax.generate import Work, make_engine, plan, run

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

# Up to so many prompts are streamed one after the other.
_STREAMED = 4


class Runner:
  """The two engines of a run and what they have counted.

  Attributes:
    names: of the engines, plain first.
  """

  def __init__(self, target, draft, config, options, mesh, work):
    self.target = target
    self.work = work
    rows = config.engine.batch_size
    if not rows:
      rows = 1 if len(work.jobs) <= _STREAMED else 8
    common = {
      "batch_size": rows,
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
    return {
      name: metrics.report(self.counts[name], engine.timing)
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
  size = 1 if streaming else 4 * runner.rows
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
        elif traces is not None:
          show.print_trace(record)
      if bar is not None:
        bar.update(len({runner.work.origin[n][0] for n in numbers}))
  finally:
    if bar is not None:
      bar.close()
  return [done[p] for p in sorted(done)]


def main() -> int | None:
  """Runs the command."""
  config: ml_collections.ConfigDict = _CONFIG.value
  settings = launch.settings_of(config.sampling)
  options = launch.drafter_options(config.drafter)
  if config.logprobs not in ("", "raw", "warped"):
    raise UserError(
      f"logprobs must be '', raw or warped, got {config.logprobs!r}"
    )
  if config.chat_template not in ("auto", "yes", "no"):
    raise UserError(
      f"chat_template must be auto, yes or no, got {config.chat_template!r}"
    )
  if _CHAT.value and (_PROMPT.value or _PROMPTS.value or _OUT.value):
    raise UserError("--chat takes no --prompt, --prompts or --out")
  texts: Sequence[Any] = prompt_files.read(_PROMPT.value, _PROMPTS.value)
  resolved = launch.plain_dict(config)
  if _DRY_RUN.value:
    print(show.yaml(resolved))
    print(f"# {len(texts)} prompts")
    return 0
  mesh = launch.mesh_of(config.mesh)
  out = None
  if _OUT.value:
    out = results.ResultFile(
      _OUT.value,
      {"config": resolved, "prompts": texts, "compare": _COMPARE.value},
    )
  begin = time.perf_counter()
  opened = launch.inspect(config.model, config.dtype)
  draft = launch.inspect_draft(config, opened)
  if _CHAT.value:
    from experiments import chat

    target = opened.read()
    return chat.converse(
      target, launch.read_draft(draft), config, options, settings, mesh
    )
  with launch.user_errors():
    prompts = prompt_files.with_template(
      opened.loaded.tokenizer, texts, config.chat_template, config.system
    )
    work = plan(opened.loaded, prompts, settings, config.seed)
    prompt_files.check_fits(opened.loaded, work, config.engine.slots)
  target = opened.read()
  with launch.user_errors():
    runner = Runner(
      target, launch.read_draft(draft), config, options, mesh, work
    )
  load_s = time.perf_counter() - begin
  manifest = {
    "command": "experiments.generate",
    "config": resolved,
    "drafter_options": options,
    "seed": work.seed,
    "lossy": False,
    "num_prompts": len(texts),
    "tokenizer_sha256": target.hashes.get("tokenizer"),
    "environment": results.environment(),
  }
  if out:
    manifest["weights_sha256"] = hub.weights_hash(target)
    out.write_manifest(manifest)
  streaming = len(work.jobs) <= _STREAMED and runner.rows == 1
  show.header(config, runner, load_s)
  lines = []
  try:
    lines = _decode(runner, texts, out, streaming)
  finally:
    reports = runner.reports()
    finished = list(out.done.values()) if out else lines
    if finished:
      show.table(reports, finished, load_s, _expected(config, runner))
    if out:
      summary = {**manifest, "load_s": load_s, "reports": reports}
      out.write_manifest(summary)
      out.close()
      print(f"{len(out.done)} of {len(texts)} prompts in {out.path}")
  return 0


def _expected(config, runner: Runner) -> bool:
  """Tells whether speculative text must equal plain text."""
  from spec_jax.drafters import vanilla

  kind = vanilla.SIBLINGS.get(config.drafter.siblings or "iid")
  random_draft = config.drafter.name == "vanilla" and kind != 2
  return config.sampling.temperature == 0 or not random_draft


if __name__ == "__main__":
  launch.run(main, prompt_files.root("configs/generate.py"))
