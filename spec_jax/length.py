"""Draft-length policies: how deep a row drafts in the next step.

A policy may look at what happened in earlier steps and at the draft's own law
before a token is drawn, never at the token: so the output law stays the
target's whatever it decides.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from spec_jax.base import Drafter, LengthPolicy, Outcome
from spec_jax.cost_policy import cost
from spec_jax.levels import WAYS, Levels
from spec_jax.options import check_options, options_of, types_of


def fixed(depth: int) -> LengthPolicy:
  """Builds the policy that always asks for `depth` draft tokens in a row.

  Raises:
    ValueError: if `depth < 0`.
  """
  if depth < 0:
    raise ValueError(f"draft depth must be at least 0, got {depth}")
  return LengthPolicy(
    init=lambda batch: jnp.full((batch,), depth, jnp.int32),
    level=lambda state, running, costs: state,
    update=lambda state, outcome: state,
  )


def confidence(depth: int, *, threshold: float = 0.4) -> LengthPolicy:
  """Builds the policy that stops where the draft is unsure.

  A node gets children only if the draft's largest probability there, at
  temperature 1, is at least the threshold.

  Args:
    depth: `K`, drafted at most.
    threshold: in [0, 1].

  Raises:
    ValueError: if the threshold is out of range.

  Reference: the transformers library's `assistant_confidence_threshold`.
  """
  if not 0 <= threshold <= 1:
    raise ValueError(f"threshold must be in [0, 1], got {threshold}")
  return fixed(depth)._replace(
    extend=lambda state, law: law.max(-1) >= threshold
  )


def entropy(
  depth: int, *, threshold: float = 0.4, scale: float = 0.2
) -> LengthPolicy:
  """Builds the policy that stops where the draft's entropy is large.

  A node gets children only while `1 - sqrt(scale * H) >= threshold`, a lower
  bound of the chance of acceptance; `H` in nats, at temperature 1.

  Args:
    depth: `K`, drafted at most.
    threshold: in [0, 1].
    scale: above 0.

  Raises:
    ValueError: if a number is out of range.

  Reference: Agrawal et al. 2024, "AdaEDL".
  """
  if not 0 <= threshold <= 1:
    raise ValueError(f"threshold must be in [0, 1], got {threshold}")
  if not scale > 0:
    raise ValueError(f"scale must be above 0, got {scale}")

  def extend(state, law):
    H = -jnp.where(law > 0, law * jnp.log(jnp.maximum(law, 1e-30)), 0).sum(-1)
    return 1 - jnp.sqrt(scale * jnp.maximum(H, 0)) >= threshold

  return fixed(depth)._replace(extend=extend)


def average(depth: int, *, start: int = 0) -> LengthPolicy:
  """Builds the policy that follows a row's own success.

  Two more after a step that had as many tokens accepted as asked for, one fewer
  after a refusal, in [1, depth]; any other step changes nothing. A new prompt
  begins anew.

  Args:
    depth: `K`, drafted at most.
    start: of a new row; 0 = `depth`.

  Raises:
    ValueError: if the start is out of range.

  Reference: the transformers library's heuristic schedule.
  """
  if not 0 <= start <= depth:
    raise ValueError(f"start must be in [0, {depth}], got {start}")
  first = start or depth

  def update(state, outcome: Outcome):
    refused = (outcome.chance & ~outcome.accepted).any(-1)
    reached = outcome.accepted.sum(-1) >= outcome.asked
    grown = jnp.where(outcome.chance.any(-1) & reached, state + 2, state)
    new = jnp.where(refused, state - 1, grown)
    return jnp.clip(new, min(1, depth), depth).astype(jnp.int32)

  return LengthPolicy(
    init=lambda batch: jnp.full((batch,), first, jnp.int32),
    level=lambda state, running, costs: state,
    update=update,
    restart=lambda state: jnp.full_like(state, first),
  )


POLICIES: dict[str, Callable[..., LengthPolicy]] = {
  "fixed": fixed,
  "confidence": confidence,
  "entropy": entropy,
  "average": average,
  "cost": cost,
}


def check(policy: LengthPolicy, drafter: Drafter) -> None:
  """Checks that a policy and a drafter go together.

  Raises:
    ValueError: if the policy wants to see a law and the drafter has none.
  """
  if policy.extend is not None and not drafter.asks_policy:
    raise ValueError(
      "this length policy looks at the draft's law, and this drafter has none "
      "to show: it copies tokens"
    )


def options(name: str) -> dict[str, Any]:
  """Returns a policy's options and their defaults.

  Raises:
    ValueError: if there is no such policy.
  """
  if name not in POLICIES:
    raise ValueError(
      f"unknown length policy {name!r}; there are {', '.join(POLICIES)}"
    )
  return options_of(POLICIES[name])


def option_types() -> dict[str, type]:
  """Returns every option that a policy has, and its type."""
  found: dict[str, type] = {}
  for make in POLICIES.values():
    found |= types_of(make)
  return found


def build(name: str, levels: Levels, **settings) -> LengthPolicy:
  """Builds a policy by name.

  Args:
    name: a key of `POLICIES`.
    levels: of the drafter; only "cost" asks in another than its first way.
    **settings: the policy's options.

  Raises:
    ValueError: for an unknown policy or option, or an option out of range.
  """
  options(name)  # refuses a name that there is not
  check_options(f"length policy {name!r}", settings, POLICIES[name])
  bound = levels if name == "cost" else levels.depths[0]
  return POLICIES[name](bound, **settings)


def report(
  name: str, levels: Levels, state: Any, costs: Sequence[float] | None
) -> dict[str, Any] | None:
  """Returns what a policy did, for people and results; None if it is fixed.

  Args:
    name: of the policy.
    levels: of the drafter.
    state: its state after a run.
    costs: see `Engine`, if it needed them.

  Returns:
    For "cost": steps by the depth drafted, probes, whether a draft was asked
    for of late, the chance of acceptance by depth as last estimated, the costs
    as they are now, those of a step by depth relative to no draft, those of a
    token of catching up, and in `alarm` one line if drafting was off in most
    steps, saying why, else None. For a drafter that is asked in several ways
    that is of all its parts, but for the steps; `ways` has each one's own.
  """
  if name != "cost" or costs is None:
    return {"name": name} if name != "fixed" else None
  taken = np.asarray(state.asked_at).sum(0)
  hits, chances = (
    np.asarray(state.hits).sum(0),
    np.asarray(state.chances).sum(0),
  )
  rates = [
    float(h / c) if c > 0 else None for h, c in zip(hits, chances, strict=True)
  ]
  steps = np.bincount(levels.depth_of, taken).astype(int).tolist()
  ways = {}
  for way, part in zip(WAYS, levels.slices(), strict=False):
    ways[way] = {
      "steps_at_depth": taken[1:][part].tolist(),
      "accept_cond": rates[part],
      "relative_costs": [x / costs[0] for x in costs[1:][part]],
    }
  found = {
    "name": name,
    "costs_s": list(costs),
    "catch_up_s": next(iter(costs[levels.num + 1 :]), None),
    "relative_costs": [1.0, *ways[WAYS[0]]["relative_costs"]],
    "steps_at_depth": steps,
    "num_probes": int(np.asarray(state.num_probes).sum()),
    "accept_cond": ways[WAYS[0]]["accept_cond"],
    "asked": bool(np.asarray(state.asks).sum() > 0),
  }
  if levels.num_ways > 1:
    found["ways"] = ways
  return found | {"alarm": _alarm(found)}


def since(
  report: Mapping[str, Any] | None, before: Mapping[str, Any] | None
) -> dict[str, Any] | None:
  """Returns a report that counts only what came after an earlier one.

  Args:
    report: see `report`, also with what `following.CostFollower` adds.
    before: of the same policy, earlier; None = the beginning.
  """
  if report is None or before is None or "steps_at_depth" not in report:
    return None if report is None else dict(report)

  def less(new, old):
    return [a - b for a, b in zip(new, old, strict=True)]

  found, name = dict(report), "steps_at_depth"
  found[name] = less(report[name], before[name])
  found["num_probes"] = report["num_probes"] - before["num_probes"]
  if "ways" in report:
    found["ways"] = {
      way: {**own, name: less(own[name], before["ways"][way][name])}
      for way, own in report["ways"].items()
    }
  return found | {"alarm": _alarm(found)}


def _alarm(found: Mapping[str, Any]) -> str | None:
  """Returns a line if drafting was off in most steps, saying why."""
  steps = found["steps_at_depth"]
  if not sum(steps) or steps[0] <= sum(steps) / 2:
    return None
  ways = list(found.get("ways", {}).values())
  relative = [x for way in ways for x in way["relative_costs"]]
  relative = relative or found["relative_costs"][1:]
  rates = [way["accept_cond"] for way in ways] or [found["accept_cond"]]
  known = [x[0] for x in rates if x and x[0] is not None]
  why = "nothing was proposed" if found["asked"] else "none was asked for"
  if known:
    best = 100 * max(known)
    why = f"the first draft token is accepted {best:.0f} % of times"
  share = steps[0] / sum(steps)
  return (
    f"no draft in {100 * share:.0f} % of steps: {why}, and a step with a "
    f"draft costs {min(relative):.2f} to {max(relative):.2f} "
    f"of one without"
  )
