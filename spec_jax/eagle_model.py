"""An EAGLE head where a drafter would ask a draft model.

The head keeps a cache of pairs (`eagle.py`) of its own. What it has read with
its own features is dropped after each step; the accepted pairs come again with
the target's, and wait in a ring of the last `LEAD` until the head is asked, or
until the ring is full and they are read in one pass. So a row that decodes
plainly pays a pass of the head every few tokens, and never has more to catch
up on.

The newest pair always waits: its token is the root, which is not committed
before it has been read by the target, and where a text is continued another
one may stand in its place.
"""

import dataclasses
from typing import Any, NamedTuple

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

from spec_jax import cache as cache_lib, eagle
from spec_jax.base import (
  Array,
  Block,
  Cache,
  Chunk,
  Context,
  Counts,
  Model,
  Output,
  Sampling,
  Verdict,
)
from spec_jax.heads import check_heads
from spec_jax.nodes import take_nodes
from spec_jax.sampling import scores

# Pairs that wait at most: a CPU with the kernel reads 8 at the price of one.
LEAD = 8


@flax.struct.dataclass
class EagleState:
  """A row's pairs.

  Attributes:
    cache: of the pairs that were read; `length` is their number.
    features: `[B, LEAD, A * D]`, of the last pairs; pair `i` at `i % LEAD`.
  """

  cache: Cache
  features: Array


@flax.struct.dataclass
class EagleBlock:
  """A block, and the head's own features at its nodes.

  Attributes:
    block: keys and values.
    features: `[B, N, D]`.
  """

  block: Block
  features: Array


class Reading(NamedTuple):
  """What a head read in one step.

  Attributes:
    cache: the state before the step.
    block: read since; the last pair of the text lies at node `LEAD - 1`.
    begin: `[B]` number of the pair at node 0.
    tokens: `[B, LEAD]` int32, of the first nodes' pairs.
    grown: bool scalar, whether anything was read.
  """

  cache: EagleState
  block: EagleBlock
  begin: Array
  tokens: Array
  grown: Array


class EagleModel:
  """An `Asked`; holds no arrays.

  Attributes:
    lead: see `Asked`.
  """

  lead = LEAD

  def __init__(self, name: str, target: Model, draft: Any, *, slots: int):
    """Takes the target and the head; `slots` is `S`.

    Raises:
      ValueError: if there is no EAGLE head.
    """
    self.heads = check_heads(name, draft, "eagle")
    config = self.heads.config
    self.target = target
    self.slots = min(slots, config.max_length)
    self.vocab_size = target.config.vocab_size
    self.layer = eagle.make_layer(config)

  def init(self, batch: int) -> EagleState:
    """Returns a state without pairs."""
    width = self.heads.config.feature_width
    return EagleState(
      cache=eagle.init_cache(self.heads, batch, self.slots),
      features=jnp.zeros((batch, LEAD, width), self.heads.dtype),
    )

  def _apply(self, params, tokens, features, positions, cache, block, *rest):
    embeds = self.target.embed(params["target"], tokens)
    return self.heads.apply(
      params["draft"],
      embeds.astype(self.heads.dtype),
      features,
      positions,
      cache,
      block,
      *rest,
    )

  def _logits(self, params, state: Array) -> Array:
    """Returns `[..., V]` logits over the target's vocabulary."""
    own, words = params["draft"], self.heads.config.words
    logits = words.logits(own, self.target, params["target"], state)
    return words.to_target(own, logits)

  def scores(
    self, logits: Array, sampling: Sampling, counts: Counts | None
  ) -> Array:
    """Returns `[B, V]` processed logits."""
    return scores(logits, sampling, counts)

  # --- drafting -------------------------------------------------------------

  def asked(self, state: EagleState, context: Context, depth: int) -> Array:
    """Returns `[B]`, how deep each row may draft.

    0 without a pair (a text of one token), or where the cache was too short
    for the text.
    """
    asked = jnp.minimum(context.max_depth, depth)
    waiting = context.length - 1 - state.cache.length
    able = (waiting >= 1) & (waiting <= LEAD)
    able = able & (context.length + asked <= self.slots)
    return jnp.where(able, asked, 0)

  def start(
    self, params, state: EagleState, context: Context, size, wanted
  ) -> Reading:
    """Returns an empty reading; the last pair lies at node `LEAD - 1`."""
    del params
    B = wanted.shape[0]
    width = self.heads.config.width
    return Reading(
      cache=state,
      block=EagleBlock(
        cache_lib.empty_block(state.cache, size),
        jnp.zeros((B, size, width), self.heads.dtype),
      ),
      begin=context.length - 1 - LEAD,
      tokens=_tokens_of(
        context.tokens,
        context.length[:, None] - 1 - LEAD + jnp.arange(LEAD)[None],
      ),
      grown=wanted.any(),
    )

  def pending(self, reading: Reading) -> Array:
    """Returns `[B, LEAD]` bool, first nodes of the block to be read."""
    pairs = reading.begin[:, None] + jnp.arange(LEAD)[None]
    return pairs >= reading.cache.cache.length[:, None]

  def read_root(self, params, reading: Reading, context) -> Output:
    """Reads the waiting pairs; logits at the last, `[B, 1, V]`."""
    del context
    state, block = reading.cache, reading.block
    pairs = reading.begin[:, None] + jnp.arange(LEAD)[None]
    features = self._waiting(params, state, pairs)
    size = block.block.positions.shape[1]
    causal = jnp.tril(jnp.ones((LEAD, LEAD), bool))[None]
    sees = causal & self.pending(reading)[:, None]
    visible = jnp.zeros((pairs.shape[0], LEAD, size), bool)
    visible = visible.at[:, :, :LEAD].set(sees)
    out = self._apply(
      params,
      reading.tokens,
      features,
      pairs,
      state.cache,
      block.block,
      visible,
    )
    own = cache_lib.write_nodes(block.features, out.feature, 0)
    return Output(
      logits=self._logits(params, out.state[:, -1:]),
      hidden=out.feature[:, :, None],
      block=EagleBlock(out.block, own),  # type: ignore[arg-type]
    )

  def read(
    self, params, tokens, positions, state, block, visible, *, start=0
  ) -> Output:
    """Reads drafted tokens, each with its parent's own feature."""
    pairs = positions - 1
    there = block.block.positions
    before = visible & (there[:, None] == pairs[..., None] - 1)
    # Nodes from `start` on are not written yet.
    before = before & (jnp.arange(there.shape[1]) < start)[None, None]
    parent = jnp.argmax(before, -1)
    out = self._apply(
      params,
      tokens,
      take_nodes(block.features, parent),
      pairs,
      state.cache,
      block.block,
      visible,
      start,
    )
    own = cache_lib.write_nodes(block.features, out.feature, start)
    return Output(
      logits=self._logits(params, out.state),
      hidden=out.feature[:, :, None],
      block=EagleBlock(out.block, own),  # type: ignore[arg-type]
    )

  # --- the text goes on -----------------------------------------------------

  def _waiting(self, params, state: EagleState, pairs):
    """Returns the fused features of pairs that are in the ring."""
    features = take_nodes(state.features, pairs % LEAD)
    return self.layer.fuse(params["draft"], features)

  def prefill(self, params, state: EagleState, chunk: Chunk, output):
    """Reads the pairs of a piece of the prompt."""
    first = chunk.positions[:, 0]
    old = first[:, None] - LEAD + jnp.arange(LEAD)[None]
    pairs = jnp.concatenate([old, chunk.positions], 1)
    tokens = _tokens_of(chunk.all_tokens, pairs)
    return self._add(params, state, first, output.hidden, tokens, chunk.num, 1)

  def update(self, params, reading: Reading, where, verdict: Verdict):
    """Keeps what was read of the text, and adds the pairs of what is new."""
    del where  # keys of its own features are dropped
    state = reading.cache
    running = verdict.num_tokens > 0
    pairs = reading.begin + LEAD  # that there were
    waiting = pairs - state.cache.length
    num = jnp.where(running & reading.grown, waiting, 0)
    num = jnp.clip(num, 0, jnp.minimum(LEAD, self.slots - state.cache.length))
    path = LEAD - waiting[:, None] + jnp.arange(LEAD)[None]
    cache = cache_lib.commit(
      state.cache,
      reading.block.block,
      jnp.clip(path, 0, LEAD - 1),
      num,
    )
    return self._add(
      params,
      dataclasses.replace(state, cache=cache),
      pairs,
      verdict.hidden,
      jnp.concatenate([reading.tokens, jnp.maximum(verdict.tokens, 0)], 1),
      verdict.num_tokens,
      LEAD,
    )

  def _add(self, params, state, first_B, hidden_BJAD, tokens_BQ, num_B, most):
    """Adds new pairs; where too many would wait, reads all but the newest.

    Args:
      params: see `Drafter`.
      state: of the pairs so far.
      first_B: number of the first new pair.
      hidden_BJAD: the target's features.
      tokens_BQ: `[B, LEAD + J]` the last tokens before, and theirs.
      num_B: new pairs of each row.
      most: pairs that may wait afterwards.
    """
    B, J = hidden_BJAD.shape[:2]
    features = hidden_BJAD.reshape(B, J, -1).astype(state.features.dtype)
    waiting = first_B - state.cache.length
    room = self.slots - state.cache.length
    # A row whose cache was too short has a gap, and is not asked any more.
    sound = (waiting >= 0) & (waiting <= LEAD)
    reads = (num_B > 0) & sound & (waiting + num_B > most) & (room > 0)

    def read(cache):
      old = first_B[:, None] - LEAD + jnp.arange(LEAD)[None]
      fused = self._waiting(params, state, old)
      new = self.layer.fuse(params["draft"], features)
      pairs = first_B[:, None] - LEAD + jnp.arange(LEAD + J)[None]
      good = (pairs >= cache.length[:, None]) & (
        pairs < (first_B + num_B)[:, None]
      )
      causal = jnp.tril(jnp.ones((LEAD + J, LEAD + J), bool))[None]
      out = self._apply(
        params,
        tokens_BQ,
        jnp.concatenate([fused, new], 1),
        pairs,
        cache,
        cache_lib.empty_block(cache, LEAD + J),
        causal & good[:, None],
      )
      path = LEAD - waiting[:, None] + jnp.arange(LEAD + J)[None]
      path = cache_lib.after_pass(
        jnp.clip(path, 0, LEAD + J - 1), out.feature[:, :, None]
      )
      num = jnp.where(reads, jnp.minimum(waiting + num_B - 1, room), 0)
      return cache_lib.commit(cache, out.block, path, num)

    cache = lax.cond(reads.any(), read, lambda cache: cache, state.cache)
    j = jnp.arange(J)[None]
    kept = (j < num_B[:, None]) & (j >= num_B[:, None] - LEAD)
    slot = jnp.where(kept, (first_B[:, None] + j) % LEAD, LEAD)
    put = jax.vmap(lambda old, at, new: old.at[at].set(new, mode="drop"))
    return EagleState(
      cache=cache,
      features=put(state.features, slot, features),
    )


def _tokens_of(text_BW: Array, pairs: Array) -> Array:
  """Returns the tokens of pairs: of pair `i` the token `i + 1` of the text."""
  return take_nodes(text_BW, jnp.clip(pairs + 1, 0, text_BW.shape[1] - 1))
