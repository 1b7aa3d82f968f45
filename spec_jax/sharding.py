"""Logical axes to mesh axes, and a step jitted with shardings.

Rows lie on 'data'; heads, feed-forward and vocabulary on 'model'. A head count
that the 'model' axis does not divide is replicated, by rule and not by error:
key/value heads are often fewer than chips.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import numpy as np

from spec_jax.base import Cache, Model, PyTree

# Logical axes that may lie on the mesh axis 'model'.
_ON_MODEL = ("heads", "kv_heads", "ffn", "vocab")


def make_mesh(data: int, model: int, devices=None) -> Mesh:
  """Makes a mesh of `data * model` devices.

  Raises:
    ValueError: if a size is below 1 or there are fewer devices.
  """
  devices = jax.devices() if devices is None else devices
  if data < 1 or model < 1:
    raise ValueError(f"mesh sizes must be at least 1, got {data} x {model}")
  if data * model > len(devices):
    raise ValueError(
      f"a mesh of {data} x {model} needs {data * model} devices, there are "
      f"{len(devices)}"
    )
  grid = np.asarray(devices[: data * model]).reshape(data, model)
  return Mesh(grid, ("data", "model"))


def _on_model(config: Any, size: int) -> frozenset[str]:
  """Returns the logical axes whose count the 'model' axis divides."""
  counts = {
    "heads": getattr(config, "num_heads", None),
    "kv_heads": getattr(config, "num_kv_heads", None),
    "ffn": getattr(config, "ffn_width", None),
    "vocab": config.vocab_size,
  }
  return frozenset(
    name for name in _ON_MODEL if counts[name] and counts[name] % size == 0
  )


def params_shardings(model: Any, mesh: Mesh, *, replicate=False) -> PyTree:
  """Returns a sharding for each parameter of a model.

  Args:
    model: a `Model` or `Heads`, whose `axes()` name each dimension.
    mesh: of axes 'data' and 'model'.
    replicate: keep a whole copy on every device (small drafts).
  """
  split = (
    frozenset() if replicate else _on_model(model.config, mesh.shape["model"])
  )

  def place(names):
    return NamedSharding(
      mesh, P(*("model" if n in split else None for n in names))
    )

  return jax.tree.map(place, model.axes(), is_leaf=_is_names)


def _is_names(x: Any) -> bool:
  return isinstance(x, tuple) and all(
    n is None or isinstance(n, str) for n in x
  )


def state_shardings(
  state: PyTree,
  target: Model,
  mesh: Mesh,
  *,
  draft: Model | None = None,
  replicate_draft: bool = True,
) -> PyTree:
  """Returns a sharding for each leaf of a `SpecState` or `Request`.

  Args:
    state: arrays, or shapes from `jax.eval_shape`.
    target: whose key/value heads decide how its cache lies.
    mesh: of axes 'data' and 'model'.
    draft: the draft model, if the drafter holds one.
    replicate_draft: the draft's cache is whole on each 'model' row of the mesh.
  """
  rows = NamedSharding(mesh, P("data"))

  def cache(c: Cache, model: Model | None, whole: bool) -> Cache:
    heads = None
    if model is not None and not whole:
      split = _on_model(model.config, mesh.shape["model"])
      heads = "model" if "kv_heads" in split else None

    def place(x):
      spec = P("data", heads) if x.ndim == 4 else P(None, "data", heads)
      return NamedSharding(mesh, spec)

    return Cache(  # of shardings
      k=tuple(map(place, c.k)),
      v=tuple(map(place, c.v)),
      length=rows,  # type: ignore[arg-type]
      memory=jax.tree.map(lambda _: rows, c.memory),
    )

  def place(path, x):
    if not isinstance(x, Cache):
      return jax.tree.map(lambda _: rows, x)
    of_draft = any(getattr(p, "name", None) == "draft" for p in path)
    if of_draft:
      return cache(x, draft, replicate_draft)
    return cache(x, target, False)

  return jax.tree_util.tree_map_with_path(
    place, state, is_leaf=lambda x: isinstance(x, Cache)
  )


def pins(mesh: Mesh | None, batch: int) -> dict[str, Callable]:
  """Returns `pin_rows` and `pin_law` for `step.make_step`.

  A law `[B, V]` is spread over rows on both axes where the batch divides: one
  all-to-all per law, after which warping and verifying are local to rows.
  """
  if mesh is None:
    return {}
  everything = mesh.shape["data"] * mesh.shape["model"]
  law = P(("data", "model")) if batch % everything == 0 else P("data")
  constrain = jax.lax.with_sharding_constraint

  def pin_rows(tree):
    rows = NamedSharding(mesh, P("data"))
    return jax.tree.map(lambda x: constrain(x, rows), tree)

  return {
    "pin_rows": pin_rows,
    "pin_law": lambda x: constrain(x, NamedSharding(mesh, law)),
  }


def jit_step(
  step: Callable,
  *,
  shardings: Mapping[str, PyTree] | None = None,
  num_extra: int = 0,
  has_extra_output: bool = True,
) -> Callable:
  """Jits `step(params, state, *extra) -> (state, extra output)`.

  The state is donated. With shardings, parameters and state lie as told and
  everything else is replicated.

  Args:
    step: `spec_step`, `decode` with its step bound, or a refill.
    shardings: `{"params": ..., "state": ...}`, or None for one device.
    num_extra: positional arguments after the state.
    has_extra_output: whether `step` returns a pair.
  """
  if shardings is None:
    return jax.jit(step, donate_argnums=1)
  params, state = shardings["params"], shardings["state"]
  extra = shardings.get("extra", (None,) * num_extra)
  out = (state, None) if has_extra_output else state
  return jax.jit(
    step,
    in_shardings=(params, state, *extra),
    out_shardings=out,
    donate_argnums=1,
  )
