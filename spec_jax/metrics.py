"""What a run counted and how long it took, under the names of design D12.

`accepted` counts draft tokens, `emitted` counts all tokens of the text, the
bonus or corrected token of each step included; so a step emits one more than
it accepts, unless a stop or the limit cut it. Tokens after a stop are not
counted. `accept_cond[i]` is the chance that depth `i + 1` is accepted where it
had its chance (depth `i` was accepted and something was proposed below it);
`accept_joint[i]` is the fraction of all steps that accepted depth `i + 1`.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Counts:
  """Counts of one completion, or of several added up.

  Attributes:
    emitted: output tokens.
    steps: target passes that emitted them, one row each.
    drafted: nodes proposed and acceptable.
    accepted: draft tokens accepted and kept.
    drafted_at: per depth, steps in which it had its chance.
    accepted_at: per depth, steps in which it was accepted.
    divergence: of a lossy rule, total variation between the law of each token
      and the target's, added up; None for a lossless rule.
  """

  emitted: int = 0
  steps: int = 0
  drafted: int = 0
  accepted: int = 0
  drafted_at: tuple[int, ...] = ()
  accepted_at: tuple[int, ...] = ()
  divergence: float | None = None

  @staticmethod
  def sum(parts: Sequence["Counts"]) -> "Counts":
    """Adds counts up; depths that one lacks count as 0."""

    def add(name):
      rows = [getattr(p, name) for p in parts]
      width = max((len(r) for r in rows), default=0)
      padded = [np.pad(r, (0, width - len(r))) for r in rows if len(r)]
      return tuple(int(x) for x in np.sum(padded, 0)) if padded else ()

    lossy = [p.divergence for p in parts if p.divergence is not None]
    return Counts(
      emitted=sum(p.emitted for p in parts),
      steps=sum(p.steps for p in parts),
      drafted=sum(p.drafted for p in parts),
      accepted=sum(p.accepted for p in parts),
      drafted_at=add("drafted_at"),
      accepted_at=add("accepted_at"),
      divergence=sum(lossy) if lossy else None,
    )

  def rates(self) -> dict[str, Any]:
    """Returns the named rates; None where nothing was counted.

    Three steps that drafted 4 each and accepted 2, 0 and 4: acceptance rate
    .50, accepted per step 2.0, emitted per step 3.0.
    """

    def ratio(a, b):
      return a / b if b else None

    return {
      "acceptance_rate": ratio(self.accepted, self.drafted),
      "accepted_per_step": ratio(self.accepted, self.steps),
      "emitted_per_step": ratio(self.emitted, self.steps),
      "drafted_per_step": ratio(self.drafted, self.steps),
      "accept_cond": [
        ratio(a, d)
        for a, d in zip(self.accepted_at, self.drafted_at, strict=True)
      ],
      "accept_joint": [ratio(a, self.steps) for a in self.accepted_at],
    }


@dataclasses.dataclass(frozen=True)
class Timing:
  """Seconds of a run by part; compile time is apart from the others.

  Attributes:
    compile_s: tracing and compiling, or reading the compilation cache.
    prefill_s: reading prompts.
    decode_s: stepping.
    measure_s: measuring what steps cost, for a policy that needs to know.
    first_token_s: from the start of a prompt's reading until its first token
      is on the host, one entry a completion.
    num_prompt_tokens: tokens read in `prefill_s`.
  """

  compile_s: float = 0.0
  prefill_s: float = 0.0
  decode_s: float = 0.0
  measure_s: float = 0.0
  first_token_s: tuple[float, ...] = ()
  num_prompt_tokens: int = 0


def report(
  counts: Counts, timing: Timing, policy: Mapping[str, Any] | None = None
) -> dict[str, Any]:
  """Returns counts, rates and speeds of a run as one dict.

  `decode_tokens_per_s` is all tokens over all decode time, not a mean of
  ratios. `divergence` is the mean over the tokens of a lossy run of the total
  variation between the law each was drawn from and the target's.

  Args:
    counts: of all completions.
    timing: of the engine.
    policy: what the length policy says, see `length.report`.
  """
  first = timing.first_token_s

  def speed(tokens, seconds):
    return tokens / seconds if seconds > 0 else None

  return {
    "emitted": counts.emitted,
    "steps": counts.steps,
    "drafted": counts.drafted,
    "accepted": counts.accepted,
    "lossy": counts.divergence is not None,
    "divergence": None
    if counts.divergence is None
    else counts.divergence / max(counts.emitted, 1),
    **counts.rates(),
    "prompt_tokens": timing.num_prompt_tokens,
    "compile_s": timing.compile_s,
    "prefill_s": timing.prefill_s,
    "decode_s": timing.decode_s,
    "measure_s": timing.measure_s,
    "prefill_tokens_per_s": speed(timing.num_prompt_tokens, timing.prefill_s),
    "decode_tokens_per_s": speed(counts.emitted, timing.decode_s),
    "first_token_s": float(np.median(first)) if first else None,
    "first_token_s_p95": float(np.percentile(first, 95)) if first else None,
    "policy": None if policy is None else dict(policy),
  }
