"""How rows begin and move: chunks of a prompt, taking and putting rows."""

import jax.numpy as jnp
import numpy as np

from spec_jax import rows as rows_lib
from spec_jax.settings import Settings
from tests import fakes

V, SLOTS = 13, 64


def test_a_prompt_read_in_any_pieces_leaves_the_same_caches():
  """L12: 20, 11 and 1 tokens in chunks of 1, 3, 16 and 32."""
  model, params = fakes.tiny(V)
  prompts, states = [[4, 1, 2, 6] * 5, [7, 3, 1] * 3 + [2, 2], [5]], []
  for chunk in (32, 1, 3, 16):
    rig = fakes.Rig(
      (model, params),
      "vanilla",
      draft=(model, fakes.noisy(params)),
      slots=SLOTS,
      chunk=chunk,
      use=fakes.GREEDY,
    )
    states.append(rig.start(prompts, Settings()))
  whole, *others = states
  assert whole.target.length.tolist() == [19, 10, 0]
  for state in others:
    for name in ("target", "draft"):
      mine, other = getattr(whole, name), getattr(state, name)
      for a, b in zip(fakes.held(mine), fakes.held(other), strict=True):
        assert a.keys() == b.keys()
        for at in a:
          np.testing.assert_allclose(a[at], b[at], atol=1e-5)


def test_rows_are_taken_and_put_on_the_axis_of_rows():
  """A stacked cache has rows second; a row number past the batch is dropped."""
  old = {"a": jnp.zeros((3, 2)), "stacked": jnp.zeros((4, 3, 1, 1, 1))}
  new = {"a": jnp.ones((2, 2)), "stacked": jnp.ones((4, 2, 1, 1, 1))}
  put = rows_lib.put_rows(old, new, jnp.array([2, 3]))
  assert put["a"].tolist() == [[0, 0], [0, 0], [1, 1]]
  assert put["stacked"][:, :, 0, 0, 0].tolist() == [[0, 0, 1]] * 4
  taken = rows_lib.take_rows(put, jnp.array([2, 2]))
  assert fakes.same(taken, new)
