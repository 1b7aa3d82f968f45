"""From files to packed batches whose order and position can be resumed.

A record becomes an `Example`: token ids and, for each of them, whether it is
part of an answer. Examples are packed into rows of one length. Of a row, the
weight at position `i` says whether the token at `i + 1` is to be predicted: it
is part of an answer and of the same example. So with a prompt of 3 tokens and
an answer of 2 the weights are 0 0 1 1 0.

What is read:
  *.txt    one text; every token is answer
  *.jsonl  a record a line, see `records.spans`; perhaps packed, *.jsonl.xz or
           *.jsonl.gz
  name     a data set of the Hugging Face hub (`organisation/name[:split]`), if
           the package `datasets` is installed
  python   the English of Python's own help pages, on any machine
"""

from collections.abc import Iterator, Sequence
import gzip
import hashlib
import importlib.util
import json
import lzma
from pathlib import Path
import re
from typing import Any, NamedTuple
import zlib

import grain
import numpy as np

from spec_jax.base import PyTree
from train import records
from train.records import DataError, Example

__all__ = [
  "Batches",
  "DataError",
  "Example",
  "hold_out",
  "pack",
  "read_examples",
]

# The help pages that ship with Python: about 700 kB of English.
_PYTHON = "python"


def read_examples(
  sources: Sequence[str],
  loaded: Any,
  *,
  length: int,
  template: bool | None = None,
  system: str = "",
  limit: int = 0,
) -> list[Example]:
  """Reads all sources.

  Args:
    sources: files and names, see above.
    loaded: the target; its tokenizer and stop ids are used.
    length: tokens an example may have; a longer chat is cut, a longer text is
      cut into several.
    template: whether prompts that are texts go through the chat template; None
      = if there is one.
    system: a system message before them, or "".
    limit: examples to read at most; 0 = all.

  Raises:
    DataError: one line naming the file and the line.
  """
  reader = records.Reader(loaded, template, system)
  if not sources:
    raise DataError("no data is given: name files in data.files")
  found: list[Example] = []
  for source in sources:
    before = len(found)
    for example in _read(source, reader, length):
      found.append(example)
      if len(found) == limit:
        return found
    if len(found) == before:
      raise DataError(f"{source} holds no example")
  return found


def _read(
  source: str, reader: records.Reader, length: int
) -> Iterator[Example]:
  for where, record in _records(source):
    for example in reader.examples(record, where):
      yield from example.pieces(length)


def _records(source: str) -> Iterator[tuple[str, Any]]:
  """Yields where each record stands, for errors, and the record."""
  path = Path(source).expanduser()
  if source == _PYTHON:
    from pydoc_data import topics

    for name, page in sorted(topics.topics.items()):
      yield f"help page {name}", page
  elif re.search(r"\.jsonl?(\.gz|\.xz)?$", path.name, re.IGNORECASE):
    for number, record in _json_lines(path):
      yield f"{source} line {number}", record
  elif path.is_file() or path.suffix.lower() == ".txt":
    whole = _read_text(path)
    if whole.strip():
      yield source, whole
  elif re.fullmatch(r"[\w.-]+/[\w.-]+(:\w+)?", source) and not path.exists():
    for number, record in enumerate(_hub(source), 1):
      yield f"{source} record {number}", record
  else:
    raise DataError(
      f"{source!r} is no .txt or .jsonl file, no name of a hub data set and "
      f"not {_PYTHON!r}"
    )


def _unpack_xz(packed: bytes) -> bytes:
  """Unpacks all streams of a file; `lzma.decompress` ends at what is none."""
  parts = []
  while packed:
    stream = lzma.LZMADecompressor(lzma.FORMAT_XZ)
    parts.append(stream.decompress(packed))
    if not stream.eof:
      raise EOFError("it ends in the middle")
    packed = stream.unused_data.lstrip(b"\0")  # padding between streams
  return b"".join(parts)


_UNPACK = {".gz": gzip.decompress, ".xz": _unpack_xz}


def _read_text(path: Path) -> str:
  unpack = _UNPACK.get(path.suffix.lower(), bytes)
  try:
    text = unpack(path.read_bytes()).decode("utf-8-sig")
    return text.replace("\r\n", "\n").replace("\r", "\n")
  except UnicodeDecodeError as error:
    raise DataError(f"{path} is not UTF-8: {error}") from error
  except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
    why = getattr(error, "strerror", None) or error
    raise DataError(f"cannot read {path}: {why}") from error


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
  # Not `splitlines`: a line of JSON may hold U+2028 or U+0085 as it is.
  for number, line in enumerate(_read_text(path).split("\n"), 1):
    if line.strip():
      try:
        yield number, json.loads(line)
      except (ValueError, RecursionError) as error:
        raise DataError(f"{path} line {number} is not JSON: {error}") from error


def _hub(source: str) -> Iterator[Any]:
  if importlib.util.find_spec("datasets") is None:
    raise DataError(
      f"{source} is read with the package datasets, which is not installed: "
      "pip install datasets, or give a .jsonl file"
    )
  datasets = importlib.import_module("datasets")
  name, _, split = source.partition(":")
  try:
    yield from datasets.load_dataset(name, split=split or "train")
  except Exception as error:  # anything a network or a stranger's file can do
    why = f"{type(error).__name__}: {error}".splitlines()[0]
    raise DataError(f"cannot read the data set {source}: {why}") from error


# Endless for any purpose; grain's own endlessness overflows with one row a
# batch.
_EPOCHS = 1 << 20


class _Row(NamedTuple):
  """Examples that share a row."""

  examples: list[Example]
  used: int


def pack(examples: Sequence[Example], length: int) -> list[dict]:
  """Packs examples into rows, each into the first of the open rows it fits.

  Args:
    examples: of at most `length` tokens.
    length: `T`.

  Returns:
    Rows of int32 `[T]` arrays: `tokens`, `labels` (the next token where the
    weight is not 0, else 0), `segment_ids` (1, 2, ... an example, 0 = padding),
    `positions` (from 0 in each example); and float32 `weights`.
  """
  # So many rows are open at a time: what is lost at their ends is small, and
  # the search stays short.
  keep_open = 64
  rows: list[_Row] = []
  opened: list[int] = []
  for example in examples:
    n = len(example.ids)
    if n > length:
      raise ValueError(f"an example of {n} tokens, rows hold {length}")
    for at in opened:
      if rows[at].used + n <= length:
        rows[at].examples.append(example)
        rows[at] = rows[at]._replace(used=rows[at].used + n)
        break
    else:
      rows.append(_Row([example], n))
      opened.append(len(rows) - 1)
      if len(opened) > keep_open:  # the fullest is closed
        opened.remove(max(opened, key=lambda i: rows[i].used))
  return [_row(row.examples, length) for row in rows]


def _row(examples: Sequence[Example], length: int) -> dict[str, np.ndarray]:
  names = ("tokens", "labels", "segment_ids", "positions")
  row = {name: np.zeros(length, np.int32) for name in names}
  row["weights"] = np.zeros(length, np.float32)
  start = 0
  for number, (ids, answer) in enumerate(examples, 1):
    stop = start + len(ids)
    row["tokens"][start:stop] = ids
    row["segment_ids"][start:stop] = number
    row["positions"][start:stop] = np.arange(len(ids))
    row["labels"][start : stop - 1] = np.where(answer[1:], ids[1:], 0)
    row["weights"][start : stop - 1] = answer[1:]
    start = stop
  return row


class _Wider(Sequence):
  """Rows with one field more."""

  def __init__(self, rows, name, values):
    self._rows, self._name, self._values = rows, name, values

  def __len__(self):
    return len(self._rows)

  def __getitem__(self, i):
    return {**self._rows[i], self._name: self._values[i]}


class Batches:
  """Endless batches in an order that a seed fixes; every epoch has its own.

  Attributes:
    rows: packed rows.
    epoch: batches until every row was seen once, rounded down.
  """

  def __init__(self, rows: Sequence[dict], batch_size: int, seed: int):
    """Raises DataError if no position is to be predicted."""
    if not any(row["weights"].any() for row in rows):
      raise DataError("the data holds no answer token to learn from")
    self.rows = rows
    self.epoch = max(1, len(rows) // batch_size)
    content = hashlib.sha256()
    for row in rows:
      content.update(row["tokens"].tobytes() + row["weights"].tobytes())
    self._digest = content.hexdigest()
    self._seed, self._batch_size = seed, batch_size
    self._read_from(rows)

  def _read_from(self, rows: Sequence[dict]) -> None:
    data = grain.MapDataset.source(rows).seed(self._seed).shuffle()
    data = data.repeat(_EPOCHS).batch(self._batch_size)
    # Rows lie in memory already: threads that read ahead would gain nothing.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    self._batches = iter(data.to_iter_dataset(options))

  def bring(self, name: str, values: Sequence[np.ndarray]) -> None:
    """Lets batches hold one more field from now on, from the first batch.

    Args:
      name: of the field.
      values: of each row; read as they are needed.
    """
    self._read_from(_Wider(self.rows, name, values))

  def __next__(self) -> dict[str, np.ndarray]:
    """Returns the next batch, `[B, T]` arrays."""
    return next(self._batches)

  def __iter__(self) -> "Batches":
    """Returns itself."""
    return self

  def before(self, step: int, params: PyTree) -> None:
    """Called before each step: nothing here depends on what was learned."""

  def position(self) -> dict[str, Any]:
    """Returns where the iterator stands, and in which data, as JSON."""
    return {**self._batches.get_state(), "digest": self._digest}

  def restore(self, position: dict[str, Any]) -> None:
    """Moves to a position that `position` gave.

    Raises:
      DataError: if it was in other data.
    """
    if position["digest"] != self._digest:
      raise DataError(
        "the data has changed since this run began; give another --out"
      )
    self.skip_to(position["next_index"])

  def skip_to(self, number: int) -> None:
    """Moves to a batch by its number, from 0."""
    self._batches.set_state({"next_index": number})


def hold_out(
  examples: Sequence[Example], count: int, setting: str = "eval.prompts"
) -> tuple[list[Example], list[Example]]:
  """Splits off `count` prompts, evenly spread, for the real decoder.

  Args:
    examples: all there are.
    count: prompts to hold out.
    setting: where that is set, for messages.

  Returns:
    Examples to learn from, none with a prompt that is held out, and one example
    of each prompt held out.

  Raises:
    DataError: if nothing would be left to learn from.
  """
  first: dict[tuple[int, ...], Example] = {}
  for example in examples:
    first.setdefault(tuple(example.prompt), example)
  prompts = list(first)
  if not 0 <= count < len(prompts):
    raise DataError(
      f"{count} examples are to be held out ({setting}), the data has "
      f"{len(prompts)} prompts"
    )
  chosen = [prompts[i * len(prompts) // count] for i in range(count)]
  held = set(chosen)
  return (
    [x for x in examples if tuple(x.prompt) not in held],
    [first[prompt] for prompt in chosen],
  )
