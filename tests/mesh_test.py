"""Sharded decoding gives the tokens of unsharded decoding."""

import json
import os
from pathlib import Path
import subprocess
import sys

import pytest

from tests import mesh_cases


@pytest.fixture(scope="module")
def found():
  """Runs the cases in a process with 8 fake devices."""
  given = os.environ["XLA_FLAGS"]  # what conftest.py sets
  flag = f"{given} --xla_force_host_platform_device_count=8"
  root = str(Path(__file__).resolve().parent.parent)
  env = {
    **os.environ,
    "XLA_FLAGS": flag,
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": root,
  }
  out = subprocess.run(
    [sys.executable, "-m", "tests.mesh_cases"],
    env=env,
    cwd=root,
    capture_output=True,
    text=True,
  )
  assert out.returncode == 0, out.stderr[-3000:]
  return json.loads(out.stdout)


@pytest.mark.parametrize("case", mesh_cases.CASES, ids=str)
def test_a_mesh_gives_the_tokens_of_one_device(found, case):
  drafter, (data, model), _ = case
  alone = found[f"{drafter} 1x1"]
  assert any(len(set(ids)) > 3 for ids in alone)  # not one token for ever
  assert found[f"{drafter} {data}x{model}"] == alone
  assert found[f"{drafter} {data}x{model} compiles"] == 1


def test_query_heads_are_split_over_the_model_axis(found):
  assert "model" in found["tree 2x4 wq"]
  assert "model" not in found["chain 1x1 wq"]
