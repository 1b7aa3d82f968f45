"""What several drafters need: the root token, a static tree for every row."""

import jax.numpy as jnp

from spec_jax.base import Array, Context, Tree


def root_token(context: Context) -> Array:
  """Returns `[B, 1]`, the last committed token of each row."""
  return jnp.take_along_axis(context.tokens, (context.length - 1)[:, None], 1)


def static_tree(tree: Tree, batch: int) -> dict[str, Array]:
  """Returns the fields of `Draft` that a static tree gives `batch` rows."""
  return {
    name: jnp.broadcast_to(jnp.asarray(x)[None], (batch, *x.shape))
    for name, x in tree._asdict().items()
  }
