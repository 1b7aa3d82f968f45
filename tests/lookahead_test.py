"""Lookahead decoding: window, pool and steps against lists in Python."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import drafters, rows as rows_lib, theory
from spec_jax.base import Context, Output, Sampling, Verdict
from spec_jax.drafters import lookahead
from spec_jax.drafters.lookahead import Pool, Window
from spec_jax.settings import Settings
from tests import fakes

V, SLOTS, NEW = 13, 64, 30
PROMPTS = [[5], [1, 2, 3, 1, 2, 3, 1, 2], [4, 4, 9, 4, 0, 4, 9], [7, 1, 7, 2]]

insert = fakes.jit(lookahead.insert)
find = fakes.jit(lookahead.find, static_argnums=2)


def build(**options):
  model, _ = fakes.tables(9)
  return drafters.build("lookahead", model, None, slots=SLOTS, **options)


@pytest.mark.parametrize(
  ("window", "tokens"), [(15, 120), (10, 80), (7, 56), (1, 8)]
)
def test_a_pass_holds_as_many_tokens_as_the_papers(window, tokens):
  """N = 5 and G = W: 120, 80 and 56 for models of 7B, 13B and 34B."""
  drafter = build(window=window, ngram=5, guesses=window)
  assert (
    drafter.num_nodes == tokens == theory.lookahead_tokens(window, 5, window)
  )
  assert drafter.depth == 4


def test_the_window_is_a_comb_behind_the_guesses():
  """W = 3, N = 3, G = 1: guess 1 2, level 0 is 0 3 4, level 1 is 5 6 7."""
  shape = lookahead.layout(3, 3, 1)
  assert shape.window.tolist() == [[0, 3, 4], [5, 6, 7]]
  assert shape.parents.tolist() == [-1, 0, 1, 0, 3, 0, 3, 4]
  assert shape.depths.tolist() == [0, 1, 2, 1, 2, 1, 2, 3]
  assert shape.level.tolist() == [-1, -1, -1, 0, 0, 1, 1, 1]
  assert np.flatnonzero(shape.visible[7]).tolist() == [0, 3, 4, 7]


def test_the_window_moves_by_a_token():
  """One level of two, then both: W = 3; the target says 7 8 9."""
  tokens = jnp.array([[[1, 2, 3], [0, 0, 0]], [[1, 2, 3], [4, 5, 6]]])
  window = Window(tokens, jnp.array([1, 2]))
  said = jnp.array([[7, 8, 9]] * 2)
  after = lookahead.advance(window, said)
  assert after.tokens.tolist() == [
    [[2, 3, 3], [8, 9, 9]],
    [[4, 5, 6], [7, 8, 9]],
  ]
  assert after.filled.tolist() == [2, 2]
  grams = lookahead.collect(window, said)[1]
  assert grams.tolist() == [[1, 4, 7], [2, 5, 8], [3, 6, 9]]


def remember(pool, gram):
  """The published pool: lists by first token, the newest in front."""
  rest = pool.setdefault(gram[0], [])
  if gram[1:] in rest:
    rest.remove(gram[1:])
  rest.insert(0, gram[1:])


def test_the_pool_is_lists_by_first_token():
  """Many repeats among 27 n-grams, in pieces of 0 to 6, rows of their own."""
  rng = np.random.default_rng(0)
  B, M, G = 8, 6, 3
  pool = Pool(jnp.full((B, 40, 3), -1, jnp.int32), jnp.zeros((B,), jnp.int32))
  lists = [{} for _ in range(B)]
  for _ in range(15):
    new = rng.integers(0, 3, (B, M, 3))
    valid = rng.random((B, M)) < 0.6
    pool = insert(pool, jnp.asarray(new, jnp.int32), jnp.asarray(valid))
    for row in range(B):
      for gram in new[row][valid[row]].tolist():
        remember(lists[row], gram)
    first = rng.integers(0, 3, B)
    rest, found = find(pool, jnp.asarray(first), G)
    for row in range(B):
      expected = lists[row].get(first[row], [])[:G]
      assert found[row].tolist() == [i < len(expected) for i in range(G)]
      assert rest[row, : len(expected)].tolist() == expected


def test_a_small_pool_forgets_the_oldest():
  """Room for 2: of 3 added at once the last 2 stay, then one more."""
  pool = Pool(jnp.full((1, 2, 2), -1, jnp.int32), jnp.zeros((1,), jnp.int32))
  new = jnp.array([[[1, 5], [1, 6], [1, 7]]])
  pool = insert(pool, new, jnp.ones((1, 3), bool))
  rest, found = find(pool, jnp.array([1]), 3)
  assert found.tolist() == [[True, True, False]]
  assert rest[0, :2].tolist() == [[7], [6]]
  pool = insert(pool, jnp.array([[[1, 8]]]), jnp.ones((1, 1), bool))
  rest, _ = find(pool, jnp.array([1]), 2)
  assert rest[0].tolist() == [[8], [7]]


def test_guesses_share_the_nodes_they_begin_with():
  """The docstring's example; a guess that is not there shares nothing."""
  guess = jnp.array([[[4, 5], [4, 6], [7, 5]], [[4, 5], [4, 5], [4, 5]]])
  found = jnp.array([[True, True, True], [True, True, False]])
  owner = lookahead.share(guess, found)
  assert owner[0].tolist() == [[0, 0], [0, 1], [2, 2]]
  assert owner[1].tolist() == [[0, 0], [0, 0], [2, 2]]


def told(*grams):
  """Accepted tokens of a step whose pool holds these, on the text 0 1 2 ..."""
  text = list(range(9))
  rig = fakes.Rig(
    fakes.scripted(text, 9),
    "lookahead",
    slots=9,
    use=fakes.GREEDY,
    options={"window": 2, "ngram": 4, "guesses": 3, "pool": 4},
  )
  state = rig.start([[0]], Settings(max_new_tokens=8))
  comb, pool = state.draft
  new = jnp.array([[[0, *gram] for gram in grams]], jnp.int32)
  pool = insert(pool, new, jnp.ones(new.shape[:2], bool))
  state, info = rig.step(rig.params, state.replace(draft=(comb, pool)))
  assert fakes.outputs(state) == [text[1 : 1 + int(info.num_tokens[0])]]
  return int(info.num_accepted[0])


GUESSES = [(1, 2, 3), (1, 2, 8), (1, 7, 3)]  # The first is the oldest.


def test_of_guesses_that_begin_alike_the_right_one_is_followed():
  """Whichever of the three is right, in whichever place."""
  for i in range(3):
    assert told(*GUESSES[i:], *GUESSES[:i]) == 3
  assert told(*GUESSES[1:]) == 2  # 1 2 of the second, 8 refused.
  assert told((8, 2, 3), (7, 2, 3)) == 0


def test_without_sharing_only_the_newest_is_followed(monkeypatch):
  """The twin: siblings of one token, of which the walk takes the first."""

  def alone(guess, found):
    G, K = guess.shape[1:]
    mine = jnp.arange(G, dtype=jnp.int32)[None, :, None]
    return jnp.broadcast_to(mine, (guess.shape[0], G, K))

  monkeypatch.setattr(lookahead, "share", alone)
  assert told(*GUESSES) == 1


@functools.cache
def target():
  """A tiny decoder and its greedy token after a text, read from scratch."""
  model, params = fakes.tiny(V)

  @fakes.jit
  def forward(tokens):
    positions = jnp.arange(SLOTS)[None]
    return model.apply(params, tokens, positions, None, None, None).logits

  @functools.cache
  def after(text):
    tokens = np.zeros((1, SLOTS), np.int32)
    tokens[0, : len(text)] = text
    return int(np.argmax(forward(tokens)[0, len(text) - 1]))

  return (model, params), lambda text: after(tuple(text))


def replay(prompt, new, W, N, G, reference=True):
  """Runs the published algorithm on lists: (output, steps, accepted)."""
  _, after = target()
  text, pool, levels = list(prompt), {}, []
  steps = accepted = 0
  if reference:
    for end in range(N, len(text) + 1):
      remember(pool, text[end - N : end])
  while len(text) < len(prompt) + new:
    depth = min(N - 1, len(prompt) + new - len(text) - 1)
    if depth and not levels:
      levels = [[text[j * 40503 % len(text)] for j in range(W)]]
    said = []
    if depth:
      levels[0][0] = text[-1]
      for j in range(W):
        column = [level[j] for level in levels[1:]]
        said.append(after(text[:-1] + levels[0][: j + 1] + column))
    alive, emitted = pool.get(text[-1], [])[:G], []
    while True:
      emitted.append(after(text + emitted))
      d = len(emitted)
      alive = [g for g in alive if d <= depth and g[d - 1] == emitted[-1]]
      if not alive:
        break
    if depth:
      if len(levels) == N - 1:
        for gram in zip(*levels, said, strict=True):
          remember(pool, list(gram))
        levels = levels[1:] + [said]
      else:
        levels = [x[1:] + x[-1:] for x in [*levels, said]]
    for token in emitted:
      text.append(token)
      if depth and reference and len(text) >= N:
        remember(pool, text[-N:])
    steps, accepted = steps + 1, accepted + len(emitted) - 1
  return text[len(prompt) :], steps, accepted


@pytest.mark.parametrize(
  ("W", "N", "G", "reference"),
  [
    (4, 3, 4, True),
    (3, 5, 2, True),
    (6, 4, 6, False),
    (1, 2, 1, True),
  ],
)
def test_steps_are_those_of_the_algorithm_on_lists(W, N, G, reference):
  """Ragged prompts, to the step and to the accepted token."""
  rig = fakes.Rig(
    target()[0],
    "lookahead",
    slots=SLOTS,
    use=fakes.GREEDY,
    options={
      "window": W,
      "ngram": N,
      "guesses": G,
      "pool": 400,
      "prompt_as_reference": reference,
    },
  )
  state = rig.run(PROMPTS, Settings(max_new_tokens=NEW))
  for row, prompt in enumerate(PROMPTS):
    text, steps, accepted = replay(prompt, NEW, W, N, G, reference)
    assert fakes.outputs(state)[row] == text
    assert state.tally.num_steps[row] == steps
    assert state.tally.num_accepted[row] == accepted
  assert state.tally.num_accepted.sum() > 0


def test_jacobis_fixed_point_is_the_greedy_text():
  """N = 2, nothing committed: guess `i` is right after `i` passes at most."""
  (model, params), after = target()
  W, text = 8, [1, 2, 3, 1]
  greedy = list(text)
  for _ in range(W):
    greedy.append(after(greedy))

  @jax.jit
  def say(window):
    all_ = jnp.concatenate([jnp.array([text[:-1]]), window.tokens[:, 0]], 1)
    positions = jnp.arange(all_.shape[1])[None]
    output = model.apply(params, all_, positions, None, None, None)
    return jnp.argmax(output.logits[:, -W:], -1).astype(jnp.int32)

  window = Window(jnp.full((1, 1, W), text[-1]), jnp.array([1]))
  right = []
  for i in range(W):
    window = Window(window.tokens.at[0, 0, 0].set(text[-1]), window.filled)
    guesses = window.tokens[0, 0].tolist()
    assert guesses[: i + 1] == greedy[3 : 4 + i]
    right.append(guesses == greedy[3 : 3 + W])
    window = lookahead.advance(window, say(window), num=0)
  assert right[-1] and not right[0]
  assert window.tokens[0, 0, 1:].tolist() == greedy[4 : 3 + W]


def test_a_step_without_a_draft_reads_nothing_and_changes_nothing():
  """Depth 0: no node is read, the state stays; the text is plain's."""
  options = {"window": 3, "ngram": 3, "guesses": 2, "pool": 16}
  rig = fakes.Rig(
    target()[0],
    "lookahead",
    slots=SLOTS,
    use=fakes.GREEDY,
    options=options,
    depth=0,
    trace=True,
  )
  state = rig.start(PROMPTS, Settings(max_new_tokens=6))
  before = state.draft
  for _ in range(6):
    state, info = rig.step(rig.params, state)
    assert not info.draft.read.any() and not info.draft.acceptable.any()
  assert state.done.all() and fakes.same(before, state.draft)
  for row, prompt in enumerate(PROMPTS):
    assert fakes.outputs(state)[row] == replay(prompt, 6, 3, 3, 2)[0]


def two_rows(drafter, max_depth, tokens):
  """Returns context, verdict and output: texts of ones, the target says 7."""
  context = Context(
    tokens=jnp.ones((2, SLOTS), jnp.int32),
    length=jnp.array([4, 4]),
    done=jnp.zeros((2,), bool),
    max_depth=jnp.array(max_depth),
    sampling=Sampling(),
    counts=None,
  )
  verdict = Verdict(None, jnp.array(tokens), None, None, None, None, None)
  logits = jnp.zeros((2, drafter.num_nodes, 9)).at[:, :, 7].set(1)
  return context, verdict, Output(logits, hidden=None, block=None)


def test_a_row_that_may_not_draft_keeps_its_window():
  """Of two rows one has a token left: it is not read, the other is."""
  drafter = build(window=3, ngram=3, guesses=2, pool=8)
  context, verdict, output = two_rows(drafter, [0, 2], [[3, -1, -1]] * 2)

  @fakes.jit
  def step(context):
    draft, carry = drafter.propose({}, None, drafter.init(2), context)
    return draft, drafter.update({}, carry, draft, verdict, output)

  draft, (comb, pool) = step(context)
  assert draft.read.sum(1).tolist() == [0, 2]  # Level 0 but for the root.
  assert comb.filled.tolist() == [0, 2] and not comb.tokens[0].any()
  assert comb.tokens[1, 1].tolist() == [7, 7, 7]
  assert (pool.ngrams[0] == -1).all()  # Nothing was full but the text's own.
  assert pool.ngrams[1, 0].tolist() == [1, 1, 3]


def test_a_window_that_was_not_read_stays():
  """Another part served the row: its logits say nothing, its tokens do.

  Of four tokens that were committed all trigrams are kept.
  """
  drafter = build(window=3, ngram=3, guesses=2, pool=8)
  context, verdict, output = two_rows(drafter, [2, 2], [[3, 4, 5, 6, -1]] * 2)

  @fakes.jit
  def step(context):
    draft, carry = drafter.propose({}, None, drafter.init(2), context)
    served = draft.read & jnp.array([[True], [False]])
    told = dataclasses.replace(draft, read=served)
    return drafter.update({}, carry, told, verdict, output)

  comb, pool = step(context)
  assert comb.filled.tolist() == [2, 0]
  assert comb.tokens[0, 1].tolist() == [7, 7, 7] and not comb.tokens[1].any()
  ngrams = [[1, 1, 3], [1, 3, 4], [3, 4, 5], [4, 5, 6]]
  for row in pool.ngrams.tolist():
    assert sorted(x for x in row if x[0] >= 0) == ngrams


def test_window_and_pool_belong_to_the_prompt():
  """D23: a row that is refilled begins like a fresh one, and goes on so."""
  rig = fakes.Rig(target()[0], "lookahead", slots=SLOTS, use=fakes.GREEDY)
  request = rig.request([PROMPTS[1]], Settings(max_new_tokens=NEW))
  first = rig.finish(rig.init(rig.params, request))
  refill = rows_lib.make_refill(rig.init, rig.drafter.keep)
  state = refill(rig.params, first, request, jnp.array([0]))
  assert fakes.same(state.draft, rig.init(rig.params, request).draft)
  assert fakes.same(rig.finish(state).tally, first.tally)


def test_the_prompts_ngrams_are_read_in_pieces():
  """Chunks of 4 and of 64 leave the same pool, every n-gram once."""
  prompt = [1, 2, 3, 1, 2, 3, 4, 5, 6, 1, 2]
  grams = {tuple(prompt[i : i + 3]) for i in range(9)}
  for chunk in (4, 64):
    rig = fakes.Rig(
      target()[0], "lookahead", slots=SLOTS, use=fakes.GREEDY, chunk=chunk
    )
    _, pool = rig.start([prompt, [1, 2]], Settings(max_new_tokens=3)).draft
    held = [tuple(g) for g in pool.ngrams[0].tolist() if g[0] >= 0]
    assert len(held) == len(grams) and set(held) == grams
    assert (pool.ngrams[1] == -1).all()


@pytest.mark.parametrize(
  ("options", "words"),
  [
    ({"window": 0}, "window must be at least 1, got 0"),
    ({"ngram": 1}, "ngram must be at least 2, got 1"),
    ({"guesses": 0}, "guesses must be at least 1, got 0"),
    ({"pool": 0}, "pool must be at least 1, got 0"),
  ],
)
def test_options_out_of_range_are_refused(options, words):
  """The message holds the value."""
  with pytest.raises(ValueError, match=words):
    build(**options)
