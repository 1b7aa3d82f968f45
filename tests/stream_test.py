"""Streamed pieces join to the text, however split, up to its stop strings."""

import itertools

from hypothesis import given, settings, strategies as st
import numpy as np
import pytest
from spelling import META_TABLE, METASPACE, TABLE, spell

from spec_jax.text import StreamDecoder, stop_bytes, trim

# Bytes that make, and break, characters of two to four bytes.
_BYTES = st.sampled_from([0x61, 0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80, 0xE2, 0xFF])
_TEXTS = st.one_of(
  st.lists(_BYTES, max_size=24).map(bytes),
  st.text("a\u00e9\u20ac\U0001f600", max_size=8).map(str.encode),
)


def chop(draw, items):
  """Splits a list at random places."""
  places = draw(st.lists(st.integers(0, len(items)), max_size=6).map(sorted))
  edges = [0, *places, len(items)]
  return [items[a:b] for a, b in itertools.pairwise(edges)]


@given(_TEXTS, st.data())
@settings(max_examples=400, deadline=None)
def test_a_stream_is_the_text_however_it_is_split(text, data):
  """Pieces and flush join to the text, and no piece has half a character."""
  stream = StreamDecoder(TABLE)
  pieces = [stream.push(ids) for ids in chop(data.draw, spell(text))]
  whole = text.decode("utf-8", "replace")
  assert "".join(pieces) + stream.flush() == whole
  # What was pushed so far is a prefix of the whole: nothing is taken back.
  for i in range(len(pieces)):
    assert whole.startswith("".join(pieces[: i + 1]))


@given(_TEXTS, st.data())
@settings(max_examples=200, deadline=None)
def test_byte_fallback_streams_alike(text, data):
  """Byte tokens of a Metaspace tokenizer stream as any others."""
  ids = METASPACE.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in text])
  stream = StreamDecoder(META_TABLE)
  pieces = [stream.push(part) for part in chop(data.draw, ids)]
  assert "".join(pieces) + stream.flush() == text.decode("utf-8", "replace")


def test_all_tokens_of_a_block_are_streamed():
  """A push of several tokens returns the text of all of them, at once."""
  stream = StreamDecoder(TABLE)
  assert stream.push(spell(b"abcd")) == "abcd"
  assert stream.push(np.array(spell(b"ef"))) == "ef"
  assert stream.flush() == ""


def test_the_beginning_of_a_stop_string_is_held_back():
  """Text that may become a stop string waits; flush gives it back."""
  stream = StreamDecoder(TABLE, ["STOP"])
  assert stream.push(spell(b"a ST")) == "a "
  assert stream.push(spell(b"O")) == ""
  assert stream.push(spell(b"SxS")) == "STOSx"
  assert stream.flush() == "S" and not stream.stopped


def test_a_stop_string_is_never_shown():
  """Text ends where the stop string begins; later tokens add nothing."""
  table = [b"ab", b"c", b"d", b"e"]
  stream = StreamDecoder(table, ["bc"])
  assert stream.push([0, 1, 2, 3]) == "a"
  assert stream.stopped
  assert stream.push([2]) == "" and stream.flush() == ""


def first_hit(pieces, patterns, first):
  """Returns the index of the token that completes a stop string, or None."""
  for i in range(len(pieces)):
    before, now = b"".join(pieces[:i]), b"".join(pieces[: i + 1])
    done = any(
      now.count(p) and _ends_after(now, p, len(before)) for p in patterns
    )
    if done and i + 1 >= first:
      return i
  return None


def _ends_after(text, pattern, start):
  ends = [
    i + len(pattern)
    for i in range(len(text))
    if text[i : i + len(pattern)] == pattern
  ]
  return any(end > start for end in ends)


_PIECES = [b"", b"a", b"b", b"ab", b"ba", b"aab", b"\xc3", b"\xa9"]


@given(
  st.lists(st.integers(0, len(_PIECES) - 1), max_size=14),
  st.lists(st.text("ab\u00e9", min_size=1, max_size=4), max_size=3),
  st.integers(0, 5),
  st.data(),
)
@settings(max_examples=500, deadline=None)
def test_a_stream_with_stops_is_the_trimmed_text(ids, stops, first, data):
  """The stream joins to the text before the first stop string that counts."""
  pieces = [_PIECES[i] for i in ids]
  patterns = [s.encode() for s in stops]
  last = first_hit(pieces, patterns, first)
  text = b"".join(pieces if last is None else pieces[: last + 1])
  expected = text
  if last is not None:
    skip = b"".join(pieces[:last])
    starts = [
      i
      for i in range(len(text))
      for p in patterns
      if text[i : i + len(p)] == p and i + len(p) > len(skip)
    ]
    expected = text[: min(starts)]
  stream = StreamDecoder(_PIECES, stops, first=first)
  parts = [stream.push(part) for part in chop(data.draw, ids)]
  shown = "".join(parts) + stream.flush()
  assert shown == expected.decode("utf-8", "replace")
  assert stream.stopped == (last is not None)
  skipped = b"".join(pieces[: max(0, first - 1)])
  cut = text if last is None else trim(text, stops, skip=len(skipped))
  assert cut == expected


@pytest.mark.parametrize(
  ("text", "stops", "expected"),
  [
    (b"abcde", ["bc"], b"a"),
    (b"abcde", ["e", "cd"], b"ab"),
    (b"xabcd", ["bc", "abcd"], b"x"),
    (b"aaab", ["aab"], b"a"),
    (b"abab", ["ab"], b""),
    (b"abc", ["x"], b"abc"),
    (b"abc", [], b"abc"),
    ("ab\u00e9".encode(), ["\u00e9"], b"ab"),
    (b"a\xc3", [b"\xc3"], b"a"),
  ],
)
def test_trim_cuts_at_the_earliest_start(text, stops, expected):
  """The earliest start of any stop string ends the text."""
  assert trim(text, stops) == expected


def test_trim_skips_what_did_not_count():
  """A stop string that ended before the minimum stays in the text."""
  assert trim(b"ab ab", ["ab"], skip=2) == b"ab "
  assert trim(b"ab ab", ["ab"], skip=1) == b""
  assert trim(b"ab ab", ["ab"], skip=5) == b"ab ab"


def test_stop_strings_are_several_and_not_empty():
  """One string in place of a list, or an empty one, is refused."""
  assert stop_bytes(["\u00e9", b"\xff"]) == (b"\xc3\xa9", b"\xff")
  with pytest.raises(ValueError, match="'END' alone"):
    stop_bytes("END")
  with pytest.raises(ValueError, match="stop string 1 is empty"):
    StreamDecoder(TABLE, ["a", ""])
