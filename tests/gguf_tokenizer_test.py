"""Tests of tokenizers built from a GGUF file's vocabulary."""

import gguf
import pytest
from tokenizers import pre_tokenizers

from spec_jax.gguf_io import read_gguf
from spec_jax.gguf_tokenizer import build_tokenizer, saved_tokenizer
from spec_jax.safetensors_io import LoadError

_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
_MERGES = ["Ġ Ġ", "t h", "th e", "Ġ the", "1 2"]
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_CHATML = (
  "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
  "<|im_end|>\n{% endfor %}"
)


def _byte_level(**change):
  """Special tokens first, as SmolLM2 has them; then bytes and merges."""
  tokens = _SPECIAL + _BYTES + [m.replace(" ", "") for m in _MERGES]
  metadata = {
    "model": "gpt2",
    "pre": "smollm",
    "tokens": tokens,
    "token_type": [3] * 3 + [1] * (len(tokens) - 3),
    "merges": _MERGES,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "unknown_token_id": 0,
    "padding_token_id": 2,
  } | change
  found = {f"tokenizer.ggml.{k}": v for k, v in metadata.items()}
  return found | {"tokenizer.chat_template": _CHATML}


def _pieces(tokenizer, text):
  ids = tokenizer(text)["input_ids"]
  return tokenizer.convert_ids_to_tokens(ids)


def test_special_tokens_are_single_ids_and_known_to_the_tokenizer():
  tokenizer = build_tokenizer(_byte_level())
  assert tokenizer("<|im_start|>")["input_ids"] == [1]
  ids = tokenizer("a<|im_start|>the<|im_end|>")["input_ids"]
  assert ids[1] == 1 and ids[-1] == 2 and len(ids) == 4
  assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
  assert tokenizer.decode(ids, skip_special_tokens=True) == "athe"
  assert len(tokenizer) == 3 + 256 + 5


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe", "gpt-2"])
def test_text_survives_a_round_trip(pre):
  tokenizer = build_tokenizer(_byte_level(pre=pre, add_bos_token=False))
  text = " the  12\n\n\tthé 'll 😀 , . !! "
  ids = tokenizer(text)["input_ids"]
  assert tokenizer.decode(ids) == text
  assert len(ids) < len(text.encode())  # merges are used


@pytest.mark.parametrize(
  ("pre", "pieces"),
  [
    # Every digit apart, and cut off before the spaces are split.
    ("smollm", ["the", "ĠĠ", "1", "2"]),
    # GPT-2 keeps the last space for the number.
    ("gpt-2", ["the", "Ġ", "Ġ", "12"]),
    # Qwen: each digit apart, runs of spaces keep together but for the last.
    ("qwen2", ["the", "Ġ", "Ġ", "1", "2"]),
    # Llama 3: up to three digits together.
    ("llama-bpe", ["the", "Ġ", "Ġ", "12"]),
  ],
)
def test_text_is_split_as_the_file_names_it(pre, pieces):
  tokenizer = build_tokenizer(_byte_level(pre=pre, add_bos_token=False))
  assert _pieces(tokenizer, "the  12") == pieces


def test_chat_template_renders():
  tokenizer = build_tokenizer(_byte_level())
  messages = [{"role": "user", "content": "the"}]
  text = tokenizer.apply_chat_template(messages, tokenize=False)
  assert text == "<|im_start|>user\nthe<|im_end|>\n"


@pytest.mark.parametrize(
  ("change", "bos"),
  [
    ({}, False),
    ({"add_bos_token": True}, True),
    ({"pre": "llama-bpe"}, True),
    ({"pre": "llama-bpe", "add_bos_token": False}, False),
  ],
)
def test_bos_is_written_where_the_file_asks_for_it(change, bos):
  tokenizer = build_tokenizer(_byte_level(**change))
  assert (tokenizer("the")["input_ids"][0] == 1) == bos


def _sentencepiece(**change):
  """Like Gemma's: runs of spaces user-defined, with the worst scores."""
  tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "  ", "   ", "<b>"]
  types = [3, 3, 3, 3, 4, 4, 4]
  tokens += [f"<0x{i:02X}>" for i in range(256)]
  types += [6] * 256
  # "he" scores better than "th", so "the" is "t" + "he" before all else.
  words = [
    "\u2581",
    *"abcdefghijklmnopqrstuvwxyz",
    "he",
    "th",
    "the",
    "\u2581e",
  ]
  tokens += words
  types += [1] * len(words)
  scores = [-1000.0] * (len(tokens) - 4) + [-1.0, -2.0, -3.0, -4.0]
  metadata = {
    "model": "llama",
    "tokens": tokens,
    "token_type": types,
    "scores": scores,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "unknown_token_id": 3,
    "padding_token_id": 0,
    "add_space_prefix": False,
  } | change
  return {f"tokenizer.ggml.{k}": v for k, v in metadata.items()}


def test_pieces_merge_by_score():
  tokenizer = build_tokenizer(_sentencepiece())
  assert _pieces(tokenizer, "thex") == ["<bos>", "the", "x"]
  assert _pieces(tokenizer, "thth") == ["<bos>", "th", "th"]
  # "th" first would give "th", "e", "e".
  without_the = _sentencepiece()
  at = without_the["tokenizer.ggml.tokens"].index("the")
  without_the["tokenizer.ggml.tokens"][at] = "zz"
  assert _pieces(build_tokenizer(without_the), "the") == ["<bos>", "t", "he"]


def test_runs_of_spaces_come_before_words():
  tokenizer = build_tokenizer(_sentencepiece())
  # Not two spaces and "▁e", though "▁e" scores better.
  assert _pieces(tokenizer, "a   e")[1:] == ["a", "\u2581" * 3, "e"]


def test_sentencepiece_text_survives_and_falls_back_to_bytes():
  for prefix in (False, True):
    tokenizer = build_tokenizer(_sentencepiece(add_space_prefix=prefix))
    text = "the  é😀<b>\n a"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == 2
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
  assert "<0xC3>" in _pieces(tokenizer, "é")
  assert "<b>" in _pieces(tokenizer, "a<b>")


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"tokens": None}, "no vocabulary"),
    ({"model": "bert"}, "'bert' is not supported; supported: gpt2, llama"),
    ({"pre": "odd"}, "'odd' is not supported; supported: default"),
    ({"merges": None}, "no merges"),
    ({"eos_token_id": 9999}, "eos_token_id 9999, a vocabulary of 264"),
  ],
)
def test_vocabularies_that_cannot_be_read_are_refused(change, message):
  with pytest.raises(LoadError, match=message):
    build_tokenizer(_byte_level(**change))


def test_a_tokenizer_is_made_once_and_keyed_by_its_vocabulary(
  tmp_path, monkeypatch
):
  monkeypatch.setenv("SPEC_JAX_CACHE", str(tmp_path / "cache"))

  def write(name, eos):
    writer = gguf.GGUFWriter(tmp_path / name, "llama")
    metadata = _byte_level()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_token_merges(_MERGES)
    writer.add_eos_token_id(eos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf(tmp_path / name)

  folder = saved_tokenizer(write("a.gguf", 2))
  assert (folder / "tokenizer.json").exists()
  stamp = (folder / "tokenizer.json").stat().st_mtime_ns
  assert saved_tokenizer(write("b.gguf", 2)) == folder
  assert (folder / "tokenizer.json").stat().st_mtime_ns == stamp
  assert saved_tokenizer(write("c.gguf", 1)) != folder
  assert len(list(folder.parent.iterdir())) == 2  # nothing half made is left
