"""Host memory that XLA on CPU takes over without a copy."""

import math

import numpy as np

# Bytes; XLA on CPU copies a buffer that starts elsewhere.
_ALIGNMENT = 64


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  """Returns an uninitialised array, to be filled and then put on a device.

  Args:
    shape: of the array.
    dtype: of its values.
  """
  num_bytes = math.prod(shape) * dtype.itemsize
  raw = np.empty(num_bytes + _ALIGNMENT, np.uint8)
  start = -raw.ctypes.data % _ALIGNMENT
  return raw[start : start + num_bytes].view(dtype).reshape(shape)
