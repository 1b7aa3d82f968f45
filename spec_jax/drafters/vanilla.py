"""A draft model: another model, the target itself, or its first layers.

Chains and any static tree. The draft keeps a cache and a length of its own.
A step begins with one pass over the last `C = 2` tokens of the row: after a
full acceptance the draft has not read the last accepted token, so one token
is pending besides the root (with `C = 1` it would never be read, and
acceptance falls). A row with more pending reads `C` of them, has nothing
acceptable in that step, and so catches up.

Reference: Leviathan et al. 2023; siblings: Miao et al. 2024 (iid), Chen et
al. 2024 (Sequoia; without replacement).
"""

from collections.abc import Sequence
import dataclasses

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from spec_jax import tree as trees
from spec_jax.base import (
  DETERMINISTIC,
  IID,
  WITHOUT_REPLACEMENT,
  Array,
  Context,
  Draft,
  Drafter,
  Model,
  Sampling,
  Tree,
)
from spec_jax.cache import commit, empty_block
from spec_jax.drafting import CATCH_UP, plan_tree, root_token, static_tree
from spec_jax.sampling import (
  draw,
  first_largest,
  is_greedy,
  law,
  one_hot,
  path_counts,
  scores,
)

TAKES_DRAFT = True

SIBLINGS = {
  "iid": IID,
  "without_replacement": WITHOUT_REPLACEMENT,
  "top_k": DETERMINISTIC,
}


def _fit_vocabulary(logits: Array, vocab_size: int) -> Array:
  """Cuts or pads the draft's logits to the target's vocabulary.

  Ids that only one of two padded vocabularies has: no mass on them.
  """
  extra = vocab_size - logits.shape[-1]
  if extra <= 0:
    return logits[..., :vocab_size]
  widths = [(0, 0)] * (logits.ndim - 1) + [(0, extra)]
  return jnp.pad(logits, widths, constant_values=-jnp.inf)


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
    num_draft: `K` of a chain; ignored when `tree` is given.
    tree: children per node at each depth, e.g. `(3, 2, 1)`, or a `Tree`.
    parents: any other tree, see `tree.from_parents`; not together with `tree`.
    siblings: how the children of a node are drawn: "iid",
      "without_replacement" or "top_k" (deterministic). Rows that sample
      greedily always take the draft's top tokens.
    draft_temperature: the draft's own temperature where the row's is not 0;
      None = the row's. Its law stays exact either way.

  Raises:
    ValueError: if there is no draft model or a setting is out of range.
  """
  if draft is None:
    raise ValueError("drafter 'vanilla' needs a draft model or draft layers")
  if siblings not in SIBLINGS:
    raise ValueError(
      f"siblings must be one of {', '.join(SIBLINGS)}, got {siblings!r}"
    )
  if draft_temperature is not None and not 0 < draft_temperature <= 1e30:
    raise ValueError(
      f"draft_temperature must be in (0, 1e30], got {draft_temperature}"
    )
  if parents is not None:
    if tree is not None:
      raise ValueError("give tree or parents, not both")
    tree = trees.from_parents(parents)
  if tree is None:
    if num_draft < 1:
      raise ValueError(f"num_draft must be at least 1, got {num_draft}")
    tree = trees.chain(num_draft)
  elif not isinstance(tree, Tree):
    tree = trees.branching(tree)
  if tree.depth < 1:
    raise ValueError("the tree must have a node below its root")
  draft_slots = min(slots, draft.config.max_length)
  return _Vanilla(
    target, draft, tree, SIBLINGS[siblings], draft_temperature, draft_slots
  ).drafter()


class _Vanilla:
  """The closures of one drafter; holds static choices only, no arrays."""

  def __init__(self, target, draft, tree, siblings, temperature, slots):
    self.vocab_size = target.config.vocab_size
    self.draft = draft
    self.draft_vocab_size = draft.config.vocab_size
    self.tree = tree
    self.plan = plan_tree(tree)
    self.siblings = siblings
    self.temperature = temperature
    self.slots = slots

  def drafter(self) -> Drafter:
    return Drafter(
      init=lambda batch: self.draft.init_cache(batch, self.slots),
      prefill=self.prefill,
      propose=self.propose,
      update=self.update,
      num_nodes=self.tree.num_nodes,
      depth=self.tree.depth,
      asks_policy=True,
      laws=(self.siblings,),
      catches_up=True,
    )

  def read(self, params, tokens, positions, cache, block, visible, **kwargs):
    tokens = jnp.clip(tokens, 0, self.draft_vocab_size - 1)
    return self.draft.apply(
      params["draft"], tokens, positions, cache, block, visible, **kwargs
    )

  def prefill(self, params, cache, chunk, output):
    del output
    B, C = chunk.tokens.shape
    W = chunk.all_tokens.shape[1]
    offsets = jnp.arange(C)[None]
    positions = cache.length[:, None] + offsets
    index = jnp.minimum(positions, W - 1)
    upto = jnp.minimum(chunk.upto, self.slots)
    num = jnp.clip(upto - cache.length, 0, C)
    visible = jnp.tril(jnp.ones((C, C), bool))[None]
    out = self.read(
      params,
      jnp.take_along_axis(chunk.all_tokens, index, 1),
      positions,
      cache,
      empty_block(cache, C),
      jnp.broadcast_to(visible, (B, C, C)),
      logits_at=jnp.zeros((B, 0), jnp.int32),
    )
    path, _ = lax.optimization_barrier(
      (jnp.broadcast_to(offsets, (B, C)), out.hidden)
    )
    return commit(cache, out.block, path, num)

  def propose(self, params, noise, cache, context: Context):
    B = context.length.shape[0]
    N, K, V = self.tree.num_nodes, self.tree.depth, self.vocab_size
    length, own = context.length, cache.length
    asked = jnp.minimum(context.max_depth, K)
    behind = (own < length - CATCH_UP) & (own + CATCH_UP <= self.slots)
    ready = (own >= length - CATCH_UP) & (length + asked <= self.slots)
    max_depth = jnp.where(ready, asked, 0)
    # A row that must catch up reads though it may not draft in this step.
    wanted = (asked > 0) & (ready | behind)
    root = root_token(context)
    sampled = context.sampling.temperature is not None
    probs = None
    if sampled and self.siblings != DETERMINISTIC:
      probs = jnp.zeros((B, N, V), jnp.float32)
    tokens = jnp.zeros((B, N), jnp.int32).at[:, :1].set(root)
    block = empty_block(cache, self.plan.block_size)
    begin = jnp.minimum(own, length - CATCH_UP)
    allowed = jnp.broadcast_to((max_depth > 0)[:, None], (B, N))
    start = (tokens, probs, block, allowed, jnp.int32(0))
    tokens, probs, block, allowed, num_read = lax.cond(
      wanted.any(),
      lambda carry: self._grow(
        params, noise, cache, context, begin, max_depth.max(), carry
      ),
      lambda carry: carry,
      start,
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
      acceptable=(shape["depths"] <= max_depth[:, None])
      & (shape["depths"] > 0)
      & allowed,
    )
    carry = (cache, block, begin, ready, wanted.any(), num_read)
    return draft, carry

  def _grow(self, params, noise, cache, context, begin, deepest, carry):
    """Reads pending tokens and root, then level after level of the tree.

    Ends where no row wants more, by its depth or by the policy's word.
    """
    tokens, probs, block, allowed, _ = carry
    B = begin.shape[0]
    plan, C = self.plan, CATCH_UP
    size = plan.block_size
    own = cache.length
    positions = begin[:, None] + jnp.arange(C)[None]
    index = jnp.clip(positions, 0, context.tokens.shape[1] - 1)
    pending = positions >= own[:, None]  # not in the cache yet
    first = jnp.take_along_axis(context.tokens, index, 1)
    causal = jnp.tril(jnp.ones((C, C), bool))[None]
    visible = jnp.zeros((B, C, size), bool)
    visible = visible.at[:, :, :C].set(causal & pending[:, None, :])
    out = self.read(
      params,
      first,
      positions,
      cache,
      block,
      visible,
      logits_at=jnp.full((B, 1), C - 1, jnp.int32),
    )
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
    sees = np.zeros((self.tree.num_nodes, size), bool)
    node, ancestor = np.nonzero(self.tree.visible)
    inside = plan.block_index[ancestor] >= 0
    sees[node[inside], plan.block_index[ancestor[inside]]] = True
    sees[:, :C] = True
    shown = jnp.ones((B, size), bool).at[:, :C].set(pending)

    depths = jnp.asarray(self.tree.depths)[None]

    def level(carry):
      d, tokens, probs, block, allowed = carry
      nodes = lax.dynamic_index_in_dim(read, d, 0, False)
      safe = jnp.maximum(nodes, 0)
      W = nodes.shape[0]
      out = self.read(
        params,
        tokens[:, safe],
        jnp.broadcast_to((context.length - 1 + d)[:, None], (B, W)),
        cache,
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
    N, V = self.tree.num_nodes, self.vocab_size
    nodes_W, children_WR = jnp.asarray(nodes_W), jnp.asarray(children_WR)

    def per_node(x):  # [B, ...] -> [B * W, ...]
      return jnp.repeat(x, W, 0)

    sampling = jax.tree.map(per_node, context.sampling)
    counts = jax.tree.map(per_node, context.counts)
    seen = jnp.asarray(self.tree.visible)[jnp.maximum(nodes_W, 0)]
    counts = path_counts(counts, per_node(tokens), jnp.tile(seen, (B, 1)))
    logits = _fit_vocabulary(logits_BWV, V).reshape(B * W, V)
    rest = scores(logits, sampling, counts)
    if context.extend is not None:
      sure = context.extend(jax.nn.softmax(rest, -1).reshape(B, W, V))
      sure = sure & allowed[:, jnp.maximum(nodes_W, 0)]
    greedy_only = sampling.temperature is None
    point_only = greedy_only or self.siblings == DETERMINISTIC
    if not point_only:
      sampling = self._own_temperature(sampling)
      q = law(rest, sampling)
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

  def _own_temperature(self, sampling: Sampling) -> Sampling:
    row = sampling.temperature
    if self.temperature is None or row is None:
      return sampling
    return dataclasses.replace(
      sampling, temperature=jnp.where(row > 0, self.temperature, row)
    )

  def update(self, params, carry, draft, verdict, output):
    """Commits pending tokens, root and the accepted nodes that were read."""
    del params, output
    cache, block, begin, ready, grown, num_read = carry
    C, K = CATCH_UP, self.tree.depth
    own = cache.length
    running = verdict.num_tokens > 0
    # Tokens read at the start that the cache does not hold yet: pending ones
    # and the root, or, in a row that catches up, all C.
    skipped = jnp.clip(own - begin, 0, C)
    lead = C - skipped
    j = jnp.arange(C + K)[None]
    node = jnp.take_along_axis(
      verdict.path,
      jnp.clip(j - lead[:, None] + 1, 0, K),
      1,
    )
    where = jnp.asarray(self.plan.block_index)[jnp.maximum(node, 0)]
    depth = jnp.asarray(self.tree.depths)[jnp.maximum(node, 0)]
    was_read = (node > 0) & (where >= 0) & (depth < num_read)
    was_read = was_read & (j >= lead[:, None]) & (j - lead[:, None] < K)
    num = lead + jnp.where(ready, was_read.sum(1), 0)
    path = jnp.where(j < lead[:, None], j + skipped[:, None], where)
    num = jnp.where(running & grown, num, 0)
    num = jnp.clip(num, 0, jnp.maximum(self.slots - own, 0))
    return commit(cache, block, path, num)
