"""The n-gram model against its formula in plain Python."""

from collections import Counter, defaultdict
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import corpus, drafters
from spec_jax.base import DETERMINISTIC, IID
from spec_jax.drafters import ngram
from spec_jax.settings import Settings, in_use
from tests import cases, fakes, reference
from tests.suffix_test import stored_text, texts

V = 5
_log_law = jax.jit(ngram.log_law, static_argnames="most")


@functools.cache
def counts():
  """Counts of followers by context: of no, one and two tokens."""
  found: dict[tuple, Counter] = defaultdict(Counter)
  for text in texts():
    for i, token in enumerate(text):
      for n in range(min(i, 2) + 1):
        found[tuple(text[i - n : i])][token] += 1
  return found


def law(context, vocab, counts, most):
  """Returns the docstring's formula as a list over the vocabulary."""
  if not context:
    c = counts[()]
    return [
      (c[w] + len(c) / vocab) / (c.total() + len(c)) for w in range(vocab)
    ]
  shorter = law(context[1:], vocab, counts, most)
  c = counts.get(context, Counter())
  if not c:
    return shorter
  kept = dict(sorted(c.items(), key=lambda x: (-x[1], x[0]))[:most])
  unseen = len(c) + c.total() - sum(kept.values())
  whole = c.total() + len(c)
  return [(kept.get(w, 0) + unseen * shorter[w]) / whole for w in range(vocab)]


@pytest.mark.parametrize("most", [64, 2])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_the_law_is_the_formula(order, most):
  """Every pair of tokens, a row of one token, ids and pairs never seen.

  In a vocabulary of 9 of which the corpus has 5; lists of 2 at most, too.
  """
  vocab = 9
  index = corpus.build(
    [*texts(), [7, 8]], tokenizer="x", vocab_size=vocab, max_successors=most
  )
  known = {key: c.copy() for key, c in counts().items()}
  known[()].update([7, 8])
  known[(7,)] = Counter([8])
  pairs = [(u, v) for u in range(-1, vocab) for v in range(vocab)]
  u, v = (jnp.asarray(x, jnp.int32) for x in zip(*pairs, strict=True))
  tables = jax.tree.map(jnp.asarray, ngram.tables_of(index, order))
  found = np.exp(_log_law(tables, u, v, most=most))
  np.testing.assert_allclose(found.sum(-1), 1, atol=1e-5)
  for pair, row in zip(pairs, found, strict=True):
    context = tuple(x for x in pair if x >= 0)[max(0, 3 - order) :]
    context = context if order > 1 else ()
    if pair[0] < 0:
      context = pair[1:] if order > 1 else ()
    np.testing.assert_allclose(row, law(context, vocab, known, most), atol=1e-6)
  assert len(np.unique(found.round(5), axis=0)) > (0, 4, 20)[order - 1]


def test_texts_of_two_tokens_have_no_trigrams():
  """The law is the bigrams'."""
  index = corpus.build([[1, 2], [2, 3]], tokenizer="x", vocab_size=V)
  tables = ngram.tables_of(index, 3)
  assert set(tables) == {"unigram", "bigram"}
  found = _log_law(tables, jnp.array([1]), jnp.array([2]), most=1)
  known = {(): Counter([1, 2, 2, 3]), (1,): Counter([2]), (2,): Counter([3])}
  expected = law((2,), V, known, 1)
  np.testing.assert_allclose(np.exp(found[0]), expected, atol=1e-6)


@functools.cache
def rig_of(order):
  rig = fakes.tables(V, period=3)
  options = {"order": order, "num_draft": 3, "corpus": cases.index_file}
  case = cases.Case("ngram", options)
  return cases.rig_of(
    case,
    rig,
    rig,
    slots=32,
    use=in_use([Settings(temperature=1, top_k=3)]),
    trace=True,
  )


@pytest.mark.parametrize("order", [1, 3])
def test_tokens_are_drawn_from_the_warped_law(order):
  """Rows at temperature 0 and .7 with top-3: what is shown, and how drawn."""
  rig = rig_of(order)
  kinds = [{"temperature": 0.0}, {"temperature": 0.7, "top_k": 3}]
  settings = [Settings(max_new_tokens=20, **k) for k in kinds]
  state = rig.start([[3], [4, 0, 1]], settings)
  seen = set()
  while not state.done.all():
    after, info = rig.step(rig.params, state)
    draft = jax.tree.map(np.asarray, info.draft)
    for row, setting in enumerate(kinds):
      text = state.tokens[row, : int(state.length[row])].tolist()
      for i in range(1, 4):
        if not draft.acceptable[row, i]:
          continue
        context = tuple(text[-order + 1 :]) if order > 1 else ()
        own = law(context, V, counts(), 64)
        q = reference.warp(np.log(np.array(own)), setting)
        found = draft.probs[row, i - 1]
        np.testing.assert_allclose(found, q, atol=1e-5)
        token = int(draft.tokens[row, i])
        assert q[token] > 0
        assert draft.law[row, i] == (IID if row else DETERMINISTIC)
        seen.add((row, token))
        text.append(token)
    state = after
  assert len([t for row, t in seen if row]) > 2


@pytest.mark.parametrize("order", [1, 2, 3])
def test_greedy_steps_are_those_of_a_replay(order):
  """A model that knows a stored text; the likeliest tokens are proposed."""
  text, start = stored_text(), 2
  options = {"order": order, "corpus": cases.index_file(V)}
  rig = fakes.Rig(
    fakes.scripted(text, V),
    "ngram",
    slots=len(text),
    use=fakes.GREEDY,
    options=options,
  )
  state = rig.run([text[:start]], Settings(max_new_tokens=len(text)))
  assert fakes.outputs(state) == [text[start:]]
  steps, at = 0, start
  while at < len(text):
    num = 0
    while num < min(4, len(text) - at - 1):
      end = at + num
      context = tuple(text[max(0, end - order + 1) : end])
      q = law(context, V, counts(), 64)
      if max(range(V), key=lambda w: (q[w], -w)) != text[end]:
        break
      num += 1
    steps, at = steps + 1, at + num + 1
  assert int(state.tally.num_steps[0]) == steps < len(text) - start


def test_the_rate_of_acceptance_is_the_overlap_of_the_laws():
  """Leviathan's alpha: the sum of min(p, q), for a target of one law.

  3,000 rows of one draft token each: 5 standard errors are .046.
  """
  p = np.array([0.4, 0.3, 0.1, 0.1, 0.1])
  settings = [Settings(temperature=1, max_new_tokens=2)] * 3000
  options = {"order": 1, "num_draft": 1, "corpus": cases.index_file(V)}
  rig = fakes.Rig(
    fakes.law_model(p), "ngram", slots=4, use=in_use(settings), options=options
  )
  state = rig.run([[1]] * 3000, settings)
  q = law((), V, counts(), 64)
  alpha = sum(map(min, p, q))
  found = float((state.tally.num_accepted > 0).mean())
  assert math.isclose(found, alpha, abs_tol=0.046) and 0.1 < alpha < 0.9


@pytest.mark.parametrize(
  ("options", "words"),
  [
    ({"num_draft": 0}, "num_draft must be at least 1, got 0"),
    ({"order": 4}, "order must be 1, 2 or 3, got 4"),
    ({"corpus": ""}, "drafter 'ngram' needs a corpus index"),
  ],
)
def test_options_out_of_range_are_refused(options, words):
  """The message holds the value."""
  model, _ = fakes.tables(V)
  with pytest.raises(ValueError, match=words):
    drafters.build("ngram", model, None, slots=8, **options)
