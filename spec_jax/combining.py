"""Drafters inside a drafter: how they are built, asked and told.

A part numbers its own nodes. It is told what became of them in its own
numbers, whatever tree the target read.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from spec_jax import drafters
from spec_jax.base import (
  DETERMINISTIC,
  Array,
  Context,
  Draft,
  Drafter,
  Model,
  Noise,
  Output,
  PyTree,
  Verdict,
)

Parts = Mapping[str, Drafter]


def build_part(
  option: str, spec: str, target: Model, draft: Model | None, *, slots: int
) -> Drafter:
  """Builds a part from its name and options, see `drafters.parse`.

  Args:
    option: of the whole, for messages.
    spec: for example `"prompt_lookup(num_draft=7)"`.
    target: the target model.
    draft: the only draft model there is.
    slots: `S`.

  Raises:
    ValueError: if it is no drafter, or cannot be built.
  """
  try:
    name, options = drafters.parse(spec)
    if not drafters.takes_draft(name, options):
      draft = None
    return drafters.build(name, target, draft, slots=slots, **options)
  except ValueError as error:
    raise ValueError(f"option {option!r}: {error}") from error


def either_takes_draft(
  *, first: str = "prompt_lookup", second: str = "vanilla"
) -> bool:
  """Tells whether one of two parts asks a draft model."""
  return any(drafters.takes_draft(*drafters.parse(x)) for x in (first, second))


def either_takes_heads(
  *, first: str = "prompt_lookup", second: str = "vanilla"
) -> str | None:
  """Returns the kind of heads that one of two parts takes, or None."""
  found = (drafters.takes_heads(*drafters.parse(x)) for x in (first, second))
  return next((kind for kind in found if kind), None)


def laws_of(parts: Parts) -> tuple[int, ...]:
  """Returns how the nodes of some part are drawn."""
  return tuple(sorted({law for d in parts.values() for law in d.laws}))


def combined(
  parts: Parts,
  propose: Callable,
  update: Callable,
  *,
  num_nodes: int,
  depth: int,
  laws: tuple[int, ...],
) -> Drafter:
  """Builds the whole; its state and its tables are `{part: ...}`.

  Args:
    parts: by name.
    propose: of the whole.
    update: of the whole.
    num_nodes: `N` of the whole.
    depth: `K` of the whole.
    laws: of the whole.

  Raises:
    ValueError: if two parts have tables of different tokenizers.
  """
  # One draft is of one kind: parts with heads look at the same layers.
  taps = {d.taps for d in parts.values() if d.taps is not None}
  vocabularies = {d.vocabulary for d in parts.values()} - {None}
  if len(vocabularies) > 1:
    raise ValueError(
      f"the indexes of {' and '.join(parts)} were made with different "
      f"tokenizers"
    )

  def prefill(params, state, chunk, output):
    return {
      name: d.prefill(params_of(params, name), state[name], chunk, output)
      for name, d in parts.items()
    }

  def keep(old, new):
    return {
      name: new[name] if d.keep is None else d.keep(old[name], new[name])
      for name, d in parts.items()
    }

  tables = {n: d.tables for n, d in parts.items() if d.tables is not None}
  keeps = any(d.keep is not None for d in parts.values())
  return Drafter(
    init=lambda batch: {name: d.init(batch) for name, d in parts.items()},
    prefill=prefill,
    propose=propose,
    update=update,
    num_nodes=num_nodes,
    depth=depth,
    asks_policy=any(d.asks_policy for d in parts.values()),
    laws=laws,
    tables=tables or None,
    vocabulary=next(iter(vocabularies), None),
    keep=keep if keeps else None,
    host_driven=any(d.host_driven for d in parts.values()),
    greedy_only=any(d.greedy_only for d in parts.values()),
    catches_up=any(d.catches_up for d in parts.values()),
    alternates=any(d.alternates for d in parts.values()),
    reads=any(d.reads for d in parts.values()),
    taps=next(iter(taps), None),
  )


def params_of(params: Mapping[str, Any], part: str) -> dict[str, Any]:
  """Returns the parameters with the tables of one part alone."""
  own = {name: x for name, x in params.items() if name != "tables"}
  tables = (params.get("tables") or {}).get(part)
  return own if tables is None else {**own, "tables": tables}


def ask(
  parts: Parts,
  name: str,
  params,
  noise: Noise,
  state,
  context: Context,
  *,
  first_node: int = 1,
) -> tuple[Draft, PyTree]:
  """Asks a part of the state for its draft; returns (Draft, carry).

  Args:
    parts: by name.
    name: of the part.
    params: of the whole.
    noise: of the whole.
    state: of the whole.
    context: `max_depth` may be deeper than the part's `K`.
    first_node: of the whole, where the part's node 1 lies; it is drawn with
      that node's noise, the next with the next.
  """
  part = parts[name]
  begin, n = first_node, part.num_nodes - 1

  def columns(x):
    return jnp.concatenate([x[:, :1], x[:, begin : begin + n]], 1)

  own = Noise(
    draft=columns(noise.draft),
    accept=columns(noise.accept),
    residual=noise.residual,
    plain=noise.plain[:, : part.depth + 1],
  )
  depth = jnp.minimum(context.max_depth, part.depth)
  context = dataclasses.replace(context, max_depth=depth, cheap=None)
  return part.propose(params_of(params, name), own, state[name], context)


def tell(
  parts: Parts,
  name: str,
  params,
  carry: PyTree,
  own: Draft,
  places: Array,
  draft: Draft,
  verdict: Verdict,
  output: Output,
) -> PyTree:
  """Tells a part what became of its draft; returns its new state.

  In its own numbers: a node that is nowhere in the tree looks like a refused
  copy of the root. All tokens committed are told, more than the part's `K + 1`
  if another part's were accepted; the path goes as far as its own nodes do.

  Args:
    parts: by name.
    name: of the part.
    params: of the whole.
    carry: of the part's `propose`.
    own: what it proposed.
    places: `[B, n]` int32, where its nodes lie in the whole tree, -1 nowhere;
      the root always at 0.
    draft: the whole tree.
    verdict: on the whole tree, cut.
    output: the target's on the whole tree.
  """
  there = places >= 0
  at = jnp.where(there, places, 0)

  def nodes(x, axis=1):  # The whole's nodes in the part's order.
    shape = [1] * x.ndim
    shape[0 if axis == 1 else axis - 1], shape[axis] = at.shape
    return jnp.take_along_axis(x, at.reshape(shape), axis, mode="clip")

  on_path = verdict.path[:, :, None] == places[:, None, :]
  on_path = on_path & there[:, None, :]
  path = jnp.where(on_path.any(-1), jnp.argmax(on_path, -1), -1)
  path = path.astype(jnp.int32)
  block = output.block
  if block is not None:
    move = lambda x: nodes(x, x.ndim - 3)
    block = dataclasses.replace(
      block,
      k=jax.tree.map(move, block.k),
      v=jax.tree.map(move, block.v),
      positions=nodes(block.positions),
    )
  return parts[name].update(
    params_of(params, name),
    carry,
    dataclasses.replace(
      own,
      tokens=jnp.where(there, own.tokens, own.tokens[:, :1]),
      acceptable=own.acceptable & there & nodes(draft.acceptable),
      read=None if own.read is None else own.read & there,
    ),
    dataclasses.replace(
      verdict,
      path=path,
      num_accepted=(path[:, 1:] >= 0).sum(1),
      accept_prob=jnp.where(there, nodes(verdict.accept_prob), 0),
    ),
    Output(
      logits=nodes(output.logits), hidden=nodes(output.hidden), block=block
    ),
  )


def widen(draft: Draft, num_nodes: int) -> Draft:
  """Adds nodes that nobody accepts, children of the root."""
  more = num_nodes - draft.tokens.shape[1]

  def pad(x, value=0):
    widths = [(0, 0), (0, more)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, widths, constant_values=value)

  n = draft.tokens.shape[1]
  visible = jnp.pad(draft.visible, ((0, 0), (0, more), (0, more)))
  extra = jnp.arange(num_nodes) >= n
  visible = visible.at[:, n:, 0].set(True)
  visible = visible | (jnp.diag(extra) & extra[:, None])[None]
  tokens = jnp.where(extra[None], draft.tokens[:, :1], pad(draft.tokens))
  return Draft(
    tokens=tokens,
    parents=pad(draft.parents),
    depths=pad(draft.depths, 1),
    visible=visible,
    law=pad(draft.law, DETERMINISTIC),
    probs=None if draft.probs is None else pad(draft.probs),
    acceptable=pad(draft.acceptable, False),
    read=None if draft.read is None else pad(draft.read, False),
  )
