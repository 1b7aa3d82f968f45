"""Draft-length policies: how deep a row drafts in the next step."""

import jax.numpy as jnp

from spec_jax.base import LengthPolicy


def fixed(depth: int) -> LengthPolicy:
  """Builds the policy that always asks for `depth` draft tokens in a row.

  Raises:
    ValueError: if `depth < 0`.
  """
  if depth < 0:
    raise ValueError(f"draft depth must be at least 0, got {depth}")
  return LengthPolicy(
    init=lambda batch: jnp.full((batch,), depth, jnp.int32),
    max_depth=lambda state: state,
    update=lambda state, draft, verdict: state,
  )
