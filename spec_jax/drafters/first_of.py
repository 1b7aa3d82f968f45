"""Two drafters: the second is asked in rows where the first has nothing.

A drafter that copies costs nothing and is often right when it has something;
a draft model always has something. The second falls behind in rows that the
first serves, and catches up when it is asked.

Reference: Hu et al. 2024, "SAM Decoding", which falls back alike.
"""

import dataclasses

import jax.numpy as jnp

from spec_jax.base import Context, Draft, Drafter, Model
from spec_jax.combining import (
  ask,
  build_part,
  combined,
  either_takes_draft,
  either_takes_heads,
  laws_of,
  tell,
  widen,
)

takes_draft, takes_heads = either_takes_draft, either_takes_heads


def build(
  target: Model,
  draft: Model | None,
  *,
  slots: int,
  first: str = "prompt_lookup",
  second: str = "vanilla",
) -> Drafter:
  """Builds a drafter of two.

  Which one serves a row depends on what the first offers below the root, not
  on the tokens it would draw. Of what a drafter wants read for its own use
  (`Draft.read`) only the serving one's is.

  Args:
    target: the target model.
    draft: the draft model, for whichever asks one.
    slots: `S`, tokens a row may hold.
    first: a drafter with options, e.g. `prompt_lookup(num_draft=7)`.
    second: another.

  Raises:
    ValueError: if one of them is no drafter or cannot be built.
  """
  parts = {
    "first": build_part("first", first, target, draft, slots=slots),
    "second": build_part("second", second, target, draft, slots=slots),
  }
  N = max(d.num_nodes for d in parts.values())
  K = max(d.depth for d in parts.values())

  def propose(params, noise, state, context: Context):
    one, one_carry = ask(parts, "first", params, noise, state, context)
    offered = one.acceptable & (one.parents == 0)
    offered = offered & (one.depths <= context.max_depth[:, None])
    served = offered.any(1)
    # Depth 0 in all rows is no work: every drafter keeps to that.
    rest = dataclasses.replace(
      context, max_depth=jnp.where(served, 0, context.max_depth)
    )
    two, two_carry = ask(parts, "second", params, noise, state, rest)
    draft = _choose(served, widen(one, N), widen(two, N))
    return draft, (served, (one, one_carry), (two, two_carry))

  def update(params, carry, draft, verdict, output):
    served, *proposed = carry
    state = {}
    for name, mine, (own, own_carry) in zip(
      parts, (served, ~served), proposed, strict=True
    ):
      node = jnp.arange(own.tokens.shape[1])[None]
      places = jnp.where(mine[:, None] | (node == 0), node, -1)
      state[name] = tell(
        parts, name, params, own_carry, own, places, draft, verdict, output
      )
    return state

  whole = combined(
    parts, propose, update, num_nodes=N, depth=K, laws=laws_of(parts)
  )
  return whole._replace(alternates=True)


def _choose(served_B, one: Draft, two: Draft) -> Draft:
  """Returns the first draft in served rows, the second in the others."""

  def pick(a, b):
    if a is None and b is None:
      return None
    a = jnp.zeros_like(b) if a is None else a
    b = jnp.zeros_like(a) if b is None else b
    return jnp.where(served_B.reshape(-1, *[1] * (a.ndim - 1)), a, b)

  return Draft(
    **{
      field.name: pick(getattr(one, field.name), getattr(two, field.name))
      for field in dataclasses.fields(Draft)
    }
  )
