"""What a command shows a person: streamed text, tables, traces."""

from collections.abc import Mapping, Sequence
import shutil
import sys
from typing import Any

import numpy as np
from tqdm import tqdm

from spec_jax import kernels, text
from spec_jax.base import DETERMINISTIC, IID, SpecInfo

# A cost that has moved by less is not worth a line.
_MOVED = 0.2
_LAWS = {DETERMINISTIC: "deterministic", IID: "iid"}


class Printer:
  """Prints a prompt, then its text as it comes."""

  def __init__(self, prompt: Any):
    print(f"\n>>> {_title(prompt)}", flush=True)
    self._sample = 0

  def __call__(self, prompt: int, sample: int, piece: str) -> None:
    """Prints a piece."""
    if sample != self._sample:
      print(f"\n--- sample {sample}")
      self._sample = sample
    print(piece, end="", flush=True)

  def end(self) -> None:
    """Ends the text's last line."""
    print(flush=True)


def yaml(value: Any, indent: int = 0) -> str:
  """Returns nested dicts as indented lines."""
  lines = []
  for key, x in value.items():
    if isinstance(x, Mapping):
      lines += [f"{'  ' * indent}{key}:", yaml(x, indent + 1)]
    else:
      lines.append(f"{'  ' * indent}{key}: {x!r}")
  return "\n".join(lines)


def note(line: str) -> None:
  """Says what goes on, beside the results."""
  print(f"[{line}]", file=sys.stderr, flush=True)


def progress(done: int, total: int) -> None:
  """Says how far a long run is, where no bar can be drawn."""
  note(f"{done} of {total} prompts")


def header(config, runner, load_s: float) -> None:
  """Prints what is about to run."""
  engine = runner.engines[runner.main].config
  options = dict(engine.options)
  options.pop("vocabulary_map", None)  # found out, not chosen
  with_options = ", ".join(f"{k}={v}" for k, v in options.items())
  draft = f" draft={config.drafter.draft}" if config.drafter.draft else ""
  print(
    f"{config.model} | drafter {engine.drafter}{draft}"
    f"{' (' + with_options + ')' if with_options else ''} | "
    f"policy {engine.policy} | "
    f"{engine.batch_size} row{'s' * (engine.batch_size > 1)}, "
    f"{engine.slots} slots{_weights(runner.target.params, config)} | "
    f"loaded in {load_s:.1f} s; the first step compiles",
    file=sys.stderr,
  )


def _weights(params: Any, config: Any) -> str:
  """Says how weights are held, where that is worth a word."""
  kernel = ", CPU kernels" if kernels.is_packed(params) else ""
  rounded = config.execution.weights
  return kernel + (f", weights rounded to {rounded}" * (rounded != "float32"))


def table(
  reports: Mapping[str, Mapping[str, Any]],
  lines: Sequence[Mapping[str, Any]],
  load_s: float,
  text_must_agree: bool,
) -> None:
  """Prints the engines' figures side by side, and whether texts agree.

  Args:
    reports: by engine, see `metrics.report`.
    lines: the records of the prompts.
    load_s: seconds to load the models.
    text_must_agree: False where only the law is the same (random drafts).
  """
  rows = (
    ("prompt tokens read", "prompt_tokens", "{:d}"),
    ("tokens emitted", "emitted", "{:d}"),
    ("compile, s", "compile_s", "{:.1f}"),
    ("prefill, tokens/s", "prefill_tokens_per_s", "{:.1f}"),
    ("time to first token, s", "first_token_s", "{:.3f}"),
    ("decode, s", "decode_s", "{:.2f}"),
    ("decode, tokens/s", "decode_tokens_per_s", "{:.1f}"),
    ("steps", "steps", "{:d}"),
    ("measuring steps, s", "measure_s", "{:.1f}"),
    ("drafted per step", "drafted_per_step", "{:.2f}"),
    ("accepted per step", "accepted_per_step", "{:.2f}"),
    ("emitted per step", "emitted_per_step", "{:.2f}"),
    ("acceptance rate", "acceptance_rate", "{:.2f}"),
  )
  print()
  print(f"{'':24}" + "".join(f"{name:>14}" for name in reports))
  for label, key, form in rows:
    values = [r.get(key) for r in reports.values()]
    if all(v is None for v in values):
      continue
    cells = ["-" if v is None else form.format(v) for v in values]
    print(f"{label:24}" + "".join(f"{cell:>14}" for cell in cells))
  speeds = [r["decode_tokens_per_s"] for r in reports.values()]
  if len(speeds) == 2 and all(speeds):
    print(f"{'speed-up of decoding':24}{speeds[1] / speeds[0]:>27.2f}x")
  for report in reports.values():
    if report.get("lossy"):
      print(f"lossy: mean total variation {report['divergence']:.4f} per token")
    policy = report.get("policy") or {}
    if policy.get("alarm"):
      print(f"{'length policy':24}{policy['alarm']}")
    if ways := policy.get("ways"):
      steps = {way: sum(x["steps_at_depth"]) for way, x in ways.items()}
      steps["none"] = policy["steps_at_depth"][0]
      said = ", ".join(f"{way} {n}" for way, n in steps.items())
      print(f"{'steps that asked':24}{said}")
    factors = policy.get("cost_factors", {})
    if any(abs(x - 1) > _MOVED for x in factors.values()):
      said = ", ".join(f"{kind} x{x:.2f}" for kind, x in factors.items())
      print(f"{'steps since measured':24}{said}")
  known = [x["identical"] for x in lines if x["identical"] is not None]
  if known:
    same = sum(known)
    answer = "yes" if same == len(known) else "no"
    note = f"{same} of {len(known)} prompts"
    if any(x.get("lossy") for x in lines):
      note += "; the rule is lossy, so the law is another"
    elif not text_must_agree:
      note += "; drawn at random, so only the law is the same"
    print(f"{'identical text':24}{answer:>14}   ({note})")
  print(f"{'load, s':24}{load_s:>14.1f}")


def print_texts(prompt: Any, record: Mapping[str, Any]) -> None:
  """Prints a prompt and its finished texts, above a progress bar."""
  lines = [f"\n>>> {_title(prompt)}"]
  for number, sample in enumerate(record["samples"]):
    if number:
      lines.append(f"--- sample {number}")
    lines.append(sample["text"])
  tqdm.write("\n".join(lines), file=sys.stdout)


def _title(prompt: Any) -> str:
  """Returns the prompt, or its last message, cut to the terminal's width."""
  if not isinstance(prompt, str):
    prompt = prompt[-1]["content"]
  width = shutil.get_terminal_size().columns
  line = " ".join(prompt.split())
  return line if len(line) <= width - 4 else line[: width - 7] + "..."


def trace_step(
  info: SpecInfo, row: int, token_bytes: Sequence[bytes] | None
) -> dict[str, Any]:
  """Returns one row's step as JSON: drafted nodes, p, q, accepted, residual.

  `p` is the target's law at the node's parent, known for nodes the walk came
  by; `q` the law the node was drawn from (1 for a deterministic one). `last`
  ends the walk; a stop or the limit may cut the step before it: `ids` are the
  tokens that were kept.
  """
  draft, verdict, laws = info.draft, info.verdict, info.laws
  assert draft is not None and verdict is not None and laws is not None
  path = np.asarray(verdict.path[row])
  level_of = {int(n): d for d, n in enumerate(path) if n >= 0}

  def word(token):
    if token_bytes is None:
      return None
    return text.decode(token_bytes, [int(token)])

  nodes = []
  for i in range(1, draft.tokens.shape[1]):
    if not draft.acceptable[row, i]:
      continue
    token, parent = int(draft.tokens[row, i]), int(draft.parents[row, i])
    level = level_of.get(parent)
    how = int(draft.law[row, i])
    q = 1.0
    if how != DETERMINISTIC and draft.probs is not None:
      q = float(draft.probs[row, parent, token])
    nodes.append(
      {
        "node": i,
        "parent": parent,
        "token": token,
        "text": word(token),
        "law": _LAWS.get(how, "without_replacement"),
        "p": None if level is None else float(laws[row, level, token]),
        "q": q,
        "accepted": i in level_of,
      }
    )
  last = int(verdict.num_accepted[row])
  token = int(verdict.tokens[row, last])
  num = int(info.num_tokens[row])
  return {
    "drafted": nodes,
    "num_accepted": int(info.num_accepted[row]),
    "num_tokens": num,
    "ids": np.asarray(verdict.tokens[row, :num]).tolist(),
    "last": {
      "token": token,
      "text": word(token),
      "from": "target" if verdict.plain[row, last] else "residual",
      "p": float(verdict.residual[row, token]),
    },
  }


def _mark(node: Mapping[str, Any]) -> str:
  """Returns what became of a node, and the laws that decided it."""
  if node["p"] is None:
    return f"?(q={node['q']:.3f})"
  sign = "+" if node["accepted"] else "-"
  return f"{sign}(p={node['p']:.3f} q={node['q']:.3f})"


def _place(node: Mapping[str, Any]) -> str:
  """Returns "node<parent " where a node does not follow the one before it."""
  if node["parent"] == node["node"] - 1:
    return ""
  return f"{node['node']}<{node['parent']} "


def print_trace(record: Mapping[str, Any]) -> None:
  """Prints a prompt's steps, one line each."""
  for sample in record["samples"]:
    for number, step in enumerate(sample.get("trace", [])):
      words = [f"{_place(n)}{n['text']!r}{_mark(n)}" for n in step["drafted"]]
      last = step["last"]
      print(
        f"step {number}: {' '.join(words) or 'no draft'} -> "
        f"{last['text']!r} from the {last['from']} (p={last['p']:.3f})"
      )
