"""Rotary positions: frequencies, their scalings, and the rotation itself."""

from collections.abc import Mapping
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from spec_jax.base import Array


class Rope(NamedTuple):
  """Rotary positions of one kind of layer.

  Attributes:
    frequencies: `E / 2` angles per position, float32 values.
    factor: multiplies cosine and sine (yarn's attention factor).
  """

  frequencies: tuple[float, ...]
  factor: float = 1.0


def rope_angles(rope: Rope, positions_BT: Array) -> tuple[Array, Array]:
  """Returns cosine and sine, each `[B, T, 1, E / 2]` float32."""
  frequencies = jnp.array(rope.frequencies, jnp.float32)[None, None, None]
  angles = positions_BT.astype(jnp.float32)[..., None, None] * frequencies
  return jnp.cos(angles) * rope.factor, jnp.sin(angles) * rope.factor


def rotate(x: Array, angles: tuple[Array, Array]) -> Array:
  """Rotates pairs `(i, i + E / 2)` of `x: [B, T, heads, E]`."""
  cos, sin = angles
  a, b = jnp.split(x.astype(jnp.float32), 2, -1)
  return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), -1).astype(
    x.dtype
  )


_NEEDED = {
  "default": (),
  "linear": ("factor",),
  "dynamic": ("factor",),
  "llama3": (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
  ),
  "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL = {
  "yarn": (
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
  ),
}


def make_rope(head_dim: int, parameters: Mapping[str, Any]) -> Rope:
  """Computes frequencies as the transformers library does, in float32.

  "dynamic" changes nothing up to `max_position_embeddings`; models are built
  with that as `max_length` and refuse a longer cache.

  Args:
    head_dim: `E`, even.
    parameters: `rope_theta`, `rope_type` (or `type`; default "default") and
      the fields of that type.

  Raises:
    ValueError: if `rope_theta` or a field of the type is missing, or a type
      or field is unknown.
  """
  given = {k: v for k, v in parameters.items() if v is not None}
  kinds = {given.pop(k) for k in ("rope_type", "type") if k in given}
  if len(kinds) > 1:
    raise ValueError(f"rope type is given twice: {sorted(kinds)}")
  kind = kinds.pop() if kinds else "default"
  if kind not in _NEEDED:
    raise ValueError(
      f"rope type {kind!r} is not supported; known: {sorted(_NEEDED)}"
    )
  if "rope_theta" not in given:
    raise ValueError(f"rope_theta is missing in {dict(parameters)}")
  if given.pop("partial_rotary_factor", 1.0) != 1.0:
    raise ValueError(
      "partial_rotary_factor must be 1, got "
      f"{parameters['partial_rotary_factor']}"
    )
  theta = given.pop("rope_theta")
  missing = [k for k in _NEEDED[kind] if k not in given]
  unknown = set(given) - set(_NEEDED[kind]) - set(_OPTIONAL.get(kind, ()))
  if missing or unknown:
    raise ValueError(
      f"rope type {kind!r}: missing {missing}, unknown {unknown}"
    )
  if head_dim % 2:
    raise ValueError(f"rope needs an even head_dim, got {head_dim}")
  f32 = np.float32
  exponents = np.arange(0, head_dim, 2, dtype=f32) / f32(head_dim)
  plain = f32(1) / f32(theta) ** exponents
  factor = 1.0
  if kind == "linear":
    plain = plain / f32(given["factor"])
  elif kind == "llama3":
    plain = _llama3(plain, **given)
  elif kind == "yarn":
    plain, factor = _yarn(plain, theta, head_dim, **given)
  return Rope(tuple(float(x) for x in plain.astype(f32)), float(factor))


def _llama3(
  plain,
  factor,
  low_freq_factor,
  high_freq_factor,
  original_max_position_embeddings,
):
  """Keeps short waves, slows long ones, interpolates between."""
  turns = original_max_position_embeddings * plain / (2 * math.pi)
  span = high_freq_factor - low_freq_factor
  smooth = np.clip((turns - low_freq_factor) / span, 0, 1)
  return (1 - smooth) * plain / factor + smooth * plain


def _yarn(
  plain,
  theta,
  head_dim,
  factor,
  original_max_position_embeddings,
  attention_factor=None,
  beta_fast=32,
  beta_slow=1,
  mscale=None,
  mscale_all_dim=None,
  truncate=True,
):
  """Interpolates dimensions that turn less than `beta_slow` times.

  Reference: Peng et al. 2023, "YaRN", section 3.2 and equation 22.
  """

  def dimension(turns):
    ratio = original_max_position_embeddings / (turns * 2 * math.pi)
    return head_dim * math.log(ratio) / (2 * math.log(theta))

  low, high = dimension(beta_fast), dimension(beta_slow)
  if truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, head_dim - 1)
  if low == high:
    high += 0.001  # transformers' guard against dividing by zero
  ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)
  scaled = plain / factor * ramp + plain * (1 - ramp)

  def magnitude(m):
    return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0

  if attention_factor is None:
    attention_factor = magnitude(1.0)
    if mscale and mscale_all_dim:
      attention_factor = magnitude(mscale) / magnitude(mscale_all_dim)
  return scaled, attention_factor
