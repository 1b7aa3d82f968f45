"""K-SEQ: one threshold for all independent siblings of a node."""

from collections.abc import Callable

from jax import lax
import jax.numpy as jnp

from spec_jax.base import DETERMINISTIC, Array, Draft, Noise, Verdict
from spec_jax.verify import Tried, draft_row, residual_law, walk

# Rounds of bisection: rho is then known to `(k - 1) * 2**-24`.
_ROUNDS = 24


def _ratio(beta_B: Array, k_B: Array) -> Array:
  """Returns `(1 - (1 - beta)^k) / beta`, which is `k` at 0 and 1 at 1.

  By logarithms: the plain formula loses all digits where beta is small.
  """
  beta = jnp.clip(beta_B, 0.0, 1.0)
  some = jnp.where(beta > 0, beta, 1.0)
  ratio = -jnp.expm1(k_B * jnp.log1p(-some)) / some
  # One draft: exactly 1, so that a chain is judged as `verify` judges it.
  return jnp.where(k_B <= 1, 1.0, jnp.where(beta > 0, ratio, k_B))


def _overlap(law_BV: Array, draft_law_BV: Array, rho_B: Array) -> Array:
  """Returns `beta(rho) = sum_x min(p(x) / rho, q(x))`, `[B]`."""
  return jnp.minimum(law_BV / rho_B[:, None], draft_law_BV).sum(-1)


def optimal_rho(law_BV: Array, draft_law_BV: Array, k_B: Array) -> Array:
  """Returns the smallest rho that keeps the law, the best one.

  It solves `1 - (1 - beta(rho))^k = rho beta(rho)` in `[1, k]`. The right side,
  `sum_x min(p, rho q)`, rises with rho, the left one falls, and at `rho = k`
  the right side is the larger (Bernoulli), so bisection finds it; the upper
  end is returned, for which `rho >= (1 - (1 - beta)^k) / beta`.

  Args:
    law_BV: p.
    draft_law_BV: q.
    k_B: `[B]` number of drafts.
  """
  k = jnp.maximum(k_B.astype(jnp.float32), 1.0)

  def enough(rho):
    return rho >= _ratio(_overlap(law_BV, draft_law_BV, rho), k)

  def halve(_, ends):
    low, high = ends
    middle = (low + high) / 2
    good = enough(middle)
    return jnp.where(good, low, middle), jnp.where(good, middle, high)

  def search():
    one = jnp.ones_like(k)
    _, high = lax.fori_loop(0, _ROUNDS, halve, (one, k))
    return jnp.where(enough(one), one, high)

  return lax.cond((k > 1).any(), search, lambda: k)


def _try_together(
  noise, law, draft, node, children, acceptable, active, *, rho
) -> Tried:
  """Offers all acceptable children of a node to the same law.

  Child x is accepted with probability `min(1, p(x) / (rho q(x)))`, whatever
  came of its siblings; the first that is accepted wins.
  """
  del children
  N = acceptable.shape[1]
  offered = acceptable & (draft.law != DETERMINISTIC) & active[:, None]
  k = offered.sum(1)
  q = draft_row(draft, node, law)
  best = optimal_rho(law, q, k)
  if rho is not None:
    best = jnp.clip(jnp.float32(rho), best, jnp.maximum(best, k))
  q_x = jnp.take_along_axis(q, draft.tokens, 1) * best[:, None]
  p_x = jnp.take_along_axis(law, draft.tokens, 1)
  takes = offered & (q_x > 0) & (noise * q_x < p_x)
  chance = jnp.where(
    q_x > 0, jnp.minimum(1.0, p_x / jnp.where(q_x > 0, q_x, 1.0)), 0.0
  )
  won = takes.any(1)
  winner = jnp.argmax(takes, 1).astype(jnp.int32)
  last = jnp.where(won, winner, N)[:, None]
  taken = jnp.minimum(q, law / best[:, None])
  taken = taken * _ratio(taken.sum(-1), jnp.maximum(k, 1))[:, None]
  return Tried(
    won=won,
    winner=winner,
    residual=residual_law(law, taken),
    accept_prob=jnp.where(offered & (jnp.arange(N)[None] <= last), chance, 0.0),
  )


def verify_k_seq(
  noise: Noise,
  law_at: Callable[[Array], Array],
  draft: Draft,
  depth: int,
  *,
  rho: float | None = None,
) -> Verdict:
  """Keeps a path of a tree whose siblings are drawn independently.

  With k acceptable children of a node, drawn from q, each is accepted with
  probability `min(1, p / (rho q))`, in order; so one is with probability
  `p_acc = 1 - (1 - beta)^k`, `beta = sum_x min(p / rho, q)`, and it is x with
  probability `min(q, p / rho)(x) p_acc / beta`. If none is, one token is drawn
  from what p has more than that.

  That is no less than 0 for `rho >= rho*` (`optimal_rho`): there `p_acc / beta
  <= rho` and `min(q, p / rho) <= p / rho`. So a rho that is given is raised to
  rho* where it is smaller, and lowered to k (or rho*) where it is larger, which
  accepts more: the law is the target's with every rho.

  k must not depend on the siblings' tokens: whether a node is acceptable must
  be known before its first sibling is drawn, not merely before itself. Rows
  whose children are certain (greedy ones) are verified as `verify` does, and
  so, to the bit, are chains.

  p = (.5, .3, .1, .1), q = (.1, .2, .3, .4), two children: rho* is 1.5844 and
  one is accepted with probability .65844; `verify` accepts one with .65.

  Args:
    noise: uniforms.
    law_at: see `verify.walk`.
    draft: a tree; where it is drawn at random, IID.
    depth: `K`.
    rho: None = rho*, at each node of each row.

  Returns:
    Verdict, not yet cut by stops and limits.

  Reference: Sun et al. 2023, "SpecTr: Fast Speculative Decoding via Optimal
    Transport", algorithm 2.
  """

  def try_children(*args):
    return _try_together(*args, rho=rho)

  return walk(noise, law_at, draft, depth, try_children)
