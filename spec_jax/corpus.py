"""An index over a corpus of tokens: built and saved on the host.

Two parts. A suffix array of the reversed contexts: all places of the corpus
that something stands before, sorted by what stands before them, read
backwards, so that the places whose context agrees longest with a row's last
tokens are one range (`corpus_search.longest_match`). And counts of unigrams,
bigrams and trigrams, for a language model.

Documents lie one after the other with -1 before, between and behind them; a
context, a continuation or an n-gram never crosses a -1.
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import functools
import os
from pathlib import Path
from typing import Any
import zipfile
import zlib

import numpy as np

# Of the file; one that is larger was made by a newer version.
FORMAT = 1
_SEPARATOR = -1
# V ** 3 must fit an int64: three tokens are one key when they are counted.
_MAX_VOCAB = 1 << 20
_MAX_TOKENS = 1 << 30  # places are int32, and two of them are added


@dataclasses.dataclass(frozen=True)
class Successors:
  """What followed each context, the most frequent ones first.

  Attributes:
    start: `[C + 1]` int32, where each context's list begins.
    token: `[n]` int32, by falling count, then by rising token.
    count: `[n]` int32, how often it followed.
    total: `[C]` int32, how often anything followed, lists being cut or not.
    kinds: `[C]` int32, how many different tokens followed.
  """

  start: np.ndarray
  token: np.ndarray
  count: np.ndarray
  total: np.ndarray
  kinds: np.ndarray


@dataclasses.dataclass(frozen=True)
class Index:
  """A corpus, searchable.

  Attributes:
    tokenizer: hash of the tokenizer that made the tokens.
    vocab_size: `V`.
    num_tokens: of all documents.
    num_documents: that held a token.
    max_match: tokens of context by which places are sorted.
    max_successors: longest list kept of a context.
    tokens: `[T]` int32, documents between separators.
    order: `[P]` int32, places with a token at and one before them, sorted by
      the tokens before them, nearest first; equal ones by place.
    unigram: `[V]` int32 counts.
    bigram: by the token before, `C = V` contexts.
    trigram: by the two tokens before, sorted.
    trigram_first: `[V + 1]` int32, where the contexts that begin with each
      token lie among those of `trigram`.
    trigram_second: `[C]` int32, second token of each context.
  """

  tokenizer: str
  vocab_size: int
  num_tokens: int
  num_documents: int
  max_match: int
  max_successors: int
  tokens: np.ndarray
  order: np.ndarray
  unigram: np.ndarray
  bigram: Successors
  trigram: Successors
  trigram_first: np.ndarray
  trigram_second: np.ndarray


def build(
  documents: Iterable[Sequence[int]],
  *,
  tokenizer: str,
  vocab_size: int,
  max_match: int = 32,
  max_successors: int = 64,
  stage: Callable[[str], Any] = lambda name: None,
) -> Index:
  """Builds an index.

  Args:
    documents: token ids of each.
    tokenizer: hash of the tokenizer, `Loaded.hashes["tokenizer"]`.
    vocab_size: `V`, rows of the model's embedding.
    max_match: longest context that can be searched for.
    max_successors: followers kept of each context; the rest count as unseen.
    stage: told the name of each of the three parts before it is built.

  Raises:
    ValueError: if there are no two tokens that follow each other, an id is not
      in the vocabulary, or a size is out of range.
  """
  for name, value in (
    ("max_match", max_match),
    ("max_successors", max_successors),
  ):
    if value < 1:
      raise ValueError(f"{name} must be at least 1, got {value}")
  if not 1 <= vocab_size <= _MAX_VOCAB:
    raise ValueError(
      f"the vocabulary must have 1 to {_MAX_VOCAB} ids, got {vocab_size}"
    )
  separator = np.array([_SEPARATOR], np.int32)
  parts, num_documents = [separator], 0
  for document in documents:
    ids = np.asarray(document, np.int64)
    if not ids.size:
      continue
    if ids.min() < 0 or ids.max() >= vocab_size:
      wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
      raise ValueError(
        f"a document holds id {wrong}, the vocabulary has {vocab_size} ids"
      )
    parts += [ids.astype(np.int32), separator]
    num_documents += 1
  tokens = np.concatenate(parts)
  if len(tokens) > _MAX_TOKENS:
    raise ValueError(f"an index holds {_MAX_TOKENS} tokens at most")
  stage("suffix array")
  order = _sort_contexts(tokens, max_match)
  if not len(order):
    raise ValueError(
      "the corpus is empty: no document has two tokens to learn from"
    )
  stage("bigrams")
  V = vocab_size
  real = tokens >= 0
  wide = tokens.astype(np.int64)
  pairs = real[:-1] & real[1:]
  before, after = tokens[:-1][pairs], tokens[1:][pairs]
  bigram = _successors(before, after, V, V, max_successors)
  stage("trigrams")
  triples = pairs[:-1] & pairs[1:]
  context = (wide[:-2] * V + wide[1:-1])[triples]
  contexts, place = np.unique(context, return_inverse=True)
  trigram = _successors(
    place.reshape(-1), tokens[2:][triples], len(contexts), V, max_successors
  )
  first = np.searchsorted(contexts // V, np.arange(V + 1))
  return Index(
    tokenizer=tokenizer,
    vocab_size=V,
    num_tokens=int(real.sum()),
    num_documents=num_documents,
    max_match=max_match,
    max_successors=max_successors,
    tokens=tokens,
    order=order,
    unigram=np.bincount(tokens[real], minlength=V).astype(np.int32),
    bigram=bigram,
    trigram=trigram,
    trigram_first=first.astype(np.int32),
    trigram_second=(contexts % V).astype(np.int32),
  )


def _sort_contexts(tokens: np.ndarray, depth: int) -> np.ndarray:
  """Returns the places sorted by the `depth` tokens before them, reversed.

  Prefix doubling: places ranked by the last `n` tokens of their contexts are
  ranked by the last `2 n` with the rank of the place `n` before. A context
  that ends with its document is smaller than any that goes on.

  Reference: Manber and Myers 1993.
  """
  T = len(tokens)
  place = np.arange(T)
  ends = np.where(tokens < 0, place, -1)
  # Tokens of the same document before each place.
  behind = place - 1 - np.maximum.accumulate(np.concatenate([[0], ends[:-1]]))
  behind[0] = 0
  rank = np.concatenate([[0], tokens[:-1].astype(np.int64) + 1])
  n = 1
  while n < depth:
    earlier = np.where(behind >= n, rank[np.maximum(place - n, 0)] + 1, 0)
    key = rank * (int(rank.max()) + 2) + earlier
    # `behind >= n` though nothing stands there: the context ends at n tokens,
    # and the place n before has the rank of an empty context, which is least.
    values, rank = np.unique(key, return_inverse=True)
    rank = rank.reshape(-1)
    n *= 2
    if len(values) == T:
      break
  order = np.argsort(rank, kind="stable")
  good = (tokens >= 0) & (behind >= 1)
  return order[good[order]].astype(np.int32)


def _successors(context, token, num_contexts, vocab_size, most) -> Successors:
  """Counts which token followed which context, see `Successors`."""
  key = context.astype(np.int64) * vocab_size + token
  pairs, count = np.unique(key, return_counts=True)
  context, token = pairs // vocab_size, pairs % vocab_size
  total = np.bincount(context, count, num_contexts)
  kinds = np.bincount(context, minlength=num_contexts)
  order = np.lexsort((token, -count, context))
  rank = np.arange(len(pairs)) - np.repeat(np.cumsum(kinds) - kinds, kinds)
  order = order[rank < most]
  start = np.concatenate([[0], np.cumsum(np.minimum(kinds, most))])
  arrays = (start, token[order], count[order], total, kinds)
  return Successors(*(x.astype(np.int32) for x in arrays))


# --- the file -----------------------------------------------------------------

_NUMBERS = (
  "vocab_size",
  "num_tokens",
  "num_documents",
  "max_match",
  "max_successors",
)
_ARRAYS = ("tokens", "order", "unigram", "trigram_first", "trigram_second")
_TABLES = ("bigram", "trigram")
_COLUMNS = tuple(f.name for f in dataclasses.fields(Successors))


def save(index: Index, path: str | os.PathLike) -> None:
  """Writes an index as one .npz, whole or not at all.

  Raises:
    OSError: if it cannot be written.
  """
  arrays: dict[str, Any] = {
    "format": np.int64(FORMAT),
    "tokenizer": np.array(index.tokenizer),
  }
  arrays |= {name: np.int64(getattr(index, name)) for name in _NUMBERS}
  arrays |= {name: getattr(index, name) for name in _ARRAYS}
  for table in _TABLES:
    for column in _COLUMNS:
      arrays[f"{table}_{column}"] = getattr(getattr(index, table), column)
  path = Path(path)
  part = path.with_name(f".{path.name}.{os.getpid()}")
  try:
    with part.open("wb") as file:  # by name, numpy would add .npz to it
      np.savez(file, **arrays)
    os.replace(part, path)
  except BaseException:
    part.unlink(missing_ok=True)
    raise


def load(path: str | os.PathLike) -> Index:
  """Reads an index; the same file is read once a process.

  Raises:
    ValueError: if it cannot be read, is damaged, is no index, or was made by a
      newer version.
  """
  try:
    about = os.stat(path)
  except OSError as error:
    raise ValueError(
      f"cannot read the corpus index {path}: {error.strerror}"
    ) from error
  return _load(str(path), about.st_mtime_ns, about.st_size)


@functools.lru_cache(maxsize=4)
def _load(path: str, changed: int, size: int) -> Index:
  del changed, size  # they tell a file that was written anew from the old one
  name = f"corpus index {path}"
  try:
    # Opened here: numpy leaves a file open that is no whole archive.
    with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
      if "format" not in file:
        raise ValueError(f"{path} is no corpus index")
      version = int(file["format"])
      if version > FORMAT:
        raise ValueError(
          f"{name} was made by a newer version (format {version}; this one "
          f"reads up to {FORMAT})"
        )
      arrays = {key: file[key] for key in file}
  except OSError as error:
    why = error.strerror or "it is no .npz file"
    raise ValueError(f"cannot read the {name}: {why}") from error
  except (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    KeyError,
    NotImplementedError,  # of a zip feature that numpy never writes
    RuntimeError,  # so too: encryption
  ) as error:
    raise ValueError(f"{name} is damaged: make it again") from error
  except (AttributeError, TypeError) as error:  # one array, not a file of them
    raise ValueError(f"{path} is no corpus index") from error
  except ValueError as error:
    if path in str(error):
      raise
    raise ValueError(f"{path} is no corpus index, or damaged") from error
  try:
    found: dict[str, Any] = {key: int(arrays[key]) for key in _NUMBERS}
    found |= {key: arrays[key] for key in _ARRAYS}
    for table in _TABLES:
      columns = {key: arrays[f"{table}_{key}"] for key in _COLUMNS}
      found[table] = Successors(**columns)
    index = Index(tokenizer=str(arrays["tokenizer"]), **found)
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(f"{name} is damaged: make it again") from error
  if not _is_sound(index):
    raise ValueError(f"{name} is damaged: make it again")
  for array in arrays.values():
    array.setflags(write=False)
  return index


def _is_sound(index: Index) -> bool:
  """Tells whether no place or token of an index leads out of its arrays."""

  def within(x, low, high):
    return not x.size or bool(x.min() >= low and x.max() < high)

  def rising(x):
    return bool((np.diff(x) >= 0).all())

  arrays = [getattr(index, key) for key in _ARRAYS]
  for table in (index.bigram, index.trigram):
    arrays += [getattr(table, key) for key in _COLUMNS]
  if any(x.ndim != 1 or x.dtype.kind not in "iu" for x in arrays):
    return False
  V, T = index.vocab_size, len(index.tokens)
  good = within(index.tokens, -1, V) and within(index.order, 1, T)
  good = good and len(index.order) > 0 and index.tokens[0] == _SEPARATOR
  good = good and index.tokens[-1] == _SEPARATOR
  good = good and len(index.unigram) == V and len(index.bigram.total) == V
  C = len(index.trigram.total)
  good = good and len(index.trigram_first) == V + 1
  good = good and len(index.trigram_second) == C
  good = good and within(index.trigram_first, 0, C + 1)
  good = good and rising(index.trigram_first)
  for table in (index.bigram, index.trigram):
    n, contexts = len(table.token), len(table.total)
    good = good and len(table.count) == n and len(table.kinds) == contexts
    good = good and len(table.start) == contexts + 1
    good = good and within(table.start, 0, n + 1)
    good = good and within(table.token, 0, V) and rising(table.start)
    good = good and bool((table.count > 0).all())
    used = table.total > 0  # a context that was never seen has no successor
    good = good and bool((table.kinds[used] > 0).all())
  return bool(good)


def load_for(path: str | None, name: str, vocab_size: int) -> Index:
  """Reads the index that a drafter was given, see `load`.

  Args:
    path: the option's value; None or "" is refused.
    name: of the drafter.
    vocab_size: of the target.

  Raises:
    ValueError: if there is none, it cannot be used, or it was made for another
      vocabulary.
  """
  if not path:
    raise ValueError(
      f"drafter {name!r} needs a corpus index: make one with "
      f"python -m experiments.index and give its path as 'corpus'"
    )
  index = load(path)
  if index.vocab_size != vocab_size:
    raise ValueError(
      f"corpus index {path} is for another vocabulary: {index.vocab_size} ids, "
      f"the model has {vocab_size}"
    )
  return index
