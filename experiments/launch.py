"""From a configuration to checked objects; what every command shares."""

from collections.abc import Callable, Mapping
import contextlib
import errno
import importlib.util
import logging
import os
from pathlib import Path
import re
import sys
from typing import Any, NoReturn

from absl import app, flags
from ml_collections import ConfigDict

from spec_jax import (
  builtin,
  hub,
  length,
  sharding,
  verifiers,
)
from spec_jax.options import check_known
from spec_jax.settings import Settings

_DEVICE_FILES = (
  "/dev/accel0",
  "/dev/vfio/0",
  "/dev/nvidia0",
  "/dev/kfd",
  "/dev/dxg",
)
# Of what cannot be written, wherever it strikes.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_TOO_LARGE = "not enough memory: fewer rows or slots take less"
# With the other order XLA's CPU devices may wait for each other for ever where
# a program has independent collectives.
_ORDERED = "xla_cpu_enable_concurrency_optimized_scheduler"


class UserError(Exception):
  """Something the user can mend; its text is one plain line."""


def _inner(error: BaseException) -> str:
  """Returns an error's text without the quotes that nested errors add."""
  while error.args and isinstance(error.args[0], BaseException):
    error = error.args[0]
  said = str(error.args[0] if error.args else error)
  return said.strip("'\"").replace("' Did you mean", ": did you mean")


def fail(message: str) -> NoReturn:
  """Ends the command with one plain line and exit code 2."""
  print(f"error: {' '.join(str(message).split())}", file=sys.stderr)
  sys.exit(2)


def run(
  main: Callable[..., int | None],
  config: str = "",
  *,
  takes_files: bool = False,
) -> None:
  """Runs an absl command whose user errors are one line and exit code 2.

  Args:
    main: the command; with `takes_files` it is given the words that are no
      flags.
    config: file that the flag --config means if it is not given. (A default
      of the flag itself is read on import, and its errors are tracebacks.)
    takes_files: whether words that are no flags are allowed.
  """
  prepare_jax()

  def parse(argv):
    named = any(re.match(r"--?config(=|$)", word) for word in argv[1:])
    if config and not named:
      argv = [argv[0], f"--config={config}", *argv[1:]]
    try:
      rest = flags.FLAGS(argv)
      if config:
        # Raises what reading the file raised.
        getattr(flags.FLAGS["config"].value, "lock", None)
    except (AttributeError, KeyError) as error:
      fail(f"unknown field of the configuration: {_inner(error)}")
    except (flags.Error, TypeError, ValueError) as error:
      fail(str(error))
    except (OSError, SyntaxError, ImportError) as error:
      why = str(error).rpartition("\n")[2]
      fail(f"cannot read the configuration: {why}")
    if len(rest) > 1 and not takes_files:
      fail(f"unexpected argument {rest[1]!r}; prompts go after --prompt")
    return rest

  def body(words):
    try:
      return main(words[1:]) if takes_files else main()
    except (UserError, hub.LoadError) as error:
      fail(str(error))
    except OSError as error:
      if error.errno not in _FULL:
        raise
      where = f" {error.filename}" if error.filename else ""
      fail(f"cannot write{where}: {error.strerror}")
    except MemoryError as error:
      fail(f"{_TOO_LARGE}: {error}")
    except RuntimeError as error:  # JAX's own is one
      if "RESOURCE_EXHAUSTED" not in str(error):
        raise
      fail(f"{_TOO_LARGE}: {str(error).splitlines()[0]}")
    except KeyboardInterrupt:
      print("\nstopped", file=sys.stderr)
      return 130

  app.run(body, flags_parser=parse)


def prepare_jax() -> None:
  """Sets what must be set before JAX starts a back end.

  Compiled programs are kept on disk, so a second start is fast. Where libtpu
  is installed (the tests do) and no accelerator's device file is there, JAX
  is told to use the CPU: it would look for a TPU for seconds, and complain.
  """
  import jax

  has_libtpu = importlib.util.find_spec("libtpu") is not None
  no_device = not any(Path(f).exists() for f in _DEVICE_FILES)
  if (
    has_libtpu and no_device and not getattr(jax.config, "jax_platforms", None)
  ):
    jax.config.update("jax_platforms", "cpu")
  if not getattr(jax.config, "jax_compilation_cache_dir", None):
    folder = builtin.cache_dir() / "xla"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
  given = os.environ.get("XLA_FLAGS", "")
  if "host_platform_device_count" in given and _ORDERED not in given:
    os.environ["XLA_FLAGS"] = f"{given} --{_ORDERED}=false"
  # It tells of every back end that is not there.
  logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)


@contextlib.contextmanager
def user_errors():
  """Turns a ValueError raised inside into a `UserError`."""
  try:
    yield
  except ValueError as error:
    raise UserError(str(error)) from error


def settings_of(sampling: ConfigDict) -> Settings:
  """Returns the sampling part of a configuration, checked as far as it can be.

  Raises:
    UserError: naming the setting, its value and its range.
  """
  fields = dict(sampling)
  with user_errors():
    try:
      settings = Settings(**fields)
      settings.check(1 << 30)  # ids are checked once the vocabulary is known
    except TypeError as error:
      raise ValueError(f"config.sampling: {error}") from error
  return settings


def set_options(config: ConfigDict, leave_out, kind: str, options) -> dict:
  """Returns the options of a part that are set, checked by name.

  Args:
    config: the part; its `name` chooses what the options belong to.
    leave_out: fields that are no options.
    kind: what is chosen.
    options: returns the options of a name.

  Raises:
    UserError: for an unknown name, or an option it does not have.
  """
  chosen = {
    key: value
    for key, value in config.items()
    if key not in leave_out and value is not None
  }
  with user_errors():
    check_known(f"{kind} {config.name!r}", chosen, options(config.name))
  return chosen


def policy_arguments(config: ConfigDict) -> dict[str, Any]:
  """Returns verifier, length policy and its options that are set.

  Raises:
    UserError: for an unknown policy, or an option it does not have.
  """
  policy = config.policy
  chosen = set_options(
    policy, ("name", "costs"), "length policy", length.options
  )
  try:
    costs = tuple(float(x) for x in policy.costs) or None
  except (TypeError, ValueError) as error:
    raise UserError(
      f"policy.costs holds seconds, got {policy.costs}"
    ) from error
  judge = set_options(config.verifier, ("name",), "verifier", verifiers.options)
  return {
    "verifier": config.verifier.name,
    "verifier_options": judge,
    "policy": policy.name,
    "policy_options": chosen,
    "costs": costs,
  }


def mesh_of(text: str):
  """Returns the mesh that "2x4" names (rows x model), or None for "".

  Raises:
    UserError: if it is not of that form or there are too few devices.
  """
  if not text:
    return None
  parts = text.lower().split("x")
  if len(parts) != 2 or not all(p.isascii() and p.isdigit() for p in parts):
    raise UserError(f"mesh must look like 2x4 (rows x model), got {text!r}")
  with user_errors():
    return sharding.make_mesh(int(parts[0]), int(parts[1]))


def inspect(name: str, config: ConfigDict) -> hub.Inspected:
  """Opens a model without reading its weights.

  Args:
    name: of the model.
    config: says how it is held: dtype, CPU kernel (not on a mesh).

  Raises:
    UserError: if it cannot be opened or held so.
  """
  execution = config.execution
  kernel = execution.cpu_kernel
  if config.mesh and kernel == "on":
    raise UserError("the CPU kernel does not run on a mesh: use cpu_kernel=off")
  with user_errors():
    return hub.inspect(
      name,
      dtype=config.dtype or None,
      cpu_kernel="off" if config.mesh else kernel,
      cpu_weights=execution.weights,
      precision=execution.matmul_precision,
    )


def rows_of(config: ConfigDict, wanted: int, mesh) -> int:
  """Returns the rows of a batch: those asked for, or as many as are wanted.

  Raises:
    UserError: if the mesh cannot divide the rows asked for.
  """
  data = 1 if mesh is None else mesh.shape["data"]
  rows = config.engine.batch_size
  if rows % data:
    raise UserError(
      f"batch_size {rows} is not a multiple of the mesh's {data} row devices"
    )
  return rows or -(-wanted // data) * data


def plain_dict(config: Mapping) -> dict[str, Any]:
  """Returns a configuration as plain JSON types."""

  def plain(x):
    if isinstance(x, Mapping | ConfigDict):
      return {k: plain(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
      return [plain(v) for v in x]
    return x

  return plain(config)
