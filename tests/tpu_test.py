"""`spec_step` compiles ahead of time for a TPU slice with no TPU there."""

import os
from pathlib import Path
import subprocess
import sys

import pytest

_PROGRAM = """
import jax, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh
from spec_jax import drafters, length, rows as rows_lib
from spec_jax import sharding, step as steps
from spec_jax.programs import EngineConfig
from spec_jax.requests import make_request
from tests import mesh_cases
from spec_jax.models import decoder

found = topologies.get_topology_desc(
  platform="tpu", topology_name="v4:2x2x1"
)
devices = found.devices
assert len(devices) == 8, devices
mesh = Mesh(np.asarray(devices).reshape(2, 4), ("data", "model"))
model = decoder.build(mesh_cases.tiny(2), dtype=jax.numpy.bfloat16)
draft = decoder.build(mesh_cases.tiny(1), dtype=jax.numpy.bfloat16)
drafter = drafters.build("vanilla", model, draft, slots=96, num_draft=3)
policy = length.fixed(3)
config = EngineConfig(
  batch_size=8, slots=96, chunk=16, use=frozenset({"temperature", "top_p"})
)
init, _ = rows_lib.make_init(model, drafter, policy, slots=96, chunk=16)
step = steps.make_step(
  model, drafter, policy, **sharding.pins(mesh, 8)
)
key = jax.eval_shape(lambda: jax.random.key(0))
params = {
  "target": jax.eval_shape(model.init, key),
  "draft": jax.eval_shape(draft.init, key),
}
request = jax.eval_shape(lambda: make_request([], config, model, 8))
state = jax.eval_shape(init, params, request)
placed = {
  "params": {
    "target": sharding.params_shardings(model, mesh),
    "draft": sharding.params_shardings(draft, mesh, replicate=True),
  },
  "state": sharding.state_shardings(state, model, mesh, draft=draft),
}
compiled = sharding.jit_step(step, shardings=placed).lower(
  params, state
).compile()
text = compiled.as_text()
names = ("all-reduce", "all-gather", "all-to-all", "collective-permute")
print({n: text.count(n + "(") + text.count(n + "-start(") for n in names})
print("donated" if "input_output_alias" in text else "not donated")
"""


def test_the_step_compiles_for_a_v4_slice_with_its_state_donated():
  pytest.importorskip("libtpu", reason="libtpu is for Linux only")
  root = str(Path(__file__).resolve().parent.parent)
  env = {
    **os.environ,
    "TPU_SKIP_MDS_QUERY": "1",
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": root,
  }
  env.pop("XLA_FLAGS", None)
  out = subprocess.run(
    [sys.executable, "-c", _PROGRAM],
    env=env,
    cwd=root,
    capture_output=True,
    text=True,
  )
  assert out.returncode == 0, out.stderr[-3000:]
  assert out.stdout.splitlines()[-1] == "donated"
