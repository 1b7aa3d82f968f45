"""The verifiers on random trees whose nodes are drawn in every way at once.

Trees of up to depth 3 with independent, without-replacement and certain nodes
under one parent and across parents, and unacceptable nodes among them. What is
emitted is enumerated: each uniform is replaced by one representative of every
outcome, weighted by the chance that the verifier itself reports.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import verify, verify_k_seq
from spec_jax.base import (
  DETERMINISTIC,
  IID,
  WITHOUT_REPLACEMENT,
  Draft,
  Noise,
)
from spec_jax.drafting import dynamic_tree
from spec_jax.sampling import draw
from tests import fakes
from tests.enumeration import midpoints

V, N, K = 3, 7, 3
NUM_TREES = 36
FEW = 8  # Trees of independent nodes have ten times as many drafts.
ROWS = 1 << 12  # Chunks of one shape: one compile.
# Laws by the text before them, in base V + 1: a path of up to K tokens.
CODES = (V + 1) ** K


class Trees:
  """Random trees, and all that may be drawn in them, one entry a tree."""

  def __init__(self, seed, kinds, peeks, num=NUM_TREES):
    """Draws the trees.

    Args:
      seed: of the trees and the laws.
      kinds: how nodes may be drawn.
      peeks: whether a node's being acceptable, and the token of a certain
        one, depend on the tokens drawn before it.
      num: trees.
    """
    rng = np.random.default_rng(seed)
    self.num = T = num
    self.parents = np.full((T, N), -1)
    self.depths = np.zeros((T, N), int)
    for t in range(T):
      for i in range(1, N):
        # Breadth first, and wide as often as deep.
        low = max(0, self.parents[t, i - 1])
        allowed = [j for j in range(low, i) if self.depths[t, j] < K][:3]
        self.parents[t, i] = parent = int(rng.choice(allowed))
        self.depths[t, i] = self.depths[t, parent] + 1
    self.kind = rng.choice(kinds, (T, N))
    self.usable = rng.random((T, N)) < 0.8
    self.certain = rng.integers(0, V, (T, N))
    self.peeks = peeks & (rng.random((T, N)) < 0.5)
    self.p = rng.dirichlet(np.ones(V), (T, CODES))
    self.q = rng.dirichlet(np.ones(V), (T, CODES))
    # Past a law's support, any token will do.
    narrow = rng.random((T, CODES)) < 0.2
    self.q[narrow, 0] = 0
    self.q /= self.q.sum(-1, keepdims=True)

  def before(self, tree, tokens, i):
    """Returns a number that the tokens before node `i` decide, `[R]`."""
    return np.where(self.peeks[tree, i], tokens[:, 1:i].sum(1), 0)

  def codes(self, tree, tokens):
    """Returns `[R, N]`: the text after the path to each node, as a number."""
    every = np.arange(len(tree))
    codes = np.zeros(tokens.shape, int)
    for i in range(1, N):
      above = codes[every, self.parents[tree, i]]
      codes[:, i] = above * (V + 1) + tokens[:, i] + 1
    return codes

  def acceptable(self, tree, tokens):
    """Returns `[R, N]` bool."""
    odd = [self.before(tree, tokens, i) % 2 for i in range(1, N)]
    odd = np.stack([np.zeros(len(tree), int), *odd], 1)
    return self.usable[tree] & (odd == 0)

  def drafts(self):
    """Enumerates the drafts; returns (tree `[R]`, tokens `[R, N]`, weight)."""
    tree = np.arange(self.num)
    tokens, weight = np.zeros((self.num, N), int), np.ones(self.num)
    for i in range(1, N):
      every = np.arange(len(tree))
      parent, kind = self.parents[tree, i], self.kind[tree, i]
      left = self.q[tree, self.codes(tree, tokens)[every, parent]].copy()
      for j in range(1, i):
        gone = (self.parents[tree, j] == parent) & (kind != IID)
        gone &= self.kind[tree, j] == WITHOUT_REPLACEMENT
        left[every[gone], tokens[gone, j]] = 0
      total = left.sum(-1, keepdims=True)
      fixed = (self.certain[tree, i] + self.before(tree, tokens, i)) % V
      sure = (kind == DETERMINISTIC) | (total[:, 0] <= 0)
      law = np.where(
        sure[:, None], np.eye(V)[fixed], left / np.where(total > 0, total, 1)
      )
      row, token = np.nonzero(law)
      tree, weight = tree[row], weight[row] * law[row, token]
      tokens = tokens[row]
      tokens[:, i] = token
    return tree, tokens, weight


class Rows:
  """Rows of an enumeration: a draft each, noise, and a weight."""

  def __init__(self, trees, rule):
    self.trees, self.rule = trees, rule
    self.tree, self.tokens, self.weight = trees.drafts()
    R = len(self.tree)
    self.accept = np.full((R, N), fakes.ALMOST_ONE)
    self.plain = np.full((R, K + 1), 0.5, np.float32)

  def verdict(self):
    """Verifies all rows, as numpy."""
    parts = []
    for start in range(0, len(self.tree), ROWS):
      count = min(ROWS, len(self.tree) - start)
      at = np.minimum(np.arange(start, start + ROWS), len(self.tree) - 1)
      tree, tokens = self.tree[at], self.tokens[at]
      codes = self.trees.codes(tree, tokens)
      out = _decide(
        tokens,
        self.trees.parents[tree],
        self.trees.kind[tree],
        self.trees.q[tree[:, None], codes].astype(np.float32),
        self.trees.acceptable(tree, tokens),
        self.trees.p[tree[:, None], codes].astype(np.float32),
        self.accept[at],
        self.plain[at],
        self.rule,
      )
      parts.append(jax.tree.map(lambda x, c=count: np.asarray(x)[:c], out))
    return jax.tree.map(lambda *xs: np.concatenate(xs), *parts)

  def branch(self, array, column, values, chances):
    """Replaces each row by its outcomes: `values`, `chances` `[R, n]`.

    Args:
      array: "accept" or "plain".
      column: `[R]`, which of its noise.
      values: noise that gives an outcome.
      chances: its probability.
    """
    row, outcome = np.nonzero(chances > 0)
    self.tree, self.tokens = self.tree[row], self.tokens[row]
    self.weight = self.weight[row] * chances[row, outcome]
    self.accept, self.plain = self.accept[row], self.plain[row]
    every = np.arange(len(row))
    getattr(self, array)[every, column[row]] = values[row, outcome]

  def path_laws(self, verdict):
    """Returns `[R, K + 1, V]`, the target's laws along the path."""
    codes = self.trees.codes(self.tree, self.tokens)
    at = np.take_along_axis(codes, np.maximum(verdict.path, 0), 1)
    return self.trees.p[self.tree[:, None], at]


@functools.partial(fakes.jit, static_argnames="rule")
def _decide(tokens, parents, kind, q, acceptable, p, accept, plain, rule):
  B = len(tokens)
  draft = Draft(
    tokens=tokens,
    **dynamic_tree(parents),
    law=kind,
    probs=q,
    acceptable=acceptable,
  )
  noise = Noise(
    draft=jnp.zeros((B, N)),
    accept=accept,
    residual=jnp.full((B,), 0.5),
    plain=plain,
  )

  def law_at(node):
    return jnp.take_along_axis(p, node[:, None, None], 1)[:, 0]

  return rule(noise, law_at, draft, K)


def enumerate_rows(trees, rule):
  """Returns the rows of every outcome but the residual's, and the verdict.

  In the order of the walk: what a plain draw gives decides which nodes are
  tried below it.
  """
  rows = Rows(trees, rule)
  ready = np.zeros(trees.num, int)  # Levels whose plain draw is enumerated.

  def draw_plain(depth):
    """Enumerates the plain draws of trees that are not ready for a depth."""
    behind = ready < depth
    if behind.any():
      level = np.minimum(ready, K)[rows.tree]
      verdict = rows.verdict()
      every = np.arange(len(level))
      law = rows.path_laws(verdict)[every, level]
      mine = behind[rows.tree]
      drawn = mine & verdict.plain[every, level]
      law = np.where(drawn[:, None], law, np.eye(V)[0])
      old = rows.plain[every, level][:, None]
      values = np.where(mine[:, None], midpoints(law), old)
      rows.branch("plain", level, values, law)
      ready[behind] += 1

  for i in range(1, N):
    draw_plain(trees.depths[:, i])
    chance = rows.verdict().accept_prob[:, i, None].astype(np.float64)
    bits = np.array([[0, fakes.ALMOST_ONE]], np.float32)
    values = np.broadcast_to(bits, (len(chance), 2))
    level = np.full(len(chance), i)
    rows.branch(
      "accept", level, values, np.concatenate([chance, 1 - chance], 1)
    )
  for _ in range(K + 1):
    draw_plain(np.full(trees.num, K + 1))
  return rows, rows.verdict()


def distance(trees, rule):
  """Returns by tree the total variation of the next K + 1 tokens."""
  rows, verdict = enumerate_rows(trees, rule)
  shape = (V,) * (K + 1)
  found = np.zeros((trees.num, *shape))
  num = verdict.num_accepted
  codes = rows.trees.codes(rows.tree, rows.tokens)
  ended = np.take_along_axis(verdict.path, num[:, None], 1)[:, 0]
  kept = np.take_along_axis(codes, ended[:, None], 1)[:, 0]
  was_plain = np.take_along_axis(verdict.plain, num[:, None], 1)[:, 0]
  last = np.take_along_axis(verdict.tokens, num[:, None], 1)[:, 0]
  final = np.where(was_plain[:, None], np.eye(V)[last], verdict.residual)
  for token in range(V):
    weight = rows.weight * final[:, token]
    for n in range(K + 1):
      here = (num == n) & (weight > 0)
      index = (rows.tree[here], *verdict.tokens[here, :n].T)
      index = (*index, np.full(here.sum(), token))
      text = kept[here] * (V + 1) + token + 1
      rest = continuation(trees, rows.tree[here], text, K - n)
      spread = weight[here].reshape(-1, *[1] * (K - n)) * rest
      np.add.at(found, index, spread)
  expected = continuation(
    trees, np.arange(trees.num), np.zeros(trees.num, int), K + 1
  )
  assert np.abs(found.reshape(trees.num, -1).sum(1) - 1).max() < 1e-5
  return np.abs(found - expected).reshape(trees.num, -1).sum(1) / 2


def continuation(trees, tree, code, num):
  """Returns `[R, V, ..., V]`, the target's law of `num` tokens after a text."""
  if num == 0:
    return np.ones(len(tree))
  law = trees.p[tree, code]
  after = [
    continuation(trees, tree, code * (V + 1) + t + 1, num - 1) for t in range(V)
  ]
  return np.stack(
    [law[:, t].reshape(-1, *[1] * (num - 1)) * a for t, a in enumerate(after)],
    1,
  )


MIXED = (IID, WITHOUT_REPLACEMENT, DETERMINISTIC)


@functools.cache
def mixed_trees():
  """Returns the trees of most tests; every mixture occurs."""
  trees = Trees(0, MIXED, peeks=True)
  together = set()
  for t in range(NUM_TREES):
    for parent in range(N):
      here = trees.parents[t] == parent
      together.add(frozenset(trees.kind[t, here & trees.usable[t]].tolist()))
  for size in (1, 2, 3):
    assert any(len(x) == size for x in together)
  assert {frozenset(x) for x in ((0, 1), (0, 2), (1, 2))} <= together
  return trees


def test_mixed_laws_in_random_trees_keep_the_targets_law():
  """K + 1 tokens of each tree, total variation below 1e-6."""
  assert distance(mixed_trees(), verify.verify).max() < 1e-6


def _no_residual(monkeypatch):
  """After a refusal the token is drawn from the whole law."""
  monkeypatch.setattr(verify, "residual_law", lambda p, q: p)


def _siblings_as_iid(monkeypatch):
  """Without replacement drawn, with replacement verified."""
  monkeypatch.setattr(verify, "_without", lambda q, token: q)


def _generous(monkeypatch):
  """A token is accepted a little more often than p / q."""
  real = verify.prob_of
  monkeypatch.setattr(verify, "prob_of", lambda p, t: real(p, t) + 1e-2)


@pytest.mark.parametrize("plant", [_no_residual, _siblings_as_iid, _generous])
def test_a_fault_of_the_rule_is_seen_in_random_trees(plant, monkeypatch):
  """Trees in which nothing is refused, say, do not show all faults."""
  plant(monkeypatch)
  far = distance(mixed_trees(), lambda *args: verify.verify(*args))
  assert far.max() > 1e-2


def _certain_as_iid(draft):
  """A certain node is told to be drawn from its parent's law."""
  certain = draft.law == DETERMINISTIC
  return {"law": jnp.where(certain, IID, draft.law)}


def _refused_are_forgotten(draft):
  """An unacceptable node is told not to have left its siblings' law."""
  return {"law": jnp.where(draft.acceptable, draft.law, IID)}


def _picky(draft):
  """Whether a node is acceptable depends on its own token."""
  random = draft.law != DETERMINISTIC
  return {"acceptable": draft.acceptable & ~(random & (draft.tokens == 0))}


@pytest.mark.parametrize(
  "lie", [_certain_as_iid, _refused_are_forgotten, _picky]
)
def test_a_draft_that_lies_is_seen_in_random_trees(lie):
  """What `Draft` asks of a drafter is needed in mixed trees too."""

  def told(noise, law_at, draft, depth):
    draft = dataclasses.replace(draft, **lie(draft))
    return verify.verify(noise, law_at, draft, depth)

  assert distance(mixed_trees(), told).max() > 1e-3


def test_certain_children_are_judged_by_a_plain_draw():
  """A draw is plain where every acceptable child is certain, and only there.

  The token is then what plain decoding draws with the same noise. Twice the
  rule is read otherwise, and other rows would be plain: with the unacceptable
  children counted, and with one certain child being enough.
  """
  trees = mixed_trees()
  rows, verdict = enumerate_rows(trees, verify.verify)
  usable = trees.acceptable(rows.tree, rows.tokens)
  random = trees.kind[rows.tree] != DETERMINISTIC
  parents = trees.parents[rows.tree]
  laws = rows.path_laws(verdict)
  num_plain = 0
  unlike = {"unacceptable counted": 0, "one is enough": 0}
  for d in range(K + 1):
    here = verdict.path[:, d]
    under = (parents == here[:, None]) & (here >= 0)[:, None]
    plain = (here >= 0) & ~(under & usable & random).any(1)
    assert (verdict.plain[:, d] == plain).all()
    drawn = np.asarray(
      draw(jnp.asarray(laws[:, d], jnp.float32), jnp.asarray(rows.plain[:, d]))
    )
    assert (verdict.tokens[plain, d] == drawn[plain]).all()
    num_plain += plain.sum()
    other = (here >= 0) & ~(under & random).any(1)
    unlike["unacceptable counted"] += (plain != other).sum()
    other = plain | (under & usable & ~random).any(1)
    unlike["one is enough"] += (plain != other).sum()
  assert num_plain > 100 and min(unlike.values()) > 100, unlike


def test_k_seq_keeps_the_law_in_random_trees_of_independent_siblings():
  """Up to three siblings, some unacceptable, with the best rho and another."""
  trees = Trees(1, (IID,), peeks=False, num=FEW)
  assert distance(trees, verify_k_seq.verify_k_seq).max() < 1e-6
  rule = functools.partial(verify_k_seq.verify_k_seq, rho=1.8)
  assert distance(trees, rule).max() < 1e-6


def _rho_of_one(monkeypatch):
  """Each sibling is accepted as if it were the only one."""
  monkeypatch.setattr(
    verify_k_seq, "optimal_rho", lambda p, q, k: jnp.ones(k.shape)
  )


def _residual_of_one(monkeypatch):
  """What is left after k refusals is what is left after one."""
  monkeypatch.setattr(verify_k_seq, "_ratio", lambda beta, k: jnp.ones(k.shape))


@pytest.mark.parametrize("plant", [_rho_of_one, _residual_of_one])
def test_a_fault_of_k_seq_is_seen_in_random_trees(plant, monkeypatch):
  """A rho or a residual that forgets how many siblings there are."""
  plant(monkeypatch)
  trees = Trees(1, (IID,), peeks=False, num=FEW)
  rule = lambda *args: verify_k_seq.verify_k_seq(*args)
  assert distance(trees, rule).max() > 1e-3


def test_k_seq_needs_to_know_the_siblings_before_they_are_drawn():
  """As its docstring says: their number must not depend on their tokens."""
  trees = Trees(1, (IID,), peeks=True, num=FEW)
  assert distance(trees, verify.verify).max() < 1e-6
  assert distance(trees, verify_k_seq.verify_k_seq).max() > 1e-3
