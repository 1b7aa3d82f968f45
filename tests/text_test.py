"""Prompts have one BOS; bytes and text agree with the tokenizer."""

import json
import subprocess
import sys

from hypothesis import given, settings, strategies as st
import numpy as np
import pytest
from spelling import BYTE_LEVEL, META_TABLE, METASPACE, OF_BYTE, TABLE, spell
from tiny_tokenizer import CHATML, byte_level_tokenizer
from tokenizers import Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast

from spec_jax.text import (
  StreamDecoder,
  decode,
  encode_chat,
  encode_prompt,
  token_bytes,
)

HELLO = [{"role": "user", "content": "hi"}]
BOS_CHATML = "{{ bos_token }}" + CHATML


def their_decode(tokenizer, ids):
  return tokenizer.decode(
    ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
  )


# --- prompts ---------------------------------------------------------------


def test_raw_text_gets_one_bos_if_the_tokenizer_writes_one():
  """A tokenizer that writes BOS writes one, whatever the text begins with."""
  tokenizer = byte_level_tokenizer(add_bos=True)
  bos = tokenizer.convert_tokens_to_ids("<|bos|>")
  assert encode_prompt(tokenizer, "hi") == [bos, *spell(b"hi")]
  assert encode_prompt(tokenizer, "<|bos|>hi") == [bos, *spell(b"hi")]
  assert encode_prompt(tokenizer, "<|bos|><|bos|>hi") == [bos, *spell(b"hi")]


def test_no_bos_is_invented():
  """A tokenizer that has BOS and does not write it leaves the text alone."""
  assert encode_prompt(BYTE_LEVEL, "hi") == spell(b"hi")
  bos = BYTE_LEVEL.bos_token_id
  assert encode_prompt(BYTE_LEVEL, "<|bos|><|bos|>") == [bos, bos]


def test_special_tokens_in_the_text_are_parsed():
  """A special token spelled out in a prompt is one id."""
  end = BYTE_LEVEL.convert_tokens_to_ids("<|im_end|>")
  ids = encode_prompt(BYTE_LEVEL, "h<|im_end|>i")
  assert ids == [*spell(b"h"), end, *spell(b"i")]


def test_an_empty_prompt_is_bos_or_an_error():
  """No prompt has no tokens."""
  bos = BYTE_LEVEL.bos_token_id
  assert encode_prompt(BYTE_LEVEL, "") == [bos]
  assert encode_prompt(byte_level_tokenizer(add_bos=True), "") == [bos]
  with pytest.raises(ValueError, match=r"0 tokens .* no BOS"):
    encode_prompt(byte_level_tokenizer(bos=None), "")


def test_a_prompt_is_one_string():
  """A list of prompts is refused, not read as one batch."""
  with pytest.raises(ValueError, match="one string, got list"):
    encode_prompt(BYTE_LEVEL, ["hi"])


@pytest.mark.parametrize("template", [CHATML, BOS_CHATML])
@pytest.mark.parametrize("add_bos", [False, True])
def test_a_chat_has_one_bos(template, add_bos):
  """One BOS whoever writes it; none if nobody does."""
  tokenizer = byte_level_tokenizer(add_bos=add_bos, chat_template=template)
  start, end, bos = tokenizer.convert_tokens_to_ids(
    ["<|im_start|>", "<|im_end|>", "<|bos|>"]
  )
  expected = [start, *spell(b"user\nhi"), end, *spell(b"\n")]
  expected += [start, *encode_prompt(BYTE_LEVEL, "assistant\n")]
  if add_bos or template == BOS_CHATML:
    expected = [bos, *expected]
  assert encode_chat(tokenizer, HELLO) == expected


def test_the_generation_prompt_can_be_left_out():
  """Without it a chat ends where its last message ends."""
  with_it = encode_chat(BYTE_LEVEL, HELLO)
  without = encode_chat(BYTE_LEVEL, HELLO, add_generation_prompt=False)
  assert with_it[: len(without)] == without
  start = BYTE_LEVEL.convert_tokens_to_ids("<|im_start|>")
  assert with_it.count(start) == 2 and without.count(start) == 1


def test_a_tokenizers_eos_does_not_end_a_chat():
  """What a tokenizer appends to raw text is not put after the template."""
  tokenizer = byte_level_tokenizer()
  eos = tokenizer.eos_token_id
  tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
    single="$A <|eos|>", special_tokens=[("<|eos|>", eos)]
  )
  assert tokenizer("hi")["input_ids"] == [*spell(b"hi"), eos]
  assert encode_chat(tokenizer, HELLO) == encode_chat(BYTE_LEVEL, HELLO)


def test_chats_that_cannot_be_written_are_refused():
  """No template, no message, and a refusal of the template are ValueErrors."""
  with pytest.raises(ValueError, match="no chat template"):
    encode_chat(METASPACE, HELLO)
  with pytest.raises(ValueError, match="at least one message, got none"):
    encode_chat(BYTE_LEVEL, [])
  refusing = byte_level_tokenizer(
    chat_template="{{ raise_exception('no system role') }}"
  )
  with pytest.raises(ValueError, match=r"\['user'\]: no system role"):
    encode_chat(refusing, HELLO)


# --- bytes -----------------------------------------------------------------


def test_byte_level_pieces_are_their_bytes():
  """The merges, the added tokens and all 256 bytes spell what they are."""
  assert sorted(OF_BYTE) == list(range(256))
  vocab = BYTE_LEVEL.get_vocab()
  assert TABLE[vocab["\u0120the"]] == b" the"
  assert TABLE[vocab["<call now>"]] == b"<call now>"
  assert OF_BYTE[0x20] == vocab["\u0120"] and OF_BYTE[0x0A] == vocab["\u010a"]
  for special in ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"):
    assert TABLE[vocab[special]] == b""
  assert TABLE[len(BYTE_LEVEL) :] == [b""] * 4


@pytest.mark.parametrize("added", ["\u00e9 x", "a\u00a0b", "\u20ac", "\u00e9"])
def test_added_tokens_are_spelled_as_the_tokenizer_spells_them(added):
  """Text outside the byte-level alphabet is itself, inside it is bytes."""
  tokenizer = byte_level_tokenizer()
  tokenizer.add_tokens([added])
  id_ = tokenizer.convert_tokens_to_ids(added)
  table = token_bytes(tokenizer, len(tokenizer))
  assert decode(table, [id_]) == their_decode(tokenizer, [id_])


def test_metaspace_pieces_are_their_bytes():
  """A metaspace is a space, <0x0A> is a newline, the rest is UTF-8."""
  vocab = METASPACE.get_vocab()
  assert META_TABLE[vocab["\u2581the"]] == b" the"
  assert (
    META_TABLE[vocab["<0x0A>"]] == b"\n"
    and META_TABLE[vocab["<0xFF>"]] == b"\xff"
  )
  assert META_TABLE[vocab["\u00e9"]] == b"\xc3\xa9"
  assert META_TABLE[:3] == [b"", b"", b""]


def test_a_smaller_model_vocabulary_cuts_the_table():
  """The table has the model's size, not the tokenizer's."""
  assert token_bytes(BYTE_LEVEL, 10) == TABLE[:10]


@pytest.mark.parametrize(
  "decoder",
  [
    decoders.WordPiece(),
    decoders.BPEDecoder(),
    decoders.Strip(" ", 1, 0),
    decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
    None,
  ],
)
def test_other_spellings_are_refused(decoder):
  """A decoder whose tokens depend on their neighbours is a ValueError."""
  backend = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
  if decoder is not None:
    backend.decoder = decoder
  tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
  with pytest.raises(ValueError, match="decoder"):
    token_bytes(tokenizer, 1)


def test_a_slow_tokenizer_is_refused():
  """Bytes come from a fast tokenizer's decoder."""
  with pytest.raises(ValueError, match="fast tokenizer, got object"):
    token_bytes(object(), 1)


# --- text ------------------------------------------------------------------


@given(st.lists(st.integers(0, len(BYTE_LEVEL) - 1), max_size=12))
@settings(max_examples=300, deadline=None)
def test_byte_level_text_is_the_tokenizers(ids):
  """Any ids, also those that spell no UTF-8, decode as the tokenizer does."""
  assert decode(TABLE, ids) == their_decode(BYTE_LEVEL, ids)


@given(st.text(max_size=12))
@settings(max_examples=200, deadline=None)
def test_metaspace_text_is_the_tokenizers_with_its_space(text):
  """Text comes back with the space that the tokenizer puts before it."""
  text = text.replace("\u2581", "_")
  ids = METASPACE(text, add_special_tokens=False)["input_ids"]
  if text:
    assert decode(META_TABLE, ids) == " " + text
    assert decode(META_TABLE, ids) == " " + their_decode(METASPACE, ids)
  # Mid-text there is no difference at all.
  letter = METASPACE.convert_tokens_to_ids("x")
  ids = [letter, *ids]
  assert decode(META_TABLE, ids) == their_decode(METASPACE, ids)


def test_a_metaspace_decoder_keeps_spaces_too():
  """T5's kind of decoder drops the first space only."""
  backend = Tokenizer(models.BPE(vocab={"\u2581a": 0, "b": 1}, merges=[]))
  backend.decoder = decoders.Metaspace()
  tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
  table = token_bytes(tokenizer, 2)
  assert decode(table, [0, 1, 0]) == " ab a"
  assert (
    their_decode(tokenizer, [1, 0, 1]) == decode(table, [1, 0, 1]) == "b ab"
  )


def test_a_broken_run_of_byte_tokens_loses_the_error_only():
  """<0x41><0xFF> is A and one error; the tokenizer drops the A as well."""
  ids = METASPACE.convert_tokens_to_ids(["x", "<0x41>", "<0xFF>"])
  assert decode(META_TABLE, ids) == "xA\ufffd"
  assert their_decode(METASPACE, ids) == "x\ufffd\ufffd"


@pytest.mark.parametrize("num", [1, 2, 3])
def test_a_character_cut_off_at_the_end_is_one_sign(num):
  """Any part of an emoji at the end is one U+FFFD, streamed or not."""
  ids = spell("a\U0001f600".encode()[: 1 + num])
  assert decode(TABLE, ids) == "a\ufffd"
  stream = StreamDecoder(TABLE)
  assert stream.push(ids) == "a" and stream.flush() == "\ufffd"


def test_padding_adds_nothing_and_unknown_ids_are_refused():
  """-1 is padding, not the last token; `V` is an error with both numbers."""
  table = [b"a", b"b"]
  assert decode(table, np.array([0, -1, 1, -1], np.int32)) == "ab"
  assert decode(table, []) == ""
  with pytest.raises(ValueError, match=r"id 2 .* of 2"):
    decode(table, [0, 2])


# --- environment -----------------------------------------------------------

_NO_TORCH = """
import json, sys
sys.modules["torch"] = None
sys.path.insert(0, sys.argv[1])
from tiny_tokenizer import byte_level_tokenizer
from spec_jax import stops, text
tokenizer = byte_level_tokenizer(add_bos=True)
table = text.token_bytes(tokenizer, len(tokenizer))
ids = text.encode_prompt(tokenizer, "the \u20ac")
stops.build_automaton(["e"], table)
from jax._src import xla_bridge
assert not xla_bridge._backends
print(json.dumps([ids, text.decode(table, ids)]))
"""


def test_tokenizers_need_no_torch_and_no_device(request):
  """Encoding, decoding and tables work without torch or a JAX back end."""
  folder = request.path.parent
  done = subprocess.run(
    [sys.executable, "-c", _NO_TORCH, str(folder)],
    cwd=folder.parent,
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  ids, text = json.loads(done.stdout.splitlines()[-1])
  assert text == "the \u20ac"
  assert ids == byte_level_tokenizer(add_bos=True)("the \u20ac")["input_ids"]
