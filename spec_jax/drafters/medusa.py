"""Medusa: trained heads guess the next tokens from the target's hidden state.

The heads see the target's state at the last token it has read; the target's
own output there was the root, so head 1 guesses the root's children, head 2
their children, and so on. The guesses of one depth are the same under every
node of the depth above: a static tree of them is read at once.

Nodes are certain (the largest of each head), so the exact verifier keeps the
target's law; `typical`, the paper's own rule, is lossy and has to be asked for
by name.

Reference: Cai et al. 2024 (Medusa).
"""

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from spec_jax import medusa, tree as trees, tree_search
from spec_jax.base import DETERMINISTIC, Array, Context, Draft, Drafter, Model
from spec_jax.drafting import root_token, static_tree
from spec_jax.heads import check_heads
from spec_jax.nodes import at_node
from spec_jax.options import check_unused
from spec_jax.sampling import largest, scores

TAKES_DRAFT = True
TAKES_HEADS = "medusa"

# Of heads whose accuracies nobody has measured: by head and rank.
_GUESSED_HEAD, _GUESSED_RANK = 0.7, (0.5, 0.15, 0.08, 0.05)


@flax.struct.dataclass
class Seen:
  """What the heads look at.

  Attributes:
    hidden: `[B, D]` the target's state at the last token it has read.
    known: `[B]` bool, whether it has read one.
  """

  hidden: Array
  known: Array


def default_tree(config: medusa.MedusaConfig, num_nodes: int):
  """Returns the tree of most value by the heads' measured accuracies.

  It has fewer nodes where the heads do not make so many.
  """
  rates: Any = np.asarray(config.accuracies)
  if not rates.size:
    falls = _GUESSED_HEAD ** np.arange(config.num_heads)[:, None]
    rates = falls * np.array([_GUESSED_RANK])[:, : config.words.size]
  K, R = rates.shape
  most = min(num_nodes, sum(R**k for k in range(K + 1)))
  return tree_search.greedy_tree(rates, most)[0]


def build(
  target: Model,
  draft: Any,
  *,
  slots: int,
  num_nodes: int = 16,
  tree: Sequence[int] | None = None,
  parents: Sequence[int] | None = None,
) -> Drafter:
  """Builds Medusa.

  Args:
    target: the target; its vocabulary rules.
    draft: trained heads; `params["draft"]` are their parameters.
    slots: unused.
    num_nodes: nodes of the tree, root included, chosen by the accuracies the
      heads were measured to have. The paper takes 64.
    tree: children per node at each depth instead, e.g. `(3, 2, 1)`.
    parents: any other tree, see `tree.from_parents`; not together with `tree`.

  Raises:
    ValueError: if there are no Medusa heads, two trees are given, or the tree
      is deeper than there are heads.
  """
  del slots
  heads = check_heads("medusa", draft, "medusa")
  config = heads.config
  if tree is not None and parents is not None:
    raise ValueError("give tree or parents, not both")
  if tree is not None or parents is not None:
    check_unused(build, {"num_nodes": num_nodes}, "where a tree is given")
  if num_nodes < 2:
    raise ValueError(f"num_nodes must be at least 2, got {num_nodes}")
  if tree is not None:
    shape = trees.branching(tree)
  elif parents is not None:
    shape = trees.from_parents(parents)
  else:
    shape = default_tree(config, num_nodes)
  N, K = shape.num_nodes, shape.depth
  if K < 1:
    raise ValueError("the tree must have a node below its root")
  if K > config.num_heads:
    raise ValueError(
      f"the tree is {K} deep, there are {config.num_heads} heads"
    )
  trees.check_children(shape, config.words.size)
  ranks = trees.ranks(shape)
  most = 1 + int(ranks.max())

  def init(batch):
    return Seen(
      hidden=jnp.zeros((batch, config.width), heads.dtype),
      known=jnp.zeros((batch,), bool),
    )

  def see(state: Seen, hidden: Array, some: Array) -> Seen:
    hidden = hidden.astype(state.hidden.dtype)
    return Seen(
      hidden=jnp.where(some[:, None], hidden, state.hidden),
      known=state.known | some,
    )

  def prefill(params, state, chunk, output):
    last = jnp.maximum(chunk.num - 1, 0)
    return see(state, at_node(output.hidden, last)[:, 0], chunk.num > 0)

  def guess(params, state: Seen, context: Context):
    """Returns `[B, K, R]` tokens by depth and rank, and `[B, K]` allowed."""
    B = context.length.shape[0]
    own = params["draft"]
    states = heads.apply(own, state.hidden)[:, :K]
    logits = medusa.logits_of(heads, own, target, params["target"], states)
    logits = config.words.to_target(own, logits)
    each = [
      scores(logits[:, k], context.sampling, context.counts) for k in range(K)
    ]
    tokens = jnp.stack([largest(x, most) for x in each], 1)
    allowed = jnp.ones((B, K), bool)
    if context.extend is not None:
      laws = jax.nn.softmax(jnp.stack(each, 1), -1)
      sure = context.extend(laws)
      allowed = jnp.cumprod(sure.astype(jnp.int32), 1) > 0
    return tokens, allowed

  def propose(params, noise, state, context: Context):
    del noise
    B = context.length.shape[0]
    wanted = (context.max_depth > 0) & state.known
    tokens, allowed = lax.cond(
      wanted.any(),
      lambda: guess(params, state, context),
      lambda: (
        jnp.zeros((B, K, most), jnp.int32),
        jnp.zeros((B, K), bool),
      ),
    )
    below = np.arange(1, N)
    level = shape.depths[below] - 1
    drafted = tokens[:, level, ranks[below]]
    good = allowed[:, level] & wanted[:, None]
    return Draft(
      tokens=jnp.concatenate([root_token(context), drafted], 1),
      **static_tree(shape, B),
      law=jnp.full((B, N), DETERMINISTIC, jnp.int32),
      probs=None,
      acceptable=jnp.concatenate([jnp.zeros((B, 1), bool), good], 1),
    ), state

  def update(params, state, draft, verdict, output):
    some = verdict.num_tokens > 0
    last = jnp.maximum(verdict.num_tokens - 1, 0)
    return see(state, at_node(verdict.hidden, last)[:, 0], some)

  return Drafter(
    init=init,
    prefill=prefill,
    propose=propose,
    update=update,
    num_nodes=N,
    depth=K,
    asks_policy=True,
    fills=True,
    taps=(),
  )
