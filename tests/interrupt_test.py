"""The command in a true process: killed, interrupted, resumed."""

import json
import os
from pathlib import Path
import signal
import subprocess
import sys
import time

from commands import (
  SMALL,
  built_once as built_once,
  command as command,
  model as model,
  prompt_file,
  read_lines,
  without_times,
)
import pytest

# ml_collections reads a configuration file with it.
pytestmark = pytest.mark.filterwarnings(
  "ignore:.*load_module:DeprecationWarning"
)

_ROOT = Path(__file__).resolve().parents[1]
# A shell's background jobs ignore SIGINT, and so would their children.
_PROGRAM = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("experiments.generate", run_name="__main__", alter_sys=True)
"""


def _start(folder, *words, **kwargs):
  """Starts the command as a user would."""
  return subprocess.Popen(
    [sys.executable, "-c", _PROGRAM, *words],
    cwd=_ROOT,
    env=os.environ | {"SPEC_JAX_CACHE": str(folder / "cache")},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    **kwargs,
  )


def _wait_for_lines(process, out, count):
  """Waits until a file has so many whole lines."""
  deadline = time.monotonic() + 120
  while time.monotonic() < deadline and process.poll() is None:
    if out.exists() and out.read_bytes().count(b"\n") >= count:
      return
    time.sleep(0.01)
  process.kill()
  raise AssertionError(process.communicate())


def _interrupt(process):
  """Presses Ctrl-C until it is heard: one that meets a `__del__` is lost."""
  for _ in range(3):
    process.send_signal(signal.SIGINT)
    try:
      return process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
      continue
  process.kill()
  raise AssertionError(process.communicate())


def test_a_killed_run_resumes_to_the_same_file(command, tmp_path, model):
  """kill -9 in the middle, then the same command: the whole file."""
  whole, out = tmp_path / "whole.jsonl", tmp_path / "x.jsonl"
  words = (prompt_file(tmp_path, 60), *SMALL, "--config.engine.batch_size=1")
  process = _start(tmp_path, f"--config.model={model}", f"--out={out}", *words)
  _wait_for_lines(process, out, 4)
  process.send_signal(signal.SIGKILL)
  process.communicate()
  killed = out.read_bytes()
  assert 4 <= killed.count(b"\n") < 60
  assert command(f"--out={out}", *words).code == 0
  assert out.read_bytes().startswith(killed[: killed.rindex(b"\n") + 1])
  assert command(f"--out={whole}", *words).code == 0
  assert list(map(without_times, read_lines(out))) == list(
    map(without_times, read_lines(whole))
  )


def test_ctrl_c_leaves_a_valid_file(tmp_path, model):
  """An interrupt ends in one line; every line and the manifest are whole."""
  out = tmp_path / "x.jsonl"
  process = _start(
    tmp_path,
    f"--config.model={model}",
    f"--out={out}",
    prompt_file(tmp_path, 400),
    *SMALL,
    "--config.engine.batch_size=1",
  )
  _wait_for_lines(process, out, 4)
  shown, err = _interrupt(process)
  assert process.returncode == 130
  assert "Traceback" not in err and err.endswith("\nstopped\n")
  lines = read_lines(out)
  assert 4 <= len(lines) < 400
  assert [x["prompt"] for x in lines] == list(range(len(lines)))
  assert f"{len(lines)} of 400 prompts in {out}\n" in shown
  manifest = json.loads((tmp_path / "x.manifest.json").read_text())
  assert manifest["reports"]["speculative"]["emitted"] >= 12 * len(lines)
