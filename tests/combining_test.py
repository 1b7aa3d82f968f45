"""Drafters inside drafters: specs, who serves a row, shared nodes, cascades."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import drafters, tree as trees
from spec_jax.base import DETERMINISTIC, IID, Draft
from spec_jax.combining import widen
from spec_jax.drafters import merge
from spec_jax.drafting import dynamic_tree, static_tree
from spec_jax.settings import Settings
from tests import fakes

V, SLOTS, NEW = 13, 64, 24

# --- specs -----------------------------------------------------------------


@pytest.mark.parametrize(
  ("spec", "expected"),
  [
    ("none", ("none", {})),
    (" vanilla() ", ("vanilla", {})),
    (
      "prompt_lookup(num_draft=7, match='first')",
      ("prompt_lookup", {"num_draft": 7, "match": "first"}),
    ),
    (
      "vanilla(tree=(2, 1), draft_temperature=.5)",
      ("vanilla", {"tree": (2, 1), "draft_temperature": 0.5}),
    ),
  ],
)
def test_a_drafter_is_read_with_its_options(spec, expected):
  assert drafters.parse(spec) == expected


@pytest.mark.parametrize(
  ("spec", "words"),
  [
    ("", "name or name.option=value"),
    ("vanilla(", "name or name.option=value"),
    ("vanilla(3)", "name or name.option=value"),
    ("vanilla(**{})", "name or name.option=value"),
    ("a.b(c=1)", "name or name.option=value"),
    ("beam", "unknown drafter 'beam'"),
    ("vanilla(depth=3)", "no option 'depth'"),
    ("vanilla(num_draft=open('x'))", "option 'num_draft' .* must be a number"),
    ("vanilla(num_draft=1, num_draft=2)", "name or name.option=value"),
  ],
)
def test_what_is_no_drafter_is_refused(spec, words):
  """The message says the form, or what there is."""
  with pytest.raises(ValueError, match=words):
    drafters.parse(spec)


@pytest.mark.parametrize(
  ("name", "options", "expected"),
  [
    ("vanilla", None, True),
    ("prompt_lookup", {"num_draft": 3}, False),
    ("best_first", None, True),
    ("cascade", None, True),
    ("first_of", None, True),
    ("first_of", {"second": "none"}, False),
    ("first_of", {"first": "vanilla", "second": "none"}, True),
    ("merge", {"first": "prompt_lookup", "second": "none"}, False),
    ("merge", {"second": "first_of(second='best_first')"}, True),
  ],
)
def test_whether_a_draft_model_is_asked_depends_on_the_parts(
  name, options, expected
):
  assert drafters.takes_draft(name, options) == expected


@pytest.mark.parametrize(
  ("name", "options", "words"),
  [
    ("first_of", {"first": "beam"}, "'first': unknown drafter 'beam'"),
    ("merge", {"second": "vanilla(num_draft=0)"}, "'second': num_draft must"),
    (
      "merge",
      {"first": "vanilla", "second": "first_of"},
      "only one of two merged drafters may draw at random",
    ),
    ("cascade", {"num_draft": 1}, "num_draft must be at least 2, .* got 1"),
    ("cascade", {"inner": "vanilla"}, "asks no draft model, got 'vanilla'"),
    ("cascade", {"inner": "none"}, "certain of its tokens, got 'none'"),
    ("cascade", {"draft_temperature": -1.0}, "got -1.0"),
    ("cascade", {"inner": "lookahead"}, "own use, got 'lookahead'"),
  ],
)
def test_parts_that_do_not_fit_are_refused(name, options, words):
  model, _ = fakes.tables()
  with pytest.raises(ValueError, match=words):
    drafters.build(name, model, model, slots=32, **options)


@pytest.mark.parametrize("name", ["first_of", "merge", "cascade"])
def test_a_missing_draft_model_is_refused(name):
  model, _ = fakes.tables()
  with pytest.raises(ValueError, match="needs a draft model"):
    drafters.build(name, model, None, slots=32)


# --- trees of two ----------------------------------------------------------


def chain_of(tokens, law=DETERMINISTIC, num=None):
  """Returns the Draft of one row, a chain of which `num` are acceptable."""
  n = len(tokens)
  num = n - 1 if num is None else num
  return Draft(
    tokens=jnp.array([tokens]),
    **static_tree(trees.chain(n - 1), 1),
    law=jnp.full((1, n), law),
    probs=None if law == DETERMINISTIC else jnp.full((1, n, V), 1 / V),
    acceptable=(jnp.arange(n)[None] > 0) & (jnp.arange(n)[None] <= num),
  )


@pytest.mark.parametrize(
  ("one", "two", "places"),
  [
    (chain_of([9, 5, 6]), chain_of([9, 5, 7]), [0, 1, 4]),  # The docstring's.
    (chain_of([9, 5, 6]), chain_of([9, 5, 6]), [0, 1, 2]),
    (chain_of([9, 5, 6]), chain_of([9, 6, 5]), [0, 3, 4]),
    # What is not acceptable, or was drawn, is shared with nobody.
    (chain_of([9, 5, 6], num=1), chain_of([9, 5, 6]), [0, 1, 4]),
    (chain_of([9, 5, 6]), chain_of([9, 5, 6], num=0), [0, 3, 4]),
    (chain_of([9, 5, 6]), chain_of([9, 5, 6], IID), [0, 3, 4]),
    (chain_of([9, 5, 6], IID), chain_of([9, 5, 6]), [0, 3, 4]),
  ],
)
def test_certain_nodes_of_one_text_are_shared(one, two, places):
  found = merge.share(one, two)
  assert found.tolist() == [places]
  both = merge.side_by_side(one, two, found)
  expected = dynamic_tree(both.parents)
  for name, x in expected.items():
    assert (getattr(both, name) == x).all(), name
  # Each text that one of them proposes is in the tree once.
  texts = []
  for i in np.flatnonzero(both.acceptable[0]):
    seen = np.flatnonzero(both.visible[0, i])
    texts.append(tuple(both.tokens[0, seen].tolist()))
  proposed = [
    tuple(d.tokens[0, : i + 1].tolist())
    for d in (one, two)
    for i in np.flatnonzero(d.acceptable[0])
  ]
  shared = places != [0, 3, 4]
  assert sorted(texts) == sorted(set(proposed) if shared else proposed)


@pytest.mark.parametrize("num", [0, 1, 3])
def test_what_is_not_wanted_goes_to_the_end(num):
  """A chain of which `num` may be accepted, before another: as in a merge."""
  one, two = chain_of([9, 5, 6, 7], num=num), chain_of([9, 6, 5])
  both = merge.side_by_side(one, two, merge.share(one, two))
  read = jnp.zeros((1, 6), bool).at[0, 5].set(num == 1)
  both = dataclasses.replace(both, read=read)
  after, moved = merge.wanted_first(both)
  wanted = (after.acceptable | after.read)[0].tolist()
  assert wanted == [False] + [True] * (num + 2) + [False] * (3 - num)
  for name, x in dynamic_tree(after.parents).items():
    assert (getattr(after, name) == x).all(), name

  def texts(draft):
    """Returns of each node its text, and whether it may be accepted."""
    seen = np.asarray(draft.visible[0])
    tokens = np.asarray(draft.tokens[0])
    return [
      (tokens[list(map(int, np.flatnonzero(path)))].tolist(), bool(ok))
      for path, ok in zip(seen, draft.acceptable[0], strict=True)
    ]

  # A path that was moved is in another order only where nobody arrives.
  there = moved[0].tolist()
  assert sorted(there) == list(range(6))
  for i, (text, ok) in enumerate(texts(both)):
    new_text, new_ok = texts(after)[there[i]]
    assert ok == new_ok and sorted(text) == sorted(new_text)
    assert not ok or text == new_text


def test_added_nodes_hang_at_the_root_and_are_refused():
  draft = widen(chain_of([9, 5, 6], IID), 5)
  assert draft.parents.tolist() == [[-1, 0, 1, 0, 0]]
  assert draft.acceptable.tolist() == [[False, True, True, False, False]]
  assert draft.tokens.tolist() == [[9, 5, 6, 9, 9]]
  assert draft.probs.shape == (1, 5, V)
  expected = dynamic_tree(draft.parents)
  for name in ("depths", "visible"):
    assert (getattr(draft, name) == expected[name]).all()


# --- who serves a row ------------------------------------------------------


def look_up(text, num, max_ngram, min_ngram, first=False):
  """Prompt lookup with lists."""
  for n in range(max_ngram, min_ngram - 1, -1):
    ends = [
      e for e in range(n, len(text)) if text[e - n : e] == text[len(text) - n :]
    ]
    if ends:
      end = ends[0] if first else ends[-1]
      return text[end : end + num]
  return []


def common(a, b):
  """Returns how many tokens two texts begin with in common."""
  same = [x == y for x, y in zip(a, b, strict=False)]
  return ([*same, False]).index(False)


def counting(model):
  """Returns the model and a list that gets one entry a pass."""
  calls = []

  def apply(*args, **kwargs):
    jax.debug.callback(lambda: calls.append(args[1].shape[1]))
    return model.apply(*args, **kwargs)

  return model._replace(apply=apply), calls


PROMPTS = [[1, 2, 1, 2], [5], [3, 3, 3], [7, 8, 9]]


def run(name, options, target, draft, prompts=PROMPTS):
  """Runs greedy rows; returns (texts, [(drafted, tokens)] by step, rig)."""
  rig = fakes.Rig(
    target,
    name,
    draft=draft,
    options=options,
    slots=SLOTS,
    use=fakes.GREEDY,
  )
  state = rig.start(prompts, Settings(max_new_tokens=NEW))
  record = []
  while not state.done.all():
    state, info = rig.step(rig.params, state)
    record.append((info.num_drafted.tolist(), info.num_tokens.tolist()))
  return fakes.outputs(state), record


def plain_texts(target):
  return run("none", {}, target, None)[0]


def test_the_second_serves_where_the_first_has_nothing():
  """Step by step as lists say; the draft is asked in no other row.

  The draft is the target, so its two are accepted.
  """
  model, params = fakes.tables(V, period=2, seed=4)
  own, calls = counting(model)
  options = {
    "first": "prompt_lookup(num_draft=3, min_ngram=2)",
    "second": "vanilla(num_draft=2)",
  }
  texts, record = run("first_of", options, (model, params), (own, params))
  jax.effects_barrier()
  assert texts == plain_texts((model, params))
  lengths = [len(p) for p in PROMPTS]
  rows = [p + t for p, t in zip(PROMPTS, texts, strict=True)]
  served = {"first": 0, "second": 0}
  for drafted, num in record:
    for row, text in enumerate(rows):
      at, room = lengths[row], len(text) - lengths[row] - 1
      copied = look_up(text[:at], 3, 3, 2)[: max(room, 0)]
      if copied:
        expected = len(copied), common(copied, text[at:]) + 1
      else:
        expected = (min(2, max(room, 0)),) * 2
        expected = expected[0], min(expected[1] + 1, room + 1)
      if room >= 0:
        served["first" if copied else "second"] += bool(room)
      assert (drafted[row], num[row]) == expected, (row, at)
      lengths[row] += num[row]
  assert min(served.values()) > 5
  assert calls.count(8) > 0  # It fell behind, and caught up.


def test_a_draft_that_nobody_needs_is_not_asked():
  """All rows are served by the first: no pass of the draft model."""
  model, params = fakes.scripted([1, 2, 3], V)
  own, calls = counting(model)
  options = {"first": "prompt_lookup(num_draft=3)", "second": "vanilla"}
  prompts = [[1, 2, 3, 1, 2]] * 2
  _, record = run("first_of", options, (model, params), (own, params), prompts)
  jax.effects_barrier()
  assert record[0] == ([3, 3], [4, 4])
  # The prompt's own chunk is all it ever read.
  assert calls == [8]


def test_either_continuation_of_a_merged_tree_is_followed():
  """The first match and the last: as long as the better one, in every step."""
  options = {
    "first": "prompt_lookup(num_draft=4, max_ngram=1)",
    "second": "prompt_lookup(num_draft=4, max_ngram=1, match='first')",
  }
  prompts = [[5, 1, 1, 5, 2], [1, 2, 1, 3, 1], [4, 0, 4], [9]]
  model, params = fakes.scripted([1, 2, 1, 3, 1, 1, 2, 4], V)
  texts, record = run("merge", options, (model, params), None, prompts)
  assert texts == run("none", {}, (model, params), None, prompts)[0]
  lengths = [len(p) for p in prompts]
  rows = [p + t for p, t in zip(prompts, texts, strict=True)]
  better = [0, 0]
  for _, num in record:
    for row, text in enumerate(rows):
      at = lengths[row]
      if at == len(text):
        assert num[row] == 0
        continue
      kept = [
        common(look_up(text[:at], 4, 1, 1, first), text[at:-1])
        for first in (False, True)
      ]
      assert num[row] == max(kept) + 1
      better[0] += kept[0] > kept[1]
      better[1] += kept[1] > kept[0]
      lengths[row] += num[row]
  assert min(better) > 3


def test_tables_of_parts_reach_the_part_they_belong_to(monkeypatch):
  """`params["tables"]` holds one entry a part; tokenizers must agree."""
  model, params = fakes.tables(V)
  real = drafters.build

  def with_tables(name, *args, **options):
    drafter = real(name, *args, **options)
    if name != "prompt_lookup":
      return drafter
    word = options["num_draft"]

    def propose(params, *rest):
      assert params["tables"].shape == (word,)
      return drafter.propose(params, *rest)

    return drafter._replace(
      propose=propose,
      tables=np.zeros(word),
      vocabulary="a" if word < 5 else "b",
      keep=lambda old, new: new,
    )

  monkeypatch.setattr(drafters, "build", with_tables)
  build = lambda a, b: real(
    "merge",
    model,
    None,
    slots=SLOTS,
    first=f"prompt_lookup(num_draft={a})",
    second=f"prompt_lookup(num_draft={b}, match='first')",
  )
  drafter = build(2, 3)
  assert drafter.vocabulary == "a" and drafter.keep is not None
  assert jax.tree.map(np.shape, drafter.tables) == {
    "first": (2,),
    "second": (3,),
  }
  rig = fakes.Rig((model, params), drafter, slots=SLOTS, use=fakes.GREEDY)
  jax.eval_shape(rig.raw_step, rig.params, rig.start([[1]]))
  with pytest.raises(ValueError, match="made with different tokenizers"):
    build(2, 6)
