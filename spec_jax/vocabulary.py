"""A model's tokenizer: read, checked against the weights, its stop ids."""

import hashlib
import os
from pathlib import Path
from typing import Any

from spec_jax import gguf_io, gguf_tokenizer
from spec_jax.builtin import sha256_of
from spec_jax.safetensors_io import LoadError

# Tokens that end a turn in the chat templates of the families here.
_END_OF_TURN = ("<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|end|>")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def read_tokenizer(source: Path | gguf_io.GGUF, name: str) -> tuple[Any, str]:
  """Reads a tokenizer.

  Args:
    source: a folder, or a GGUF file, whose tokenizer is converted once.
    name: of the model, for messages.

  Returns:
    (tokenizer, hash of its tokenizer.json).

  Raises:
    LoadError: if there is none or it cannot be read.
  """
  # transformers says at import that it has no torch, which is as it should be.
  os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
  import transformers

  if isinstance(source, Path):
    folder = source
  else:
    folder = gguf_tokenizer.saved_tokenizer(source)
  if not any((folder / file).exists() for file in _TOKENIZER_FILES):
    raise LoadError(
      f"{name} holds no tokenizer; load with tokenizer=False to go without"
    )
  try:
    if (folder / "tokenizer.json").exists():
      # As the file says; AutoTokenizer may rebuild it by model type.
      words = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
      return words, sha256_of(folder / "tokenizer.json")
    words = transformers.AutoTokenizer.from_pretrained(folder)
  except Exception as error:  # the libraries raise anything, even Exception
    raise LoadError(
      f"{name}: cannot load its tokenizer ({error}); load with tokenizer=False"
      " to go without"
    ) from error
  backend = getattr(words, "backend_tokenizer", None)
  text = backend.to_str() if backend is not None else ""
  return words, hashlib.sha256(text.encode()).hexdigest()


def check_tokenizer(words: Any, vocab_size: int, name: str) -> None:
  """Refuses a tokenizer with ids that have no row.

  Gemma's has one more, for images. Special tokens the chat template does not
  write are let pass: no text contains them by accident.

  Args:
    words: the tokenizer.
    vocab_size: rows of the embedding.
    name: of the model, for messages.

  Raises:
    LoadError: if an id that text can hold has no row.
  """
  template = str(words.chat_template or "")
  over = {t: i for t, i in words.get_vocab().items() if i >= vocab_size}
  special = set(words.all_special_tokens)
  special |= {
    str(token) for token in words.added_tokens_decoder.values() if token.special
  }
  if any(t not in special or t in template for t in over):
    raise LoadError(
      f"{name}: its tokenizer has ids up to {max(over.values())}, its weights"
      f" {vocab_size} rows"
    )


def stop_ids(
  eos: tuple[int, ...], words: Any, vocab_size: int
) -> tuple[int, ...]:
  """Returns the ids that end a text: the model's own, and the template's.

  Args:
    eos: what the model's files say.
    words: the tokenizer, or None.
    vocab_size: ids at or past it are left out.
  """
  ids = list(eos)
  if words is not None:
    ids += as_ids(words.eos_token_id)
    template, vocab = str(words.chat_template or ""), words.get_vocab()
    ids += [vocab[t] for t in _END_OF_TURN if t in template and t in vocab]
  return tuple(i for i in dict.fromkeys(ids) if 0 <= i < vocab_size)


def as_ids(value: Any) -> list[int]:
  """Returns `eos_token_id` as a list: it may be a number, a list or None."""
  if value is None:
    return []
  return [int(i) for i in value] if isinstance(value, list) else [int(value)]
