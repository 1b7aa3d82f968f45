"""Vocabularies of letters, and drafts over another one than the target's."""

import dataclasses

import jax

from spec_jax.models import decoder, table
from spec_jax.retokenize import Retokenizer
from spec_jax.vocabulary_map import VocabularyMap


def letters_map(draft_ids, pieces, *, digest="letters"):
  """A map whose target tokens are letters: 0 is "a", 1 is "b".

  Args:
    draft_ids: the draft's id of each target token, -1 if it has none.
    pieces: per target token the draft tokens that the draft reads.
    digest: another one for another use of the same tables.
  """
  V, width = len(draft_ids), max(map(len, pieces))
  size = 1 + max(max(p) for p in pieces)
  rows = [[*p, *[0] * (width - len(p))] for p in pieces]
  # The draft's other tokens are digits, which the target does not have.
  draft_bytes = [b"0"] * max(size, V)
  for i, j in enumerate(draft_ids):
    if j >= 0:
      draft_bytes[j] = bytes([97 + i])
  letters = [bytes([97 + i]) for i in range(V)]

  def encode(text):
    ids = [ord(c) - 97 for c in text]
    return ids if all(i >= 0 for i in ids) else None

  words = Retokenizer(letters, draft_bytes, {}, encode, digest=digest)
  return VocabularyMap(draft_ids, rows, list(map(len, pieces)), words)


def close(vocab):
  """A map of a vocabulary on a like one: so a noisy copy is a fair draft.

  1 and 2 are exchanged; 0 is not shared and said by two tokens, so streams
  are longer than their text.
  """
  ids = [-1, 2, 1, *range(3, vocab)]
  return letters_map(ids, [[0, 3], *([i] for i in ids[1:])])


# Three target tokens over four of the draft: 0 and 2 are shared, 1 is said by
# two draft tokens.
WORDS = letters_map([3, -1, 1], [[3], [0, 2], [1]])


def table_draft():
  """Returns (model, params) of a table of four tokens."""
  model = table.build(table.TableConfig(4, period=2))
  return model, model.init(jax.random.key(5))


def transformer_draft(config, slots):
  """Returns (model, params) of a decoder of four tokens, else like `config`."""
  config = dataclasses.replace(config, vocab_size=4, max_length=slots)
  model = decoder.build(config)
  return model, jax.tree.map(lambda x: x * 1.5, model.init(jax.random.key(6)))
