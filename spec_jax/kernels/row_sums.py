"""Sums of rows that do not depend on how many rows there are."""

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
  if (reason := build.why_not()) is not None:
    raise build.KernelError(f"the CPU kernel was asked for, but {reason}")
  rows = x.reshape(-1, x.shape[-1])
  out = jax.ShapeDtypeStruct((rows.shape[0],), jnp.float32)
  return jax.ffi.ffi_call(build.ROW_SUMS, out)(rows).reshape(*x.shape[:-1], 1)
