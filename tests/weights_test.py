"""Tests of assembling parameters: every tensor used, every parameter set."""

import json
import logging
import os
import re
import subprocess
import sys
import textwrap
from types import SimpleNamespace

from checkpoints import LLAMA, llama_tensors
import jax
import ml_dtypes
import numpy as np
import pytest

from spec_jax import weights
from spec_jax.models import decoder, gpt2, llama
from spec_jax.models.common import Source
from spec_jax.safetensors_io import LoadError, Tensor


def _tensors(arrays) -> dict[str, Tensor]:
  return {
    name: Tensor(a.shape, a.dtype, lambda b, e, a=a: a[b:e].copy())
    for name, a in arrays.items()
  }


def _unreadable(arrays) -> dict[str, Tensor]:
  def read(begin, end):
    raise AssertionError("read before everything was checked")

  return {name: Tensor(a.shape, a.dtype, read) for name, a in arrays.items()}


def _assemble(arrays, config=LLAMA, **options):
  options = {"dtype": "float32"} | options
  return weights.assemble_params(
    llama, llama.from_hf(config), _tensors(arrays), **options
  )


TIED = LLAMA | {"tie_word_embeddings": True}


def test_matrices_arrive_transposed_and_the_rest_as_stored():
  arrays = llama_tensors()
  params = _assemble(arrays)
  np.testing.assert_array_equal(
    params["embed"], arrays["model.embed_tokens.weight"]
  )
  np.testing.assert_array_equal(params["head"], arrays["lm_head.weight"].T)
  for i in range(2):
    for ours, theirs in (
      ("wk", "self_attn.k_proj"),
      ("w_down", "mlp.down_proj"),
    ):
      np.testing.assert_array_equal(
        params["layers"][i][ours],
        arrays[f"model.layers.{i}.{theirs}.weight"].T,
      )


def test_the_tree_is_the_one_the_model_initialises():
  for scan in (False, True):
    params = _assemble(llama_tensors(), dtype="bfloat16", scan_layers=scan)
    model = decoder.build(
      llama.from_hf(LLAMA), dtype="bfloat16", scan_layers=scan
    )
    expected = jax.eval_shape(lambda m=model: m.init(jax.random.key(0)))
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
      lambda x: (x.shape, x.dtype), expected
    )


def test_stacked_layers_hold_the_same_numbers():
  loop, scan = (
    _assemble(llama_tensors()),
    _assemble(llama_tensors(), scan_layers=True),
  )
  for i in range(2):
    for name, value in loop["layers"][i].items():
      np.testing.assert_array_equal(value, scan["layers"][name][i])


def test_rows_are_read_in_pieces_without_changing_a_number(monkeypatch):
  whole = _assemble(llama_tensors())
  monkeypatch.setattr(weights, "_CHUNK", 70)  # 2 rows of 32
  jax.tree.map(np.testing.assert_array_equal, _assemble(llama_tensors()), whole)


def test_bfloat16_rounds_to_nearest_even():
  arrays = llama_tensors()
  # Halfway between 1 and the next bfloat16, 1 + 2^-7, and above halfway.
  arrays["model.norm.weight"][:2] = [1 + 2**-8, 1 + 2**-8 + 2**-12]
  norm = _assemble(arrays, dtype="bfloat16")["final_norm"]
  assert norm.dtype == ml_dtypes.bfloat16
  assert [float(x) for x in np.asarray(norm[:2])] == [1.0, 1 + 2**-7]


GPT2 = {
  "model_type": "gpt2",
  "vocab_size": 11,
  "n_embd": 8,
  "n_layer": 1,
  "n_head": 2,
  "n_positions": 16,
  "layer_norm_epsilon": 1e-5,
  "activation_function": "gelu_new",
}


def _gpt2_tensors() -> dict[str, np.ndarray]:
  shapes = {
    "wte.weight": (11, 8),
    "wpe.weight": (16, 8),
    "ln_f.weight": (8,),
    "ln_f.bias": (8,),
    "h.0.ln_1.weight": (8,),
    "h.0.ln_1.bias": (8,),
    "h.0.ln_2.weight": (8,),
    "h.0.ln_2.bias": (8,),
    "h.0.attn.c_attn.weight": (8, 24),
    "h.0.attn.c_attn.bias": (24,),
    "h.0.attn.c_proj.weight": (8, 8),
    "h.0.attn.c_proj.bias": (8,),
    "h.0.mlp.c_fc.weight": (8, 32),
    "h.0.mlp.c_fc.bias": (32,),
    "h.0.mlp.c_proj.weight": (32, 8),
    "h.0.mlp.c_proj.bias": (8,),
  }
  rng = np.random.default_rng(0)
  return {k: rng.normal(size=v).astype("f4") for k, v in shapes.items()}


def test_a_part_takes_its_slice_of_the_output_axis():
  arrays = _gpt2_tensors()
  params = weights.assemble_params(
    gpt2, gpt2.from_hf(GPT2), _tensors(arrays), dtype="float32"
  )
  for i, x in enumerate("qkv"):
    part = slice(8 * i, 8 * i + 8)
    np.testing.assert_array_equal(
      params["layers"][0][f"w{x}"], arrays["h.0.attn.c_attn.weight"][:, part]
    )
    np.testing.assert_array_equal(
      params["layers"][0][f"b{x}"], arrays["h.0.attn.c_attn.bias"][part]
    )


def test_a_part_of_a_transposed_tensor_takes_rows():
  stored = np.arange(12.0).reshape(6, 2)
  out = np.empty((2, 3))
  weights._fill(out, Source("x", True, (2, 5)), _tensors({"x": stored})["x"])
  np.testing.assert_array_equal(out, [[4, 6, 8], [5, 7, 9]])


def test_a_fused_tensor_wider_than_its_parts_is_refused():
  arrays = _gpt2_tensors()
  arrays["h.0.attn.c_attn.weight"] = np.zeros((8, 25), "f4")
  with pytest.raises(LoadError, match=r"c_attn.weight.*25.*24"):
    weights.check_tensors(gpt2, gpt2.from_hf(GPT2), _unreadable(arrays))


def _without(arrays, *names):
  return {k: v for k, v in arrays.items() if k not in names}


_Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
  ("arrays", "message"),
  [
    (_without(llama_tensors(), _Q), f"lack {_Q}"),
    (
      llama_tensors() | {"model.odd.weight": np.ones(3, "f4")},
      "nobody reads: model.odd.weight",
    ),
    (
      llama_tensors() | {_Q: np.ones((31, 32), "f4")},
      f"{_Q} has shape (31, 32), the config asks for (32, 32)",
    ),
    (
      llama_tensors() | {"model.norm.weight": np.ones((32, 1), "f4")},
      "model.norm.weight has shape (32, 1), the config asks for (32,)",
    ),
    (
      llama_tensors() | {"model.embed_tokens.weight": np.ones((10, 32), "f4")},
      "model.embed_tokens.weight has 10 rows, the config says vocab_size 300",
    ),
    (
      llama_tensors() | {_Q: np.ones((32, 32), "i1")},
      f"{_Q} is stored as int8",
    ),
    (
      _without(llama_tensors(), "lm_head.weight"),
      "no lm_head.weight, and the config does not say tie_word_embeddings",
    ),
  ],
)
def test_every_misfit_is_named_before_anything_is_read(arrays, message):
  with pytest.raises(LoadError, match=re.escape(message)):
    weights.assemble_params(
      llama, llama.from_hf(LLAMA), _unreadable(arrays), dtype="float32"
    )


def test_a_long_list_of_names_is_cut_short():
  arrays = {"model.embed_tokens.weight": np.ones((300, 32), "f4")}
  with pytest.raises(LoadError, match=r"and 17 more$") as error:
    weights.check_tensors(llama, llama.from_hf(LLAMA), _unreadable(arrays))
  assert "\n" not in str(error.value)  # 9 a layer, norm and head, less 3


def test_tied_without_a_head_shares_the_embedding():
  params = _assemble(llama_tensors(TIED), TIED)
  assert "head" not in params


def test_tied_with_an_equal_head_says_nothing(caplog):
  arrays = llama_tensors(TIED)
  arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
  with caplog.at_level(logging.WARNING):
    assert "head" not in _assemble(arrays, TIED)
  assert not caplog.records


@pytest.mark.parametrize("rows", [300, 299])
def test_tied_with_another_head_warns_and_uses_the_embedding(
  caplog, monkeypatch, rows
):
  monkeypatch.setattr(weights, "_CHUNK", 70)  # compared 2 rows at a time
  arrays = llama_tensors(TIED)
  head = arrays["model.embed_tokens.weight"][:rows].copy()
  head[0, 0] += 1  # in the first rows only
  with caplog.at_level(logging.WARNING):
    params = _assemble(arrays | {"lm_head.weight": head}, TIED)
  assert "head" not in params
  assert "lm_head.weight differs from the embedding" in caplog.text


def test_a_family_that_forgets_a_parameter_is_refused():
  def sources(config):
    return {k: s for k, s in llama.sources(config).items() if k[-1] != "wq"}

  family = SimpleNamespace(
    sources=sources, IGNORED=(r".*q_proj.*",), RENAMES=()
  )
  with pytest.raises(LoadError, match=r"without a source.*'wq'"):
    weights.check_tensors(
      family, llama.from_hf(LLAMA), _unreadable(llama_tensors())
    )


def test_parameters_outlive_donation():
  params = _assemble(llama_tensors())
  double = jax.jit(lambda p: jax.tree.map(lambda x: 2 * x, p), donate_argnums=0)
  np.testing.assert_array_equal(
    double(params)["embed"], 2 * llama_tensors()["model.embed_tokens.weight"]
  )


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_grows_by_no_more_than_1_3_times_the_parameters(tmp_path):
  # In a process of its own: the peak of a process never falls. VmHWM, for
  # ru_maxrss starts at the parent's. The embedding is nearly all, so that a
  # second copy of it would show.
  script = """
    import json, pathlib, sys
    import jax
    import numpy as np
    from checkpoints import LLAMA, llama_tensors, write_folder
    from spec_jax import hub

    folder = pathlib.Path(sys.argv[1])
    config = LLAMA | dict(
      vocab_size=65536, hidden_size=768, intermediate_size=2048,
      num_hidden_layers=1, num_attention_heads=12, num_key_value_heads=12,
      tie_word_embeddings=True,
    )
    if sys.argv[2] == "write":
      write_folder(folder, config, llama_tensors(config))
      sys.exit()
    def peak():
      status = pathlib.Path("/proc/self/status").read_text()
      return 1024 * int(status.split("VmHWM:")[1].split()[0])
    write_folder(folder / "small")
    hub.load(folder / "small", tokenizer=False)  # imports, back end
    before = peak()
    params = hub.load(folder, tokenizer=False).params
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    print(json.dumps([peak() - before, size]))
  """
  for mode in ("write", "load"):
    done = subprocess.run(
      [sys.executable, "-c", textwrap.dedent(script), str(tmp_path), mode],
      env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
      capture_output=True,
      text=True,
      check=False,
    )
    assert done.returncode == 0, done.stderr
  growth, size = json.loads(done.stdout)
  assert size > 200e6
  assert growth < 1.3 * size
