"""A checkpoint whose files were damaged is the right one, or refused."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.launch import UserError
from train.checkpoint import Checkpoints


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """Returns the folder of two checkpoints and the state of the second."""
  folder = tmp_path_factory.mktemp("run")
  state = {"w": jnp.arange(6.0).reshape(2, 3), "step": jnp.int32(1)}
  checkpoints = Checkpoints(folder)
  for step in (1, 2):
    state = jax.tree.map(lambda x: x + 1, state)
    checkpoints.save(step, state, {"step": step})
  checkpoints.close()
  return folder, state


def _cut(path):
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


# Where a read fails orbax leaves others of its coroutines unawaited.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", ["cut", "emptied", "gone"])
def test_a_damaged_file_is_no_traceback(tmp_path, saved, damage):
  """Each file in turn; where one matters, its step's folder is named."""
  damages = {
    "cut": _cut,
    "emptied": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
  }
  folder, state = saved
  files = [p for p in (folder / "2").rglob("*") if p.is_file()]
  refused = 0
  for i, path in enumerate(files):
    copy = tmp_path / str(i)
    shutil.copytree(folder, copy)
    damages[damage](copy / path.relative_to(folder))
    checkpoints = Checkpoints(copy)
    try:
      found, extra = checkpoints.restore(state)
    except UserError as error:
      refused += 1
      assert "\n" not in str(error) and str(copy / "2") in str(error)
    else:
      # A file that nothing was read from, or the checkpoint before.
      step = extra["step"]
      wanted = np.asarray(state["w"]) - (2 - step)
      np.testing.assert_array_equal(found["w"], wanted)
    checkpoints.close()
  assert refused


def test_without_the_damaged_step_the_one_before_serves(tmp_path, saved):
  folder, state = saved
  shutil.copytree(folder, tmp_path / "run")
  shutil.rmtree(tmp_path / "run" / "2")
  checkpoints = Checkpoints(tmp_path / "run")
  found, extra = checkpoints.restore(state)
  checkpoints.close()
  assert extra == {"step": 1}
  np.testing.assert_array_equal(found["w"], np.asarray(state["w"]) - 1)
