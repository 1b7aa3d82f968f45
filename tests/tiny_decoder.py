"""Tiny decoders of three architectures, with random weights and tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import cache as cache_lib
from spec_jax.models import decoder
from spec_jax.rope import make_rope

PLAIN = decoder.DecoderConfig(
  vocab_size=23,
  width=16,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=6,
  ffn_width=20,
  max_length=40,
  rope=make_rope(6, {"rope_theta": 100.0}),
)
CONFIGS = {
  "plain": PLAIN,
  "local": dataclasses.replace(
    PLAIN,
    windows=(4, None),
    rope_local=make_rope(6, {"rope_theta": 10.0}),
    norm="rms_plus_one",
    qk_norm=True,
    post_norms=True,
    tied=True,
    embed_scale=4.0,
    attention_scale=0.3,
  ),
  "learned": dataclasses.replace(
    PLAIN,
    rope=None,
    norm="layer",
    qkv_bias=True,
    out_bias=True,
    gated=False,
    activation="gelu_new",
  ),
}
# Float32 sums in another order: some 1e-6 of logits near 1.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@functools.cache
def make(name, **options):
  """Builds a model with random weights, norms and biases included."""
  config = CONFIGS[name]
  made = decoder.build(config).init(jax.random.key(3))
  leaves, tree = jax.tree.flatten(made)
  random = np.random.default_rng(4)
  leaves = [x + 0.2 * random.normal(size=x.shape) for x in leaves]
  params = jax.tree.unflatten(tree, [x.astype(jnp.float32) for x in leaves])
  if options.get("scan_layers"):
    params = decoder.stack_layers(params)
  return decoder.build(config, **options), params


def random_tokens(batch, length, seed=0):
  """Returns `[batch, length]` random ids below 23."""
  random = np.random.default_rng(seed)
  return jnp.asarray(random.integers(0, 23, (batch, length)), jnp.int32)


def train(model, params, tokens, **kwargs):
  """Runs the causal forward without a cache."""
  positions = jnp.arange(tokens.shape[1])[None] + 0 * tokens
  return jax.jit(model.apply)(params, tokens, positions, **kwargs)


@functools.partial(jax.jit, static_argnums=0)
def _read_and_commit(model, params, cache, tokens, num):
  B, n = tokens.shape
  positions = cache.length[:, None] + jnp.arange(n)[None]
  visible = jnp.broadcast_to(jnp.tril(jnp.ones((n, n), bool)), (B, n, n))
  block = cache_lib.empty_block(cache, n)
  out = model.apply(params, tokens, positions, cache, block, visible)
  path = jnp.broadcast_to(jnp.arange(n)[None], (B, n))
  return cache_lib.commit(cache, out.block, path, num), out


def read(model, params, cache, tokens, num=None):
  """Reads and commits tokens behind each row's own length."""
  num = [tokens.shape[1]] * tokens.shape[0] if num is None else num
  return _read_and_commit(
    model, params, cache, tokens, jnp.asarray(num, jnp.int32)
  )
