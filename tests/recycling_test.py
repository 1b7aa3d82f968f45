"""Token recycling: its table against lists in Python, its steps replayed."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import drafters, programs, rows as rows_lib, tree as trees
from spec_jax.base import Context, Output, Sampling, Verdict
from spec_jax.drafters import recycling
from spec_jax.settings import Settings
from tests import fakes

V, SLOTS, NEW = 13, 64, 30
PROMPTS = [[5], [1, 2, 3, 1, 2, 3, 1, 2], [4, 4, 9, 4, 0, 4, 9], [7, 1, 7, 2]]


def test_merging_keeps_each_token_once():
  """The docstring's example, empty lists, and lists that are full."""
  first = [[4, -1, -1], [-1, -1, -1], [1, 2, 3], [-1, 5, -1]]
  second = [[2, 4, 7], [9, -1, 8], [3, 1, 6], [5, -1, 0]]
  expected = [[4, 2, 7], [9, 8, -1], [1, 2, 3], [5, 0, -1]]
  found = fakes.jit(recycling.merge)(jnp.array(first), jnp.array(second))
  assert found.tolist() == expected


def move_to_front(table, pairs, k):
  """Puts what followed first, one pair after the other."""
  for first, second in pairs:
    table[first] = [second, *(t for t in table[first] if t != second)][:k]


def test_bigrams_are_put_first_one_after_the_other():
  """Rows of 0 to 12 pairs, many of them repeated, on tables half full."""
  rng = np.random.default_rng(0)
  B, C, k = 40, 12, 3
  tables = [
    [list(rng.permutation(5)[: rng.integers(0, k + 1)]) for _ in range(5)]
    for _ in range(B)
  ]
  padded = [[t + [-1] * (k - len(t)) for t in table] for table in tables]
  first, second = rng.integers(0, 5, (2, B, C))
  num = rng.integers(0, C + 1, B)
  real = np.arange(C)[None] < num[:, None]
  add = fakes.jit(recycling.add_bigrams)
  found = add(*map(jnp.asarray, (np.array(padded), first, second, real)))
  for row, table in enumerate(tables):
    pairs = list(zip(first[row], second[row], strict=True))[: num[row]]
    move_to_front(table, pairs, k)
    for token in range(5):
      assert [t for t in found[row, token].tolist() if t >= 0] == table[token]


def context_of(rows):
  tokens = np.zeros((len(rows), SLOTS), np.int32)
  for i, row in enumerate(rows):
    tokens[i, : len(row)] = row
  lengths = jnp.array([len(r) for r in rows], jnp.int32)
  return Context(
    tokens=jnp.asarray(tokens),
    length=lengths,
    done=jnp.zeros((len(rows),), bool),
    max_depth=jnp.full((len(rows),), 9),
    sampling=Sampling(),
    counts=None,
  )


def test_the_tree_is_filled_by_looking_up():
  """What is unknown is not proposed, nor what would hang under it.

  Successors 3: 5 7; 5: 3 -; 7: - -, a root of two children with two each.
  """
  model, _ = fakes.tables(9)
  drafter = drafters.build("recycling", model, None, slots=SLOTS, tree=(2, 2))
  table = np.full((2, 9, 2), -1, np.int32)
  table[0, 3], table[0, 5, 0] = [5, 7], 3
  draft, _ = drafter.propose(
    {}, None, jnp.asarray(table), context_of([[3]] * 2)
  )
  assert draft.tokens.tolist() == [[3, 5, 7, 3, 0, 0, 0], [3] + [0] * 6]
  assert draft.acceptable[0].tolist() == [False] + [True] * 3 + [False] * 3
  assert not draft.acceptable[1].any()


@functools.cache
def target():
  """A tiny decoder and its logits after a text, read from scratch."""
  model, params = fakes.tiny(V)

  @fakes.jit
  def forward(tokens):
    positions = jnp.arange(SLOTS)[None]
    return model.apply(params, tokens, positions, None, None, None).logits

  @functools.cache
  def after(text):
    tokens = np.zeros((1, SLOTS), np.int32)
    tokens[0, : len(text)] = text
    return np.asarray(forward(tokens))[0, len(text) - 1]

  return (model, params), lambda text: after(tuple(text))


def replay(prompt, parents, new):
  """Runs the published algorithm on lists: (output, steps, accepted)."""
  _, after = target()
  shape = trees.from_parents(parents)
  ranks, N = trees.ranks(shape), shape.num_nodes
  k = 1 + int(ranks.max())
  table = [[] for _ in range(V)]
  move_to_front(table, itertools.pairwise(prompt), k)
  text, steps, accepted = list(prompt), 0, 0
  while len(text) < len(prompt) + new:
    room = len(prompt) + new - len(text) - 1
    tokens = [text[-1]] + [None] * (N - 1)
    for i in range(1, N):
      above = tokens[parents[i]]
      if above is not None and shape.depths[i] <= room:
        tokens[i] = dict(enumerate(table[above])).get(ranks[i])
    node, path, emitted = 0, [0], []
    while True:
      emitted.append(int(np.argmax(after(text + emitted))))
      children = [
        i
        for i in range(1, N)
        if parents[i] == node and tokens[i] == emitted[-1]
      ]
      if not children:
        break
      node = children[0]
      path.append(node)
    reading = [i for i in range(N) if tokens[i] is not None]
    for i in sorted(reading, key=lambda i: (i in path, i)):
      upto = [tokens[j] for j in fakes.path_to(shape, i)]
      best = np.argsort(-after(text[:-1] + upto), kind="stable")
      table[tokens[i]] = best[:k].tolist()
    text += emitted
    steps, accepted = steps + 1, accepted + len(emitted) - 1
  return text[len(prompt) :], steps, accepted


@pytest.mark.parametrize(
  "options",
  [{}, {"tree": (3, 1)}, {"parents": (-1, 0, 0, 0, 0, 1, 1, 2, 2, 5, 6)}],
  ids=str,
)
def test_steps_are_those_of_the_algorithm_on_lists(options):
  """Ragged prompts, to the step and to the accepted token."""
  parents = options.get("parents", recycling._PARENTS)
  if "tree" in options:
    parents = trees.branching(options["tree"]).parents.tolist()
  rig = fakes.Rig(
    target()[0], "recycling", slots=SLOTS, options=options, use=fakes.GREEDY
  )
  state = rig.run(PROMPTS, Settings(max_new_tokens=NEW))
  for row, prompt in enumerate(PROMPTS):
    text, steps, accepted = replay(prompt, parents, NEW)
    assert fakes.outputs(state)[row] == text
    assert state.tally.num_steps[row] == steps < NEW
    assert state.tally.num_accepted[row] == accepted


def test_of_a_token_at_several_nodes_the_text_itself_counts():
  """Token 0 at the root and at node 3, under node 1; 9 is refused at node 2.

  The target says 1, 4, 6, 5 after the nodes. Rows: 1 accepted, 1 and 0
  accepted, done, nothing drafted.
  """
  model, _ = fakes.tables(V)
  drafter = drafters.build(
    "recycling", model, None, slots=SLOTS, parents=(-1, 0, 0, 1)
  )
  table = np.full((4, V, 2), -1, np.int32)
  table[:3, 0], table[:3, 1, 0] = [1, 9], 0
  draft, carry = drafter.propose(
    {}, None, jnp.asarray(table), context_of([[0]] * 4)
  )
  assert draft.tokens[:3].tolist() == [[0, 1, 9, 0]] * 3
  running = jnp.array([True, True, False, True])[:, None]
  draft = draft.replace(acceptable=draft.acceptable & running)
  said = jnp.array([1, 4, 6, 5])
  verdict = Verdict(
    path=jnp.array([[0, 1, -1], [0, 1, 3], [-1, -1, -1], [0, -1, -1]]),
    tokens=None,
    num_accepted=None,
    num_tokens=jnp.array([2, 3, 0, 1]),
    accept_prob=None,
    residual=None,
    plain=None,
  )
  logits = jnp.broadcast_to(jax.nn.one_hot(said, V)[None], (4, 4, V))
  output = Output(logits, hidden=None, block=None)
  after = fakes.jit(drafter.update)({}, carry, draft, verdict, output)
  assert after[:2, 0].tolist() == [[1, 0], [5, 0]]
  assert after[:2, 1].tolist() == [[4, 0]] * 2
  assert after[:2, 9].tolist() == [[6, 0]] * 2
  assert (after[2] == table[2]).all()
  assert after[3, 0].tolist() == [1, 0] and (after[3, 1:] == -1).all()


def refilled(persistent):
  """Runs one prompt, then in its row the same again: both rows' tallies."""
  rig = fakes.Rig(
    target()[0],
    "recycling",
    slots=SLOTS,
    options={"persistent": persistent},
    use=fakes.GREEDY,
  )
  request = rig.request([PROMPTS[1]], Settings(max_new_tokens=NEW))
  first = rig.finish(rig.init(rig.params, request))
  refill = rows_lib.make_refill(rig.init, rig.drafter.keep)
  state = refill(rig.params, first, request, jnp.array([0]))
  fresh = rig.init(rig.params, request).draft
  same = bool((state.draft == fresh).all())
  second = rig.finish(state)
  assert fakes.outputs(first) == fakes.outputs(second)
  return first.tally.num_steps[0], second.tally.num_steps[0], same


def test_the_table_outlives_the_prompt_if_it_is_to():
  """The same prompt again takes fewer steps; or as many, from a new table."""
  before, after, same = refilled(persistent=True)
  assert after < before and not same
  before, after, same = refilled(persistent=False)
  assert after == before and same


def test_an_engine_begins_with_an_empty_table():
  """An empty state has no successor 0 that a first prompt would inherit."""
  model, _ = target()[0]
  config = programs.EngineConfig(
    drafter="recycling", batch_size=2, slots=SLOTS
  ).resolved()
  built = programs.build_programs(model, None, config, None, True)
  assert (built.empty().draft == -1).all()


@pytest.mark.parametrize(
  ("options", "words"),
  [
    ({"tree": (2,), "parents": (-1, 0)}, "not both"),
    ({"parents": (-1,)}, "besides the root"),
    ({"tree": (10,)}, "10 children, but there are 9 tokens"),
    ({"tree": (0,)}, "at least 1"),
    ({"parents": (-1, 1)}, "before its child"),
  ],
)
def test_options_out_of_range_are_refused(options, words):
  """The message says what is wrong."""
  model, _ = fakes.tables(9)
  with pytest.raises(ValueError, match=words):
    drafters.build("recycling", model, None, slots=SLOTS, **options)
