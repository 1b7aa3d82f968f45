"""Medusa heads beside numpy, and the tree they make."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import drafters, medusa
from spec_jax.drafters.medusa import default_tree
from spec_jax.heads import Words
from spec_jax.settings import Settings
from tests import fakes

V, SLOTS = 13, 64
PROMPTS = [[5], [4, 4], [7, 1, 7, 2, 7, 1, 7, 2, 7, 1, 0], [3, 1, 2, 9]]
NEW = Settings(max_new_tokens=20)
IDS = (0, 1, 3, 4, 6, 7, 9, 12)


@functools.cache
def rig_of(ids=None, **options):
  target = fakes.tiny(V, windows=(None, None))
  heads = fakes.heads_of("medusa", target, ids=ids)
  drafter = drafters.build(
    "medusa", target[0], heads[0], slots=SLOTS, **(options or {"tree": (3, 2)})
  )
  return fakes.Rig(
    target,
    drafter,
    draft=heads,
    slots=SLOTS,
    chunk=4,
    use=fakes.GREEDY,
    trace=True,
  )


def guesses(rig, text, k):
  """Returns the tokens by falling logit that head `k` (from 0) guesses."""
  tokens = np.zeros((1, SLOTS), np.int32)
  tokens[0, : len(text)] = text
  hidden = rig.model.apply(
    rig.params["target"],
    jnp.asarray(tokens),
    jnp.arange(SLOTS)[None],
    None,
    None,
    None,
  ).hidden
  # The target has read all but the last token.
  h = np.asarray(hidden, np.float64)[0, len(text) - 2, 0]
  own = rig.params["draft"]
  w = {n: np.asarray(x, np.float64) for n, x in own["heads"][k].items()}
  x = h @ w["w0"] + w["b0"]
  x = h + x / (1 + np.exp(-x))
  if "ids" in own:
    logits = np.full(V, -np.inf)
    logits[np.asarray(own["ids"])] = x @ np.asarray(own["head"])
  else:
    logits = x @ np.asarray(rig.params["target"]["head"], np.float64)
  return np.argsort(-logits, kind="stable")


@pytest.mark.parametrize("ids", [None, IDS])
def test_nodes_are_the_heads_best_guesses(ids):
  """The root's children by head 1 at the state before it; D8 at the end."""
  rig = rig_of(ids)
  state, compared = rig.start(PROMPTS, NEW), 0
  while not state.done.all():
    before = state
    state, info = rig.step(rig.params, state)
    for row, long in enumerate(np.asarray(before.length)):
      good = np.asarray(info.draft.acceptable[row])
      if long < 2:
        assert not good.any()
      if not good.any():
        continue
      text = np.asarray(before.tokens[row, :long]).tolist()
      first, second = guesses(rig, text, 0), guesses(rig, text, 1)
      tokens = np.asarray(info.draft.tokens[row])
      expected = [*first[:3], *(list(second[:2]) * 3)]
      assert tokens[1:][good[1:]].tolist() == [
        t for t, g in zip(expected, good[1:], strict=True) if g
      ]
      compared += good.sum()
  assert compared > 150


def test_a_fresh_head_says_what_the_target_says():
  """W = b = 0: every head repeats the target's own law."""
  target, params = fakes.tiny(V)
  config = medusa.MedusaConfig(
    width=16, num_heads=2, words=Words(V, V), max_length=64
  )
  heads = medusa.build(config)
  own = heads.init(None)
  hidden = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 16)))
  states = heads.apply(own, hidden.astype(jnp.float32))
  logits = medusa.logits_of(heads, own, target, params, states)
  expected = target.unembed(params, hidden.astype(jnp.float32))
  for k in range(2):
    np.testing.assert_allclose(logits[:, :, k], expected, atol=1e-6)


def test_heads_with_matrices_of_their_own():
  """D6: the other layout, an output matrix for each head."""
  target, params = fakes.tiny(V)
  config = medusa.MedusaConfig(
    width=16,
    num_heads=2,
    num_layers=2,
    own_matrices=True,
    words=Words(V, V),
    max_length=64,
  )
  heads = medusa.build(config)
  rng = np.random.default_rng(0)
  shapes = heads.init(None)
  own = {
    "heads": tuple(
      {
        n: jnp.asarray(rng.normal(size=x.shape), jnp.float32)
        for n, x in h.items()
      }
      for h in shapes["heads"]
    )
  }
  hidden = jnp.asarray(rng.normal(size=(1, 2, 16)), jnp.float32)
  logits = medusa.logits_of(
    heads, own, target, params, heads.apply(own, hidden)
  )
  x = np.asarray(hidden, np.float64)
  for i in range(2):
    w, b = (np.asarray(own["heads"][1][f"{n}{i}"]) for n in "wb")
    y = x @ w + b
    x = x + y / (1 + np.exp(-y))
  expected = x @ np.asarray(own["heads"][1]["out"])
  np.testing.assert_allclose(logits[:, :, 1], expected, rtol=2e-4, atol=2e-3)


def test_the_tree_follows_the_accuracies():
  """A head that is always right makes a chain, one that never is, no child."""
  config = medusa.MedusaConfig(
    width=16, num_heads=3, words=Words(V, V), max_length=64
  )
  sure = ((1.0, 0.0), (1.0, 0.0), (1.0, 0.0))
  tree = default_tree(medusa.dataclasses.replace(config, accuracies=sure), 4)
  assert tree.parents.tolist() == [-1, 0, 1, 2]
  flat = ((0.5, 0.4), (0.1, 0.0), (0.0, 0.0))
  tree = default_tree(medusa.dataclasses.replace(config, accuracies=flat), 3)
  assert tree.parents.tolist() == [-1, 0, 0]
  assert default_tree(config, 16).num_nodes == 16


@pytest.mark.parametrize(
  "options,message",
  [
    ({"tree": (2,), "parents": (-1, 0)}, "give tree or parents"),
    ({"num_nodes": 1}, "num_nodes must be at least 2"),
    ({"tree": (1, 1), "num_nodes": 64}, "num_nodes has no use where .* got 64"),
    ({"tree": (1, 1, 1, 1)}, "the tree is 4 deep, there are 3 heads"),
  ],
)
def test_bad_options_are_refused(options, message):
  target = fakes.tiny(V)
  heads, _ = fakes.heads_of("medusa", target)
  with pytest.raises(ValueError, match=message):
    drafters.build("medusa", target[0], heads, slots=SLOTS, **options)


@pytest.mark.parametrize("fields", [(0, 13), (14, 13)])
def test_words_out_of_range_are_refused(fields):
  with pytest.raises(ValueError, match="heads know 1 to 13 words"):
    Words(*fields, own_matrix=True)
