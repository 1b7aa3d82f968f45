"""Two drafters at once: one tree that holds what both propose.

Where both propose the same token after the same text, and both are certain of
it, they share the node, so that either continuation can be followed.
"""

import dataclasses

from jax import lax
import jax.numpy as jnp

from spec_jax.base import DETERMINISTIC, Array, Context, Draft, Drafter, Model
from spec_jax.combining import (
  ask,
  build_part,
  combined,
  either_takes_draft,
  either_takes_heads,
  laws_of,
  tell,
)
from spec_jax.drafting import wanted

takes_draft, takes_heads = either_takes_draft, either_takes_heads


def build(
  target: Model,
  draft: Model | None,
  *,
  slots: int,
  first: str = "prompt_lookup",
  second: str = "vanilla",
) -> Drafter:
  """Builds one tree of two drafters.

  Siblings of the first are offered before those of the second. At most one of
  the two may draw at random: a node holds one law for the children that are
  drawn from one. A child that is certain is a point mass whatever that law is,
  and one drawn at random is drawn without a look at what is certain, so a
  node may have children of both kinds. Where one part asks a model and the
  other does not, a policy may ask the other alone: a copy that is nearly free
  is often as good as both.

  Args:
    target: the target model.
    draft: the draft model, for whichever asks one.
    slots: `S`, tokens a row may hold.
    first: a drafter with options, e.g. `prompt_lookup(num_draft=7)`.
    second: another.

  Raises:
    ValueError: if one of them is no drafter or cannot be built, or both draw
      at random.
  """
  parts = {
    "first": build_part("first", first, target, draft, slots=slots),
    "second": build_part("second", second, target, draft, slots=slots),
  }
  if all(d.laws != (DETERMINISTIC,) for d in parts.values()):
    raise ValueError(
      f"only one of two merged drafters may draw at random, got {first!r} and "
      f"{second!r}: give one of them siblings='top_k'"
    )
  N1, N2 = (d.num_nodes for d in parts.values())
  N, K = N1 + N2 - 1, max(d.depth for d in parts.values())
  dear = [n for n, d in parts.items() if d.catches_up or d.taps is not None]
  cheap = [d.depth for n, d in parts.items() if n not in dear]
  cheap_depth = (cheap[0] or None) if len(cheap) == 1 else None
  # A node that is drawn at random stays where its noise is.
  certain = laws_of(parts) == (DETERMINISTIC,)

  def part(name, first_node, params, noise, state, context: Context):
    """Returns what a part proposes: nothing where it shall not be asked."""
    spared = context.cheap if name in dear else None
    if spared is not None:
      # Depth 0 in all rows is no work for what asks a model.
      depth = jnp.where(spared, 0, context.max_depth)
      context = dataclasses.replace(context, max_depth=depth)
    draft, carry = ask(
      parts, name, params, noise, state, context, first_node=first_node
    )
    if spared is not None:  # it may have parts that copy
      asked = ~spared[:, None]
      draft = dataclasses.replace(
        draft,
        acceptable=draft.acceptable & asked,
        read=None if draft.read is None else draft.read & asked,
      )
    return draft, carry

  def propose(params, noise, state, context: Context):
    one, one_carry = part("first", 1, params, noise, state, context)
    two, two_carry = part("second", N1, params, noise, state, context)
    places = share(one, two)
    draft = side_by_side(one, two, places)
    where = jnp.broadcast_to(jnp.arange(N1)[None], one.tokens.shape), places
    if cheap_depth is not None:
      its = where["second" not in dear]
      nodes = jnp.arange(N)[None, :, None]
      draft = dataclasses.replace(draft, cheap=(its[:, None] == nodes).any(-1))
    if certain:
      shallow = draft.depths <= context.max_depth[:, None]
      draft = dataclasses.replace(draft, acceptable=draft.acceptable & shallow)
      draft, moved = wanted_first(draft)
      where = moved[:, :N1], jnp.take_along_axis(moved, places, 1)
    return draft, (where, (one, one_carry), (two, two_carry))

  def update(params, carry, draft, verdict, output):
    places, *proposed = carry
    return {
      name: tell(
        parts, name, params, own_carry, own, where, draft, verdict, output
      )
      for name, where, (own, own_carry) in zip(
        parts, places, proposed, strict=True
      )
    }

  whole = combined(
    parts, propose, update, num_nodes=N, depth=K, laws=laws_of(parts)
  )
  return whole._replace(cheap_depth=cheap_depth)


def share(one: Draft, two: Draft) -> Array:
  """Returns where the second's nodes lie in the tree of both, `[B, N2]`.

  Node `j` lies at `N1 - 1 + j`, behind all of the first's, unless the first
  has a node of that token after the same text and both are certain. Chains
  `[root, 5, 6]` and `[root, 5, 7]`: places 0, 1, 4; place 3 stays empty and 7
  hangs below the first's 5.
  """
  B, N1 = one.tokens.shape
  N2 = two.tokens.shape[1]
  able = one.acceptable & (one.law == DETERMINISTIC)
  able = able & (jnp.arange(N1) > 0)[None]

  def place(j, places):
    above = jnp.take_along_axis(places, two.parents[:, j][:, None], 1)
    same = able & (one.parents == above)
    same = same & (one.tokens == two.tokens[:, j][:, None])
    certain = two.acceptable[:, j] & (two.law[:, j] == DETERMINISTIC)
    shared = same.any(1) & certain
    return places.at[:, j].set(
      jnp.where(shared, jnp.argmax(same, 1), N1 - 1 + j)
    )

  return lax.fori_loop(1, N2, place, jnp.zeros((B, N2), jnp.int32))


def side_by_side(one: Draft, two: Draft, places_BN: Array) -> Draft:
  """Returns the tree of both; a place whose node is shared stays refused."""
  B, N1 = one.tokens.shape
  N2 = two.tokens.shape[1]
  own = N1 - 1 + jnp.arange(1, N2)[None]
  mine = places_BN[:, 1:] == own
  below = jnp.take_along_axis(places_BN, two.parents[:, 1:], 1)
  # What a node of the second sees, itself apart, moved to its place.
  nodes = jnp.arange(N1 + N2 - 1)[None, None]
  moved = places_BN[:, :, None] == nodes
  others = two.visible & ~jnp.eye(N2, dtype=bool)[None]
  sees = (others[:, 1:, :, None] & moved[:, None]).any(2)
  sees = sees | (own[:, :, None] == nodes)

  def join(a, b):
    return jnp.concatenate([a, b[:, 1:]], 1)

  probs = None
  if one.probs is not None:
    rest = jnp.zeros((B, N2 - 1, one.probs.shape[2]))
    probs = jnp.concatenate([one.probs, rest], 1)
  elif two.probs is not None:
    rest = jnp.zeros((B, N1 - 1, two.probs.shape[2]))
    probs = jnp.concatenate([two.probs[:, :1], rest, two.probs[:, 1:]], 1)
  read = None
  if one.read is not None or two.read is not None:
    none = jnp.zeros((B, 1), bool)
    read = join(
      none & one.acceptable if one.read is None else one.read,
      none & two.acceptable if two.read is None else two.read,
    )
  return Draft(
    tokens=join(one.tokens, two.tokens),
    parents=jnp.concatenate([one.parents, below], 1),
    depths=join(one.depths, two.depths),
    visible=jnp.concatenate(
      [jnp.pad(one.visible, ((0, 0), (0, 0), (0, N2 - 1))), sees], 1
    ),
    law=join(one.law, two.law),
    probs=probs,
    acceptable=jnp.concatenate(
      [one.acceptable, two.acceptable[:, 1:] & mine], 1
    ),
    read=read,
  )


def wanted_first(draft: Draft) -> tuple[Draft, Array]:
  """Moves what the target need not read to the end of each row's tree.

  The target's pass ends with the last node that is wanted, so the nodes of one
  drafter cost nothing in a step in which it proposes nothing.

  Args:
    draft: whose nodes are all certain: one drawn at random would part from its
      noise, and from the siblings drawn before it.

  Returns:
    (the same tree, `[B, N]` int32 where each node of it lies now); nodes keep
    their order otherwise, parents before children, siblings as they stood.
  """
  N = draft.tokens.shape[1]
  first = wanted(draft).at[:, 0].set(True)
  first = (draft.visible & first[:, :, None]).any(1)  # and what is above
  behind = first.sum(1, keepdims=True) + jnp.cumsum(~first, 1) - 1
  moved = jnp.where(first, jnp.cumsum(first, 1) - 1, behind)
  moved = moved.astype(jnp.int32)
  old = jnp.argmax(moved[:, None] == jnp.arange(N)[None, :, None], 2)

  def move(x, axis=1):
    shape = [1] * x.ndim
    shape[0], shape[axis] = old.shape
    return jnp.take_along_axis(x, old.reshape(shape), axis)

  parents = move(draft.parents)
  above = jnp.take_along_axis(moved, jnp.maximum(parents, 0), 1)
  return Draft(
    tokens=move(draft.tokens),
    parents=jnp.where(parents < 0, parents, above),
    depths=move(draft.depths),
    visible=move(move(draft.visible), 2),
    law=draft.law,
    probs=draft.probs,
    acceptable=move(draft.acceptable),
    read=None if draft.read is None else move(draft.read),
    cheap=None if draft.cheap is None else move(draft.cheap),
  ), moved
