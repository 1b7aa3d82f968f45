"""Tests of `load`: names, what is checked before weights, what users read."""

import functools
import hashlib
import json
import os
from pathlib import Path
import subprocess
import sys
import textwrap

from checkpoints import LLAMA, llama_tensors, write_folder, write_gguf
import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_tokenizer import byte_level_tokenizer, metaspace_tokenizer

from spec_jax import hub, weights
from spec_jax.hub import LoadError, weights_hash

# Plain arrays: the CPU kernel has tests of its own.
load = functools.partial(hub.load, cpu_kernel="off")


@pytest.fixture
def unread(monkeypatch):
  """Makes reading any weight a failure of the test."""

  def fill(*args):
    raise AssertionError("weights were read")

  monkeypatch.setattr(weights, "_fill", fill)


def _sha256(path):
  return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def test_a_folder_loads_with_all_that_belongs_to_it(tmp_path):
  folder = write_folder(tmp_path / "m", tokenizer=True)
  (folder / "generation_config.json").write_text('{"eos_token_id": [258, 7]}')
  loaded = load(folder)
  logits = loaded.model.apply(
    loaded.params, jnp.zeros((1, 3), int), jnp.arange(3)[None]
  ).logits
  assert logits.shape == (1, 3, 300) and bool(jnp.isfinite(logits).all())
  assert loaded.name == str(folder) and loaded.config == LLAMA
  assert loaded.hashes["tokenizer"] == _sha256(folder / "tokenizer.json")
  assert weights_hash(loaded) == _sha256(folder / "model.safetensors")
  assert weights_hash(folder) == weights_hash(loaded)
  assert loaded.tokenizer.decode(loaded.tokenizer("the é")["input_ids"])
  # generation_config, config.json (264), the tokenizer's eos, ChatML's end.
  vocab = byte_level_tokenizer().get_vocab()
  eos, end = vocab["<|eos|>"], vocab["<|im_end|>"]
  assert loaded.stop_ids == tuple(dict.fromkeys([258, 7, 264, eos, end]))


def test_an_end_of_turn_counts_only_if_the_chat_template_writes_it(tmp_path):
  folder = write_folder(tmp_path, LLAMA | {"eos_token_id": None})
  byte_level_tokenizer(chat_template=None).save_pretrained(folder)
  vocab = byte_level_tokenizer().get_vocab()
  assert load(folder).stop_ids == (vocab["<|eos|>"],)


def test_without_a_tokenizer_none_is_needed(tmp_path):
  loaded = load(write_folder(tmp_path), tokenizer=False)
  assert loaded.tokenizer is None and loaded.stop_ids == (264,)
  assert set(loaded.hashes) == {"config"}


def test_without_the_kernel_rounded_weights_are_held_as_float32(
  tmp_path, caplog
):
  """The values, and so the law, are those that packed weights would have."""
  folder = write_folder(tmp_path)
  whole = load(folder, tokenizer=False).params
  rounded = load(folder, tokenizer=False, cpu_weights="bfloat16").params
  assert "held as float32" in caplog.text
  for name in ("wq", "w_down"):
    want = whole["layers"][0][name].astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(rounded["layers"][0][name], want)
    assert (want != whole["layers"][0][name]).any()
  np.testing.assert_array_equal(rounded["final_norm"], whole["final_norm"])
  with pytest.raises(LoadError, match="cpu_weights=bfloat16 rounds float32"):
    load(folder, tokenizer=False, dtype="bfloat16", cpu_weights="bfloat16")


def test_dtype_is_float32_on_cpu_and_bfloat16_elsewhere(tmp_path, monkeypatch):
  folder = write_folder(tmp_path)
  assert load(folder, tokenizer=False).params["embed"].dtype == jnp.float32
  small = load(folder, tokenizer=False, dtype="bfloat16")
  assert {x.dtype for x in jax.tree.leaves(small.params)} == {
    jnp.dtype("bfloat16")
  }
  monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
  assert load(folder, tokenizer=False).params["embed"].dtype == jnp.bfloat16


def test_many_like_layers_are_scanned_on_accelerators(tmp_path, monkeypatch):
  config = LLAMA | {
    "num_hidden_layers": 41,
    "hidden_size": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 4,
  }
  folder = write_folder(tmp_path, config)
  assert isinstance(load(folder, tokenizer=False).params["layers"], tuple)
  monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
  assert load(folder, tokenizer=False).params["layers"]["wq"].shape[0] == 41


def _shards(folder, *, lose="", twice=False):
  """Splits a folder's weights in two files and an index."""
  write_folder(folder)
  (folder / "model.safetensors").unlink()
  arrays = llama_tensors()
  names = sorted(arrays)
  parts = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
  if twice:
    parts["b.safetensors"] = names[8:]
  for file, keys in parts.items():
    if file != lose:
      save_file({k: arrays[k] for k in keys}, folder / file)
  index = {k: file for file, keys in parts.items() for k in keys}
  (folder / "model.safetensors.index.json").write_text(
    json.dumps({"metadata": {}, "weight_map": index})
  )
  return folder


def test_shards_load_like_one_file(tmp_path):
  shards = load(_shards(tmp_path / "s"), tokenizer=False)
  whole = load(write_folder(tmp_path / "w"), tokenizer=False)
  jax.tree.map(np.testing.assert_array_equal, shards.params, whole.params)
  assert [f.name for f in shards.files] == ["a.safetensors", "b.safetensors"]
  lines = "".join(f"{_sha256(f)}  {f.name}\n" for f in shards.files)
  assert weights_hash(shards) == hashlib.sha256(lines.encode()).hexdigest()


def test_a_lost_or_doubled_shard_is_named(tmp_path, unread):
  with pytest.raises(LoadError, match=r"lacks b\.safetensors, which its index"):
    load(_shards(tmp_path / "a", lose="b.safetensors"))
  with pytest.raises(LoadError, match="is in two files"):
    load(_shards(tmp_path / "b", twice=True))


# --- names ------------------------------------------------------------------


def test_a_builtin_name_comes_before_a_folder_of_that_name(
  tmp_path, monkeypatch
):
  file = write_gguf(tmp_path / "x.gguf")
  monkeypatch.setattr(hub, "download_builtin", lambda name: file)
  monkeypatch.chdir(tmp_path)
  write_folder(tmp_path / "smollm2-135m-instruct")
  loaded = load("smollm2-135m-instruct", tokenizer=False)
  assert loaded.files == (file,) and loaded.name == "smollm2-135m-instruct"


def test_a_folder_comes_before_the_hub(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  write_folder(tmp_path / "org" / "name")
  assert load("org/name", tokenizer=False).files[0].parent == Path("org/name")


@pytest.fixture
def fake_hub(tmp_path, monkeypatch):
  """Replaces the hub by a folder and records what was asked for."""
  asked = []

  def snapshot_download(name, *, revision, allow_patterns):
    asked.append((name, revision, "*.safetensors" in allow_patterns))
    return str(tmp_path / "remote")

  monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
  return asked


def test_the_hub_is_asked_for_weights_after_the_config(tmp_path, fake_hub):
  write_folder(tmp_path / "remote")
  loaded = load("org/name", revision="v1", tokenizer=False)
  assert fake_hub == [("org/name", "v1", False), ("org/name", "v1", True)]
  assert loaded.name == "org/name"


def test_no_weights_are_fetched_for_a_model_nobody_reads(tmp_path, fake_hub):
  write_folder(tmp_path / "remote", LLAMA | {"model_type": "mamba"}, {})
  with pytest.raises(LoadError, match="org/name: unknown model type 'mamba'"):
    load("org/name")
  assert fake_hub == [("org/name", None, False)]


def test_an_unreachable_hub_names_the_alternatives():
  # The tests run with HF_HUB_OFFLINE=1.
  with pytest.raises(LoadError) as error:
    load("nobody-at-all/nothing")
  text = str(error.value)
  assert text.startswith("cannot get 'nobody-at-all/nothing' from the Hugging")
  assert "local folder" in text and "smollm2-135m-instruct" in text
  assert "\n" not in text


# --- what is refused, before any weight is read -----------------------------


def _edit(**change):
  return lambda folder: write_folder(
    folder, LLAMA | change, llama_tensors(), tokenizer=True
  )


def _pytorch(folder):
  write_folder(folder)
  (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _no_config(folder):
  (write_folder(folder) / "config.json").unlink()


def _bad_json(folder):
  (write_folder(folder) / "config.json").write_text("{")


def _truncated(folder):
  file = write_folder(folder) / "model.safetensors"
  file.write_bytes(file.read_bytes()[:-10])


def _gguf_folder(folder):
  (write_folder(folder) / "model.safetensors").unlink()
  write_gguf(folder / "q4.gguf")


def _long_tokenizer(folder):
  words = metaspace_tokenizer()
  words.add_tokens([f"word{i}" for i in range(300 - len(words) + 1)])
  words.save_pretrained(write_folder(folder))


_MISTAKES = [
  (_pytorch, "{} holds PyTorch files only; save the model as safetensors"),
  (_no_config, "{} holds no config.json"),
  (
    _bad_json,
    "{}/config.json cannot be read: Expecting property name enclosed in double"
    " quotes: line 1 column 2 (char 1)",
  ),
  (
    _truncated,
    "{}/model.safetensors is truncated: {short} bytes, its header says {size}",
  ),
  (_gguf_folder, "{0} holds no safetensors; did you mean {0}/q4.gguf?"),
  (
    _long_tokenizer,
    "{}: its tokenizer has ids up to 300, its weights 300 rows",
  ),
  (
    _edit(vocab_size=12),
    "{}: model.embed_tokens.weight has 300 rows, the config says vocab_size 12",
  ),
  (
    _edit(logit_scale=2.0),
    "{}: config.json: logit_scale=2.0 is not supported",
  ),
  (
    lambda folder: write_folder(folder),
    "{} holds no tokenizer; load with tokenizer=False to go without",
  ),
]


@pytest.mark.parametrize(("make", "message"), _MISTAKES)
def test_a_mistake_is_one_plain_line(tmp_path, unread, make, message):
  folder = tmp_path / "m"
  make(folder)
  with pytest.raises(LoadError) as error:
    load(folder)
  short = max(
    (f.stat().st_size for f in folder.glob("*.safetensors")), default=0
  )
  expected = message.format(folder, short=short, size=short + 10)
  assert str(error.value) == expected


@pytest.mark.parametrize("name", ["smol", "none.gguf", "a/b/c", "/none/at/all"])
def test_a_name_that_means_nothing_says_what_would(name):
  with pytest.raises(LoadError) as error:
    load(name)
  assert str(error.value) == (
    f"'{name}' is no folder, no .gguf file, no built-in model"
    " (smollm2-135m-instruct) and no hub name (organisation/model)"
  )


def test_a_setting_that_cannot_be_honoured_is_refused(tmp_path, unread):
  folder = write_folder(tmp_path)
  with pytest.raises(LoadError, match="revision='v1' is for names on the hub"):
    load(folder, revision="v1")
  for dtype in ("int8", "float64", "fp17"):
    with pytest.raises(LoadError, match=f"'{dtype}' is not float32, bfloat16"):
      load(folder, dtype=dtype)
  with pytest.raises(LoadError, match="give its folder"):
    load(folder / "config.json")


@pytest.mark.parametrize(
  ("kind", "change", "tensors"),
  [
    ("Medusa", {"medusa_num_heads": 4}, {}),
    ("Medusa", {"model_type": "medusa"}, {}),
    ("Medusa", {}, {"medusa_head.0.0.linear.weight": np.ones(2)}),
    ("Medusa", {}, {"0.0.linear.weight": np.ones(2)}),
    ("EAGLE", {"architectures": ["LlamaForCausalLMEagle3"]}, {}),
    ("EAGLE", {"draft_vocab_size": 32000}, {}),
    ("EAGLE", {}, {"fc.weight": np.ones(2), "layers.0.x": np.ones(2)}),
    ("EAGLE", {}, {"d2t": np.ones(2, np.int64)}),
  ],
)
def test_draft_heads_are_no_model(tmp_path, unread, kind, change, tensors):
  folder = write_folder(tmp_path, LLAMA | change, tensors)
  with pytest.raises(LoadError, match=f"holds {kind} draft heads, not a model"):
    load(folder)


@pytest.mark.parametrize("vocab_size", [300, 320])
def test_a_tokenizer_shorter_than_the_weights_is_fine(tmp_path, vocab_size):
  folder = write_folder(
    tmp_path, LLAMA | {"vocab_size": vocab_size}, tokenizer=True
  )
  loaded = load(folder)
  assert len(loaded.tokenizer) < vocab_size
  assert loaded.model.config.vocab_size == vocab_size
  assert loaded.tokenizer.decode([vocab_size - 1]) == ""


def test_a_special_token_without_a_row_is_let_pass_if_nobody_writes_it(
  tmp_path,
):
  folder = write_folder(tmp_path)
  words = byte_level_tokenizer()
  extra = [f"<image{i}>" for i in range(300 - len(words) + 1)]
  words.add_special_tokens({"additional_special_tokens": extra})
  words.save_pretrained(folder)
  assert len(load(folder).tokenizer) == 301
  words.chat_template = f"{extra[-1]}{{{{ messages[0]['content'] }}}}"
  words.save_pretrained(folder)
  with pytest.raises(LoadError, match="ids up to 300, its weights 300 rows"):
    load(folder)


def test_a_tokenizer_loads_without_torch_and_import_starts_no_back_end(
  tmp_path,
):
  write_folder(tmp_path, tokenizer=True)
  script = """
    import sys
    sys.modules["torch"] = None  # importing it raises ImportError
    import spec_jax, spec_jax.hub
    from jax._src import xla_bridge
    assert not xla_bridge.backends_are_initialized()
    words = spec_jax.hub.load(sys.argv[1], cpu_kernel="off").tokenizer
    assert words.decode(words("the end")["input_ids"]) == "the end"
    assert xla_bridge.backends_are_initialized()
  """
  done = subprocess.run(
    [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
    env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    capture_output=True,
    text=True,
    check=False,
  )
  assert (done.returncode, done.stderr) == (0, "")
