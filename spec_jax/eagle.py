"""EAGLE heads: one decoder layer over the target's features.

Pair `i` is the feature after token `i` and the token `i + 1`; from it and the
pairs before it the head makes its own feature for `i + 1` and the law of token
`i + 2`. Where the target has not read on, the head goes on with its own
features.

Version 1 (also version 2, which drafts another tree): the feature is the
target's final normalised state; `fc` joins it with the token's embedding, the
layer has no norm before its attention, and its output is read by the target's
output matrix. Version 3: the feature is `fc` of three of the target's residual
streams (low, middle, high); embedding and feature are normalised apart and
joined before the layer's attention, and a norm of its own comes before the
output matrix.

Reference: Li et al. 2024 (EAGLE, EAGLE-2), 2025 (EAGLE-3).
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from spec_jax import cache as cache_lib, kernels
from spec_jax.architecture import DecoderConfig
from spec_jax.base import Array, Block, Cache, PyTree
from spec_jax.heads import Heads, Words, words_axes, words_params
from spec_jax.models import common
from spec_jax.models.decoder import PRECISION
from spec_jax.rope import Rope, rope_angles, rotate

VERSIONS = (1, 3)


@dataclasses.dataclass(frozen=True)
class EagleConfig:
  """Sizes of an EAGLE head.

  Attributes:
    version: 1 or 3, how it is made.
    width: `D` of the target.
    num_heads: `H`.
    num_kv_heads: `G`.
    head_dim: `E`.
    ffn_width: `F`.
    max_length: of a text it drafts for, at most the target's.
    rope: of the positions.
    words: what it knows.
    norm_eps: of its norms.
    activation: a key of `common.ACTIVATIONS`.
    taps: the three residual streams of version 3; () of version 1.
    fc_bias: whether `fc` adds a bias.
  """

  version: int
  width: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  ffn_width: int
  max_length: int
  rope: Rope
  words: Words
  norm_eps: float = 1e-6
  activation: str = "silu"
  taps: tuple[int, ...] = ()
  fc_bias: bool = False

  def __post_init__(self):
    if self.version not in VERSIONS:
      raise ValueError(
        f"an EAGLE head is of version 1 or 3, got {self.version}"
      )
    wanted = 3 if self.version == 3 else 0
    if len(self.taps) != wanted:
      raise ValueError(
        f"version {self.version} looks at {wanted} layers, got {self.taps}"
      )

  @property
  def vocab_size(self) -> int:
    """`V` of the target, which is what is proposed."""
    return self.words.target_size

  @property
  def feature_width(self) -> int:
    """`A * D` of the features the target gives."""
    return self.width * max(1, len(self.taps))


def default_taps(num_layers: int) -> tuple[int, int, int]:
  """Returns the streams that version 3 looks at unless told otherwise.

  After layers 2, `L // 2` and `L - 3` as the published code counts, from 0:
  its hidden state of index `i` is the stream that enters layer `i`.

  Raises:
    ValueError: if the target has fewer than 6 layers, so that they coincide.
  """
  found = (2, num_layers // 2, num_layers - 3)
  if not 0 < found[0] < found[1] < found[2]:
    raise ValueError(
      f"a target of {num_layers} layers has no three to look at by default: "
      "name them (taps)"
    )
  return found


def config_of(
  target: DecoderConfig,
  version: int,
  words: Words,
  *,
  taps: tuple[int, ...] = (),
  ffn_width: int = 0,
  fc_bias: bool = False,
  max_length: int = 0,
) -> EagleConfig:
  """Returns a head as wide as its target.

  Args:
    target: the target's architecture.
    version: 1 or 3.
    words: what it knows.
    taps: of version 3; () = `default_taps`.
    ffn_width: `F`; 0 = the target's.
    fc_bias: see `EagleConfig`.
    max_length: of the head's text; 0 = the target's.

  Raises:
    ValueError: if the target has no rotary positions or norms of another kind.
  """
  if target.rope is None or target.norm != "rms":
    raise ValueError(
      "an EAGLE head needs a target with rotary positions and RMS norms"
    )
  if version == 3 and not taps:
    taps = default_taps(target.num_layers)
  return EagleConfig(
    version=version,
    width=target.width,
    num_heads=target.num_heads,
    num_kv_heads=target.num_kv_heads,
    head_dim=target.head_dim,
    ffn_width=ffn_width or target.ffn_width,
    max_length=max_length or target.max_length,
    rope=target.rope,
    words=words,
    norm_eps=target.norm_eps,
    activation=target.activation,
    taps=tuple(taps),
    fc_bias=fc_bias,
  )


class Projected(NamedTuple):
  """What a layer makes of its input before attention.

  Attributes:
    residual: `[B, T, D]`.
    q: `[B, T, H, E]`, rotated.
    k: `[B, T, G, E]`, rotated.
    v: `[B, T, G, E]`.
  """

  residual: Array
  q: Array
  k: Array
  v: Array


class Layer(NamedTuple):
  """The layer in pieces, for whoever attends otherwise than over a cache.

  Attributes:
    fuse: `fuse(params, features [..., A * D]) -> [..., D]`.
    project: `project(params, embeds, features, positions) -> Projected`.
    finish: `finish(params, residual, attended) -> (own feature, state from
      which `Words.logits` reads)`, `[B, T, D]` each.
    scale: of the scores.
  """

  fuse: Callable[..., Array]
  project: Callable[..., Projected]
  finish: Callable[..., tuple[Array, Array]]
  scale: float


def make_layer(config: EagleConfig, precision: str | None = PRECISION) -> Layer:
  """Makes the pieces of a head's forward pass."""
  c = config
  E = c.head_dim
  act = common.ACTIVATIONS[c.activation]

  def norm(w, name, x):
    how = {"packed": kernels.is_packed(w)}
    return common.rms_norm(x, w[name], c.norm_eps, offset=0.0, **how)

  def fuse(params, features):
    if c.version == 1:
      return features
    with jax.default_matmul_precision(precision):
      return common.linear(features, params["fc"]["w"], params["fc"].get("b"))

  def project(params, embeds, features, positions) -> Projected:
    (w,) = params["layers"]
    B, T, _ = embeds.shape
    with jax.default_matmul_precision(precision):
      if c.version == 1:
        both = jnp.concatenate([embeds, features], -1)
        x = common.linear(both, params["fc"]["w"], params["fc"].get("b"))
        residual = x
      else:
        parts = norm(w, "embed_norm", embeds), norm(w, "hidden_norm", features)
        x, residual = jnp.concatenate(parts, -1), features
      q, k, v = common.linears(x, [w["wq"], w["wk"], w["wv"]])
    q, k, v = (z.reshape(B, T, -1, E) for z in (q, k, v))
    angles = rope_angles(c.rope, positions)
    turn = kernels.rotate if kernels.is_packed(w) else rotate
    return Projected(residual, turn(q, angles), turn(k, angles), v)

  def finish(params, residual, attended):
    (w,) = params["layers"]
    with jax.default_matmul_precision(precision):
      x = residual + common.linear(attended, w["wo"])
      y = norm(w, "ffn_norm", x)
      up, gate = common.linears(y, [w["w_up"], w["w_gate"]])
      x = x + common.linear(act(gate) * up, w["w_down"])
    state = x if c.version == 1 else norm(params, "final_norm", x)
    return x, state

  return Layer(fuse, project, finish, E**-0.5)


class EagleOutput(NamedTuple):
  """What a pass over pairs returns.

  Attributes:
    feature: `[B, T, D]`, the head's own features.
    state: `[B, T, D]`, from which `Words.logits` reads.
    block: the block with the `T` pairs written.
  """

  feature: Array
  state: Array
  block: Block


@functools.lru_cache(maxsize=16)
def build(
  config: EagleConfig, *, dtype=jnp.float32, precision: str | None = PRECISION
) -> Heads:
  """Builds an EAGLE head.

  Parameters: `{"fc": {"w": [in, D], "b": [D]}, "layers": ({...},),
  "final_norm": [D] of version 3, "head": ..., "ids": ...}`, the last two if
  `words` has them.

  `apply(params, embeds, features, positions, cache, block, visible, start) ->
  EagleOutput`, over fused or own features `[B, T, D]`; as `Model.apply`, the
  pairs become nodes `start ..` of the block.

  Args:
    config: the sizes.
    dtype: of parameters, keys and values.
    precision: of products, see `decoder.build`.
  """
  c = config
  D, F = c.width, c.ffn_width
  heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
  joined = D if c.version == 1 else 2 * D
  layer = make_layer(c, precision)
  shapes: dict = {
    "wq": ((joined, heads), ("embed", "heads")),
    "wk": ((joined, kv), ("embed", "kv_heads")),
    "wv": ((joined, kv), ("embed", "kv_heads")),
    "wo": ((heads, D), ("heads", "embed")),
    "ffn_norm": ((D,), ("embed",)),
    "w_up": ((D, F), ("embed", "ffn")),
    "w_gate": ((D, F), ("embed", "ffn")),
    "w_down": ((F, D), ("ffn", "embed")),
  }
  if c.version == 3:
    shapes |= {
      "embed_norm": ((D,), ("embed",)),
      "hidden_norm": ((D,), ("embed",)),
    }
  fan_in = 2 * D if c.version == 1 else c.feature_width
  whole: dict = {"fc": {"w": ((fan_in, D), (None, "embed"))}}
  if c.fc_bias:
    whole["fc"]["b"] = ((D,), ("embed",))
  whole["layers"] = (shapes,)
  if c.version == 3:
    whole["final_norm"] = ((D,), ("embed",))

  def is_shape(x):
    return isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], tuple)

  def init(key):
    leaves, structure = jax.tree.flatten(whole, is_leaf=is_shape)
    keys = jax.random.split(key, len(leaves))

    def make(key, shape):
      if len(shape) == 1:
        return jnp.ones(shape, dtype)
      return (shape[0] ** -0.5 * jax.random.normal(key, shape)).astype(dtype)

    made = [make(k, shape) for k, (shape, _) in zip(keys, leaves, strict=True)]
    params = jax.tree.unflatten(structure, made)
    if c.fc_bias:
      params["fc"]["b"] = jnp.zeros_like(params["fc"]["b"])
    return {**params, **words_params(c.words, D, dtype)}

  def axes():
    named = jax.tree.map(lambda x: x[1], whole, is_leaf=is_shape)
    return {**named, **words_axes(c.words)}

  def apply(
    params: PyTree,
    embeds: Array,
    features: Array,
    positions: Array,
    cache: Cache,
    block: Block,
    visible: Array,
    start=0,
  ) -> EagleOutput:
    at = cache_lib.write_nodes(block.positions, positions, start)
    made = layer.project(params, embeds, features, positions)
    k = cache_lib.write_nodes(block.k[0], made.k, start)
    v = cache_lib.write_nodes(block.v[0], made.v, start)
    old = cache.k[0], cache.v[0]
    if kernels.is_packed(params["layers"]):
      first = jnp.full_like(positions, -c.max_length)
      y = kernels.attend(
        made.q, *old, k, v, visible, cache.length, first, scale=layer.scale
      )
    else:
      held = cache_lib.slot_positions(cache.length, old[0].shape[-2])
      with jax.default_matmul_precision(precision):
        y = cache_lib.attend(
          made.q, *old, k, v, held[:, None] >= 0, visible, scale=layer.scale
        )
    feature, state = layer.finish(params, made.residual, y)
    return EagleOutput(feature, state, Block((k,), (v,), at))

  return Heads("eagle", init, axes, apply, config, dtype)


def init_cache(heads: Heads, batch: int, slots: int) -> Cache:
  """Returns an empty cache of a head."""
  c = heads.config
  return cache_lib.make_cache(
    batch,
    slots,
    windows=(None,),
    num_kv_heads=c.num_kv_heads,
    head_dim=c.head_dim,
    dtype=heads.dtype,
  )
