"""Builds the C++ kernels for this machine at first use and registers them.

The library lies in the user's cache, named by everything it depends on: the
source, the flags, the processor and jaxlib, whose headers it is built with. A
note beside it says which file is the library and what its SHA-256 is, so a
damaged one is built again and never loaded. Both get their names when they
are complete: processes may do this at the same time.
"""

import ctypes
import functools
import hashlib
from importlib import metadata
import json
import logging
import os
from pathlib import Path
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading

import jax

from spec_jax.builtin import cache_dir, sha256_of

__all__ = [
  "ATTENTION",
  "ROTATE",
  "ROW_SUMS",
  "TARGET",
  "KernelError",
  "choose",
  "require",
  "why_not",
]

# The names programs call the kernels by.
TARGET = "spec_jax_skinny_matmul"
ATTENTION = "spec_jax_attention"
ROTATE = "spec_jax_rotate"
ROW_SUMS = "spec_jax_row_sums"

_log = logging.getLogger(__name__)

_SOURCES = tuple(
  Path(__file__).with_name(name)
  for name in ("skinny_matmul.cc", "attention.cc", "rows.cc")
)
_HEADERS = tuple(
  Path(__file__).with_name(name) for name in ("units.h", "vec.h")
)
_SYMBOLS = {
  TARGET: "SpecJaxSkinnyMatmul",
  ATTENTION: "SpecJaxAttention",
  ROTATE: "SpecJaxRotate",
  ROW_SUMS: "SpecJaxRowSums",
}
_COMPILERS = ("c++", "g++", "clang++")
# No contraction: only what the source fuses is fused, the same in every tile.
_FLAGS = (
  *("-O3", "-std=c++17", "-shared", "-fPIC", "-DNDEBUG"),
  *("-ffp-contract=off", "-w"),
)
# The first that the compiler takes; some know only one name for "this CPU".
_MACHINE_FLAGS = (("-march=native",), ("-mcpu=native",), ())
# A build takes 5 s on an idle machine of 2023.
_TIMEOUT_S = 300

# The symbols the registered library holds live as long as the process.
_LOCK = threading.Lock()


class KernelError(ValueError):
  """The kernel was asked for and cannot be had; says why in one line."""


def choose(mode: str) -> bool:
  """Decides whether the kernel is used, and makes it ready if so.

  Args:
    mode: "auto" uses it where it can be had, "on" insists, "off" does without.
      The environment variable SPEC_JAX_CPU_KERNEL stands in for "auto".

  Returns:
    Whether to pack weights for it.

  Raises:
    KernelError: if the mode is "on" and the kernel cannot be had.
    ValueError: if the mode is none of the three.
  """
  name = "cpu_kernel"
  if mode == "auto":
    name = "SPEC_JAX_CPU_KERNEL"
    mode = os.environ.get(name) or mode
  if mode not in ("auto", "on", "off"):
    raise ValueError(f"{name} must be auto, on or off, got {mode!r}")
  if mode == "off":
    return False
  if mode == "auto" and jax.default_backend() != "cpu":
    return False
  reason = why_not()
  if reason is None:
    return True
  if mode == "on":
    raise KernelError(f"{name}=on, but {reason}")
  _say_once(reason)
  return False


def why_not() -> str | None:
  """Builds, loads and registers the kernel; asked again, it only answers.

  Returns:
    None if programs can call it, else why it cannot be had.
  """
  if jax.default_backend() != "cpu":
    return f"the kernel is for CPUs, and JAX runs on {jax.default_backend()}"
  with _LOCK:
    return _register()


def require() -> None:
  """Raises KernelError unless programs can call the kernel."""
  if (reason := why_not()) is not None:
    raise KernelError(f"weights are packed for the CPU kernel, but {reason}")


@functools.cache
def _register() -> str | None:
  try:
    library = ctypes.CDLL(str(_library()))
    for target, symbol in _SYMBOLS.items():
      handler = jax.ffi.pycapsule(getattr(library, symbol))
      jax.ffi.register_ffi_target(target, handler, platform="cpu")
  except KernelError as error:
    return str(error)
  except (OSError, AttributeError) as error:
    return f"the built kernel cannot be loaded: {_last_line(str(error))}"
  return None


@functools.cache
def _say_once(reason: str) -> None:
  _log.warning(
    "no CPU kernel: %s; matrix products use XLA, where reading several tokens"
    " costs up to 2.5 times as much as reading one",
    reason,
  )


# --- the library in the cache -----------------------------------------------


def _library() -> Path:
  """Returns the library, from the cache or newly built.

  Raises:
    KernelError: if it cannot be built.
  """
  folder = cache_dir() / "kernels"
  note = folder / f"{_key()}.json"
  try:
    if found := _cached(note):
      return found
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
      made = Path(temporary) / "kernel.so"
      _compile(made)
      digest = sha256_of(made)
      library = folder / f"{note.stem}-{digest[:16]}.so"
      new_note = Path(temporary) / "note.json"
      new_note.write_text(json.dumps({"file": library.name, "sha256": digest}))
      os.replace(made, library)
      os.replace(new_note, note)
  except OSError as error:
    raise KernelError(f"{folder} cannot be used: {error.strerror}") from error
  return library


def _cached(note: Path) -> Path | None:
  """Returns the library a note names if it is whole."""
  try:
    said = json.loads(note.read_text())
    library = note.with_name(Path(said["file"]).name)
    return library if sha256_of(library) == said["sha256"] else None
  except (OSError, ValueError, KeyError, TypeError):
    return None


def _key() -> str:
  """Returns a name for all that the library depends on."""
  parts = (
    *(source.read_text() for source in _SOURCES + _HEADERS),
    repr((_FLAGS, _MACHINE_FLAGS)),
    os.environ.get("CXX", ""),
    platform.system(),
    platform.machine(),
    _processor(),
    metadata.version("jaxlib"),
  )
  digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
  return f"kernels-{digest[:16]}"


def _processor() -> str:
  """Returns the processor's model and instruction sets."""
  wanted = ("model name", "flags", "CPU part", "Features")
  try:
    with open("/proc/cpuinfo") as file:
      lines = {line.strip() for line in file if line.startswith(wanted)}
  except OSError:
    return platform.processor()
  return "\n".join(sorted(lines))


def _compile(target: Path) -> None:
  """Compiles the source.

  Raises:
    KernelError: if there is no compiler, or none of the flags work.
  """
  try:
    compiler = shlex.split(os.environ.get("CXX", ""))
  except ValueError as error:
    raise KernelError(f"CXX cannot be read: {error}") from error
  if not compiler:
    names = [name for name in _COMPILERS if shutil.which(name)]
    if not names:
      raise KernelError(f"there is no C++ compiler ({', '.join(_COMPILERS)})")
    compiler = names[:1]
  _log.info("building the CPU kernel with %s, once", compiler[0])
  include = ("-isystem", jax.ffi.include_dir())
  problem = ""
  for machine in _MACHINE_FLAGS:
    command = [*compiler, *_FLAGS, *machine, *include]
    command += [*map(str, _SOURCES), "-o", str(target)]
    try:
      done = subprocess.run(
        command, capture_output=True, text=True, timeout=_TIMEOUT_S
      )
    except (OSError, subprocess.TimeoutExpired) as error:
      reason = getattr(error, "strerror", None) or error
      raise KernelError(f"{compiler[0]} cannot be run: {reason}") from error
    if done.returncode == 0:
      return
    problem = problem or _first_error(done.stderr)
  raise KernelError(f"{compiler[0]} cannot build it: {problem}")


def _first_error(text: str) -> str:
  lines = [line.strip() for line in text.splitlines() if line.strip()]
  errors = [line for line in lines if "error" in line]
  return (errors or lines or ["it says nothing"])[0]


def _last_line(text: str) -> str:
  return (text.strip().splitlines() or ["no reason given"])[-1]
