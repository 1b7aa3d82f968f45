"""Families against golden logits of the transformers library.

The files are written by golden/make_logits.py, in float32, with weights that
make logits of standard deviation 3.
"""

import json
from pathlib import Path
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import cache as cache_lib, models
from spec_jax.models import decoder

_FILES = sorted((Path(__file__).parent / "golden").glob("logits_*.npz"))
_NAMES = [f.stem.removeprefix("logits_") for f in _FILES]
_ROPE = [n for n in _NAMES if n != "gpt2"]
_LONG = [n for n in _NAMES if re.match("llama_[^t]|mistral|gemma3", n)]

# Both sides sum in float32, in another order: 1e-6 of the largest term a
# layer, some 10 layers of sums, terms up to 10 times the logits.
_TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def _load(name):
  """Returns the family's module, config.json, arrays and configuration."""
  with np.load(_FILES[_NAMES.index(name)]) as stored:
    arrays = dict(stored)
  hf = json.loads(str(arrays.pop("config")))
  family = models.load(hf["model_type"])
  return family, hf, arrays, family.from_hf(hf)


def _params(family, config, arrays):
  """Assembles parameters from the tensors that `sources` names."""
  params = {"layers": tuple({} for _ in range(config.num_layers))}
  for path, source in family.sources(config).items():
    x = arrays[f"weight:{source.name}"].astype(np.float32)
    x = x.T if source.transpose else x
    if source.part is not None:
      x = x[..., slice(*source.part)]
    at = params
    for step in path[:-1]:
      at = at[step]
    at[path[-1]] = jnp.asarray(x)
  return params


def _model(name, **options):
  family, _, arrays, config = _load(name)
  params = _params(family, config, arrays)
  return decoder.build(config, **options), params, arrays


def _positions(tokens):
  return jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)


def _in_pieces(model, params, tokens, pieces):
  """Reads tokens piece by piece through the cache; returns all logits."""
  B, T = tokens.shape
  assert sum(pieces) == T

  @jax.jit
  def read(params, cache, tokens):
    n = tokens.shape[1]
    positions = cache.length[:, None] + jnp.arange(n)[None]
    visible = jnp.broadcast_to(jnp.tril(jnp.ones((n, n), bool)), (B, n, n))
    block = cache_lib.empty_block(cache, n)
    out = model.apply(params, tokens, positions, cache, block, visible)
    path = jnp.broadcast_to(jnp.arange(n)[None], (B, n))
    num = jnp.full((B,), n, jnp.int32)
    return cache_lib.commit(cache, out.block, path, num), out.logits

  cache, logits, start = model.init_cache(B, T), [], 0
  for n in pieces:
    cache, new = read(params, cache, tokens[:, start : start + n])
    logits.append(np.asarray(new))
    start += n
  return np.concatenate(logits, 1)


@pytest.mark.parametrize("name", _NAMES)
def test_logits_in_one_pass(name):
  """A forward without a cache gives the golden logits."""
  model, params, arrays = _model(name)
  tokens = jnp.asarray(arrays["tokens"], jnp.int32)
  out = jax.jit(model.apply)(params, tokens, _positions(tokens))
  np.testing.assert_allclose(out.logits, arrays["logits"], **_TOLERANCE)


# One a family, and windows in some layers; scaled rope follows below.
@pytest.mark.parametrize(
  "name",
  ["llama", "mistral", "qwen2", "qwen2_window", "qwen3", "gemma3", "gpt2"],
)
def test_logits_in_pieces(name):
  """Reading 5 tokens, then one by one, then 4 gives the golden logits."""
  model, params, arrays = _model(name)
  tokens = jnp.asarray(arrays["tokens"], jnp.int32)
  pieces = [5] + [1] * 19 + [4]
  logits = _in_pieces(model, params, tokens, pieces)
  np.testing.assert_allclose(logits, arrays["logits"], **_TOLERANCE)


@pytest.mark.parametrize("name", _LONG)
def test_logits_past_3000_in_pieces(name):
  """Positions 3,095 to 3,099 after a prompt read in chunks are golden."""
  model, params, arrays = _model(name)
  tokens = jnp.asarray(arrays["long_tokens"], jnp.int32)
  pieces = [620] * 5
  logits = _in_pieces(model, params, tokens, pieces)
  np.testing.assert_allclose(
    logits[0, -5:], arrays["long_logits"], **_TOLERANCE
  )


@pytest.mark.parametrize("name", ["llama_yarn", "gemma3"])
def test_logits_past_3000_in_one_pass(name):
  """One pass over 3,100 tokens gives the same golden logits."""
  model, params, arrays = _model(name)
  tokens = jnp.asarray(arrays["long_tokens"], jnp.int32)
  last = jnp.arange(3095, 3100)[None]
  out = jax.jit(model.apply)(params, tokens, _positions(tokens), logits_at=last)
  np.testing.assert_allclose(out.logits[0], arrays["long_logits"], **_TOLERANCE)


@pytest.mark.parametrize("name", _NAMES)
def test_sources_cover_every_parameter_and_tensor(name):
  """Each parameter has a source of its shape; each tensor is read whole."""
  family, _, arrays, config = _load(name)
  made = jax.eval_shape(decoder.build(config).init, jax.random.key(0))
  params = _params(family, config, arrays)
  assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, made)
  read: dict[str, int] = {}
  for source in family.sources(config).values():
    shape = arrays[f"weight:{source.name}"].shape
    start, stop = source.part or (0, shape[-1])
    size = stop - start
    read[source.name] = read.get(source.name, 0) + size
  stored = {
    k.removeprefix("weight:"): v.shape[-1]
    for k, v in arrays.items()
    if k.startswith("weight:")
  }
  assert read == stored


def _old_style(hf):
  """Rewrites config.json as transformers 4 wrote it."""
  old = dict(hf)
  old.pop("_sliding_window_pattern", None)
  rope = old.pop("rope_parameters")
  if "sliding_attention" in rope:
    kinds = old.pop("layer_types")
    # Gemma 3 repeats its pattern; the golden model has every third global.
    assert [k == "full_attention" for k in kinds] == [False, False, True, False]
    old["sliding_window_pattern"] = 3
    old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    rope = rope["full_attention"]
  else:
    old.pop("layer_types", None)
  rope = dict(rope)
  old["rope_theta"] = rope.pop("rope_theta")
  kind = rope.pop("rope_type")
  old["rope_scaling"] = {"type": kind, **rope} if rope else None
  return old


@pytest.mark.parametrize("name", _ROPE)
def test_old_and_new_rope_fields_are_equal(name):
  """`rope_theta` and `rope_scaling` give what `rope_parameters` gives."""
  family, hf, _, config = _load(name)
  old = _old_style(hf)
  assert "rope_parameters" not in old
  assert family.from_hf(old) == config
  if old["rope_scaling"]:
    kind = old["rope_scaling"].pop("type")
    old["rope_scaling"]["rope_type"] = kind
    assert family.from_hf(old) == config


@pytest.mark.parametrize("name", _ROPE)
def test_missing_theta_is_refused(name):
  """No family invents `rope_theta`."""
  family, hf, _, _ = _load(name)
  old = _old_style(hf)
  del old["rope_theta"]
  with pytest.raises(ValueError, match="rope_theta"):
    family.from_hf(old)


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize(
  "field",
  [
    {"surprise": 1},
    {"attention_bias": True},
    {"final_logit_softcapping": 30.0},
    {"quantization_config": {"bits": 4}},
    {"model_type": "other"},
  ],
)
def test_unknown_fields_are_refused(name, field):
  """A field nobody reads is an error that names it and its value."""
  family, hf, _, _ = _load(name)
  (key, value), *_ = field.items()
  with pytest.raises(ValueError, match=key) as error:
    family.from_hf(hf | field)
  assert repr(value) in str(error.value)


@pytest.mark.parametrize(
  ("name", "field"),
  [
    ("llama", {"mlp_bias": True}),
    ("llama", {"sliding_window": 8}),
    ("llama", {"hidden_act": "relu"}),
    ("llama", {"rope_parameters": {"rope_type": "longrope"}}),
    ("llama", {"rope_theta": 5.0}),
    ("llama_dynamic", {"partial_rotary_factor": 0.5}),
    ("mistral", {"layer_types": ["full_attention"] * 3}),
    ("qwen2_window", {"layer_types": ["sliding"] * 3}),
    ("qwen2", {"layer_types": ["sliding_attention"] * 3}),
    ("qwen3", {"head_dim": None}),
    ("gemma3", {"sliding_window": None}),
    ("gemma3", {"use_bidirectional_attention": True}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("gpt2", {"n_ctx": 32}),
  ],
)
def test_unsupported_values_are_refused(name, field):
  """A value that would change the logits is an error that names the field."""
  family, hf, _, _ = _load(name)
  (key, _), *_ = field.items()
  match = "rope type" if key == "rope_parameters" else key
  with pytest.raises(ValueError, match=match):
    family.from_hf(hf | field)


def test_gemma3_takes_the_text_config():
  """A "gemma3" file gives its language model's configuration."""
  family, hf, _, config = _load("gemma3")
  whole = {
    "model_type": "gemma3",
    "text_config": hf,
    "vision_config": {"hidden_size": 1152},
    "mm_tokens_per_image": 256,
    "image_token_index": 262144,
  }
  assert family.from_hf(whole) == config
  with pytest.raises(ValueError, match="surprise"):
    family.from_hf(whole | {"surprise": 1})


def test_gemma3_fills_what_published_files_leave_out():
  """The 4B file's text_config, six fields, is read as its model card says."""
  text = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
  }
  family = models.load("gemma3")
  config = family.from_hf({"model_type": "gemma3", "text_config": text})
  assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
  assert [i for i, w in enumerate(config.windows) if w is None] == [
    5,
    11,
    17,
    23,
    29,
  ]
  # theta 1e6 scaled by 8 for global layers, 1e4 unscaled for local ones.
  last = np.array([x.frequencies[-1] for x in (config.rope, config.rope_local)])
  np.testing.assert_allclose(
    last, [1e6 ** -(254 / 256) / 8, 1e4 ** -(254 / 256)], rtol=1e-5
  )
  with pytest.raises(ValueError, match="head_dim"):
    family.from_hf(text)


@pytest.mark.parametrize(
  ("model_type", "name", "expected"),
  [
    ("gemma3", "language_model.model.norm.weight", "model.norm.weight"),
    ("gemma3", "model.language_model.norm.weight", "model.norm.weight"),
    ("gemma3", "model.norm.weight", "model.norm.weight"),
    ("gpt2", "h.0.ln_1.bias", "transformer.h.0.ln_1.bias"),
    ("gpt2", "transformer.wte.weight", "transformer.wte.weight"),
    ("gpt2", "lm_head.weight", "lm_head.weight"),
  ],
)
def test_checkpoint_names_are_brought_to_one_form(model_type, name, expected):
  """Prefixes that differ between publications lead to one name."""
  for pattern, replacement in models.load(model_type).RENAMES:
    name = re.sub(pattern, replacement, name)
  assert name == expected
