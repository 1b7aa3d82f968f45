"""The recipe: losses through real models, drafts on disk, on-policy batches."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import tiny_model

from configs import distill as defaults
from experiments import launch
import spec_jax
from spec_jax import architecture, kernels, pairing, trained, trained_draft
from spec_jax.models import decoder
from tests import fakes, train_rig
from train import data, distill
from train.on_policy import OnPolicyBatches, make_fixed

# How a target may be held; a draft must be read for each.
_HELD = {
  "plain": {"cpu_kernel": "off"},
  "stacked": {"cpu_kernel": "off", "scan_layers": True},
  "bfloat16": {"cpu_kernel": "off", "dtype": "bfloat16"},
  "packed": {"cpu_kernel": "on"},
}


def _config(**change):
  config = defaults.get_config()
  config.draft.layers = "1"
  config.loss.chunk = 0
  for name, value in change.items():
    config.update_from_flattened_dict({name.replace("__", "."): value})
  return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A model folder."""
  return tiny_model(tmp_path_factory.mktemp("distill") / "model")


def _batch(vocab):
  return {
    k: jnp.asarray(v)
    for k, v in train_rig.stack(train_rig.rows(3, vocab)).items()
  }


def test_the_loss_is_that_of_the_two_models_logits():
  """By numpy from the logits of two plain passes; ours made in 3 pieces."""
  model, params = fakes.tiny(windows=(None, None))
  own = train_rig.recipe((model, params)).init(None)
  batch = _batch(13)
  draft = decoder.build(architecture.shallow_config(model.config, [0]))
  loss = distill.make_loss(model, draft, name="forward_kl", chunk=4)
  total, sums = fakes.jit(loss)(own, params, batch, None)
  run = lambda m, p: np.asarray(
    fakes.jit(m.apply)(p, batch["tokens"], batch["positions"]).logits,
    np.float64,
  )
  logs = [
    x - np.log(np.exp(x).sum(-1, keepdims=True))
    for x in (run(model, params), run(draft, {**params, **own}))
  ]
  weights = np.asarray(batch["weights"])
  p, q = np.exp(logs[0]), np.exp(logs[1])
  kl = (p * (logs[0] - logs[1])).sum(-1)
  np.testing.assert_allclose(total, (kl * weights).sum(), rtol=1e-4)
  alpha = (np.minimum(p, q).sum(-1) * weights).sum()
  np.testing.assert_allclose(sums["acceptance"], alpha, rtol=1e-5)
  assert sums["tokens"] == weights.sum()
  same = p.argmax(-1) == q.argmax(-1)
  np.testing.assert_allclose(sums["agreement"], (same * weights).sum())


@pytest.mark.parametrize("held", _HELD)
def test_a_saved_draft_is_read_for_a_target_held_in_any_way(
  held, folder, tmp_path
):
  """Trained on plain arrays (or a stack), read back: the weights, rounded."""
  if held == "packed" and kernels.why_not():
    pytest.skip("no C++ compiler")
  loaded = spec_jax.load(folder, **_HELD[held])
  start = loaded
  if held == "packed":
    start = spec_jax.load(folder, cpu_kernel="off")
  recipe = distill.build(_config(), start, None, [])
  params = fakes.noisy(recipe.init(None))
  info = {"target": trained.target_identity(loaded)}
  recipe.save(params, tmp_path, info)
  model, found = pairing.resolve_draft(loaded, str(tmp_path))
  assert model.config.num_layers == 1
  layer = found["layers"]
  layer = {k: v[0] for k, v in layer.items()} if held == "stacked" else layer[0]
  mine = params["layers"]
  mine = {k: v[0] for k, v in mine.items()} if held == "stacked" else mine[0]
  matrix = layer["wq"]
  if held == "packed":
    assert kernels.is_packed(found["layers"])
    matrix = kernels.unpack(matrix)
  expected = mine["wq"].astype(jnp.bfloat16).astype(jnp.float32)
  np.testing.assert_array_equal(np.asarray(matrix, np.float32), expected)
  assert found["final_norm"].dtype == loaded.params["final_norm"].dtype


@pytest.mark.parametrize("held", _HELD)
def test_a_draft_that_knows_some_words_proposes_no_other(
  held, folder, tmp_path
):
  """The target's own columns, -inf past them, and plain decoding's text."""
  if held == "packed" and kernels.why_not():
    pytest.skip("no C++ compiler")
  plain = spec_jax.load(folder, cpu_kernel="off")
  recipe = distill.build(_config(draft__words=40), plain, None, [])
  info = {"target": trained.target_identity(plain)}
  recipe.save(recipe.init(None), tmp_path, info)
  loaded = spec_jax.load(folder, **_HELD[held])
  model, params = pairing.resolve_draft(loaded, str(tmp_path))
  hidden = jnp.asarray(np.random.default_rng(0).normal(size=(2, 32)))
  hidden = hidden.astype(loaded.params["final_norm"].dtype)
  logits = model.unembed(params, hidden)
  expected = loaded.model.unembed(loaded.params, hidden)
  assert logits.shape == expected.shape
  np.testing.assert_allclose(
    logits[:, :40],
    expected[:, :40],
    rtol=1e-2,
    # Packed, the output matrix's columns are rounded as the layers are.
    atol=0.1 if held == "packed" else 1e-2,
  )
  assert (np.asarray(logits[:, 40:]) == -np.inf).all()
  both = [
    spec_jax.generate(
      loaded, ["abc"], settings=spec_jax.Settings(max_new_tokens=8), **how
    )
    for how in ({}, {"drafter": "vanilla", "draft": str(tmp_path)})
  ]
  assert both[0].ids == both[1].ids
  assert both[1].report["drafted"] > 0


def test_bfloat16_computes_nearly_the_same_and_keeps_float32(folder):
  """8 bits of mantissa: some percent of a loss of layers with noise."""
  batch = _batch(60)
  found = {}
  for dtype in ("float32", "bfloat16"):
    loaded = spec_jax.load(folder, cpu_kernel="off", dtype=dtype)
    recipe = distill.build(_config(), loaded, None, [])
    params = recipe.init(None)
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"float32"}
    total, _ = fakes.jit(recipe.loss)(params, recipe.frozen, batch, None)
    found[dtype] = float(total)
    grads = jax.eval_shape(
      jax.grad(recipe.loss, has_aux=True), params, recipe.frozen, batch, None
    )[0]
    assert {x.dtype.name for x in jax.tree.leaves(grads)} == {"float32"}
  np.testing.assert_allclose(found["bfloat16"], found["float32"], rtol=0.03)


def test_a_killed_save_leaves_the_draft_before_usable(
  folder, tmp_path, monkeypatch
):
  loaded = spec_jax.load(folder, cpu_kernel="off")
  recipe = distill.build(_config(), loaded, None, [])
  info = {"target": trained.target_identity(loaded)}
  first = recipe.init(None)
  recipe.save(first, tmp_path, info)
  before = sorted(x.name for x in tmp_path.iterdir())
  replace = trained.os.replace

  def killed(source, target):
    if str(target).endswith(trained.CARD):
      raise KeyboardInterrupt
    replace(source, target)

  with monkeypatch.context() as patch:
    patch.setattr(trained.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
      recipe.save(fakes.noisy(first), tmp_path, info)
  assert (
    trained_draft.inspect_trained(tmp_path, loaded).model.config.num_layers == 1
  )
  recipe.save(first, tmp_path, info)
  left = {x.name for x in tmp_path.iterdir() if not x.name.endswith(".tmp")}
  assert left == set(before)


@pytest.mark.parametrize("case", ["loss__name", "loss__top_k", "dtype_saved"])
def test_a_configuration_is_checked_before_the_target_is_read(case):
  value = {"loss__top_k": -1}.get(case, "float8")
  with pytest.raises(ValueError, match=case.replace("__", r"\.")):
    distill.check(_config(**{case: value}))


# --- on-policy ---------------------------------------------------------------


def _batches(folder, sample, fixed=True, refresh=3, prompts=range(1, 8)):
  rows = train_rig.rows(6)
  return OnPolicyBatches(
    data.Batches(rows, 1, 0) if fixed else None,
    [[i, i] for i in prompts],
    sample,
    batch_size=2,
    length=train_rig.LENGTH,
    refresh=refresh,
    prompts_each=4,
    seed=0,
    folder=folder,
  )


def _run(batches, first, last):
  found = []
  for step in range(first, last + 1):
    batches.before(step, step)  # "parameters" are the step's number
    found.append({k: v.tolist() for k, v in next(batches).items()})
  return found


def test_the_draft_answers_every_so_often_and_is_learned_from(tmp_path):
  asked = []

  def sample(params, prompts, seed):
    asked.append((params, [p[0] for p in prompts]))
    return [[params + 20] * 5 for _ in prompts]

  found = _run(_batches(tmp_path, sample), 1, 7)
  assert asked == [(1, [1, 2, 3, 4]), (4, [5, 6, 7, 1]), (7, [2, 3, 4, 5])]
  for step, batch in enumerate(found, 1):
    written = 20 + 3 * ((step - 1) // 3) + 1
    assert len(batch["tokens"]) == 3
    assert written not in batch["tokens"][0]
    for tokens, labels in zip(
      batch["tokens"][1:], batch["labels"][1:], strict=True
    ):
      assert written in tokens
      assert set(labels) <= {0, written}


def test_a_resumed_run_reads_the_answers_that_were_there(tmp_path):
  sample = lambda params, prompts, seed: [
    [params + i] * (3 + i) for i, _ in enumerate(prompts)
  ]
  whole = _run(_batches(tmp_path / "a", sample), 1, 8)
  first = _batches(tmp_path / "b", sample)
  parts = _run(first, 1, 5)
  second = _batches(tmp_path / "b", sample)
  second.restore(first.position())
  parts += _run(second, 6, 8)
  assert parts == whole
  third = _batches(tmp_path / "c", sample)
  with pytest.raises(data.DataError, match="is gone"):
    third.before(6, None)
  other = _batches(tmp_path / "b", sample, prompts=range(2, 8))
  with pytest.raises(data.DataError, match="prompts have changed"):
    other.restore(first.position())


@pytest.mark.parametrize("part,rows", [(0.0, 0), (0.25, 1), (0.5, 2), (1.0, 4)])
def test_a_part_is_a_number_of_rows(part, rows):
  config = _config(on_policy__part=part, train__batch_size=2)
  fixed, drafted = make_fixed(config, train_rig.rows(6), 2)
  assert drafted == rows and (fixed is None) == (rows == 4)


@pytest.mark.parametrize("part", [0.1, 0.3, 0.9])
def test_a_part_that_is_no_number_of_rows_is_refused(part):
  """It would be another part than was asked for, or none."""
  config = _config(on_policy__part=part, train__batch_size=2)
  with pytest.raises(ValueError, match=f"of the 4 rows of a step.*got {part}"):
    make_fixed(config, train_rig.rows(6), 2)


@pytest.mark.parametrize(
  "changed,message",
  [
    (
      {"beta": 0.1},
      "loss.beta has no use .*'forward_kl', got 0.1",
    ),
    ({"name": "cross_entropy", "temperature": 3.0}, "loss.temperature has no"),
    ({"name": "cross_entropy", "top_k": 5}, "loss.top_k has no use"),
  ],
)
def test_a_setting_of_another_loss_is_refused(changed, message):
  config = _config(**{f"loss__{k}": v for k, v in changed.items()})
  with pytest.raises(ValueError, match=message):
    distill.check(config)
  distill.check(_config(loss__name="jsd", loss__beta=0.1))


def test_a_draft_answers_with_its_own_law(folder, tmp_path):
  """Greedy: the answers are the plain decoding of the shallow copy."""
  loaded = spec_jax.load(folder, cpu_kernel="off")
  config = _config(data__length=64, on_policy__temperature=0.0)
  recipe = distill.build(config, loaded, None, [])
  params = recipe.init(None)
  prompts = [[5, 6, 7], [9] * 50]
  found = recipe.sample(params, prompts, 0)
  assert [len(x) for x in found] == [61, 14]
  model, own = pairing.resolve_draft(loaded, 1)
  tokens = jnp.asarray([prompts[1] + found[1]], jnp.int32)
  positions = jnp.arange(64, dtype=jnp.int32)[None]
  own = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), own)
  own |= {n: loaded.params[n] for n in ("embed", "head")}
  logits = fakes.jit(model.apply)(own, tokens, positions).logits
  assert logits[0, 49:63].argmax(-1).tolist() == found[1]


def test_a_draft_may_go_on_from_a_trained_one(folder, tmp_path):
  """Its own weights, not the target's; of the same layers, or not at all."""
  loaded = spec_jax.load(folder, cpu_kernel="off")
  config = _config()
  plain = distill.build(config, loaded, None, [])
  changed = jax.tree.map(lambda x: x + 0.5, plain.init(None))
  plain.save(changed, tmp_path, {"target": trained.target_identity(loaded)})
  again = distill.build(_config(draft__start=str(tmp_path)), loaded, None, [])
  for a, b in zip(
    jax.tree.leaves(changed), jax.tree.leaves(again.init(None)), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=1e-2)  # saved in bfloat16
  other = _config(draft__start=str(tmp_path), draft__layers="1-1")
  with pytest.raises(ValueError, match=r"holds layers \[0\], not layers \[1\]"):
    distill.build(other, loaded, None, [])


def test_defaults_of_the_config_are_good():
  assert importlib.util.find_spec("configs.distill")
  distill.check(defaults.get_config())
  plain = launch.plain_dict(defaults.get_config())
  assert plain["on_policy"]["part"] == 0
