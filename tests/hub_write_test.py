"""A model that is written is the model that is read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import tiny_model

import spec_jax
from spec_jax import hub, hub_write
from spec_jax.hub import Loaded
from tests import families_test


@pytest.mark.parametrize("name", families_test._NAMES)
def test_every_family_comes_back_bit_for_bit(name, tmp_path):
  """Tied and untied, biases, joined matrices, stored either way round."""
  _, hf, _, config = families_test._load(name)
  model, params, _ = families_test._model(name)
  loaded = Loaded(model, None, None, hf, name, {}, (7,), ())
  hub_write.write_model(tmp_path, loaded, params)
  again = hub.load(tmp_path, tokenizer=False, cpu_kernel="off")
  assert again.model.config == config
  assert 7 in again.stop_ids
  jax.tree.map(np.testing.assert_array_equal, again.params, params)


def test_a_folder_with_its_tokenizer_says_the_same(tmp_path):
  """Text in, text out; in bfloat16 the rounded weights."""
  loaded = spec_jax.load(tiny_model(tmp_path / "model"), cpu_kernel="off")
  hub_write.write_model(tmp_path / "copy", loaded, loaded.params)
  again = spec_jax.load(tmp_path / "copy", cpu_kernel="off")
  assert again.hashes["tokenizer"] == loaded.hashes["tokenizer"]
  settings = spec_jax.Settings(max_new_tokens=6)
  a, b = (
    spec_jax.generate(x, ["abc def"], settings=settings).texts
    for x in (loaded, again)
  )
  assert a == b
  half = hub_write.write_model(
    tmp_path / "half", loaded, loaded.params, dtype=jnp.bfloat16
  )
  whole = tmp_path / "copy" / "model.safetensors"
  assert half.stat().st_size < 0.6 * whole.stat().st_size
  rounded = spec_jax.load(tmp_path / "half", cpu_kernel="off").params
  jax.tree.map(
    lambda x, y: np.testing.assert_array_equal(
      x, np.asarray(y, jnp.bfloat16).astype(np.float32)
    ),
    rounded,
    loaded.params,
  )
  assert not list((tmp_path / "copy").glob("*.tmp"))
