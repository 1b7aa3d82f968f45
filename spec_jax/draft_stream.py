"""A draft model that reads a row's text in its own tokens.

The draft's stream is a function of the row's text alone: each target token is
said by a fixed sequence of draft tokens (`vocabulary_map`). Nothing but the
draft's cache is kept; its length counts draft tokens, and it never holds more
than the stream of all committed tokens but the last. So rolling back is
keeping the length, and a continued or refilled row needs nothing special.

A step reads what is pending in chunks, then the draft says its own tokens one
by one, and `update` keeps those of them that the new text says the same way.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from spec_jax.base import Array, Block, Cache, Chunk, Context, Model, Verdict
from spec_jax.cache import commit, empty_block, read_on
from spec_jax.heads import refuse_heads
from spec_jax.vocabulary_map import VocabularyMap, check_sizes, same_ids

# Draft tokens read at the start of a step in one pass: several of them may say
# one target token. A CPU with the kernel reads 8 at about the price of one.
_CHUNK = 8


class Carry(NamedTuple):
  """What `update` needs of `say`.

  Attributes:
    cache: the draft's, caught up.
    block: the last pending tokens and what the draft said.
    said: `[B, K]` draft tokens.
    length: `[B]` draft tokens of the committed text.
    took_part: `[B]` bool.
    num_read: passes made, so `num_read - 1` said tokens were read.
  """

  cache: Cache
  block: Block
  said: Array
  length: Array
  took_part: Array
  num_read: Array


class DraftStream:
  """The closures of one draft; holds static choices only, no device arrays.

  Attributes:
    tables: numpy arrays, for `Drafter.tables`.
    depth: `K`, draft tokens said in a step.
  """

  def __init__(
    self,
    name: str,
    target: Model,
    draft: Model | None,
    vocabulary_map: VocabularyMap | None,
    *,
    depth: int,
    slots: int,
    draft_slots: int,
  ):
    """Checks the sizes.

    Args:
      name: of the drafter, for messages.
      target: the target.
      draft: the draft model.
      vocabulary_map: of the two, or None if ids mean the same.
      depth: `K`.
      slots: tokens a row may hold.
      draft_slots: draft tokens a row may hold; 0 = twice the slots, if the
        draft's context has so many.

    Raises:
      ValueError: if there is no draft model, or something is out of range.
    """
    if draft is None:
      raise ValueError(f"drafter {name!r} needs a draft model")
    refuse_heads(name, draft)
    if depth < 1:
      raise ValueError(f"num_draft must be at least 1, got {depth}")
    sizes = target.config.vocab_size, draft.config.vocab_size
    if vocabulary_map is None:
      vocabulary_map = same_ids(*sizes)
    check_sizes(vocabulary_map, *sizes)
    context = draft.config.max_length
    if not 0 <= draft_slots <= context:
      raise ValueError(
        f"draft_slots must be in [0, {context}], the draft's context, got "
        f"{draft_slots}"
      )
    self.draft, self.depth = draft, depth
    self.slots = draft_slots or min(2 * slots, context)
    self.tables = {
      "draft_ids": vocabulary_map.draft_ids,
      "pieces": vocabulary_map.pieces,
      "num_pieces": vocabulary_map.num_pieces,
    }

  def init(self, batch: int) -> Cache:
    """Returns the draft's empty cache."""
    return self.draft.init_cache(batch, self.slots)

  def stream(
    self, params: Any, tokens_BW: Array, length_B: Array
  ) -> tuple[Array, Callable[[Array], Array]]:
    """Lays out the draft tokens of a text.

    Tokens of 1, 3 and 2 pieces: the stream has 6, and position 3 holds the
    last piece of the second token.

    Args:
      params: of all.
      tokens_BW: target tokens.
      length_B: how many of them count.

    Returns:
      (`[B]` length of the stream, `at(positions_BC) -> [B, C]` its tokens).
    """
    tables = params["tables"]
    W = tokens_BW.shape[1]
    live = jnp.arange(W)[None] < length_B[:, None]
    tokens_BW = jnp.where(live, tokens_BW, 0)
    nums = jnp.where(live, tables["num_pieces"][tokens_BW], 0)
    ends = jnp.cumsum(nums, 1)

    def at(positions):
      covers = jax.vmap(lambda e, p: jnp.searchsorted(e, p, side="right"))
      index = jnp.minimum(covers(ends, positions), W - 1)
      take = lambda x: jnp.take_along_axis(x, index, 1)
      piece = positions - take(ends) + take(nums)
      piece = jnp.clip(piece, 0, tables["pieces"].shape[1] - 1)
      return tables["pieces"][take(tokens_BW), piece]

    return ends[:, -1], at

  def _read_chunk(self, params, cache, at, length_B, size):
    """Reads the next `size` tokens of the stream into the cache."""
    tokens = at(cache.length[:, None] + jnp.arange(size)[None])
    num = jnp.clip(length_B - cache.length, 0, size)
    read = functools.partial(self.draft.apply, params["draft"])
    return read_on(read, tokens, cache, num)[0]

  def prefill(self, params: Any, cache: Cache, chunk: Chunk, output) -> Cache:
    """Reads all of the prompt's stream: see `Drafter`.

    A row whose stream has no room is not read: it will never draft.
    """
    del output
    length, at = self.stream(params, chunk.all_tokens, chunk.upto)
    length = jnp.where(length <= self.slots, length, 0)
    size = chunk.tokens.shape[1]
    return lax.while_loop(
      lambda cache: (cache.length < length).any(),
      lambda cache: self._read_chunk(params, cache, at, length, size),
      cache,
    )

  def say(
    self,
    params: Any,
    cache: Cache,
    context: Context,
    choose: Callable,
    made: Any,
  ) -> tuple[Any, Array, Carry]:
    """Reads what is pending, then lets the draft say up to `K` tokens.

    Rows that are asked for nothing, or have no room, take no part. If there
    is no row that does, nothing is read.

    Args:
      params: of all.
      cache: the draft's.
      context: see `Context`.
      choose: `choose(d, logits_BVd, made) -> (made, token_B, going_B)`, given
        the draft's logits after `d` of its own tokens: the next one, and
        whether the row wants another after it.
      made: pytree that `choose` builds.

    Returns:
      (made, `[B]` how deep each row was asked to go, carry for `update`).
    """
    B, C, K = context.length.shape[0], _CHUNK, self.depth
    length, at = self.stream(params, context.tokens, context.length)
    asked = jnp.minimum(context.max_depth, K)
    asked = jnp.where(length + asked <= self.slots, asked, 0)
    takes = asked > 0

    def goal(cache):  # a chunk is left for the pass that asks for logits
      return jnp.where(takes & (length - cache.length > C), length, 0)

    cache = lax.while_loop(
      lambda cache: (goal(cache) > 0).any(),
      lambda cache: self._read_chunk(params, cache, at, goal(cache), C),
      cache,
    )
    size = C + K - 1
    positions = (length - C)[:, None] + jnp.arange(C)[None]
    # What is in the cache already, or before the text, is not seen here.
    pending = positions >= cache.length[:, None]
    shown = jnp.ones((B, size), bool).at[:, :C].set(pending)
    positions = jnp.maximum(positions, 0)
    causal = jnp.tril(jnp.ones((size, size), bool))
    deepest = asked.max()

    def start(carry):
      made, said, block, _ = carry
      out = self.draft.apply(
        params["draft"],
        at(positions),
        positions,
        cache,
        block,
        causal[None, :C] & shown[:, None],
        logits_at=jnp.full((B, 1), C - 1, jnp.int32),
      )
      made, token, going = choose(0, out.logits[:, 0], made)
      said = said.at[:, 0].set(token)

      def more(carry):
        d, _, _, _, going = carry
        return (d < deepest) & (going & (asked > d)).any()

      def level(carry):
        d, made, said, block, going = carry
        own = C - 1 + d
        visible = lax.dynamic_index_in_dim(causal, own, 0, True)[None]
        out = self.draft.apply(
          params["draft"],
          lax.dynamic_index_in_dim(said, d - 1, 1, True),
          (length - 1 + d)[:, None],
          cache,
          block,
          visible & shown[:, None],
          start=own,
        )
        made, token, still = choose(d, out.logits[:, 0], made)
        said = lax.dynamic_update_index_in_dim(said, token, d, 1)
        return d + 1, made, said, out.block, going & still

      num, made, said, block, _ = lax.while_loop(
        more, level, (jnp.int32(1), made, said, out.block, going)
      )
      return made, said, block, num

    said = jnp.zeros((B, K), jnp.int32)
    made, said, block, num_read = lax.cond(
      takes.any(),
      start,
      lambda carry: carry,
      (made, said, empty_block(cache, size), jnp.int32(0)),
    )
    return made, asked, Carry(cache, block, said, length, takes, num_read)

  def update(self, params: Any, carry: Carry, verdict: Verdict) -> Cache:
    """Commits what was pending, and said tokens that became text.

    The new root's tokens are left pending, whatever was read of them.
    """
    cache, C, K = carry.cache, _CHUNK, self.depth
    new = jnp.maximum(verdict.num_tokens - 1, 0)
    length, at = self.stream(params, jnp.maximum(verdict.tokens, 0), new)
    depths = jnp.arange(K)[None]
    same = at(jnp.broadcast_to(depths, carry.said.shape)) == carry.said
    same = same & (depths < length[:, None]) & (depths < carry.num_read - 1)
    num = carry.length - cache.length + jnp.cumprod(same, 1).sum(1)
    num = jnp.where(carry.took_part & (verdict.num_tokens > 0), num, 0)
    # Pending tokens are the last of the first C nodes, then what was said.
    lead = jnp.clip(carry.length - cache.length, 0, C)
    path = (C - lead)[:, None] + jnp.arange(C + K - 1)[None]
    path = jnp.minimum(path, C + K - 2)
    return commit(cache, carry.block, path.astype(jnp.int32), num)
