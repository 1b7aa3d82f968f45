"""Design D8: which random stream each number of a decode comes from."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import sampling
from spec_jax.settings import Settings, in_use
from tests import fakes

V, SLOTS = 16, 32


def record(draw_noise, nodes, depth):
  """Makes a function of lengths `[B]` that says where each number came from.

  Keys are replaced by paths: (row, purpose, count) instead of a uniform.
  """

  def fold_in(path, x):
    return jnp.concatenate([path, jnp.reshape(x, (1,))])

  def uniform(path, shape):
    return jnp.broadcast_to(path, (*shape, 3))

  @jax.jit
  def run(lengths):
    rows = jnp.arange(len(lengths), dtype=jnp.int32)[:, None]
    with (
      mock.patch.object(jax.random, "fold_in", fold_in),
      mock.patch.object(jax.random, "uniform", uniform),
    ):
      return draw_noise(rows, lengths, nodes, depth)

  return run


def by_position(keys, length, nodes, depth):
  """The planted fault: acceptance noise belongs to a position."""
  good = sampling.draw_noise(keys, length, nodes, depth)

  def row(key, length):
    def one(position):
      folded = jax.random.fold_in(jax.random.fold_in(key, 1), position)
      return jax.random.uniform(folded, ())

    return jax.vmap(one)(length + jnp.arange(nodes))

  return good.replace(accept=jax.vmap(row)(keys, length))


def test_no_random_stream_is_used_twice():
  """D8: draft, acceptance and residual streams are drawn once, plain used once.

  Rows of several lengths and settings over a whole decode; noise that belongs
  to a position is seen to be drawn twice.
  """
  settings = [
    Settings(temperature=t, max_new_tokens=25) for t in (1, 1.5, 0, 0.7)
  ]
  model, params = fakes.tables(V, period=5)
  rig = fakes.Rig(
    (model, params),
    "vanilla",
    draft=(model, fakes.noisy(params, size=0.5)),
    options={"tree": (2, 1)},
    slots=SLOTS,
    use=in_use(settings),
    trace=True,
  )
  depth = rig.drafter.depth
  recorders = [
    record(function, rig.drafter.num_nodes, depth)
    for function in (sampling.draw_noise, by_position)
  ]
  drawn, plain, refused = ([], []), [], 0
  state = rig.start([[1], [2, 3, 4], [5], [6, 7]], settings)
  while not state.done.all():
    going = np.flatnonzero(~np.asarray(state.done))
    for recorder, found in zip(recorders, drawn, strict=True):
      noise = jax.tree.map(np.asarray, recorder(state.length))
      for x in (noise.draft, noise.accept, noise.residual):
        for row in going:  # One stream may fill an array; many may, too.
          found += {tuple(p) for p in x[row].reshape(-1, 3).tolist()}
    noise = jax.tree.map(np.asarray, recorders[0](state.length))
    state, info = rig.step(rig.params, state)
    used = np.asarray(info.verdict.plain)
    used = used & (np.arange(depth + 1) < np.asarray(info.num_tokens)[:, None])
    plain += [
      tuple(noise.plain[at].tolist()) for at in map(tuple, np.argwhere(used))
    ]
    refused += int((info.num_accepted < depth).sum())
  assert refused > 20 and len(plain) > 20
  every = drawn[0] + plain
  assert len(every) == len(set(every))
  assert len(drawn[1]) > len(set(drawn[1]))


def test_a_step_draws_nothing_but_its_noise():
  """Other keys with the same noise give the same tokens."""
  settings = Settings(temperature=30, max_new_tokens=9)
  rig = fakes.Rig(fakes.tables(V), slots=SLOTS, use=in_use([settings]))
  state = rig.start([[0]] * 2, settings)
  noise = fakes.noise(rig.drafter, 2, plain=0.3)
  other = state.replace(keys=jax.random.split(jax.random.key(9), 2))
  a, b = (rig.step(rig.params, s, noise)[0] for s in (state, other))
  assert fakes.same(a.replace(keys=()), b.replace(keys=()))


def test_a_seed_gives_its_own_text_and_steps_differ():
  """M7: 30 uniform draws are neither all equal nor those of another seed."""
  model, _ = fakes.tables(V, period=1)
  settings = Settings(temperature=1, max_new_tokens=30)
  params = {"table": jnp.zeros((1, V, V))}
  rig = fakes.Rig((model, params), slots=SLOTS, use=in_use([settings]))
  a, b, c = rig.texts([[0]] * 3, settings, seeds=[1, 2, 1])
  assert a == c != b
  assert len(set(a)) > 5
