"""Attention over a cache and a block, reading only what a token sees."""

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.base import Array
from spec_jax.kernels import build


def attend(
  query_BTHE: Array,
  cache_k: Array,
  cache_v: Array,
  block_k: Array,
  block_v: Array,
  visible_BTN: Array,
  length_B: Array,
  first_BT: Array,
  *,
  scale: float,
) -> Array:
  """Attends as `cache.attend` does, in one call and with the same bits always.

  Keys are summed over in the order of positions, so a token's result does not
  depend on whether earlier tokens lie in the cache or in the block.

  Args:
    query_BTHE: float32 queries; head `h` reads key/value head `h // (H / G)`.
    cache_k: `[B, G, R, E]` float32, and `cache_v` alike.
    cache_v: see `cache_k`.
    block_k: `[B, N, G, E]` float32, and `block_v` alike.
    block_v: see `block_k`.
    visible_BTN: bool, nodes of the block each query sees.
    length_B: int32, tokens the cache holds.
    first_BT: int32, the first position each query sees (its window's).
    scale: multiplies the scores.

  Returns:
    `[B, T, H * E]` float32; zeros for a query that sees nothing.

  Raises:
    KernelError: if the kernel is not to be had.
  """
  build.require()
  B, T, H, E = query_BTHE.shape
  # The kernel reads whole arrays; masks may come with axes of 1.
  visible_BTN = jnp.broadcast_to(visible_BTN, (B, T, block_k.shape[1]))
  length_B = jnp.broadcast_to(length_B, (B,))
  first_BT = jnp.broadcast_to(first_BT, (B, T))
  out = jax.ShapeDtypeStruct((B, T, H, E), jnp.float32)
  y = jax.ffi.ffi_call(build.ATTENTION, out)(
    query_BTHE,
    cache_k,
    cache_v,
    block_k,
    block_v,
    visible_BTN,
    length_B,
    first_BT,
    scale=np.float32(scale),
  )
  return y.reshape(B, T, H * E)
