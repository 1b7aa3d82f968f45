"""Rows of the state: how they begin, are continued, copied and refilled."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

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
from spec_jax.cache import read_on


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
      positions = cache.length[:, None] + jnp.arange(chunk)[None]
      num = jnp.clip(upto - cache.length, 0, chunk)
      index = jnp.minimum(positions, state.tokens.shape[1] - 1)
      tokens = jnp.take_along_axis(state.tokens, index, 1)
      read = functools.partial(model.apply, params["target"])
      cache, output = read_on(read, tokens, cache, num)
      piece = Chunk(tokens, positions, num, upto, state.tokens)
      return cache, drafter.prefill(params, draft, piece, output)

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


def take_rows(state: Any, rows: Array) -> Any:
  """Returns a state, or a part of one, of the given rows.

  Args:
    state: a pytree whose leaves lead with `B`, a stacked cache's after `L`.
    rows: `[R]` int32; rows may repeat.
  """
  return jax.tree.map(
    lambda x: jnp.take(x, rows, _row_axis(x), mode="clip"), state
  )


def put_rows(state: SpecState, new: SpecState, rows: Array) -> SpecState:
  """Overwrites rows of a state.

  Args:
    state: of `B` rows.
    new: of `R` rows.
    rows: `[R]` int32, where `new`'s rows go; those `>= B` are dropped.
  """

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
  """Starts other prompts in rows: `put_rows`, but the policy's state stays.

  What a length policy knows of a row outlives the row's prompts, unless it
  wants a `restart`, and so does what a drafter wants to `keep`.

  Args:
    state: of `B` rows.
    new: of `R` rows that have read their prompts.
    rows: `[R]` int32, where they go; those `>= B` are dropped.
    keep: see `Drafter`; None = a drafter's state is new.
    restart: see `LengthPolicy`; None = a policy's state goes on.
  """
  old = take_rows(state.policy, rows)
  new = dataclasses.replace(
    new,
    policy=old if restart is None else restart(old),
    draft=new.draft
    if keep is None
    else keep(take_rows(state.draft, rows), new.draft),
  )
  return put_rows(state, new, rows)


def make_refill(
  init: Callable,
  keep: Callable | None = None,
  restart: Callable | None = None,
) -> Callable:
  """Makes `refill(params, state, request, rows_R) -> SpecState`.

  Reads `R` new prompts and puts them into the given rows of a running state;
  an entry `>= B` of `rows` is a row to leave out.

  Args:
    init: see `make_init`.
    keep: see `start_rows`.
    restart: see `start_rows`.
  """

  def refill(params, state, request, rows):
    return start_rows(state, init(params, request), rows, keep, restart)

  return refill


def check_start(
  start: SpecState, want: SpecState, prompts: Sequence[Sequence[int]]
) -> None:
  """Checks that a state can be continued.

  Args:
    start: of one row.
    want: shapes of the states that are decoded.
    prompts: texts that shall begin with the state's.

  Raises:
    ValueError: if it comes from another configuration, holds no drafter
      state of this kind, or its text does not begin a prompt.
  """

  def describe(x):
    return [
      (jax.tree_util.keystr(path), (leaf.shape[1:], leaf.dtype))
      if leaf.ndim != 5
      else (jax.tree_util.keystr(path), (leaf.shape[2:], leaf.dtype))
      for path, leaf in jax.tree_util.tree_leaves_with_path(x)
    ]

  have, need = dict(describe(start)), dict(describe(want))
  if have != need:
    wrong = sorted(k for k in {*have, *need} if have.get(k) != need.get(k))[0]
    raise ValueError(
      f"this state cannot be continued here: {wrong} is {have.get(wrong)}, "
      f"needed is {need.get(wrong)} (the drafter, the cache size and the "
      f"settings in use must be the same)"
    )
  if start.length.shape[0] != 1:
    raise ValueError(
      f"a state to continue has one row, this one has "
      f"{start.length.shape[0]}; see rows.take_rows"
    )
  held = int(start.target.length[0])
  text = np.asarray(start.tokens[0, :held]).tolist()
  for ids in prompts:
    if len(ids) <= held or list(ids[:held]) != text:
      raise ValueError(
        f"a prompt of {len(ids)} tokens does not continue the state's "
        f"{held} tokens"
      )
