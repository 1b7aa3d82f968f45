"""CPU kernels of our own, where XLA's cost too much or change order."""

from spec_jax.kernels.attention import attend
from spec_jax.kernels.build import KernelError, choose, why_not
from spec_jax.kernels.rows import rotate, row_sums
from spec_jax.kernels.skinny_matmul import (
  WEIGHTS,
  Packed,
  is_packed,
  make_packer,
  matmul,
  matmuls,
  pack,
  pack_params,
  round_matrix,
  take_columns,
  unpack,
)

__all__ = [
  "WEIGHTS",
  "KernelError",
  "Packed",
  "attend",
  "choose",
  "is_packed",
  "make_packer",
  "matmul",
  "matmuls",
  "pack",
  "pack_params",
  "rotate",
  "round_matrix",
  "row_sums",
  "take_columns",
  "unpack",
  "why_not",
]
