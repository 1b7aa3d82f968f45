"""Block verification: a second lossless rule for chains, never worse."""

from collections.abc import Callable

from jax import lax
import jax.numpy as jnp

from spec_jax.base import DETERMINISTIC, Array, Draft, Noise, Verdict
from spec_jax.nodes import at_node
from spec_jax.sampling import draw, one_hot, prob_of
from spec_jax.verify import residual_law


def verify_block(
  noise: Noise, law_at: Callable[[Array], Array], draft: Draft, depth: int
) -> Verdict:
  """Keeps a prefix of a chain, judged as a whole instead of token by token.

  With `w_0 = 1` and `w_i = min(w_{i-1} p(x_i) / q(x_i), 1)`, the prefix of
  length `i` passes with probability `A / (A + 1 - w_i)`, `A` the sum of
  `max(w_i p - q, 0)` at its end, and the whole draft with probability `w_K`.
  The longest prefix that passes is kept, and one token is drawn from what is
  left there (after the whole draft, from the target's law). Nodes from the
  first that is not acceptable on do not belong to the draft. Greedy rows, and
  drafts of one token, are verified as `verify` does.

  p = (1/3, 2/3), q = (2/3, 1/3), two tokens drafted: 11/9 are kept on average,
  10/9 by `verify`.

  Args:
    noise: uniforms; `accept[:, i]` for the prefix that ends at node `i`.
    law_at: see `verify`; called at each node.
    draft: a chain: node `i` is the child of node `i - 1`.
    depth: `K`.

  Returns:
    Verdict, not yet cut by stops and limits. `accept_prob` holds each prefix's
    chance, in all nodes of the draft.

  Reference: Sun et al. 2025, "Block Verification Accelerates Speculative
    Decoding", algorithm 2.
  """
  B, N = draft.tokens.shape
  assert N == depth + 1, "block verification is for chains"
  K = depth
  ours = jnp.cumprod(draft.acceptable[:, 1:], -1, dtype=bool)  # [B, K]
  gamma = ours.sum(-1).astype(jnp.int32)

  def draft_law(node_B):
    """Returns the law the child of a node was drawn from."""
    child = jnp.minimum(node_B + 1, K)
    token, how = at_node(draft.tokens, child), at_node(draft.law, child)
    point = one_hot(token, V)
    if draft.probs is None:
      return point
    q = at_node(draft.probs, node_B)
    return jnp.where((how == DETERMINISTIC)[:, None], point, q)

  V = law_at(jnp.zeros((B,), jnp.int32)).shape[-1]

  def level(i, carry):
    weight, kept, kept_weight, chances = carry
    node = jnp.full((B,), i, jnp.int32)
    law, q = law_at(node), draft_law(node)
    left = jnp.maximum(weight[:, None] * law - q, 0.0).sum(-1)
    lost = 1 - weight
    chance = jnp.where(lost > 0, left / jnp.where(lost > 0, left + lost, 1), 1)
    chance = jnp.where(i == gamma, weight, chance)
    chance = jnp.where((i > 0) & (i <= gamma), chance, 0.0)
    u = lax.dynamic_index_in_dim(noise.accept, i, 1, False)
    passes = u < chance
    kept = jnp.where(passes, i, kept)
    kept_weight = jnp.where(passes, weight, kept_weight)
    chances = lax.dynamic_update_index_in_dim(chances, chance, i, 1)
    token = lax.dynamic_index_in_dim(
      draft.tokens, jnp.minimum(i + 1, K), 1, False
    )
    p_x, q_x = prob_of(law, token), prob_of(q, token)
    ratio = jnp.where(q_x > 0, p_x / jnp.where(q_x > 0, q_x, 1.0), 0.0)
    weight = jnp.minimum(weight * ratio, 1.0)
    return weight, kept, kept_weight, chances

  ones, zeros = jnp.ones((B,)), jnp.zeros((B,), jnp.int32)
  _, kept, kept_weight, chances = lax.fori_loop(
    0, gamma.max() + 1, level, (ones, zeros, ones, jnp.zeros((B, N)))
  )
  law = law_at(kept)
  whole = kept == gamma
  residual = residual_law(kept_weight[:, None] * law, draft_law(kept))
  final = jnp.where(whole[:, None], law, residual)
  plain = jnp.take_along_axis(noise.plain, kept[:, None], 1)[:, 0]
  last = draw(final, jnp.where(whole, plain, noise.residual))
  columns = jnp.arange(K + 1)[None]
  in_path = columns <= kept[:, None]
  shifted = jnp.concatenate([draft.tokens[:, 1:], draft.tokens[:, :1]], 1)
  tokens = jnp.where(columns < kept[:, None], shifted, -1)
  tokens = jnp.where(columns == kept[:, None], last[:, None], tokens)
  return Verdict(
    path=jnp.where(in_path, columns, -1).astype(jnp.int32),
    tokens=tokens.astype(jnp.int32),
    num_accepted=kept,
    num_tokens=kept + 1,
    accept_prob=chances,
    residual=final,
    plain=(columns == kept[:, None]) & whole[:, None],
  )
