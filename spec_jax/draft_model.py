"""A draft model with a cache and a length of its own, for several drafters.

A step begins with one pass over the last `C = 2` tokens of the row: after a
full acceptance the draft has not read the last accepted token, so one token
is pending besides the root (with `C = 1` it would never be read, and
acceptance falls). A row in which the draft was not asked falls further
behind; when it is asked again, `catch_up` reads what is missing in chunks, so
that it drafts in the same step.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple, Protocol

import jax
from jax import lax
import jax.numpy as jnp

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
from spec_jax.cache import commit, empty_block, read_on
from spec_jax.drafting import CATCH_UP
from spec_jax.heads import refuse_heads
from spec_jax.sampling import scores

# Tokens read in a pass by a row that is further behind than `CATCH_UP`: a CPU
# with the kernel reads 8 at about the price of one, without it at twice that.
_CHUNK = 8


class Reading(NamedTuple):
  """What a draft model read in one step.

  Attributes:
    cache: what was committed before, catching up included.
    block: keys and values read since; pending tokens and root come first.
    begin: `[B]` position of the block's first node.
    grown: bool scalar, whether anything was read.
  """

  cache: Cache
  block: Block
  begin: Array
  grown: Array


class Asked(Protocol):
  """Whoever a drafter of trees asks: a model, or a head beside the target.

  `state` is what it keeps of a row; `reading`, `block` and `state` pass from
  one method to the next and are nobody else's. See `DraftModel`.

  Attributes:
    lead: first nodes of a block, which hold what is pending and the root.
    vocab_size: `V`, the target's.
  """

  lead: int
  vocab_size: int

  @property
  def read(self) -> Callable[..., Output]:
    """`read(params, tokens, positions, state, block, visible, start=0)`.

    Reads nodes `start ..` of the block, their ancestors being read.
    """

  def init(self, batch: int) -> Any:
    """Returns the state of rows without text."""

  def prefill(self, params, state: Any, chunk: Chunk, output) -> Any:
    """Reads a piece of the prompt, as `Drafter.prefill`."""

  def asked(self, state: Any, context: Context, depth: int) -> Array:
    """Returns `[B]`, how deep each row may draft."""

  def start(
    self, params, state: Any, context: Context, size: int, wanted: Array
  ) -> Any:
    """Returns an empty reading with a block of so many nodes."""

  def read_root(self, params, reading: Any, context: Context) -> Output:
    """Reads up to the root; returns logits `[B, 1, V]` there, and the block."""

  def scores(
    self, logits: Array, sampling: Sampling, counts: Counts | None
  ) -> Array:
    """Returns `[B, V]` processed logits over the target's vocabulary."""

  def pending(self, reading: Any) -> Array:
    """Returns `[B, lead]` bool, first nodes of the block that are seen."""

  def update(self, params, reading: Any, where: Array, verdict: Verdict) -> Any:
    """Returns the state after a step; `where` the accepted nodes were read."""


class DraftModel:
  """What drafters share that ask a draft model; holds no arrays.

  Attributes:
    lead: first nodes of a block, which hold what is pending and the root.
  """

  lead = CATCH_UP

  def __init__(
    self, name: str, target: Model, draft: Model | None, *, slots: int
  ):
    """Takes the models.

    Args:
      name: of the drafter, for messages.
      target: the target; its vocabulary rules.
      draft: the draft model; `params["draft"]` are its parameters.
      slots: `S`; proposing ends where the draft's own `max_length` ends.

    Raises:
      ValueError: if there is no draft model, or there are heads.
    """
    if draft is None:
      raise ValueError(f"drafter {name!r} needs a draft model or draft layers")
    refuse_heads(name, draft)
    self.model = draft
    self.slots = min(slots, draft.config.max_length)
    self.vocab_size = target.config.vocab_size

  def init(self, batch: int) -> Cache:
    """Returns an empty cache."""
    return self.model.init_cache(batch, self.slots)

  def read(
    self, params, tokens, positions, cache, block, visible, **kwargs
  ) -> Output:
    """Runs the draft on tokens of the target, see `Model.apply`."""
    tokens = jnp.clip(tokens, 0, self.model.config.vocab_size - 1)
    return self.model.apply(
      params["draft"], tokens, positions, cache, block, visible, **kwargs
    )

  def fit(self, logits: Array) -> Array:
    """Cuts or pads the draft's logits to the target's vocabulary.

    Ids that only one of two padded vocabularies has: no mass on them.
    """
    extra = self.vocab_size - logits.shape[-1]
    if extra <= 0:
      return logits[..., : self.vocab_size]
    widths = [(0, 0)] * (logits.ndim - 1) + [(0, extra)]
    return jnp.pad(logits, widths, constant_values=-jnp.inf)

  def scores(
    self, logits: Array, sampling: Sampling, counts: Counts | None
  ) -> Array:
    """Returns `[B, V]` processed logits over the target's vocabulary."""
    return scores(self.fit(logits), sampling, counts)

  def prefill(self, params, cache: Cache, chunk: Chunk, output) -> Cache:
    """Reads a piece of the prompt, as `Drafter.prefill`."""
    del output
    upto = jnp.minimum(chunk.upto, self.slots)
    size = chunk.tokens.shape[1]
    num = jnp.clip(upto - cache.length, 0, size)
    return self._read_on(params, cache, chunk.all_tokens, num, size)

  def _read_on(self, params, cache, tokens_BW, num_B, size) -> Cache:
    """Reads and commits the next `num <= size` tokens of each row."""
    W = tokens_BW.shape[1]
    index = jnp.minimum(cache.length[:, None] + jnp.arange(size)[None], W - 1)
    tokens = jnp.take_along_axis(tokens_BW, index, 1)
    read = functools.partial(self.read, params)
    return read_on(read, tokens, cache, num_B)[0]

  def asked(self, cache: Cache, context: Context, depth: int) -> Array:
    """Returns `[B]`, how deep each row may draft; 0 where it has no slots."""
    del cache
    asked = jnp.minimum(context.max_depth, depth)
    return jnp.where(context.length + asked <= self.slots, asked, 0)

  def catch_up(self, params, cache: Cache, context: Context, wanted) -> Cache:
    """Reads what a row that wants to draft lacks, up to its root.

    Afterwards at most `CATCH_UP` tokens are pending in those rows. No pass is
    made if none is further behind; the loop carries the cache, which XLA then
    does not copy.

    Args:
      params: see `Drafter`.
      cache: the draft's.
      context: of the step.
      wanted: `[B]` bool, rows that want to draft; the others stay behind.
    """

    def behind(cache):
      return wanted & (cache.length < context.length - CATCH_UP)

    def body(cache):
      missing = jnp.clip(context.length - 1 - cache.length, 0, _CHUNK)
      num = jnp.where(behind(cache), missing, 0)
      return self._read_on(params, cache, context.tokens, num, _CHUNK)

    return lax.while_loop(lambda cache: behind(cache).any(), body, cache)

  def start(
    self, params, cache: Cache, context: Context, size: int, wanted: Array
  ) -> Reading:
    """Catches up where a row wants to draft; returns an empty reading.

    Args:
      params: see `Drafter`.
      cache: the draft's.
      context: of the step.
      size: nodes of the block, `CATCH_UP` included.
      wanted: `[B]` bool.
    """
    cache = self.catch_up(params, cache, context, wanted)
    return Reading(
      cache=cache,
      block=empty_block(cache, size),
      begin=jnp.minimum(cache.length, context.length - CATCH_UP),
      grown=wanted.any(),
    )

  def read_root(
    self,
    params,
    reading: Reading,
    context: Context,
    nodes: tuple[Array, Array, Array] | None = None,
  ) -> Output:
    """Reads pending tokens and root, and some nodes below the root with them.

    Args:
      params: see `Drafter`.
      reading: from `start`.
      context: of the step.
      nodes: `tokens [B, n]`, `depths [B, n]` below the root and
        `visible [B, n, n]`; they follow the root in the block. None = none.

    Returns:
      The draft's output at the root and these nodes, `logits [B, 1 + n, V]`.
    """
    C, own = CATCH_UP, reading.cache.length
    B, size = own.shape[0], reading.block.positions.shape[1]
    positions = reading.begin[:, None] + jnp.arange(C)[None]
    index = jnp.clip(positions, 0, context.tokens.shape[1] - 1)
    tokens = jnp.take_along_axis(context.tokens, index, 1)
    pending = self.pending(reading)
    causal = jnp.tril(jnp.ones((C, C), bool))[None]
    visible = jnp.zeros((B, C, size), bool)
    visible = visible.at[:, :, :C].set(causal & pending[:, None])
    n = 0
    if nodes is not None:
      below, depths, seen = nodes
      n = below.shape[1]
      more = jnp.zeros((B, n, size), bool)
      more = more.at[:, :, :C].set(pending[:, None])
      more = more.at[:, :, C : C + n].set(seen)
      tokens = jnp.concatenate([tokens, below], 1)
      root = context.length[:, None] - 1
      positions = jnp.concatenate([positions, root + depths], 1)
      visible = jnp.concatenate([visible, more], 1)
    at = jnp.broadcast_to(C - 1 + jnp.arange(1 + n)[None], (B, 1 + n))
    return self.read(
      params,
      tokens,
      positions,
      reading.cache,
      reading.block,
      visible,
      logits_at=at,
    )

  def pending(self, reading: Reading) -> Array:
    """Returns `[B, C]` bool, first nodes of the block that the cache lacks."""
    positions = reading.begin[:, None] + jnp.arange(CATCH_UP)[None]
    return positions >= reading.cache.length[:, None]

  def update(
    self, params, reading: Reading, where_BK: Array, verdict: Verdict
  ) -> Cache:
    """Returns the state after a step, see `commit`."""
    del params
    return self.commit(reading, where_BK, verdict.num_tokens > 0)

  def commit(self, reading: Reading, where_BK: Array, running: Array) -> Cache:
    """Commits pending tokens, root and the accepted nodes that were read.

    In a row that was not asked while others drafted, as many of the tokens it
    lacks as were read with theirs.

    Args:
      reading: from `start`, its block filled.
      where_BK: `[B, K]` where the accepted path lies in the block, node by
        node, -1 from the first that was not read.
      running: `[B]` bool, rows that go on.
    """
    cache, C = reading.cache, CATCH_UP
    own, K = cache.length, where_BK.shape[1]
    skipped = jnp.clip(own - reading.begin, 0, C)[:, None]
    lead = C - skipped
    j = jnp.arange(C + K)[None]
    node = jnp.take_along_axis(where_BK, jnp.clip(j - lead, 0, K - 1), 1)
    path = jnp.where(j < lead, j + skipped, node)
    read = jnp.cumprod(where_BK >= 0, 1).sum(1)
    num = jnp.where(running & reading.grown, lead[:, 0] + read, 0)
    num = jnp.clip(num, 0, jnp.maximum(self.slots - own, 0))
    return commit(cache, reading.block, path, num)


def own_temperature(sampling: Sampling, temperature: float | None) -> Sampling:
  """Puts the draft's own temperature in rows that are not greedy."""
  row = sampling.temperature
  if temperature is None or row is None:
    return sampling
  return dataclasses.replace(
    sampling, temperature=jnp.where(row > 0, temperature, row)
  )


def check_temperature(temperature: float | None) -> None:
  """Checks a draft's own temperature.

  Raises:
    ValueError: if it is out of range.
  """
  if temperature is not None and not 0 < temperature <= 1e30:
    raise ValueError(
      f"draft_temperature must be in (0, 1e30], got {temperature}"
    )


def if_wanted(reading: Any, grow: Callable, start):
  """Runs `grow(start)` where a row wants a draft, else returns `start`."""
  return lax.cond(reading.grown, grow, lambda carry: carry, start)


def repeat_rows(tree, times: int):
  """Repeats each row of every leaf, `[B, ...]` -> `[B * times, ...]`."""
  return jax.tree.map(lambda x: jnp.repeat(x, times, 0), tree)
