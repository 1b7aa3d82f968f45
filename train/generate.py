"""Writes the target's own answers to prompts, as data to train a draft on.

  python -m train.generate --prompts=prompts.jsonl --out=answers.jsonl \\
    --config.sampling.temperature=0.7 --config.engine.batch_size=8

One JSON line an answer, with the ids as the target drew them: training on them
tokenises nothing again. Every row of the batch is kept busy; a run that was
killed goes on. The law is the target's whatever the drafter (configs/
generate.py has the fields): it only changes the time. A verifier that is lossy
is refused.
"""

import contextlib
import time
from typing import Any

from absl import flags
from ml_collections import config_flags
from tqdm import tqdm

from experiments import (
  draft as draft_lib,
  launch,
  prompts as prompt_files,
  results,
)
from experiments.launch import UserError
from spec_jax import hub, stops
from spec_jax.generate import Work, make_engine, plan, read_shared, run

_CONFIG = config_flags.DEFINE_config_file(
  "config",
  None,
  "Configuration file, configs/generate.py if not given; override its fields "
  "with --config.x.y=value.",
)
_PROMPTS = flags.DEFINE_string(
  "prompts", "", "A file of prompts, as experiments.generate takes it."
)
_OUT = flags.DEFINE_string(
  "out", "", "JSON-lines file to write; resumed if it is of the same run."
)

# Rows of a batch that nobody has set: more than that gain little on a CPU.
_ROWS = 8


def main() -> int | None:
  """Runs the command."""
  config = _CONFIG.value
  if not _PROMPTS.value or not _OUT.value:
    raise UserError("--prompts and --out are needed")
  settings = launch.settings_of(config.sampling)
  draft_lib.drafter_options(config.drafter)  # that they fit, before all else
  texts = prompt_files.read((), _PROMPTS.value)
  mesh = launch.mesh_of(config.mesh)
  identity = {"config": launch.plain_dict(config), "prompts": texts}
  with contextlib.closing(
    results.ResultFile(
      _OUT.value,
      identity,
      keys=range(len(texts) * settings.num_samples),
      fields=("prompt_ids", "ids", "text", "finish_reason"),
    )
  ) as out:
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
      rows = launch.rows_of(config, min(_ROWS, len(work.jobs)), mesh)
      if work.stop_strings:
        stops.build_automaton(work.stop_strings, work.token_bytes or ())
    target, read = opened.read(), draft_lib.read_draft(draft)
    manifest = {
      "command": "train.generate",
      "config": launch.plain_dict(config),
      "drafter": launch.plain_dict(config.drafter),
      "num_prompts": len(texts),
      "weights_sha256": hub.weights_hash(target),
      "tokenizer_sha256": target.hashes.get("tokenizer"),
      "environment": results.environment(),
    }
    # "auto" may have stood for another drafter when this file was begun.
    for name in ("weights_sha256", "tokenizer_sha256", "drafter"):
      out.check_same(name, manifest[name])
    out.write_manifest(manifest)
    with launch.user_errors():
      engine = make_engine(
        target,
        work,
        drafter=config.drafter.name,
        draft=read,
        options=options,
        **launch.policy_arguments(config),
        batch_size=rows,
        slots=config.engine.slots,
        chunk=config.engine.chunk,
        refill_rows=config.engine.refill_rows,
        mesh=mesh,
        replicate_draft=config.replicate_draft,
      )
    if engine.programs.lossy:
      raise UserError(
        f"verifier {config.verifier.name!r} changes the law: these would not "
        "be the target's own answers"
      )
    _answer(engine, work, out)
  print(f"{len(out.done)} of {len(work.jobs)} answers in {out.path}")
  return 0


def _answer(engine: Any, work: Work, out: results.ResultFile) -> None:
  """Runs every job that has no line yet; all at once, so rows stay full."""
  todo = [n for n in range(len(work.jobs)) if n not in out.done]
  numbers = {work.origin[n]: n for n in todo}
  rest = work._replace(
    jobs=[work.jobs[n] for n in todo], origin=[work.origin[n] for n in todo]
  )
  bar = tqdm(
    total=len(work.jobs), initial=len(out.done), unit="answer", disable=None
  )
  tokens, begin = 0, time.perf_counter()
  # What all prompts begin with, a system message as a rule, is read once.
  start = read_shared(engine, rest.jobs)
  with bar:
    for done in run(engine, rest, start=start) if todo else ():
      # The number of the answer: a prompt may have several.
      number = numbers[done.prompt, done.sample]
      out.write(
        {
          "prompt": number,
          "prompt_ids": list(done.prompt_ids),
          "ids": done.ids,
          "text": done.text,
          "finish_reason": done.finish_reason,
        }
      )
      tokens += len(done.ids)
      speed = tokens / (time.perf_counter() - begin)
      bar.set_postfix({"tok/s": f"{speed:.0f}"}, refresh=False)
      bar.update(1)


if __name__ == "__main__":
  launch.run(main, prompt_files.root("configs/generate.py"))
