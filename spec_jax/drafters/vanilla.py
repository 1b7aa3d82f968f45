"""A draft model: another model, the target itself, or its first layers.

Chains and any static tree. How the draft keeps up with the text is told in
`draft_model.py`.

Reference: Leviathan et al. 2023; siblings: Miao et al. 2024 (iid), Chen et
al. 2024 (Sequoia; without replacement).
"""

from collections.abc import Sequence

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from spec_jax import tree as trees
from spec_jax.base import (
  DETERMINISTIC,
  IID,
  WITHOUT_REPLACEMENT,
  Context,
  Draft,
  Drafter,
  Model,
  Tree,
)
from spec_jax.draft_model import (
  Asked,
  DraftModel,
  check_temperature,
  if_wanted,
  own_temperature,
  repeat_rows,
)
from spec_jax.drafting import plan_tree, root_token, static_tree
from spec_jax.options import check_unused
from spec_jax.sampling import (
  draw,
  first_largest,
  is_greedy,
  law,
  one_hot,
  path_counts,
)

TAKES_DRAFT = True

SIBLINGS = {
  "iid": IID,
  "without_replacement": WITHOUT_REPLACEMENT,
  "top_k": DETERMINISTIC,
}


def build(
  target: Model,
  draft: Model | None,
  *,
  slots: int,
  num_draft: int = 4,
  tree: Sequence[int] | Tree | None = None,
  parents: Sequence[int] | None = None,
  siblings: str = "iid",
  draft_temperature: float | None = None,
) -> Drafter:
  """Builds a drafter that asks a draft model.

  Args:
    target: the target; its vocabulary rules.
    draft: the draft model; `params["draft"]` are its parameters.
    slots: `S`; the draft stops proposing where its own `max_length` ends.
    num_draft: `K` of a chain; not together with `tree` or `parents`.
    tree: children per node at each depth, e.g. `(3, 2, 1)`, or a `Tree`.
    parents: any other tree, see `tree.from_parents`; not together with `tree`.
    siblings: how the children of a node are drawn: "iid",
      "without_replacement" or "top_k" (deterministic). Rows that sample
      greedily always take the draft's top tokens.
    draft_temperature: the draft's own temperature where the row's is not 0, of
      nodes that are drawn; None = the row's. Its law stays exact either way.

  Raises:
    ValueError: if there is no draft model, or a setting is out of range or has
      no use beside the others.
  """
  asks = DraftModel("vanilla", target, draft, slots=slots)
  if siblings not in SIBLINGS:
    raise ValueError(
      f"siblings must be one of {', '.join(SIBLINGS)}, got {siblings!r}"
    )
  check_temperature(draft_temperature)
  if parents is not None:
    if tree is not None:
      raise ValueError("give tree or parents, not both")
    tree = trees.from_parents(parents)
  if tree is not None:
    check_unused(build, {"num_draft": num_draft}, "where a tree is given")
  if tree is None:
    if num_draft < 1:
      raise ValueError(f"num_draft must be at least 1, got {num_draft}")
    tree = trees.chain(num_draft)
  elif not isinstance(tree, Tree):
    tree = trees.branching(tree)
  trees.check_children(tree, target.config.vocab_size)
  if tree.depth < 1:
    raise ValueError("the tree must have a node below its root")
  return StaticTree(asks, tree, SIBLINGS[siblings], draft_temperature).drafter()


class StaticTree:
  """The closures of one drafter; holds static choices only, no arrays."""

  def __init__(
    self,
    asks: Asked,
    tree: Tree,
    siblings: int,
    temperature: float | None = None,
  ):
    """Takes who is asked, the tree and how siblings are drawn.

    Raises:
      ValueError: for a temperature where nothing is drawn.
    """
    if siblings == DETERMINISTIC and temperature is not None:
      raise ValueError(
        "draft_temperature has no use with siblings='top_k', which draws "
        f"nothing, got {temperature}"
      )
    self.asks = asks
    self.tree = tree
    self.plan = plan_tree(tree, asks.lead)
    self.siblings = siblings
    self.temperature = temperature

  def drafter(self) -> Drafter:
    """Returns the drafter."""
    return Drafter(
      init=self.asks.init,
      prefill=self.asks.prefill,
      propose=self.propose,
      update=self.update,
      num_nodes=self.tree.num_nodes,
      depth=self.tree.depth,
      asks_policy=True,
      fills=True,
      laws=(self.siblings,),
      catches_up=True,
    )

  def propose(self, params, noise, cache, context: Context):
    """Draws the tree level by level, as far as a row and the policy want."""
    B = context.length.shape[0]
    N, K, V = self.tree.num_nodes, self.tree.depth, self.asks.vocab_size
    max_depth = self.asks.asked(cache, context, K)
    wanted = max_depth > 0
    size = self.plan.block_size
    reading = self.asks.start(params, cache, context, size, wanted)
    root = root_token(context)
    sampled = context.sampling.temperature is not None
    probs = None
    if sampled and self.siblings != DETERMINISTIC:
      probs = jnp.zeros((B, N, V), jnp.float32)
    tokens = jnp.zeros((B, N), jnp.int32).at[:, :1].set(root)
    allowed = jnp.broadcast_to(wanted[:, None], (B, N))
    tokens, probs, block, allowed, num_read = if_wanted(
      reading,
      lambda carry: self._grow(
        params, noise, reading, context, max_depth.max(), carry
      ),
      (tokens, probs, reading.block, allowed, jnp.int32(0)),
    )
    row_law = jnp.full((B, N), self.siblings, jnp.int32)
    if sampled:
      greedy = is_greedy(context.sampling)[:, None]
      row_law = jnp.where(greedy, DETERMINISTIC, row_law)
    else:
      row_law = jnp.full((B, N), DETERMINISTIC, jnp.int32)
    shape = static_tree(self.tree, B)
    draft = Draft(
      tokens=tokens,
      **shape,
      law=row_law,
      probs=probs,
      # No level beyond those read was drawn, whatever a row asked for.
      acceptable=(shape["depths"] <= jnp.minimum(max_depth, num_read)[:, None])
      & (shape["depths"] > 0)
      & allowed,
    )
    return draft, (reading._replace(block=block), num_read)

  def _grow(self, params, noise, reading, context, deepest, carry):
    """Reads pending tokens and root, then level after level of the tree.

    Ends where no row wants more, by its depth or by the policy's word.
    """
    tokens, probs, block, allowed, _ = carry
    B = tokens.shape[0]
    plan, C = self.plan, self.asks.lead
    out = self.asks.read_root(params, reading, context)
    tokens, probs, allowed = self._draw_children(
      out.logits,
      np.zeros(1, np.int32),
      plan.children[0, :1],
      noise,
      context,
      (tokens, probs, allowed),
    )
    if self.tree.depth == 1:
      return tokens, probs, out.block, allowed, jnp.int32(1)

    read = jnp.asarray(plan.read)
    children = jnp.asarray(plan.children)
    starts = jnp.asarray(plan.start)
    # Which block entries a node sees: pending and root, and its ancestors.
    sees = np.zeros((self.tree.num_nodes, plan.block_size), bool)
    node, ancestor = np.nonzero(self.tree.visible)
    inside = plan.block_index[ancestor] >= 0
    sees[node[inside], plan.block_index[ancestor[inside]]] = True
    sees[:, :C] = True
    shown = jnp.ones((B, plan.block_size), bool)
    shown = shown.at[:, :C].set(self.asks.pending(reading))

    depths = jnp.asarray(self.tree.depths)[None]

    def level(carry):
      d, tokens, probs, block, allowed = carry
      nodes = lax.dynamic_index_in_dim(read, d, 0, False)
      safe = jnp.maximum(nodes, 0)
      W = nodes.shape[0]
      out = self.asks.read(
        params,
        tokens[:, safe],
        jnp.broadcast_to((context.length - 1 + d)[:, None], (B, W)),
        reading.cache,
        block,
        jnp.asarray(sees)[safe][None] & shown[:, None],
        start=starts[d],
      )
      tokens, probs, allowed = self._draw_children(
        out.logits, nodes, children[d], noise, context, (tokens, probs, allowed)
      )
      return d + 1, tokens, probs, out.block, allowed

    def goes_on(carry):
      d, allowed = carry[0], carry[-1]
      return (d < deepest) & (allowed & (depths == d)).any()

    num_read, tokens, probs, block, allowed = lax.while_loop(
      goes_on, level, (jnp.int32(1), tokens, probs, out.block, allowed)
    )
    return tokens, probs, block, allowed, num_read

  def _draw_children(
    self, logits_BWV, nodes_W, children_WR, noise, context, drawn
  ):
    """Draws the children of `W` nodes from the draft's law after each.

    Returns:
      (tokens `[B, N]`, probs `[B, N, V]` or None, allowed `[B, N]` bool),
      written at the children, at the nodes and at the children.
    """
    tokens, probs, allowed = drawn
    B, W, _ = logits_BWV.shape
    N, V = self.tree.num_nodes, self.asks.vocab_size
    nodes_W, children_WR = jnp.asarray(nodes_W), jnp.asarray(children_WR)
    sampling, counts, repeated = repeat_rows(
      (context.sampling, context.counts, tokens), W
    )
    seen = jnp.asarray(self.tree.visible)[jnp.maximum(nodes_W, 0)]
    counts = path_counts(counts, repeated, jnp.tile(seen, (B, 1)))
    logits = logits_BWV.reshape(B * W, -1)
    rest = self.asks.scores(logits, sampling, counts)
    if context.extend is not None:
      sure = context.extend(jax.nn.softmax(rest, -1).reshape(B, W, V))
      sure = sure & allowed[:, jnp.maximum(nodes_W, 0)]
    greedy_only = sampling.temperature is None
    point_only = greedy_only or self.siblings == DETERMINISTIC
    if not point_only:
      sampling = own_temperature(sampling, self.temperature)
      some = jnp.isfinite(rest).any(-1, keepdims=True)
      # Nothing may be said, every word being banned: no child can be kept.
      q = jnp.where(some, law(jnp.where(some, rest, 0.0), sampling), 0.0)
      left = q
      where = jnp.where(nodes_W >= 0, nodes_W, N)
      probs = probs.at[:, where].set(q.reshape(B, W, V), mode="drop")
      greedy = is_greedy(sampling)
    for rank in range(children_WR.shape[1]):
      child_W = children_WR[:, rank]
      best = first_largest(rest)
      rest = jnp.where(one_hot(best, V) > 0, -jnp.inf, rest)
      if point_only:
        token = best
      else:
        u = noise.draft[:, jnp.maximum(child_W, 0)].reshape(B * W)
        token = draw(left, u)
        if self.siblings == WITHOUT_REPLACEMENT:
          left = left * (1 - one_hot(token, V))
        token = jnp.where(greedy, best, token)
      where = jnp.where(child_W >= 0, child_W, N)
      tokens = tokens.at[:, where].set(token.reshape(B, W), mode="drop")
      if context.extend is not None:
        allowed = allowed.at[:, where].set(sure, mode="drop")
    return tokens, probs, allowed

  def update(self, params, carry, draft, verdict, output):
    """Commits pending tokens, root and the accepted nodes that were read."""
    del draft, output
    reading, num_read = carry
    path = verdict.path[:, 1:]
    node = jnp.maximum(path, 0)
    where = jnp.asarray(self.plan.block_index)[node]
    depth = jnp.asarray(self.tree.depths)[node]
    where = jnp.where((path >= 0) & (depth < num_read), where, -1)
    return self.asks.update(params, reading, where, verdict)
