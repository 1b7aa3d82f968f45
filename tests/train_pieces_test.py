"""A loss in pieces is the loss of the whole, and so are its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import fakes, train_rig
from train.pieces import sum_pieces

B, T = 2, 12


def _judge(params, learned, given, frozen):
  out = jnp.tanh(learned["x"] @ params["w"]) * given["weights"][..., None]
  away = out - frozen["c"][None, None] * jnp.sin(given["ids"])[..., None]
  away = jnp.where(given["weights"][..., None] != 0, away, 0.0)
  return {"loss": (away**2).sum(), "tokens": given["weights"].sum()}


def _parts():
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  weights = jnp.asarray(rng.random((B, T)) < 0.4, jnp.float32)
  weights = weights.at[:, :4].set(0)  # a piece with nothing in it
  return {
    "params": {"w": draw(3, 5)},
    "learned": {"x": draw(B, T, 3)},
    "given": {"weights": weights, "ids": jnp.arange(B * T).reshape(B, T)},
    "frozen": {"c": draw(5)},
  }


def _run(parts, size, compact, judge=_judge):
  def loss(params, learned):
    weights = parts["given"]["weights"]
    more = {**parts, "params": params, "learned": learned}
    return sum_pieces(
      judge, size, counted=weights != 0, compact=compact, **more
    )

  return jax.value_and_grad(
    lambda *x: (3 * loss(*x)[0], loss(*x)[1]), argnums=(0, 1), has_aux=True
  )(parts["params"], parts["learned"])


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("size", [1, 4, 12])
def test_pieces_add_up_to_the_whole(size, compact):
  parts = _parts()
  whole = _run(parts, 0, False)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5),
    _run(parts, size, compact),
    whole,
  )
  assert float(whole[0][1]["tokens"]) == parts["given"]["weights"].sum()


@pytest.mark.parametrize("compact", [False, True])
def test_without_a_gradient_it_is_the_same_sum(compact):
  parts = _parts()
  counted = parts["given"]["weights"] != 0
  found = sum_pieces(_judge, 4, counted=counted, compact=compact, **parts)
  expected = sum_pieces(_judge, 0, counted=counted, **parts)
  np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)


def test_pieces_without_a_counted_position_are_skipped():
  # The first of three pieces holds none as it is, two of six in order.
  parts, seen = _parts(), []

  def judge(*parts):
    jax.debug.callback(lambda: seen.append(1))
    return _judge(*parts)

  jax.block_until_ready(_run(parts, 4, False, judge)[0])
  jax.effects_barrier()
  plain = len(seen)
  seen.clear()
  counted = int((parts["given"]["weights"] != 0).sum())
  jax.block_until_ready(_run(parts, 1, True, judge)[0])
  jax.effects_barrier()
  assert plain == 2 * 2  # the loss is asked for twice in `_run`
  assert len(seen) == 2 * -(-counted // B)


@pytest.mark.parametrize("name", sorted(train_rig.RECIPES))
def test_every_recipes_loss_is_the_same_in_pieces(name):
  """Values, sums and gradients, positions in order or moved to the front."""
  target = train_rig.target()
  rows = train_rig.rows(3)
  rows[1]["weights"][:] = 0  # an answer that was cut off
  batch = train_rig.stack(rows)

  def run(**pieces):
    made = train_rig.RECIPES[name](target, pieces=pieces)
    start = made.init(jax.random.key(0))
    loss = jax.value_and_grad(made.loss, has_aux=True)
    return fakes.jit(loss)(start, made.frozen, batch, None)

  whole = run(chunk=0)
  for pieces in ({"chunk": 4}, {"chunk": 3, "compact": True}):
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4),
      run(**pieces),
      whole,
    )


@pytest.mark.parametrize("size", [0, 4])
def test_gradients_flow_through_what_is_learned_alone(size):
  """Not through what is given or frozen, however it was made."""
  parts = _parts()

  def loss(c):
    frozen = {"c": c}
    counted = parts["given"]["weights"] != 0
    return sum_pieces(
      _judge, size, counted=counted, **{**parts, "frozen": frozen}
    )[0]

  assert float(jnp.abs(jax.grad(loss)(parts["frozen"]["c"])).sum()) == 0


def test_a_piece_must_divide_the_row():
  parts = _parts()
  with pytest.raises(ValueError, match="5 positions do not divide 12"):
    _run(parts, 5, False)
