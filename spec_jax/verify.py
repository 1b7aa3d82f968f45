"""The lossless core: keep a prefix of the draft, then one token of our own."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from spec_jax.base import (
  DETERMINISTIC,
  WITHOUT_REPLACEMENT,
  Array,
  Draft,
  Noise,
  Verdict,
)
from spec_jax.nodes import at_node
from spec_jax.sampling import draw, one_hot, prob_of


def residual_law(law_BV: Array, draft_law_BV: Array) -> Array:
  """Returns what is left of a law after a refusal: `norm(max(p - q, 0))`.

  If nothing is left (`p = q` up to rounding) the law stays as it was: finite,
  never NaN.

  Reference: Leviathan et al. 2023, section 2.3.
  """
  left = jnp.maximum(law_BV - draft_law_BV, 0.0)
  total = left.sum(-1, keepdims=True)
  return jnp.where(total > 0, left / jnp.where(total > 0, total, 1.0), law_BV)


def _without(law_BV: Array, token_B: Array) -> Array:
  """Returns the law less one token, renormalised; zeros if nothing is left."""
  left = law_BV * (1 - one_hot(token_B, law_BV.shape[-1]))
  total = left.sum(-1, keepdims=True)
  return jnp.where(total > 0, left / jnp.where(total > 0, total, 1.0), 0.0)


class Tried(NamedTuple):
  """What came of offering the children of one node to the target's law.

  Attributes:
    won: `[B]` bool, whether a child was accepted.
    winner: `[B]` int32, the child; junk where none was.
    residual: `[B, V]` float32, what to draw the token from where none was.
    accept_prob: `[B, N]` float32, see `Verdict`.
    divergence: `[B]` float32, of a lossy rule, see `Verdict`.
  """

  won: Array
  winner: Array
  residual: Array
  accept_prob: Array
  divergence: Array | None = None


def draft_row(draft: Draft, node_B: Array, like_BV: Array) -> Array:
  """Returns `[B, V]`, the law a node's children were drawn from; or zeros."""
  if draft.probs is None:
    return jnp.zeros_like(like_BV)
  return at_node(draft.probs, node_B)


def _try_children(
  noise, law, draft, node, children, acceptable, active
) -> Tried:
  """Offers the children of one node to the target's law, in index order.

  Child x is accepted with probability min(1, residual(x) / q(x)): if q(x) > 0
  and u q(x) < residual(x), strictly, so that neither a token of target
  probability zero nor a sibling drawn past q's support is ever accepted.

  Args:
    noise: `[B, N]` uniforms.
    law: `[B, V]` the target's law at the node.
    draft: the draft.
    node: `[B]` the node.
    children: `[B, N]` bool.
    acceptable: `[B, N]` bool.
    active: `[B]` bool, rows that take part.

  Returns:
    Tried.
  """
  B, N = children.shape
  V = law.shape[-1]
  q_row = draft_row(draft, node, law)

  def body(carry):
    todo, residual, q_left, won, winner, accept_prob = carry
    has = todo.any(1)
    child = jnp.argmax(todo, 1).astype(jnp.int32)
    token = at_node(draft.tokens, child)
    how = at_node(draft.law, child)
    offered = has & at_node(acceptable, child)
    certain, leaves = how == DETERMINISTIC, how == WITHOUT_REPLACEMENT
    q_x = jnp.where(leaves, prob_of(q_left, token), prob_of(q_row, token))
    q_x, p_x = jnp.where(certain, 1.0, q_x), prob_of(residual, token)
    takes = offered & (q_x > 0) & (at_node(noise, child) * q_x < p_x)
    chance = jnp.where(
      q_x > 0, jnp.minimum(1.0, p_x / jnp.where(q_x > 0, q_x, 1.0)), 0.0
    )
    this = jnp.arange(N)[None] == child[:, None]
    accept_prob = jnp.where(
      this & offered[:, None], chance[:, None], accept_prob
    )
    refused = offered & ~takes
    # A sibling drawn without replacement leaves q whether it is offered or not.
    leaves = leaves & has & ~takes

    def change():
      q = jnp.where((how == WITHOUT_REPLACEMENT)[:, None], q_left, q_row)
      q = jnp.where(certain[:, None], one_hot(token, V), q)
      return (
        jnp.where(refused[:, None], residual_law(residual, q), residual),
        jnp.where(leaves[:, None], _without(q_left, token), q_left),
      )

    changed = lax.cond(
      (refused | leaves).any(), change, lambda: (residual, q_left)
    )
    todo = todo & ~this & ~takes[:, None]
    won, winner = won | takes, jnp.where(takes, child, winner)
    return todo, *changed, won, winner, accept_prob

  init = (
    children & active[:, None],
    law,
    q_row,
    jnp.zeros((B,), bool),
    jnp.zeros((B,), jnp.int32),
    jnp.zeros((B, N), jnp.float32),
  )
  _, residual, _, won, winner, accept_prob = lax.while_loop(
    lambda carry: carry[0].any(), body, init
  )
  return Tried(won, winner, residual, accept_prob)


def verify(
  noise: Noise, law_at: Callable[[Array], Array], draft: Draft, depth: int
) -> Verdict:
  """Walks the tree from the root and keeps what the target's law allows.

  The children of a node are offered one by one (`_try_children`), the target's
  law changing with each refusal.

  Chain `[root, 7, 8]` of tokens drawn from q, target laws p0, p1, p2: 7 kept,
  8 refused gives path `[0, 1, -1]`, tokens `[7, x, -1]` with x drawn from
  `norm(max(p1 - q1, 0))`, `num_accepted` 1, `num_tokens` 2.

  Args:
    noise: uniforms, see `Noise`.
    law_at: see `walk`.
    draft: what was proposed.
    depth: `K`.

  Returns:
    Verdict, not yet cut by stops and limits.

  Reference: Leviathan et al. 2023 (chains); Miao et al. 2024 (SpecInfer,
    siblings); Chen et al. 2024 (Sequoia, without replacement).
  """
  return walk(noise, law_at, draft, depth, _try_children)


def walk(
  noise: Noise,
  law_at: Callable[[Array], Array],
  draft: Draft,
  depth: int,
  try_children: Callable[..., Tried],
  lossy: bool = False,
) -> Verdict:
  """Goes down the tree, level by level, where children are accepted.

  At the node arrived at, if an acceptable child was drawn with a real law, the
  children are offered (`try_children`), and if none is accepted one token is
  drawn from the residual. If every acceptable child is deterministic, in
  particular if there is none, one token is drawn from the target's law with the
  plain noise and the walk moves to the child that equals it, else emits it and
  stops: the same law, no residual, and the text then equals plain decoding's
  with the same seed at every temperature.

  Args:
    noise: uniforms, see `Noise`.
    law_at: `law_at(nodes_B) -> [B, V]`, the target's warped law after the path
      to that node; called once a level, on the node arrived at, and once more
      on the last one.
    draft: what was proposed; without `probs` every node must be deterministic.
    depth: `K`.
    try_children: takes what `_try_children` takes.
    lossy: whether what it returns holds a divergence.

  Returns:
    Verdict, not yet cut by stops and limits.
  """
  B, N = draft.tokens.shape
  K = depth
  is_node = (jnp.arange(N) > 0)[None]
  columns = jnp.arange(K + 1)[None]
  certain = draft.probs is None  # every node: nobody is tried

  def level(carry):
    d, node, going, final, last, path, tokens, num, marks = carry
    accept_prob, drawn, divergence = marks
    law = law_at(node)
    children = (draft.parents == node[:, None]) & is_node & going[:, None]
    acceptable = children & draft.acceptable
    plain = going
    if not certain:
      plain = plain & ~(acceptable & (draft.law != DETERMINISTIC)).any(1)
    token = draw(law, lax.dynamic_index_in_dim(noise.plain, d, 1, False))
    hit = acceptable & (draft.tokens == token[:, None])
    plain_child = jnp.argmax(hit, 1).astype(jnp.int32)
    won, winner = hit.any(1), plain_child
    if not certain:
      tried = going & ~plain
      found = try_children(
        noise.accept, law, draft, node, children, acceptable, tried
      )
      accept_prob = jnp.where(
        tried[:, None], found.accept_prob + accept_prob, accept_prob
      )
      if found.divergence is not None:
        here = (columns == d) & tried[:, None]
        divergence = jnp.where(here, found.divergence[:, None], divergence)
      refused = tried & ~found.won
      final = jnp.where(refused[:, None], found.residual, final)
      won = jnp.where(plain, won, found.won)
      winner = jnp.where(plain, winner, found.winner)
    stops = going & ~won
    last = jnp.where(stops & plain, token, last)
    moves = going & won
    node = jnp.where(moves, winner, node)
    num = num + moves
    path = jnp.where((columns == d + 1) & moves[:, None], node[:, None], path)
    kept = at_node(draft.tokens, node)
    tokens = jnp.where((columns == d) & moves[:, None], kept[:, None], tokens)
    drawn = jnp.where((columns == d) & going[:, None], plain[:, None], drawn)
    return (
      d + 1,
      node,
      moves,
      final,
      last,
      path,
      tokens,
      num,
      (accept_prob, drawn, divergence),
    )

  laws = jax.eval_shape(law_at, jax.ShapeDtypeStruct((B,), jnp.int32))
  none = jnp.full((B, K + 1), -1, jnp.int32)
  zero = jnp.zeros((B,), jnp.int32)
  init = (
    jnp.int32(0),
    zero,
    jnp.ones((B,), bool),
    None if certain else jnp.zeros(laws.shape, jnp.float32),
    zero - 1,
    none.at[:, 0].set(0),
    none,
    zero,
    (
      jnp.zeros((B, N), jnp.float32),
      jnp.zeros((B, K + 1), bool),
      jnp.zeros((B, K + 1), jnp.float32) if lossy else None,
    ),
  )
  # A row leaves the loop at depth K at the latest: leaves have no children.
  _, node, _, final, last, path, tokens, num, marks = lax.while_loop(
    lambda carry: carry[2].any() & (carry[0] <= K), level, init
  )
  accept_prob, drawn, divergence = marks
  # For whoever looks at it: not carried along, level by level.
  residual = law_at(node)
  if final is not None:
    was_plain = last >= 0
    last = jnp.where(was_plain, last, draw(final, noise.residual))
    residual = jnp.where(was_plain[:, None], residual, final)
  tokens = jnp.where(columns == num[:, None], last[:, None], tokens)
  return Verdict(
    path=path,
    tokens=tokens,
    num_accepted=num,
    num_tokens=num + 1,
    accept_prob=accept_prob,
    residual=residual,
    plain=drawn,
    divergence=divergence,
  )
