"""Builds a tokenizer from the vocabulary in a GGUF file, without torch.

Two kinds are read: byte-level BPE ("gpt2": merges in the file) and
sentencepiece's BPE ("llama": merges follow from pieces and scores). What the
file only names, the split before merging, is in `_SPLITS`.
"""

from collections.abc import Mapping
import hashlib
import math
from pathlib import Path
import shutil
import tempfile
from typing import Any

from spec_jax.builtin import cache_dir
from spec_jax.gguf_io import GGUF
from spec_jax.safetensors_io import LoadError

__all__ = ["build_tokenizer", "saved_tokenizer"]

# Part of the key of a saved tokenizer; raise it when `build_tokenizer` changes.
_VERSION = "1"

# Token types of the format.
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6

_SPACE = "\u2581"  # sentencepiece's name of a space

# Patterns published with the tokenizers they belong to.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_QWEN = _WORDS + r"|\p{N}" + _TAIL
_LLAMA3 = _WORDS + r"|\p{N}{1,3}" + _TAIL
# Each digit apart, then GPT-2's own split.
_DIGITS = "digits"
_GPT2 = "gpt2"
_SPLITS = {
  "default": _GPT2,
  "gpt-2": _GPT2,
  "smollm": _DIGITS,
  "starcoder": _DIGITS,
  "refact": _DIGITS,
  "qwen2": _QWEN,
  "deepseek-r1-qwen": _QWEN,
  "llama3": _LLAMA3,
  "llama-v3": _LLAMA3,
  "llama-bpe": _LLAMA3,
}


def build_tokenizer(metadata: Mapping[str, Any]):
  """Builds the tokenizer a file's metadata describe.

  Args:
    metadata: values by GGUF key; `tokenizer.ggml.*` and
      `tokenizer.chat_template` are read.

  Returns:
    A transformers `PreTrainedTokenizerFast`; ids are the file's.

  Raises:
    LoadError: if the vocabulary is missing or of a kind that is not supported,
      or a special id lies outside it.
  """
  from transformers import PreTrainedTokenizerFast

  def get(key, default=None):
    return metadata.get(f"tokenizer.ggml.{key}", default)

  tokens, kind = get("tokens"), get("model")
  if not tokens:
    raise LoadError("the file holds no vocabulary (tokenizer.ggml.tokens)")
  special = {}
  for name in ("bos", "eos", "unknown", "padding"):
    token_id = get(f"{name}_token_id")
    if token_id is None:
      continue
    if not 0 <= token_id < len(tokens):
      raise LoadError(
        f"{name}_token_id {token_id}, a vocabulary of {len(tokens)} tokens"
      )
    special[name] = tokens[token_id]
  if kind == "gpt2":
    tokenizer = _byte_level(tokens, get)
    add_bos = get("pre") in ("llama3", "llama-v3", "llama-bpe")
  elif kind == "llama":
    tokenizer = _sentencepiece(tokens, get, special.get("unknown"))
    add_bos = True
  else:
    raise LoadError(
      f"tokenizer.ggml.model {kind!r} is not supported; supported: gpt2, llama"
    )
  _add_whole_tokens(tokenizer, tokens, get("token_type") or ())
  # llama.cpp's defaults where the file is silent.
  _add_ends(
    tokenizer,
    special.get("bos") if get("add_bos_token", add_bos) else None,
    special.get("eos") if get("add_eos_token", False) else None,
  )
  return PreTrainedTokenizerFast(
    tokenizer_object=tokenizer,
    bos_token=special.get("bos"),
    eos_token=special.get("eos"),
    unk_token=special.get("unknown"),
    pad_token=special.get("padding"),
    chat_template=metadata.get("tokenizer.chat_template"),
    clean_up_tokenization_spaces=False,
  )


def saved_tokenizer(gguf: GGUF) -> Path:
  """Returns a folder with the tokenizer of a GGUF file, made at first use.

  Recovering Gemma's merges takes 12 s; loading what was saved takes 2.

  Args:
    gguf: header; the folder's name is a hash of its metadata.

  Returns:
    A folder in the cache with tokenizer.json and tokenizer_config.json.

  Raises:
    LoadError: as `build_tokenizer`; if the cache cannot be written.
  """
  key = hashlib.sha256(gguf.header + _VERSION.encode()).hexdigest()
  folder = cache_dir() / "tokenizers" / key[:32]
  if (folder / "tokenizer.json").exists():
    return folder
  words = build_tokenizer(gguf.metadata)
  try:
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    words.save_pretrained(made)
    try:
      made.rename(folder)
    except OSError:  # another process was faster
      shutil.rmtree(made)
  except OSError as error:
    raise LoadError(
      f"cannot write to {folder.parent}: {error.strerror}; set SPEC_JAX_CACHE"
    ) from error
  return folder


def _byte_level(tokens, get):
  from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
  )

  pre, merges = get("pre", "default"), get("merges")
  if pre not in _SPLITS or merges is None:
    raise LoadError(
      "no merges in the file"
      if pre in _SPLITS
      else f"tokenizer.ggml.pre {pre!r} is not supported; supported:"
      f" {', '.join(_SPLITS)}"
    )
  split = _SPLITS[pre]
  tokenizer = Tokenizer(
    models.BPE(
      vocab={token: i for i, token in enumerate(tokens)},
      merges=[tuple(merge.split(" ", 1)) for merge in merges],
      # Llama 3 takes a word that is a token as it is.
      ignore_merges=split is _LLAMA3,
    )
  )
  parts: list = []
  if split is _DIGITS:
    parts.append(pre_tokenizers.Digits(individual_digits=True))
  elif split is not _GPT2:
    parts.append(pre_tokenizers.Split(Regex(split), "isolated"))
  parts.append(
    pre_tokenizers.ByteLevel(
      add_prefix_space=False, use_regex=split in (_GPT2, _DIGITS)
    )
  )
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
  if split is _QWEN:
    tokenizer.normalizer = normalizers.NFC()
  tokenizer.decoder = decoders.ByteLevel()
  return tokenizer


def _sentencepiece(tokens, get, unknown):
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers

  # Runs of spaces are stored as spaces; text reaches the merges as `_SPACE`.
  pieces = [
    _SPACE * len(token) if token and not token.strip(" ") else token
    for token in tokens
  ]
  scores = get("scores")
  types = get("token_type", [0] * len(pieces))
  if scores is None or {len(scores), len(types)} != {len(pieces)}:
    raise LoadError("the vocabulary has no scores, or not one for each token")
  prefix = get("add_space_prefix", True)
  tokenizer = Tokenizer(
    models.BPE(
      vocab={piece: i for i, piece in enumerate(pieces)},
      merges=_merges(pieces, scores, types),
      unk_token=unknown,
      fuse_unk=True,
      byte_fallback=True,
    )
  )
  tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
    _SPACE, prepend_scheme="first" if prefix else "never", split=False
  )
  steps = [
    decoders.Replace(_SPACE, " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
  ]
  if prefix:
    steps.append(decoders.Strip(" ", 1, 0))
  tokenizer.decoder = decoders.Sequence(steps)
  return tokenizer


def _merges(pieces, scores, types) -> list[tuple[str, str]]:
  """Recovers merges: every split of a piece in two, best piece first.

  User-defined pieces (Gemma's runs of spaces) come before all others, as
  sentencepiece takes them out of the text first; then the higher score, and
  among equals the earlier piece.
  """
  ids = {piece: i for i, piece in enumerate(pieces)}
  found = []
  for i, (piece, kind) in enumerate(zip(pieces, types, strict=True)):
    if len(piece) < 2 or kind in (_CONTROL, _BYTE):
      continue
    rank = -math.inf if kind == _USER_DEFINED else -scores[i]
    for cut in range(1, len(piece)):
      left, right = piece[:cut], piece[cut:]
      if left in ids and right in ids:
        found.append((rank, i, ids[left], ids[right], left, right))
  return [(left, right) for *_, left, right in sorted(found)]


def _add_whole_tokens(tokenizer, tokens, types) -> None:
  """Makes control and user-defined tokens match whole, under their own ids."""
  from tokenizers import AddedToken

  vocab = tokenizer.get_vocab()
  control, user = [], []
  for token, kind in zip(tokens, types, strict=False):
    if token not in vocab or not token.strip():
      continue
    if kind == _CONTROL:
      control.append(AddedToken(token, normalized=False, special=True))
    elif kind == _USER_DEFINED:
      user.append(AddedToken(token, normalized=False, special=False))
  tokenizer.add_special_tokens(control)
  tokenizer.add_tokens(user)


def _add_ends(tokenizer, bos: str | None, eos: str | None) -> None:
  from tokenizers import processors

  if bos is None and eos is None:
    return
  ends = [token for token in (bos, eos) if token is not None]
  single = " ".join(filter(None, (bos, "$A", eos)))
  tokenizer.post_processor = processors.TemplateProcessing(
    single=single,
    pair=single + " " + single.replace("$A", "$B"),
    special_tokens=[(token, tokenizer.token_to_id(token)) for token in ends],
  )
