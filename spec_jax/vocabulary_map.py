"""How the tokens of one vocabulary are said in another: tables for a draft.

A target token is *shared* if the draft's vocabulary has a token of the same
bytes, or, for special tokens, of the same name. Any other target token is read
by the draft as a fixed sequence of its own tokens that spell the same bytes.

Reference: Timor et al. 2025, "Accelerating LLM inference with lossless
speculative decoding algorithms for heterogeneous vocabularies".
"""

from collections.abc import Mapping, Sequence
import functools
import hashlib
from typing import Any

import numpy as np

from spec_jax.retokenize import Retokenizer, exact_ids
from spec_jax.text import token_bytes

# Draft tokens for one target token, at most: of a longer one (a run of
# spaces, a rule of dashes) the draft reads the end.
_MAX_PIECES = 16
# What the draft reads in place of a token it cannot spell.
_FILLERS = (b"\n", b" ")


class VocabularyMap:
  """The tables of a pair of vocabularies; equal and hashed by content.

  Attributes:
    draft_ids: `[V]` int32, the draft's id of each shared target token, else
      -1.
    pieces: `[V, M]` int32, the draft tokens that say a target token.
    num_pieces: `[V]` int32, how many of them, at least 1.
    retokenize: turns draft tokens into target tokens on the host, or None
      where ids mean the same in both vocabularies.
    digest: hash of all this.
  """

  def __init__(
    self,
    draft_ids: Any,
    pieces: Any,
    num_pieces: Any,
    retokenize: Retokenizer | None = None,
  ):
    """Holds tables; see the attributes."""
    self.draft_ids = np.asarray(draft_ids, np.int32)
    self.pieces = np.asarray(pieces, np.int32)
    self.num_pieces = np.asarray(num_pieces, np.int32)
    self.retokenize = retokenize
    self.digest = _digest(
      self.draft_ids.tobytes(),
      self.pieces.tobytes(),
      str(self.pieces.shape).encode(),
      self.num_pieces.tobytes(),
      b"" if retokenize is None else retokenize.digest.encode(),
    )

  @property
  def num_shared(self) -> int:
    """Target tokens that the draft's vocabulary has too."""
    return int((self.draft_ids >= 0).sum())

  def __eq__(self, other: object) -> bool:
    return isinstance(other, VocabularyMap) and other.digest == self.digest

  def __hash__(self) -> int:
    return hash(self.digest)

  def __repr__(self) -> str:
    return (
      f"VocabularyMap({self.num_shared} of {len(self.draft_ids)} tokens shared)"
    )


def _digest(*parts: bytes) -> str:
  return hashlib.sha256(b"|".join(parts)).hexdigest()


def same_ids(vocab_size: int, draft_vocab_size: int) -> VocabularyMap:
  """Returns the map of vocabularies whose ids mean the same.

  Args:
    vocab_size: of the target.
    draft_vocab_size: of the draft; ids that only one has are not shared.
  """
  ids = np.arange(vocab_size)
  return VocabularyMap(
    np.where(ids < draft_vocab_size, ids, -1),
    np.minimum(ids, draft_vocab_size - 1)[:, None],
    np.ones(vocab_size),
  )


def check_sizes(
  vocabulary_map: VocabularyMap, vocab_size: int, draft_vocab_size: int
) -> None:
  """Checks that a map is of these vocabularies, and that they share a token.

  Raises:
    ValueError: if it is for other sizes, or nothing is shared.
  """
  rows, most = len(vocabulary_map.draft_ids), int(vocabulary_map.pieces.max())
  if rows != vocab_size or most >= draft_vocab_size:
    raise ValueError(
      f"the vocabulary map is for {rows} target and more than {most} draft "
      f"tokens, the models have {vocab_size} and {draft_vocab_size}"
    )
  if not vocabulary_map.num_shared:
    raise ValueError("the vocabularies of target and draft share no token")


@functools.lru_cache(maxsize=4)
def map_vocabularies(
  target: Any, draft: Any, vocab_size: int, draft_vocab_size: int
) -> VocabularyMap:
  """Makes the map of two tokenizers.

  A string that two ids of a vocabulary spell belongs to the one that is not a
  byte token, then to the lower. Special tokens are matched by name; the tokens
  that begin and end a text stand for each other if they have no namesake. A
  target token that the draft cannot spell, or without bytes, is read as a line
  feed.

  Args:
    target: the target's fast tokenizer.
    draft: the draft's fast tokenizer.
    vocab_size: `V` of the target.
    draft_vocab_size: of the draft model.

  Returns:
    VocabularyMap that can retokenize.

  Raises:
    ValueError: if a tokenizer's spelling is unknown, see `token_bytes`.
  """
  ours, theirs = _names(target, vocab_size), _names(draft, draft_vocab_size)
  our_ids, their_ids = _by_name(target, ours), _by_name(draft, theirs)
  draft_ids = np.full(vocab_size, -1, np.int32)
  for name, i in our_ids.items():
    draft_ids[i] = their_ids.get(name, -1)
  for role in ("bos_token_id", "eos_token_id"):
    own, other = getattr(target, role, None), getattr(draft, role, None)
    if not isinstance(own, int) or not isinstance(other, int):
      continue
    exist = own < vocab_size and other < draft_vocab_size
    if exist and draft_ids[own] < 0 and other not in draft_ids:
      draft_ids[own] = other
  said = _spell(draft, ours, theirs, their_ids, draft_ids)
  num = np.array([len(ids) for ids in said])
  pieces = np.zeros((vocab_size, int(num.max())), np.int32)
  for row, ids in zip(pieces, said, strict=True):
    row[: len(ids)] = ids
  back = {
    int(draft_ids[i]): int(i)
    for i in np.flatnonzero(draft_ids >= 0)
    if isinstance(ours[i], str)
  }
  translator = Retokenizer(
    [name if isinstance(name, bytes) else b"" for name in ours],
    [name if isinstance(name, bytes) else b"" for name in theirs],
    back,
    lambda text: exact_ids(target, ours, [text])[0],
    digest=_digest(
      target.backend_tokenizer.to_str().encode(),
      draft.backend_tokenizer.to_str().encode(),
    ),
  )
  return VocabularyMap(draft_ids, pieces, num, translator)


def _names(tokenizer: Any, vocab_size: int) -> list[bytes | str | None]:
  """Returns what each id stands for: bytes, or a special token's name."""
  names: list[bytes | str | None] = [
    spelled or None for spelled in token_bytes(tokenizer, vocab_size)
  ]
  added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
  for i, token in added.items():
    if token.special and i < vocab_size:
      names[i] = token.content
  return names


def _by_name(
  tokenizer: Any, names: Sequence[bytes | str | None]
) -> dict[bytes | str, int]:
  """Returns the id of each name; byte tokens yield to others of their bytes."""
  vocab = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=True)
  of_bytes = {
    i for piece, i in vocab.items() if len(piece) == 6 and piece[:3] == "<0x"
  }
  order = sorted(range(len(names)), key=lambda i: (i in of_bytes, i))
  found: dict[bytes | str, int] = {}
  for i in order:
    name = names[i]
    if name is not None:
      found.setdefault(name, i)
  return found


def _spell(
  draft: Any,
  ours: Sequence[bytes | str | None],
  theirs: Sequence[bytes | str | None],
  their_ids: Mapping[bytes | str, int],
  draft_ids: np.ndarray,
) -> list[list[int]]:
  """Returns the draft tokens that say each target token.

  As the draft's tokenizer splits them if it spells exactly these bytes; parts
  of characters, and words that it would put a space before, are spelled by the
  longest tokens that fit.
  """
  filler = next((their_ids[f] for f in _FILLERS if f in their_ids), 0)
  longest = max((len(n) for n in their_ids if isinstance(n, bytes)), default=0)

  def by_length(name: bytes) -> list[int]:
    ids: list[int] = []
    while name:
      ends = range(min(longest, len(name)), 0, -1)
      end = next((e for e in ends if name[:e] in their_ids), 0)
      if not end:
        return [filler]
      ids.append(their_ids[name[:end]])
      name = name[end:]
    return ids

  said: list[list[int]] = [[filler] for _ in ours]
  texts: dict[int, str] = {}
  for i, name in enumerate(ours):
    if draft_ids[i] >= 0:
      said[i] = [int(draft_ids[i])]
    elif name in their_ids:
      said[i] = [their_ids[name]]  # type: ignore[index]
    elif isinstance(name, bytes):
      said[i] = by_length(name)[-_MAX_PIECES:]
      try:
        texts[i] = name.decode("utf-8")
      except UnicodeDecodeError:
        continue
  split = exact_ids(draft, theirs, list(texts.values()))
  for i, ids in zip(texts, split, strict=True):
    if ids:
      said[i] = ids[-_MAX_PIECES:]
  return said
