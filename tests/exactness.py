"""Enumerates the full product of drafters, verifiers and length policies.

  python -m tests.exactness --out=experiments/results/exactness.jsonl

The tests run a covering part of it (laws_test.py). One line a case: the
largest total variation between the law of the tokens that `spec_step` emits
and the target's own, over prompts of two lengths in one ragged batch; or, for a
combination that is refused, the words it is refused with. Every drafter of the
tests meets every exact verifier and every length policy on one target, more
chains and trees are tried alone, and then some on a decoder with packed
weights. A run that was killed goes on, with the same code. Takes half an hour
on two cores.
"""

import contextlib
import json
import operator
from pathlib import Path
import time
from typing import Any

from absl import flags

from experiments import launch
from experiments.results import ResultFile, digest, environment
from spec_jax import kernels
from spec_jax.builtin import sha256_of
from tests import laws

_OUT = flags.DEFINE_string("out", "", "JSON-lines file to write.")

# Beyond the drafters of the tests: longer chains and other trees.
MORE = {
  "chain_1": ("vanilla", {"num_draft": 1}),
  "chain_3": ("vanilla", {"num_draft": 3}),
  "tree_iid_deep": ("vanilla", {"tree": (1, 2), "siblings": "iid"}),
  "tree_iid_wide": ("vanilla", {"tree": (3,), "siblings": "iid"}),
  "tree_wor_wide": (
    "vanilla",
    {"tree": (3,), "siblings": "without_replacement"},
  ),
  "tree_wor_deep": (
    "vanilla",
    {"tree": (1, 2), "siblings": "without_replacement"},
  ),
  "tree_top_k_wide": ("vanilla", {"tree": (3, 1), "siblings": "top_k"}),
  "tree_own_temperature": (
    "vanilla",
    {
      "tree": (2,),
      "siblings": "without_replacement",
      "draft_temperature": 0.5,
    },
  ),
  "lookup_1": ("prompt_lookup", {"num_draft": 1}),
  "lookup_8_first": ("prompt_lookup", {"num_draft": 8, "match": "first"}),
}


# With packed weights: what differs is the target's pass, not the drafter.
PACKED = ("none", "chain", "tree_wor", "tree_top_k", "lookup", "chain_cost")
# On a decoder as well, where tables would do: what is kept in a cache.
ON_DECODER = (
  *("none", "chain", "tree_iid", "tree_wor", "tree_top_k", "lookup"),
  *("recycling", "lookahead", "best_first", "first_of", "merge", "cascade"),
  *("chain_confidence", "tree_confidence", "chain_cost", "block_chain"),
)
# A batch of one row, once a kind; all else is one ragged batch.
ALONE = ("none", "chain_1", "lookup_1")
POLICIES = {
  "fixed": {},
  "confidence": {"threshold": 0.75},
  "entropy": {"threshold": 0.65, "scale": 0.2},
  "average": {},
  "cost": {"probe": 1, "budget": 1.0},
}
EXACT = ("token", "block", "k_seq")


# Options that are files and maps of the tests.
_FROM_TESTS = ("corpus", "vocabulary_map")


def batch_of(chunk: int) -> str:
  """Returns what is said of the rows enumerated at a time."""
  return "one row" if chunk == 1 else "ragged"


def model_of(drafter: str) -> str:
  """Returns the target on which a drafter's whole product is enumerated."""
  if drafter in laws.TWO_VOCABULARIES:
    return "two_tables"
  return "transformer" if drafter in laws.ON_LAYERS else "table"


def all_cases() -> list[tuple[str, str, int]]:
  """Returns (target, name in the tables of `laws`, chunk) of each case.

  The product of drafters, policies and verifiers is put into those tables.
  """
  found = []
  for drafter in laws.DRAFTERS:
    for policy, options in POLICIES.items():
      under = f"{drafter}, {policy}"
      laws.POLICIES[under] = drafter, policy, options
      for judge in EXACT:
        name = f"{under}, {judge}"
        laws.VERIFIERS[name] = under, judge, {}
        found.append((model_of(drafter), name, 256))
  laws.DRAFTERS.update(MORE)
  found += [("table", name, 256) for name in (*MORE, "k_seq_rho")]
  found += [("table", name, 1) for name in ALONE]
  found += [("transformer", name, 256) for name in (*ON_DECODER, *MORE)]
  found += [("two_transformers", name, 256) for name in laws.TWO_VOCABULARIES]
  if kernels.why_not() is None:
    found += [("packed", name, 256) for name in PACKED]
  return found


def code() -> str:
  """Returns a hash of what is enumerated and of what enumerates it."""
  root = Path(__file__).resolve().parent
  files = [*(root.parent / "spec_jax").rglob("*.py")]
  files += [f for f in root.glob("*.py") if not f.stem.endswith("_test")]
  return digest(
    {str(f.relative_to(root.parent)): sha256_of(f) for f in sorted(files)}
  )


def enumerate_case(model: str, name: str, chunk: int) -> dict[str, Any]:
  """Returns the line of a case."""
  base, judge, judge_options, policy, policy_options = laws.parts_of(name)
  kind, options = laws.DRAFTERS[base]
  line = {
    "model": model,
    "case": name,
    "batch": batch_of(chunk),
    "drafter": kind,
    "options": {k: v for k, v in options.items() if k not in _FROM_TESTS},
    "verifier": judge,
    "verifier_options": judge_options,
    "policy": policy,
    "policy_options": policy_options,
    "tokens": laws.NEW,
    "commit": environment()["commit"],
  }
  target, params, _, draft = laws.pair_of(model)
  try:
    laws.prepare(target, params, draft, name)
  except ValueError as error:
    return {**line, "refused": str(error)}
  begin = time.perf_counter()
  line["total_variation"] = laws.distances(model, name, chunk=chunk)
  line["seconds"] = round(time.perf_counter() - begin, 2)
  return line


def main() -> int:
  """Runs what the file does not hold; returns 1 if a law is another."""
  if not _OUT.value:
    raise launch.UserError("give --out=FILE: it holds the lines, and resumes")
  cases = all_cases()
  identity = {"command": "tests.exactness", "code": code()}
  key = operator.itemgetter("model", "case", "batch")
  with contextlib.closing(ResultFile(_OUT.value, identity, key)) as out:
    out.write_manifest({**identity, "environment": environment()})
    for model, name, chunk in cases:
      if (model, name, batch_of(chunk)) in out.done:
        continue
      line = enumerate_case(model, name, chunk)
      out.write(line)
      print(json.dumps(line), flush=True)
    lines = list(out.done.values())
  ran = [x["total_variation"] for x in lines if "refused" not in x]
  worst = max(max(x.values()) for x in ran)
  print(
    f"{len(ran)} cases, largest total variation {worst:.2e}; "
    f"{len(lines) - len(ran)} refused"
  )
  return int(worst >= 1e-5)


if __name__ == "__main__":
  launch.run(main)
