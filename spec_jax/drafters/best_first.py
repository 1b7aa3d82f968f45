"""A draft model's most probable continuations, a tree of its own for each row.

Where the draft is sure the tree is deep, where it is not it is wide. Every
node is certain given the text, so the output equals plain decoding's with the
same seed at every temperature.

Reference: Li et al. 2024, "EAGLE-2"; here with any draft model.
"""

import jax
import jax.numpy as jnp

from spec_jax import growth
from spec_jax.base import DETERMINISTIC, Context, Draft, Drafter, Model
from spec_jax.draft_model import Asked, DraftModel, if_wanted, repeat_rows
from spec_jax.drafting import dynamic_tree, root_token
from spec_jax.sampling import add_counts

TAKES_DRAFT = True


def build(
  target: Model,
  draft: Model | None,
  *,
  slots: int,
  num_nodes: int = 16,
  depth: int = 5,
  width: int = 4,
) -> Drafter:
  """Builds trees that grow where the draft model is most sure.

  A node's value is the product of the draft's probabilities along its path, at
  temperature 1, penalties and bans included.

  Args:
    target: the target; its vocabulary rules.
    draft: the draft model; `params["draft"]` are its parameters.
    slots: `S`; the draft stops proposing where its own `max_length` ends.
    num_nodes: `N` of the tree, root included. The paper takes 48 to 60, where
      the target reads so many at the price of one.
    depth: `K`, the deepest node; the draft makes as many passes at most. The
      paper takes 6.
    width: nodes read in a pass, and children each is given. The paper takes
      10.

  Raises:
    ValueError: if there is no draft model or a number is out of range.
  """
  asks = DraftModel("best_first", target, draft, slots=slots)
  return grown(asks, num_nodes=num_nodes, depth=depth, width=width)


def check_sizes(num_nodes: int, depth: int, width: int) -> None:
  """Checks the sizes of a tree that grows.

  Raises:
    ValueError: if one is out of range, or no tree has so many nodes.
  """
  for name, value, low in (
    ("num_nodes", num_nodes, 2),
    ("depth", depth, 1),
    ("width", width, 1),
  ):
    if value < low:
      raise ValueError(f"{name} must be at least {low}, got {value}")
  most = 1 + width + (depth - 1) * width * width
  if num_nodes > most:
    raise ValueError(
      f"num_nodes must be at most {most} with depth {depth} and width {width}, "
      f"got {num_nodes}"
    )
  if depth > num_nodes - 1:
    raise ValueError(
      f"depth must be below num_nodes, got {depth} and {num_nodes}"
    )


def grown(asks: Asked, *, num_nodes: int, depth: int, width: int) -> Drafter:
  """Builds a drafter of trees that grow, whoever is asked; see `build`."""
  width = min(width, asks.vocab_size)
  check_sizes(num_nodes, depth, width)
  num_read = growth.num_read(depth, width)

  def log_law(logits, context, counts, copies):
    """Returns `[B, n, V]`, -inf where the policy wants no children."""
    B, n, _ = logits.shape
    sampling = repeat_rows(context.sampling, copies)
    scores = asks.scores(logits.reshape(B * n, -1), sampling, counts)
    out = jax.nn.log_softmax(scores, -1).reshape(B, n, -1)
    if context.extend is not None:
      sure = context.extend(jnp.exp(out))
      out = jnp.where(sure[:, :, None], out, -jnp.inf)
    return out

  def grow(params, reading, context: Context, max_depth):
    out = asks.read_root(params, reading, context)
    root = log_law(out.logits, context, context.counts, 1)[:, 0]
    pending = asks.pending(reading)

    def expand(level: growth.Level, block):
      B, W = level.tokens.shape
      lead = jnp.broadcast_to(pending[:, None], (B, W, asks.lead))
      position = (context.length - 1 + level.depth)[:, None]
      out = asks.read(
        params,
        level.tokens,
        jnp.broadcast_to(position, (B, W)),
        reading.cache,
        block,
        jnp.concatenate([lead, level.visible], 2),
        start=asks.lead + level.start,
      )
      counts = add_counts(
        repeat_rows(context.counts, W),
        repeat_rows(level.read_tokens, W),
        level.visible.reshape(B * W, num_read),
      )
      return log_law(out.logits, context, counts, W), out.block

    return growth.best_first(
      root,
      expand,
      out.block,
      max_depth,
      num_nodes=num_nodes,
      depth=depth,
      width=width,
    )

  def propose(params, noise, cache, context: Context):
    B, N = context.length.shape[0], num_nodes
    max_depth = asks.asked(cache, context, depth)
    size = asks.lead + num_read
    reading = asks.start(params, cache, context, size, max_depth > 0)
    root = jnp.full((B, 1), -1, jnp.int32)
    nothing = growth.Grown(
      tokens=jnp.zeros((B, N - 1), jnp.int32),
      parents=jnp.concatenate([root, jnp.zeros((B, N - 1), jnp.int32)], 1),
      kept=jnp.zeros((B, N), bool),
      read=jnp.full((B, N), -1, jnp.int32),
    )
    grown, block = if_wanted(
      reading,
      lambda _: grow(params, reading, context, max_depth),
      (nothing, reading.block),
    )
    draft = Draft(
      tokens=jnp.concatenate([root_token(context), grown.tokens], 1),
      **dynamic_tree(grown.parents),
      law=jnp.full((B, N), DETERMINISTIC, jnp.int32),
      probs=None,
      acceptable=grown.kept,
    )
    return draft, (reading._replace(block=block), grown.read)

  def update(params, carry, draft, verdict, output):
    reading, read = carry
    path = verdict.path[:, 1:]
    which = jnp.take_along_axis(read, jnp.maximum(path, 0), 1)
    where = jnp.where((path >= 0) & (which >= 0), asks.lead + which, -1)
    return asks.update(params, reading, where, verdict)

  return Drafter(
    init=asks.init,
    prefill=asks.prefill,
    propose=propose,
    update=update,
    num_nodes=num_nodes,
    depth=depth,
    asks_policy=True,
    fills=True,
    catches_up=True,
  )
