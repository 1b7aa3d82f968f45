"""Tests of which models may draft for a target, in `generate` and alone."""

import json

from generating import SAMPLED, changed, generate_small, loaded as loaded
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_tokenizer import byte_level_tokenizer

from spec_jax import hub, pairing
from spec_jax.generate import generate
from spec_jax.models import decoder
from spec_jax.pairing import check_same_vocabulary, resolve_draft
from spec_jax.settings import Settings
from tests import fakes


def test_the_target_as_its_own_draft_is_always_right(loaded):
  """Every drafted token is kept, greedy and sampled."""
  for settings in (Settings(), SAMPLED):
    settings = changed(settings, stop_ids=(), max_new_tokens=11)
    out = generate_small(
      loaded,
      ["abc", "xy"],
      settings=settings,
      drafter="vanilla",
      draft="target",
      options={"num_draft": 4},
      seed=0,
    )
    assert out.report["acceptance_rate"] == 1.0
    # 5 + 5 + 1 tokens, the last step with nothing left to draft for.
    assert out.report["steps"] == 6 and out.report["emitted"] == 22
    assert out.report["accept_cond"] == [1.0] * 4


class _Words:
  """A tokenizer that is its vocabulary."""

  def __init__(self, tokens):
    self._tokens = tokens

  def get_vocab(self):
    return {token: i for i, token in self._tokens.items()}


def test_the_first_id_that_means_two_things_is_named():
  """Longer or shorter is allowed; another token under one id is not."""
  ours = {0: "a", 1: "b", 2: "c", 3: "d"}
  check_same_vocabulary(_Words(ours), _Words(ours))
  check_same_vocabulary(_Words(ours), _Words({**ours, 4: "e"}))
  check_same_vocabulary(_Words({**ours, 4: "e"}), _Words(ours))
  for other, message in (
    ({0: "a", 1: "x", 2: "c", 3: "y"}, "first at id 1: 'b' and 'x'"),
    ({0: "a", 1: "c", 2: "b", 3: "d"}, "first at id 1: 'b' and 'c'"),
  ):
    with pytest.raises(ValueError, match=message):
      check_same_vocabulary(_Words(ours), _Words(other))


def test_a_draft_with_other_words_is_refused(loaded):
  """Before any forward pass, by the first id."""
  words = byte_level_tokenizer(bos=None)
  words.add_tokens(["extra"])
  longer = loaded._replace(tokenizer=words)
  assert resolve_draft(loaded, longer)[0] is loaded.model
  other = loaded._replace(tokenizer=_Words({0: "?"}))
  with pytest.raises(ValueError, match="differ first at id 0: '!' and '\\?'"):
    generate(loaded, "a", drafter="vanilla", draft=other, seed=0)


def test_parameters_are_not_copied_for_short_drafts(loaded):
  """The target's first layer drafts: its arrays are the target's own."""
  model, params = resolve_draft(loaded, 1)
  assert model.config.num_layers == 1
  ours = {id(x) for x in jax.tree.leaves(loaded.params)}
  assert all(id(x) in ours for x in jax.tree.leaves(params))
  assert resolve_draft(loaded, 1)[0] is model  # so nothing compiles


def test_the_first_layers_share_the_targets_parameters():
  """D25: two of three layers, then the target's own norm and output matrix."""
  model, params = fakes.tiny(13, windows=(None, 4, 4))
  config, short = pairing.choose_layers(model.config, params, range(2))
  assert config.windows == (None, 4) and config.num_layers == 2
  assert short["head"] is params["head"]
  tokens = jnp.array([[1, 2, 3, 4, 5, 6, 7]])
  positions = jnp.arange(7)[None]
  found = jax.jit(decoder.build(config).apply)(short, tokens, positions)
  tapped = jax.jit(decoder.build(model.config, taps=(2,)).apply)
  hidden = np.asarray(tapped(params, tokens, positions).hidden)[:, :, 0]
  norm = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + 1e-6)
  expected = (
    norm * np.asarray(params["final_norm"]) @ np.asarray(params["head"])
  )
  np.testing.assert_allclose(found.logits, expected, atol=1e-4)


def test_chosen_layers_are_those_layers():
  """The first and last of three: windows and parameters go together."""
  model, params = fakes.tiny(13, windows=(None, 4, 5))
  config, short = pairing.choose_layers(model.config, params, (0, 2))
  assert config.windows == (None, 5) and config.num_layers == 2
  assert short["layers"][1] is params["layers"][2]


@pytest.mark.parametrize(
  ("layers", "message"),
  [
    ((), r"\[0, 1\], one at least, got \[\]"),
    ((0, 2), r"\[0, 1\], one at least, got \[0, 2\]"),
    ((1, 0), r"must rise, got \[1, 0\]"),
    ((0, 0), "must rise"),
  ],
)
def test_layers_that_cannot_be_are_refused(layers, message):
  model, params = fakes.tiny(13)
  with pytest.raises(ValueError, match=message):
    pairing.choose_layers(model.config, params, layers)


def test_a_draft_is_parsed_from_a_word():
  """Numbers are layers of the target, anything else is a name."""
  for word, draft in (
    ("8", 8),
    ("0-2,5", (0, 1, 2, 5)),
    ("3,4", (3, 4)),
    ("target", "target"),
    ("org/model-2", "org/model-2"),
    ("²", "²"),
  ):
    assert pairing.parse_draft(word) == draft


def _layers_file(path, loaded, **change):
  """Writes a file of layers that was made for a model, and returns its path."""
  record = {
    "layers": [1],
    "model": "tiny",
    "weights_sha256": hub.weights_hash(loaded),
  }
  path.write_text(json.dumps(record | change))
  return str(path)


def test_a_file_of_layers_drafts(loaded, tmp_path):
  """With or without "@", the file's layers are what drafts."""
  path = _layers_file(tmp_path / "x.json", loaded)
  assert pairing.parse_draft(path) == path
  for word in (path, f"@{path}"):
    model, params = resolve_draft(loaded, word)
    assert model.config.num_layers == 1
    assert params["layers"][0] is loaded.params["layers"][1]


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"weights_sha256": "ab" * 32}, "was made for tiny with weights abababab"),
    ({"layers": [0, 2]}, r"must be in \[0, 1\], one at least, got \[0, 2\]"),
    ({"layers": [1, 0]}, "must rise"),
    ({"layers": [0.5]}, "is no file of layers .* must be integers"),
    ({"layers": 3}, "is no file of layers"),
  ],
)
def test_a_file_of_layers_of_another_model_is_refused(
  loaded, tmp_path, change, message
):
  """In one line: other weights, layers it does not have, another file."""
  path = _layers_file(tmp_path / "x.json", loaded, **change)
  with pytest.raises(ValueError, match=message) as found:
    resolve_draft(loaded, path)
  assert "\n" not in str(found.value)


def test_what_is_no_file_of_layers_is_refused(loaded, tmp_path):
  """Nothing there, no JSON, or JSON of something else."""
  with pytest.raises(ValueError, match=r"cannot read the layers in .*none"):
    resolve_draft(loaded, f"@{tmp_path / 'none'}")
  for text in ("{", "[]", "{}", "3"):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is no file of layers"):
      resolve_draft(loaded, str(path))
