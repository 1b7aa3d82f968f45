"""Draft-length policies: how deep a row drafts in the next step.

A policy may look at what happened in earlier steps and at the draft's own law
before a token is drawn, never at the token: so the output law stays the
target's whatever it decides.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.base import Array, Drafter, LengthPolicy, Outcome
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
    max_depth=lambda state, running, costs: state,
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
  if scale <= 0:
    raise ValueError(f"scale must be above 0, got {scale}")

  def extend(state, law):
    H = -jnp.where(law > 0, law * jnp.log(jnp.maximum(law, 1e-30)), 0).sum(-1)
    return 1 - jnp.sqrt(scale * jnp.maximum(H, 0)) >= threshold

  return fixed(depth)._replace(extend=extend)


def average(depth: int, *, start: int = 0) -> LengthPolicy:
  """Builds the policy that follows a row's own success.

  Two more after a step whose drafts were all accepted, one fewer after a
  refusal, in [1, depth]; a step that proposed nothing changes nothing.

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
    max_depth=lambda state, running, costs: state,
    update=update,
  )


@flax.struct.dataclass
class CostState:
  """What the cost-aware policy knows of each row; outlives its prompts.

  Attributes:
    hits: `[B, K]` float32, decayed count of acceptances at depth `i + 1`.
    chances: `[B, K]` float32, decayed count of chances.
    asks: `[B]` float32, decayed count of steps that asked for a draft.
    offers: `[B]` float32, decayed count of those in which one was proposed.
    widens: `[B]` float32, decayed count of those in which the target's pass was
      widened, for a draft or for the drafter's own use.
    idle: `[B]` int32, steps since any row of the batch drafted.
    asked_at: `[B, K + 1]` int32, steps by the depth asked for, 0 where the
      target read the root alone for this row.
    reads_at: `[B, K + 1]` int32, steps in which the row ran, by the depth of
      the batch's deepest draft, 0 where the target read the roots alone.
    behind: `[B]` int32, tokens of the row's text committed since the row
      drafted.
    caught_up: `[B]` int32, tokens caught up with in these steps, in each
      those of the row that was most behind.
    num_probes: `[B]` int32, steps that drafted only to look again.
    force: `[B]` int32, a depth to take whatever is known (to measure what it
      costs); -1 = decide.
  """

  hits: Array
  chances: Array
  asks: Array
  offers: Array
  widens: Array
  idle: Array
  asked_at: Array
  reads_at: Array
  behind: Array
  caught_up: Array
  num_probes: Array
  force: Array


def cost(
  depth: int,
  *,
  probe: int = 32,
  budget: float = 0.02,
  margin: float = 0.05,
  memory: float = 50.0,
  prior: float = 0.7,
  carry: float = 0.3,
  follow: bool = True,
) -> LengthPolicy:
  """Builds the policy that drafts as deep as pays, down to not at all.

  `costs[d]` are the seconds of a step that drafts `d` deep, measured on this
  device. With `a_i` a row's running estimate of the chance that depth `i` is
  accepted where depth `i - 1` was, and `m` of the chance that there is anything
  to propose, a step emits `1 + m (a_1 + a_1 a_2 + ...)` tokens; the wider pass
  is paid by the whole batch if any row proposes, or reads for its drafter's
  own use. The batch drafts at the depth
  with the most expected tokens a second. If it has not drafted for `probe`
  steps, or for so many more that probes take at most `budget` of the time, it
  drafts once to look again. A draft model that was not asked must then catch
  up, which counts as a part of the probe: where that alone takes more than the
  budget, it is asked again at the beginning of the next prompt (in a batch when
  its rows' prompts are all new enough). What it must catch up with is charged
  to the next `probe` steps where it had not been asked.

  Args:
    depth: `K`.
    probe: steps without a draft after which one is tried, at least.
    budget: fraction of the time that such tries may take.
    margin: drafting must promise so much more than not drafting, as a
      fraction: what costs and chances are uncertain by.
    memory: chances after which an estimate has forgotten all but 1/e.
    prior: chance of acceptance before anything is known, of this row or of
      the others; below a depth that does better, that depth's.
    carry: weight of what is known of a row at its next prompt: after one
      without use for drafts the next shall soon have its own say.
    follow: whether costs that were measured are followed while an engine
      decodes, see `spec_jax/following.py`; costs that are given are not.

  Raises:
    ValueError: if a number is out of range.

  Reference: Leviathan et al. 2023, theorem 3.8; Liu et al. 2024, "SmartSpec".
  """
  if probe < 1:
    raise ValueError(f"probe must be at least 1, got {probe}")
  if not 0 < budget <= 1:
    raise ValueError(f"budget must be in (0, 1], got {budget}")
  if margin < 0:
    raise ValueError(f"margin must be at least 0, got {margin}")
  if memory <= 1:
    raise ValueError(f"memory must be above 1, got {memory}")
  if not 0 < prior < 1:
    raise ValueError(f"prior must be in (0, 1), got {prior}")
  if not 0 <= carry <= 1:
    raise ValueError(f"carry must be in [0, 1], got {carry}")
  keep, weight = 1 - 1 / memory, 2.0  # the prior counts as so many chances

  def init(batch):
    per_depth = jnp.zeros((batch, depth), jnp.float32)
    zeros = jnp.zeros((batch,), jnp.int32)
    return CostState(
      hits=per_depth,
      chances=per_depth,
      asks=jnp.zeros((batch,), jnp.float32),
      offers=jnp.zeros((batch,), jnp.float32),
      widens=jnp.zeros((batch,), jnp.float32),
      idle=zeros,
      asked_at=jnp.zeros((batch, depth + 1), jnp.int32),
      reads_at=jnp.zeros((batch, depth + 1), jnp.int32),
      behind=zeros,
      caught_up=zeros,
      num_probes=zeros,
      force=zeros - 1,
    )

  def estimate(hits, chances, before):
    """Returns each row's rate: its own, begun with that of the other rows."""
    other_hits = hits.sum(0, keepdims=True) - hits
    other_chances = chances.sum(0, keepdims=True) - chances
    pooled = (other_hits + weight * before) / (other_chances + weight)
    return (hits + weight * pooled) / (chances + weight)

  def chances_of(state):
    """Returns `[B, K]` rates; depths that were not tried are thought well of.

    Where a depth is nearly always accepted, so may the next one be: without
    that a policy that does well stays where it is.
    """
    rates: list[Array] = []
    before: Array | float = prior
    for i in range(depth):
      rate = estimate(state.hits[:, i], state.chances[:, i], before)
      before = jnp.maximum(prior, rate)
      rates.append(rate)
    return jnp.stack(rates, -1)

  def max_depth(state, running, costs):
    if not depth:  # a drafter that never drafts
      return jnp.zeros_like(state.idle)
    chance = chances_of(state)
    more = jnp.cumsum(jnp.cumprod(chance, -1), -1)  # [B, K] tokens, depth d
    offer = estimate(state.offers, state.asks, 1.0)
    offer = jnp.where(running, offer, 0)
    wide = estimate(state.widens, state.asks, 1.0)
    wide = jnp.where(running, wide, 0)
    rows = running.sum()
    plain, deep = costs[0], costs[1 : depth + 1]
    catch_up = costs[depth + 1] if costs.shape[0] > depth + 1 else 0.0
    somebody = 1 - jnp.prod(1 - wide)
    late = jnp.where(running, state.behind, 0).max()
    spent = plain + somebody * (deep - plain) + catch_up * late / probe
    rate = (rows + (offer[:, None] * more).sum(0)) / spent
    best = jnp.argmax(rate)
    pays = rate[best] > rows / plain * (1 + margin)
    extra = (deep[best] + catch_up * late) / plain - 1
    wait = jnp.maximum(probe, extra / budget)
    idle = jnp.where(running, state.idle, jnp.iinfo(jnp.int32).max).min()
    asked = jnp.where(pays | (idle >= wait), 1 + best, 0)
    asked = jnp.broadcast_to(asked, running.shape)
    return jnp.where(state.force >= 0, state.force, asked).astype(jnp.int32)

  def update(state, outcome: Outcome):
    chance, running = outcome.chance, outcome.running
    fade = jnp.where(chance, keep, 1.0)
    drafted = chance.any(-1)
    asked = (outcome.asked > 0) & running
    slow = jnp.where(asked, keep, 1.0)
    paid = outcome.widened
    probed = paid & running & (state.idle >= probe)
    tried = jnp.where(paid, outcome.asked, 0)[:, None]
    at = (jnp.arange(depth + 1)[None] == tried) & running[:, None]
    deepest = jnp.where(running[:, None], tried, 0).max()
    read = (jnp.arange(depth + 1)[None] == deepest) & running[:, None]
    late = jnp.where(asked, state.behind, 0).max()
    return dataclasses.replace(
      state,
      hits=state.hits * fade + outcome.accepted,
      chances=state.chances * fade + chance,
      asks=state.asks * slow + asked,
      offers=state.offers * slow + drafted,
      widens=state.widens * slow + paid,
      idle=jnp.where(
        running, jnp.where(paid.any(), 0, state.idle + 1), state.idle
      ),
      asked_at=state.asked_at + at,
      reads_at=state.reads_at + read,
      behind=jnp.where(asked, 0, state.behind + outcome.num_tokens),
      caught_up=state.caught_up + jnp.where(running, late, 0),
      num_probes=state.num_probes + probed,
    )

  return LengthPolicy(
    init,
    max_depth,
    update,
    needs_costs=True,
    follows=follow,
    restart=lambda state: dataclasses.replace(
      state,
      hits=state.hits * carry,
      chances=state.chances * carry,
      asks=state.asks * carry,
      offers=state.offers * carry,
      widens=state.widens * carry,
      behind=jnp.zeros_like(state.behind),
    ),
  )


POLICIES = {
  "fixed": fixed,
  "confidence": confidence,
  "entropy": entropy,
  "average": average,
  "cost": cost,
}


def forced(policy: CostState, depth: int) -> CostState:
  """Returns a state whose next steps draft so deep; -1 = as the policy says."""
  old = policy.force
  new = jax.device_put(jnp.full(old.shape, depth, old.dtype), old.sharding)
  return dataclasses.replace(policy, force=new)


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


def build(name: str, depth: int, **settings) -> LengthPolicy:
  """Builds a policy by name.

  Args:
    name: a key of `POLICIES`.
    depth: the drafter's `K`.
    **settings: the policy's options.

  Raises:
    ValueError: for an unknown policy or option, or an option out of range.
  """
  options(name)  # refuses a name that there is not
  check_options(f"length policy {name!r}", settings, POLICIES[name])
  return POLICIES[name](depth, **settings)


def report(
  name: str, state: Any, costs: Sequence[float] | None
) -> dict[str, Any] | None:
  """Returns what a policy did, for people and results; None if it is fixed.

  Args:
    name: of the policy.
    state: its state after a run.
    costs: see `Engine`, if it needed them.

  Returns:
    For "cost": steps by the depth drafted, probes, the chance of acceptance
    by depth as last estimated, the costs as they are now, those of a step by
    depth relative to no draft, those of a token of catching up, and in
    `alarm` one line if drafting
    was off in most steps, saying why, else None.
  """
  if name != "cost" or costs is None:
    return {"name": name} if name != "fixed" else None
  taken = np.asarray(state.asked_at).sum(0)
  depth = len(taken) - 1
  hits, chances = (
    np.asarray(state.hits).sum(0),
    np.asarray(state.chances).sum(0),
  )
  rates = [
    float(h / c) if c > 0 else None for h, c in zip(hits, chances, strict=True)
  ]
  alarm = None
  if taken.sum() and taken[0] > taken.sum() / 2:
    share = taken[0] / taken.sum()
    asked = np.asarray(state.asks).sum() > 0
    first = "nothing was proposed" if asked else "none was asked for"
    if rates and rates[0] is not None:
      first = (
        f"the first draft token is accepted {100 * rates[0]:.0f} % of times"
      )
    alarm = (
      f"no draft in {100 * share:.0f} % of steps: {first}, and a step with a "
      f"draft costs {costs[1] / costs[0]:.2f} to {costs[depth] / costs[0]:.2f} "
      f"of one without"
    )
  return {
    "name": name,
    "costs_s": list(costs),
    "catch_up_s": costs[depth + 1] if len(costs) > depth + 1 else None,
    "relative_costs": [x / costs[0] for x in costs[: depth + 1]],
    "steps_at_depth": taken.tolist(),
    "num_probes": int(np.asarray(state.num_probes).sum()),
    "accept_cond": rates,
    "alarm": alarm,
  }
