"""What each id of the tiny tokenizers spells, and text as ids of one byte."""

from tiny_tokenizer import byte_level_tokenizer, metaspace_tokenizer

from spec_jax.text import token_bytes

BYTE_LEVEL = byte_level_tokenizer()
METASPACE = metaspace_tokenizer()
V = len(BYTE_LEVEL) + 4  # A model's vocabulary is often padded.
TABLE = token_bytes(BYTE_LEVEL, V)
META_TABLE = token_bytes(METASPACE, len(METASPACE))

# Ids by the one byte they stand for.
OF_BYTE = {piece[0]: i for i, piece in enumerate(TABLE) if len(piece) == 1}


def spell(text):
  """Returns one id for each byte of `text`."""
  return [OF_BYTE[byte] for byte in text]
