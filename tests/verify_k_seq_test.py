"""K-SEQ alone, and the published table of acceptances of several drafts."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import drafters, tree as trees, verifiers
from spec_jax.base import DETERMINISTIC, IID, WITHOUT_REPLACEMENT, Draft, Noise
from spec_jax.drafting import static_tree
from spec_jax.verify import verify
from spec_jax.verify_k_seq import optimal_rho, verify_k_seq
from tests import fakes

P = np.array([0.5, 0.3, 0.1, 0.1])
Q = np.array([0.1, 0.2, 0.3, 0.4])
V = 4
# papers.md, 9.4: chance that one of k drafts is accepted, by rule.
TABLE = {
  "independent": (0.5, 0.65, 0.685, 0.7165),
  "without replacement": (0.5, 0.67857, 0.78010, 1.0),
  "k_seq": (0.5, 0.65844, 0.71, 0.75475),
}
RHO = (1, 1.5844, 2.1, 2.5475)
BOUND = (0.5, 0.69, 0.771, 0.8439)


def decide(
  rule, tree, tokens, law, *, accept=fakes.ALMOST_ONE, p=P, q=Q, k=V, rho=None
):
  """Verifies rows `tokens: [B, N]`; all nodes have the laws p and q.

  Of a root's children the first `k` are acceptable.
  """
  B, N = np.shape(tokens)
  acceptable = np.broadcast_to((tree.depths > 1) | (np.arange(N) <= k), (B, N))
  draft = Draft(
    tokens=jnp.asarray(tokens, jnp.int32),
    **static_tree(tree, B),
    law=jnp.full((B, N), law, jnp.int32),
    probs=jnp.broadcast_to(jnp.asarray(q, jnp.float32), (B, N, V)),
    acceptable=jnp.asarray(acceptable),
  )
  accept = np.broadcast_to(np.asarray(accept, np.float32), (B, N))
  p = jnp.asarray(p, jnp.float32)
  return _decide(draft, accept, p, rho, rule=rule, depth=tree.depth)


@functools.partial(fakes.jit, static_argnames=("rule", "depth"))
def _decide(draft, accept, p, rho, *, rule, depth):
  B, N = draft.tokens.shape
  noise = Noise(
    draft=jnp.zeros((B, N)),
    accept=accept,
    residual=jnp.full((B,), 0.5),
    plain=jnp.full((B, depth + 1), 0.5),
  )
  law_at = lambda nodes: jnp.broadcast_to(p, (B, V))
  more = {} if rho is None else {"rho": rho}
  return rule(noise, law_at, draft, depth, **more)


def siblings(rule, k, law, rho=None):
  """Enumerates k children of a root; returns (acceptance, law emitted)."""
  # One shape for all k, and so one program.
  tokens = np.array(list(itertools.product(range(V), repeat=4)))
  weight = np.ones(len(tokens))
  for row, drawn in enumerate(tokens):
    left = Q.copy()
    for token in drawn[:k]:
      weight[row] *= left[token] / left.sum() if left[token] else 0
      if law == WITHOUT_REPLACEMENT:
        left[token] = 0
    weight[row] *= not drawn[k:].any()  # what is not drafted, counted once
  rows = np.pad(tokens, ((0, 0), (1, 0)))
  verdict = decide(rule, trees.branching([4]), rows, law, k=k, rho=rho)
  chance = np.asarray(verdict.accept_prob, np.float64)[:, 1:]
  out = np.zeros(V)
  refused = np.ones(len(rows))
  for i in range(4):
    np.add.at(out, tokens[:, i], weight * refused * chance[:, i])
    refused = refused * (1 - chance[:, i])
  out += (weight * refused) @ np.asarray(verdict.residual, np.float64)
  return float(weight @ (1 - refused)), out


RULES = {
  "independent": (verify, IID),
  "without replacement": (verify, WITHOUT_REPLACEMENT),
  "k_seq": (verify_k_seq, IID),
}


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("name", RULES)
def test_several_drafts_are_accepted_as_published(name, k):
  """p = .5, .3, .1, .1 and q = .1, .2, .3, .4; the law stays p."""
  rule, law = RULES[name]
  acceptance, out = siblings(rule, k, law)
  assert acceptance == pytest.approx(TABLE[name][k - 1], abs=1e-5)
  np.testing.assert_allclose(out, P, atol=1e-6)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_no_rule_accepts_more_of_independent_drafts_than_the_bound(k):
  """`sum min(p, 1 - (1 - q)^k)`, as published, above both rules."""
  bound = np.minimum(P, 1 - (1 - Q) ** k).sum()
  assert bound == pytest.approx(BOUND[k - 1], abs=5e-5)
  for name in ("independent", "k_seq"):
    assert siblings(*RULES[name][:1], k, IID)[0] <= bound + 1e-6
  # Drafts without replacement are others: 4 of 4 tokens always hold it.
  assert siblings(verify, 4, WITHOUT_REPLACEMENT)[0] > BOUND[3]


def test_rho_solves_its_equation():
  """The published values, and 500 random laws with up to 8 drafts."""
  found = optimal_rho(
    jnp.tile(jnp.float32(P), (4, 1)),
    jnp.tile(jnp.float32(Q), (4, 1)),
    jnp.arange(1, 5),
  )
  np.testing.assert_allclose(found, RHO, atol=5e-5)
  rng = np.random.default_rng(0)
  p, q = rng.dirichlet(np.full(6, 0.5), (2, 500))
  k = rng.integers(1, 9, 500)
  rho = np.asarray(
    optimal_rho(jnp.float32(p), jnp.float32(q), jnp.asarray(k)), np.float64
  )
  assert (rho >= 1).all() and (rho <= k).all()
  beta = np.minimum(p / rho[:, None], q).sum(1)
  np.testing.assert_allclose(1 - (1 - beta) ** k, rho * beta, atol=1e-5)


def test_a_rho_out_of_bounds_is_raised_or_lowered():
  """A smaller one is rho*, a larger one k; between them it is used as it is."""
  acceptance = {}
  for rho in (None, 1.0, 1.5844, 1.8, 2.0, 3.0):
    acceptance[rho], out = siblings(verify_k_seq, 2, IID, rho)
    np.testing.assert_allclose(out, P, atol=1e-6)
  assert acceptance[1.0] == acceptance[None]
  assert acceptance[3.0] == acceptance[2.0] < acceptance[1.8]
  assert acceptance[1.8] < acceptance[None] - 1e-3


@pytest.mark.parametrize("law", [IID, DETERMINISTIC])
def test_chains_and_certain_nodes_are_verified_as_ever(law):
  """To the bit, at random noise; certain nodes in a tree too."""
  rng = np.random.default_rng(1)
  tree = trees.chain(3) if law == IID else trees.branching([3, 2])
  tokens = rng.integers(0, V, (300, tree.num_nodes))
  accept = rng.random(tokens.shape)
  same, other = (
    decide(rule, tree, tokens, law, accept=accept)
    for rule in (verify, verify_k_seq)
  )
  assert fakes.same(same, other)
  assert 0 < int(same.num_accepted.sum()) < 900


def test_edges_are_finite_and_never_impossible():
  """p = q, disjoint laws, p or q 0 at a token, at every uniform."""
  tokens = list(itertools.product(range(V), repeat=2))
  rows = np.pad(tokens, ((0, 0), (1, 0)))
  tree = trees.branching([2])
  for p, q in (
    (P, P),
    ([1, 0, 0, 0], [0, 0.5, 0.5, 0]),
    ([0.3, 0, 0.7, 0], [0, 0.6, 0.4, 0]),
    ([1, 0, 0, 0], [1, 0, 0, 0]),
  ):
    for accept in (0.0, 0.5, fakes.ALMOST_ONE):
      verdict = decide(verify_k_seq, tree, rows, IID, accept=accept, p=p, q=q)
      assert np.isfinite(verdict.residual).all()
      assert np.isfinite(verdict.accept_prob).all()
      assert (np.asarray(p)[np.asarray(verdict.tokens[:, 0])] > 0).all()
  # Equal laws: the first sibling is accepted always.
  drawn = decide(verify_k_seq, tree, rows, IID, p=P, q=P)
  assert (drawn.path[:, 1] == 1).all()


def test_accept_prob_is_where_the_decision_turns():
  """Noise just below it accepts, just above it refuses; both siblings."""
  rng = np.random.default_rng(2)
  rows = rng.integers(0, V, (200, 3))
  tree = trees.branching([2])
  chance = np.asarray(
    decide(verify_k_seq, tree, rows, IID).accept_prob, np.float64
  )
  for node in (1, 2):
    inside = (chance[:, node] > 0) & (chance[:, node] < 1)
    assert inside.sum() > 20
    for factor, taken in ((1 - 1e-5, True), (1 + 1e-5, False)):
      accept = np.full((200, 3), fakes.ALMOST_ONE)
      accept[:, node] = np.minimum(chance[:, node] * factor, fakes.ALMOST_ONE)
      verdict = decide(verify_k_seq, tree, rows, IID, accept=accept)
      assert ((verdict.path[:, 1] == node) == taken)[inside].all()


@pytest.mark.parametrize(
  ("options", "settings", "words"),
  [
    ({"siblings": "top_k"}, {}, "siblings drawn independently"),
    ({"siblings": "without_replacement"}, {}, "siblings drawn independently"),
    ({}, {"rho": 0.5}, r"rho must be in \[1, 3\] for this tree, got 0.5"),
    ({}, {"rho": 3.5}, r"rho must be in \[1, 3\] for this tree, got 3.5"),
    ({}, {"rho": float("nan")}, "rho must be in"),
    ({}, {"beta": 1}, "verifier 'k_seq' has no option 'beta'; it has rho"),
  ],
)
def test_what_k_seq_cannot_judge_is_refused(options, settings, words):
  """Other siblings, and a rho that no node could use."""
  model, _ = fakes.tables()
  drafter = drafters.build(
    "vanilla", model, model, slots=16, tree=(3,), **options
  )
  with pytest.raises(ValueError, match=words):
    verifiers.build("k_seq", drafter, **settings)
