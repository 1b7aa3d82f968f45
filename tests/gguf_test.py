"""Tests of GGUF files: header, row order, norms, config, block formats."""

import functools

from checkpoints import LLAMA, llama_tensors, write_folder, write_gguf
import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import gguf_io, hub
from spec_jax.gguf_hf import hf_config, hf_tensors, interleaved_rows
from spec_jax.gguf_io import read_gguf
from spec_jax.safetensors_io import LoadError

# Plain arrays: the CPU kernel has tests of its own.
load = functools.partial(hub.load, cpu_kernel="off")

_Q, _K = (f"model.layers.1.self_attn.{x}_proj" for x in "qk")


def _view(path):
  header = read_gguf(path)
  config = hf_config(header)
  return config, hf_tensors(header, config)


def _array(tensor):
  return tensor.read(0, tensor.shape[0])


def _logits(loaded, tokens=(5, 299, 17, 3, 4)):
  T = len(tokens)
  return loaded.model.apply(
    loaded.params, jnp.array([tokens]), jnp.arange(T)[None]
  ).logits


def test_interleaved_rows_are_the_worked_example():
  np.testing.assert_array_equal(interleaved_rows(1, 6), [0, 2, 4, 1, 3, 5])
  # Two heads of 4: each by itself.
  np.testing.assert_array_equal(
    interleaved_rows(2, 8), [0, 2, 1, 3, 4, 6, 5, 7]
  )
  with pytest.raises(LoadError, match="6 rows do not give 2 even heads"):
    interleaved_rows(2, 6)


def test_llama_rows_return_to_half_split_order(tmp_path):
  arrays = llama_tensors()
  _, tensors = _view(write_gguf(tmp_path / "a.gguf"))
  assert tensors.keys() == arrays.keys()
  for name, array in arrays.items():
    np.testing.assert_array_equal(_array(tensors[name]), array, err_msg=name)
    # A few rows at a time give the same, across the borders of heads.
    np.testing.assert_array_equal(tensors[name].read(3, 13), array[3:13])
  stored = read_gguf(tmp_path / "a.gguf").tensors["blk.1.attn_k.weight"]
  assert not np.array_equal(_array(stored), arrays[f"{_K}.weight"])


def test_qwen_rows_and_biases_stay(tmp_path):
  arrays = llama_tensors(bias=True)
  path = write_gguf(tmp_path / "a.gguf", LLAMA, arrays, arch="qwen2")
  config, tensors = _view(path)
  assert config["model_type"] == "qwen2"
  for name in (f"{_Q}.weight", f"{_Q}.bias", f"{_K}.weight", f"{_K}.bias"):
    np.testing.assert_array_equal(_array(tensors[name]), arrays[name])


def test_biases_of_llama_type_files_are_reordered_and_not_dropped(tmp_path):
  arrays = llama_tensors(bias=True)
  path = write_gguf(tmp_path / "a.gguf", LLAMA, arrays)
  _, tensors = _view(path)
  for name in (f"{_Q}.bias", f"{_K}.bias"):
    np.testing.assert_array_equal(_array(tensors[name]), arrays[name])
  with pytest.raises(LoadError, match="attention_bias"):
    load(path, tokenizer=False)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_logits_are_those_of_the_safetensors_folder(tmp_path, arch):
  arrays = llama_tensors(bias=arch == "qwen2")
  path = write_gguf(tmp_path / "a.gguf", LLAMA, arrays, arch=arch)
  folder = write_folder(tmp_path / "hf", LLAMA | {"model_type": arch}, arrays)
  ours = _logits(load(path, tokenizer=False))
  theirs = _logits(load(folder, tokenizer=False))
  # The same float32 numbers go in, so the same come out.
  np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
  assert float(jnp.abs(theirs).max()) > 0.1


def test_a_tied_file_has_no_head(tmp_path):
  tied = LLAMA | {"tie_word_embeddings": True}
  config, _ = _view(write_gguf(tmp_path / "tied.gguf", tied))
  assert config["tie_word_embeddings"] is True
  assert "head" not in load(tmp_path / "tied.gguf", tokenizer=False).params
  config, _ = _view(write_gguf(tmp_path / "untied.gguf"))
  assert config["tie_word_embeddings"] is False


def test_the_config_is_what_was_written(tmp_path):
  def edit(writer):
    writer.add_key_length(16)
    writer.add_rope_dimension_count(16)

  wide = LLAMA | {"head_dim": 16}
  config, _ = _view(write_gguf(tmp_path / "a.gguf", wide, edit=edit))
  expected = {k: v for k, v in wide.items() if k in config}
  assert {k: config[k] for k in expected} == expected
  assert config["rms_norm_eps"] == 1e-5  # not float32's 9.99...e-06
  assert set(wide) - set(config) == {"architectures", "eos_token_id"}


@pytest.mark.parametrize(
  ("edit", "message"),
  [
    (lambda w: w.add_expert_count(8), "llama.*expert_count"),
    (lambda w: w.add_attn_logit_softcapping(30.0), "softcapping.*30"),
    (lambda w: w.add_rope_dimension_count(4), "rope.dimension_count 4.* 8"),
    (lambda w: w.add_value_length(16), "attention.value_length 16.* 8"),
  ],
)
def test_metadata_nobody_reads_are_refused(tmp_path, edit, message):
  path = write_gguf(tmp_path / "a.gguf", edit=edit)
  with pytest.raises(LoadError, match=message):
    _view(path)


def test_unknown_architectures_and_tensors_are_refused(tmp_path):
  path = write_gguf(tmp_path / "a.gguf", arch="rwkv6")
  with pytest.raises(LoadError, match=r"architecture 'rwkv6'.*llama, qwen2"):
    _view(path)
  odd = {"blk.0.attn_odd.weight": np.ones(4, np.float32)}
  path = write_gguf(tmp_path / "b.gguf", extra=odd)
  with pytest.raises(LoadError, match=r"blk\.0\.attn_odd\.weight"):
    _view(path)


def _rope_divisors(factor, low, high, original, theta=10000.0, head_dim=8):
  """By wavelength, as Llama 3's authors wrote it, one at a time."""
  out = []
  for i in range(0, head_dim, 2):
    wavelength = 2 * np.pi * theta ** (i / head_dim)
    if wavelength < original / high:
      out.append(1.0)
    elif wavelength > original / low:
      out.append(factor)
    else:
      smooth = (original / wavelength - low) / (high - low)
      out.append(1 / ((1 - smooth) / factor + smooth))
  return {"rope_freqs.weight": np.array(out, np.float32)}


def test_llama_3_rope_scaling_is_recovered_from_its_divisors(tmp_path):
  theta = {"rope_theta": 500000.0}
  extra = _rope_divisors(32.0, 1.0, 4.0, 8192, 500000.0)
  path = write_gguf(tmp_path / "a.gguf", LLAMA | theta, extra=extra)
  config, tensors = _view(path)
  assert config["rope_scaling"] == {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
  }
  assert "rope_freqs.weight" not in tensors


def test_other_rope_divisors_are_refused(tmp_path):
  theta = {"rope_theta": 500000.0}
  extra = _rope_divisors(32.0, 1.0, 4.0, 4096, 500000.0)
  path = write_gguf(tmp_path / "a.gguf", LLAMA | theta, extra=extra)
  with pytest.raises(LoadError, match="rope_freqs"):
    _view(path)


def test_linear_and_yarn_scaling_reach_the_config(tmp_path):
  def edit(writer):
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(64)

  config, _ = _view(write_gguf(tmp_path / "a.gguf", edit=edit))
  assert config["rope_scaling"] == {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
  }


def _gemma(tmp_path):
  """Writes a Gemma 3 file whose norms are stored 1 too large."""
  config = LLAMA | {"tie_word_embeddings": True, "rope_theta": 1e6}
  arrays = llama_tensors(config)
  norms = {
    f"blk.{i}.{name}.weight": np.full(size, i + 1.25, np.float32)
    for i in range(2)
    for name, size in (
      ("attn_q_norm", 8),
      ("attn_k_norm", 8),
      ("post_attention_norm", 32),
      ("post_ffw_norm", 32),
    )
  }

  def edit(writer):
    writer.add_key_length(8)
    writer.add_sliding_window(4)

  return arrays, write_gguf(
    tmp_path / "g.gguf", config, arrays, arch="gemma3", extra=norms, edit=edit
  )


def test_gemma_norms_lose_the_one_and_rows_stay(tmp_path):
  arrays, path = _gemma(tmp_path)
  _, tensors = _view(path)
  layer = "model.layers.1"
  for name in (
    "self_attn.q_norm",
    "self_attn.k_norm",
    "post_attention_layernorm",
    "post_feedforward_layernorm",
  ):
    np.testing.assert_array_equal(
      _array(tensors[f"{layer}.{name}.weight"]), np.float32(1.25)
    )
  for gguf_name, name in (  # `ffn_norm` is another norm in Gemma
    (f"{layer}.post_attention_layernorm", f"{layer}.pre_feedforward_layernorm"),
    ("model.norm", "model.norm"),
  ):
    np.testing.assert_array_equal(
      _array(tensors[f"{name}.weight"]), arrays[f"{gguf_name}.weight"] - 1
    )
  np.testing.assert_array_equal(
    _array(tensors[f"{_Q}.weight"]), arrays[f"{_Q}.weight"]
  )


def test_gemma_config_and_load(tmp_path):
  _, path = _gemma(tmp_path)
  config, _ = _view(path)
  assert config["layer_types"] == ["sliding_attention"] * 2
  assert config["rope_parameters"]["full_attention"]["rope_theta"] == 1e6
  assert config["rope_parameters"]["sliding_attention"]["rope_theta"] == 1e4
  assert config["query_pre_attn_scalar"] == 8
  loaded = load(path, tokenizer=False)
  assert loaded.model.config.windows == (4, 4)
  assert bool(jnp.isfinite(_logits(loaded)).all())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "BF16", "F16"])
def test_quantised_rows_are_near_what_was_quantised(tmp_path, kind):
  value = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
  kind = gguf.GGMLQuantizationType[kind]
  writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
  data = gguf.quants.quantize(value, kind)
  writer.add_tensor("x", data, raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  tensor = read_gguf(tmp_path / "a.gguf").tensors["x"]
  assert tensor.shape == (6, 64)
  # Four bits: steps of an eighth of the largest value in a block.
  np.testing.assert_allclose(tensor.read(0, 6), value, atol=0.25)
  np.testing.assert_array_equal(tensor.read(2, 5), tensor.read(0, 6)[2:5])


@pytest.mark.parametrize("keep", [3, 20, 200, 5000, -1])
def test_a_truncated_file_is_refused_by_name(tmp_path, keep):
  path = write_gguf(tmp_path / "short.gguf")
  path.write_bytes(path.read_bytes()[:keep])
  with pytest.raises(LoadError, match=r"short\.gguf is truncated"):
    read_gguf(path)


def test_what_is_no_gguf_file_is_refused(tmp_path):
  path = write_gguf(tmp_path / "odd.gguf")
  data = path.read_bytes()
  path.write_bytes(b"GGML" + data[4:])
  with pytest.raises(LoadError, match=r"odd\.gguf is no GGUF file"):
    read_gguf(path)
  path.write_bytes(data[:4] + b"\x01" + data[5:])
  with pytest.raises(LoadError, match="version 1; 2 and 3"):
    read_gguf(path)
  # Any one byte of the header changed: an error of ours or another header.
  rng = np.random.default_rng(0)
  for at in rng.integers(4, 2000, size=200):
    odd = bytearray(data)
    odd[at] ^= 0xFF
    path.write_bytes(bytes(odd))
    try:
      _view(path)
    except LoadError:
      pass


def test_a_block_format_nobody_dequantises_is_refused(tmp_path):
  kind = gguf.GGMLQuantizationType.I32
  writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
  writer.add_tensor("x", np.ones((2, 2), np.int32), raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  with pytest.raises(LoadError, match="'x' has unknown type 26"):
    read_gguf(tmp_path / "a.gguf")


def test_metadata_of_every_type_are_read(tmp_path):
  def edit(writer):
    writer.add_string("a.string", "é")
    writer.add_bool("a.bool", True)
    writer.add_int8("a.int8", -3)
    writer.add_uint64("a.uint64", 2**40)
    writer.add_float64("a.float64", 0.1)
    writer.add_array("a.strings", ["x", "yz"])
    writer.add_array("a.numbers", [1, -2])
    writer.add_array("a.bools", [True, False])

  found = read_gguf(write_gguf(tmp_path / "a.gguf", edit=edit)).metadata
  assert {k[2:]: v for k, v in found.items() if k.startswith("a.")} == {
    "string": "é",
    "bool": True,
    "int8": -3,
    "uint64": 2**40,
    "float64": 0.1,
    "strings": ["x", "yz"],
    "numbers": [1, -2],
    "bools": [True, False],
  }
  assert gguf_io.read_gguf(tmp_path / "a.gguf").header.startswith(b"GGUF")


def test_stacked_layers_load_from_gguf(tmp_path):
  path = write_gguf(tmp_path / "a.gguf")
  loop = load(path, tokenizer=False)
  scan = load(path, tokenizer=False, scan_layers=True)
  assert len(jax.tree.leaves(scan.params)) < len(jax.tree.leaves(loop.params))
  np.testing.assert_allclose(_logits(loop), _logits(scan), atol=1e-5)
