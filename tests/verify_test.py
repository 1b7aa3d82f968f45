"""The verifier alone: laws of one and two tokens by hand, and its edges."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import tree as trees
from spec_jax.base import (
  DETERMINISTIC,
  IID,
  WITHOUT_REPLACEMENT,
  Draft,
  Noise,
)
from spec_jax.verify import residual_law, verify
from tests import fakes

ALMOST_ONE = fakes.ALMOST_ONE


def draft_of(tree, tokens, law, probs=None, acceptable=None):
  """Returns a Draft of rows `tokens: [B, N]` on one static tree."""
  tokens = np.asarray(tokens, np.int32)
  B, N = tokens.shape
  rows = lambda x: jnp.broadcast_to(jnp.asarray(x)[None], (B, *np.shape(x)))
  law = np.broadcast_to(np.asarray(law, np.int32), (B, N))
  usable = np.ones(N, bool) if acceptable is None else np.asarray(acceptable)
  return Draft(
    tokens=jnp.asarray(tokens),
    parents=rows(tree.parents),
    depths=rows(tree.depths),
    visible=rows(tree.visible),
    law=jnp.asarray(law),
    probs=None if probs is None else jnp.asarray(probs, jnp.float32),
    acceptable=jnp.asarray(np.broadcast_to(usable, (B, N))),
  )


def noise_of(draft, depth, *, accept=ALMOST_ONE, residual=0.5, plain=0.5):
  """Returns noise whose fields broadcast to what the draft needs."""
  B, N = draft.tokens.shape
  fill = lambda x, *shape: jnp.broadcast_to(jnp.asarray(x, jnp.float32), shape)
  return Noise(
    draft=jnp.zeros((B, N)),
    accept=fill(accept, B, N),
    residual=fill(residual, B),
    plain=fill(plain, B, depth + 1),
  )


def decide(draft, laws, noise=None, **kwargs):
  """Verifies; `laws` is `[N, V]` or `[B, N, V]`, the target's after a node."""
  B = len(draft.tokens)
  depth = int(draft.depths.max())
  laws = np.asarray(laws, np.float32)
  laws = jnp.asarray(np.broadcast_to(laws, (B, *laws.shape[-2:])))
  noise = noise or noise_of(draft, depth, **kwargs)
  return _decide(noise, laws, draft, depth)


def _run(noise, laws, draft, depth):
  def law_at(node):
    return jnp.take_along_axis(laws, node[:, None, None], 1)[:, 0]

  return verify(noise, law_at, draft, depth)


_decide = fakes.jit(_run, static_argnames="depth")


def first_token_law(p, q, *, probs=None, law=IID):
  """Enumerates one draft token drawn from `q`; returns (law, acceptance).

  Args:
    p: the target's law.
    q: what the draft token is drawn from.
    probs: what the verifier is told it was drawn from.
    law: how the verifier is told it was drawn.
  """
  p, q = np.array(p), np.array(q)
  V = len(p)
  tokens = np.stack([np.zeros(V), np.arange(V)], 1)
  told = np.broadcast_to(q if probs is None else probs, (V, 2, V))
  verdict = decide(draft_of(trees.chain(1), tokens, law, told), [p, p])
  chance = np.asarray(verdict.accept_prob)[:, 1].astype(np.float64)
  out = q * chance
  out = out + (q * (1 - chance)) @ np.asarray(verdict.residual)
  return out, float(q @ chance)


# --- one token by hand -------------------------------------------------------


def test_the_draft_law_must_be_the_warped_one():
  """L1: top-2 of both sides; raw numbers as q would give .5714, .4286."""
  p, raw = np.array([0.5, 0.3, 0, 0]) / 0.8, np.array([0.4, 0.3, 0.2, 0.1])
  q = np.array([0.4, 0.3, 0, 0]) / 0.7
  law, _ = first_token_law(p, q)
  np.testing.assert_allclose(law, [0.625, 0.375, 0, 0], atol=1e-6)
  twin, _ = first_token_law(p, q, probs=raw)
  np.testing.assert_allclose(twin, [0.5714, 0.4286, 0, 0], atol=1e-4)


def test_a_drawn_token_is_accepted_as_often_as_the_laws_overlap():
  """L3: acceptance .60 and law p; the fault gives .2, .55, .25."""
  p, q = [0.2, 0.5, 0.3], [0.6, 0.3, 0.1]
  law, acceptance = first_token_law(p, q)
  np.testing.assert_allclose(law, p, atol=1e-6)
  assert acceptance == pytest.approx(0.6)
  # The fault: only the refused token 0 (chance .4) is taken out of p.
  left = residual_law(jnp.array([p]), jnp.array([[1.0, 0, 0]]))[0]
  twin = np.minimum(p, q) + 0.4 * np.asarray(left)
  np.testing.assert_allclose(twin, [0.2, 0.55, 0.25], atol=1e-6)


def test_equal_laws_accept_everything():
  """L3, L5: four equal tokens, and two, accepted always."""
  for V in (4, 2):
    law, acceptance = first_token_law([1 / V] * V, [1 / V] * V)
    assert acceptance == 1.0
    np.testing.assert_allclose(law, [1 / V] * V, atol=1e-7)


def plain_law(p, tokens):
  """Law of the first token with deterministic children, by plain draws."""
  V = len(p)
  cdf = np.cumsum(p)
  uniform = cdf - np.array(p) / 2  # The middle of each token's cell.
  N = len(tokens) + 1
  tree = trees.branching([len(tokens)])
  rows = np.tile([0, *tokens], (V, 1))
  verdict = decide(
    draft_of(tree, rows, DETERMINISTIC),
    np.tile(p, (N, 1)),
    plain=uniform[:, None],
  )
  law = np.zeros(V)
  np.add.at(law, np.asarray(verdict.tokens)[:, 0], p)
  return law, verdict


def test_an_argmax_draft_is_a_point_mass():
  """L2: the favourite proposed against [.3, .7]; softmax as q gives a half."""
  law, verdict = plain_law([0.3, 0.7], [0])
  np.testing.assert_allclose(law, [0.3, 0.7], atol=1e-6)
  assert verdict.num_accepted.tolist() == [1, 0]
  # The fault: told [.6, .4], though token 0 is proposed always.
  tokens = [[0, 0]]
  told = np.tile([0.6, 0.4], (1, 2, 1))
  twin = decide(draft_of(trees.chain(1), tokens, IID, told), [[0.3, 0.7]] * 2)
  chance = float(twin.accept_prob[0, 1])
  law = chance * np.eye(2)[0] + (1 - chance) * np.asarray(twin.residual[0])
  np.testing.assert_allclose(law, [0.5, 0.5], atol=1e-6)


def test_deterministic_siblings_share_one_draw_of_the_target():
  """L5, R1, R8: children 0, 1 of [.5, .3, .2]; two children that hold all."""
  law, _ = plain_law([0.5, 0.3, 0.2], [0, 1])
  np.testing.assert_allclose(law, [0.5, 0.3, 0.2], atol=1e-6)
  law, verdict = plain_law([0.5, 0.5], [0, 1])
  np.testing.assert_allclose(law, [0.5, 0.5], atol=1e-6)
  assert verdict.num_accepted.tolist() == [1, 1]
  assert verdict.path[:, 1].tolist() == [1, 2]


# --- two levels, three siblings, every mixture of laws ------------------------


def first_two_law(kinds, *, acceptable=None, q_root=None, seed=0):
  """Enumerates three children of the root and three of the first of them.

  Args:
    kinds: laws of the six nodes.
    acceptable: of the six nodes.
    q_root: what the root's children are drawn from.

  Returns:
    Law of the first two tokens `[V, V]`, and the target's.
  """
  V, N, rng = 4, 7, np.random.default_rng(seed)
  tree = trees.from_parents([-1, 0, 0, 0, 1, 1, 1])
  p, after = rng.dirichlet(np.ones(V)), rng.dirichlet(np.ones(V), V)
  q = np.tile(rng.dirichlet(np.ones(V)), (N, 1))
  q[0] = rng.dirichlet(np.ones(V)) if q_root is None else q_root
  q[1] = rng.dirichlet(np.ones(V))
  fixed = rng.permutation(V)
  groups = []
  for parent, nodes in ((0, (0, 1, 2)), (1, (3, 4, 5))):
    found = []
    for tokens in itertools.product(range(V), repeat=3):
      left, weight = q[parent].copy(), 1.0
      for token, i in zip(tokens, nodes, strict=True):
        if kinds[i] == DETERMINISTIC:
          weight *= token == fixed[i % 3]
        elif kinds[i] == IID:
          weight *= q[parent][token]
        elif left.sum() > 0:
          weight *= left[token] / left.sum()
          left[token] = 0
        else:  # Past q's support: any token will do.
          weight *= token == V - 1
      if weight > 0:
        found.append((tokens, weight))
    groups.append(found)
  rows, weights, accept = [], [], []
  for (a, w), (b, x) in itertools.product(*groups):
    for bits in itertools.product((0, ALMOST_ONE), repeat=6):
      rows.append([0, *a, *b])
      weights.append(w * x)
      accept.append([0, *bits])
  rows, weights, accept = map(np.array, (rows, weights, accept))
  usable = np.array([True, *(acceptable or [True] * 6)])
  law, size = np.zeros((V, V)), 1 << 13  # Chunks of one shape: one compile.
  for start in range(0, len(rows), size):
    at = np.arange(start, start + size)
    weight = np.where(at < len(rows), weights[at % len(rows)], 0)
    row, bits = rows[at % len(rows)], accept[at % len(rows)]
    laws = np.concatenate([np.tile(p, (size, 1, 1)), after[row[:, 1:]]], 1)
    draft = draft_of(tree, row, [0, *kinds], np.tile(q, (size, 1, 1)), usable)
    verdict = jax.tree.map(np.asarray, decide(draft, laws, accept=bits))
    chance = verdict.accept_prob.astype(np.float64)
    weight = weight * np.where(bits == 0, chance, 1 - chance)[:, 1:].prod(1)
    num, kept = verdict.num_accepted, verdict.tokens
    left = weight[:, None] * verdict.residual
    np.add.at(law, (kept[num == 2, 0], kept[num == 2, 1]), weight[num == 2])
    np.add.at(law, kept[num == 1, 0], left[num == 1])
    law += left[num == 0].sum(0)[:, None] * after
  return law, p[:, None] * after


W = WITHOUT_REPLACEMENT
SOME = {"acceptable": [True, False, True, False, True, True]}
MIXTURES = {
  "iid": ([IID] * 6, {}),
  "without_replacement": ([W] * 6, {}),
  "mixed": ([IID, W, W, W, IID, IID], {}),
  "a_point_mass_last": ([W, W, DETERMINISTIC, IID, IID, DETERMINISTIC], {}),
  "unacceptable_iid": ([IID] * 6, SOME),
  "unacceptable_without_replacement": ([W] * 6, SOME),
  "past_the_support": ([W] * 6, {"q_root": [0.3, 0, 0.7, 0]}),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_two_tokens_of_three_siblings_have_the_targets_law(name):
  """R1: vocabulary 4, total variation below 1e-6 for every mixture."""
  kinds, options = MIXTURES[name]
  law, expected = first_two_law(kinds, **options)
  assert np.abs(law - expected).sum() / 2 < 1e-6


def test_siblings_told_of_the_wrong_law_are_noticed():
  """Two drawn without replacement: told so exact, told independent not."""
  p, q = np.array([0.2, 0.5, 0.3]), np.array([0.6, 0.3, 0.1])
  pairs = list(itertools.permutations(range(3), 2))
  weights = np.array([q[a] * q[b] / (1 - q[a]) for a, b in pairs])
  rows = np.array([[0, a, b] for a, b in pairs])
  error = {}
  for law in (W, IID):
    draft = draft_of(trees.branching([2]), rows, law, np.tile(q, (6, 3, 1)))
    verdict = decide(draft, [p] * 3)
    a, b = np.asarray(verdict.accept_prob, np.float64)[:, 1:].T
    out = (weights * (1 - a) * (1 - b)) @ np.asarray(verdict.residual)
    np.add.at(out, rows[:, 1], weights * a)
    np.add.at(out, rows[:, 2], weights * (1 - a) * b)
    error[law] = np.abs(out - p).sum() / 2
  assert error[W] < 1e-6 and error[IID] > 0.01


# --- edges -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_equal_laws_are_accepted_at_the_largest_uniform(dtype):
  """L6: 10,000 random laws; the residual of p = q is p, finite."""
  rng = np.random.default_rng(0)
  p = jnp.asarray(rng.dirichlet(np.full(8, 0.3), 10_000), dtype)
  p = p.astype(jnp.float32)
  tokens = np.stack([np.zeros(10_000), np.argmax(p, 1)], 1)
  told = jnp.stack([p, p], 1)
  verdict = decide(draft_of(trees.chain(1), tokens, IID, told), told)
  assert (verdict.num_accepted == 1).all()
  for residual in (jax.jit(residual_law)(p, p), jax.vmap(residual_law)(p, p)):
    assert fakes.same(residual, p)


def test_a_residual_is_what_the_target_has_more():
  """p = .5, .3, .2 and q = .2, .5, .3 leave token 0."""
  left = residual_law(
    jnp.array([[0.5, 0.3, 0.2]]), jnp.array([[0.2, 0.5, 0.3]])
  )
  np.testing.assert_allclose(left, [[1, 0, 0]], atol=1e-7)


@pytest.mark.parametrize("uniform", [0.0, 0.5, float(ALMOST_ONE)])
def test_zero_edges_are_refused_and_finite(uniform):
  """L7, J6: q(x) = 0, p(x) = 0 and both, at every uniform."""
  p = np.array([0.3, 0.0, 0.7, 0.0])
  q = np.array([0.0, 0.6, 0.4, 0.0])
  tokens = [[0, 0], [0, 1], [0, 3]]
  draft = draft_of(trees.chain(1), tokens, IID, np.tile(q, (3, 2, 1)))
  verdict = decide(draft, [p, p], accept=uniform, residual=uniform)
  assert verdict.num_accepted.tolist() == [0, 0, 0]
  assert set(verdict.tokens[:, 0].tolist()) <= {0, 2}
  for x in (verdict.accept_prob, verdict.residual):
    assert np.isfinite(x).all()


@pytest.mark.parametrize("law", [IID, WITHOUT_REPLACEMENT])
def test_accept_prob_is_where_the_decision_turns(law):
  """Noise just below it accepts, just above it refuses; second siblings too."""
  rng = np.random.default_rng(2)
  B, V = 400, 6
  p = rng.dirichlet(np.ones(V), (B, 3))
  q = rng.dirichlet(np.ones(V), (B, 3))
  tokens = rng.integers(0, V, (B, 3))
  tokens[:, 2] = (tokens[:, 1] + 1) % V
  tree = trees.branching([2])
  draft = draft_of(tree, tokens, law, q)
  chance = np.asarray(decide(draft, p).accept_prob, np.float64)
  checked = 0
  for node in (1, 2):
    inside = (chance[:, node] > 1e-3) & (chance[:, node] < 0.999)
    checked += inside.sum()
    for factor, taken in ((1 - 1e-5, True), (1 + 1e-5, False)):
      accept = np.full((B, 3), ALMOST_ONE)
      accept[:, node] = np.minimum(chance[:, node] * factor, ALMOST_ONE)
      path = np.asarray(decide(draft, p, accept=accept).path)[:, 1]
      before = chance[:, 1] >= 1 if node == 2 else np.zeros(B, bool)
      assert ((path == node) == taken)[inside & ~before].all()
  assert checked > 200


def test_the_docstrings_example():
  """Chain 7, 8: 7 kept, 8 refused, then what p1 has more than q1."""
  V = 10
  rng = np.random.default_rng(1)
  p, q = rng.dirichlet(np.ones(V), 3), rng.dirichlet(np.ones(V), 3)
  draft = draft_of(trees.chain(2), [[0, 7, 8]], IID, q[None])
  verdict = decide(draft, p, accept=[[0, 0, ALMOST_ONE]])
  left = np.maximum(p[1] - q[1], 0)
  np.testing.assert_allclose(verdict.residual[0], left / left.sum(), atol=1e-6)
  expected = int(np.argmax(np.cumsum(left) > 0.5 * left.sum()))
  assert verdict.path.tolist() == [[0, 1, -1]]
  assert verdict.tokens.tolist() == [[7, expected, -1]]
  assert verdict.num_accepted.tolist() == [1]
  assert verdict.num_tokens.tolist() == [2]
  assert not verdict.plain.any()


def test_matches_after_a_refusal_do_not_count():
  """M3: greedy, matches 1, 0, 1, 1 of a chain accept one."""
  eye = np.eye(6)
  laws = eye[[1, 2, 3, 4, 5]]  # The target says 1, 2, 3, 4, 5.
  draft = draft_of(trees.chain(4), [[0, 1, 0, 3, 4]], DETERMINISTIC)
  verdict = decide(draft, laws)
  assert verdict.num_accepted.tolist() == [1]
  assert verdict.tokens.tolist() == [[1, 2, -1, -1, -1]]


def test_a_greedy_walk_follows_the_argmax_and_no_other_branch():
  """R7: branch 2, 5 is wrong at its first node though 5 is right after 1."""
  tree = trees.from_parents([-1, 0, 0, 1, 2])
  eye = np.eye(6)
  laws = eye[[1, 5, 5, 0, 0]]
  draft = draft_of(tree, [[0, 2, 1, 5, 3]], DETERMINISTIC)
  verdict = decide(draft, laws)
  assert verdict.path.tolist() == [[0, 2, -1]]
  assert verdict.tokens.tolist() == [[1, 5, -1]]


def test_the_root_alone_draws_one_plain_token():
  """Plain decoding: uniform .9 of [.3, .3, .4] is token 2."""
  draft = draft_of(trees.chain(0), [[0]], DETERMINISTIC)
  verdict = decide(draft, [[0.3, 0.3, 0.4]], plain=0.9)
  assert verdict.tokens.tolist() == [[2]] and verdict.plain.tolist() == [[True]]
  assert verdict.num_accepted.tolist() == [0]


def test_rows_of_all_laws_in_one_batch_decide_as_alone():
  """B6: greedy, sampled and undrafted rows side by side, to the bit."""
  rng = np.random.default_rng(4)
  tree = trees.branching([2, 2])
  B, N, V = 6, tree.num_nodes, 5
  p = rng.dirichlet(np.ones(V), (B, N)).astype(np.float32)
  p[0] = np.eye(V)[rng.integers(0, V, N)]
  kinds = [DETERMINISTIC, IID, W, DETERMINISTIC, IID, W]
  law = np.repeat(np.array(kinds)[:, None], N, 1)
  usable = rng.random((B, N)) < 0.8
  usable[3] = False
  q = rng.dirichlet(np.ones(V), (B, N))
  draft = draft_of(tree, rng.integers(0, V, (B, N)), law, q, usable)
  noise = noise_of(
    draft,
    2,
    accept=rng.random((B, N)) / 2,
    residual=rng.random(B),
    plain=rng.random((B, 3)),
  )
  together = decide(draft, p, noise)
  for i in range(B):
    row = lambda x, i=i: x[i : i + 1]
    alone = decide(
      jax.tree.map(row, draft), p[i : i + 1], jax.tree.map(row, noise)
    )
    assert fakes.same(alone, jax.tree.map(row, together))
