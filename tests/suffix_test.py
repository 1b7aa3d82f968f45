"""Suffix decoding against an independent replay in plain Python."""

from collections import Counter
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import corpus, drafters
from spec_jax.base import Context, Sampling
from spec_jax.drafters import suffix
from spec_jax.settings import Settings
from tests import cases, fakes

V, WIDTH = 5, 24
DEFAULTS = {
  "num_draft": 8,
  "num_nodes": 0,
  "max_match": 16,
  "min_match": 1,
  "factor": 2.0,
  "min_probability": 0.1,
  "occurrences": 16,
}
OPTIONS = {
  "own": {},
  "short": {"max_match": 2, "factor": 1.5, "min_probability": 0.6},
  "few": {"occurrences": 2, "min_match": 2, "num_draft": 4},
  "corpus": {"corpus": cases.index_file},
  "corpus_few": {
    "corpus": cases.index_file,
    "occurrences": 3,
    "max_match": 3,
    "min_probability": 0.4,
  },
  "tree": {"num_draft": 3, "num_nodes": 7, "min_probability": 0.0},
  "corpus_tree": {
    "corpus": cases.index_file,
    "num_draft": 4,
    "num_nodes": 9,
    "occurrences": 8,
  },
}


@functools.cache
def drafter_of(key):
  model, _ = fakes.tables(V)
  return cases.Case("suffix", OPTIONS[key]).build(model, None, WIDTH)


@functools.cache
def texts():
  """The documents of the corpus, in its order."""
  found, text = [], []
  for token in corpus.load(cases.index_file(V)).tokens[1:].tolist():
    if token >= 0:
      text.append(token)
    else:
      found, text = [*found, text], []
  return found


@functools.cache
def sorted_places():
  """Places as they lie in the index: by 32 tokens before, nearest first."""
  return sorted(
    (text[max(i - 32, 0) : i][::-1], t, i)
    for t, text in enumerate(texts())
    for i in range(1, len(text))
  )


def agreeing(text, i, row, most):
  """Counts tokens before index `i` of a text that equal the row's last."""
  n = 0
  while n < min(i, len(row), most) and text[i - 1 - n] == row[-1 - n]:
    n += 1
  return n


def followers(row, o):
  """Returns (longest match, what followed its places, in voting order)."""
  most, R, K = o["max_match"], o["occurrences"], o["num_draft"]
  own = [(agreeing(row, i, row, most), row[i:]) for i in range(1, len(row))]
  places = []
  if "corpus" in o:
    places = sorted_places()
  there = [
    (agreeing(texts()[t], i, row, most), texts()[t][i:]) for _, t, i in places
  ]
  longest = max((n for n, _ in own + there), default=0)
  if longest < max(1, o["min_match"]):
    return 0, []
  own = [rest for n, rest in own if n == longest][::-1][:R]
  there = [rest for n, rest in there if n == longest]
  if len(there) > R:
    there = [there[i * len(there) // R] for i in range(R)]
  return longest, [rest[:K] for rest in own + there]


def expected(row, max_depth, o):
  """Returns the drafted nodes in order, each the tokens on the way to it."""
  longest, rests = followers(row, o)
  limit = min(int(o["factor"] * longest), max_depth, o["num_draft"])
  chain = o["num_nodes"] == 0
  count, first = Counter(), {}
  for place, rest in enumerate(rests):
    for d in range(1, min(limit, len(rest)) + 1):
      path = tuple(rest[:d])
      count[path] += 1
      first.setdefault(path, place)
  nodes: list[tuple] = []
  while len(nodes) < (o["num_draft"] if chain else o["num_nodes"]):
    parents = [nodes[-1] if nodes else ()] if chain else [(), *nodes]
    fresh = [p for p in count if p[:-1] in parents and p not in nodes]
    if not fresh:
      break
    best = min(fresh, key=lambda p: (-count[p], len(p), first[p]))
    if count[best] / len(rests) < o["min_probability"] - 1e-6:
      break
    nodes.append(best)
  return nodes


@functools.cache
def _proposer(key):
  drafter = drafter_of(key)
  tables = jax.tree.map(jnp.asarray, drafter.tables)

  @jax.jit
  def propose(tokens, length, max_depth):
    context = Context(
      tokens=tokens,
      length=length,
      done=length < 0,
      max_depth=max_depth,
      sampling=Sampling(),
      counts=None,
    )
    return drafter.propose({"tables": tables}, None, (), context)[0]

  return propose


def drafted(key, rows, depths):
  """Returns each row's acceptable nodes as the tokens on the way to them."""
  tokens = np.full((len(rows), WIDTH), 1, np.int32)
  for i, row in enumerate(rows):
    tokens[i, : len(row)] = row
  lengths = jnp.array([len(r) for r in rows], jnp.int32)
  draft = _proposer(key)(
    jnp.asarray(tokens), lengths, jnp.asarray(depths, jnp.int32)
  )
  draft = jax.tree.map(np.asarray, draft)
  found = []
  for row in range(len(rows)):
    paths = {0: ()}
    for i in np.flatnonzero(draft.acceptable[row]):
      parent = paths[int(draft.parents[row, i])]
      paths[int(i)] = (*parent, int(draft.tokens[row, i]))
    found.append([paths[i] for i in sorted(paths) if i])
  return found


@pytest.mark.parametrize("key", OPTIONS)
def test_drafts_are_those_of_a_replay(key):
  """70 rows of 1 to 24 tokens, bounded to 0 .. K tokens or not at all."""
  rng = np.random.default_rng(8)
  o = DEFAULTS | OPTIONS[key]
  rows, depths = [], []
  for i in range(70):
    few = V if i % 3 else 2
    rows.append(rng.integers(0, few, rng.integers(1, WIDTH + 1)).tolist())
    depths.append(int(rng.integers(0, o["num_draft"] + 1)) if i % 2 else 99)
  found = drafted(key, rows, np.minimum(depths, o["num_draft"]))
  for row, depth, nodes in zip(rows, depths, found, strict=True):
    assert nodes == expected(row, depth, o), row
  assert sum(len(nodes) > 2 for nodes in found) > 9
  assert sum(not nodes for nodes in found) > 2


def test_own_matches_by_hand():
  """The docstring's example; the suffix is no match of itself."""
  rows = jnp.array([[5, 6, 7, 5, 6, 9], [7, 7, 7, 7, 0, 0], [3, 3, 3, 0, 0, 0]])
  found = suffix.own_match(rows, jnp.array([5, 3, 0]), 4)
  assert found.tolist() == [
    [0, 0, 2, 0, 0, 0],
    [0, 1, 2, 0, 0, 0],
    [0, 0, 0, 0, 0, 0],
  ]


@pytest.mark.parametrize("chain", [True, False])
def test_a_vote_by_hand(chain):
  """The docstring's example: a chain goes deeper, a tree goes wider."""
  follow = jnp.array([[[1, 2], [1, 3], [4, 2], [-1, -1]]])
  tokens, parents, good = suffix.vote(
    follow, jnp.array([2]), num_nodes=3, chain=chain, min_probability=0.3
  )
  assert good.tolist() == [[False, True, True]]
  assert tokens.tolist() == [[0, 1, 2 if chain else 4]]
  assert parents.tolist() == [[-1, 0, 1 if chain else 0]]


def test_a_draft_ends_where_it_is_too_unlikely():
  """One of three places is under .4, two of three are not."""
  follow = jnp.array([[[1, 2], [1, 3], [4, 2]]])
  vote = functools.partial(suffix.vote, follow, num_nodes=3, chain=True)
  for least, nodes in ((0.4, 1), (0.7, 0), (0.33, 2)):
    good = vote(jnp.array([2]), min_probability=least)[2]
    assert good.sum() == nodes
  assert vote(jnp.array([1]), min_probability=0.0)[2].sum() == 1


def test_places_of_a_corpus_are_spread_evenly():
  """Few ones are all taken; of 2**30, no product overflows."""
  low, high = jnp.array([7, 0, 5, 3]), jnp.array([9, 10, 5, 3 + 2**30])
  assert suffix._spread(low, high, 4).tolist() == [
    [7, 8, -1, -1],
    [0, 2, 5, 7],
    [-1, -1, -1, -1],
    [3 + i * 2**28 for i in range(4)],
  ]


def steps_of(text, start, end, o):
  """Counts the steps in which a greedy run emits `text[start:end]`."""
  steps, accepted, at = 0, 0, start
  while at < end:
    nodes = expected(text[:at], end - at - 1, o)
    num = 0
    while tuple(text[at : at + num + 1]) in nodes:
      num += 1
    steps, accepted, at = steps + 1, accepted + num, at + num + 1
  return steps, accepted


@functools.cache
def stored_text():
  """Two documents of the corpus, one of them twice, and noise."""
  rng = np.random.default_rng(5)
  noise = rng.integers(0, V, 40).tolist()
  return (texts()[3][:30] + noise + texts()[4][:30] + texts()[3][:28])[:128]


@pytest.mark.parametrize("key", ["own", "corpus", "corpus_tree"])
def test_greedy_steps_are_those_of_a_replay(key):
  """A model that knows a stored text; prompts of 2 and 40 of its tokens."""
  text = stored_text()
  drafter = drafter_of(key)
  rig = fakes.Rig(
    fakes.scripted(text, V), drafter, slots=len(text), use=fakes.GREEDY
  )
  starts, ends = [2, 40], [len(text), 100]
  state = rig.run(
    [text[:s] for s in starts],
    [Settings(max_new_tokens=e - s) for s, e in zip(starts, ends, strict=True)],
  )
  o = DEFAULTS | OPTIONS[key]
  for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
    assert fakes.outputs(state)[row] == text[start:end]
    steps, accepted = steps_of(text, start, end, o)
    assert int(state.tally.num_steps[row]) == steps < end - start
    assert int(state.tally.num_accepted[row]) == accepted


@pytest.mark.parametrize(
  ("options", "words"),
  [
    ({"num_draft": 0}, "num_draft must be at least 1, got 0"),
    (
      {"num_nodes": 3},
      r"0 or at least num_draft \(8\), got 3",
    ),
    ({"min_match": 0}, "got 0 and 16"),
    ({"max_match": 2, "min_match": 3}, "got 3 and 2"),
    ({"factor": 0.0}, r"factor must be in \(0, 1e6\], got 0.0"),
    ({"min_probability": 1.5}, r"in \[0, 1\], got 1.5"),
    ({"occurrences": 0}, "occurrences must be at least 1, got 0"),
    (
      {"max_match": 33, "corpus": cases.index_file(V)},
      "max_match must be at most 32 with this index, got 33",
    ),
  ],
)
def test_options_out_of_range_are_refused(options, words):
  """The message holds the value."""
  model, _ = fakes.tables(V)
  with pytest.raises(ValueError, match=words):
    drafters.build("suffix", model, None, slots=WIDTH, **options)
