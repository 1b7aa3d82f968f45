"""Block verification alone; that the law stays is laws_test.py's."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import tree as trees
from spec_jax.base import DETERMINISTIC, IID, Draft, Noise
from spec_jax.verify import verify
from spec_jax.verify_block import verify_block

P, Q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])


def chain_of(tokens, probs, law=IID, acceptable=None):
  """Returns drafts `tokens: [B, K]` below a root, drawn from `probs`."""
  B, K = tokens.shape
  tree = trees.chain(K)
  shape = {
    name: jnp.broadcast_to(jnp.asarray(x)[None], (B, *x.shape))
    for name, x in tree._asdict().items()
  }
  if acceptable is None:
    acceptable = np.ones((B, K), bool)
  return Draft(
    tokens=jnp.asarray(np.pad(tokens, ((0, 0), (1, 0))), jnp.int32),
    **shape,
    law=jnp.full((B, K + 1), law, jnp.int32),
    probs=jnp.broadcast_to(jnp.asarray(probs, jnp.float32), (B, K + 1, 2)),
    acceptable=jnp.asarray(np.pad(acceptable, ((0, 0), (1, 0)))),
  )


def noise_of(B, K, **fields):
  full = {
    "draft": (B, K + 1),
    "accept": (B, K + 1),
    "residual": (B,),
    "plain": (B, K + 1),
  }
  return Noise(
    **{n: jnp.asarray(fields.get(n, np.full(s, 0.5))) for n, s in full.items()}
  )


def law_at(p):
  return lambda nodes: jnp.broadcast_to(
    jnp.asarray(p, jnp.float32), (nodes.shape[0], 2)
  )


def expected_kept(verifier, K):
  """Returns the mean number of drafted tokens kept, from the chances."""
  tokens = np.array(list(itertools.product(range(2), repeat=K)))
  weight = Q[tokens].prod(1)
  draft = chain_of(tokens, Q)
  # Token verification shows a node's chance only if it got there.
  zeros = np.zeros((len(tokens), K + 1), np.float32)
  noise = noise_of(len(tokens), K, accept=zeros)
  chance = np.asarray(verifier(noise, law_at(P), draft, K).accept_prob)[:, 1:]
  if verifier is verify:
    kept = np.cumprod(chance, 1).sum(1)
  else:  # the longest prefix that passes
    later = np.cumprod((1 - chance)[:, ::-1], 1)[:, ::-1]
    none_after = np.concatenate([later[:, 1:], np.ones((len(tokens), 1))], 1)
    kept = (np.arange(1, K + 1) * chance * none_after).sum(1)
  return float((weight * kept).sum())


def test_the_papers_example():
  """Two tokens: 10/9 kept token by token, 11/9 as a block; one: 2/3 both."""
  assert expected_kept(verify, 2) == pytest.approx(10 / 9, abs=1e-6)
  assert expected_kept(verify_block, 2) == pytest.approx(11 / 9, abs=1e-6)
  for verifier in (verify, verify_block):
    assert expected_kept(verifier, 1) == pytest.approx(2 / 3, abs=1e-6)


def test_no_rule_keeps_more_than_the_ideal_one():
  """The overlap of the laws of each prefix, added up: 12/9 of two tokens."""
  ideal = 0.0
  for i in (1, 2):
    texts = np.array(list(itertools.product(range(2), repeat=i)))
    ideal += np.minimum(P[texts].prod(1), Q[texts].prod(1)).sum()
  assert ideal == pytest.approx(12 / 9, abs=1e-6)
  token, block = (expected_kept(rule, 2) for rule in (verify, verify_block))
  assert token + 0.1 < block < ideal - 0.1


def test_it_keeps_the_longest_prefix_that_passes():
  """A failure in the middle does not end the walk."""
  tokens = np.array([[0, 1, 0]])
  draft = chain_of(tokens, Q)
  accept = np.array([[0.5, 0.999, 0.0, 0.999]], np.float32)
  verdict = verify_block(noise_of(1, 3, accept=accept), law_at(P), draft, 3)
  assert verdict.path.tolist() == [[0, 1, 2, -1]]
  assert verdict.tokens[0, :2].tolist() == [0, 1]
  assert verdict.num_tokens.tolist() == [3] and verdict.tokens[0, 3] == -1


def test_point_masses_are_verified_as_by_token_verification():
  """T = 0: kept up to the first token that is not the target's."""
  for tokens, kept in (([1, 1, 1], 3), ([1, 0, 1], 1), ([0, 1, 1], 0)):
    draft = chain_of(np.array([tokens]), [0.0, 1.0], law=DETERMINISTIC)
    verdict = verify_block(noise_of(1, 3), law_at([0.0, 1.0]), draft, 3)
    assert verdict.num_accepted.tolist() == [kept]
    assert verdict.tokens[0, kept] == 1


def test_a_draft_ends_where_nodes_are_not_acceptable():
  """Nothing proposed is a plain draw; one token is token verification."""
  tokens = np.array([[1, 1], [1, 1]])
  acceptable = np.array([[False, True], [True, False]])
  draft = chain_of(tokens, Q, acceptable=acceptable)
  accept = np.zeros((2, 3), np.float32)
  verdict = verify_block(noise_of(2, 2, accept=accept), law_at(P), draft, 2)
  assert verdict.num_accepted.tolist() == [0, 1]
  assert verdict.plain.tolist() == [[True, False, False], [False, True, False]]
  assert verdict.accept_prob[:, 2].tolist() == [0, 0]
