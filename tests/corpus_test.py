"""The corpus index: searches, counts and files against plain Python."""

from collections import Counter, defaultdict
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import corpus, drafters
from spec_jax.corpus_search import longest_match, search_tables
from tests import cases, fakes

V, WIDTH, MATCH = 5, 16, 6
_find = jax.jit(longest_match, static_argnames="max_match")


@functools.cache
def documents():
  """Sixty texts of 0 to 30 tokens, one of which is a single run."""
  rng = np.random.default_rng(3)
  found = [rng.integers(0, V, rng.integers(0, 31)).tolist() for _ in range(60)]
  return [[], [1], *found, [2] * 20, [0, 1, 2, 3, 4] * 5]


@functools.cache
def index():
  return corpus.build(documents(), tokenizer="x", vocab_size=V, max_match=MATCH)


def find(index, rows, max_match=MATCH):
  """Returns for each row (tokens that agree, places in the corpus)."""
  tokens = np.full((len(rows), WIDTH), 1, np.int32)
  for i, row in enumerate(rows):
    tokens[i, : len(row)] = row
  lengths = jnp.array([len(r) for r in rows], jnp.int32)
  found = _find(
    jax.tree.map(jnp.asarray, search_tables(index)),
    jnp.asarray(tokens),
    lengths,
    max_match=max_match,
  )
  return [
    (int(n), index.order[low:high].tolist())
    for n, low, high in zip(*map(np.asarray, found), strict=True)
  ]


def search(texts, row, max_match):
  """Looks through all places of all texts; places as the index counts them."""
  best, places, start = 0, [], 1  # the corpus begins with a separator
  for text in texts:
    for i in range(1, len(text)):
      n = 0
      while n < min(i, len(row), max_match) and text[i - 1 - n] == row[-1 - n]:
        n += 1
      if n > best:
        best, places = n, []
      if n == best:
        places.append(start + i)
    start += len(text) + 1 if text else 0
  return best, places


@pytest.mark.parametrize("max_match", [1, 2, 5, MATCH])
def test_the_longest_matches_are_those_of_a_search(max_match):
  """300 rows of 1 to 16 tokens; the range holds every place and no other."""
  rng = np.random.default_rng(4)
  rows = [
    rng.integers(0, V, rng.integers(1, WIDTH + 1)).tolist() for _ in range(280)
  ]
  rows += [
    text[: 1 + i % 9] for i, text in enumerate(documents()[5:25]) if text
  ]
  found = find(index(), rows, max_match)
  for row, (n, places) in zip(rows, found, strict=True):
    expected = search(documents(), row, max_match)
    assert (n, sorted(places)) == expected, row
  lengths = {n for n, _ in found}
  assert max(lengths) == max_match and len(lengths) >= min(max_match, 4)


def test_the_docstrings_example_and_a_token_that_never_stood_there():
  """Two tokens stand before the 7; nothing ever followed a 9."""
  made = corpus.build([[5, 6, 7], [8, 6, 9]], tokenizer="x", vocab_size=10)
  (two, places), (none, _), (one, both) = find(
    made, [[5, 6], [6, 9], [0, 6]], 4
  )
  assert (two, made.tokens[places].tolist()) == (2, [7])
  assert none == 0
  assert (one, sorted(made.tokens[both])) == (1, [7, 9])


def test_contexts_are_sorted_as_in_python():
  """Nearest token first, as deep as asked, ended ones first, then by place."""
  tokens = index().tokens.tolist()

  def context(p):
    end = max(q for q in range(p) if tokens[q] < 0)
    return tokens[end + 1 : p][::-1][:8]  # 6 tokens are sorted by doubling

  places = [p for p in range(2, len(tokens)) if min(tokens[p - 1 : p + 1]) >= 0]
  assert index().order.tolist() == sorted(places, key=lambda p: (context(p), p))


def lists_of(table, context):
  start, end = table.start[context], table.start[context + 1]
  return list(zip(table.token[start:end], table.count[start:end], strict=True))


def ranked(counter, most=None):
  return sorted(counter.items(), key=lambda x: (-x[1], x[0]))[:most]


@pytest.mark.parametrize("most", [64, 2])
def test_counts_are_those_of_a_counter(most):
  """Unigrams, bigrams, trigrams; lists cut at 2 keep the most frequent."""
  made = corpus.build(
    documents(), tokenizer="x", vocab_size=V, max_successors=most
  )
  texts = documents()
  single = Counter(t for text in texts for t in text)
  assert made.unigram.tolist() == [single[t] for t in range(V)]
  assert made.num_tokens == single.total()
  assert made.num_documents == sum(map(bool, texts))
  two, three = defaultdict(Counter), defaultdict(Counter)
  for text in texts:
    for i in range(1, len(text)):
      two[text[i - 1]][text[i]] += 1
      if i > 1:
        three[tuple(text[i - 2 : i])][text[i]] += 1
  for u in range(V):
    assert lists_of(made.bigram, u) == ranked(two[u], most)
    assert made.bigram.total[u] == two[u].total()
    assert made.bigram.kinds[u] == len(two[u])
  assert len(made.trigram.total) == len(three)
  for u in range(V):
    for c in range(made.trigram_first[u], made.trigram_first[u + 1]):
      key = (u, int(made.trigram_second[c]))
      assert lists_of(made.trigram, c) == ranked(three[key], most)
      assert made.trigram.total[c] == three.pop(key).total()
  assert not three


@pytest.mark.parametrize("texts", [[], [[]], [[1], [2]]])
def test_an_empty_corpus_is_refused(texts):
  """A text of one token has nothing to say either."""
  with pytest.raises(ValueError, match="the corpus is empty"):
    corpus.build(texts, tokenizer="x", vocab_size=V)


@pytest.mark.parametrize(
  ("options", "words"),
  [
    ({"max_match": 0}, "max_match must be at least 1, got 0"),
    ({"max_successors": 0}, "max_successors must be at least 1, got 0"),
    ({"vocab_size": 3}, "holds id 3, the vocabulary has 3 ids"),
    ({"vocab_size": 0}, "must have 1 to 1048576 ids, got 0"),
  ],
)
def test_what_cannot_be_indexed_is_refused(options, words):
  """The message holds the value."""
  with pytest.raises(ValueError, match=words):
    corpus.build([[1, 2, 3]], **{"tokenizer": "x", "vocab_size": V, **options})


# --- files --------------------------------------------------------------------


def test_a_saved_index_is_read_as_it_was(tmp_path):
  """Every field; nothing else is left in the folder; one reading a process."""
  path = tmp_path / "x.npz"
  corpus.save(index(), path)
  again = corpus.load(path)
  flat = lambda x: jax.tree.leaves(dataclasses.asdict(x))
  for a, b in zip(flat(index()), flat(again), strict=True):
    assert np.array_equal(a, b)
  assert [p.name for p in tmp_path.iterdir()] == ["x.npz"]
  assert corpus.load(path) is again
  with pytest.raises(ValueError, match="read-only"):
    again.tokens[0] = 1
  other = corpus.build([[1, 2]], tokenizer="y", vocab_size=V)
  corpus.save(other, path)
  assert corpus.load(path).tokenizer == "y"


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
  """The old file stays whole, and no piece of a new one stays."""
  path = tmp_path / "x.npz"
  corpus.save(index(), path)
  before = path.read_bytes()

  def half(file, **arrays):
    file.write(b"half")
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(np, "savez", half)
  with pytest.raises(OSError, match="No space"):
    corpus.save(index(), path)
  assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def _changed(path, **arrays):
  with np.load(path) as file:
    kept = {key: file[key] for key in file}
  np.savez(
    path, **{k: v for k, v in {**kept, **arrays}.items() if v is not None}
  )


def _cut(path):
  path.write_bytes(path.read_bytes()[:-100])


def _flip(path):
  data = bytearray(path.read_bytes())
  at = data.index(b"tokens.npy") + 200
  data[at] ^= 1
  path.write_bytes(data)


def _bare(path):
  """One array under the index's name, not an archive of them."""
  with open(path, "wb") as file:
    np.save(file, np.arange(3))


_DAMAGE = {
  "missing": (lambda p: p.unlink(), "cannot read .*x.npz: No such file"),
  "folder": (lambda p: (p.unlink(), p.mkdir()), "x.npz: Is a directory"),
  "text": (lambda p: p.write_text("no index"), "x.npz is no corpus index"),
  "empty": (lambda p: p.write_bytes(b""), "x.npz is .*(damaged|no corpus)"),
  "cut": (_cut, "x.npz is .*damaged"),
  "flipped": (_flip, "x.npz is damaged: make it again"),
  "other": (lambda p: np.savez(p, a=1), "x.npz is no corpus index"),
  "newer": (
    lambda p: _changed(p, format=np.int64(2)),
    r"newer version \(format 2; this one reads up to 1\)",
  ),
  "field": (lambda p: _changed(p, order=None), "x.npz is damaged"),
  "places": (
    lambda p: _changed(p, order=np.array([10**6], np.int32)),
    "x.npz is damaged",
  ),
  "scalar": (lambda p: _changed(p, tokens=np.int32(3)), "x.npz is damaged"),
  "words": (lambda p: _changed(p, order=np.array(["a"])), "x.npz is damaged"),
  "starts": (
    lambda p: _changed(p, trigram_first=np.array([0, 9, 1, 9, 9, 9])),
    "x.npz is damaged",
  ),
  "array": (_bare, "x.npz is no corpus index"),
  "ids": (
    lambda p: _changed(p, bigram_token=np.full(25, 99, np.int32)),
    "x.npz is damaged",
  ),
}


@pytest.mark.parametrize("kind", _DAMAGE)
@pytest.mark.parametrize("name", ["suffix", "ngram"])
def test_a_file_that_cannot_be_used_is_refused(tmp_path, name, kind):
  """By both drafters, before anything runs."""
  path = tmp_path / "x.npz"
  corpus.save(index(), path)
  damage, words = _DAMAGE[kind]
  damage(path)
  with pytest.raises(ValueError, match=words):
    drafters.build(name, fakes.tables(V)[0], None, slots=8, corpus=str(path))


@pytest.mark.parametrize("name", ["suffix", "ngram"])
def test_an_index_of_another_vocabulary_is_refused(name):
  """Both sizes stand in the message; the tokenizer's hash is passed on."""
  path = cases.index_file(V)
  with pytest.raises(ValueError, match="5 ids, the model has 9"):
    drafters.build(name, fakes.tables(9)[0], None, slots=8, corpus=path)
  built = drafters.build(name, fakes.tables(V)[0], None, slots=8, corpus=path)
  assert built.vocabulary == corpus.load(path).tokenizer


def test_an_ngram_model_needs_an_index():
  """The message says how to make one; suffix decoding goes without."""
  model, _ = fakes.tables(V)
  with pytest.raises(ValueError, match="needs a corpus index: make one with"):
    drafters.build("ngram", model, None, slots=8)
  assert drafters.build("suffix", model, None, slots=8).tables is None
