"""The output law is the target's: enumerated through `spec_step` itself."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import (
  kernels,
  sampling,
  step as step_lib,
  verifiers,
  verify,
  verify_block,
  verify_k_seq,
)
from spec_jax.base import DETERMINISTIC, IID
from spec_jax.drafters import (
  best_first,
  cascade,
  first_of,
  lookahead,
  merge,
  ngram,
  suffix,
  vanilla,
)
from tests.laws import (
  DRAFTERS,
  ON_LAYERS,
  POLICIES,
  TWO_VOCABULARIES,
  VERIFIERS,
  V,
  distances,
)

# What covers the rest; all of it is in the full product, `tests.exactness`.
_LEFT_OUT = (
  "own_temperature",
  "suffix_tree",
  "merge_iid",
  "chain_entropy",
  "chain_average",
  "lookup_cost",
  "tli_confidence",
  "trigram_confidence",
  "block_confidence",
  "block_tli",
)
COVERING = [
  *(
    (
      "two_tables"
      if name in TWO_VOCABULARIES
      else "transformer"
      if name in ON_LAYERS
      else "table",
      name,
    )
    for name in [*DRAFTERS, *POLICIES, *VERIFIERS]
    if name not in _LEFT_OUT
  ),
  ("transformer", "tree_wor"),
  ("transformer", "lookahead"),
  ("transformer", "merge"),
  ("transformer", "cascade"),
  ("packed", "tree_wor"),
  ("packed", "eagle_chain"),
]


@pytest.mark.parametrize("kind,name", COVERING)
def test_the_joint_law_of_three_tokens_is_the_targets(kind, name):
  if kind == "packed" and (reason := kernels.why_not()) is not None:
    pytest.skip(reason)
  assert max(distances(kind, name).values()) < 1e-5


def test_two_levels_of_a_search_have_the_same_law(monkeypatch):
  """As in a large vocabulary: blocks of 2, and the largest looked at first.

  `min_new_tokens` and stop ids, which end the enumeration, have their tests
  in sampling_test.py.
  """
  monkeypatch.setattr(sampling, "_BLOCK", 2)
  monkeypatch.setattr(sampling, "_NUM_LARGEST", (1, 2))
  for name in ("chain", "tree_wor"):
    assert max(distances("table", name).values()) < 1e-5


def test_a_threshold_beside_the_next_is_seen(monkeypatch):
  """The twin: of the largest looked at first, one too few is kept."""
  monkeypatch.setattr(sampling, "_NUM_LARGEST", (2,))
  real = sampling.largest

  def twice_the_first(x, k):
    return jnp.broadcast_to(real(x, 1), (x.shape[0], k))

  monkeypatch.setattr(sampling, "largest", twice_the_first)
  found = distances("table", "chain", ["t1.5_top_p"])
  assert found["t1.5_top_p"] > 1e-3


def test_a_row_alone_has_the_same_law():
  found = distances("table", "none", ["t0.7", "penalties"], chunk=1)
  assert max(found.values()) < 1e-5


def _no_residual(monkeypatch):
  """After a refusal the token is drawn from the whole law."""
  monkeypatch.setattr(verify, "residual_law", lambda p, q: p)


def _siblings_as_iid(monkeypatch):
  """Without replacement drawn, with replacement verified."""
  monkeypatch.setattr(verify, "_without", lambda q, token: q)


def _one_prefix(monkeypatch):
  """S4: every node's penalties see the prefix of the root."""
  monkeypatch.setattr(step_lib, "path_counts", lambda counts, *_: counts)


def _counts_per_step(monkeypatch):
  """S1: only the first token of a step is counted."""
  real = step_lib.add_counts

  def first_only(counts, tokens, live):
    return real(counts, tokens[:, :1], live[:, :1])

  monkeypatch.setattr(step_lib, "add_counts", first_only)


def _wrong_nodes(monkeypatch):
  """R4: nodes are committed in the order of their index, not of the path."""
  real = step_lib.commit

  def in_order(cache, block, path, num):
    order = jnp.broadcast_to(jnp.arange(path.shape[1])[None], path.shape)
    return real(cache, block, order, num)

  monkeypatch.setattr(step_lib, "commit", in_order)


def _picky(monkeypatch):
  """`acceptable` looks at the token that was drawn."""
  real = vanilla.Draft

  def picky(**fields):
    kept = fields["acceptable"] & (fields["tokens"] != 0)
    return real(**{**fields, "acceptable": kept})

  monkeypatch.setattr(vanilla, "Draft", picky)


def _other_law(monkeypatch):
  """The law that is shown is not the one that tokens are drawn from."""
  real = ngram.Draft

  def other(**fields):
    flat = jnp.full_like(fields["probs"], 1 / V)
    return real(**{**fields, "probs": flat})

  monkeypatch.setattr(ngram, "Draft", other)


def _counts_as_law(monkeypatch):
  """A token that is certain is verified as if it had been drawn."""
  real = suffix.Draft

  def drawn(**fields):
    B, N = fields["tokens"].shape
    law = jnp.full((B, N), IID, jnp.int32)
    probs = jnp.full((B, N, V), 1 / V)
    return real(**{**fields, "law": law, "probs": probs})

  monkeypatch.setattr(suffix, "Draft", drawn)


def _asked_too_late(monkeypatch):
  """A node is acceptable if the draft is sure after it, not before it."""
  real = vanilla.Draft

  def late(**fields):
    sure = fields["probs"].max(-1) >= 0.9
    return real(**{**fields, "acceptable": fields["acceptable"] & sure})

  monkeypatch.setattr(vanilla, "Draft", late)


def _block_residual(monkeypatch):
  """The residual of token verification: the prefix's weight counts as 1."""
  real = verify_block.residual_law
  monkeypatch.setattr(
    verify_block,
    "residual_law",
    lambda p, q: real(p / p.sum(-1, keepdims=True), q),
  )


def _first_refusal(monkeypatch):
  """Stops at the first prefix that fails, as token verification does."""
  real = verify_block.verify_block

  def strict(noise, law_at, draft, depth):
    verdict = real(noise, law_at, draft, depth)
    passed = noise.accept < verdict.accept_prob
    run = jnp.cumprod(passed[:, 1:], -1).sum(-1)
    shown = draft.acceptable & (jnp.arange(depth + 1)[None] <= run[:, None])
    return real(
      noise, law_at, dataclasses.replace(draft, acceptable=shown), depth
    )

  monkeypatch.setattr(verifiers, "verify_block", strict)


def _greedy_rho(monkeypatch):
  """Every sibling is accepted as if it were the only one."""
  one = lambda p, q, k: jnp.ones(k.shape)
  monkeypatch.setattr(verify_k_seq, "optimal_rho", one)


def _narrow(monkeypatch):
  """The pass ends one node before the last that may be accepted."""
  real = step_lib._score

  def narrow(model, params, cache, draft, positions, sizes):
    shown = draft.acceptable & jnp.roll(draft.acceptable, -1, 1)
    less = dataclasses.replace(draft, acceptable=shown)
    return real(model, params, cache, less, positions, sizes)

  monkeypatch.setattr(step_lib, "_score", narrow)


def _blind(monkeypatch):
  """The nodes of a guess see the root and themselves, not each other."""
  real = lookahead._branches

  def blind(owner, shape):
    found = real(owner, shape)
    root = np.arange(shape.num_nodes) == 0
    seen = np.eye(shape.num_nodes, dtype=bool) | root[None]
    return found._replace(visible=found.visible & seen[None])

  monkeypatch.setattr(lookahead, "_branches", blind)


def _generous(monkeypatch):
  """A token is accepted a little more often than p / q, even where p is 0."""
  monkeypatch.setattr(
    verify, "prob_of", lambda p, t: sampling.prob_of(p, t) + 1e-3
  )


def _seen_by_none(monkeypatch):
  """S4: the nodes of a tree of a row's own do not see their ancestors."""
  real = best_first.dynamic_tree

  def blind(parents):
    shape = real(parents)
    N = parents.shape[1]
    return shape | {"visible": shape["visible"] & jnp.eye(N, dtype=bool)[None]}

  monkeypatch.setattr(best_first, "dynamic_tree", blind)


def _served_by_token(monkeypatch):
  """Who serves a row depends on the token that the second has drawn."""
  real = first_of._choose

  def choose(served, one, two):
    return real(served | (two.tokens[:, 1] == 0), one, two)

  monkeypatch.setattr(first_of, "_choose", choose)


def _shares_what_is_drawn(monkeypatch):
  """A token drawn at random is dropped where a certain one equals it."""
  real = merge.share

  def certain(draft):
    return dataclasses.replace(draft, law=0 * draft.law + DETERMINISTIC)

  monkeypatch.setattr(
    merge, "share", lambda one, two: real(certain(one), certain(two))
  )


def _law_of_another_root(monkeypatch):
  """The root's law is not that of the drafter that draws its children."""
  real = merge.side_by_side

  def flat(one, two, places):
    draft = real(one, two, places)
    return dataclasses.replace(
      draft, probs=draft.probs.at[:, 0].set(1 / draft.probs.shape[-1])
    )

  monkeypatch.setattr(merge, "side_by_side", flat)


def _cheap_by_token(monkeypatch):
  """Whether the dearer part counts depends on the token that it has drawn."""
  real = merge.side_by_side

  def cheap(one, two, places):
    kept = two.acceptable & (two.tokens[:, 1:2] > 0)
    return real(one, dataclasses.replace(two, acceptable=kept), places)

  monkeypatch.setattr(merge, "side_by_side", cheap)


def _inner_rule_is_sharper(monkeypatch):
  """What the draft's own verification draws is not of the law it reports."""

  def sharper(noise, law_at, draft, depth):
    return verify.verify(noise, lambda at: law_at(at) ** 2, draft, depth)

  monkeypatch.setattr(cascade, "verify", sharper)


TWINS = {
  "no_residual": (_no_residual, "table", "chain", "t0.7"),
  "siblings_as_iid": (_siblings_as_iid, "table", "tree_wor", "t0.7"),
  "one_prefix": (_one_prefix, "table", "chain", "penalties"),
  "counts_per_step": (_counts_per_step, "table", "chain", "penalties"),
  "wrong_nodes": (_wrong_nodes, "transformer", "tree_wor", "t0.7"),
  "picky": (_picky, "table", "chain", "t0.7"),
  "other_law": (_other_law, "table", "trigram", "t0.7"),
  "counts_as_law": (_counts_as_law, "table", "suffix_corpus", "t0.7"),
  "asked_too_late": (_asked_too_late, "table", "chain", "t0.7"),
  "block_residual": (_block_residual, "table", "block_chain", "t0.7"),
  "first_refusal": (_first_refusal, "table", "block_chain", "t0.7"),
  "greedy_rho": (_greedy_rho, "table", "k_seq_pair", "t0.7"),
  "narrow": (_narrow, "table", "chain_average", "t0.7"),
  "blind": (_blind, "transformer", "lookahead", "t0.7"),
  "generous": (_generous, "table", "chain", "t1.5_top_p"),
  "seen_by_none": (_seen_by_none, "table", "best_first", "penalties"),
  "served_by_token": (_served_by_token, "table", "first_of", "t0.7"),
  "shares_what_is_drawn": (_shares_what_is_drawn, "table", "merge", "t0.7"),
  "law_of_another_root": (_law_of_another_root, "table", "merge_iid", "t0.7"),
  "cheap_by_token": (_cheap_by_token, "table", "merge_cost", "t0.7"),
  "inner_rule_is_sharper": (_inner_rule_is_sharper, "table", "cascade", "t0.7"),
}


@pytest.mark.parametrize("twin", TWINS)
def test_a_planted_fault_is_seen(twin, monkeypatch):
  plant, kind, name, setting = TWINS[twin]
  plant(monkeypatch)
  assert distances(kind, name, [setting])[setting] > 1e-3
