"""Trees as arrays of rows, and what does not go together."""

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import drafters
from spec_jax.drafting import check_fit, dynamic_tree
from tests import fakes


def test_rows_of_a_dynamic_tree_equal_static_ones():
  rng = np.random.default_rng(0)
  trees = [fakes.random_tree(rng, 9) for _ in range(6)]
  parents = jnp.asarray(np.stack([t.parents for t in trees]))
  found = dynamic_tree(parents)
  for row, tree in enumerate(trees):
    np.testing.assert_array_equal(found["parents"][row], tree.parents)
    np.testing.assert_array_equal(found["depths"][row], tree.depths)
    np.testing.assert_array_equal(found["visible"][row], tree.visible)


def test_what_does_not_fit_is_refused():
  plain = drafters.build("none", fakes.tiny()[0], None, slots=8)
  check_fit("x", plain, sampled=True, vocabulary=None)
  with pytest.raises(ValueError, match="another tokenizer"):
    check_fit(
      "x", plain._replace(vocabulary="a"), sampled=False, vocabulary="b"
    )
  check_fit("x", plain._replace(vocabulary="a"), sampled=False, vocabulary="a")
  with pytest.raises(ValueError, match="greedy decoding only"):
    check_fit(
      "x", plain._replace(greedy_only=True), sampled=True, vocabulary=""
    )
