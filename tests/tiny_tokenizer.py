"""Builds two small tokenizers in memory, so that no test needs a file.

Both read any text: the byte-level one has all 256 bytes, the Metaspace one
falls back to bytes.
"""

from tokenizers import (
  AddedToken,
  Tokenizer,
  decoders,
  models,
  normalizers,
  pre_tokenizers,
  processors,
)
from transformers import PreTrainedTokenizerFast

CHATML = (
  "{% for message in messages %}"
  "{{ '<|im_start|>' + message['role'] + '\n' }}"
  "{{ message['content'] + '<|im_end|>\n' }}"
  "{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Merged in this order; "\u0120" is the byte-level alphabet's name of a space.
_MERGES = ("t h", "th e", "\u0120 the", "i n", "in g", "\u0120 a", "a n")


def _add_bos(tokenizer: Tokenizer, bos: str) -> None:
  """Makes `tokenizer` write `bos` before every text."""
  tokenizer.post_processor = processors.TemplateProcessing(
    single=f"{bos} $A",
    pair=f"{bos} $A {bos} $B",
    special_tokens=[(bos, tokenizer.token_to_id(bos))],
  )


def byte_level_tokenizer(
  *,
  bos: str | None = "<|bos|>",
  add_bos: bool = False,
  chat_template: str | None = CHATML,
) -> PreTrainedTokenizerFast:
  """Builds a byte-level BPE tokenizer (GPT-2, Qwen, Llama 3).

  Ids 0 .. 255 are single bytes, in the order of the byte-level alphabet; then
  the merges; then `<|bos|>`, `<|eos|>`, `<|im_start|>`, `<|im_end|>` (special)
  and `<call now>` (added, but part of the text).

  Args:
    bos: the BOS token, or None.
    add_bos: whether the tokenizer itself writes BOS before a text.
    chat_template: Jinja template; None for a tokenizer without one.

  Returns:
    The tokenizer.
  """
  vocab = {
    c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
  }
  pairs = [tuple(pair.split(" ")) for pair in _MERGES]
  for left, right in pairs:
    vocab[left + right] = len(vocab)
  tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  special = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
  tokenizer.add_special_tokens([AddedToken(s, special=True) for s in special])
  tokenizer.add_tokens([AddedToken("<call now>", special=False)])
  if add_bos:
    _add_bos(tokenizer, "<|bos|>")
  return PreTrainedTokenizerFast(
    tokenizer_object=tokenizer,
    bos_token=bos,
    eos_token="<|eos|>",
    chat_template=chat_template,
  )


def metaspace_tokenizer(
  *, add_bos: bool = True, chat_template: str | None = None
) -> PreTrainedTokenizerFast:
  """Builds a tokenizer like sentencepiece's with byte fallback (Llama 2).

  Ids: `<unk>`, `<s>`, `</s>`, the bytes `<0x00>` .. `<0xFF>`, then pieces.

  Args:
    add_bos: whether the tokenizer itself writes `<s>` before a text.
    chat_template: Jinja template, or None.

  Returns:
    The tokenizer.
  """
  pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)]
  pieces += ["\u2581", *"abcdefghijklmnopqrstuvwxyz", "\u00e9"]
  pairs = [tuple(m.replace("\u0120", "\u2581").split(" ")) for m in _MERGES]
  pieces += [left + right for left, right in pairs]
  tokenizer = Tokenizer(
    models.BPE(
      vocab={piece: i for i, piece in enumerate(pieces)},
      merges=pairs,
      unk_token="<unk>",
      fuse_unk=True,
      byte_fallback=True,
    )
  )
  tokenizer.normalizer = normalizers.Sequence(
    [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
  )
  tokenizer.decoder = decoders.Sequence(
    [
      decoders.Replace("\u2581", " "),
      decoders.ByteFallback(),
      decoders.Fuse(),
      decoders.Strip(" ", 1, 0),
    ]
  )
  special = ["<unk>", "<s>", "</s>"]
  tokenizer.add_special_tokens([AddedToken(s, special=True) for s in special])
  if add_bos:
    _add_bos(tokenizer, "<s>")
  return PreTrainedTokenizerFast(
    tokenizer_object=tokenizer,
    bos_token="<s>",
    eos_token="</s>",
    unk_token="<unk>",
    chat_template=chat_template,
  )
