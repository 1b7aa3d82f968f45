"""From a configuration to checked objects; what every command shares."""

from collections.abc import Callable, Mapping
import contextlib
import importlib.util
from pathlib import Path
import re
import sys
from typing import Any, NoReturn

from absl import app, flags
from ml_collections import ConfigDict

from spec_jax import (
  builtin,
  drafters,
  hub,
  length,
  programs,
  sharding,
  verifiers,
)
from spec_jax.architecture import check_layers
from spec_jax.costs import check_costs
from spec_jax.drafting import check_fit
from spec_jax.options import check_known
from spec_jax.pairing import (
  check_same_vocabulary,
  names_layers_file,
  open_folder,
  parse_draft,
  read_layers,
  vocabulary_map_of,
)
from spec_jax.settings import Settings
from spec_jax.trained_draft import TrainedDraft

# A draft that a configuration names, its weights not yet read.
Draft = hub.Inspected | TrainedDraft | str | int | tuple[int, ...] | None

_DEVICE_FILES = (
  "/dev/accel0",
  "/dev/vfio/0",
  "/dev/nvidia0",
  "/dev/kfd",
  "/dev/dxg",
)


class UserError(Exception):
  """Something the user can mend; its text is one plain line."""


def _inner(error: BaseException) -> str:
  """Returns an error's text without the quotes that nested errors add."""
  while error.args and isinstance(error.args[0], BaseException):
    error = error.args[0]
  return str(error.args[0] if error.args else error).strip("'\"")


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


def _set_options(config: ConfigDict, leave_out, kind: str, options) -> dict:
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


def drafter_options(drafter: ConfigDict) -> dict[str, Any]:
  """Returns the options that are set, checked against the drafter's.

  Raises:
    UserError: for an unknown drafter, or an option it does not have.
  """
  chosen = _set_options(drafter, ("name", "draft"), "drafter", drafters.options)
  for key in ("tree", "parents"):
    if key in chosen and not all(type(i) is int for i in chosen[key]):
      raise UserError(f"{key} holds integers, got {chosen[key]}")
  return chosen


def policy_arguments(config: ConfigDict) -> dict[str, Any]:
  """Returns verifier, length policy and its options that are set.

  Raises:
    UserError: for an unknown policy, or an option it does not have.
  """
  policy = config.policy
  chosen = _set_options(
    policy, ("name", "costs"), "length policy", length.options
  )
  try:
    costs = tuple(float(x) for x in policy.costs) or None
  except (TypeError, ValueError) as error:
    raise UserError(
      f"policy.costs holds seconds, got {policy.costs}"
    ) from error
  judge = _set_options(
    config.verifier, ("name",), "verifier", verifiers.options
  )
  return {
    "verifier": config.verifier.name,
    "verifier_options": judge,
    "policy": policy.name,
    "policy_options": chosen,
    "costs": costs,
  }


def effective(config: ConfigDict, options: Mapping[str, Any]) -> dict[str, Any]:
  """Returns all options of the drafter, its defaults filled in."""
  return plain_dict({**drafters.options(config.drafter.name), **options})


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


def inspect_draft(config: ConfigDict, target: hub.Inspected) -> Draft:
  """Returns the draft that a configuration names, not yet read.

  Raises:
    UserError: if it is missing, superfluous, or its vocabulary differs.
  """
  name, draft = config.drafter.name, str(config.drafter.draft)
  with user_errors():
    takes_draft = drafters.takes_draft(name, drafter_options(config.drafter))
  if not takes_draft:
    if draft:
      raise UserError(f"drafter {name!r} takes no draft model, got {draft!r}")
    return None
  with user_errors():
    kind = drafters.takes_heads(name, drafter_options(config.drafter))
  if kind:
    return _inspect_heads(name, kind, draft, target)
  if not draft:
    raise UserError(
      f"drafter {name!r} needs --config.drafter.draft: a model's name, "
      "'target', a number of the target's layers, layers like 0-5,24-29, or "
      "@FILE of a search or the folder of a trained draft"
    )
  if names_layers_file(draft):
    with user_errors():
      return read_layers(draft, target.loaded)
  with user_errors():
    parsed = parse_draft(draft)
  if parsed == "target":
    return parsed
  if not isinstance(parsed, str):
    with user_errors():
      check_layers(target.loaded.model.config, parsed)
    return parsed
  found = open_folder(draft, target.loaded)
  if found is not None:
    return found
  opened = inspect(draft, config)
  if not drafters.takes_vocabulary_map(name):
    with user_errors():
      check_same_vocabulary(target.loaded.tokenizer, opened.loaded.tokenizer)
  return opened


def _inspect_heads(
  name: str, kind: str, draft: str, target: hub.Inspected
) -> Draft:
  """Returns the heads of a drafter, from a folder or the hub.

  Raises:
    UserError: if there are none.
  """
  if not draft:
    raise UserError(
      f"drafter {name!r} needs --config.drafter.draft: the folder of trained "
      f"{kind} heads, or their name on the hub"
    )
  folder = draft
  on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", draft)
  if on_hub and not Path(draft).expanduser().exists():
    folder = str(hub.snapshot(draft))
  found = open_folder(folder, target.loaded)
  if found is None:
    raise UserError(
      f"{draft} holds no {kind} heads (a card of a training, or config.json "
      "and safetensors; .bin and .pt files must be saved as safetensors)"
    )
  return found


def check_sizes(
  target: hub.Inspected,
  draft: Draft,
  config: ConfigDict,
  options: Mapping[str, Any],
) -> None:
  """Checks the engine's sizes and the drafter's options; reads no weight.

  Raises:
    UserError: naming what is out of range.
  """
  engine, model = config.engine, target.loaded.model
  draft_model = vocabulary_map = None
  if draft is not None:
    # The options do not depend on which layers of the target draft.
    if isinstance(draft, TrainedDraft):
      draft_model = draft.model
    else:
      opened = draft if isinstance(draft, hub.Inspected) else target
      draft_model = opened.loaded.model
  context = model.config.max_length
  if engine.slots > context:
    raise UserError(f"{engine.slots} slots; the model's context is {context}")
  chosen = policy_arguments(config)
  with user_errors():
    programs.EngineConfig(
      batch_size=engine.batch_size or 1,
      slots=engine.slots or context,
      chunk=engine.chunk,
      refill_rows=engine.refill_rows,
      drafter=config.drafter.name,
      verifier=config.verifier.name,
      policy=config.policy.name,
      policy_options=tuple(chosen["policy_options"].items()),
    ).resolved()
    if drafters.takes_vocabulary_map(config.drafter.name):
      words = getattr(draft, "loaded", draft)
      vocabulary_map = vocabulary_map_of(target.loaded, words)
    drafter = drafters.build(
      config.drafter.name,
      model,
      draft_model,
      slots=engine.slots or context,
      vocabulary_map=vocabulary_map,
      **options,
    )
    check_fit(
      config.drafter.name,
      drafter,
      sampled=config.sampling.temperature > 0,
      vocabulary=target.loaded.hashes.get("tokenizer"),
    )
    if drafter.depth:
      options = chosen["policy_options"]
      policy = length.build(config.policy.name, drafter.depth, **options)
      length.check(policy, drafter)
      verifiers.build(
        config.verifier.name, drafter, **chosen["verifier_options"]
      )
      if chosen["costs"] is not None and policy.needs_costs:
        check_costs(chosen["costs"], drafter)


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


def read_draft(draft: Draft):
  """Reads the draft's weights if it is another model."""
  return draft.read() if isinstance(draft, hub.Inspected) else draft


def plain_dict(config: Mapping) -> dict[str, Any]:
  """Returns a configuration as plain JSON types."""

  def plain(x):
    if isinstance(x, Mapping | ConfigDict):
      return {k: plain(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
      return [plain(v) for v in x]
    return x

  return plain(config)
