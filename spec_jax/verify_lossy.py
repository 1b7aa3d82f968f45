"""Rules that change the law: they accept more, and say how far off they are."""

from collections.abc import Callable

from jax import lax
import jax.numpy as jnp

from spec_jax.base import Array, Draft, Noise, Verdict
from spec_jax.nodes import at_node
from spec_jax.sampling import first_largest, one_hot, prob_of
from spec_jax.verify import Tried, draft_row, residual_law, walk


def verify_lenience(
  noise: Noise,
  law_at: Callable[[Array], Array],
  draft: Draft,
  depth: int,
  *,
  lenience: float,
) -> Verdict:
  """Accepts the tokens of a chain with probability `min(1, p / (l q))`.

  q is multiplied by the lenience l where it is compared with p, and nowhere
  else: after a refusal the token is drawn from `norm(max(p - q, 0))`. So token
  x is emitted with probability

      out(x) = min(q, p / l)(x) + (1 - sum min(q, p / l)) residual(x),

  which is at most `p(x) / l`. The residual lies only where `out <= p`, so the
  total variation between out and p is `sum_x max(min(q, p / l) - p, 0)(x)`:
  this is the `divergence` of a token at which a draft was judged, whether it
  was kept or replaced, over the draws of the draft. A bonus token's is 0. With
  l = 1 the rule is `verify` to the bit.

  Rows whose tokens are certain (greedy ones) are verified as `verify` does,
  exactly: the paper's rule for temperature 0, keep x if `p(x) >= l max p`,
  needs the law before the temperature, which is a point mass here.

  Args:
    noise: uniforms.
    law_at: see `verify.walk`.
    draft: a chain drawn at random.
    depth: `K`.
    lenience: l in (0, 1].

  Returns:
    Verdict with its `divergence`, not yet cut by stops and limits.

  Reference: Leviathan et al. 2023, appendix A.5.
  """

  def try_child(accept, law, draft, node, children, acceptable, active):
    del children
    offered = acceptable & active[:, None]
    child = jnp.argmax(offered, 1).astype(jnp.int32)
    at = lambda x: jnp.take_along_axis(x, child[:, None], 1)[:, 0]
    token = at(draft.tokens)
    q = draft_row(draft, node, law)
    p_x, q_x = prob_of(law, token), prob_of(q, token) * lenience
    takes = active & (q_x > 0) & (at(accept) * q_x < p_x)
    chance = jnp.where(
      q_x > 0, jnp.minimum(1.0, p_x / jnp.where(q_x > 0, q_x, 1.0)), 0.0
    )
    kept = jnp.minimum(q, law / lenience)
    return Tried(
      won=takes,
      winner=child,
      residual=residual_law(law, q),
      accept_prob=jnp.where(offered, chance[:, None], 0.0),
      divergence=jnp.maximum(kept - law, 0.0).sum(-1),
    )

  return walk(noise, law_at, draft, depth, try_child, lossy=True)


def _threshold(law_BV: Array, epsilon: float, delta: float) -> Array:
  """Returns `[B]`, `min(epsilon, delta exp(-H(p)))`."""
  log = jnp.log(jnp.where(law_BV > 0, law_BV, 1.0))
  return jnp.minimum(epsilon, delta * jnp.exp((law_BV * log).sum(-1)))


def verify_typical(
  noise: Noise,
  law_at: Callable[[Array], Array],
  draft: Draft,
  depth: int,
  *,
  epsilon: float,
  delta: float,
) -> Verdict:
  """Keeps the longest path of tokens that are likely enough.

  A token x passes if `p(x) > min(epsilon, delta exp(-H(p)))`, p the target's
  warped law after the path to it and H its entropy in nats, or if it is
  certain. A node counts if it and all its ancestors pass; the deepest is kept,
  of several the one whose path has the largest probability, of equals the
  first. The token after it is the largest of the target's law, a plain argmax
  also where no child passes and where nothing was drafted: the paper's first
  token of a step, greedy and always accepted. (Here it ends the step before.)

  No noise is used: given the draft every token is certain, so its `divergence`
  is `1 - p(x)`; over draws of a random draft it is less. Rows that are greedy
  (p a point mass) have the target's own text, divergence 0.

  Args:
    noise: not used.
    law_at: see `verify.walk`; called once for each node that passes and has
      children, and for the last.
    draft: any tree.
    depth: `K`.
    epsilon: in (0, 1].
    delta: above 0.

  Returns:
    Verdict with its `divergence`, not yet cut by stops and limits.

  Reference: Cai et al. 2024 (Medusa), section 2.3.1.
  """
  del noise
  B, N = draft.tokens.shape
  K = depth
  nodes = jnp.arange(N)[None]
  usable = draft.acceptable & (nodes > 0)
  parents = jnp.where(usable, draft.parents, -1)
  has_children = (parents[:, :, None] == nodes[:, None]).any(1)

  def visit(carry):
    """Judges the children of one node of each row that has one to visit."""
    todo, alive, chance, score = carry
    active = todo.any(1)
    node = jnp.argmax(todo, 1).astype(jnp.int32)
    law = law_at(node)
    p = jnp.take_along_axis(law, draft.tokens, 1)
    limit = _threshold(law, epsilon, delta)[:, None]
    passes = (parents == node[:, None]) & active[:, None]
    passes = passes & ((p > limit) | (p >= 1))
    so_far = jnp.take_along_axis(score, node[:, None], 1)
    log = jnp.log(jnp.where(passes, p, 1.0))
    return (
      (todo & (nodes != node[:, None])) | (passes & has_children),
      alive | passes,
      jnp.where(passes, p, chance),
      jnp.where(passes, so_far + log, score),
    )

  root = jnp.broadcast_to(nodes == 0, (B, N))
  zeros = jnp.zeros((B, N))
  _, alive, chance, score = lax.while_loop(
    lambda carry: carry[0].any(),
    visit,
    (root & has_children, root, zeros, zeros),
  )
  depths = jnp.where(alive, draft.depths, -1)
  deepest = depths.max(1)
  best = jnp.argmax(
    jnp.where(depths == deepest[:, None], score, -jnp.inf), 1
  ).astype(jnp.int32)
  law = law_at(best)
  last = first_largest(law)
  point = one_hot(last, law.shape[-1])

  columns = jnp.arange(K + 1)[None]
  seen = at_node(draft.visible, best)
  on = seen[:, None] & (draft.depths[:, None] == columns[:, :, None])
  path = jnp.where(on.any(-1), jnp.argmax(on, -1), -1).astype(jnp.int32)
  after = jnp.concatenate([path[:, 1:], jnp.full((B, 1), -1, jnp.int32)], 1)
  here = jnp.maximum(after, 0)
  is_last = columns == deepest[:, None]
  tokens = jnp.take_along_axis(draft.tokens, here, 1)
  tokens = jnp.where(is_last, last[:, None], jnp.where(after > 0, tokens, -1))
  far = jnp.where(after > 0, 1 - jnp.take_along_axis(chance, here, 1), 0.0)
  far = jnp.where(is_last, 1 - prob_of(law, last)[:, None], far)
  return Verdict(
    path=path,
    tokens=tokens,
    num_accepted=deepest,
    num_tokens=deepest + 1,
    accept_prob=zeros,
    residual=point,
    plain=jnp.zeros((B, K + 1), bool),
    divergence=far,
  )
