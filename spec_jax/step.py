"""One step for everything: draft, score, accept, cut, commit; and its loop.

Plain decoding is the drafter `none` (a tree of the root alone), a chain is a
tree of width one, and greedy decoding is a point-mass law.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from spec_jax import length, stops as stop_strings
from spec_jax.base import (
  LENGTH,
  RUNNING,
  STOP_ID,
  STOP_STRING,
  Array,
  Block,
  Cache,
  Context,
  Counts,
  Draft,
  Drafter,
  LengthPolicy,
  Model,
  Outcome,
  Output,
  SpecInfo,
  SpecState,
  Stops,
  Tally,
  Verdict,
)
from spec_jax.cache import commit, empty_block
from spec_jax.drafting import wanted
from spec_jax.levels import Levels
from spec_jax.nodes import at_node, take_nodes
from spec_jax.sampling import (
  add_counts,
  draw_noise,
  no_noise,
  path_counts,
  warp,
)
from spec_jax.verify import verify


def _context_counts(state: SpecState) -> Counts:
  """Returns the stored counts with those that follow from the lengths."""
  counts = state.counts or Counts()
  return dataclasses.replace(
    counts,
    num_output=state.length - state.prompt_length,
    stop_ids=state.stops.ids,
  )


def make_step(
  model: Model,
  drafter: Drafter,
  policy: LengthPolicy,
  *,
  verifier: Callable = verify,
  logprobs: str | None = None,
  trace: bool = False,
  widths: Sequence[int] = (),
  pin_rows: Callable = lambda x: x,
  pin_law: Callable = lambda x: x,
) -> Callable:
  """Makes `spec_step(params, state, noise=None) -> (SpecState, SpecInfo)`.

  Args:
    model: the target.
    drafter: proposes.
    policy: bounds the depth per row.
    verifier: `verify`, or another function of its signature.
    logprobs: None, "raw" (of the model's own logits) or "warped" (of the law
      the token was drawn from).
    trace: whether `SpecInfo` holds the draft, the verdict and the laws.
    widths: numbers of nodes the target's pass is compiled for besides all
      `N`; each step takes the smallest that holds what may be accepted.
    pin_rows: pins a pytree of arrays that lead with rows to the mesh.
    pin_law: pins a law `[B, V]` to the mesh.

  Raises:
    ValueError: if `logprobs` is none of the three.
  """
  if logprobs not in (None, "raw", "warped"):
    raise ValueError(f"logprobs must be None, raw or warped, got {logprobs!r}")
  N, K, levels = drafter.num_nodes, drafter.depth, Levels.of(drafter)
  sizes = tuple(sorted({min(max(1, n), N) for n in widths} | {N}))
  extend = policy.extend
  length.check(policy, drafter)

  def spec_step(params, state: SpecState, noise=None):
    if noise is None:
      if state.sampling.temperature is None:
        noise = no_noise(state.length.shape[0], N, K)
      else:
        noise = draw_noise(state.keys, state.length, N, K)
    counts = _context_counts(state)

    # Draft.
    room = state.limit - state.length - 1  # the last token needs no draft
    running = ~state.done
    asked = policy.level(state.policy, running, params.get("costs"))
    highest = levels.num if policy.knows_ways else K
    way, depth = levels.split(jnp.clip(asked, 0, highest))
    max_depth = jnp.maximum(jnp.minimum(depth, room), 0)
    max_depth = jnp.where(running, max_depth, 0)
    context = Context(
      tokens=state.tokens,
      length=state.length,
      done=state.done,
      max_depth=max_depth,
      cheap=None if levels.num_ways == 1 else way > 0,
      sampling=state.sampling,
      counts=counts,
      extend=extend and functools.partial(extend, state.policy),
    )
    draft, carry = drafter.propose(params, noise, state.draft, context)
    within = (draft.depths > 0) & (draft.depths <= max_depth[:, None])
    draft = dataclasses.replace(draft, acceptable=draft.acceptable & within)
    draft = pin_rows(draft)

    # Score.
    positions = (state.length - 1)[:, None] + draft.depths
    output = _score(
      model, params["target"], state.target, draft, positions, sizes
    )

    # Accept, and resample.
    def logits_at(node):
      return pin_law(at_node(output.logits, node))

    def law_at(node):
      seen = at_node(draft.visible, node)
      after = path_counts(counts, draft.tokens, seen)
      return warp(logits_at(node), state.sampling, after)

    assert output.block is not None
    verdict = pin_rows(verifier(noise, law_at, draft, K))

    # Cut by stops and limits.
    kept, stops, reason = _cut(params, state, verdict)
    num = kept.num_tokens
    live = jnp.arange(K + 1)[None] < num[:, None]
    got = levels.join(way, max_depth)
    # A model that was asked took its time, even if it proposed nothing.
    paid = (way == 0) & (max_depth > 0) & drafter.catches_up
    outcome = _outcome(draft, verdict, kept, got, running, paid)
    if drafter.taps is not None:
      path = jnp.maximum(kept.path, 0)
      kept = dataclasses.replace(kept, hidden=take_nodes(output.hidden, path))

    # Commit.
    W = state.tokens.shape[1]
    where = jnp.where(live, state.length[:, None] + jnp.arange(K + 1)[None], W)
    put = jax.vmap(lambda old, i, new: old.at[i].set(new, mode="drop"))
    new_logprobs = state.logprobs
    if logprobs is not None:
      path = jnp.maximum(kept.path, 0)
      values = _logprobs(logits_at, law_at, path, kept.tokens, logprobs)
      new_logprobs = put(state.logprobs, where, values)
    new = SpecState(
      tokens=put(state.tokens, where, kept.tokens),
      prompt_length=state.prompt_length,
      length=state.length + num,
      limit=state.limit,
      done=state.done | (reason != RUNNING),
      finish_reason=jnp.where(state.done, state.finish_reason, reason),
      sampling=state.sampling,
      stops=stops,
      counts=None
      if state.counts is None
      else add_counts(state.counts, kept.tokens, live),
      logprobs=new_logprobs,
      tally=_count(state.tally, draft, kept, outcome),
      target=commit(state.target, output.block, kept.path, num),
      draft=drafter.update(params, carry, draft, kept, output),
      policy=policy.update(state.policy, outcome),
      keys=state.keys,
    )
    info = SpecInfo(
      num_drafted=draft.acceptable.sum(1),
      num_accepted=kept.num_accepted,
      num_tokens=num,
    )
    if trace:
      laws = lax.map(law_at, jnp.maximum(verdict.path, 0).T)
      info = dataclasses.replace(
        info, draft=draft, verdict=verdict, laws=jnp.swapaxes(laws, 0, 1)
      )
    return new, info

  return spec_step


def _score(
  model: Model,
  params: Any,
  cache: Cache,
  draft: Draft,
  positions: Array,
  sizes: tuple[int, ...],
) -> Output:
  """Reads the tree up to the last node that may be accepted or is wanted.

  The rest of the output, of nodes that nobody will arrive at, is 0.
  """
  N = draft.tokens.shape[1]

  def read(n, operands):
    params, cache, tokens, positions, visible = operands
    output = model.apply(
      params,
      tokens[:, :n],
      positions[:, :n],
      cache,
      empty_block(cache, n),
      visible[:, :n, :n],
    )

    def pad(x, axis):
      around = [(0, 0)] * x.ndim
      around[axis] = (0, N - n)
      return jnp.pad(x, around)

    block = output.block
    assert block is not None
    return Output(
      logits=pad(output.logits, 1),
      hidden=pad(output.hidden, 1),
      block=Block(
        k=tuple(pad(x, x.ndim - 3) for x in block.k),
        v=tuple(pad(x, x.ndim - 3) for x in block.v),
        positions=pad(block.positions, 1),
      ),
    )

  operands = params, cache, draft.tokens, positions, draft.visible
  if len(sizes) == 1:
    return read(N, operands)
  needed = 1 + jnp.where(wanted(draft), jnp.arange(N)[None], 0).max()
  index = (needed > jnp.array(sizes[:-1])).sum()
  return lax.switch(
    index, [functools.partial(read, n) for n in sizes], operands
  )


def _cut(
  params: Any, state: SpecState, verdict: Verdict
) -> tuple[Verdict, Stops, Array]:
  """Cuts a verdict at the first stop and at the limit.

  Block [3, STOP, 8, 9] with 3 tokens left gives [3, STOP] and STOP_ID; with 1
  left [3] and LENGTH; with 2 left [3, STOP] and STOP_ID.

  Returns:
    (verdict that is cut, stops after the kept tokens, finish reason `[B]`).
  """
  J = verdict.tokens.shape[1]
  columns = jnp.arange(J)[None]
  proposed = columns < verdict.num_tokens[:, None]
  ids = state.stops.ids
  hit_id = (verdict.tokens[:, :, None] == ids[:, None, :]).any(-1) & proposed
  hit = hit_id
  stops, states, before = state.stops, None, state.stops.state
  if before is not None:
    assert state.stops.patterns is not None and state.stops.first is not None
    states, hit_string = stop_strings.advance(
      params["stops"],
      before,
      jnp.where(proposed, verdict.tokens, -1),
      state.stops.patterns,
      state.stops.first,
      state.length - state.prompt_length,
    )
    hit = hit | (hit_string & proposed)
  first = jnp.where(hit.any(1), jnp.argmax(hit, 1), J)
  budget = state.limit - state.length
  num = jnp.minimum(jnp.minimum(verdict.num_tokens, budget), first + 1)
  num = jnp.where(state.done, 0, num)
  stopped = (first < J) & (first + 1 <= budget)
  by_id = jnp.take_along_axis(hit_id, jnp.minimum(first, J - 1)[:, None], 1)
  reason = jnp.where(
    stopped,
    jnp.where(by_id[:, 0], STOP_ID, STOP_STRING),
    jnp.where(num >= budget, LENGTH, RUNNING),
  ).astype(jnp.int32)
  live = columns < num[:, None]
  if states is not None and before is not None:
    last = jnp.maximum(num - 1, 0)[:, None]
    after = jnp.take_along_axis(states, last, 1)[:, 0]
    after = jnp.where(num > 0, after, before)
    stops = dataclasses.replace(stops, state=after)
  kept = dataclasses.replace(
    verdict,
    path=jnp.where(live, verdict.path, -1),
    tokens=jnp.where(live, verdict.tokens, -1),
    num_tokens=num,
    num_accepted=jnp.minimum(verdict.num_accepted, num),
    divergence=None
    if verdict.divergence is None
    else jnp.where(live, verdict.divergence, 0.0),
  )
  return kept, stops, reason


def _logprobs(logits_at, law_at, path, tokens, kind) -> Array:
  """Returns `[B, K + 1]` log-probabilities of the tokens, given the path."""

  def at(inputs):
    node, token = inputs
    if kind == "warped":
      values = jnp.log(law_at(node))
    else:
      values = jax.nn.log_softmax(logits_at(node).astype(jnp.float32), -1)
    index = jnp.maximum(token, 0)[:, None]
    return jnp.take_along_axis(values, index, 1)[:, 0]

  return lax.map(at, (path.T, tokens.T)).T


def _outcome(
  draft: Draft,
  verdict: Verdict,
  kept: Verdict,
  asked: Array,
  running: Array,
  paid: Array,
) -> Outcome:
  """Says which depths had their chance; what was cut off does not count."""
  K = verdict.path.shape[1] - 1
  live = jnp.arange(K)[None] < kept.num_tokens[:, None]
  parents = jnp.where(draft.acceptable, draft.parents, -1)
  node = jnp.arange(parents.shape[1])[None, :, None]
  has_child = (parents[:, None, :] == node).any(-1)
  here, there = verdict.path[:, :-1], verdict.path[:, 1:]
  chance = jnp.take_along_axis(has_child, jnp.maximum(here, 0), 1) & (here >= 0)
  cheap = None
  if draft.cheap is not None:
    theirs = (draft.cheap & wanted(draft)).at[:, 0].set(False)
    cheap = *_along_text(draft, theirs, kept, live), theirs.any(-1)
  return Outcome(
    asked=asked,
    running=running,
    chance=chance & live,
    accepted=(there >= 0) & live,
    widened=wanted(draft).any(-1) | paid,
    num_tokens=kept.num_tokens,
    cheap=cheap,
  )


def _along_text(
  draft: Draft, nodes: Array, kept: Verdict, live: Array
) -> tuple[Array, Array]:
  """Returns (chance, accepted) `[B, K]` of some nodes, had they been alone.

  They follow the text, not the path: a token drawn at random may have been
  taken where one of them is the same, and the text is of the target's law
  whoever proposed it.
  """
  nodes = nodes & draft.acceptable

  def level(carry, token):
    node, going = carry
    children = nodes & (draft.parents == node[:, None]) & going[:, None]
    same = children & (draft.tokens == token[:, None])
    carry = jnp.argmax(same, 1).astype(jnp.int32), same.any(1)
    return carry, (children.any(1), same.any(1))

  start = jnp.zeros_like(kept.num_tokens), kept.num_tokens > 0
  _, found = lax.scan(level, start, kept.tokens[:, :-1].T)
  chance, accepted = (x.T & live for x in found)
  return chance, accepted


def _count(
  tally: Tally, draft: Draft, kept: Verdict, outcome: Outcome
) -> Tally:
  """Adds one step to the tally."""
  divergence = tally.divergence
  if divergence is not None and kept.divergence is not None:
    divergence = divergence + kept.divergence.sum(1)
  return Tally(
    num_steps=tally.num_steps + outcome.running,
    num_drafted=tally.num_drafted + draft.acceptable.sum(1),
    num_accepted=tally.num_accepted + kept.num_accepted,
    drafted_at=tally.drafted_at + outcome.chance,
    accepted_at=tally.accepted_at + outcome.accepted,
    divergence=divergence,
  )


def decode(
  step: Callable,
  params: Any,
  state: SpecState,
  max_steps: Array,
  until_done: Array,
) -> tuple[SpecState, Array]:
  """Steps until enough rows are done; everything stays on the device.

  Args:
    step: `spec_step`.
    params: `{"target": ..., "draft": ...}`.
    state: donate it.
    max_steps: int32 scalar, steps at most.
    until_done: int32 scalar; stops when so many rows are done.

  Returns:
    (state, int32 scalar steps taken).
  """

  def running(carry):
    state, num = carry
    return (num < max_steps) & (state.done.sum() < until_done)

  def body(carry):
    state, num = carry
    return step(params, state)[0], num + 1

  return lax.while_loop(running, body, (state, jnp.int32(0)))
