"""The draft model: its cache, its law, its limits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import drafters, drafting, tree as trees
from spec_jax.base import Verdict
from spec_jax.settings import Settings, in_use
from tests import fakes
from tests.enumeration import Enumerator

V, SLOTS = 13, 128
ROOMY = Settings(max_new_tokens=200)
WARM = Settings(temperature=1, max_new_tokens=200)
HOT = Settings(temperature=1.3, top_k=6, max_new_tokens=200)
PROMPTS = [[5], [1, 2, 3, 1, 2], [4] * 11, [7, 3]]

# --- the draft's cache -----------------------------------------------------


@functools.cache
def own_rig(tree):
  """The target as its own draft: a chain of 3, or a tree."""
  target = fakes.tiny(V)
  return fakes.Rig(
    target,
    "vanilla",
    draft=target,
    options={"tree": tree} if tree else {"num_draft": 3},
    slots=SLOTS,
    use=in_use([WARM, HOT]),
  )


@pytest.mark.parametrize("tree", [None, (2, 2, 1)], ids=["chain", "tree"])
def test_a_draft_that_is_the_target_is_always_accepted(tree):
  """K1, D24: greedy and sampled, to the last step; the cache keeps up."""
  rig = own_rig(tree)
  K = rig.drafter.depth
  state, rounds = rig.start(PROMPTS, [ROOMY, WARM, HOT, ROOMY]), 0
  while not state.done.all():
    room = np.clip(np.asarray(state.limit - state.length) - 1, 0, K)
    # After a full acceptance the last draft token has not been read.
    behind = np.asarray(state.length - state.draft.length)
    running = ~np.asarray(state.done)
    expected = 1 if rounds == 0 else 2
    assert (behind == expected)[running & (room == K)].all()
    state, info = rig.step(rig.params, state)
    assert info.num_accepted.tolist() == room.tolist()
    rounds += 1
  assert rounds >= 30


def forced(noise, law_at, draft, depth):
  """A verifier that accepts `floor(noise.residual * (K + 1))` nodes at most.

  It follows first children and ignores every law; the last token is the
  target's most probable one.
  """
  B, N = draft.tokens.shape
  K = depth
  wanted = jnp.floor(noise.residual * (K + 1)).astype(jnp.int32)
  node = jnp.zeros((B,), jnp.int32)
  path = [node]
  for d in range(K):
    child = (draft.parents == node[:, None]) & draft.acceptable
    child = child & (jnp.arange(N) > 0)[None]
    going = child.any(1) & (d < wanted) & (path[-1] >= 0)
    node = jnp.where(going, jnp.argmax(child, 1), node).astype(jnp.int32)
    path.append(jnp.where(going, node, -1))
  path = jnp.stack(path, 1)
  num = (path[:, 1:] >= 0).sum(1)
  law = law_at(node)
  kept = jnp.take_along_axis(draft.tokens, jnp.maximum(path, 0), 1)
  kept = jnp.where(path >= 0, kept, -1)
  last = jnp.argmax(law, -1).astype(jnp.int32)
  tokens = jnp.concatenate([kept[:, 1:], jnp.full((B, 1), -1)], 1)
  columns = jnp.arange(K + 1)[None]
  tokens = jnp.where(columns == num[:, None], last[:, None], tokens)
  return Verdict(
    path=path,
    tokens=tokens.astype(jnp.int32),
    num_accepted=num.astype(jnp.int32),
    num_tokens=(num + 1).astype(jnp.int32),
    accept_prob=jnp.zeros((B, N)),
    residual=law,
    plain=jnp.zeros((B, K + 1), bool),
  )


@functools.cache
def forced_rig(tree=None, depth=None):
  """A noisy draft whose acceptance the test dictates by `noise.residual`."""
  model, params = fakes.tiny(V, windows=(None, 3))
  return fakes.Rig(
    (model, params),
    "vanilla",
    draft=(model, fakes.noisy(params)),
    options={"tree": tree} if tree else {"num_draft": 4},
    slots=SLOTS,
    use=fakes.GREEDY,
    verifier=forced,
    depth=depth,
  )


def accept(rig, state, counts):
  """Steps with so many nodes accepted in each row."""
  K = rig.drafter.depth
  residual = (np.asarray(counts) + 0.5) / (K + 1)
  noise = fakes.noise(rig.drafter, len(counts), residual=residual)
  return rig.step(rig.params, state, noise)


def test_caches_after_each_number_of_accepted_tokens():
  """K2: the target holds L + 1 + a, the draft the same, and L + k for a = k."""
  rig, k = forced_rig(), 4
  state = rig.start([[1] * 6] * 5, ROOMY)
  L = int(state.target.length[0])
  assert L == 5
  after, info = accept(rig, state, range(5))
  assert info.num_accepted.tolist() == [0, 1, 2, 3, 4]
  assert after.target.length.tolist() == [L + 1 + a for a in range(5)]
  expected = [L + 1 + a for a in range(4)] + [L + k]
  assert after.draft.length.tolist() == expected


def test_a_policy_of_less_depth_leaves_the_same_gap():
  """K2: depth 2 of k = 4: the last of two accepted tokens was not read."""
  rig = forced_rig(depth=2)
  state = rig.start([[1] * 6] * 3, ROOMY)
  after, info = accept(rig, state, range(3))
  assert info.num_drafted.tolist() == [2, 2, 2]
  assert info.num_accepted.tolist() == [0, 1, 2]
  assert after.target.length.tolist() == [6, 7, 8]
  assert after.draft.length.tolist() == [6, 7, 7]


@pytest.mark.parametrize("tree", [None, (2, 2, 1)], ids=["chain", "tree"])
def test_caches_of_random_rounds_are_those_of_a_fresh_reading(tree):
  """K2, K3: target and draft, rings too, after every of 25 rounds."""
  rig, rng = forced_rig(tree), np.random.default_rng(0)
  K = rig.drafter.depth
  state = rig.start(PROMPTS + [[9, 9]], ROOMY)
  for number in range(25):
    counts = rng.choice([0, 0, 1, K, rng.integers(0, K + 1)], 5)
    state, info = accept(rig, state, counts)
    assert info.num_accepted.tolist() == counts.tolist()
    if number % 3:
      continue
    assert not state.done.any()
    tokens = np.asarray(state.tokens)
    texts = [tokens[i, :n].tolist() for i, n in enumerate(state.length)]
    fresh = rig.start(texts, ROOMY)
    for name in ("target", "draft"):
      pairs = map(fakes.held, (getattr(state, name), getattr(fresh, name)))
      for found, expected in zip(*pairs, strict=True):
        common = found.keys() & expected.keys()
        assert len(common) >= len(found) - 2
        for at in common:
          np.testing.assert_allclose(found[at], expected[at], atol=1e-4)


def test_a_draft_of_shorter_context_stops_drafting():
  """K8, K16: draft context 16, target 64, 40 tokens; text is plain's."""
  prompts = [[2], [3, 1] * 6, [3] * 16, [4, 5] * 10]
  settings, target = Settings(max_new_tokens=40), fakes.tiny(V)
  rig = fakes.Rig(
    target,
    "vanilla",
    draft=fakes.tiny(V, max_length=16),  # The same weights.
    options={"num_draft": 3},
    slots=64,
    use=fakes.GREEDY,
  )
  state = rig.start(prompts, settings)
  while not state.done.all():
    fits = np.asarray(state.length) < 16
    state, info = rig.step(rig.params, state)
    assert (fits | (np.asarray(info.num_drafted) == 0)).all()
    assert (np.asarray(state.draft.length) <= 16).all()
  plain = fakes.Rig(target, slots=64, use=fakes.GREEDY)
  assert fakes.outputs(state) == plain.texts(prompts, settings)
  # Three tokens a step at lengths 1, 5 and 9, at 12, and never.
  assert state.tally.num_accepted.tolist() == [12, 3, 0, 0]


def test_the_draft_is_not_asked_when_it_cannot_help():
  """T9: its calls: K in a step, n - 1 with n slots left, none for 1."""
  model, params = fakes.tables(V)
  calls = []

  def apply(*args, **kwargs):
    jax.debug.callback(lambda: calls.append(1))
    return model.apply(*args, **kwargs)

  rig = fakes.Rig(
    (model, params),
    "vanilla",
    draft=(model._replace(apply=apply), params),
    options={"num_draft": 3},
    slots=16,
    use=fakes.GREEDY,
  )
  for new, expected in ((9, 3), (3, 2), (2, 1), (1, 0)):
    state = rig.start([[1]], Settings(max_new_tokens=new))
    jax.effects_barrier()
    calls.clear()
    state, info = rig.step(rig.params, state)
    jax.effects_barrier()
    assert (len(calls), int(info.num_tokens[0])) == (expected, expected + 1)


# --- the draft's law -------------------------------------------------------


def joint_law(p, q, setting, num_tokens, **options):
  """Enumerates a target of law `p` and a draft of law `q`, no context."""
  settings = [Settings(max_new_tokens=num_tokens, **setting)]
  rig = fakes.Rig(
    fakes.law_model(p),
    "vanilla",
    draft=fakes.law_model(q),
    options=options,
    slots=8,
    use=in_use(settings),
    trace=True,
  )
  machine = Enumerator(
    rig.raw_step, rig.params, rig.drafter.num_nodes, rig.drafter.depth
  )
  machine.step = rig.step
  state = rig.start([[0]], settings)
  draft = rig.step(rig.params, state)[1].draft
  if draft.probs is not None:  # No mass on ids that the draft lacks.
    assert not draft.probs[:, :, len(q) :].any()
  law, _ = machine.joint_law(state)
  return law[0].reshape([len(p)] * num_tokens)


def test_the_draft_is_warped_like_the_target():
  """L1: top-2 of both; raw numbers as q would give .5714, .4286."""
  p, q = [0.5, 0.3, 0.2, 0.0], [0.4, 0.3, 0.2, 0.1]
  law = joint_law(p, q, {"temperature": 1, "top_k": 2}, 2, num_draft=1)
  first = [0.625, 0.375, 0, 0]
  np.testing.assert_allclose(law, np.outer(first, first), atol=1e-6)


@pytest.mark.parametrize("roles", ["draft_smaller", "draft_larger"])
def test_padded_vocabularies_of_two_sizes_work_together(roles):
  """V1: 10 and 12 rows around 9 real ids; the law is the target's over all."""
  rng = np.random.default_rng(0)
  sizes = (12, 10) if roles == "draft_smaller" else (10, 12)
  p, q = (rng.dirichlet(np.ones(n)) for n in sizes)
  law = joint_law(p, q, {"temperature": 1}, 2, num_draft=1)
  assert np.abs(law - np.outer(p, p)).sum() / 2 < 1e-6


def test_ids_the_draft_lacks_do_not_break_a_tree():
  """V1: draft of 3 ids, target of 5, three siblings of which q has two."""
  rng = np.random.default_rng(1)
  p, q = rng.dirichlet(np.ones(5)), np.array([0.7, 0.3, 0.0])
  options = {"tree": (3,), "siblings": "without_replacement"}
  law = joint_law(p, q, {"temperature": 1}, 2, **options)
  assert np.abs(law - np.outer(p, p)).sum() / 2 < 1e-6


def test_a_constant_acceptance_gives_the_formulas_mean():
  """M10: acceptance .8 and k = 4: (1 - .8^5) / .2 = 3.3616 tokens a step.

  The standard deviation of a step is 1.6, so .05 is 4 standard errors of
  20,000 steps.
  """
  rows, rounds = 2000, 10
  rig = fakes.Rig(
    fakes.law_model([0.8, 0.2]),
    "vanilla",
    draft=fakes.law_model([1.0, 0.0]),
    slots=SLOTS,
    use=in_use([WARM]),
  )
  state = rig.start([[0]] * rows, WARM, seeds=range(rows))
  for _ in range(rounds):
    state, _ = rig.step(rig.params, state)
  assert not state.done.any()
  mean = float((state.length - 1).sum()) / (rows * rounds)
  assert mean == pytest.approx(3.3616, abs=0.05)


# --- building --------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_the_plan_of_a_tree_stays_inside_its_block(seed):
  """J2: no level is written past the block, every parent is read once."""
  rng = np.random.default_rng(seed)
  tree = fakes.random_tree(rng, int(rng.integers(2, 14)))
  plan = drafting.plan_tree(tree)
  width = plan.read.shape[1]
  assert (plan.start[1:] + width <= plan.block_size).all()
  assert drafting.CATCH_UP <= plan.block_size
  parents = set(tree.parents[1:].tolist())
  assert set(np.flatnonzero(plan.block_index >= 0).tolist()) == parents | {0}
  read = plan.read[plan.read >= 0].tolist()
  assert sorted(read) == sorted(parents - {0})
  children = plan.children[plan.children >= 0].tolist()
  assert sorted(children) == list(range(1, tree.num_nodes))


@pytest.mark.parametrize(
  ("options", "words"),
  [
    ({"num_draft": 0}, "num_draft must be at least 1, got 0"),
    ({"siblings": "twins"}, "'twins'"),
    ({"draft_temperature": 0.0}, r"in \(0, 1e30\], got 0\.0"),
    ({"tree": (2, 0)}, r"got \[2, 0\]"),
    ({"tree": ()}, "a node below its root"),
    ({"tree": trees.chain(0)}, "a node below its root"),
    ({"tree": (2, 1), "num_draft": -3}, "no use where a tree is given, got -3"),
    ({"parents": (-1, 0), "num_draft": 2}, "no use where a tree is given"),
    (
      {"siblings": "top_k", "draft_temperature": 0.5},
      "draft_temperature has no use with siblings='top_k'",
    ),
  ],
)
def test_options_out_of_range_are_refused(options, words):
  """The message holds the value."""
  model, _ = fakes.tables()
  with pytest.raises(ValueError, match=words):
    drafters.build("vanilla", model, model, slots=8, **options)


def test_a_missing_draft_model_is_refused():
  """C3: before anything is compiled."""
  model, _ = fakes.tables()
  with pytest.raises(ValueError, match="needs a draft model"):
    drafters.build("vanilla", model, None, slots=8)
