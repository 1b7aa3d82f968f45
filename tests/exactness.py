"""Enumerates the full product of models, drafters, policies and settings.

  python -m tests.exactness --out=experiments/results/exactness.jsonl

The tests run a covering part of it (laws_test.py). One line a case: the
largest total variation between the law of the tokens that `spec_step` emits
and the target's own, over prompts of two lengths in one ragged batch. Takes
some ten minutes on two cores.
"""

import json
from pathlib import Path
import time

from absl import app, flags

from experiments.results import environment
from spec_jax import kernels
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
# A batch of one row, once a kind; all else is one ragged batch.
ALONE = ("none", "chain_1", "lookup_1")


def main(_):
  laws.DRAFTERS.update(MORE)
  lines = [{"environment": environment()}]
  worst = 0.0
  for model in laws.MODELS:
    if model == "packed" and kernels.why_not() is not None:
      continue
    tables = laws.DRAFTERS, laws.POLICIES, laws.VERIFIERS
    for drafter in [name for table in tables for name in table]:
      if model == "packed" and drafter not in PACKED:
        continue
      under, judge, judge_options = laws.VERIFIERS.get(
        drafter, (drafter, "token", {})
      )
      base, policy, policy_options = laws.POLICIES.get(
        under, (under, "fixed", {})
      )
      kind, options = laws.DRAFTERS[base]
      batches = [(256, "ragged")]
      if drafter in ALONE and model == "table":
        batches.append((1, "one row"))
      for chunk, batch in batches:
        begin = time.perf_counter()
        found = laws.distances(model, drafter, chunk=chunk)
        seconds = round(time.perf_counter() - begin, 2)
        worst = max(worst, *found.values())
        line = {
          "model": model,
          "drafter": kind,
          "options": options,
          "verifier": judge,
          "verifier_options": judge_options,
          "policy": policy,
          "policy_options": policy_options,
          "batch": batch,
          "tokens": laws.NEW,
          "total_variation": found,
          "seconds": seconds,
        }
        lines.append(line)
        print(json.dumps(line), flush=True)
        if _OUT.value:
          text = "".join(json.dumps(x) + "\n" for x in lines)
          Path(_OUT.value).write_text(text)
  print(f"{len(lines) - 1} cases, largest total variation {worst:.2e}")
  if worst >= 1e-5:
    raise SystemExit(1)


if __name__ == "__main__":
  app.run(main)
