"""No draft: plain decoding, one token a step."""

import jax.numpy as jnp

from spec_jax import tree as trees
from spec_jax.base import Draft, Drafter, Model
from spec_jax.drafting import root_token, static_tree


def build(target: Model, draft: Model | None, *, slots: int) -> Drafter:
  """Builds the drafter that proposes nothing."""
  del target, draft, slots
  root_only = trees.chain(0)

  def propose(params, noise, state, context):
    root = root_token(context)
    shape = static_tree(root_only, root.shape[0])
    return Draft(
      tokens=root,
      **shape,
      law=jnp.zeros_like(root),
      probs=None,
      acceptable=jnp.zeros(root.shape, bool),
    ), state

  return Drafter(
    init=lambda batch: (),
    prefill=lambda params, state, chunk, output: state,
    propose=propose,
    update=lambda params, state, draft, verdict, output: state,
    num_nodes=1,
    depth=0,
  )
