"""EAGLE beside a reference in numpy that reads each text from scratch."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import drafters, eagle, length
from spec_jax.base import LengthPolicy
from spec_jax.drafting import shown_to
from spec_jax.eagle_model import LEAD
from spec_jax.heads import Words
from spec_jax.levels import Levels
from spec_jax.settings import Settings, in_use
from tests import fakes

V, SLOTS, K = 13, 64, 3
PROMPTS = [[5], [4, 4], [7, 1, 7, 2, 7, 1, 7, 2, 7, 1, 0], [3, 1, 2, 9]]
NEW = Settings(max_new_tokens=30)
# One token again and again, which copying drafts as deep as it can.
SAME = Settings(max_new_tokens=40, logit_bias=((3, 100.0),))
IDS = (0, 1, 3, 4, 6, 7, 9, 12)
# Version, and the tokens the head knows.
KINDS = [(1, None), (3, None), (3, IDS)]


def numpy_layer(config, params, embeds, features):
  """Runs the head over pairs `[n, D]`: own features and normalised states."""
  w = {k: np.asarray(x, np.float64) for k, x in params["layers"][0].items()}

  def rms(x, weight):
    mean = (x**2).mean(-1, keepdims=True)
    return x / np.sqrt(mean + config.norm_eps) * np.asarray(weight, np.float64)

  if config.version == 1:
    x = np.concatenate([embeds, features], -1) @ np.asarray(params["fc"]["w"])
    residual = x
  else:
    both = rms(embeds, w["embed_norm"]), rms(features, w["hidden_norm"])
    x, residual = np.concatenate(both, -1), features
  n, E = len(x), config.head_dim
  at = np.arange(n)[:, None] * np.asarray(config.rope.frequencies)[None]

  def turn(y):
    y = y.reshape(n, -1, E)
    a, b = y[..., : E // 2], y[..., E // 2 :]
    cos, sin = np.cos(at)[:, None], np.sin(at)[:, None]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

  q, k = turn(x @ w["wq"]), turn(x @ w["wk"])
  v = (x @ w["wv"]).reshape(n, -1, E)
  repeat = config.num_heads // config.num_kv_heads
  k, v = np.repeat(k, repeat, 1), np.repeat(v, repeat, 1)
  scores = np.einsum("the,she->hts", q, k) / np.sqrt(E)
  scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  y = np.einsum("hts,she->the", weights, v).reshape(n, -1)
  x = residual + y @ w["wo"]
  y = rms(x, w["ffn_norm"])
  gate = y @ w["w_gate"]
  x = x + (gate / (1 + np.exp(-gate)) * (y @ w["w_up"])) @ w["w_down"]
  return x, (x if config.version == 1 else rms(x, params["final_norm"]))


class Reference:
  """What a head drafts after a text: pairs of the text, then its own."""

  def __init__(self, target, heads, own, shown):
    self.model, self.params = target
    self.config, self.own = heads.config, own
    self._forward = fakes.jit(
      lambda tokens: shown.apply(
        self.params, tokens, jnp.arange(SLOTS)[None], None, None, None
      ).hidden[0]
    )
    self.chain = functools.cache(self._chain)

  def _embed(self, tokens):
    return np.asarray(self.params["embed"], np.float64)[list(tokens)]

  def pairs(self, text):
    """Returns embeddings and fused features of the text's pairs."""
    tokens = np.zeros((1, SLOTS), np.int32)
    tokens[0, : len(text)] = text
    hidden = np.asarray(self._forward(jnp.asarray(tokens)), np.float64)
    features = hidden[: len(text) - 1].reshape(len(text) - 1, -1)
    if self.config.version == 3:
      features = features @ np.asarray(self.own["fc"]["w"], np.float64)
    return self._embed(text[1:]), features

  def logits(self, state):
    """Returns logits over the target's tokens."""
    if not self.config.words.own_matrix:
      return state @ np.asarray(self.params["head"], np.float64)
    full = np.full(V, -np.inf)
    full[np.asarray(self.own["ids"])] = state @ np.asarray(self.own["head"])
    return full

  def _chain(self, text):
    embeds, features = self.pairs(text)
    found = []
    for _ in range(K):
      own, states = numpy_layer(self.config, self.own, embeds, features)
      token = int(self.logits(states[-1]).argmax())
      found.append(token)
      embeds = np.concatenate([embeds, self._embed([token])])
      features = np.concatenate([features, own[-1:]])
    return found


@functools.cache
def setting(version, ids, period=1, chunk=4, options=(("num_draft", K),)):
  """Returns (rig, reference); the head is asked every `period`-th step."""
  target = fakes.tiny(V, windows=(None, None))
  heads, own = fakes.heads_of("eagle", target, ids=ids, version=version)
  drafter = drafters.build(
    "eagle", target[0], heads, slots=SLOTS, **dict(options)
  )
  policy = LengthPolicy(
    init=lambda batch: jnp.zeros((batch,), jnp.int32),
    level=lambda state, running, costs: jnp.where(
      state % period == period - 1, drafter.depth, 0
    ),
    update=lambda state, outcome: state + 1,
  )
  rig = fakes.Rig(
    target,
    drafter,
    draft=(heads, own),
    slots=SLOTS,
    chunk=chunk,
    use=fakes.GREEDY,
    trace=True,
    policy=policy,
  )
  shown = shown_to(drafter, target[0])
  return rig, Reference(target, heads, own, shown)


def rig_of(name="eagle", heads=None, options=(("num_draft", K),), **more):
  """Returns the rig of a drafter with a head, on the tiny decoder."""
  target = fakes.tiny(V, windows=(None, None))
  made, own = fakes.heads_of("eagle", target)
  made = heads or made
  drafter = drafters.build(name, target[0], made, slots=SLOTS, **dict(options))
  usual = {"slots": SLOTS, "use": fakes.GREEDY, "trace": True}
  return fakes.Rig(target, drafter, draft=(made, own), **{**usual, **more})


def steps_of(rig, prompts=PROMPTS, settings=NEW):
  state = rig.start(prompts, settings)
  while not state.done.all():
    before = state
    state, info = rig.step(rig.params, state)
    yield before, info


@pytest.mark.parametrize("period", [1, 3, 2 * LEAD + 3])
@pytest.mark.parametrize("version,ids", KINDS)
def test_drafts_are_those_of_the_reference(version, ids, period):
  """D9 to D12: pairs (f0, t1), (f1, t2), ...; the target's own features.

  Asked every step, every third, and after more steps than pairs may wait.
  """
  rig, reference = setting(version, ids, period)
  compared = 0
  for step, (state, info) in enumerate(steps_of(rig)):
    for row, long in enumerate(np.asarray(state.length)):
      usable = np.asarray(info.draft.acceptable[row, 1:])
      room = int(state.limit[row]) - long - 1
      asked = step % period == period - 1 and not bool(state.done[row])
      expected = min(K, room) if asked and long > 1 else 0
      assert usable.sum() == expected, (step, row)
      if expected:
        text = tuple(np.asarray(state.tokens[row, :long]).tolist())
        drafted = np.asarray(info.draft.tokens[row, 1:])[:expected]
        assert drafted.tolist() == reference.chain(text)[:expected]
        compared += expected
  assert compared > (100 if period == 1 else 8)


def test_features_off_by_one_are_seen(monkeypatch):
  """The twin: the pair (f1, t1) instead of (f0, t1)."""
  real = eagle.make_layer

  def shifted(config, *args):
    layer = real(config, *args)
    fuse = lambda params, x: layer.fuse(params, jnp.roll(x, -1, 1))
    return layer._replace(fuse=fuse)

  monkeypatch.setattr(eagle, "make_layer", shifted)
  rig = rig_of()
  reference = setting(3, None)[1]
  wrong = 0
  for state, info in steps_of(rig):
    row, long = 2, int(state.length[2])
    if bool(info.draft.acceptable[row, 1]):
      text = tuple(np.asarray(state.tokens[row, :long]).tolist())
      wrong += int(info.draft.tokens[row, 1]) != reference.chain(text)[0]
  assert wrong > 5


def test_chunks_of_a_prompt_are_the_prompt():
  """D10: 4 + 4 + 2 tokens or one piece: the same pairs, the same drafts."""
  prompts = [[7, 1, 7, 2, 7, 1, 7, 2, 7, 1, 0], [3, 1, 2, 9]]
  caches = []
  for chunk in (4, 16):
    rig, _ = setting(3, None, chunk=chunk)
    state = rig.start(prompts, NEW)
    assert state.draft.cache.length.tolist() == [9, 2]  # the newest waits
    caches.append(fakes.held(state.draft.cache))
  for one, other in zip(*caches, strict=True):
    assert one.keys() == other.keys()
    for place, pair in one.items():
      np.testing.assert_allclose(pair, other[place], atol=1e-5)


@pytest.mark.parametrize("second", ["eagle(num_draft=2)", "eagle(tree=(2, 1))"])
def test_as_a_part_it_keeps_up_with_what_others_drafted(second):
  """More tokens than its own depth at once: its pairs are the text's own."""
  options = {
    "first": "prompt_lookup(num_draft=12, match='first')",
    "second": second,
  }
  rig = rig_of("merge", options=options, use=in_use([SAME]))
  longest = 0
  for state, info in steps_of(rig, PROMPTS, SAME):
    longest = max(longest, int(info.num_accepted.max()))
    texts = [
      np.asarray(state.tokens[row, : int(n)]).tolist()
      for row, n in enumerate(state.length)
    ]
    if int(state.length.max()) >= SLOTS - 4:
      break
    fresh = rig.start(texts, NEW).draft["second"].cache
    mine = state.draft["second"].cache
    for row, (one, other) in enumerate(
      zip(fakes.held(mine), fakes.held(fresh), strict=True)
    ):
      if bool(state.done[row]):
        continue
      waiting = int(state.length[row]) - 1 - int(mine.length[row])
      assert min(1, int(state.length[row]) - 1) <= waiting <= LEAD
      for place, pair in one.items():
        np.testing.assert_allclose(pair, other[place], atol=1e-4)
  assert longest > LEAD


def test_it_stops_where_its_own_context_ends():
  """A target of 256 tokens, a head of 24: drafts end, the text does not."""
  target = fakes.tiny(V, windows=(None, None))
  heads, _ = fakes.heads_of("eagle", target)
  short = eagle.build(dataclasses.replace(heads.config, max_length=24))
  rig = rig_of(heads=short)
  plain = fakes.Rig(target, slots=SLOTS, use=fakes.GREEDY)
  settings = Settings(max_new_tokens=45)
  drafted = []
  for state, info in steps_of(rig, PROMPTS, settings):
    long, num = np.asarray(state.length), np.asarray(info.num_drafted)
    assert (num[long + K > 24] == 0).all()
    drafted.append(num.sum())
  assert sum(drafted) > 20 and drafted[-1] == 0
  assert rig.texts(PROMPTS, settings) == plain.texts(PROMPTS, settings)


def test_a_tree_that_grows_begins_with_the_chain():
  """The likeliest path of a tree of versions 2 and 3 is the greedy chain."""
  options = (("num_nodes", 10), ("depth", K), ("width", 3))
  rig, reference = setting(3, None, options=options)
  seen = 0
  for state, info in steps_of(rig):
    for row, long in enumerate(np.asarray(state.length)):
      good = np.asarray(info.draft.acceptable[row])
      if not good.any():
        continue
      text = tuple(np.asarray(state.tokens[row, :long]).tolist())
      parents = np.asarray(info.draft.parents[row])
      tokens = np.asarray(info.draft.tokens[row])
      node = 0
      for token in reference.chain(text):
        children = np.flatnonzero((parents == node) & good)
        if not children.size:
          break
        # Its best child may be cut off for others' sake, not swapped.
        node = children[0]
        if token in tokens[children]:
          node = children[list(tokens[children]).index(token)]
          seen += 1
  assert seen > 40


@pytest.mark.parametrize(
  "options,message",
  [
    ({"num_draft": 2, "tree": (2,)}, "give one of"),
    ({"num_draft": -1}, "num_draft must be at least 0"),
    ({"siblings": "iid"}, "a tree that grows is certain"),
    ({"tree": (2,), "siblings": "luck"}, "siblings must be one of"),
    ({"num_draft": 2, "draft_temperature": 0.0}, "draft_temperature must be"),
    ({"num_nodes": 1}, "num_nodes must be at least 2"),
    ({"depth": 0}, "depth must be at least 1"),
    (
      {"tree": (2, 1), "draft_temperature": 0.5},
      "draft_temperature has no use",
    ),
    ({"num_draft": 3, "num_nodes": 8}, "num_nodes has no use where .* got 8"),
    ({"tree": (2, 1), "depth": 99}, "depth has no use where .* got 99"),
    ({"parents": (-1, 0), "width": 2}, "width has no use where .* got 2"),
  ],
)
def test_bad_options_are_refused(options, message):
  target = fakes.tiny(V)
  heads, _ = fakes.heads_of("eagle", target)
  with pytest.raises(ValueError, match=message):
    drafters.build("eagle", target[0], heads, slots=SLOTS, **options)


def test_a_draft_of_another_kind_is_refused():
  target = fakes.tiny(V)
  medusa, _ = fakes.heads_of("medusa", target)
  eagle_heads, _ = fakes.heads_of("eagle", target)
  for name, draft, message in (
    ("eagle", None, "needs trained eagle heads"),
    ("eagle", target[0], "needs eagle heads, got a model"),
    ("eagle", medusa, "needs eagle heads, got medusa heads"),
    ("vanilla", eagle_heads, "needs a draft model, got eagle heads"),
    ("best_first", medusa, "they are for drafter 'medusa'"),
  ):
    with pytest.raises(ValueError, match=message):
      drafters.build(name, target[0], draft, slots=SLOTS)


def test_taps_by_default_and_where_there_are_too_few_layers():
  """D16: after layers 2, L / 2 and L - 3."""
  assert eagle.default_taps(30) == (2, 15, 27)
  assert eagle.default_taps(32) == (2, 16, 29)
  with pytest.raises(ValueError, match="name them"):
    eagle.default_taps(5)
  config = fakes.tiny(V)[0].config
  with pytest.raises(ValueError, match="looks at 3 layers"):
    eagle.config_of(config, 3, Words(V, V), taps=(1,))


def test_two_parts_cannot_take_two_kinds_of_heads():
  target = fakes.tiny(V)
  heads, _ = fakes.heads_of("eagle", target)
  with pytest.raises(ValueError, match=r"needs (eagle|medusa) heads"):
    drafters.build(
      "merge", target[0], heads, slots=SLOTS, first="medusa", second="eagle"
    )


def test_a_policy_that_asks_the_head_is_asked():
  """The head's law is shown to the length policy: a threshold of 1 ends it."""
  rig = rig_of(policy=length.build("confidence", Levels((K,)), threshold=1.0))
  state = rig.run(PROMPTS, NEW)
  # The root's children are drafted before a law of theirs is seen.
  assert int(state.tally.drafted_at[:, 1:].sum()) == 0


def test_what_stands_behind_a_shared_beginning_does_not_leak():
  """Rows that begin alike, read once: each drafts as it would alone.

  The beginning was read with another token behind it, which must leave no pair.
  """
  rig = rig_of(chunk=4)
  begin = [7, 1, 7, 2, 7, 1, 7, 2, 7]
  for rest in ([3], [4, 4], [5, 6, 1, 2, 9, 9, 1]):
    longer = [begin + rest, begin + rest]
    prefix = rig.start([begin + [12]] * 2, Settings(max_new_tokens=1))
    continued = rig.resume(rig.params, prefix, rig.request(longer, NEW))
    fresh = rig.start(longer, NEW)
    for _ in range(4):
      continued, one = rig.step(rig.params, continued)
      fresh, other = rig.step(rig.params, fresh)
      assert one.draft.acceptable.tolist() == other.draft.acceptable.tolist()
      assert one.draft.tokens.tolist() == other.draft.tokens.tolist()
      assert int(one.num_drafted.sum()) > 0
