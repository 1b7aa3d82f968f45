"""Faults planted in single drafters: the enumeration of laws sees each."""

import dataclasses

import jax.numpy as jnp
import pytest

from spec_jax import verify
from spec_jax.base import DETERMINISTIC
from spec_jax.drafters import best_first, cascade, first_of, merge
from tests.laws import distances


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


def _inner_rule_is_sharper(monkeypatch):
  """What the draft's own verification draws is not of the law it reports."""

  def sharper(noise, law_at, draft, depth):
    return verify.verify(noise, lambda at: law_at(at) ** 2, draft, depth)

  monkeypatch.setattr(cascade, "verify", sharper)


TWINS = {
  "seen_by_none": (_seen_by_none, "table", "best_first", "penalties"),
  "served_by_token": (_served_by_token, "table", "first_of", "t0.7"),
  "shares_what_is_drawn": (_shares_what_is_drawn, "table", "merge", "t0.7"),
  "law_of_another_root": (_law_of_another_root, "table", "merge_iid", "t0.7"),
  "inner_rule_is_sharper": (_inner_rule_is_sharper, "table", "cascade", "t0.7"),
}


@pytest.mark.parametrize("twin", TWINS)
def test_a_fault_of_a_drafter_is_seen(twin, monkeypatch):
  plant, kind, name, setting = TWINS[twin]
  plant(monkeypatch)
  assert distances(kind, name, [setting])[setting] > 1e-3
