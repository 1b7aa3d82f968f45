"""Losses of heads beside numpy, and what they learn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import medusa as heads_lib
from spec_jax.cache import LONG
from tests import fakes, train_rig
from tests.eagle_test import numpy_layer
from train import data, eagle, loop, losses, medusa, medusa_joint
from train.records import Example

V = 13


def example(ids, prompt):
  ids = np.asarray(ids, np.int32)
  return Example(ids, np.arange(len(ids)) >= prompt)


def batch_of(examples, length=12):
  rows = data.pack(examples, length)
  return {k: jnp.asarray(v) for k, v in train_rig.stack(rows).items()}


def log_softmax(x):
  x = x - x.max(-1, keepdims=True)
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


TEXTS = [example([5, 1, 4, 7, 2, 9, 3], 3), example([8, 2, 6, 1], 1)]


def test_a_medusa_head_learns_the_tokens_of_answers_alone():
  """G1: prompt of 3, answer of 2: head 1 is told of both, from inside it."""
  batch = batch_of([example([1, 2, 3, 4, 5], 3), example([6, 7], 1)])
  for k, expected in (
    (0, [(2, 4), (3, 5), (5, 7)]),
    (1, [(1, 4), (2, 5)]),
    (2, [(0, 4), (1, 5)]),
    (3, [(0, 5)]),
  ):
    labels, weights = medusa.shifted(batch, k)
    found = [(i, int(labels[0, i])) for i in np.flatnonzero(weights[0])]
    assert found == expected, k


def test_the_medusa_loss_is_the_sum_over_heads():
  """lambda^k times the cross-entropy of head k, by numpy."""
  target = fakes.tiny(V, windows=(None, None))
  heads, own = fakes.heads_of("medusa", target)
  batch = batch_of(TEXTS)
  loss = medusa.make_loss(target[0], heads, decay=0.7, chunk=4)
  frozen = {"target": target[1], "words": {}}
  total, sums = fakes.jit(loss)(own, frozen, batch, None)
  expected, right = 0.0, 0
  for text in TEXTS:
    tokens = jnp.asarray(text.ids)[None]
    hidden = (
      target[0]
      .apply(
        target[1], tokens, jnp.arange(tokens.shape[1])[None], None, None, None
      )
      .hidden[:, :, 0]
    )
    states = heads.apply(own, hidden)
    logits = heads_lib.logits_of(heads, own, target[0], target[1], states)
    logs = log_softmax(np.asarray(logits, np.float64))[0]
    for k in range(1, 4):
      for i in range(len(text.ids) - k - 1):
        if text.answer[i + k + 1]:
          label = text.ids[i + k + 1]
          expected -= 0.7**k * logs[i, k - 1, label]
          right += k == 1 and logs[i, 0].argmax() == label
  np.testing.assert_allclose(total, expected, rtol=1e-5)
  assert sums["acceptance"] == right


def test_the_joint_loss_is_its_three_parts():
  """Self-distillation, the next token, and the heads on the moved target."""
  target = model, params = fakes.tiny(V, windows=(None, None))
  heads, own = fakes.heads_of("medusa", target)
  batch, frozen = batch_of(TEXTS), {"target": params, "words": {}}
  moved = {n: params[n] for n in ("layers", "final_norm")}
  moved = fakes.noisy(moved, size=0.1)
  now = {**params, **moved}
  run = lambda p: (
    model.apply(
      p,
      batch["tokens"],
      batch["positions"],
      segment_ids=batch["segment_ids"],
    ).logits
  )
  weights = batch["weights"]
  law = losses.divergence("forward_kl", run(params), run(now), weights)[0].sum()
  token = losses.cross_entropy(run(now), batch["labels"], weights).sum()
  alone = medusa.make_loss(model, heads, decay=0.8)
  of_heads = alone(own, {"target": now, "words": {}}, batch, None)[0]
  loss = medusa_joint.make_loss(
    model,
    heads,
    decay=0.8,
    law_weight=2.0,
    token_weight=0.5,
    heads_weight=0.3,
    chunk=4,
  )
  both = {"heads": own["heads"], "target": moved}
  total, sums = fakes.jit(loss)(both, frozen, batch, None)
  expected = 2 * law + 0.5 * token + 0.3 * of_heads
  np.testing.assert_allclose(total, expected, rtol=1e-5)
  assert sums["tokens"] == weights.sum()


def test_parts_learn_at_their_own_rates():
  """The target stands still while the heads learn alone, four times as fast."""
  recipe = train_rig.joint_recipe(train_rig.target())
  batch = {
    k: jnp.asarray(v)[None]
    for k, v in train_rig.stack(train_rig.rows(2)).items()
  }
  moved = {}
  for name, rates in (
    ("plain", None),
    ("own", lambda step: {"heads": 4.0, "target": 0.0}),
  ):
    optimizer, schedule = loop.Optimizer(1e-3, warmup=1, clip=0.0).build(10)
    state = loop.make_state(recipe, optimizer, 0)
    step = jax.jit(loop.make_step(recipe.loss, optimizer, schedule, 1, rates))
    after, _ = step(state, recipe.frozen, batch)
    moved[name] = jax.tree.map(lambda a, b: a - b, after.params, state.params)
  assert not any(x.any() for x in jax.tree.leaves(moved["own"]["target"]))
  assert any(x.any() for x in jax.tree.leaves(moved["plain"]["target"]))
  for one, other in zip(
    jax.tree.leaves(moved["own"]["heads"]),
    jax.tree.leaves(moved["plain"]["heads"]),
    strict=True,
  ):
    np.testing.assert_allclose(one, 4 * other, rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize("ids", [None, (0, 1, 2, 4, 5, 7, 9)])
@pytest.mark.parametrize("version", [1, 3])
def test_the_eagle_loss_is_that_of_chains_read_from_scratch(version, ids):
  """Each place and pass alone: the text's pairs, then its own features.

  So training sees what drafting makes, step by step (G6: tokens are the
  data's, also where the head would have said another).
  """
  target = fakes.tiny(V, windows=(None, None))
  heads, own = fakes.heads_of("eagle", target, version=version, ids=ids)
  model, params = target
  batch, S = batch_of(TEXTS), 3 if version == 3 else 1
  loss = eagle.make_loss(
    eagle.shown(model, heads), heads, steps=S, step_decay=0.6, chunk=4
  )
  words = {n: x for n, x in own.items() if n in ("head", "ids")}
  trained = {n: x for n, x in own.items() if n not in words}
  total, sums = fakes.jit(loss)(
    trained, {"target": params, "words": words}, batch, None
  )
  expected, tokens = 0.0, 0
  known = np.arange(V) if ids is None else np.asarray(ids)
  embedding = np.asarray(params["embed"], np.float64)
  for text in TEXTS:
    n = len(text.ids)
    args = jnp.asarray(text.ids)[None], jnp.arange(n)[None], None, None, None
    out = eagle.shown(model, heads).apply(params, *args)
    final = np.asarray(out.hidden, np.float64)[0, :, -1]
    features = np.asarray(out.hidden, np.float64)[0]
    features = features[:, : max(1, len(heads.config.taps))].reshape(n, -1)
    if version == 3:
      features = features @ np.asarray(own["fc"]["w"], np.float64)
    teacher = np.asarray(out.logits, np.float64)[0]
    for i in range(n - 1):
      embeds, chain = embedding[text.ids[1 : i + 2]], features[: i + 1]
      for s in range(S):
        if i + s + 2 > n - 1:
          break
        mine, states = numpy_layer(heads.config, own, embeds, chain)
        if text.answer[i + s + 2]:
          law = teacher[i + s + 1]
          q = states[-1] @ np.asarray(
            params["head"] if ids is None else own["head"], np.float64
          )
          log_p, log_q = log_softmax(law[known]), log_softmax(q)
          value = (np.exp(log_p) * (log_p - log_q)).sum()
          value *= law.argmax() in known
          if version == 1:
            away = np.abs(states[-1] - final[i + 1])
            value = 0.1 * value
            value += np.where(away < 1, away**2 / 2, away - 0.5).mean()
          expected += 0.6**s * value
          tokens += s == 0
        embeds = np.concatenate([embeds, embedding[text.ids[i + s + 2]][None]])
        chain = np.concatenate([chain, mine[-1:]])
  np.testing.assert_allclose(total, expected, rtol=1e-4)
  assert sums["tokens"] == tokens


def test_noise_is_as_large_as_asked_and_of_features_alone():
  """Version 1: the same key the same noise, none the loss without."""
  target = fakes.tiny(V, windows=(None, None))
  heads, own = fakes.heads_of("eagle", target, version=1)
  batch, frozen = batch_of(TEXTS), {"target": target[1], "words": {}}

  def value(noise, seed):
    loss = eagle.make_loss(target[0], heads, noise=noise)
    return float(loss(own, frozen, batch, jax.random.key(seed))[0])

  assert value(0.1, 0) == value(0.1, 0) != value(0.1, 1)
  assert value(0.0, 0) == value(0.0, 1)
  assert abs(value(1e-4, 0) - value(0.0, 0)) < abs(
    value(0.1, 0) - value(0.0, 0)
  )


@pytest.mark.parametrize(
  "name", [n for n in train_rig.RECIPES if n != "distill"]
)
def test_gradients_are_finite_differences(name):
  """Along a random direction, in float32: 1 % of the slope."""
  recipe = train_rig.RECIPES[name](train_rig.target())
  batch = {
    k: jnp.asarray(v) for k, v in train_rig.stack(train_rig.rows(2)).items()
  }
  params = fakes.noisy(recipe.init(None), size=0.1)
  key = jax.random.key(0)
  value = fakes.jit(lambda p: recipe.loss(p, recipe.frozen, batch, key)[0])
  slope = fakes.jit(
    jax.grad(lambda p: recipe.loss(p, recipe.frozen, batch, key)[0])
  )(params)
  rng = np.random.default_rng(0)
  way = jax.tree.map(
    lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), params
  )
  step = 1e-3

  def at(size):
    return float(value(jax.tree.map(lambda x, w: x + size * w, params, way)))

  expected = sum(
    float((g * w).sum())
    for g, w in zip(jax.tree.leaves(slope), jax.tree.leaves(way), strict=True)
  )
  found = (at(step) - at(-step)) / (2 * step)
  np.testing.assert_allclose(found, expected, rtol=2e-2, atol=2e-2)


def test_padding_and_neighbours_change_nothing():
  """16 places or 64, alone or packed with another: the same loss."""
  for name in ("medusa", "eagle_3"):
    recipe = train_rig.RECIPES[name](train_rig.target())
    params = fakes.noisy(recipe.init(None), size=0.1)

    def value(examples, length, recipe=recipe, params=params):
      batch = batch_of(examples, length)
      return float(recipe.loss(params, recipe.frozen, batch, None)[0])

    short, long = value(TEXTS[:1], 16), value(TEXTS[:1], 64)
    np.testing.assert_allclose(short, long, rtol=1e-5)
    both = value(TEXTS, 16)
    np.testing.assert_allclose(both, short + value(TEXTS[1:], 16), rtol=1e-5)


def test_a_cycle_teaches_the_right_offsets():
  """Texts 0 1 2 ... 12 0 1 ...: after `t` head `k` says `t + k + 1`."""
  recipe = train_rig.heads_recipe("medusa", train_rig.target())
  examples = [example((np.arange(12) + start) % V, 1) for start in range(V)]
  batch = {k: np.asarray(v) for k, v in batch_of(examples).items()}
  steps = 150
  optimizer, schedule = loop.Optimizer(3e-2, warmup=5).build(steps)
  state = loop.make_state(recipe, optimizer, 0)
  step = jax.jit(loop.make_step(recipe.loss, optimizer, schedule))
  parts = {k: jnp.asarray(v)[None] for k, v in batch.items()}
  for _ in range(steps):
    state, metrics = step(state, recipe.frozen, parts)
  for k in (1, 2, 3):
    assert metrics[f"accuracy_{k}"] > 0.6, k
  target = train_rig.target()
  heads, _ = fakes.heads_of("medusa", target)
  rates = medusa.measure_accuracies(
    target[0], heads, state.params, target[1], data.pack(examples, 12)
  )
  assert [row[0] > 0.85 for row in rates] == [True] * 3
  assert all(abs(sum(row) - 1) < 0.06 for row in rates)


@pytest.mark.parametrize("passes", [1, 3])
def test_chains_of_a_long_text_are_attended_as_those_of_a_short_one(
  passes, monkeypatch
):
  """By row and head on CPU: values and gradients."""
  rng = np.random.default_rng(0)
  B, T, H, G, E = 2, LONG, 4, 2, 3
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  q, out = draw(B, T, H, E), draw(B, T, H * E)
  keys = [draw(B, T, G, E) for _ in range(passes)]
  values = [draw(B, T, G, E) for _ in range(passes)]
  visible = jnp.asarray(rng.random((B, T, T)) < 0.5)

  def run():
    def total(q, keys, values):
      found = eagle.attend_chains(q, keys, values, visible, 0.5)
      return (found * out).sum()

    return jax.jit(jax.value_and_grad(total, (0, 1, 2)))(q, keys, values)

  ours = run()
  monkeypatch.setattr(eagle, "LONG", T + 1)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4),
    ours,
    run(),
  )
