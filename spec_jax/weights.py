"""From tensors in files to a parameter pytree, one tensor at a time.

Memory grows by the parameters and 16 MB, on devices of their own by the
largest parameter alone.
"""

from collections.abc import Callable, Mapping
import itertools
import logging
import math
import re
from types import ModuleType
from typing import Any

import jax
import numpy as np

from spec_jax.aligned import aligned_empty
from spec_jax.base import PyTree
from spec_jax.models import decoder
from spec_jax.safetensors_io import LoadError, Tensor

__all__ = ["assemble_params", "check_tensors", "read_params"]

_log = logging.getLogger(__name__)

# What a parameter may be stored as. Eight-bit floats and integers only mean
# something together with scales, which no family here reads.
_PARAMETER_DTYPES = ("float64", "float32", "float16", "bfloat16")
# Values converted at once: 16 MB of float32.
_CHUNK = 4 << 20


_HEAD = "lm_head.weight"


def check_tensors(
  family: ModuleType, config: Any, tensors: Mapping[str, Tensor]
) -> dict[tuple, tuple]:
  """Checks names, shapes and dtypes before anything is read.

  Args:
    family: module of `spec_jax.models`.
    config: its configuration.
    tensors: tensors by Hugging Face name.

  Returns:
    For each path of the parameters `(Source, Tensor)`.

  Raises:
    LoadError: if a parameter has no tensor, a tensor no parameter, or a shape
      or dtype does not fit.
  """
  sources = family.sources(config)
  expected = _expected_shapes(config)
  if expected.keys() != sources.keys():
    odd = sorted(map(str, expected.keys() ^ sources.keys()))
    raise LoadError(f"parameters without a source, or the reverse: {_few(odd)}")
  tensors = _rename(family, tensors)

  missing = sorted({s.name for s in sources.values()} - tensors.keys())
  if missing == [_HEAD]:
    raise LoadError(
      f"the weights hold no {_HEAD}, and the config does not say"
      " tie_word_embeddings: true"
    )
  if missing:
    raise LoadError(f"the weights lack {_few(missing)}")
  used = {s.name for s in sources.values()} | {_HEAD}
  unused = sorted(
    name
    for name in tensors.keys() - used
    if not any(re.fullmatch(pattern, name) for pattern in family.IGNORED)
  )
  if unused:
    raise LoadError(f"the weights hold tensors nobody reads: {_few(unused)}")

  plan = {}
  for path, source in sources.items():
    tensor = tensors[source.name]
    if tensor.dtype.name not in _PARAMETER_DTYPES:
      raise LoadError(
        f"{source.name} is stored as {tensor.dtype.name}; readable are"
        f" {', '.join(_PARAMETER_DTYPES)}"
      )
    _check_shape(path, source, tensor.shape, expected[path], config)
    plan[path] = (source, tensor)
  _check_parts(plan)
  if ("head",) not in sources and _HEAD in tensors:
    _compare_head(tensors[_HEAD], plan[("embed",)][1])
  return plan


def assemble_params(
  family: ModuleType,
  config: Any,
  tensors: Mapping[str, Tensor],
  *,
  dtype: Any,
  scan_layers: bool = False,
) -> PyTree:
  """Checks and reads every parameter of a model.

  Args:
    family: module of `spec_jax.models`.
    config: its configuration.
    tensors: tensors by Hugging Face name.
    dtype: of the parameters.
    scan_layers: whether to stack the layers' parameters.

  Returns:
    `{"embed", "layers", "final_norm", "head"?, ...}`; "layers" is a tuple of
    dicts, or one dict of stacked arrays.

  Raises:
    LoadError: as `check_tensors`, and before anything is read.
  """
  plan = check_tensors(family, config, tensors)
  return read_params(plan, dtype=dtype, scan_layers=scan_layers)


def read_params(
  plan: Mapping[tuple, tuple],
  *,
  dtype: Any,
  scan_layers: bool = False,
  store: Callable[[tuple, np.ndarray], Any] | None = None,
) -> PyTree:
  """Reads what `check_tensors` returned, the largest parameter first.

  Args:
    plan: per path `(Source, Tensor)`.
    dtype: of the parameters.
    scan_layers: whether to stack the layers' parameters.
    store: `store(path, array)` returns what to hold for a parameter, for
      example packed (`kernels.make_packer`); by default an array on the
      default device.

  Returns:
    As `assemble_params`.

  Raises:
    LoadError: if layers to be stacked differ in shape, or a file changed.
  """
  dtype = np.dtype(dtype)
  groups: dict[tuple, list] = {}
  for path, item in plan.items():
    stacked = scan_layers and path[0] == "layers"
    key = ("layers", *path[2:]) if stacked else path
    groups.setdefault(key, []).append((path, *item))

  params: dict = {}
  order = sorted(groups, key=lambda key: -sum(map(_num_values, groups[key])))
  for key in order:
    parts = sorted(groups[key], key=lambda part: part[0][1:2])
    shapes = {_result_shape(s, t.shape) for _, s, t in parts}
    if len(shapes) > 1:
      raise LoadError(f"layers to be stacked differ in {key}: {shapes}")
    lead = (len(parts),) if scan_layers and key[0] == "layers" else ()
    value = aligned_empty((*lead, *shapes.pop()), dtype)
    for index, (_, source, tensor) in enumerate(parts):
      _fill(value[index] if lead else value, source, tensor)
    if store is None:  # on CPU the array is this memory, nobody else's
      held = jax.device_put(value, may_alias=True)
    else:
      held = store(key, value)
    _put(params, key, jax.block_until_ready(held))
    del value, held
  return _tuples(params)


def _num_values(part) -> int:
  return math.prod(part[2].shape)


def _fill(out: np.ndarray, source, tensor: Tensor) -> None:
  """Reads a tensor into `out`, converting a few rows at a time."""
  rows, columns = _part(source, tensor.shape)
  step = max(1, _CHUNK // max(1, math.prod(tensor.shape[1:])))
  for start in range(rows.start, rows.stop, step):
    stop = min(start + step, rows.stop)
    chunk = tensor.read(start, stop)
    if columns is not None:
      chunk = chunk[:, columns]
    at = slice(start - rows.start, stop - rows.start)
    if source.transpose:
      out[:, at] = chunk.T
    else:
      out[at] = chunk


def _part(source, shape) -> tuple[slice, slice | None]:
  """Returns the rows and columns of the stored tensor a source takes.

  The output axis is the first of a tensor stored `[out, in]`, the last of one
  stored `[in, out]`; a bias has only that one.
  """
  whole = slice(0, shape[0])
  if source.part is None:
    return whole, None
  part = slice(*source.part)
  if source.transpose or len(shape) == 1:
    return part, None
  return whole, part


def _result_shape(source, shape) -> tuple[int, ...]:
  rows, columns = _part(source, shape)
  shape = (rows.stop - rows.start, *shape[1:])
  if columns is not None:
    shape = (*shape[:-1], columns.stop - columns.start)
  return shape[::-1] if source.transpose else shape


def _check_shape(path, source, stored, expected, config) -> None:
  output = 0 if source.transpose or len(stored) == 1 else -1
  fits = source.part is None or source.part[1] <= stored[output]
  if fits and _result_shape(source, stored) == expected:
    return
  if path == ("embed",) and stored[1:] == expected[1:]:
    raise LoadError(
      f"{source.name} has {stored[0]} rows, the config says vocab_size"
      f" {config.vocab_size}"
    )
  wanted = expected[::-1] if source.transpose else expected
  if source.part is not None:
    wanted = f"{wanted} in its part {source.part}"
  raise LoadError(
    f"{source.name} has shape {stored}, the config asks for {wanted}"
  )


def _check_parts(plan: Mapping[tuple, tuple]) -> None:
  """Checks that the parts of each shared tensor cover it."""
  covered: dict[str, int] = {}
  for source, _ in sorted(plan.values(), key=lambda item: item[0].part or ()):
    if source.part and source.part[0] == covered.get(source.name, 0):
      covered[source.name] = source.part[1]
  for source, tensor in plan.values():
    output = 0 if source.transpose or len(tensor.shape) == 1 else -1
    if source.part and covered.get(source.name, 0) != tensor.shape[output]:
      raise LoadError(
        f"{source.name} has shape {tensor.shape}, its parts cover"
        f" {covered.get(source.name, 0)} of {tensor.shape[output]}"
      )


def _compare_head(head: Tensor, embed: Tensor) -> None:
  """Warns if a stored output matrix is not the embedding it is tied to."""
  same = head.shape == embed.shape
  step = max(1, _CHUNK // max(1, math.prod(head.shape[1:])))
  for start in range(0, head.shape[0] if same else 0, step):
    stop = min(start + step, head.shape[0])
    same = same and np.array_equal(
      head.read(start, stop), embed.read(start, stop)
    )
  if not same:
    _log.warning(
      "%s differs from the embedding, but the config ties them; the embedding"
      " is used for both",
      _HEAD,
    )


def _expected_shapes(config) -> dict[tuple, tuple[int, ...]]:
  model = decoder.build(config)
  tree = jax.eval_shape(lambda: model.init(jax.random.key(0)))
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {tuple(map(_key, path)): leaf.shape for path, leaf in leaves}


def _key(entry):
  return entry.key if hasattr(entry, "key") else entry.idx


def _rename(
  family: ModuleType, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
  """Brings a checkpoint's names to those of the family's sources."""
  renamed: dict[str, Tensor] = {}
  for old, tensor in tensors.items():
    name = old
    for pattern, replacement in family.RENAMES:
      name = re.sub(pattern, replacement, name)
    if name in renamed:
      raise LoadError(f"the weights hold {name} under two names")
    renamed[name] = tensor
  return renamed


def _few(names: list[str]) -> str:
  shown = ", ".join(itertools.islice(names, 3))
  return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _put(tree: dict, path: tuple, value) -> None:
  for key in path[:-1]:
    tree = tree.setdefault(key, {})
  tree[path[-1]] = value


def _tuples(tree):
  """Turns dicts keyed 0 .. n - 1 into tuples."""
  if not isinstance(tree, dict):
    return tree
  items = {key: _tuples(value) for key, value in tree.items()}
  if items and all(isinstance(key, int) for key in items):
    return tuple(items[i] for i in range(len(items)))
  return items
