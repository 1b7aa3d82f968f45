"""Rules that hold for the whole tree, not for one module.

A file stays under 450 lines so that it holds one idea and is read in one
sitting; the target is 400, the rest is room for a docstring that needs it.
"""

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
import re
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest

_ROOT = Path(__file__).resolve().parents[1]
_MAX_LINES = 450
# The page of all types, which is one idea however long.
_LONGER = {"spec_jax/base.py": 550}
_PACKAGES = ("spec_jax", "train", "experiments")

# Distribution name -> import name, where they differ.
_IMPORT_NAMES = {
  "absl-py": "absl",
  "ml-collections": "ml_collections",
  "orbax-checkpoint": "orbax",
}

# Requirements that no file imports, each with its reason.
_NOT_IMPORTED = {
  "jinja2": "transformers imports it to render chat templates",
}

# Imports each module in turn, then sets a device flag and counts devices.
_IMPORT_ALL = """
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.pop("XLA_FLAGS", None)
sys.modules["torch"] = None  # an import of it raises ImportError

import importlib

from absl import flags
from jax._src import xla_bridge

kept = set(flags.FLAGS)
for name in sys.argv[1:]:
  importlib.import_module(name)
  assert not xla_bridge._backends, f"{name} started a back end on import"
  # Two commands may both define --config; they never run in one process.
  for flag in set(flags.FLAGS) - kept:
    delattr(flags.FLAGS, flag)

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=3"
import jax

print(jax.device_count())
"""


def _files(*folders: str) -> list[Path]:
  """Returns the Python files of `folders`, sorted."""
  return sorted(p for f in folders for p in (_ROOT / f).rglob("*.py"))


def _name(path: Path) -> str:
  return path.relative_to(_ROOT).as_posix()


def _module(path: Path) -> str:
  parts = path.relative_to(_ROOT).with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path) -> Iterator[str]:
  """Yields the top-level names a file imports, wherever in the file."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      for alias in node.names:
        yield alias.name.split(".")[0]
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
      yield node.module.split(".")[0]


def _requirements() -> list[str]:
  """Returns the names in requirements.txt."""
  lines = (_ROOT / "requirements.txt").read_text().splitlines()
  found = [re.match(r"[A-Za-z0-9._-]+", line) for line in lines]
  return [match.group(0) for match in found if match]


def _bash_lines(text: str) -> list[str]:
  """Returns the lines of all fenced bash blocks; `\\` joins a line's parts."""
  blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
  lines = "".join(blocks).replace("\\\n", " ").splitlines()
  return [s for s in lines if s.strip() and not s.lstrip().startswith("#")]


def _exists(module: str) -> bool:
  """Whether `python -m module` would find a file, without importing it."""
  path = _ROOT / module.replace(".", "/")
  if path.with_suffix(".py").exists() or (path / "__main__.py").exists():
    return True
  return not (_ROOT / module.split(".")[0]).exists() and bool(
    find_spec(module.split(".")[0])
  )


def test_imports_start_no_back_end_and_need_no_torch():
  """Device flags set after importing every module still count."""
  # A notebook runs on import: it is one long script.
  modules = [
    _module(path)
    for path in _files(*_PACKAGES)
    if "notebooks" not in path.relative_to(_ROOT).parts
  ]
  assert "spec_jax.base" in modules
  done = subprocess.run(
    [sys.executable, "-c", _IMPORT_ALL, *modules],
    cwd=_ROOT,
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.returncode == 0, done.stderr[-4000:]
  assert done.stdout.split() == ["3"], done.stdout


def test_torch_is_imported_nowhere():
  """No runtime file imports torch, not even inside a function."""
  files = _files(*_PACKAGES, "configs")
  assert [_name(f) for f in files if "torch" in _imports(f)] == []


def test_files_hold_one_idea():
  """No file is longer than the limit in this module's docstring."""
  lines = {
    _name(f): len(f.read_text().splitlines()) for f in _files(*_PACKAGES)
  }
  most = {f: _LONGER.get(f, _MAX_LINES) for f in lines}
  assert {f: n for f, n in lines.items() if n > most[f]} == {}


def test_modules_have_docstrings():
  """Every file says in its first lines what it is for."""
  files = _files(*_PACKAGES, "configs", "tests")
  bare = [f for f in files if not ast.get_docstring(ast.parse(f.read_text()))]
  assert [_name(f) for f in bare] == []


def test_public_names_have_docstrings():
  """Every public function, class and method has a docstring."""

  def bare(body, prefix):
    for node in body:
      if not isinstance(
        node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
      ) or node.name.startswith("_"):
        continue
      if not ast.get_docstring(node):
        yield f"{prefix}{node.name}"
      if isinstance(node, ast.ClassDef):
        yield from bare(node.body, f"{prefix}{node.name}.")

  found = [
    name
    for path in _files(*_PACKAGES, "configs")
    for name in bare(ast.parse(path.read_text()).body, f"{_name(path)}: ")
  ]
  assert found == []


def test_readme_states_the_test_command():
  """CI finds one bash block between the markers, and it runs the tests."""
  text = (_ROOT / "README.md").read_text()
  between = re.findall(
    r"^<!-- test-command -->\n(.*?)^<!-- /test-command -->$",
    text,
    re.DOTALL | re.MULTILINE,
  )
  assert len(between) == 1
  assert between[0].count("```") == 2
  assert _bash_lines(between[0]) == [
    "pip install -r requirements-test.txt",
    "python -m pytest -n 2 --dist loadfile --no-loadscope-reorder",
  ]


def test_readme_commands_exist():
  """Every module, script and config a README command names is there."""
  lines = _bash_lines((_ROOT / "README.md").read_text())
  missing = []
  for line in lines:
    modules = re.findall(r"\bpython3?(?:\.\d+)? -m (\S+)", line)
    # `--config=configs/x.py:variant` names configs/x.py.
    words = [re.sub(r"^--?[\w.-]+=", "", w).split(":")[0] for w in line.split()]
    files = [w for w in words if re.search(r"\.py$|^requirements.*\.txt$", w)]
    missing += [m for m in modules if not _exists(m)]
    missing += [f for f in files if not (_ROOT / f).exists()]
  assert missing == []


def test_requirements_are_used():
  """Every requirement is imported somewhere, or excused with a reason."""
  used = {
    name for path in _files(*_PACKAGES, "configs") for name in _imports(path)
  }
  names = _requirements()
  assert "jax" in names and len(names) == len(set(names))
  unused = {n for n in names if _IMPORT_NAMES.get(n, n) not in used}
  assert unused - set(_NOT_IMPORTED) == set()
  assert set(_NOT_IMPORTED) <= set(names)


def test_imports_are_required():
  """Every third-party package that is imported stands in requirements.txt."""
  required = {_IMPORT_NAMES.get(n, n) for n in _requirements()}
  # jaxlib comes with jax.
  own = {*_PACKAGES, "configs", "jaxlib", *sys.stdlib_module_names}
  unlisted = {
    f"{_name(path)}: {name}"
    for path in _files(*_PACKAGES, "configs")
    for name in set(_imports(path)) - required - own
  }
  assert unlisted == set()


def test_strict_flags_are_on():
  """A test that promotes a rank, reuses a key or warns fails."""
  with pytest.raises(ValueError, match="rank"):
    jnp.ones((2, 3)) + jnp.ones(3)
  key = jax.random.key(0)
  jax.random.uniform(key)
  with pytest.raises(jax.errors.KeyReuseError):
    jax.random.normal(key)
  with pytest.raises(UserWarning, match="seen"):
    warnings.warn("seen", stacklevel=1)


def test_the_test_machine_has_eight_devices():
  """Sharding tests find the devices that conftest.py asks for."""
  assert jax.device_count() >= 8
