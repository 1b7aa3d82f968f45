"""The target's states on disk: the same as anew, grown by rows, found again."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.launch import UserError
from experiments.results import lock_file
from tests import fakes, train_rig
from train import data, eagle, features
from train.recipe import FIELDS

TARGET = train_rig.target()
TAPS = (0, 2, -1)


def _keep(folder, rows, taps=TAPS, **identity):
  model, params = TARGET
  shown = model.tap(taps)
  return features.keep(folder, shown, taps, params, rows, identity)


def _anew(rows, taps=TAPS):
  model, params = TARGET
  found = features.read(model.tap(taps), params, train_rig.stack(rows))
  return np.asarray(found.astype(jnp.bfloat16))


def _same(some, others):
  # Batches of another size round otherwise, and that to 8 bits.
  some, others = (np.asarray(x, np.float32) for x in (some, others))
  np.testing.assert_allclose(some, others, rtol=1 / 128, atol=1e-5)


def test_kept_states_are_those_of_the_target_rounded(tmp_path):
  rows = train_rig.rows(6)  # no multiple of what is read together
  kept = _keep(tmp_path, rows)
  assert len(kept) == 6
  _same([kept[i] for i in range(6)], _anew(rows))


def test_a_killed_writing_goes_on_and_a_tap_is_shared(tmp_path, monkeypatch):
  rows = train_rig.rows(9)
  whole = _anew(rows)
  _keep(tmp_path, rows)
  (place,) = tmp_path.iterdir()
  size = rows[0]["tokens"].size * TARGET[0].config.width * 2
  with open(place / "tap_0.bfloat16", "r+b") as file:
    file.truncate(5 * size + 3)  # killed within the sixth row
  seen = []
  read = features.read
  monkeypatch.setattr(
    features,
    "read",
    lambda model, params, batch: (
      seen.append(batch["tokens"].shape) or read(model, params, batch)
    ),
  )
  kept = _keep(tmp_path, rows)
  assert seen  # and what was whole stays as it was
  _same([kept[i] for i in range(9)], whole)
  seen.clear()
  last = _keep(tmp_path, rows, taps=(-1,))
  assert not seen
  _same(last[7], whole[7][:, 2:])


def test_a_tap_may_be_asked_for_twice_and_what_is_there_needs_no_lock(tmp_path):
  rows = train_rig.rows(6)
  kept = _keep(tmp_path, rows, taps=(1, 1, -1))
  assert len(kept) == 6 and kept[0].shape[1] == 3
  _same([kept[i] for i in range(6)], _anew(rows, (1, 1, -1)))
  (place,) = tmp_path.iterdir()
  with open(place / "lock", "a") as held:
    lock_file(held, place)
    _same(_keep(tmp_path, rows, taps=(1,))[5], _anew(rows, (1,))[5])


def test_other_rows_or_another_target_have_a_folder_of_their_own(tmp_path):
  rows = train_rig.rows(4)
  _keep(tmp_path, rows, weights="a")
  _keep(tmp_path, rows, weights="b")
  moved = [{**row, "segment_ids": row["segment_ids"] * 2} for row in rows]
  _keep(tmp_path, moved, weights="a")
  assert len(list(tmp_path.iterdir())) == 3


def test_what_cannot_be_written_is_one_line(tmp_path, monkeypatch):
  rows = train_rig.rows(4)
  file = tmp_path / "file"
  file.write_text("")
  with pytest.raises(UserError, match=r"cannot write .*file"):
    _keep(file, rows)
  usage = shutil.disk_usage(tmp_path)._replace(free=10)
  with monkeypatch.context() as patched:
    patched.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match="the states of 4 rows take"):
      _keep(tmp_path / "full", rows)
  _keep(tmp_path / "held", rows)
  (place,) = (tmp_path / "held").iterdir()
  (place / "tap_0.bfloat16").unlink()
  with open(place / "lock", "a") as held:
    lock_file(held, place)
    with pytest.raises(UserError, match="another run is writing"):
      _keep(tmp_path / "held", rows)


@pytest.mark.parametrize("name", sorted(train_rig.RECIPES))
def test_a_loss_that_is_brought_states_is_the_loss(name):
  made = train_rig.RECIPES[name](TARGET)
  batch = train_rig.stack(train_rig.rows(3))
  model, params = TARGET
  if name.startswith("eagle") and name != "eagle_1":
    heads, _ = fakes.heads_of("eagle", TARGET, version=3)
    model = eagle.shown(model, heads)
  brought = {**batch, features.FIELD: features.read(model, params, batch)}
  start = made.init(jax.random.key(0))
  run = fakes.jit(
    lambda *x: jax.value_and_grad(made.loss, has_aux=True)(*x, None)
  )
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4),
    run(start, made.frozen, brought),
    run(start, made.frozen, batch),
  )


def test_batches_bring_what_belongs_to_their_rows():
  rows = train_rig.rows(7)
  plain, wide = data.Batches(rows, 3, 1), data.Batches(rows, 3, 1)
  wide.bring(features.FIELD, [row["tokens"] * 2 for row in rows])
  for _ in range(5):
    one, other = next(plain), next(wide)
    assert set(other) == {*FIELDS, features.FIELD}
    np.testing.assert_array_equal(one["tokens"], other["tokens"])
    np.testing.assert_array_equal(one["tokens"] * 2, other[features.FIELD])
  wide.restore(plain.position())
  np.testing.assert_array_equal(next(plain)["tokens"], next(wide)["tokens"])
