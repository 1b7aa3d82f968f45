"""Prompt lookup: matches against a search in Python, and its edges."""

import functools

from hypothesis import given, settings, strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import drafters
from spec_jax.base import Context, Sampling
from spec_jax.drafters.prompt_lookup import find_match
from spec_jax.settings import Settings
from tests import fakes

WIDTH = 12
_find = jax.jit(find_match, static_argnames=("max_ngram", "min_ngram", "first"))


def find(rows, *, low=1, high=3, first=False, junk=0):
  """Returns the matches of rows of tokens; `junk` lies behind them."""
  tokens = np.full((len(rows), WIDTH), junk, np.int32)
  for i, row in enumerate(rows):
    tokens[i, : len(row)] = row
  lengths = jnp.array([len(r) for r in rows], jnp.int32)
  options = {"min_ngram": low, "max_ngram": high, "first": first}
  return _find(jnp.asarray(tokens), lengths, **options).tolist()


def search(row, low, high, first):
  """Looks for the longest suffix that stood before; where it went on."""
  for n in range(min(high, len(row)), low - 1, -1):
    ends = [i for i in range(n, len(row)) if row[i - n : i] == row[-n:]]
    if ends:
      return ends[0] if first else ends[-1]
  return -1


def test_the_docstrings_example_and_the_longest_match_wins():
  """5 6 7 5 6 goes on at 2; a longer match beats a more recent one."""
  assert find([[5, 6, 7, 5, 6]]) == [2]
  assert find([[1, 2, 9, 3, 2, 8, 1, 2]]) == [2]
  assert find([[1, 2, 9, 3, 2, 8, 1, 2]], high=1) == [5]
  assert find([[1, 2, 9, 3, 2, 8, 1, 2]], high=1, first=True) == [2]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_no_repeat_is_no_match(n):
  """D1: lengths 0 to n + 1 without repeats, zeros or the last token behind."""
  rows = [list(range(1, k + 1)) for k in range(n + 2)]
  for junk in (0, 1, n):
    assert find(rows, low=n, high=n, junk=junk) == [-1] * len(rows)


def test_a_suffix_is_no_match_of_itself():
  """D1: nothing follows the only place; overlapping repeats do count."""
  assert find([[1, 2, 3]], low=2) == [-1]
  assert find([[7, 7]], high=1) == [1]
  assert find([[7, 7, 7]], low=2, high=2) == [2]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
  st.lists(
    st.lists(st.integers(0, 2), max_size=WIDTH), min_size=20, max_size=20
  ),
  st.sampled_from([(1, 3), (2, 2), (1, 8)]),
  st.booleans(),
)
def test_matches_are_those_of_a_search(rows, bounds, first):
  """Three letters, rows of 0 to 12 tokens, first and most recent matches."""
  low, high = bounds
  found = find(rows, low=low, high=high, first=first, junk=2)
  assert found == [search(row, low, high, first) for row in rows]


def propose(rows, **options):
  """Returns (tokens, acceptable) that are drafted for rows."""
  model, _ = fakes.tables(9)
  drafter = drafters.build("prompt_lookup", model, None, slots=WIDTH, **options)
  tokens = np.zeros((len(rows), WIDTH), np.int32)
  for i, row in enumerate(rows):
    tokens[i, : len(row)] = row
  B = len(rows)
  context = Context(
    tokens=jnp.asarray(tokens),
    length=jnp.array([len(r) for r in rows], jnp.int32),
    done=jnp.zeros((B,), bool),
    max_depth=jnp.full((B,), drafter.depth),
    sampling=Sampling(),
    counts=None,
  )
  draft, _ = drafter.propose({}, None, (), context)
  return np.asarray(draft.tokens), np.asarray(draft.acceptable)


def test_what_followed_is_copied_as_far_as_the_text_goes():
  """D1: three tokens follow the match, the rest is not acceptable."""
  rows = [[1, 2, 3, 4, 1], [5, 6], [8, 8, 8]]
  tokens, usable = propose(rows, num_draft=5)
  assert tokens[0, :5].tolist() == [1, 2, 3, 4, 1]
  assert usable[0].tolist() == [False, True, True, True, True, False]
  assert not usable[1].any()
  assert tokens[2, :2].tolist() == [8, 8]
  assert usable[2].tolist() == [False, True, False, False, False, False]


@functools.cache
def plain_texts():
  rig = fakes.Rig(fakes.tables(9, period=3), slots=48)
  return rig.texts(*_requests())


def _requests():
  prompts = [[1], [2, 3, 2, 3, 2], [4, 5, 6, 7, 8, 0], [3, 3, 3]]
  kinds = [
    Settings(max_new_tokens=42),  # Row 1 ends at the last slot.
    Settings(max_new_tokens=60),
    Settings(temperature=1, max_new_tokens=30),
    Settings(max_new_tokens=3),
  ]
  return prompts, kinds


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_texts_are_plains_at_every_length_of_match(n):
  """D4, D8, B2: greedy and sampled rows, rows that never match, full slots."""
  rig = fakes.Rig(
    fakes.tables(9, period=3),
    "prompt_lookup",
    slots=48,
    options={"min_ngram": n, "max_ngram": n, "num_draft": 4},
  )
  state = rig.run(*_requests())
  assert fakes.outputs(state) == plain_texts()
  assert state.length[1] == 48
  assert state.tally.num_accepted[0] > 0  # The greedy table runs in a circle.


def test_a_batch_without_any_match_is_plain():
  """B2: a text that never repeats drafts nothing and costs nothing."""
  text = list(range(32))
  rig = fakes.Rig(
    fakes.scripted(text, 32), "prompt_lookup", slots=32, use=fakes.GREEDY
  )
  state = rig.run([[0], [0, 1, 2]], Settings(max_new_tokens=20))
  assert fakes.outputs(state) == [text[1:21], text[3:23]]
  assert state.tally.num_drafted.tolist() == [0, 0]
  assert state.tally.num_steps.tolist() == [20, 20]


@pytest.mark.parametrize(
  ("options", "words"),
  [
    ({"num_draft": 0}, "num_draft must be at least 1, got 0"),
    ({"min_ngram": 0}, "got 0 and 3"),
    ({"min_ngram": 4}, "got 4 and 3"),
    ({"match": "best"}, "'best'"),
  ],
)
def test_options_out_of_range_are_refused(options, words):
  """The message holds the value."""
  with pytest.raises(ValueError, match=words):
    propose([[1]], **options)
