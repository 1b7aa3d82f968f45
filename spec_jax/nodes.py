"""What stands at nodes of a draft, row by row."""

import jax.numpy as jnp

from spec_jax.base import Array


def take_nodes(x_BN: Array, nodes_BM: Array) -> Array:
  """Returns `[B, M, ...]`, `x[b, nodes[b, m]]`.

  Indices are brought into range: XLA's CPU code would else ask at every single
  number whether it lies inside, which takes five times as long for logits.

  Args:
    x_BN: `[B, N, ...]`.
    nodes_BM: `[B, M]` ints.
  """
  index = nodes_BM.reshape(*nodes_BM.shape, *[1] * (x_BN.ndim - 2))
  return jnp.take_along_axis(x_BN, index, 1, mode="clip")


def at_node(x_BN: Array, node_B: Array) -> Array:
  """Returns `[B, ...]`, each row's entry at its node, see `take_nodes`."""
  return take_nodes(x_BN, node_B[:, None])[:, 0]
