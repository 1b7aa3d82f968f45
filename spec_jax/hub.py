"""From a name to a model, its parameters and its tokenizer.

A name is tried as a built-in name, a local folder, a local GGUF file and a
name on the Hugging Face hub, in this order. Whatever can be known before the
weights are read is checked before.
"""

from collections.abc import Callable, Iterable, Mapping
import functools
import hashlib
import json
import logging
import os
from pathlib import Path
import re
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import (
  gguf_hf,
  gguf_io,
  kernels,
  models,
  vocabulary,
  weights,
)
from spec_jax.base import Model, PyTree
from spec_jax.builtin import BUILTIN, download_builtin, sha256_of
from spec_jax.models import decoder
from spec_jax.safetensors_io import LoadError, Tensor, open_safetensors
from spec_jax.vocabulary import as_ids

__all__ = [
  "Inspected",
  "LoadError",
  "Loaded",
  "inspect",
  "load",
  "weights_hash",
]

_log = logging.getLogger(__name__)


class Loaded(NamedTuple):
  """A model ready to run.

  Attributes:
    model: pure functions; `model.config` is the architecture.
    params: its parameters.
    tokenizer: a transformers tokenizer, or None.
    config: the Hugging Face configuration as read, or as a GGUF file's
      metadata amount to.
    name: what `load` was given.
    hashes: SHA-256 of "config" and "tokenizer" (tokenizer.json).
    stop_ids: ids that end a text, the model's own first.
    files: the weight files, see `weights_hash`.
  """

  model: Model
  params: PyTree
  tokenizer: Any
  config: dict[str, Any]
  name: str
  hashes: dict[str, str]
  stop_ids: tuple[int, ...]
  files: tuple[Path, ...]


# Beyond it a layer loop compiles too long (design, D3).
_SCAN_ABOVE = 40
# What is fetched from the hub before a config has been accepted, and after.
_SMALL_FILES = ("*.json", "*.jinja", "merges.txt", "tokenizer.model")
_WEIGHT_FILES = ("*.safetensors",)
# Signs of draft heads in a config.json or among tensor names.
_HEADS = {
  "Medusa": (r"medusa.*", r"(medusa_head\.)?\d+\.\d+\..*"),
  "EAGLE": (r"draft_vocab_size", r"(model\.)?fc\.weight|d2t|t2d"),
}


class _Found(NamedTuple):
  """Files of a model, headers read.

  Attributes:
    config: Hugging Face style.
    tensors: by Hugging Face name.
    files: weight files.
    words: what holds the tokenizer.
    eos: ids the model itself ends with.
  """

  config: dict[str, Any]
  tensors: dict[str, Tensor]
  files: tuple[Path, ...]
  words: Path | gguf_io.GGUF
  eos: tuple[int, ...]


class Inspected(NamedTuple):
  """A model that was opened and checked, its weights not yet read.

  Attributes:
    loaded: everything but the weights; `params` is None.
    read: reads the weights and returns `loaded` with them.
  """

  loaded: Loaded
  read: Callable[[], Loaded]


def load(name: str | os.PathLike, **kwargs) -> Loaded:
  """Loads a model by name, folder or file: `inspect(...).read()`.

  Args:
    name: see `inspect`.
    **kwargs: see `inspect`.

  Returns:
    The model with everything that belongs to it.

  Raises:
    LoadError: see `inspect`.
  """
  return inspect(name, **kwargs).read()


def inspect(
  name: str | os.PathLike,
  *,
  dtype: Any = None,
  scan_layers: bool | None = None,
  revision: str | None = None,
  tokenizer: bool = True,
  cpu_kernel: str = "auto",
  cpu_weights: str = "float32",
  precision: str = decoder.PRECISION,
) -> Inspected:
  """Opens a model and checks all that can be known before weights are read.

  Args:
    name: a key of `BUILTIN`; a folder with config.json and safetensors; a
      .gguf file; or "organisation/model" on the Hugging Face hub.
    dtype: of the parameters, "float32", "bfloat16" or "float16"; by default
      float32 on CPU and bfloat16 elsewhere.
    scan_layers: whether layers are stacked and scanned; by default on TPU and
      GPU with more than 40 layers that are alike.
    revision: branch, tag or commit of a hub name.
    tokenizer: whether to load the tokenizer too.
    cpu_kernel: whether matrices are packed for the CPU kernel, which reads a
      block of tokens at about the price of one: "auto" (on a CPU, for float32
      parameters that are not stacked, if it can be built), "on" or "off"
      (training and meshes need plain arrays).
    cpu_weights: what matrices hold on a CPU, "float32" or "bfloat16" (rounded
      once, computed in float32: another model). Packed ones are stored in half
      the bytes and read in half the time; without the kernel the rounded
      values take float32's room.
    precision: of matrix products, see `decoder.build`; "default" leaves it to
      the device.

  Returns:
    Inspected.

  Raises:
    LoadError: one plain line, if the name means nothing, files are missing or
      damaged, or the model is of a kind that is not supported. Config, header,
      tensor names and shapes, and the tokenizer's size are checked before any
      weight is read.
  """
  name = os.fspath(name)
  if precision not in ("highest", "high", "default"):
    raise LoadError(
      f"precision must be highest, high or default, got {precision!r}"
    )
  dtype = _dtype(dtype)
  found = _find(name, revision)
  family, config = _architecture(found.config, name)
  if scan_layers is None:
    scan_layers = (
      jax.default_backend() != "cpu"
      and config.num_layers > _SCAN_ABOVE
      and len(set(config.windows)) == 1
    )
  try:
    plan = weights.check_tensors(family, config, found.tensors)
  except LoadError as error:
    raise LoadError(f"{name}: {error}") from error
  hashes = {"config": _sha256_of_json(found.config)}
  words = None
  if tokenizer:
    words, hashes["tokenizer"] = vocabulary.read_tokenizer(found.words, name)
    vocabulary.check_tokenizer(words, config.vocab_size, name)
  try:
    model = decoder.build(
      config,
      dtype=dtype,
      scan_layers=scan_layers,
      precision=None if precision == "default" else precision,
    )
  except ValueError as error:
    raise LoadError(f"{name}: {error}") from error
  stop_ids = vocabulary.stop_ids(found.eos, words, config.vocab_size)
  loaded = Loaded(
    model, None, words, found.config, name, hashes, stop_ids, found.files
  )

  store = _packer(cpu_kernel, cpu_weights, dtype, scan_layers)

  def read() -> Loaded:
    params = weights.read_params(
      plan, dtype=dtype, scan_layers=scan_layers, store=store
    )
    return loaded._replace(params=params)

  return Inspected(loaded, read)


def _packer(cpu_kernel: str, cpu_weights: str, dtype, scan_layers: bool):
  """Returns what packs parameters for the CPU kernel, or None."""
  fits = dtype == jnp.float32 and not scan_layers
  if cpu_kernel == "on" and not fits:
    raise LoadError(
      f"cpu_kernel=on needs float32 parameters that are not stacked, these "
      f"are {dtype}{' and stacked' if scan_layers else ''}"
    )
  if cpu_weights != "float32" and not fits:
    raise LoadError(
      f"cpu_weights={cpu_weights} rounds float32 parameters that are not "
      f"stacked, these are {dtype}{' and stacked' if scan_layers else ''}"
    )
  try:
    store = kernels.make_packer(cpu_weights)
    if kernels.choose(cpu_kernel if fits else "off"):
      return store
  except (ValueError, kernels.KernelError) as error:
    raise LoadError(str(error)) from error
  if cpu_weights == "float32":
    return None
  _log.warning(
    "weights are rounded to %s and held as float32: only the CPU kernel reads"
    " them in less room and time",
    cpu_weights,
  )
  return functools.partial(kernels.round_matrix, weights=cpu_weights)


def weights_hash(source: Loaded | str | os.PathLike) -> str:
  """Returns the SHA-256 of a model's weight files, for a manifest.

  One file: of its bytes. Several: of the lines `<hash>  <name>`, as sha256sum
  prints them, in order of name. Each is read once, see `sha256_of`.

  Args:
    source: what `load` returned, or a folder or file.

  Raises:
    LoadError: if there is no weight file.
  """
  if isinstance(source, Loaded):
    files: Iterable[Path] = source.files
  else:
    path = Path(source)
    files = (path,) if path.is_file() else _weight_files(path)
  hashes = [(path.name, sha256_of(path)) for path in sorted(files)]
  if len(hashes) == 1:
    return hashes[0][1]
  lines = "".join(f"{digest}  {name}\n" for name, digest in hashes)
  return hashlib.sha256(lines.encode()).hexdigest()


# --- names ------------------------------------------------------------------


def _find(name: str, revision: str | None) -> _Found:
  path = Path(name).expanduser()
  local = name in BUILTIN or path.exists() or name.endswith(".gguf")
  if local and revision is not None:
    raise LoadError(
      f"revision={revision!r} is for names on the hub, not {name}"
    )
  if name in BUILTIN:
    return _open_gguf(download_builtin(name))
  if path.is_dir():
    return _open_folder(path)
  if path.is_file() and path.suffix == ".gguf":
    return _open_gguf(path)
  if path.is_file():
    raise LoadError(f"{name} is a file, but not a .gguf file; give its folder")
  if local or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
    raise LoadError(
      f"{name!r} is no folder, no .gguf file, no built-in model"
      f" ({', '.join(BUILTIN)}) and no hub name (organisation/model)"
    )
  # The weights come only after config.json has been accepted.
  folder = _snapshot(name, revision, _SMALL_FILES)
  config = _read_json(folder / "config.json", name)
  _refuse_heads(config, (), name)
  _architecture(config, name)
  return _open_folder(_snapshot(name, revision, _SMALL_FILES + _WEIGHT_FILES))


def snapshot(name: str, revision: str | None = None) -> Path:
  """Returns a folder with the files of a name on the hub, config and weights.

  Raises:
    LoadError: in one line, if it cannot be got.
  """
  return _snapshot(name, revision, _SMALL_FILES + _WEIGHT_FILES)


def _snapshot(name: str, revision: str | None, patterns) -> Path:
  import huggingface_hub

  try:
    folder = huggingface_hub.snapshot_download(
      name, revision=revision, allow_patterns=list(patterns)
    )
  except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
    kind = type(error).__name__
    if isinstance(error, huggingface_hub.errors.GatedRepoError):
      why = "its owner asks you to accept terms there first, and to log in"
    elif isinstance(error, huggingface_hub.errors.RepositoryNotFoundError):
      why = "there is none of that name, or it needs you to log in"
    elif isinstance(error, huggingface_hub.errors.RevisionNotFoundError):
      why = f"it has no revision {revision!r}"
    else:
      why = f"the hub cannot be reached and its cache does not hold it ({kind})"
    raise LoadError(
      f"cannot get {name!r} from the Hugging Face hub: {why}; instead give a"
      " local folder with config.json and safetensors, a .gguf file, or a"
      f" built-in model: {', '.join(BUILTIN)}"
    ) from error
  return Path(folder)


# --- folders and files ------------------------------------------------------


def _open_folder(folder: Path) -> _Found:
  config = _read_json(folder / "config.json", str(folder))
  _refuse_heads(config, (), str(folder))
  files = _weight_files(folder)
  tensors: dict[str, Tensor] = {}
  for file in files:
    found = open_safetensors(file)
    if twice := sorted(found.keys() & tensors.keys()):
      raise LoadError(f"{folder}: tensor {twice[0]!r} is in two files")
    tensors |= found
  _refuse_heads(config, tensors, str(folder))
  eos = []
  for name in ("generation_config.json", "config.json"):
    if (folder / name).exists():
      eos += as_ids(_read_json(folder / name, str(folder)).get("eos_token_id"))
  return _Found(config, tensors, files, folder, tuple(eos))


def _weight_files(folder: Path) -> tuple[Path, ...]:
  """Returns the safetensors files of a folder, all that its index names."""
  index = folder / "model.safetensors.index.json"
  if (folder / "model.safetensors").exists():
    return (folder / "model.safetensors",)
  if index.exists():
    weight_map = _read_json(index, str(folder)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
      raise LoadError(f"{index} has no weight_map")
    files = tuple(folder / name for name in sorted(set(weight_map.values())))
    if lost := [file.name for file in files if not file.is_file()]:
      raise LoadError(f"{folder} lacks {lost[0]}, which its index names")
    return files
  files = tuple(sorted(folder.glob("*.safetensors")))
  if files:
    return files
  if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
    raise LoadError(
      f"{folder} holds PyTorch files only; save the model as safetensors"
    )
  if other := sorted(folder.glob("*.gguf")):
    raise LoadError(f"{folder} holds no safetensors; did you mean {other[0]}?")
  raise LoadError(f"{folder} holds no *.safetensors")


def _open_gguf(path: Path) -> _Found:
  gguf = gguf_io.read_gguf(path)
  config = gguf_hf.hf_config(gguf)
  tensors = gguf_hf.hf_tensors(gguf, config)
  ids = [
    gguf.metadata.get(f"tokenizer.ggml.{k}_token_id") for k in ("eos", "eot")
  ]
  eos = [i for value in ids for i in as_ids(value)]
  return _Found(config, tensors, (path,), gguf, tuple(eos))


def _read_json(path: Path, name: str) -> dict[str, Any]:
  try:
    found = json.loads(path.read_text("utf-8"))
  except FileNotFoundError as error:
    raise LoadError(f"{name} holds no {path.name}") from error
  except (OSError, ValueError) as error:
    raise LoadError(f"{path} cannot be read: {error}") from error
  if not isinstance(found, dict):
    raise LoadError(f"{path} is not a JSON object")
  return found


def _refuse_heads(config: Mapping, tensors: Iterable[str], name: str) -> None:
  """Refuses draft heads given as a model."""
  words = [*config, *map(str, config.get("architectures") or ())]
  words.append(str(config.get("model_type")))
  for kind, (in_config, in_tensors) in _HEADS.items():
    said = any(
      re.fullmatch(in_config, w) or kind.lower() in w.lower() for w in words
    )
    if said or any(re.fullmatch(in_tensors, t) for t in tensors):
      raise LoadError(
        f"{name} holds {kind} draft heads, not a model: load the model they"
        f" were trained for, and give this as the heads of the drafter"
        f" {kind.lower()!r}"
      )


def _architecture(config: Mapping, name: str) -> tuple[ModuleType, Any]:
  """Returns the family and what it makes of the config."""
  try:
    family = models.load(str(config.get("model_type")))
    return family, family.from_hf(config)
  except (ValueError, TypeError) as error:
    raise LoadError(f"{name}: {error}") from error


def _dtype(dtype: Any) -> np.dtype:
  if dtype is None:
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
  for name in ("float32", "bfloat16", "float16"):
    # By comparison: a name numpy does not know would raise.
    if dtype in (name, jnp.dtype(name)):
      return jnp.dtype(name)
  raise LoadError(f"dtype {dtype!r} is not float32, bfloat16 or float16")


def _sha256_of_json(value: Any) -> str:
  return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
