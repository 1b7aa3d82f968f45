"""Rotary positions against hand-made tables."""

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import rope

_LLAMA3 = {
  "rope_theta": 100.0,
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_llama3_frequencies(key):
  """Width 8 gives the published table under either name of the type."""
  made = rope.make_rope(8, {key: "llama3", **_LLAMA3})
  np.testing.assert_allclose(
    made.frequencies, [1, 0.2443846, 0.01304226, 0.00395285], rtol=1e-6
  )
  assert made.factor == 1.0


def test_linear_and_dynamic_frequencies():
  """Linear scaling divides all; dynamic changes none within its length."""
  plain = 100.0 ** -np.array([0, 0.25, 0.5, 0.75])
  for kind, expected in (("linear", plain / 8), ("dynamic", plain)):
    made = rope.make_rope(
      8, {"rope_type": kind, "rope_theta": 100.0, "factor": 8.0}
    )
    np.testing.assert_allclose(made.frequencies, expected, rtol=1e-6)


def test_yarn_keeps_fast_turns_and_slows_slow_ones():
  """Ramp by hand: width 8, theta 100, length 64, factor 8.

  Turns in 64 tokens are 64 f / 2 pi. The dimensions that turn 4 times and
  once: 8 ln(64 / (2 pi turns)) / (2 ln 100) = 0.8120, 2.0161, to 0 and 3. So
  the ramp is 0, 1/3, 2/3, 1 and a frequency f becomes f (1 - ramp 7/8).
  """
  fields = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4,
    "beta_slow": 1,
  }
  made = rope.make_rope(8, fields)
  ramp = np.array([0, 1 / 3, 2 / 3, 1])
  plain = 100.0 ** -np.array([0, 0.25, 0.5, 0.75])
  np.testing.assert_allclose(
    made.frequencies, plain * (1 - ramp * 7 / 8), rtol=1e-6
  )
  # 0.1 ln 8 + 1
  np.testing.assert_allclose(made.factor, 1.2079442, rtol=1e-6)
  given = rope.make_rope(8, {**fields, "attention_factor": 0.5})
  assert given.factor == 0.5
  both = rope.make_rope(8, {**fields, "mscale": 2.0, "mscale_all_dim": 1.0})
  np.testing.assert_allclose(both.factor, 1.4158883 / 1.2079442, rtol=1e-6)


def test_rotation_turns_pairs_half_a_head_apart():
  """A quarter turn of the first pair moves entry 0 to entry 2."""
  x = jnp.array([1.0, 0.0, 0.0, 0.0]).reshape(1, 1, 1, 4)
  made = rope.Rope((float(np.pi / 2), 0.0), factor=3.0)
  angles = rope.rope_angles(made, jnp.array([[1]]))
  np.testing.assert_allclose(
    rope.rotate(x, angles).ravel(), [0, 0, 3, 0], atol=1e-6
  )


@pytest.mark.parametrize(
  ("change", "match"),
  [
    ({"rope_theta": None}, "rope_theta"),
    ({"factor": None}, "factor"),
    ({"original_max_position_embeddings": None}, "original_max"),
    ({"mscale": 1.0}, "mscale"),
    ({"rope_type": "longrope"}, "longrope"),
    ({"type": "yarn"}, "twice"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
  ],
)
def test_what_is_missing_or_unknown_is_refused(change, match):
  """Nothing is guessed and nothing ignored."""
  with pytest.raises(ValueError, match=match):
    rope.make_rope(8, {"rope_type": "llama3", **_LLAMA3, **change})


def test_odd_width_is_refused():
  """Rotation needs pairs."""
  with pytest.raises(ValueError, match="7"):
    rope.make_rope(7, {"rope_theta": 100.0})
