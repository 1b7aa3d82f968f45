"""From a draft's tokens to the target's, through the text: the host side.

Text is bytes here: a token may hold part of a character. What is committed
stays as it is; proposed are the target tokens that follow it when the end of
the text and the new words are tokenised together.

Reference: Timor et al. 2025, algorithm 2 (string-level exact match).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

# Committed tokens that are tokenised again with the new words.
LOOK_BEHIND = 8


# Put before a text whose tokenizer would put a space before it.
_MARK = "\n"


def exact_ids(
  tokenizer: Any, names: Sequence[Any], texts: Sequence[str]
) -> list[list[int] | None]:
  """Tokenises texts, each to exactly its bytes.

  A tokenizer that puts a space before a text is given the text without its own
  first space, or, if it has none, after a line feed that is taken off again.

  Args:
    tokenizer: a fast tokenizer.
    names: the bytes of each id; of a special token anything but bytes.
    texts: what to tokenise.

  Returns:
    For each text its ids, or None if the tokenizer writes it otherwise: it
    reads a special token, or joins the text and what stands before it.
  """
  out: list[list[int] | None] = [None] * len(texts)

  def attempt(rows, change):
    encodings = tokenizer.backend_tokenizer.encode_batch(
      [change(texts[i]) for i in rows], add_special_tokens=False
    )
    for i, encoding in zip(rows, encodings, strict=True):
      out[i] = _end_of(encoding.ids, names, texts[i].encode("utf-8"))
    return [i for i in rows if out[i] is None]

  left = attempt(range(len(texts)), lambda text: text)
  spaced = [i for i in left if texts[i].startswith(" ")]
  left = sorted({*left} - {*spaced} | {*attempt(spaced, lambda t: t[1:])})
  attempt(left, lambda text: _MARK + text)
  return out


def _end_of(
  ids: list[int], names: Sequence[Any], text: bytes
) -> list[int] | None:
  """Returns the last ids that spell a text, None if they do not.

  Before it may stand the mark, and a space before that.
  """
  found: list[Any] = [names[i] if i < len(names) else None for i in ids]
  if not all(isinstance(name, bytes) for name in found):
    return None
  whole = b"".join(found)
  lead = len(whole) - len(text)
  if whole[:lead] not in (b"", b"\n", b" \n") or whole[lead:] != text:
    return None
  start = 0
  while lead > 0:
    lead -= len(found[start])
    start += 1
  return ids[start:] if lead == 0 else None


class Retokenizer:
  """Turns what a draft said after a text into target tokens.

  Attributes:
    digest: names the tokenizers.
  """

  def __init__(
    self,
    target_bytes: Sequence[bytes],
    draft_bytes: Sequence[bytes],
    special: Mapping[int, int],
    encode: Callable[[str], list[int] | None],
    *,
    digest: str,
  ):
    """Holds both spellings.

    Args:
      target_bytes: the bytes of each target token, `b""` for special ones.
      draft_bytes: the same of the draft's tokens.
      special: target ids by the draft ids of special tokens that both have.
      encode: the target's tokenizer: ids that spell exactly a text, or None.
      digest: another one for other tokenizers.
    """
    self.digest = digest
    self._target, self._draft = target_bytes, draft_bytes
    self._special, self._encode = special, encode

  def ids(self, tail: Sequence[int], said: Sequence[int]) -> list[int]:
    """Returns the target tokens that say what the draft said.

    After `"a", " th"` the draft says "e", "m": the target writes " a them" as
    `"a", " the", "m"`, where no token begins after " th", so nothing is
    proposed; after `"a", " the"` it is "m".

    Words end at the first special token, which is proposed too if the target
    has it. Half a character at the end is left out, and so is everything from
    bytes on that are no UTF-8.

    Args:
      tail: the last committed target tokens.
      said: the draft's tokens.

    Returns:
      Target tokens to follow the tail; none if no token boundary lies between
      the tail and the new words.
    """
    words, ends = self._words(said)
    known = self._known(tail)
    text = known + words
    try:
      decoded = text.decode("utf-8")
    except UnicodeDecodeError as error:
      decoded, ends = text[: error.start].decode("utf-8"), []
    ids = self._encode(decoded) if decoded else []
    if ids is None:
      return []
    start, seen = 0, 0
    while seen < len(known) and start < len(ids):
      seen += len(self._target[ids[start]])
      start += 1
    return [*ids[start:], *ends] if seen == len(known) else []

  def _words(self, said: Sequence[int]) -> tuple[bytes, list[int]]:
    """Returns (bytes up to the first special token, its target id if any)."""
    words = b""
    for token in said:
      piece = self._draft[token]
      if not piece:
        special = self._special.get(token)
        return words, [] if special is None else [special]
      words += piece
    return words, []

  def _known(self, tail: Sequence[int]) -> bytes:
    """Returns the text's end, from a character's beginning on."""
    known: list[bytes] = []
    for token in tail[::-1]:
      if not self._target[token]:  # A special token ends words.
        break
      known.insert(0, self._target[token])
    while known and known[0][0] & 0xC0 == 0x80:  # Inside a character.
      known.pop(0)
    return b"".join(known)

  def rows(self, tails: Any, said: Any, wanted: Any) -> np.ndarray:
    """Retokenises the rows of a batch.

    Args:
      tails: `[B, n]` int32 committed target tokens, -1 before the text.
      said: `[B, K]` int32 draft tokens, -1 = none.
      wanted: `[B]` bool.

    Returns:
      `[B, K]` int32 target tokens, -1 after the last; what is longer is cut.
    """
    tails, said, wanted = map(np.asarray, (tails, said, wanted))
    out = np.full(said.shape, -1, np.int32)
    for row in np.flatnonzero(wanted):
      tail = tails[row][tails[row] >= 0].tolist()
      words = said[row][said[row] >= 0].tolist()
      ids = self.ids(tail, words)[: said.shape[1]]
      out[row, : len(ids)] = ids
    return out
