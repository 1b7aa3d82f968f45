"""Sums of rows that do not depend on how many there are, and rotations."""

import jax
import jax.numpy as jnp

from spec_jax.base import Array
from spec_jax.kernels import build


def row_sums(x: Array) -> Array:
  """Sums the last axis in one order whatever the other axes.

  Args:
    x: `[..., D]` float32.

  Returns:
    `[..., 1]` float32.

  Raises:
    KernelError: if the kernel is not to be had.
  """
  build.require()
  rows = x.reshape(-1, x.shape[-1])
  out = jax.ShapeDtypeStruct((rows.shape[0],), jnp.float32)
  return jax.ffi.ffi_call(build.ROW_SUMS, out)(rows).reshape(*x.shape[:-1], 1)


def rotate(x: Array, angles: tuple[Array, Array]) -> Array:
  """Rotates as `rope.rotate` does, with angles that were computed once.

  XLA on CPU fuses sine and cosine into each rotation, barrier or not.

  Args:
    x: `[B, T, heads, E]` float32.
    angles: cosine and sine, each `[B, T, 1, E / 2]` float32.

  Returns:
    Like `x`.

  Raises:
    KernelError: if the kernel is not to be had.
  """
  build.require()
  B, T, H, E = x.shape
  out = jax.ShapeDtypeStruct((B * T, H, E), jnp.float32)
  rows = [x.reshape(out.shape)]
  rows += [
    jnp.broadcast_to(a, (B, T, 1, E // 2)).reshape(B * T, E // 2)
    for a in angles
  ]
  return jax.ffi.ffi_call(build.ROTATE, out)(*rows).reshape(x.shape)
