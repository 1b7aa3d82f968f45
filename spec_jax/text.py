"""Text to tokens and back: prompts, chat templates, bytes, streaming.

A token adds bytes, not characters: a character may be spread over several
tokens. So text is put together from `token_bytes` and turned into characters
at the very end (`decode`) or as soon as a character is complete
(`StreamDecoder`); the two always agree.

Special tokens add no bytes. They never show in the text, and no stop string
can match one: stop at those by id.

Tokenizers are transformers' fast ones; nothing here imports transformers.
"""

import codecs
from collections.abc import Callable, Mapping, Sequence
import json
import re
from typing import Any

import numpy as np

__all__ = [
  "StreamDecoder",
  "decode",
  "encode_chat",
  "encode_prompt",
  "stop_bytes",
  "token_bytes",
  "trim",
]

_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")  # Sentencepiece's byte tokens.


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
  """Turns a raw prompt into token ids.

  The ids are `tokenizer(text)`'s, with one correction: a tokenizer that writes
  BOS writes one, even where the text begins with BOS itself. No BOS is added
  for a tokenizer that does not write one, except to an empty prompt, since a
  model must be given at least one token. Special tokens spelled out in the
  text are parsed as the tokenizer parses them.

  Args:
    tokenizer: a fast tokenizer.
    text: the prompt.

  Returns:
    At least one token id.

  Raises:
    ValueError: if `text` is no string, or is empty and the tokenizer has no
      BOS.
  """
  if not isinstance(text, str):
    raise ValueError(f"a prompt is one string, got {type(text).__name__}")
  _check_unicode(text)
  return _start(tokenizer, list(tokenizer(text)["input_ids"]))


def _check_unicode(text: str) -> None:
  """Raises ValueError if a text holds half a surrogate pair."""
  try:
    text.encode("utf-8")
  except UnicodeEncodeError as error:
    raise ValueError(
      f"a prompt is not valid Unicode: {text[error.start]!a} at {error.start}"
    ) from error


def encode_chat(
  tokenizer: Any,
  messages: Sequence[Mapping[str, Any]],
  *,
  add_generation_prompt: bool = True,
) -> list[int]:
  """Turns a conversation into token ids through the chat template.

  A tokenizer that writes BOS gives exactly one, whether the template writes it
  too or not. Otherwise BOS is the template's business: Qwen2.5 has a BOS
  token that neither its template nor its tokenizer uses, and gets none.
  Nothing is appended after the template's text.

  Args:
    tokenizer: a fast tokenizer with a chat template.
    messages: `{"role": ..., "content": ...}` in order, at least one.
    add_generation_prompt: end with the start of the assistant's turn.

  Returns:
    At least one token id.

  Raises:
    ValueError: if there is no chat template, no message, the template refuses
      the messages, or the result is empty and the tokenizer has no BOS.
  """
  for message in messages:
    if isinstance(message, Mapping):
      _check_unicode(str(message.get("content", "")))
  if not getattr(tokenizer, "chat_template", None):
    raise ValueError(
      "the tokenizer has no chat template: set tokenizer.chat_template, or "
      "pass the prompt as raw text"
    )
  if not messages:
    raise ValueError("a conversation needs at least one message, got none")
  from jinja2 import TemplateError  # Only chats need it.

  try:
    text = tokenizer.apply_chat_template(
      [dict(message) for message in messages],
      tokenize=False,
      add_generation_prompt=add_generation_prompt,
    )
  except TemplateError as error:
    roles = [message.get("role") for message in messages]
    raise ValueError(
      f"the chat template refused messages with roles {roles}: {error}"
    ) from error
  ids = tokenizer(text, add_special_tokens=False)["input_ids"]
  return _start(tokenizer, list(ids))


def _start(tokenizer: Any, ids: list[int]) -> list[int]:
  """Corrects the start: one BOS if the tokenizer writes one, never nothing."""
  bos = tokenizer.bos_token_id
  if bos is None:
    if not ids:
      raise ValueError(
        "the prompt has 0 tokens and the tokenizer has no BOS (bos_token is "
        "None): give at least one token, such as a newline or the eos token"
      )
  elif not ids or list(tokenizer("")["input_ids"])[:1] == [bos]:
    num = 0
    while num < len(ids) and ids[num] == bos:
      num += 1
    return [bos, *ids[num:]]
  return ids


def token_bytes(tokenizer: Any, vocab_size: int) -> list[bytes]:
  """Returns the bytes that each id adds to the text.

  Special tokens add nothing, as in `decode(..., skip_special_tokens=True)`.
  A piece that begins a word keeps its space wherever it stands.

  Args:
    tokenizer: a fast tokenizer whose decoder is byte-level (GPT-2, Qwen, Llama
      3), Metaspace (T5) or a replacement with byte fallback (Llama 2, Gemma).
    vocab_size: `V` of the model, which may be larger than the tokenizer's.

  Returns:
    `V` entries; `b""` for special tokens and ids the tokenizer does not have.

  Raises:
    ValueError: if the tokenizer is not a fast one, or its decoder does more
      than spell tokens one by one.
  """
  backend = getattr(tokenizer, "backend_tokenizer", None)
  if backend is None:
    raise ValueError(
      f"token_bytes needs a fast tokenizer, got {type(tokenizer).__name__}"
    )
  spell = _make_spell(backend.decoder)
  added = backend.get_added_tokens_decoder()
  special = {id_ for id_, token in added.items() if token.special}
  table = [b""] * vocab_size
  for piece, id_ in backend.get_vocab(with_added_tokens=True).items():
    if id_ < vocab_size and id_ not in special:
      table[id_] = spell(piece)
  return table


def _byte_level_table() -> dict[int, int]:
  """Maps the code points of the byte-level alphabet to bytes.

  Printable bytes of latin-1 stand for themselves; the other 68 stand, in
  order, at code points from 256. Code points below 256 that are no letter of
  the alphabet map to 256, so that encoding to latin-1 fails on them.
  """
  printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
  table = {byte: byte if byte in printable else 256 for byte in range(256)}
  others = [byte for byte in range(256) if byte not in printable]
  table |= {256 + i: byte for i, byte in enumerate(others)}
  return table


def _make_spell(decoder: Any) -> Callable[[str], bytes]:
  """Makes the function that turns a token's piece into its bytes."""
  if decoder is None:
    raise ValueError("the tokenizer has no decoder: its spelling is unknown")
  # A decoder has no accessors for its settings; its pickled state is JSON.
  spec = json.loads(decoder.__getstate__())
  steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
  replacements: list[tuple[str, str]] = []
  byte_level = byte_fallback = fused = False
  for step in steps:
    kind = step["type"]
    if kind == "ByteLevel":
      byte_level = True
    elif kind == "ByteFallback":
      byte_fallback = True
    elif kind == "Fuse":
      fused = True
    elif kind == "Metaspace":
      replacements.append((step["replacement"], " "))
    elif kind == "Replace" and "String" in step["pattern"]:
      replacements.append((step["pattern"]["String"], step["content"]))
    elif kind == "Strip" and fused and step["stop"] == 0:
      pass  # Takes the first space of a whole text; ours continues a prompt.
    else:
      raise ValueError(
        f"decoder step {step} does not spell tokens one by one; known are "
        "ByteLevel, ByteFallback, Metaspace, Replace of a string, Fuse, and "
        "Strip at the start after Fuse"
      )
  table = _byte_level_table()

  def spell(piece: str) -> bytes:
    if byte_level:
      try:
        return piece.translate(table).encode("latin-1")
      except UnicodeEncodeError:  # An added token, spelled as it is.
        return piece.encode("utf-8")
    if byte_fallback and (byte := _BYTE_PIECE.fullmatch(piece)):
      return bytes([int(byte[1], 16)])
    for old, new in replacements:
      piece = piece.replace(old, new)
    return piece.encode("utf-8")

  return spell


def _pieces(table: Sequence[bytes], ids: Any) -> list[bytes]:
  """Returns the bytes of each id; negative ids are padding and left out."""
  flat = np.asarray(ids, np.int64).reshape(-1)
  if flat.size and flat.max() >= len(table):
    raise ValueError(
      f"token id {flat.max()} is not in a vocabulary of {len(table)}"
    )
  return [table[id_] for id_ in flat.tolist() if id_ >= 0]


def decode(tokenizer_bytes: Sequence[bytes], ids: Any) -> str:
  """Turns token ids into text.

  Bytes that are no UTF-8 become U+FFFD, one for each maximal part of a
  character; so a character cut off at the end gives one U+FFFD. The result is
  `tokenizer.decode(ids, skip_special_tokens=True,
  clean_up_tokenization_spaces=False)` for byte-level tokenizers. For Metaspace
  ones two things differ: a leading space is kept, since the text continues a
  prompt, and a run of byte tokens with an error in it loses the error only,
  not the whole run.

  Args:
    tokenizer_bytes: `V` entries, from `token_bytes`.
    ids: token ids; negative ones are padding and add nothing.

  Returns:
    The text.

  Raises:
    ValueError: if an id is `V` or more.
  """
  return b"".join(_pieces(tokenizer_bytes, ids)).decode("utf-8", "replace")


def stop_bytes(stop_strings: Sequence[str | bytes]) -> tuple[bytes, ...]:
  """Returns stop strings as bytes.

  Args:
    stop_strings: strings, or bytes taken as they are.

  Returns:
    One entry a stop string, in order.

  Raises:
    ValueError: if given one string in place of a sequence, or an empty one.
  """
  if isinstance(stop_strings, str | bytes):
    raise ValueError(
      f"stop_strings is a sequence of strings, got {stop_strings!r} alone"
    )
  patterns = tuple(
    s.encode("utf-8") if isinstance(s, str) else bytes(s) for s in stop_strings
  )
  if b"" in patterns:
    raise ValueError(
      f"stop string {patterns.index(b'')} is empty; it would match everywhere"
    )
  return patterns


def trim(
  text: bytes, stop_strings: Sequence[str | bytes], *, skip: int = 0
) -> bytes:
  """Cuts a text where the first stop string begins.

  The stop string is not shown. Token ids and log-probabilities are not cut
  with it: they keep every token up to the one that completes the stop string.
  With "abc" and "b", "xabc" becomes "x": the earliest start counts, wherever
  the strings end.

  Args:
    text: bytes of the output, up to the token that completed a stop string.
    stop_strings: strings or bytes, none empty.
    skip: stop strings that end in the first `skip` bytes do not count. With a
      minimum of `first` tokens it is the bytes of the first `first - 1`.

  Returns:
    The bytes before the stop string; all of them if there is none.

  Raises:
    ValueError: as `stop_bytes`.
  """
  return text[: _earliest(text, stop_bytes(stop_strings), skip)]


def _earliest(
  text: bytes, patterns: tuple[bytes, ...], skip: int
) -> int | None:
  """Finds the least start of a pattern that ends past `skip`, or None."""
  starts = [text.find(p, max(0, skip - len(p) + 1)) for p in patterns]
  return min((start for start in starts if start >= 0), default=None)


class StreamDecoder:
  """Turns tokens into text as they come.

  No half character is ever returned, nor text that may turn out to be the
  beginning of a stop string. All pieces and `flush()` together are
  `decode(tokenizer_bytes, ids)`, however the ids were split; with stop strings
  they are that of the text cut by `trim`, and tokens after the one that
  completes a stop string add nothing.

  Attributes:
    stopped: whether a stop string was completed.
  """

  def __init__(
    self,
    tokenizer_bytes: Sequence[bytes],
    stop_strings: Sequence[str | bytes] = (),
    *,
    first: int = 0,
  ):
    """Starts an empty text.

    Args:
      tokenizer_bytes: `V` entries, from `token_bytes`.
      stop_strings: strings or bytes, none empty.
      first: a stop string counts if at least `first` tokens come before or
        with the one that completes it.

    Raises:
      ValueError: as `stop_bytes`.
    """
    self.stopped = False
    self._table = tokenizer_bytes
    self._patterns = stop_bytes(stop_strings)
    self._first = first
    self._num_tokens = 0
    self._held = b""
    self._characters = codecs.getincrementaldecoder("utf-8")("replace")

  def push(self, ids: Any) -> str:
    """Returns the text that is certain after more tokens.

    Args:
      ids: token ids, any number; negative ones are padding and not counted.

    Returns:
      New text, often empty.

    Raises:
      ValueError: if an id is `V` or more.
    """
    return self._characters.decode(
      b"".join(map(self._release, _pieces(self._table, ids)))
    )

  def flush(self) -> str:
    """Ends the text and returns what was held back.

    Returns:
      The rest; U+FFFD stands for a character that was never completed.
    """
    rest, self._held = self._held, b""
    return self._characters.decode(rest, final=True)

  def _release(self, piece: bytes) -> bytes:
    """Takes the bytes of one token, returns those that are certain."""
    if self.stopped:
      return b""
    self._num_tokens += 1
    seen = len(self._held)
    text = self._held + piece
    if self._num_tokens >= self._first:
      # Those that end in what was seen before were looked at then.
      cut = _earliest(text, self._patterns, seen)
      if cut is not None:
        self.stopped, self._held = True, b""
        return text[:cut]
    # Longest end of the text that begins a stop string.
    num_held = max(
      (
        num
        for p in self._patterns
        for num in range(1, min(len(p), len(text) + 1))
        if text.endswith(p[:num])
      ),
      default=0,
    )
    self._held = text[len(text) - num_held :]
    return text[: len(text) - num_held]
