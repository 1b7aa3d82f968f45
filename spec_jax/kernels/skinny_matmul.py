"""Weights packed for the CPU kernel, and products with them.

Reading 8 tokens then costs about what reading one does, because the weights
come from memory once; and row r of a product has the same bits whatever the
number of rows, so a pass over k tokens gives the logits of k passes over one.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.aligned import aligned_empty
from spec_jax.base import Array, PyTree
from spec_jax.kernels import build

__all__ = [
  "WEIGHTS",
  "Packed",
  "is_packed",
  "make_packer",
  "matmul",
  "matmuls",
  "pack",
  "pack_params",
  "round_matrix",
  "take_columns",
  "unpack",
]

# What weights may be stored as; sums are float32 in any case.
WEIGHTS = ("float32", "bfloat16")

# Columns of a panel, as in the C++ source.
_PANEL = 16
# Parameters whose matrices products are made with, by the first name.
_PRODUCTS = ("layers", "heads", "fc", "head", "embed")
# Values packed at once: 16 MB of float32.
_CHUNK = 4 << 20


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["panels"],
  meta_fields=["columns"],
)
@dataclasses.dataclass(frozen=True)
class Packed:
  """A matrix `[K, N]` as the kernel reads it.

  Attributes:
    panels: `[ceil(N / 16), K, 16]` float32 or bfloat16; panel `p` holds
      columns `16 p ..`, zeros past the last.
    columns: `N`.
  """

  panels: Array
  columns: int

  @property
  def shape(self) -> tuple[int, int]:
    """`(K, N)`."""
    return self.panels.shape[1], self.columns

  @property
  def ndim(self) -> int:
    """2: it stands for a matrix."""
    return 2

  @property
  def dtype(self) -> np.dtype:
    """float32: of products with it, and of its columns when taken."""
    return np.dtype(np.float32)


def pack(
  matrix, *, transpose: bool = False, weights: str = "float32"
) -> Packed:
  """Packs a matrix.

  Args:
    matrix: `[K, N]`, or `[N, K]` if transposed; a host array or one on a CPU.
    transpose: pack the transposed matrix, as for an embedding `[V, D]` that
      also gives the logits.
    weights: what to store, one of `WEIGHTS`. bfloat16 rounds to nearest even.

  Raises:
    ValueError: if it is no matrix or the storage is unknown.
  """
  dtype = _storage(weights)
  matrix = np.asarray(matrix)
  if matrix.ndim != 2:
    raise ValueError(f"a matrix has 2 axes, not {matrix.ndim}")
  if transpose:
    matrix = matrix.T
  K, N = matrix.shape
  full = N // _PANEL
  panels = aligned_empty((-(-N // _PANEL), K, _PANEL), dtype)
  step = max(1, _CHUNK // (_PANEL * max(1, K)))
  for p in range(0, full, step):
    end = min(p + step, full)
    part = matrix[:, p * _PANEL : end * _PANEL].reshape(K, end - p, _PANEL)
    panels[p:end] = part.transpose(1, 0, 2)
  if N % _PANEL:
    panels[full] = 0
    panels[full, :, : N % _PANEL] = matrix[:, full * _PANEL :]
  # On CPU the array is this memory, which nobody else holds.
  array = jax.device_put(panels, may_alias=True)
  return Packed(array.block_until_ready(), N)


def is_packed(params: PyTree) -> bool:
  """Tells whether any weight of a pytree is packed."""
  leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Packed))
  return any(isinstance(x, Packed) for x in leaves)


def unpack(weight: Packed) -> Array:
  """Returns the matrix `[K, N]` float32 that a packed one stands for."""
  K, N = weight.shape
  full = jnp.swapaxes(weight.panels, 0, 1).reshape(K, -1)
  return full[:, :N].astype(jnp.float32)


def matmul(
  x: Array, weight: Packed, bias: Array | None = None, *, threads: int = 0
) -> Array:
  """Multiplies rows by a packed matrix.

  Args:
    x: `[R, K]`, any number of rows; counted as float32.
    weight: `[K, N]` packed.
    bias: `[N]` or None, added to the sums.
    threads: at most so many; 0 = as many as the process may use. Changes no
      bit of the result.

  Returns:
    `[R, N]` float32.

  Raises:
    ValueError: see `matmuls`.
  """
  return matmuls(x, [weight], [bias], threads=threads)[0]


def matmuls(
  x: Array,
  weights: Sequence[Packed],
  biases: Sequence[Array | None] | None = None,
  *,
  threads: int = 0,
) -> list[Array]:
  """Multiplies rows by several packed matrices in one call.

  Args:
    x: see `matmul`.
    weights: packed matrices of `K` rows each.
    biases: one or None for each, or None.
    threads: see `matmul`.

  Returns:
    One `[R, N]` float32 for each matrix.

  Raises:
    ValueError: if shapes do not fit, or the kernel is not to be had. Products
      cannot be differentiated or mapped over; JAX says so.
  """
  build.require()
  biases = [None] * len(weights) if biases is None else biases
  operands = [x.astype(jnp.float32)]
  for weight, bias in zip(weights, biases, strict=True):
    if x.ndim != 2 or x.shape[1] != weight.shape[0]:
      raise ValueError(f"x {x.shape} does not fit a matrix {weight.shape}")
    if bias is None:
      bias = jnp.zeros((0,), jnp.float32)
    elif bias.shape != (weight.columns,):
      raise ValueError(f"bias {bias.shape} for a matrix {weight.shape}")
    operands += [weight.panels, bias.astype(jnp.float32)]
  results = [
    jax.ShapeDtypeStruct((x.shape[0], weight.columns), jnp.float32)
    for weight in weights
  ]
  call = jax.ffi.ffi_call(build.TARGET, results)
  return list(call(*operands, threads=np.int64(threads)))


def take_columns(weight: Packed, index: Array) -> Array:
  """Returns columns of a packed matrix as rows: of an embedding, its rows.

  Args:
    weight: `[K, N]` packed.
    index: `[...]` integers; one out of range is clipped.

  Returns:
    `[..., K]` float32.
  """
  index = jnp.clip(index, 0, weight.columns - 1)
  rows = weight.panels[index // _PANEL, :, index % _PANEL]
  return rows.astype(jnp.float32)


# --- parameters of a model --------------------------------------------------


def make_packer(weights: str = "float32") -> Callable[[tuple, Any], Any]:
  """Makes `store(path, array)`, which packs a parameter if it is a matrix.

  Matrices of layers, the output matrix and the embedding are packed (the
  embedding transposed; tied or not, its rows are read from there). Learned
  positions, norms and biases are put on the device as they are.

  Args:
    weights: see `pack`.

  Returns:
    A function of a parameter's path, for example `("layers", 3, "wq")`, and
    its host array, which it may overwrite; it returns what `params` is to hold
    there.
  """
  _storage(weights)

  def store(path: tuple, array) -> Any:
    ours = isinstance(array, np.ndarray) and array.dtype == np.float32
    if path[0] == "embed" and weights == "float32" and ours:
      if array.shape[0] % _PANEL == 0:
        return _pack_in_place(array)
    if _is_product(path, array):
      return pack(array, transpose=path[0] == "embed", weights=weights)
    return jax.device_put(array, may_alias=True)

  return store


def round_matrix(path: tuple, array, *, weights: str) -> Array:
  """Puts a parameter on the device, with the values `make_packer` would store.

  Args:
    path: see `make_packer`.
    array: see `make_packer`.
    weights: see `pack`.

  Returns:
    `array`'s shape and dtype; a matrix is rounded.
  """
  if _is_product(path, array):
    array = np.asarray(array).astype(_storage(weights)).astype(array.dtype)
  return jax.device_put(array, may_alias=True)


def _is_product(path: tuple, array) -> bool:
  """Tells whether a parameter is a matrix that products are made with."""
  return array.ndim == 2 and path[0] in _PRODUCTS


def _pack_in_place(table: np.ndarray) -> Packed:
  """Packs the transpose of `[V, D]` over itself; `V` fills whole panels.

  An embedding is often the largest parameter: a second copy of it would be
  the peak of loading.
  """
  V, D = table.shape
  panels = table.reshape(V // _PANEL, D, _PANEL)
  for panel in panels:  # 16 rows of the table, which its panel replaces
    panel[:] = panel.reshape(_PANEL, D).T.copy()
  array = jax.device_put(panels, may_alias=True)
  return Packed(array.block_until_ready(), V)


def pack_params(params: PyTree, *, weights: str = "float32") -> PyTree:
  """Packs the parameters of a decoder, or of heads, for the kernel.

  Both sets exist until the caller drops the old one; a loader that must not
  hold both packs each parameter as it is read, with `make_packer`.

  Args:
    params: as `decoder.build`'s model takes them, layers not stacked.
    weights: see `pack`.

  Returns:
    The same tree with `Packed` where a matrix was.

  Raises:
    ValueError: if layers are stacked, for a scan would copy each matrix.
  """
  if isinstance(params.get("layers"), dict):
    raise ValueError("stacked layers cannot be packed; load without a scan")
  store = make_packer(weights)

  def visit(path, leaf):
    keys = (p.key if hasattr(p, "key") else p.idx for p in path)
    return store(tuple(keys), leaf)

  return jax.tree_util.tree_map_with_path(visit, params)


def _storage(weights: str) -> np.dtype:
  if weights not in WEIGHTS:
    raise ValueError(f"weights must be one of {WEIGHTS}, got {weights!r}")
  return jnp.dtype(weights)
