"""Published layouts of heads: names, shapes, flags, and what is refused."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_model import tiny_model

import spec_jax
from spec_jax import Settings, eagle, hub, medusa, pairing, public_heads
from spec_jax.heads import Words
from spec_jax.public_heads_write import write_public
from spec_jax.safetensors_io import LoadError

IDS = (0, 5, 9, 40, 64)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
  folder = tiny_model(tmp_path_factory.mktemp("public") / "model")
  return spec_jax.load(folder, cpu_kernel="off")


def _random(shapes, seed=0):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: (rng.normal(size=x.shape) * 0.3).astype(np.float32), shapes
  )


def heads_of(kind, loaded):
  """Returns heads and random parameters, the words' matrix included."""
  target = loaded.model.config
  V = target.vocab_size
  everything = Words(V, V)
  if kind.startswith("medusa"):
    heads = medusa.build(
      medusa.MedusaConfig(
        width=target.width,
        num_heads=2,
        num_layers=2,
        own_matrices=kind == "medusa_own",
        words=everything,
        max_length=target.max_length,
      )
    )
  elif kind.startswith("eagle_1"):
    heads = eagle.build(
      eagle.config_of(target, 1, everything, fc_bias=kind == "eagle_1_bias")
    )
  else:
    words = Words(len(IDS), V, own_matrix=True, mapped=True)
    if kind == "eagle_3_all":
      words = everything
    heads = eagle.build(eagle.config_of(target, 3, words, taps=(0, 1, 2)))
  params = _random(jax.eval_shape(lambda: heads.init(jax.random.key(0))))
  if "ids" in params:
    params["ids"] = np.asarray(IDS, np.int32)
  return heads, params


KINDS = [
  "medusa",
  "medusa_own",
  "eagle_1",
  "eagle_1_bias",
  "eagle_3",
  "eagle_3_all",
]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read(kind, loaded, tmp_path):
  """D6, D13, D19: the same heads, parameters and proposals."""
  heads, params = heads_of(kind, loaded)
  write_public(tmp_path, heads, params, loaded)
  assert public_heads.is_public(tmp_path)
  again, own = pairing.resolve_draft(loaded, str(tmp_path))
  if kind == "eagle_3_all":  # the target's matrix is written, and read
    np.testing.assert_array_equal(own.pop("head"), loaded.params["head"])
  else:
    assert again.config == heads.config
  jax.tree.map(np.testing.assert_array_equal, own, params)
  out = spec_jax.generate(
    loaded,
    ["abc"],
    drafter=kind.split("_")[0],
    draft=str(tmp_path),
    settings=Settings(max_new_tokens=6),
  )
  plain = spec_jax.generate(
    loaded, ["abc"], settings=Settings(max_new_tokens=6)
  )
  assert out.ids == plain.ids and out.report["drafted"] > 0


def test_the_names_are_the_authors(loaded, tmp_path):
  """As their repositories have them, matrices stored [out, in]."""
  D = loaded.model.config.width
  names = {
    "medusa_own": {
      "0.0.linear.weight": (D, D),
      "1.1.linear.bias": (D,),
      "1.2.weight": (loaded.model.config.vocab_size, D),
    },
    "eagle_1_bias": {
      "fc.weight": (D, 2 * D),
      "fc.bias": (D,),
      "layers.0.self_attn.q_proj.weight": (D, D),
      "layers.0.post_attention_layernorm.weight": (D,),
    },
    "eagle_3": {
      "fc.weight": (D, 3 * D),
      "midlayer.self_attn.q_proj.weight": (D, 2 * D),
      "midlayer.hidden_norm.weight": (D,),
      "midlayer.input_layernorm.weight": (D,),
      "norm.weight": (D,),
      "lm_head.weight": (len(IDS), D),
      "d2t": (len(IDS),),
    },
  }
  for kind, expected in names.items():
    folder = tmp_path / kind
    path = write_public(folder, *heads_of(kind, loaded), loaded)
    found = {n: x.shape for n, x in load_file(path).items()}
    assert expected.items() <= found.items()
  # D13: what is stored is what is to be added.
  assert load_file(path)["d2t"].tolist() == [0, 4, 7, 37, 60]


def _edit(folder, change=None, **config):
  path = folder / "model.safetensors"
  tensors = load_file(path)
  if change is not None:
    tensors = change(tensors) or tensors
  save_file({n: np.ascontiguousarray(x) for n, x in tensors.items()}, path)
  file = folder / "config.json"
  file.write_text(json.dumps({**json.loads(file.read_text()), **config}))


def test_other_spellings_are_read(loaded, tmp_path):
  """A prefix, layers named at the top, an identity map, a copied embedding."""
  heads, params = heads_of("medusa", loaded)
  write_public(tmp_path / "m", heads, params, loaded)
  _edit(tmp_path / "m", lambda t: {f"medusa_head.{n}": x for n, x in t.items()})
  _, own = pairing.resolve_draft(loaded, str(tmp_path / "m"))
  jax.tree.map(np.testing.assert_array_equal, own, params)
  heads, params = heads_of("eagle_3", loaded)
  write_public(tmp_path / "e", heads, params, loaded)

  def change(tensors):
    tensors["d2t"] = np.zeros(len(IDS), np.int64)
    tensors["embed_tokens.weight"] = np.zeros((3, 3), np.float32)

  layers = {"eagle_aux_hidden_state_layer_ids": [2, 1, 0]}
  assert json.loads((tmp_path / "e/config.json").read_text())[
    "eagle_config"
  ] == {
    "eagle_aux_hidden_state_layer_ids": [-1, 0, 1]  # whose outputs are taken
  }
  _edit(tmp_path / "e", change, eagle_config=None, **layers)
  again, own = pairing.resolve_draft(loaded, str(tmp_path / "e"))
  assert again.config.taps == (2, 1, 0)  # D16
  assert not again.config.words.mapped and "ids" not in own


def _drop(name):
  return lambda tensors: {n: x for n, x in tensors.items() if n != name}


def _put(name, value):
  return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
  "kind,change,config,message",
  [
    ("medusa", _drop("1.0.linear.bias"), {}, "1.0.linear.bias is missing"),
    ("medusa", _put("x", np.zeros(2)), {}, "tensor x is none of Medusa heads"),
    ("medusa", None, {"medusa_num_heads": 3}, "says medusa_num_heads 3"),
    ("medusa", None, {"hidden_size": 7}, "says hidden_size 7"),
    ("medusa_own", _drop("0.2.weight"), {}, "some have none"),
    ("eagle_3", _drop("d2t"), {}, "d2t is missing"),
    ("eagle_3", _drop("norm.weight"), {}, "norm.weight is missing"),
    ("eagle_3", _put("d2t", np.full(5, 400)), {}, "does not lead to 5 rising"),
    ("eagle_3", _put("y", np.zeros(2)), {}, "tensor y is none of EAGLE heads"),
    ("eagle_1_bias", None, {"bias": False}, "says bias False"),
    ("eagle_1", None, {"bias": True}, "says bias True"),
    ("eagle_3", None, {"draft_vocab_size": 9}, "says draft_vocab_size 9"),
    ("eagle_3", None, {"norm_before_residual": True}, "norm_before_residual"),
    (
      "eagle_3",
      None,
      {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}},
      r"names layers \(1, 2, 3\) of a target of 2",
    ),
    (
      "eagle_3",
      _put("midlayer.mlp.up_proj.weight", np.zeros((3, 3), np.float32)),
      {},
      r"layers.0.w_up has shape \(3, 3\)",
    ),
  ],
)
def test_what_does_not_fit_is_one_line(
  kind, change, config, message, loaded, tmp_path
):
  write_public(tmp_path, *heads_of(kind, loaded), loaded)
  _edit(tmp_path, change, **config)
  with pytest.raises(LoadError, match=message) as error:
    pairing.resolve_draft(loaded, str(tmp_path))
  assert "\n" not in str(error.value)


def test_a_folder_with_something_else_is_left_alone(loaded, tmp_path):
  """A model is not overwritten by heads; heads by heads are."""
  model = tiny_model(tmp_path / "model")
  before = (model / "model.safetensors").read_bytes()
  heads, params = heads_of("medusa", loaded)
  with pytest.raises(ValueError, match="holds something else"):
    write_public(model, heads, params, loaded)
  assert (model / "model.safetensors").read_bytes() == before
  bare = tmp_path / "bare"
  bare.mkdir()
  for name in ("config.json", "model.safetensors"):
    (bare / name).write_bytes((model / name).read_bytes())
  with pytest.raises(ValueError, match="holds something else"):
    write_public(bare, heads, params, loaded)
  for _ in range(2):
    write_public(tmp_path / "heads", heads, params, loaded)


def test_heads_of_another_width_are_refused(loaded, tmp_path):
  other = tiny_model(tmp_path / "wide", hidden_size=64)
  wide = spec_jax.load(other, cpu_kernel="off")
  for kind in ("medusa", "eagle_3"):
    folder = tmp_path / kind
    write_public(folder, *heads_of(kind, wide), wide)
    with pytest.raises(LoadError, match="are 64 wide, the target is 32"):
      pairing.resolve_draft(loaded, str(folder))


def test_as_a_model_they_are_refused_with_their_drafters_name(loaded, tmp_path):
  write_public(tmp_path, *heads_of("eagle_3", loaded), loaded)
  with pytest.raises(LoadError, match="heads of the drafter 'eagle'"):
    hub.load(str(tmp_path))
