"""The length policy that goes by what steps cost: how deep pays, if at all."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from spec_jax.base import Array, LengthPolicy, Outcome
from spec_jax.levels import Levels

# Steps after which what was lost has been forgotten to all but 1/e.
_WINDOW = 200.0


@flax.struct.dataclass
class CostState:
  """What the cost-aware policy knows of each row; outlives its prompts.

  Attributes:
    hits: `[B, L]` float32, decayed count of acceptances at the depth of level
      `i + 1`, when the row was asked in that level's way.
    chances: `[B, L]` float32, decayed count of chances.
    asks: `[B, G]` float32, decayed count of steps that asked for a draft, by
      way.
    offers: `[B, G]` float32, decayed count of those in which one was proposed.
    widens: `[B, G]` float32, decayed count of those in which the target's pass
      was widened, for a draft or for the drafter's own use.
    idle: `[B, G]` int32, steps since any row of the batch drafted in that way.
    asked_at: `[B, L + 1]` int32, steps by the level asked for, 0 where the
      target read the root alone for this row.
    reads_at: `[B, L + 1]` int32, steps in which the row ran, by the level of
      the batch's deepest draft, 0 where the target read the roots alone.
    spent: `[B, L + 1]` float32, decayed count of steps as in `reads_at`.
    gained: `[B]` float32, decayed count of tokens beyond the first of a step.
    late: `[B]` float32, decayed count of tokens as in `caught_up`.
    behind: `[B]` int32, tokens of the row's text committed since the row
      drafted with all parts.
    caught_up: `[B]` int32, tokens caught up with in these steps, in each
      those of the row that was most behind.
    num_probes: `[B]` int32, steps that drafted in a way that had rested for
      `probe` steps: to look again, or because it pays again.
    force: `[B]` int32, a level to take whatever is known (to measure what it
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
  spent: Array
  gained: Array
  late: Array
  behind: Array
  caught_up: Array
  num_probes: Array
  force: Array


def cost(
  levels: Levels,
  *,
  probe: int = 32,
  budget: float = 0.01,
  margin: float = 0.05,
  memory: float = 50.0,
  prior: float = 0.7,
  carry: float = 0.3,
  follow: bool = True,
) -> LengthPolicy:
  """Builds the policy that drafts as deep as pays, down to not at all.

  `costs[d]` are the seconds of a step that drafts `d` deep (at level `d`, see
  `spec_jax/levels.py`), measured on this device. With `a_i` a row's running
  estimate of the chance that depth `i` is accepted where depth `i - 1` was, and
  `m` of the chance that there is anything to propose, a step emits `1 + m (a_1
  + a_1 a_2 + ...)` tokens; the wider pass is paid by the whole batch if any row
  proposes, or reads for its drafter's own use. The batch drafts at the depth
  with the most expected tokens a second; where a drafter can do without its
  dearer part (`Drafter.cheap_depth`), either way has estimates of its own, and
  steps with all parts tell about both.

  A way that was not used for `probe` steps, or for so many more that such
  probes lose at most `budget` of the time, is used once to look again (where it
  seldom has anything to propose, a probe seldom costs anything). A draft
  model that was not asked must then catch up, which counts as a part of the
  probe: where that alone takes more than the budget, it is asked again at the
  beginning of the next prompt (in a batch when its rows' prompts are all new
  enough). What it must catch up with is charged to the next `probe` steps where
  it had not been asked.

  Args:
    levels: of the drafter.
    probe: steps without a draft after which one is tried, at least.
    budget: fraction of the time that such tries may lose, as if they were in
      vain; and as much again what is hoped for without being known.
    margin: drafting must promise so much more than not drafting, as a
      fraction: what costs and chances are uncertain by.
    memory: chances after which an estimate has forgotten all but 1/e.
    prior: chance of acceptance before anything is known, of this row or of
      the others; below a depth that does better, that depth's. While drafting
      has lost more than `budget` of the last 200 steps, it is 0: then only what
      is known counts, and what a probe finds.
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
  if not margin >= 0:
    raise ValueError(f"margin must be at least 0, got {margin}")
  if not memory > 1:
    raise ValueError(f"memory must be above 1, got {memory}")
  if not 0 < prior < 1:
    raise ValueError(f"prior must be in (0, 1), got {prior}")
  if not 0 <= carry <= 1:
    raise ValueError(f"carry must be in [0, 1], got {carry}")
  keep, weight = 1 - 1 / memory, 2.0  # the prior counts as so many chances
  L, G = levels.num, levels.num_ways
  way_L, depth_L = levels.way_of[1:], levels.depth_of[1:]  # of levels 1 to L
  ways = jnp.arange(G)[None]

  def init(batch):
    per_level = jnp.zeros((batch, L), jnp.float32)
    per_way = jnp.zeros((batch, G), jnp.float32)
    zeros = jnp.zeros((batch,), jnp.int32)
    return CostState(
      hits=per_level,
      chances=per_level,
      asks=per_way,
      offers=per_way,
      widens=per_way,
      idle=jnp.zeros((batch, G), jnp.int32),
      asked_at=jnp.zeros((batch, L + 1), jnp.int32),
      reads_at=jnp.zeros((batch, L + 1), jnp.int32),
      spent=jnp.zeros((batch, L + 1), jnp.float32),
      gained=jnp.zeros((batch,), jnp.float32),
      late=jnp.zeros((batch,), jnp.float32),
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

  def hope(state, running, costs):
    """Returns the chance that what is not known well is thought to have.

    `prior`, but 0 while drafting has lost more of late than `budget` allows:
    what is hoped for anew with each prompt would else be lost with each.
    """
    lost = state.spent @ (costs[: L + 1] / costs[0] - 1) - state.gained
    if costs.shape[0] > L + 1:
      lost = lost + state.late * costs[L + 1] / costs[0]
    lost = jnp.where(running, lost, 0).sum()
    return jnp.where(lost > budget * _WINDOW * running.sum(), 0.0, prior)

  def gains(state, hoped):
    """Returns `[B, L]` expected tokens beyond the first where one is proposed.

    Depths that were not tried are thought well of: where a depth is nearly
    always accepted, so may the next one be. Without that a policy that does
    well stays where it is.
    """
    rates: list[Array] = []
    before = hoped
    for i in range(L):
      before = hoped if depth_L[i] == 1 else before
      rate = estimate(state.hits[:, i], state.chances[:, i], before)
      before = jnp.maximum(hoped, rate)
      rates.append(rate)
    rate_BL = jnp.stack(rates, -1)
    return jnp.concatenate(
      [jnp.cumsum(jnp.cumprod(rate_BL[:, s], -1), -1) for s in levels.slices()],
      -1,
    )

  def level(state, running, costs):
    if not L:  # a drafter that never drafts
      return jnp.zeros_like(state.behind)
    on = running[:, None]
    offer = jnp.where(on, estimate(state.offers, state.asks, 1.0), 0)
    wide = jnp.where(on, estimate(state.widens, state.asks, 1.0), 0)
    rows = running.sum()
    plain, deep = costs[0], costs[1 : L + 1]
    late = jnp.where(running, state.behind, 0).max()
    catch_up = costs[L + 1] * late if costs.shape[0] > L + 1 else 0.0
    catch_up = jnp.where(way_L == 0, catch_up, 0.0)  # [L]
    somebody = (1 - jnp.prod(1 - wide, 0))[way_L]
    step = plain + somebody * (deep - plain)  # [L], where nothing waits
    spent = step + catch_up / probe
    hoped = hope(state, running, costs)
    rate = (rows + (offer[:, way_L] * gains(state, hoped)).sum(0)) / spent
    best = jnp.argmax(rate)
    pays = rate[best] > rows / plain * (1 + margin)
    usual = jnp.where(pays, spent[best], plain)
    usual_rate = jnp.where(pays, rate[best], rows / plain)
    # Each way's best level, and what trying it in vain would lose, in steps.
    places = [s.start + jnp.argmax(rate[s]) for s in levels.slices()]
    tried = jnp.stack(places)  # [G]
    lost = (step + catch_up)[tried] - rows / usual_rate
    wait = jnp.maximum(probe, lost / usual / (budget / G))
    never = jnp.iinfo(jnp.int32).max
    idle = jnp.where(on, state.idle, never).min(0)
    due = (idle >= wait) & ~(pays & (ways[0] == jnp.array(way_L)[best]))
    longest = jnp.argmax(jnp.where(due, idle, -1))
    asked = jnp.where(pays, 1 + best, 0)
    asked = jnp.where(due.any(), 1 + tried[longest], asked)
    asked = jnp.broadcast_to(asked, running.shape)
    return jnp.where(state.force >= 0, state.force, asked).astype(jnp.int32)

  def update(state, outcome: Outcome):
    running, paid = outcome.running, outcome.widened
    way, _ = levels.split(outcome.asked)
    # Chances belong to the levels of the way that was asked.
    mine = way[:, None] == way_L[None]
    chance = outcome.chance[:, depth_L - 1] & mine
    accepted = outcome.accepted[:, depth_L - 1] & mine
    asked = (outcome.asked > 0) & running
    here = (ways == way[:, None]) & asked[:, None]  # [B, G]
    drafted = outcome.chance.any(-1)[:, None] & here
    widened = paid[:, None] & here
    used = widened.any(0)  # [G]
    before = jnp.where(here, state.idle, 0).max(1)
    if outcome.cheap is not None:
      # With all parts asked, what the cheap one alone had come to is seen too.
      theirs = (way_L > 0)[None] & here[:, :1]
      cheap_chance, cheap_accepted, cheap_widened = outcome.cheap
      chance = chance | (cheap_chance[:, depth_L - 1] & theirs)
      accepted = accepted | (cheap_accepted[:, depth_L - 1] & theirs)
      also = (ways > 0) & here[:, :1]
      here = here | also
      drafted = drafted | (cheap_chance.any(-1)[:, None] & also)
      widened = widened | (cheap_widened[:, None] & also)
      used = used | (used[:1] & (ways[0] > 0))
    fade = jnp.where(chance, keep, 1.0)
    slow = jnp.where(here, keep, 1.0)
    probed = paid & running & (before >= probe)
    tried = jnp.where(paid, outcome.asked, 0)[:, None]
    at = (jnp.arange(L + 1)[None] == tried) & running[:, None]
    deepest = jnp.where(running[:, None], tried, 0).max()
    read = (jnp.arange(L + 1)[None] == deepest) & running[:, None]
    with_all = asked & (way == 0)
    late = jnp.where(running, jnp.where(with_all, state.behind, 0).max(), 0)
    old = jnp.where(running, 1 - 1 / _WINDOW, 1.0)
    more = jnp.where(running, outcome.num_tokens - 1, 0)
    return dataclasses.replace(
      state,
      hits=state.hits * fade + accepted,
      chances=state.chances * fade + chance,
      asks=state.asks * slow + here,
      offers=state.offers * slow + drafted,
      widens=state.widens * slow + widened,
      idle=jnp.where(
        running[:, None], jnp.where(used[None], 0, state.idle + 1), state.idle
      ),
      asked_at=state.asked_at + at,
      reads_at=state.reads_at + read,
      spent=state.spent * old[:, None] + read,
      gained=state.gained * old + more,
      late=state.late * old + late,
      behind=jnp.where(with_all, 0, state.behind + outcome.num_tokens),
      caught_up=state.caught_up + late,
      num_probes=state.num_probes + probed,
    )

  return LengthPolicy(
    init,
    level,
    update,
    needs_costs=True,
    follows=follow,
    knows_ways=True,
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


def forced(policy: CostState, level: int) -> CostState:
  """Returns a state whose next steps are asked so; -1 = as the policy says."""
  old = policy.force
  new = jax.device_put(jnp.full(old.shape, level, old.dtype), old.sharding)
  return dataclasses.replace(policy, force=new)
