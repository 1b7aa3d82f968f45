"""Prompt lookup: copies what followed the last words where they stood before.

Reference: Saxena 2023, prompt lookup decoding.
"""

import jax.numpy as jnp

from spec_jax import tree as trees
from spec_jax.base import DETERMINISTIC, Array, Draft, Drafter, Model
from spec_jax.drafting import root_token, static_tree


def find_match(
  tokens_BW: Array,
  length_B: Array,
  *,
  max_ngram: int,
  min_ngram: int,
  first: bool,
) -> Array:
  """Finds where the row's last n tokens stood before, longest n first.

  `[5, 6, 7, 5, 6]` with n up to 3: the last 2 tokens `5, 6` stood at 0, so
  the continuation starts at index 2 (token 7).

  Args:
    tokens_BW: prompt and output.
    length_B: tokens of each row.
    max_ngram: longest n tried.
    min_ngram: shortest n tried.
    first: the first match in the row instead of the most recent.

  Returns:
    `[B]` int32, index of the token after the match, below the length; -1
    without a match.
  """
  W = tokens_BW.shape[1]
  index = jnp.arange(W)[None]
  run = jnp.ones(tokens_BW.shape, bool)  # last n tokens end before `index`
  best = jnp.full(length_B.shape, -1, jnp.int32)
  for n in range(1, max_ngram + 1):
    back = jnp.maximum(length_B - n, 0)[:, None]
    wanted = jnp.take_along_axis(tokens_BW, back, 1)
    run = run & (jnp.roll(tokens_BW, n, 1) == wanted)
    if n < min_ngram:
      continue
    # n tokens before `index`, something at it, and not the suffix itself.
    good = run & (index >= n) & (index < length_B[:, None])
    if first:
      found = jnp.argmax(good, 1)
    else:
      found = W - 1 - jnp.argmax(good[:, ::-1], 1)
    best = jnp.where(good.any(1), found.astype(jnp.int32), best)
  return best


def build(
  target: Model,
  draft: Model | None,
  *,
  slots: int,
  num_draft: int = 7,
  max_ngram: int = 3,
  min_ngram: int = 1,
  match: str = "last",
) -> Drafter:
  """Builds prompt lookup.

  Args:
    target: unused.
    draft: unused.
    slots: unused.
    num_draft: tokens copied at most, `K`. 3 paid on chat prompts on two CPU
      cores, where 8 did not (1.06 and .9 of plain); copying tasks and
      accelerators want more.
    max_ngram: longest n-gram looked up.
    min_ngram: shortest n-gram looked up.
    match: "last" for the most recent match, "first" for the first.

  Raises:
    ValueError: if a number is out of range or `match` is neither.
  """
  del target, draft, slots
  if num_draft < 1:
    raise ValueError(f"num_draft must be at least 1, got {num_draft}")
  if not 1 <= min_ngram <= max_ngram:
    raise ValueError(
      f"need 1 <= min_ngram <= max_ngram, got {min_ngram} and {max_ngram}"
    )
  if match not in ("last", "first"):
    raise ValueError(f"match must be 'last' or 'first', got {match!r}")
  tree = trees.chain(num_draft)

  def propose(params, noise, state, context):
    tokens, length = context.tokens, context.length
    B, W = tokens.shape
    start = find_match(
      tokens,
      length,
      max_ngram=max_ngram,
      min_ngram=min_ngram,
      first=match == "first",
    )
    index = start[:, None] + jnp.arange(num_draft)[None]
    copied = jnp.take_along_axis(tokens, jnp.clip(index, 0, W - 1), 1)
    found = (start >= 0)[:, None] & (index < length[:, None])
    root = root_token(context)
    return Draft(
      tokens=jnp.concatenate([root, copied], 1),
      **static_tree(tree, B),
      law=jnp.full((B, tree.num_nodes), DETERMINISTIC, jnp.int32),
      probs=None,
      acceptable=jnp.concatenate([jnp.zeros((B, 1), bool), found], 1),
    ), state

  return Drafter(
    init=lambda batch: (),
    prefill=lambda params, state, chunk, output: state,
    propose=propose,
    update=lambda params, state, draft, verdict, output: state,
    num_nodes=tree.num_nodes,
    depth=tree.depth,
  )
