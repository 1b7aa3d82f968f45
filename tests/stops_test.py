"""The device finds stop strings where `bytes.find` does."""

import re

from hypothesis import given, settings, strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_tokenizer import byte_level_tokenizer

from spec_jax import stops as stops_module
from spec_jax.stops import Automaton, advance, build_automaton
from spec_jax.text import StreamDecoder, decode, token_bytes, trim

ALL = 2**32 - 1
_advance = jax.jit(advance)

# Tokens over two letters, of none to four bytes: stop strings begin, end and
# repeat in all places.
PIECES = [b"", b"a", b"b", b"aa", b"ab", b"ba", b"aab", b"baba"]


def run(automaton, rows, *, patterns=None, first=None, block=None):
  """Walks rows of equal length, `block` tokens at a time, as a step does.

  Returns:
    `[B, J]` numpy hits.
  """
  # One number of states, so that `advance` compiles once a block size. The
  # rows added are never entered.
  more = max(0, 24 - len(automaton.next))
  automaton = Automaton(*(np.pad(x, ((0, more), (0, 0))) for x in automaton))
  tokens = np.array(rows, np.int32).reshape(len(rows), -1)
  num_rows, num_tokens = tokens.shape
  patterns = [ALL] * num_rows if patterns is None else patterns
  first = [0] * num_rows if first is None else first
  block = block or num_tokens
  state = jnp.zeros(num_rows, jnp.int32)
  hits = []
  for start in range(0, num_tokens, block):
    part = tokens[:, start : start + block]
    padding = ((0, 0), (0, block - part.shape[1]))
    states, hit = _advance(
      automaton,
      state,
      jnp.array(np.pad(part, padding, constant_values=-1)),
      jnp.array(patterns, jnp.uint32),
      jnp.array(first, jnp.int32),
      jnp.full(num_rows, start, jnp.int32),
    )
    state = states[:, -1]
    hits.append(np.asarray(hit)[:, : part.shape[1]])
  return np.concatenate(hits, axis=1)


def ends_in(text, pattern, start):
  """Says whether `pattern` occurs in `text` with its end past `start`."""
  return text.find(pattern, max(0, start - len(pattern) + 1)) >= 0


def expected_hits(pieces, tokens, patterns, first=0):
  """Looks for the patterns in the growing text, one token at a time."""
  hits, text = [], b""
  for j, token in enumerate(tokens):
    before = len(text)
    text += pieces[token] if 0 <= token < len(pieces) else b""
    found = any(ends_in(text, p, before) for p in patterns)
    hits.append(found and j + 1 >= first)
  return hits


# --- by hand ---------------------------------------------------------------


def test_the_worked_example():
  """The table in `build_automaton`'s docstring is the one it builds."""
  automaton = build_automaton(["bc"], [b"ab", b"c"])
  assert automaton.next.tolist() == [[1, 0], [1, 2], [1, 0]]
  assert automaton.match.tolist() == [[0, 0], [0, 1], [0, 0]]
  assert automaton.next.dtype == np.int32
  assert automaton.match.dtype == np.uint32


@pytest.mark.parametrize("block", [1, 2, 3, 4])
def test_a_stop_string_ends_within_a_block_or_across_blocks(block):
  """ "ab" "c" "d" "e" with "bc" stops at "c", wherever blocks end."""
  automaton = build_automaton(["bc"], [b"ab", b"c", b"d", b"e"])
  hits = run(automaton, [[0, 1, 2, 3]], block=block)
  assert hits.tolist() == [[False, True, False, False]]


def test_the_earliest_of_two_stop_strings_in_a_block_is_found():
  """Each completed stop string is a hit, so the first hit is the earliest."""
  automaton = build_automaton(["de", "bc"], [b"a", b"b", b"c", b"d", b"e"])
  hits = run(automaton, [[0, 1, 2, 3, 4]])
  assert hits.tolist() == [[False, False, True, False, True]]


def test_a_block_longer_than_its_stop_string():
  """A stop string at the start of a block is found there."""
  automaton = build_automaton(["b"], [b"a", b"b"])
  assert run(automaton, [[1, 0, 0, 0]]).tolist() == [[True] + [False] * 3]


@pytest.mark.parametrize("tokens", [[1, 1, 1, 2], [3, 4], [1, 6], [3, 1, 2]])
def test_a_stop_string_overlapping_its_own_beginning(tokens):
  """ "aab" is found in "aaab", however it is cut into tokens."""
  assert b"".join(PIECES[t] for t in tokens) == b"aaab"
  hits = run(build_automaton(["aab"], PIECES), [tokens])[0].tolist()
  assert hits == [False] * (len(tokens) - 1) + [True]


def test_a_stop_string_inside_a_token_is_found():
  """A stop string that neither begins nor ends the token is found."""
  automaton = build_automaton(["ab"], [b"xxabxx", b"b"])
  assert run(automaton, [[1, 0, 1]]).tolist() == [[False, True, False]]


def test_the_text_goes_on_after_a_match_that_does_not_count():
  """In a row for which "a" does not count, "ab" is still found."""
  automaton = build_automaton(["a", "ab"], [b"a", b"b"])
  hits = run(automaton, [[0, 1, 1]] * 4, patterns=[0, 1, 2, 3])
  assert hits.tolist() == [
    [False, False, False],
    [True, False, False],
    [False, True, False],
    [True, True, False],
  ]


def test_the_last_of_32_stop_strings_counts():
  """Bit 31 is a stop string like the others."""
  pieces = [bytes([65 + i]) for i in range(32)]
  automaton = build_automaton(pieces, pieces)
  hits = run(automaton, [[30, 31]] * 2, patterns=[1 << 31, 1 << 30])
  assert hits.tolist() == [[False, True], [True, False]]


def test_a_hit_counts_from_its_first_token_on():
  """With `first` 3 the third output token may stop, the second may not."""
  automaton = build_automaton(["b"], [b"a", b"b"])
  rows, first = [[1, 1, 1, 1]] * 3, [0, 3, 4]
  for block in (1, 2, 4):
    hits = run(automaton, rows, first=first, block=block)
    assert np.argmax(hits, axis=1).tolist() == [0, 2, 3]


def test_tokens_outside_the_table_change_nothing():
  """-1 and ids that only the model has keep the state and never hit."""
  automaton = build_automaton(["ab", "aa"], [b"a", b"b"])
  # Indexing with -1 or, clamped, with 2 would read "b", with 0 instead "a".
  hits = run(automaton, [[0, -1, 2, 10**9, 1], [-1, -(10**9), 2, 1, 1]])
  assert hits.tolist() == [[False] * 4 + [True], [False] * 5]


def test_no_tokens_are_no_hits():
  """A block of no tokens gives arrays of no columns."""
  automaton = build_automaton(["ab"], PIECES)
  zeros = jnp.zeros(2, jnp.int32)
  states, hit = advance(
    automaton,
    zeros,
    jnp.zeros((2, 0), jnp.int32),
    jnp.full(2, ALL, jnp.uint32),
    zeros,
    zeros,
  )
  assert states.shape == hit.shape == (2, 0)


def test_no_stop_strings_never_hit():
  """An automaton of no stop strings has one state."""
  automaton = build_automaton([], PIECES)
  assert automaton.next.shape == (1, len(PIECES))
  assert not run(automaton, [[1, 2, 3]]).any()


# --- against bytes.find ----------------------------------------------------

_STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


@given(
  _STOPS,
  st.lists(
    st.lists(st.integers(-1, len(PIECES)), min_size=12, max_size=12),
    min_size=3,
    max_size=3,
  ),
  st.lists(st.integers(0, 15), min_size=3, max_size=3),
  st.lists(st.integers(0, 8), min_size=3, max_size=3),
  st.sampled_from([1, 3, 5, 12]),
)
@settings(max_examples=300, deadline=None)
def test_hits_are_where_find_finds(stops, rows, patterns, first, block):
  """Random texts, cuts, blocks and rows agree with a search of the text."""
  hits = run(
    build_automaton(stops, PIECES),
    rows,
    patterns=patterns,
    first=first,
    block=block,
  )
  for row, tokens in enumerate(rows):
    active = [s.encode() for i, s in enumerate(stops) if patterns[row] >> i & 1]
    expected = expected_hits(PIECES, tokens, active, first[row])
    assert hits[row].tolist() == expected


@given(
  _STOPS,
  st.lists(st.integers(0, 7), min_size=12, max_size=12),
  st.integers(0, 6),
)
@settings(max_examples=200, deadline=None)
def test_the_stream_stops_where_the_device_does(stops, tokens, first):
  """The host's stream stops at the device's first hit and shows the trim."""
  hits = run(build_automaton(stops, PIECES), [tokens], first=[first])[0]
  stream = StreamDecoder(PIECES, stops, first=first)
  shown, stopped = "", []
  for token in tokens:
    shown += stream.push([token])
    stopped.append(stream.stopped)
  assert stopped == np.logical_or.accumulate(hits).tolist()
  kept = tokens[: int(np.argmax(hits)) + 1] if hits.any() else tokens
  text = b"".join(PIECES[t] for t in kept)
  skip = len(b"".join(PIECES[t] for t in kept[: max(0, first - 1)]))
  whole = trim(text, stops, skip=skip) if hits.any() else text
  assert shown + stream.flush() == whole.decode()


def test_ids_are_kept_up_to_the_token_that_stops():
  """Text is trimmed to "a"; ids keep both tokens of the stop string."""
  table = [b"ab", b"c", b"d", b"e"]
  tokens = [0, 1, 2, 3]
  hit = run(build_automaton(["bc"], table), [tokens])[0]
  ids = tokens[: int(np.argmax(hit)) + 1]
  assert ids == [0, 1]
  assert trim(decode(table, ids).encode(), ["bc"]) == b"a"


def test_a_constraint_follows_the_kept_tokens_only():
  """The state after a cut is the state of the kept text, not of the draft."""
  automaton = build_automaton(["abc"], [b"a", b"b", b"c", b"z"])
  zeros = jnp.zeros(1, jnp.int32)
  everywhere = jnp.full(1, ALL, jnp.uint32)
  walk = lambda state, row: _advance(
    automaton, state, jnp.array([row], jnp.int32), everywhere, zeros, zeros
  )
  # Drafted "abz", of which "ab" is kept; then comes "c".
  drafted, _ = walk(zeros, [0, 1, 3])
  kept, _ = walk(zeros, [0, 1])
  assert drafted[0, 1] == kept[0, 1] != drafted[0, 2]
  _, hit = walk(drafted[:, 1], [2])
  assert hit.tolist() == [[True]]
  _, hit = walk(drafted[:, 2], [2])
  assert hit.tolist() == [[False]]


def test_characters_are_found_byte_by_byte():
  """A stop string of several bytes a character is found across byte tokens."""
  tokenizer = byte_level_tokenizer()
  table = token_bytes(tokenizer, len(tokenizer))
  ids = tokenizer("the \U0001f600!")["input_ids"]
  automaton = build_automaton(["\U0001f600"], table)
  hits = run(automaton, [ids])[0].tolist()
  assert hits == [False] * (len(ids) - 2) + [True, False]


# --- forms and errors ------------------------------------------------------


def test_the_automaton_may_be_closed_over():
  """As a constant of a compiled function it gives the same states and hits."""
  automaton = build_automaton(["ab", "ba"], PIECES)
  rest = (
    jnp.array([0, 1], jnp.int32),
    jnp.array([[1, 2, 5], [2, 0, 7]], jnp.int32),
    jnp.array([3, 2], jnp.uint32),
    jnp.array([0, 0], jnp.int32),
    jnp.array([0, 4], jnp.int32),
  )
  closed = jax.jit(lambda *args: advance(automaton, *args))(*rest)
  passed = _advance(automaton, *rest)
  plain = advance(Automaton(*map(jnp.asarray, automaton)), *rest)
  for a, b, c in zip(closed, passed, plain, strict=True):
    assert (a == b).all() and (a == c).all()
  assert passed[0].dtype == jnp.int32 and passed[1].dtype == jnp.bool_


def test_stop_strings_that_cannot_be_found_are_refused():
  """Empty, too many, and one string in place of a list are ValueErrors."""
  with pytest.raises(ValueError, match="stop string 0 is empty"):
    build_automaton([""], PIECES)
  with pytest.raises(ValueError, match=r"at most 32 .* got 33"):
    build_automaton(["a"] * 33, PIECES)
  with pytest.raises(ValueError, match="'ab' alone"):
    build_automaton("ab", PIECES)


def test_a_table_that_is_too_large_is_refused_before_it_is_built():
  """The message has the size, the states and the tokens."""
  # 33 bytes: 34 states; 34 * 10**6 * 8 bytes = 259.4 MiB.
  with pytest.raises(
    ValueError, match=re.escape("259 MiB (34 states, 1000000 tokens)")
  ):
    build_automaton(["a" * 33], [b""] * 10**6)


def test_equal_beginnings_share_states():
  """A table has a state for each different beginning, and one."""
  automaton = build_automaton(["abc", "abd", "ab"], PIECES)
  assert automaton.next.shape == (5, len(PIECES))
  assert stops_module._MAX_TABLE_BYTES == 256 * 2**20
