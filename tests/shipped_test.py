"""What ships is whole, small, and made for the built-in model."""

import json

import numpy as np
import pytest

from spec_jax import LoadError, hub, shipped, trained
from spec_jax.builtin import BUILTIN, sha256_of
from spec_jax.safetensors_io import open_safetensors
from tests import fakes

_CARDS = sorted(shipped._ASSETS.glob(f"*/*/{trained.CARD}"))


def test_drafts_ship_for_the_built_in_model():
  assert {path.parent.parent.name for path in _CARDS} == set(BUILTIN)
  assert "eagle" in {path.parent.name for path in _CARDS}


def test_all_of_them_are_at_most_thirty_megabytes():
  files = [x for x in shipped._ASSETS.rglob("*") if x.is_file()]
  assert sum(x.stat().st_size for x in files) <= 30e6


@pytest.mark.parametrize("path", _CARDS, ids=lambda path: path.parent.name)
def test_a_shipped_draft_is_what_its_card_says(path):
  """The file, the target, and how it was made: data, steps, time, device."""
  card = json.loads(path.read_text("utf-8"))
  weights = path.parent / card["weights"]
  assert sha256_of(weights) == card["weights_sha256"]
  assert {x.name for x in path.parent.iterdir()} == {path.name, weights.name}
  target = BUILTIN[path.parent.parent.name]
  assert card["target"]["weights_sha256"] == target.sha256
  assert card["tokens"] > 1e5 and card["steps"] > 0 and card["seconds"] > 0
  assert {"commit", "date", "processor"} <= card["environment"].keys()
  assert card["metrics"]["emitted_per_step"] > 1
  assert card["config"]["dtype_saved"] == "bfloat16"
  tensors = open_safetensors(weights)
  for tensor in tensors.values():
    values = np.asarray(tensor.read(0, tensor.shape[0]), np.float32)
    assert np.isfinite(values).all() and values.any()


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"target": null}'])
def test_a_damaged_card_is_nobodys(tmp_path, monkeypatch, text):
  """The default is then the drafter that needs no draft."""
  (tmp_path / "other" / "eagle").mkdir(parents=True)
  (tmp_path / "other" / "eagle" / trained.CARD).write_text(text)
  monkeypatch.setattr(shipped, "_ASSETS", tmp_path)
  model, params = fakes.tiny()
  loaded = hub.Loaded(model, params, None, {}, "tiny", {}, (), ())
  assert shipped.choose(loaded) == (shipped.ALONE, {}, None)


def test_a_shipped_draft_has_a_name_that_holds_on_any_machine():
  for path in _CARDS:
    name = f"shipped:{path.parent.parent.name}/{path.parent.name}"
    assert shipped.folder_of(name) == path.parent
  assert shipped.folder_of("runs/eagle/best") == "runs/eagle/best"
  with pytest.raises(LoadError, match=r"no draft .shipped:x/\.\./y. ships"):
    shipped.folder_of("shipped:x/../y")
