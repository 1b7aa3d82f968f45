"""The output law is the target's: enumerated through `spec_step` itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import drafters, length
from spec_jax.base import Sampling, Stops
from spec_jax.models import table
from spec_jax.step import Request, make_init, make_step
from tests import reference
from tests.enumeration import Enumerator

V, NEW, SLOTS = 3, 3, 16

SETTINGS = {
  "greedy": {"temperature": 0.0},
  "t0.7": {"temperature": 0.7},
  "t1.5_top_p": {"temperature": 1.5, "top_p": 0.7},
  "top_k_top_p": {"temperature": 1.0, "top_k": 2, "top_p": 0.9},
  "min_p": {"temperature": 1.0, "min_p": 0.3},
  "penalties": {
    "temperature": 1.0,
    "repetition_penalty": 1.4,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.7,
  },
}
OFF = {
  "temperature": 0.0,
  "top_k": 0,
  "top_p": 1.0,
  "min_p": 0.0,
  "repetition_penalty": 1.0,
  "presence_penalty": 0.0,
  "frequency_penalty": 0.0,
}
# Every setting beside every other in one batch, on prompts of two lengths.
PROMPTS = [[0], [2, 1, 0, 2, 1]]


def sampling_of(settings):
  arrays = {}
  for name, off in OFF.items():
    values = [s.get(name, off) for s in settings]
    dtype = jnp.int32 if name == "top_k" else jnp.float32
    arrays[name] = jnp.asarray(values, dtype)
  return Sampling(**arrays)


def request_of(prompts, settings, slots=SLOTS, new=NEW):
  B = len(prompts)
  tokens = np.zeros((B, slots), np.int32)
  for row, prompt in enumerate(prompts):
    tokens[row, : len(prompt)] = prompt
  lengths = jnp.asarray([len(p) for p in prompts], jnp.int32)
  return Request(
    tokens=jnp.asarray(tokens),
    length=lengths,
    limit=lengths + new,
    sampling=sampling_of(settings),
    stops=Stops(ids=jnp.full((B, 1), -1, jnp.int32)),
    keys=jax.random.split(jax.random.key(0), B),
  )


DRAFTERS = {
  "none": ("none", {}),
  "chain": ("vanilla", {"num_draft": 2}),
  "own_temperature": ("vanilla", {"num_draft": 1, "draft_temperature": 2.0}),
  "tree_iid": ("vanilla", {"tree": (2, 1), "siblings": "iid"}),
  "tree_wor": ("vanilla", {"tree": (2, 1), "siblings": "without_replacement"}),
  "tree_top_k": ("vanilla", {"tree": (2, 2), "siblings": "top_k"}),
  "lookup": ("prompt_lookup", {"num_draft": 3}),
}


def measure(model, params, draft_model, name, prompts, settings, **twin):
  """Returns (laws by enumeration `[R, V ** NEW]`, steps)."""
  kind, options = DRAFTERS[name]
  drafter = drafters.build(kind, model, draft_model, slots=SLOTS, **options)
  policy = length.fixed(drafter.depth)
  init, _ = make_init(model, drafter, policy, slots=SLOTS, chunk=4)
  step = make_step(model, drafter, policy, trace=True, **twin)
  state = jax.jit(init)(params, request_of(prompts, settings))
  machine = Enumerator(step, params, drafter.num_nodes, drafter.depth)
  return machine.joint_law(state)


def table_pair():
  model = table.build(table.TableConfig(V, period=2))
  params = {
    "target": model.init(jax.random.key(1)),
    "draft": model.init(jax.random.key(2)),
  }
  logits = np.asarray(params["target"]["table"])
  return model, params, lambda t: logits[(len(t) - 1) % 2, t[-1]]


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_joint_law_of_three_tokens_is_the_targets(name):
  model, params, next_logits = table_pair()
  cases = [(p, s) for p in PROMPTS for s in SETTINGS.values()]
  prompts, settings = zip(*cases, strict=True)
  laws, steps = measure(model, params, model, name, prompts, settings)
  for law, prompt, setting in zip(laws, prompts, settings, strict=True):
    expected = reference.joint_law(next_logits, V, prompt, setting, NEW)
    assert np.abs(law - expected).sum() / 2 < 1e-5, (prompt, setting)
  assert steps <= NEW
