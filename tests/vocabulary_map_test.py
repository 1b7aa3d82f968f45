"""How one vocabulary is said in another, and text tokenised again."""

import re

import numpy as np
import pytest
from tiny_tokenizer import byte_level_tokenizer, metaspace_tokenizer

from spec_jax.models import table
from spec_jax.text import token_bytes
from spec_jax.vocabulary_map import (
  VocabularyMap,
  check_sizes,
  map_vocabularies,
  same_ids,
)
from tests import two_vocabularies

BYTES, SPACES = byte_level_tokenizer(), metaspace_tokenizer()
V_BYTES, V_SPACES = 300, 310
PAIRS = {
  "bytes": (BYTES, V_BYTES, SPACES, V_SPACES),
  "spaces": (SPACES, V_SPACES, BYTES, V_BYTES),
}
every = pytest.mark.parametrize("pair", PAIRS)


def map_of(pair) -> VocabularyMap:
  """The map of a target and a draft."""
  target, V, draft, V_d = PAIRS[pair]
  return map_vocabularies(target, draft, V, V_d)


@every
def test_every_token_is_said_by_tokens_of_its_bytes(pair):
  """V7: both have all bytes, so nothing is lost but what has no bytes."""
  target, V, draft, V_d = PAIRS[pair]
  ours, theirs = token_bytes(target, V), token_bytes(draft, V_d)
  words = map_of(pair)
  shared = 0
  for i, name in enumerate(ours):
    said = words.pieces[i, : words.num_pieces[i]]
    if not name:
      continue
    assert b"".join(theirs[j] for j in said) == name
    if words.draft_ids[i] >= 0:
      assert said.tolist() == [words.draft_ids[i]]
      shared += 1
    else:
      one = [j for j, other in enumerate(theirs) if other == name]
      same = [j for j, other in enumerate(ours) if other == name]
      assert not one or len(same) > 1  # a second id of the same bytes
  # 256 bytes and the merges, which are the same in both.
  assert shared == 256 + 7


def test_a_word_the_draft_lacks_is_said_in_pieces():
  """By the longest tokens where the draft's tokenizer adds a space."""
  target = byte_level_tokenizer()
  target.add_tokens(["then", " then"])
  ids = target.get_vocab()
  words = map_vocabularies(target, SPACES, V_BYTES, V_SPACES)
  theirs = SPACES.get_vocab()
  for word, pieces in (
    ("then", ["the", "n"]),
    (" then", ["\u2581the", "n"]),
    ("<call now>", [*"<call", "\u2581", *"now>"]),
  ):
    expected = [
      theirs[p] if p in theirs else theirs[f"<0x{ord(p):02X}>"] for p in pieces
    ]
    i = ids[word]
    assert words.pieces[i, : words.num_pieces[i]].tolist() == expected
    assert words.draft_ids[i] == -1


def test_of_a_very_long_word_the_draft_reads_the_end():
  """40 letters: the last 16 of them."""
  target = byte_level_tokenizer()
  target.add_tokens(["b" * 30 + "cdefghijkl"])
  words = map_vocabularies(target, SPACES, V_BYTES, V_SPACES)
  i = target.get_vocab()["b" * 30 + "cdefghijkl"]
  expected = [SPACES.get_vocab()[c] for c in "bbbbbbcdefghijkl"]
  assert words.pieces[i, : words.num_pieces[i]].tolist() == expected


def test_special_tokens_go_by_name_and_role():
  """The ends of a text stand for each other; others are read as a feed."""
  ids, theirs = BYTES.get_vocab(), SPACES.get_vocab()
  words = map_of("bytes")
  assert words.draft_ids[ids["<|bos|>"]] == theirs["<s>"]
  assert words.draft_ids[ids["<|eos|>"]] == theirs["</s>"]
  lone = ids["<|im_start|>"]
  assert words.draft_ids[lone] == -1
  assert words.pieces[lone, 0] == theirs["<0x0A>"]
  assert words.num_pieces[lone] == 1
  same = map_vocabularies(BYTES, byte_level_tokenizer(), V_BYTES, V_BYTES)
  assert same.draft_ids[lone] == lone


def test_one_vocabulary_maps_on_itself():
  """Every id with a name to itself; equal maps have equal hashes."""
  found = map_vocabularies(BYTES, byte_level_tokenizer(), V_BYTES, V_BYTES)
  size = len(BYTES)
  assert found.draft_ids[:size].tolist() == [*range(size)]
  assert (found.draft_ids[size:] == -1).all()
  assert (found.num_pieces == 1).all() and found.num_shared == size
  again = map_vocabularies.__wrapped__(
    BYTES, byte_level_tokenizer(), V_BYTES, V_BYTES
  )
  assert again is not found and again == found and hash(again) == hash(found)
  assert found != map_of("bytes") and found != same_ids(V_BYTES, V_BYTES)


def test_ids_that_only_the_target_has_are_not_shared():
  assert same_ids(5, 3).draft_ids.tolist() == [0, 1, 2, -1, -1]
  assert same_ids(3, 5).draft_ids.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (same_ids(4, 5), "for 4 target and more than 3 draft tokens, the model"),
    (VocabularyMap([-1] * 5, [[0]] * 5, [1] * 5), "share no token"),
    (VocabularyMap([5] * 5, [[5]] * 5, [1] * 5), "models have 5 and 5"),
  ],
)
def test_a_map_of_other_models_is_refused(words, message):
  config = table.TableConfig(5)
  with pytest.raises(ValueError, match=message):
    check_sizes(words, config.vocab_size, config.vocab_size)


# --- text tokenised again ---------------------------------------------------


def again(pair, tail, said):
  """Returns the target tokens after a tail, both given as text or ids."""
  target, _, draft, _ = PAIRS[pair]

  def ids(tokenizer, text):
    if not isinstance(text, str):
      return text
    return tokenizer(text, add_special_tokens=False)["input_ids"]

  return map_of(pair).retokenize.ids(ids(target, tail), ids(draft, said))


def test_words_are_split_as_the_target_would():
  """The example of `Retokenizer.ids`, on the byte-level tokenizer."""
  vocab = BYTES.get_vocab()
  a, th, the, m = (vocab[p] for p in ("\u0120a", "th", "\u0120the", "m"))
  words = map_of("bytes").retokenize
  e_m = [SPACES.get_vocab()[p] for p in "em"]
  assert words.ids([a, the], e_m[1:]) == [m]
  # "the" is one token of the target: none begins after "th".
  assert words.ids([a, th], e_m) == []
  assert words.ids([a], []) == []
  # Nine bytes of the draft are one token less of the target.
  said = [SPACES.get_vocab()[p] for p in ("\u2581", "t", "h", "e", "m")]
  assert words.ids([a], said) == [the, m]


@every
@pytest.mark.parametrize(
  "text", ["the anthem", "in é the", "日本 the", "a 👩 in", "\n\n the"]
)
def test_what_was_said_comes_back_as_the_same_bytes(pair, text):
  """V3: at every split into tail and words of the draft."""
  target, V, draft, V_d = PAIRS[pair]
  ours, theirs = token_bytes(target, V), token_bytes(draft, V_d)
  whole = target(text, add_special_tokens=False)["input_ids"]
  spelled = b"".join(ours[i] for i in whole)
  words = map_of(pair)
  for cut in range(len(whole)):
    tail, rest = whole[:cut], whole[cut:]
    said = [j for i in rest for j in words.pieces[i, : words.num_pieces[i]]]
    assert spelled.endswith(b"".join(theirs[j] for j in said))
    out = words.retokenize.ids(tail[-8:], said)
    assert out == rest, cut
  assert len(whole) >= 3


def test_half_a_character_is_left_out():
  """Two of the three bytes of a sign: the words before it alone."""
  ids = BYTES("日", add_special_tokens=False)["input_ids"]
  theirs = SPACES.get_vocab()
  halves = [theirs[f"<0x{b:02X}>"] for b in "日".encode()]
  words = map_of("bytes").retokenize
  an = SPACES.get_vocab()["an"]
  assert words.ids([], [an, *halves[:2]]) == [BYTES.get_vocab()["an"]]
  assert words.ids([], halves) == ids
  # The tail ends inside the sign, and the draft completes it.
  assert words.ids(ids[:2], halves[2:]) == ids[2:]
  assert words.ids([], halves[1:]) == []  # no UTF-8


def test_words_end_at_a_special_token():
  """It is proposed if the target has it; after one, words begin anew."""
  vocab, theirs = BYTES.get_vocab(), SPACES.get_vocab()
  words = map_of("bytes").retokenize
  m, end = theirs["m"], theirs["</s>"]
  assert words.ids([vocab["a"]], [m, end, m]) == [vocab["m"], vocab["<|eos|>"]]
  assert words.ids([vocab["a"]], [end]) == [vocab["<|eos|>"]]
  assert words.ids([vocab["a"]], [m, theirs["<unk>"], m]) == [vocab["m"]]
  start = [vocab["t"], vocab["<|im_start|>"]]
  # Not "th": the t belongs to the text before.
  assert words.ids(start, [theirs["h"], theirs["e"]]) == [
    vocab["h"],
    vocab["e"],
  ]


def test_text_that_spells_a_special_token_is_not_proposed():
  """Half of it committed: the tokenizer would read the token itself."""
  tail = [BYTES.get_vocab()[c] for c in "<|eos|"]
  theirs = SPACES.get_vocab()
  assert map_of("bytes").retokenize.ids(tail, [theirs["<0x3E>"]]) == []


def test_rows_are_cut_and_padded():
  """Rows that want nothing, and more target tokens than there is room for."""
  words = map_of("spaces").retokenize
  vocab, theirs = SPACES.get_vocab(), BYTES.get_vocab()
  call, m = theirs["<call now>"], theirs["m"]
  out = words.rows(
    [[-1, vocab["a"]], [-1, vocab["a"]], [-1, -1]],
    [[call, m], [m, m], [m, m]],
    [True, False, True],
  )
  first = [vocab["<0x3C>"], vocab["c"]]
  assert out.tolist() == [first, [-1, -1], [vocab["m"], vocab["m"]]]
  assert re.match("VocabularyMap", repr(map_of("spaces")))


def test_words_that_were_not_said_are_not_retokenised():
  """A draft that was asked for less than K tokens leaves -1 after them."""
  words = two_vocabularies.letters_map([0, 1, 2], [[0], [1], [2]]).retokenize
  tails, wanted = np.array([[2], [2]]), np.array([True, True])
  said = np.array([[1, -1, -1], [1, 0, 0]])
  found = words.rows(tails, said, wanted)
  assert found.tolist() == [[1, -1, -1], [1, 0, 0]]
