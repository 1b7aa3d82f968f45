"""One tiny model folder that commands and notebooks load by path."""

from pathlib import Path

from checkpoints import LLAMA, llama_tensors, write_folder
from tiny_tokenizer import byte_level_tokenizer

# Room for the command's own prompts: one token a byte, nearly.
CONTEXT = 640
# Ids 0 .. 63 are the bytes "!" .. "`".
_SPOKEN = 64


def tiny_model(folder: Path, *, seed: int = 0, **change) -> Path:
  """Writes a Llama of 2 layers and 300 ids with a chat tokenizer.

  Its text is varied and printable, never a stop id, and no two tokens of it
  merge into another one: all other ids have logit 0, far below the largest.

  Args:
    folder: made if it is not there.
    seed: of the weights.
    **change: fields of config.json.

  Returns:
    `folder`.
  """
  config = LLAMA | {"max_position_embeddings": CONTEXT} | change
  tensors = llama_tensors(config, seed)
  tensors["lm_head.weight"] *= 8  # laws with a few likely tokens
  tensors["lm_head.weight"][_SPOKEN:] = 0
  write_folder(folder, config, tensors)
  byte_level_tokenizer().save_pretrained(folder)
  return folder
