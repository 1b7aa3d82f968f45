"""Result files: JSON lines that survive a kill, beside a manifest."""

from collections.abc import Callable, Container, Hashable, Mapping, Sequence
import datetime
import hashlib
import json
import os
from pathlib import Path
import platform
import subprocess
from typing import Any

from experiments.launch import UserError


def environment() -> dict[str, Any]:
  """Returns versions, device and commit: what a number depends on.

  `matmul_precision` is that of models loaded without another.
  """
  from importlib import metadata

  import jax

  from spec_jax.models import decoder

  def version(name):
    try:
      return metadata.version(name)
    except metadata.PackageNotFoundError:
      return None

  device = jax.devices()[0]
  return {
    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    "commit": _commit(),
    "python": platform.python_version(),
    "versions": {
      name: version(name)
      for name in ("jax", "jaxlib", "numpy", "transformers", "flax", "gguf")
    },
    "platform": device.platform,
    "device": device.device_kind,
    "num_devices": jax.device_count(),
    "processor": _processor(),
    "matmul_precision": decoder.PRECISION,
    "cpus": len(os.sched_getaffinity(0))
    if hasattr(os, "sched_getaffinity")
    else os.cpu_count(),
  }


def _processor() -> str:
  try:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
      if line.startswith("model name"):
        return line.split(":", 1)[1].strip()
  except OSError:
    pass
  return platform.processor() or platform.machine()


def _commit() -> str | None:
  """Returns the commit of this source tree, with `+` if it was changed."""
  here = Path(__file__).resolve().parent

  def git(*words):
    out = subprocess.run(
      ["git", "-C", str(here), *words], capture_output=True, text=True
    )
    return out.stdout.strip() if out.returncode == 0 else None

  try:
    commit = git("rev-parse", "HEAD")
    if not commit:
      return None
    dirty = git("status", "--porcelain", "--untracked-files=no")
  except OSError:
    return None
  return commit + ("+" if dirty else "")


def lock_file(file: Any, path: Path) -> None:
  """Keeps other runs out of a file until it is closed.

  Raises:
    UserError: if another run writes it.
  """
  try:
    import fcntl
  except ImportError:  # not on this system
    return
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    raise UserError(f"another run is writing {path}") from None


def digest(value: Any) -> str:
  """Returns the SHA-256 of a JSON value."""
  return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _prompt_of(record: Mapping[str, Any]) -> Hashable:
  number = record["prompt"]
  if type(number) is not int:
    raise TypeError(f"a prompt's number is no integer: {number!r}")
  return number


class ResultFile:
  """A JSON-lines file with one line a prompt, and `<name>.manifest.json`.

  A run that was killed is resumed: prompts with a whole line are skipped, a
  torn last line is cut off. A file of another configuration is never touched.

  Attributes:
    done: number of the prompt (or what else `key` gives) -> its line.
    manifest: of the run that is resumed, else empty.
  """

  def __init__(
    self,
    path: str,
    identity: Mapping[str, Any],
    key: Callable[[Mapping[str, Any]], Any] = _prompt_of,
    *,
    keys: Container[Any] | None = None,
    fields: Sequence[str] = (),
  ):
    """Opens or creates the file.

    Args:
      path: of the JSON-lines file.
      identity: what must be equal for a run to be resumed (configuration and
        prompts).
      key: what tells lines apart, where it is not the prompt's number.
      keys: those that a line may have; None = any.
      fields: names that a line must hold.

    Raises:
      UserError: if it or its manifest cannot be written, or it holds another
        run or a line that is no result.
    """
    self.path = Path(path)
    self.manifest_path = self.path.with_name(
      self.path.name.removesuffix(".jsonl") + ".manifest.json"
    )
    self._temporary = self.manifest_path.with_name(
      self.manifest_path.name + ".tmp"
    )
    self._identity = digest(identity)
    self._key, self._keys, self._fields = key, keys, tuple(fields)
    self.done: dict[Any, dict[str, Any]] = {}
    self.manifest: dict[str, Any] = {}
    self._file: Any = None
    try:
      self._open()
    except OSError as error:
      raise UserError(f"cannot write {path}: {error.strerror}") from error
    except UserError:
      if self._file is not None:
        self._file.close()
      raise

  def _open(self) -> None:
    folder = self.path.resolve().parent
    if not folder.is_dir():
      raise UserError(f"cannot write {self.path}: {folder} is no folder")
    if not os.access(folder, os.W_OK):  # the manifest will lie there too
      raise UserError(f"cannot write {self.path}: {folder} is read-only")
    self._made = not self.path.exists()
    for path in (self.path, self.manifest_path, self._temporary):
      if path.is_dir():
        raise UserError(f"cannot write {path}: it is a folder")
    self._file = open(self.path, "a", encoding="utf-8")
    lock_file(self._file, self.path)
    if not self._made and self.path.stat().st_size:
      self._check_same_run()
      whole = 0
      with open(self.path, "rb") as file:
        for line in file:
          if not line.endswith(b"\n"):
            break
          try:
            record = json.loads(line)
            name = self._name(record)
            if name in self.done:
              raise ValueError(f"{name} twice")
            self.done[name] = record
          except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise UserError(
              f"{self.path} holds a line that is no result; give another --out"
            ) from error
          whole += len(line)
      with open(self.path, "r+b") as file:
        file.truncate(whole)

  def _name(self, record: Mapping[str, Any]) -> Any:
    """Returns what tells a line apart, or raises if it is no result."""
    name = self._key(record)
    if self._keys is not None and name not in self._keys:
      raise ValueError(f"{name} is none of this run")
    if missing := [field for field in self._fields if field not in record]:
      raise KeyError(missing[0])
    return name

  def _check_same_run(self) -> None:
    problem = (
      f"{self.path} holds results of another configuration or other prompts; "
      "give another --out or move it away"
    )
    try:
      manifest = json.loads(self.manifest_path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
      raise UserError(problem) from error
    if not isinstance(manifest, dict):
      raise UserError(problem)
    if manifest.get("identity") != self._identity:
      raise UserError(problem)
    self.manifest = manifest

  def check_same(self, name: str, value: Any) -> None:
    """Checks that a value is the one of the run that is resumed.

    Raises:
      UserError: if the manifest holds another value under that name.
    """
    if self.manifest.get(name, value) != value:
      raise UserError(
        f"{self.path} holds results with another {name}; give another --out "
        "or move it away"
      )

  def write(self, record: Mapping[str, Any]) -> None:
    """Appends one line and hands it to the operating system."""
    self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
    self._file.flush()
    self.done[self._key(record)] = dict(record)

  def write_manifest(self, manifest: Mapping[str, Any]) -> None:
    """Writes the manifest in one piece: the old one or the new one exists."""
    whole = {"identity": self._identity, **manifest}
    self._temporary.write_text(
      json.dumps(whole, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    os.replace(self._temporary, self.manifest_path)

  def close(self) -> None:
    """Closes the file; one of this run with nothing in it is taken away."""
    self._file.close()
    if self._made and not self.done and not self.manifest_path.exists():
      self.path.unlink(missing_ok=True)
