"""Reads heads as their authors publish them.

Folders with config.json and safetensors, told apart by names and shapes of
tensors:

  Medusa    `0.0.linear.weight`, `0.0.linear.bias`, ... (perhaps after
            `medusa_head.`), and per head `0.1.weight` where it has an output
            matrix of its own
  EAGLE     `fc.weight` `[D, 2 D]`, perhaps `fc.bias`, `layers.0.*` without a
            norm before the attention
  EAGLE-3   `fc.weight` `[D, 3 D]`, `midlayer.*` whose attention reads `2 D`,
            `norm.weight`, `lm_head.weight` `[v, D]`, and `d2t` `[v]`: what is
            to be added to a head's word to make it the target's token

Matrices are stored `[out, in]` there, `[in, out]` here.
"""

from collections.abc import Iterable, Mapping
import hashlib
import json
import logging
import os
from pathlib import Path
import re
from typing import Any

import jax
import numpy as np

from spec_jax import eagle, medusa, models
from spec_jax.builtin import sha256_of
from spec_jax.heads import Words, are_words
from spec_jax.hub import Loaded
from spec_jax.safetensors_io import LoadError, Tensor, open_safetensors
from spec_jax.trained import Card, flatten
from spec_jax.trained_draft import TrainedDraft

__all__ = ["inspect_public", "is_public"]

_log = logging.getLogger(__name__)

_RESIDUAL = r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.linear\.(weight|bias)"
_MATRIX = r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.weight"
# Ours -> theirs, inside the one layer of EAGLE.
LAYER = {
  "wq": "self_attn.q_proj",
  "wk": "self_attn.k_proj",
  "wv": "self_attn.v_proj",
  "wo": "self_attn.o_proj",
  "w_gate": "mlp.gate_proj",
  "w_up": "mlp.up_proj",
  "w_down": "mlp.down_proj",
  "ffn_norm": "post_attention_layernorm",
}
LAYER_3 = {"embed_norm": "input_layernorm", "hidden_norm": "hidden_norm"}
# What such files may hold besides: copies of the target's, and what follows.
_COPIES = r"(.*\.)?(embed_tokens\.weight|rotary_emb\.inv_freq)|t2d"
# What of an EAGLE head's config.json says how its layer is made.
_SHAPE = (
  "hidden_size",
  "num_attention_heads",
  "num_key_value_heads",
  "head_dim",
  "intermediate_size",
  "max_position_embeddings",
  "rms_norm_eps",
  "hidden_act",
  "rope_theta",
  "rope_scaling",
  "rope_parameters",
)
# Layers made otherwise, by flags of other trainers.
_OTHERWISE = ("norm_before_residual", "norm_before_fc", "attention_bias")
TAPS = "eagle_aux_hidden_state_layer_ids"


def _files(folder: Path) -> list[Path]:
  return sorted(folder.glob("*.safetensors"))


def _kind(names: Iterable[str]) -> str | None:
  names = set(names)
  if any(re.fullmatch(_RESIDUAL, name) for name in names):
    return "medusa"
  if "fc.weight" in names and any(
    re.match(r"(midlayer|layers\.0)\.self_attn\.", name) for name in names
  ):
    return "eagle"
  return None


def is_public(path: str | os.PathLike) -> bool:
  """Tells whether a folder holds heads in one of these layouts."""
  folder = Path(path).expanduser()
  if not (folder / "config.json").is_file():
    return False
  try:
    names = [n for file in _files(folder) for n in open_safetensors(file)]
  except LoadError:
    return False
  return _kind(names) is not None


def inspect_public(path: str | os.PathLike, loaded: Loaded) -> TrainedDraft:
  """Opens published heads for a target; reads no large tensor.

  Args:
    path: the folder.
    loaded: the target; its parameters are not looked at.

  Raises:
    LoadError: one line, if a tensor is missing, unknown or of another shape, a
      flag of config.json says otherwise, or they are for another target.
  """
  folder = Path(path).expanduser()
  files = _files(folder)
  tensors: dict[str, Tensor] = {}
  for file in files:
    tensors |= open_safetensors(file)
  try:
    config = json.loads((folder / "config.json").read_text("utf-8"))
  except (OSError, ValueError) as error:
    raise LoadError(f"{folder / 'config.json'}: {error}") from error
  kind = _kind(tensors)
  if kind is None:
    raise LoadError(f"{folder} holds no Medusa or EAGLE heads")
  read = _read_medusa if kind == "medusa" else _read_eagle
  try:
    heads, ours = read(config, tensors, loaded)
  except (ValueError, TypeError, KeyError) as error:
    raise LoadError(f"{folder}: {error}") from error
  shapes = flatten(jax.eval_shape(lambda: heads.init(jax.random.key(0))))
  for name, wanted in shapes.items():
    if name in ours and ours[name].shape != wanted.shape:
      raise LoadError(
        f"{folder}: tensor {name} has shape {ours[name].shape}, the target "
        f"asks for {wanted.shape}"
      )
  digest = hashlib.sha256("".join(map(sha256_of, files)).encode()).hexdigest()
  info = {"kind": kind, "weights_sha256": digest}
  return TrainedDraft(heads, Card(folder, kind, info, ours))


def _turned(tensor: Tensor) -> Tensor:
  """Returns the transpose of a matrix; it is read whole."""
  rows, columns = tensor.shape

  def read(begin, end):
    return tensor.read(0, rows).T[begin:end]

  return Tensor((columns, rows), tensor.dtype, read)


def _take(tensors: Mapping[str, Tensor], name: str) -> Tensor:
  if name not in tensors:
    raise LoadError(f"tensor {name} is missing")
  tensor = tensors[name]
  return _turned(tensor) if len(tensor.shape) == 2 else tensor


def _refuse_others(
  tensors: Mapping[str, Tensor], used: Iterable[str], kind: str
) -> None:
  for name in sorted(tensors.keys() - set(used)):
    if not re.fullmatch(_COPIES, name):
      raise LoadError(f"tensor {name} is none of {kind} heads")


def _agree(config: Mapping, name: str, found: Any) -> None:
  said = config.get(name)
  if said is not None and said != found:
    raise LoadError(f"config.json says {name} {said}, the tensors {found}")


def _check_width(config: Mapping, width: int, target: Any) -> None:
  if width != target.width:
    raise LoadError(
      f"these heads are {width} wide, the target is {target.width}"
    )
  _agree(config, "hidden_size", width)


def _read_medusa(config: Mapping, tensors: Mapping[str, Tensor], loaded):
  target = loaded.model.config
  blocks: dict[tuple[int, int, str], str] = {}
  matrices: dict[int, tuple[int, str]] = {}
  for name in tensors:
    if found := re.fullmatch(_RESIDUAL, name):
      head, layer, what = found.groups()
      blocks[int(head), int(layer), what] = name
    elif found := re.fullmatch(_MATRIX, name):
      matrices[int(found[1])] = int(found[2]), name
  K = 1 + max(head for head, _, _ in blocks)
  L = 1 + max(layer for _, layer, _ in blocks)
  _agree(config, "medusa_num_heads", K)
  _agree(config, "medusa_num_layers", L)
  if matrices and sorted(matrices) != list(range(K)):
    raise LoadError("some heads have an output matrix and some have none")
  ours, used = {}, []
  for k in range(K):
    for i in range(L):
      for what, letter in (("weight", "w"), ("bias", "b")):
        theirs = blocks.get((k, i, what), f"{k}.{i}.linear.{what}")
        ours[f"heads.{k}.{letter}{i}"] = _take(tensors, theirs)
        used.append(theirs)
    if matrices:
      layer, name = matrices[k]
      if layer != L:
        raise LoadError(f"tensor {name} is none of Medusa heads")
      ours[f"heads.{k}.out"] = _take(tensors, name)
      used.append(name)
  _refuse_others(tensors, used, "Medusa")
  _check_width(config, ours["heads.0.w0"].shape[0], target)
  made = medusa.MedusaConfig(
    width=target.width,
    num_heads=K,
    num_layers=L,
    own_matrices=bool(matrices),
    words=Words(target.vocab_size, target.vocab_size),
    max_length=target.max_length,
  )
  return medusa.build(made), ours


def _taps(config: Mapping, num_layers: int) -> tuple[int, ...]:
  """Returns after how many layers EAGLE-3 looks, as config.json says.

  Within "eagle_config" (SpecForge, SGLang) a number is that of the layer whose
  output is taken, at the top (vLLM) of the layer that the stream enters, which
  is one more. Converted files carry the former to the top unchanged: numbers
  there that would be the default but for the one are taken so.

  Raises:
    ValueError: if they lead out of the target.
  """
  nested = (config.get("eagle_config") or {}).get(TAPS)
  if nested is not None:
    taps = tuple(int(i) + 1 for i in nested)
  elif config.get(TAPS) is not None:
    taps = tuple(map(int, config[TAPS]))
    shifted = tuple(i + 1 for i in taps)
    if num_layers >= 6 and shifted == eagle.default_taps(num_layers):
      _log.warning("layers %s are taken as outputs, not inputs", taps)
      taps = shifted
  else:
    taps = eagle.default_taps(num_layers)
    _log.warning("config.json names no layers; EAGLE-3 looks at %s", taps)
  if not all(0 <= tap <= num_layers for tap in taps):
    raise ValueError(
      f"config.json names layers {taps} of a target of {num_layers}"
    )
  return taps


def _read_eagle(config: Mapping, tensors: Mapping[str, Tensor], loaded):
  target = loaded.model.config
  prefix = next(
    name.split("self_attn.")[0] for name in tensors if "self_attn." in name
  )
  version = 3 if f"{prefix}hidden_norm.weight" in tensors else 1
  names = LAYER | (LAYER_3 if version == 3 else {})
  theirs = {f"layers.0.{n}": f"{prefix}{t}.weight" for n, t in names.items()}
  theirs["fc.w"] = "fc.weight"
  bias = "fc.bias" in tensors
  _agree(config, "bias", bias)
  if bias:
    theirs["fc.b"] = "fc.bias"
  if version == 3:
    theirs["final_norm"] = "norm.weight"
    theirs["head"] = "lm_head.weight"
  ours = {name: _take(tensors, t) for name, t in theirs.items()}
  words = Words(target.vocab_size, target.vocab_size)
  used = {*theirs.values(), "d2t"}
  if version == 3:
    words, ids = _words(tensors, ours["head"].shape[1], target.vocab_size)
    _agree(config, "draft_vocab_size", words.size)
    if ids is not None:
      ours["ids"] = Tensor(
        ids.shape, ids.dtype, lambda begin, end: ids[begin:end]
      )
  elif "lm_head.weight" in tensors:
    used.add("lm_head.weight")  # the target's
  _refuse_others(tensors, used, "EAGLE")
  _check_width(config, ours["fc.w"].shape[1], target)
  for name in _OTHERWISE:
    if config.get(name):
      raise LoadError(f"config.json says {name}, which is not supported")
  shape = models.load("llama").from_hf(
    {
      # What their own code takes where the file says nothing.
      **({} if "rope_parameters" in config else {"rope_theta": 10000.0}),
      **{name: config[name] for name in _SHAPE if name in config},
      "model_type": "llama",
      "num_hidden_layers": 1,
      "vocab_size": target.vocab_size,
    }
  )
  if shape.max_length < target.max_length:
    _log.warning(
      "this head drafts up to %d tokens of a text, the target reads %d",
      shape.max_length,
      target.max_length,
    )
  taps = _taps(config, target.num_layers) if version == 3 else ()
  made = eagle.config_of(
    shape,
    version,
    words,
    taps=taps,
    fc_bias=bias,
    max_length=min(shape.max_length, target.max_length),
  )
  return eagle.build(made), ours


def _words(
  tensors: Mapping[str, Tensor], size: int, vocab_size: int
) -> tuple[Words, np.ndarray | None]:
  """Returns the words of a head, and their ids where they are mapped."""
  if "d2t" not in tensors:
    if size != vocab_size:
      raise LoadError(
        f"the head knows {size} of {vocab_size} words, and d2t is missing"
      )
    return Words(size, vocab_size, own_matrix=True), None
  d2t = tensors["d2t"]
  if d2t.shape != (size,):
    raise LoadError(f"d2t has shape {d2t.shape}, the head knows {size} words")
  offsets = d2t.read(0, size).astype(np.int64)
  ids = np.arange(size) + offsets
  if not are_words(ids, vocab_size):
    raise LoadError(
      f"d2t does not lead to {size} rising ids below {vocab_size}"
    )
  mapped = bool(offsets.any())
  words = Words(size, vocab_size, own_matrix=True, mapped=mapped)
  return words, ids.astype(np.int32) if mapped else None
