"""Rows of the state: how they begin, are continued, copied and refilled."""

from collections.abc import Callable
import dataclasses

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

from spec_jax.base import (
  LENGTH,
  RUNNING,
  Array,
  Chunk,
  Counts,
  Drafter,
  LengthPolicy,
  Model,
  Sampling,
  SpecState,
  Stops,
  Tally,
)
from spec_jax.cache import after_pass, commit, empty_block


@flax.struct.dataclass
class Request:
  """What a row is asked to do.

  Attributes:
    tokens: `[B, W]` int32, the prompt; later entries are ignored.
    length: `[B]` int32 prompt tokens, at least 1.
    limit: `[B]` int32, prompt and output tokens at most; `limit <= S`.
    sampling: settings per row.
    stops: stop ids, and active stop strings.
    keys: `[B]` random keys.
  """

  tokens: Array
  length: Array
  limit: Array
  sampling: Sampling
  stops: Stops
  keys: Array


def uses_counts(sampling: Sampling) -> bool:
  """Tells whether a setting in use looks at how often tokens occurred."""
  return any(
    x is not None
    for x in (
      sampling.repetition_penalty,
      sampling.presence_penalty,
      sampling.frequency_penalty,
    )
  )


def make_init(
  model: Model,
  drafter: Drafter,
  policy: LengthPolicy,
  *,
  slots: int,
  chunk: int,
  logprobs: bool = False,
  lossy: bool = False,
) -> tuple[Callable, Callable]:
  """Makes the functions that read prompts.

  Args:
    model: the target.
    drafter: see `base.Drafter`.
    policy: draft-length policy.
    slots: `S`, tokens a row may hold; also the width of the token buffer.
    chunk: prompt tokens read in one pass.
    logprobs: whether the state records log-probabilities.
    lossy: whether the state records how far the law is from the target's.

  Returns:
    `init(params, request) -> SpecState`: fresh rows, and
    `resume(params, state, request) -> SpecState`: rows whose cached tokens
    (`state.target.length` of them) begin the request's tokens, so that only
    the rest is read. Continuing equals running afresh.
  """

  def prefill(params, state: SpecState) -> SpecState:
    upto = state.length - 1  # the last token is the root of the first tree

    def body(carry):
      cache, draft = carry
      offsets = jnp.arange(chunk)[None]
      positions = cache.length[:, None] + offsets
      num = jnp.clip(upto - cache.length, 0, chunk)
      index = jnp.minimum(positions, state.tokens.shape[1] - 1)
      tokens = jnp.take_along_axis(state.tokens, index, 1)
      B = num.shape[0]
      visible = jnp.tril(jnp.ones((chunk, chunk), bool))[None]
      output = model.apply(
        params["target"],
        tokens,
        positions,
        cache,
        empty_block(cache, chunk),
        jnp.broadcast_to(visible, (B, chunk, chunk)),
        logits_at=jnp.zeros((B, 0), jnp.int32),
      )
      piece = Chunk(tokens, positions, num, upto, state.tokens)
      draft = drafter.prefill(params, draft, piece, output)
      path = jnp.broadcast_to(offsets, (B, chunk))
      path = after_pass(path, output.hidden)
      return commit(cache, output.block, path, num), draft

    cache, draft = lax.while_loop(
      lambda carry: (carry[0].length < upto).any(),
      body,
      (state.target, state.draft),
    )
    return dataclasses.replace(state, target=cache, draft=draft)

  def start(params, request: Request, target, draft, policy_state):
    B, W = request.tokens.shape
    if slots != W:
      raise ValueError(f"token buffer of {W} for {slots} slots")
    zeros = jnp.zeros((B,), jnp.int32)
    in_prompt = jnp.arange(W)[None] < request.length[:, None]
    tokens = jnp.where(in_prompt, request.tokens, 0)
    counts = None
    if uses_counts(request.sampling):
      V = model.config.vocab_size
      seen = jax.vmap(
        lambda t: jnp.zeros((V,), bool).at[t].set(True, mode="drop")
      )
      counts = Counts(
        prompt=seen(jnp.where(in_prompt, tokens, V)),
        output=jnp.zeros((B, V), jnp.int32),
      )
    stops = request.stops
    if stops.state is not None:
      stops = dataclasses.replace(stops, state=zeros)
    per_depth = jnp.zeros((B, drafter.depth), jnp.int32)
    done = request.length >= request.limit
    state = SpecState(
      tokens=tokens,
      prompt_length=request.length,
      length=request.length,
      limit=request.limit,
      done=done,
      finish_reason=jnp.where(done, LENGTH, RUNNING).astype(jnp.int32),
      sampling=request.sampling,
      stops=stops,
      counts=counts,
      logprobs=jnp.zeros((B, W), jnp.float32) if logprobs else None,
      tally=Tally(
        zeros,
        zeros,
        zeros,
        per_depth,
        per_depth,
        jnp.zeros((B,), jnp.float32) if lossy else None,
      ),
      target=target,
      draft=draft,
      policy=policy_state,
      keys=request.keys,
    )
    return prefill(params, state)

  def init(params, request: Request) -> SpecState:
    B = request.length.shape[0]
    return start(
      params,
      request,
      model.init_cache(B, slots),
      drafter.init(B),
      policy.init(B),
    )

  def resume(params, state: SpecState, request: Request) -> SpecState:
    return start(params, request, state.target, state.draft, state.policy)

  return init, resume


def _row_axis(leaf: Array) -> int:
  """Returns the axis of the rows: 1 in a stacked cache `[L, B, ...]`."""
  return 1 if leaf.ndim == 5 else 0


def take_rows(state: SpecState, rows: Array) -> SpecState:
  """Returns the state of the given rows, `[R]`; rows may repeat."""
  return jax.tree.map(
    lambda x: jnp.take(x, rows, _row_axis(x), mode="clip"), state
  )


def put_rows(state: SpecState, new: SpecState, rows: Array) -> SpecState:
  """Overwrites rows `[R]` of a state with `new`'s; rows `>= B` are dropped."""

  def put(old, value):
    if _row_axis(old) == 1:
      return old.at[:, rows].set(value, mode="drop")
    return old.at[rows].set(value, mode="drop")

  return jax.tree.map(put, state, new)


def start_rows(
  state: SpecState,
  new: SpecState,
  rows: Array,
  keep: Callable | None = None,
  restart: Callable | None = None,
) -> SpecState:
  """Starts other prompts in rows `[R]`: `put_rows`, but the policy's stay.

  What a length policy knows of a row outlives the row's prompts, unless it
  wants a `restart`, and so does what a drafter wants to `keep`; see
  `LengthPolicy` and `Drafter`.
  """

  def taken(tree):
    return jax.tree.map(
      lambda x: jnp.take(x, rows, _row_axis(x), mode="clip"), tree
    )

  old = taken(state.policy)
  new = dataclasses.replace(
    new,
    policy=old if restart is None else restart(old),
    draft=new.draft if keep is None else keep(taken(state.draft), new.draft),
  )
  return put_rows(state, new, rows)


def make_refill(
  init: Callable,
  keep: Callable | None = None,
  restart: Callable | None = None,
) -> Callable:
  """Makes `refill(params, state, request, rows_R) -> SpecState`.

  Reads `R` new prompts and puts them into the given rows of a running state;
  an entry `>= B` of `rows` is a row to leave out. `keep` and `restart`: see
  `start_rows`.
  """

  def refill(params, state, request, rows):
    return start_rows(state, init(params, request), rows, keep, restart)

  return refill
