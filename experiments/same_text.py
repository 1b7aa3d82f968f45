"""Checks that every drafter gives plain decoding's text on the real model.

  python -m experiments.same_text --out=experiments/results/same_text.jsonl

40 prompts x 128 tokens of `tests/golden/greedy.json`, which holds what the
transformers library decodes for the same weights. Plain ids are compared with
the library's, and each drafter's ids with plain's, greedy at several draft
lengths; deterministic drafters also at temperature 1 with the same seed. Where
two texts part, the gap of the target's two largest logits there is measured
(for a sampled text: of the two candidates). Exit code 1 if a text parts at a
gap of 1e-3 or more, or more than 1 prompt in 40 parts.
"""

from collections.abc import Sequence
import json
from pathlib import Path
from typing import Any

from absl import flags
import jax.numpy as jnp

from experiments import checks, launch, prompts as prompt_files, results
import spec_jax
from spec_jax import Settings
from spec_jax.generate import make_engine
from spec_jax.work import plan

_MODEL = flags.DEFINE_string("model", "smollm2-135m-instruct", "The target.")
_OUT = flags.DEFINE_string("out", "", "JSON-lines file to write.")
_CASES = flags.DEFINE_string(
  "cases", "", "Regular expression: cases to run; lines of others are kept."
)
_BATCH = flags.DEFINE_integer("batch", 8, "Rows.")
_TREE = (2, 2, 1)


def cases() -> list[tuple[str, dict[str, Any]]]:
  """Returns (name, keyword arguments of `generate`) of each drafter."""
  found: list[tuple[str, dict[str, Any]]] = []
  for k in (1, 3, 8):
    options: dict[str, Any] = {"num_draft": k}
    found.append(
      (f"lookup k={k}", {"drafter": "prompt_lookup", "options": options})
    )
    for draft, name in ((8, "8 layers"), ("target", "itself")):
      found.append(
        (
          f"{name} k={k}",
          {"drafter": "vanilla", "draft": draft, "options": options},
        )
      )
  for siblings in ("top_k", "without_replacement"):
    options = {"tree": _TREE, "siblings": siblings}
    found.append(
      (
        f"8 layers tree {siblings}",
        {"drafter": "vanilla", "draft": 8, "options": options},
      )
    )
  lookup_and = {"first": "prompt_lookup", "second": "recycling"}
  inner = {"inner": "prompt_lookup(num_draft=3)"}
  found += [
    ("suffix", {"drafter": "suffix", "options": {}}),
    ("recycling", {"drafter": "recycling", "options": {}}),
    ("lookahead", {"drafter": "lookahead", "options": {}}),
    ("first of", {"drafter": "first_of", "options": lookup_and}),
    ("merge", {"drafter": "merge", "options": lookup_and}),
    ("cascade", {"drafter": "cascade", "draft": 8, "options": inner}),
    ("best first", {"drafter": "best_first", "draft": 8, "options": {}}),
  ]
  return found


def replay_lookup(
  prompt: Sequence[int], output: Sequence[int], k: int, max_ngram: int = 3
) -> int:
  """Counts the steps prompt lookup takes for a text, in plain Python.

  The most recent earlier place of the longest suffix (3, 2, 1 tokens) is
  copied from, `k` tokens at most and never past the end of the text so far;
  each step keeps the copied tokens that the text goes on with, and one more.
  """
  text, end = list(prompt), len(prompt) + len(output)
  whole = [*prompt, *output]
  steps = 0
  while len(text) < end:
    guess: list[int] = []
    for n in range(max_ngram, 0, -1):
      places = [
        i
        for i in range(n, len(text))
        if len(text) >= n and text[i - n : i] == text[-n:]
      ]
      if places:
        guess = text[places[-1] : places[-1] + k]
        break
    guess = guess[: end - len(text) - 1]
    kept = 0
    while kept < len(guess) and guess[kept] == whole[len(text) + kept]:
      kept += 1
    text = whole[: len(text) + kept + 1]
    steps += 1
  return steps


def parting(loaded, prompt, ours, theirs) -> dict[str, Any] | None:
  """Returns where two texts part and the logits' gap there, or None."""
  if ours == theirs:
    return None
  at = next(
    (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
    min(len(ours), len(theirs)),
  )
  if at >= min(len(ours), len(theirs)):
    return {"position": at, "gap": float("inf"), "tokens": [None, None]}
  text = jnp.asarray([[*prompt, *ours[:at]]], jnp.int32)
  positions = jnp.arange(text.shape[1])[None]
  model = loaded.model
  logits = model.apply(loaded.params, text, positions, None, None, None).logits[
    0, -1
  ]
  pair = [int(ours[at]), int(theirs[at])]
  gap = abs(float(logits[pair[0]]) - float(logits[pair[1]]))
  return {"position": at, "gap": gap, "tokens": pair}


def kept_lines(path: str, chosen: Sequence[str]) -> list[dict[str, Any]]:
  """Returns a file's lines of cases that are not run again.

  Raises:
    UserError: if the file cannot be read, or holds what is no such line.
  """
  if not path or not Path(path).exists():
    return []
  found = []
  try:
    for text in Path(path).read_text(encoding="utf-8").splitlines()[1:]:
      line = json.loads(text)
      if line["case"] not in chosen:
        found.append(line)
  except OSError as error:
    raise launch.UserError(f"cannot read {path}: {error.strerror}") from error
  except (ValueError, TypeError, LookupError, RecursionError) as error:
    raise launch.UserError(
      f"{path} holds a line that is no result; give another --out"
    ) from error
  return found


def main() -> int:
  """Runs all cases; returns the exit code."""
  wanted = checks.matching(_CASES, ["plain", *(name for name, _ in cases())])
  checks.at_least(1, _BATCH)
  checks.out_file(_OUT.value)
  kept = kept_lines(_OUT.value, wanted) if _CASES.value else []
  golden = json.loads(
    Path(prompt_files.root("tests/golden/greedy.json")).read_text()
  )
  loaded = spec_jax.load(_MODEL.value, dtype="float32")
  prompts = [c["prompt"] for c in golden["completions"]]
  lines: list[dict[str, Any]] = [
    {
      "environment": results.environment(),
      "model": _MODEL.value,
      "weights_sha256": spec_jax.hub.weights_hash(loaded),
      "golden": {k: golden[k] for k in ("transformers", "torch")},
      "batch": _BATCH.value,
    }
  ]
  lines += kept
  failed = False

  def generate(temperature, **arguments):
    settings = Settings(
      temperature=temperature, max_new_tokens=golden["max_new_tokens"]
    )
    with launch.user_errors():
      return spec_jax.generate(
        loaded,
        prompts,
        settings=settings,
        seed=1,
        batch_size=_BATCH.value,
        slots=256,
        **arguments,
      )

  def compare(name, temperature, out, reference, reference_name):
    nonlocal failed
    parted = []
    for number, theirs in enumerate(reference):
      found = parting(loaded, prompts[number], out.ids[number], theirs)
      if found:
        parted.append({"prompt": number, **found})
    bad = [p for p in parted if p["gap"] >= 1e-3]
    if bad or len(parted) > 1:
      failed = True
    line = {
      "case": name,
      "commit": lines[0]["environment"]["commit"],
      "temperature": temperature,
      "compared_with": reference_name,
      "identical": len(prompts) - len(parted),
      "prompts": len(prompts),
      "parted": parted,
      "emitted": out.report["emitted"],
      "steps": out.report["steps"],
      "emitted_per_step": out.report["emitted_per_step"],
      "acceptance_rate": out.report["acceptance_rate"],
      "accept_cond": out.report["accept_cond"],
    }
    lines.append(line)
    print(json.dumps(line), flush=True)
    if _OUT.value:
      text = "".join(json.dumps(x) + "\n" for x in lines)
      Path(_OUT.value).write_text(text)

  plain = {0.0: generate(0.0)}
  if "plain" in wanted:
    compare(
      "plain",
      0.0,
      plain[0.0],
      [c["output"] for c in golden["completions"]],
      "transformers",
    )
  chosen = [case for case in cases() if case[0] in wanted]
  for name, arguments in chosen:
    with launch.user_errors():
      work = plan(loaded, prompts[:1], Settings(), 1)
      programs = make_engine(loaded, work, **arguments).programs
    for temperature in (0.0, 1.0):
      if not programs.same_text(greedy=temperature == 0):
        continue
      if temperature not in plain:
        plain[temperature] = generate(temperature)
      out = generate(temperature, **arguments)
      reference = plain[temperature].ids
      compare(name, temperature, out, reference, "plain")
      # Drafts after a stop in a block count as drafted, not as a chance.
      chances = set(out.report["accept_cond"]) - {None}
      if "itself" in name and chances != {1.0}:
        failed = True
      if arguments["drafter"] == "prompt_lookup":
        k = arguments["options"]["num_draft"]
        expected = [
          replay_lookup(p, ids, k)
          for p, ids in zip(prompts, out.ids, strict=True)
        ]
        steps = [c.counts.steps for c in out.completions]
        same = steps == expected
        failed = failed or not same
        lines[-1]["steps_equal_replay"] = same
        print(f"  steps equal the replay's: {same}", flush=True)
  print("FAILED" if failed else "all texts are the same")
  return int(failed)


if __name__ == "__main__":
  launch.run(main)
