"""One tiny model folder that the command and the notebook load by path."""

from pathlib import Path

from checkpoints import LLAMA, llama_tensors, write_folder
from tiny_tokenizer import byte_level_tokenizer

# Room for the command's own prompts: one token a byte, nearly.
CONTEXT = 640


def tiny_model(folder: Path, *, seed: int = 0, **change) -> Path:
  """Writes a Llama of 2 layers and 300 ids with a chat tokenizer.

  Weights are large enough that greedy text is not one token for ever.

  Args:
    folder: made if it is not there.
    seed: of the weights.
    **change: fields of config.json.

  Returns:
    `folder`.
  """
  config = LLAMA | {"max_position_embeddings": CONTEXT} | change
  write_folder(folder, config, llama_tensors(config, seed))
  byte_level_tokenizer().save_pretrained(folder)
  return folder
