"""Runs the core's tests on a newer Python, for which a newer JAX exists.

JAX drops old Pythons first: on Python 3.11 the newest JAX cannot be installed,
so the suite alone would never see it. The environment is kept in the user's
cache folder, one for each content of requirements.txt.
"""

import hashlib
import os
from pathlib import Path
import shutil
import subprocess
import sys
import time

import pytest

_ROOT = Path(__file__).resolve().parents[1]
_VERSIONS = ("3.12", "3.13")
# What the files below need beside requirements.txt.
_TOOLS = ("pytest", "scipy", "hypothesis")
# The core, and what touches most of JAX; the quick ones first, since the
# budget may end before the last. Files that do not exist are left out.
_FILES = (
  "tree_test.py",
  "cache_test.py",
  "sampling_test.py",
  "verify_test.py",
  "step_test.py",
  "kernels_test.py",
  "engine_test.py",
)
# Seconds for all of it, of which a fresh environment takes up to 60 %: this
# is one test of a suite that should end in 12 minutes.
_BUDGET = 230
# How pip says that it reached no index, as against that nothing fits.
_UNREACHABLE = (
  "Connection",
  "Failed to establish",
  "Max retries exceeded",
  "Network is unreachable",
  "Read timed out",
  "Temporary failure in name resolution",
  "from versions: none",
)

_REPORT = """
from importlib.metadata import version
import platform

print("Python", platform.python_version(), end="")
for name in ("jax", "jaxlib", "flax", "numpy", "transformers"):
  print(f", {name} {version(name)}", end="")
"""


def _environment() -> dict[str, str]:
  """Returns the environment less what ties Python to this installation."""
  dropped = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYENV_VERSION"}
  kept = {k: v for k, v in os.environ.items() if k not in dropped}
  # Unbuffered: a run that is cut off has still said what passed.
  pip = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
  return kept | pip | {"PYTHONUNBUFFERED": "1"}


def _run(*command: object, seconds: float) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
    [str(word) for word in command],
    cwd=_ROOT,
    env=_environment(),
    stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    timeout=max(1.0, seconds),
  )


def _works(python: str) -> bool:
  """Whether it runs: pyenv leaves launchers for versions not in use."""
  try:
    return _run(python, "-c", "import venv", seconds=20).returncode == 0
  except (OSError, subprocess.TimeoutExpired):
    return False


def _find_python() -> str | None:
  """Returns a newer interpreter, from the path or from pyenv."""
  found = [shutil.which(f"python{version}") for version in _VERSIONS]
  if shutil.which("pyenv"):
    root = Path(_run("pyenv", "root", seconds=20).stdout.strip())
    for version in _VERSIONS:
      found += sorted(map(str, root.glob(f"versions/{version}.*/bin/python")))
  return next((p for p in found if p and _works(p)), None)


def _make_environment(python: str, seconds: float) -> Path:
  """Returns the interpreter of an environment with all requirements.

  Skips the calling test if the package index cannot be reached, or is too slow.
  """
  requirements = _ROOT / "requirements.txt"
  # What is installed depends on these three; a mark is left when all is in.
  content = f"{python} {_TOOLS} {requirements.read_text()}"
  key = hashlib.sha256(content.encode()).hexdigest()[:16]
  cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
  folder = cache / "spec_jax" / f"python-{key}"
  new, mark = folder / "bin" / "python", folder / "complete"
  if mark.exists() and _works(str(new)):
    return new
  for old in folder.parent.glob("python-*"):  # a gigabyte each
    shutil.rmtree(old, ignore_errors=True)
  end = time.monotonic() + seconds
  made = _run(python, "-m", "venv", "--clear", folder, seconds=seconds)
  assert made.returncode == 0, made.stdout
  install = ["-m", "pip", "install", "-q", "-r", requirements, *_TOOLS]
  try:
    done = _run(new, *install, seconds=end - time.monotonic())
  except subprocess.TimeoutExpired:
    pytest.skip(f"the package index was too slow: over {seconds:.0f} s")
  if done.returncode and any(sign in done.stdout for sign in _UNREACHABLE):
    pytest.skip(f"no package index: {done.stdout.splitlines()[-1]}")
  assert done.returncode == 0, done.stdout[-4000:]
  mark.touch()
  return new


def test_core_passes_on_a_newer_python(capsys):
  """The core's tests pass with the newest JAX on a newer Python."""
  if sys.version_info >= (3, 12):
    pytest.skip("the whole suite runs on a newer Python already")
  start = time.monotonic()
  python = _find_python()
  if python is None:
    pytest.skip(f"no interpreter of Python {' or '.join(_VERSIONS)} found")
  new = _make_environment(python, _BUDGET * 0.6)
  report = _run(new, "-c", _REPORT, seconds=20)
  with capsys.disabled():
    print(f"\n[newer Python] {report.stdout.strip()}")
  files = [f for name in _FILES if (f := _ROOT / "tests" / name).exists()]
  assert files, "with no file to run, pytest would run the whole suite"
  command = ["-m", "pytest", "-x", "-vv", "-p", "no:cacheprovider", *files]
  left = _BUDGET - (time.monotonic() - start)
  try:
    done = _run(new, *command, seconds=left)
  except subprocess.TimeoutExpired as cut:
    # `-x` ends at the first failure, so there was none yet.
    said = (cut.stdout or b"").decode()  # bytes, whatever `text` was
    num_passed = said.count(" PASSED ")
    assert num_passed, f"nothing passed in {left:.0f} s:\n{said[-4000:]}"
    pytest.skip(f"{num_passed} tests passed, none failed, then time was up")
  assert done.returncode == 0, done.stdout[-8000:]
  with capsys.disabled():
    print(f"[newer Python] {done.stdout.strip().splitlines()[-1]}")
