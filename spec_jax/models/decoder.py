"""The decoder-only transformer all language-model families are cases of.

`build` closes over a `DecoderConfig` (architecture alone) and returns a
`base.Model`. Parameters:

  {"embed": [V, D], "layers": ({...}, ...), "final_norm": [D],
   "head": [D, V] unless tied, "position": [max_length, D] without rope}

with matrices `[in, out]` in each layer; see `_declare` for all of them.
"""

from collections.abc import Sequence
import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from spec_jax import cache as cache_lib, kernels
from spec_jax.architecture import DecoderConfig
from spec_jax.base import Array, Block, Cache, Model, Output, PyTree
from spec_jax.models import common
from spec_jax.rope import rope_angles, rotate


class _Param(NamedTuple):
  """One parameter's shape, logical axes and standard deviation at start."""

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  std: float = 0.0
  mean: float = 0.0


def _declare(c: DecoderConfig) -> PyTree:
  """Declares every parameter; `init` and `axes` both read this."""
  D, F = c.width, c.ffn_width
  heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

  def matrix(rows, columns, *axes):
    return _Param((rows, columns), axes, std=rows**-0.5)

  def norm(name, width=D, layer=c.norm == "layer"):
    axis = "embed" if width == D else None
    one = 0.0 if c.norm == "rms_plus_one" else 1.0
    found = {name: _Param((width,), (axis,), mean=one)}
    if layer:
      found[f"{name}_bias"] = _Param((width,), (axis,))
    return found

  layer = {
    **norm("attn_norm"),
    "wq": matrix(D, heads, "embed", "heads"),
    "wk": matrix(D, kv, "embed", "kv_heads"),
    "wv": matrix(D, kv, "embed", "kv_heads"),
    "wo": matrix(heads, D, "heads", "embed"),
    **norm("ffn_norm"),
    "w_up": matrix(D, F, "embed", "ffn"),
    "w_down": matrix(F, D, "ffn", "embed"),
  }
  if c.gated:
    layer["w_gate"] = matrix(D, F, "embed", "ffn")
  if c.qkv_bias:
    layer["bq"] = _Param((heads,), ("heads",))
    layer["bk"] = _Param((kv,), ("kv_heads",))
    layer["bv"] = _Param((kv,), ("kv_heads",))
  if c.out_bias:
    layer["bo"] = _Param((D,), ("embed",))
    layer["b_up"] = _Param((F,), ("ffn",))
    layer["b_down"] = _Param((D,), ("embed",))
  if c.qk_norm:
    layer |= norm("q_norm", c.head_dim, False)
    layer |= norm("k_norm", c.head_dim, False)
  if c.post_norms:
    layer |= norm("attn_post_norm") | norm("ffn_post_norm")
  params = {
    "embed": _Param((c.vocab_size, D), ("vocab", "embed"), std=D**-0.5),
    "layers": tuple(dict(layer) for _ in range(c.num_layers)),
    **norm("final_norm"),
  }
  if not c.tied:
    of_some = None if c.num_words else "vocab"
    params["head"] = matrix(D, c.num_words or c.vocab_size, "embed", of_some)
  if c.rope is None:
    params["position"] = _Param((c.max_length, D), (None, "embed"), std=D**-0.5)
  return params


def stack_layers(params: PyTree) -> PyTree:
  """Returns params with "layers" as one dict of stacked arrays.

  What `build(..., scan_layers=True)` takes.
  """
  layers = jax.tree.map(lambda *x: jnp.stack(x), *params["layers"])
  return {**params, "layers": layers}


# The tap that is the final normalised state.
FINAL = -1
# Of matrix products, unless asked for otherwise.
PRECISION = "highest"


def build(
  config: DecoderConfig,
  *,
  dtype=jnp.float32,
  cache_dtype=None,
  scan_layers: bool = False,
  remat: bool = False,
  taps: Sequence[int] = (),
  precision: str | None = PRECISION,
) -> Model:
  """Builds a model from its architecture.

  Args:
    config: the architecture.
    dtype: of activations and of the weights `init` makes; norms, softmax,
      angles and logits are float32 in any case.
    cache_dtype: of keys and values; `dtype` if None.
    scan_layers: one traced layer over stacked weights and caches.
    remat: recompute each layer in the backward pass.
    taps: which residual streams `Output.hidden` holds: after that many layers,
      0 = embeddings, `FINAL` = the final normalised state. `()` = that alone.
    precision: of matrix products (`jax.default_matmul_precision`); None leaves
      the device's default. "highest" makes float32 mean float32 on TPU and
      GPU, where one row would else be rounded otherwise than several; it costs
      bfloat16 nothing.

  Returns:
    A `Model`. `unembed` takes normalised hidden states. `init_cache` raises
    ValueError if asked for more slots than `config.max_length`.

  Raises:
    ValueError: if layers to be scanned differ in window, or a tap is not in
      `[0, L]`.
  """
  return _build(
    config,
    jnp.dtype(dtype),
    jnp.dtype(cache_dtype or dtype),
    scan_layers,
    remat,
    tuple(taps),
    precision,
  )


# One model for one architecture: what is compiled for it is shared.
@functools.lru_cache(maxsize=64)
def _build(
  config: DecoderConfig,
  dtype,
  cache_dtype,
  scan_layers: bool,
  remat: bool,
  taps: tuple[int, ...],
  precision: str | None,
) -> Model:
  c = config
  E = c.head_dim
  scale = E**-0.5 if c.attention_scale is None else c.attention_scale
  act = common.ACTIVATIONS[c.activation]
  offset = 1.0 if c.norm == "rms_plus_one" else 0.0
  if scan_layers and len(set(c.windows)) > 1:
    raise ValueError(f"scanned layers differ in window: {c.windows}")
  if any(t != FINAL and not 0 <= t <= c.num_layers for t in taps):
    raise ValueError(f"taps {taps} are not in [0, {c.num_layers}]")
  streams = [t for t in taps if t != FINAL]

  def norm(w, name, x):
    how = {"packed": kernels.is_packed(w)}
    if c.norm == "layer":
      bias = w[f"{name}_bias"]
      return common.layer_norm(x, w[name], bias, c.norm_eps, **how)
    return common.rms_norm(x, w[name], c.norm_eps, offset=offset, **how)

  def layer(w, x_BTD, angles, masks, kv_cache, kv_block, start):
    """Runs one layer; returns its output and the block's keys and values."""
    B, T, _ = x_BTD.shape
    y = norm(w, "attn_norm", x_BTD)
    biases = [w.get(name) for name in ("bq", "bk", "bv")]
    q, k, v = common.linears(y, [w["wq"], w["wk"], w["wv"]], biases)
    q, k, v = (z.reshape(B, T, -1, E) for z in (q, k, v))
    if c.qk_norm:
      q, k = norm(w, "q_norm", q), norm(w, "k_norm", k)
    packed = kernels.is_packed(w)
    if angles is not None:
      turn = kernels.rotate if packed else rotate
      q, k = turn(q, angles), turn(k, angles)
    if kv_block is None:
      y = cache_lib.attend_alone(q, k, v, masks[1], scale=scale)
    else:
      old_k, old_v = kv_cache
      k = cache_lib.write_nodes(kv_block[0], k, start)
      v = cache_lib.write_nodes(kv_block[1], v, start)
      if packed:
        y = kernels.attend(q, old_k, old_v, k, v, *masks[1:], scale=scale)
      else:
        y = cache_lib.attend(q, old_k, old_v, k, v, *masks[:2], scale=scale)
    y = common.linear(y, w["wo"], w.get("bo"))
    x = x_BTD + (norm(w, "attn_post_norm", y) if c.post_norms else y)
    y = norm(w, "ffn_norm", x)
    if c.gated:
      both = [w["w_up"], w["w_gate"]]
      up, gate = common.linears(y, both, [w.get("b_up"), None])
      y = act(gate) * up
    else:
      y = act(common.linear(y, w["w_up"], w.get("b_up")))
    y = common.linear(y, w["w_down"], w.get("b_down"))
    x = x + (norm(w, "ffn_post_norm", y) if c.post_norms else y)
    return x, (None if kv_block is None else (k, v))

  run_layer = jax.checkpoint(layer) if remat else layer

  def angles_of(window, positions_BT):
    local = window is not None and c.rope_local is not None
    rope = c.rope_local if local else c.rope
    return None if rope is None else rope_angles(rope, positions_BT)

  def masks_of(window, positions_BT, cache, block, visible_BTN):
    """Returns what tokens see: masks of cache and block; length, first."""
    mask_block = visible_BTN
    keys = positions_BT if block is None else block.positions
    here = positions_BT[:, :, None]
    first = positions_BT - (window or c.max_length) + 1
    if window is not None:
      mask_block = mask_block & (here - keys[:, None] < window)
    if cache is None:
      return jnp.zeros((1, 1, 1), bool), mask_block, None, None
    slots = cache.k[c.windows.index(window)].shape[-2]
    held = cache_lib.slot_positions(cache.length, slots)[:, None]
    mask_cache = held >= 0
    if window is not None:
      mask_cache = mask_cache & (here - held < window)
    return mask_cache, mask_block, cache.length, first

  def pick(store, i):
    """Returns keys and values of layer `i` of a cache or block, or None."""
    return None if store is None else (store.k[i], store.v[i])

  def run(params, x, positions_BT, cache, block, visible_BTN, start):
    """Runs all layers: output, tapped streams and the new block."""
    kinds = {
      w: (
        angles_of(w, positions_BT),
        masks_of(w, positions_BT, cache, block, visible_BTN),
      )
      for w in dict.fromkeys(c.windows)
    }
    if scan_layers:
      angles, masks = kinds[c.windows[0]]
      return scan(params["layers"], x, angles, masks, cache, block, start)
    saved, keys, values = [x], [], []
    for i, (w, window) in enumerate(
      zip(params["layers"], c.windows, strict=True)
    ):
      angles, masks = kinds[window]
      old, here = pick(cache, i), pick(block, i)
      x, new = run_layer(w, x, angles, masks, old, here, start)
      saved.append(x)
      if new is not None:
        keys.append(new[0])
        values.append(new[1])
    return x, [saved[t] for t in streams], (tuple(keys), tuple(values))

  def scan(layers, x, angles, masks, cache, block, start):
    def body(carry, xs):
      x, saved = carry
      w, kv_cache, kv_block, i = xs
      x, new = run_layer(w, x, angles, masks, kv_cache, kv_block, start)
      saved = [
        jnp.where(i == t, x, s) for t, s in zip(streams, saved, strict=True)
      ]
      return (x, saved), new

    kv = pick(cache, 0), pick(block, 0)
    index = jnp.arange(1, c.num_layers + 1)
    (x, saved), new = lax.scan(
      body, (x, [x for _ in streams]), (layers, *kv, index)
    )
    return x, saved, None if new is None else ((new[0],), (new[1],))

  def embed(params, tokens):
    x = common.embed_rows(params["embed"], tokens).astype(dtype)
    if c.embed_scale != 1.0:
      x = x * jnp.asarray(c.embed_scale, dtype)
    return x

  def unembed(params, hidden):
    with jax.default_matmul_precision(precision):
      if c.tied:
        return common.linear_transposed(hidden, params["embed"])
      logits = common.linear(hidden, params["head"], dtype=jnp.float32)
    if not c.num_words:
      return logits
    widths = [(0, 0)] * (logits.ndim - 1) + [(0, c.vocab_size - c.num_words)]
    return jnp.pad(logits, widths, constant_values=-jnp.inf)

  def apply(
    params: PyTree,
    tokens_BT: Array,
    positions_BT: Array,
    cache: Cache | None = None,
    block: Block | None = None,
    visible_BTN: Array | None = None,
    *,
    start=0,
    logits_at: Array | None = None,
    segment_ids: Array | None = None,
  ) -> Output:
    B, T = tokens_BT.shape
    given = [x is not None for x in (cache, block, visible_BTN)]
    if len(set(given)) > 1:
      raise ValueError(f"cache, block and visible go together; given: {given}")
    if block is None:
      visible_BTN = jnp.tril(jnp.ones((1, T, T), bool))
      if segment_ids is not None:
        same = segment_ids[:, :, None] == segment_ids[:, None]
        visible_BTN = visible_BTN & same
    else:
      if segment_ids is not None:
        raise ValueError("segment_ids need cache=None")
      positions = cache_lib.write_nodes(block.positions, positions_BT, start)
      block = Block(block.k, block.v, positions)
    with jax.default_matmul_precision(precision):
      x = embed(params, tokens_BT)
      if c.rope is None:
        at = common.embed_rows(params["position"], positions_BT)
        x = x + at.astype(dtype)
      x, saved, new = run(
        params, x, positions_BT, cache, block, visible_BTN, start
      )
      final = norm(params, "final_norm", x)
    if block is not None:
      block = Block(new[0], new[1], block.positions)
    shown = dict(zip(streams, saved, strict=True)) | {FINAL: final}
    hidden = jnp.stack([shown[t] for t in taps or (FINAL,)], 2)
    if logits_at is not None:
      if logits_at.shape[1] == 0:
        logits = jnp.zeros((B, 0, c.vocab_size), jnp.float32)
        return Output(logits=logits, hidden=hidden, block=block)
      final = jnp.take_along_axis(final, logits_at[:, :, None], 1)
    return Output(logits=unembed(params, final), hidden=hidden, block=block)

  def init(key):
    declared = _declare(c)
    leaves, tree = jax.tree.flatten(
      declared, is_leaf=lambda x: isinstance(x, _Param)
    )
    keys = jax.random.split(key, len(leaves))
    made = [
      (p.mean + p.std * jax.random.normal(k, p.shape)).astype(dtype)
      for p, k in zip(leaves, keys, strict=True)
    ]
    params = jax.tree.unflatten(tree, made)
    return stack_layers(params) if scan_layers else params

  def axes():
    declared = _declare(c)
    if scan_layers:
      declared["layers"] = {
        name: p._replace(axes=("layers", *p.axes))
        for name, p in declared["layers"][0].items()
      }
    return jax.tree.map(
      lambda p: p.axes, declared, is_leaf=lambda x: isinstance(x, _Param)
    )

  def init_cache(batch, slots):
    if slots > c.max_length:
      raise ValueError(
        f"{slots} slots asked of a model of at most {c.max_length} tokens"
      )
    return cache_lib.make_cache(
      batch,
      slots,
      windows=c.windows,
      num_kv_heads=c.num_kv_heads,
      head_dim=E,
      dtype=cache_dtype or dtype,
      stacked=scan_layers,
    )

  def tap(taps):
    return build(
      config,
      dtype=dtype,
      cache_dtype=cache_dtype,
      scan_layers=scan_layers,
      remat=remat,
      taps=tuple(taps),
      precision=precision,
    )

  return Model(init, axes, init_cache, apply, embed, unembed, c, tap)
