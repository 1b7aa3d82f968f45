"""Builds a corpus index from text files, for the drafters that read one.

  python -m experiments.index --out=index.npz notes.txt answers.jsonl
  python -m experiments.index --out=index.npz --text='books/*.txt'
  python -m experiments.generate --config.drafter.name=suffix \
    --config.drafter.corpus=index.npz

A text file is one document. Of each line of a .jsonl file, the field that the
prompts of `experiments.generate` are read from is one (of turns the first,
each message of a conversation), and so is an answer beside it, as `train.data`
names them; which fields were read is said. An index is good for the model's
tokenizer only.
"""

from collections.abc import Iterator, Sequence
import glob
from pathlib import Path
import time
from typing import Any, NamedTuple

from absl import flags
from tqdm import tqdm

from experiments import checks, launch, prompts, show
from experiments.launch import UserError
from spec_jax import corpus, hub
from train import records

_MODEL = flags.DEFINE_string(
  "model", "smollm2-135m-instruct", "Model whose tokenizer reads the text."
)
_OUT = flags.DEFINE_string("out", "", "Index to write, an .npz file.")
_TEXT = flags.DEFINE_multi_string("text", [], "Pattern of files, e.g. '*.txt'.")
_MATCH = flags.DEFINE_integer(
  "max_match", 32, "Longest context that can be searched for, in tokens."
)
_SUCCESSORS = flags.DEFINE_integer(
  "max_successors", 64, "Followers of an n-gram that are kept."
)
_OVERWRITE = flags.DEFINE_boolean("overwrite", False, "Replace --out.")

# Fields that are said not to have been read, at most.
_NAMED = 8
# Characters that go to the tokenizer at a time, cut at the ends of lines: it
# holds a hundred times as much while it works.
_PIECE = 1 << 20


def find_files(given: Sequence[str], patterns: Sequence[str]) -> list[str]:
  """Returns the files that were named, then those that match a pattern.

  Raises:
    UserError: if there are none, or a pattern matches nothing.
  """
  found = list(given)
  for pattern in patterns:
    matches = sorted(f for f in glob.glob(pattern, recursive=True))
    files = [f for f in matches if Path(f).is_file()]
    if not files:
      raise UserError(f"no file matches {pattern!r}")
    found += files
  if not found:
    raise UserError("give text files, or --text=PATTERN")
  for file in found:
    if not Path(file).is_file():
      raise UserError(f"cannot read {file}: no such file")
  return list(dict.fromkeys(found))


class Documents(NamedTuple):
  """What a file holds.

  Attributes:
    texts: one a document.
    read: fields of JSON lines that were read, as the keys.
    left: fields that were not, of some line or of all.
  """

  texts: list[str]
  read: dict[str, None]
  left: dict[str, None]


def _read_lines(path: str) -> Documents:
  found = Documents([], {}, {})
  for where, line in prompts.lines_of(path):
    record = prompts.record_of(where, line)
    field, prompt = prompts.prompt_of(where, record)
    if isinstance(prompt, str):
      texts = [prompt]
    else:
      texts = [message["content"] for message in prompt]
    own = {field: None} if field else {}
    if isinstance(record, dict):
      for name in records.ANSWERS:
        answer = record.get(name)
        if isinstance(answer, str) and answer:
          texts.append(answer)
          own[name] = None
          break
      found.left.update((name, None) for name in record if name not in own)
    if not any(text.strip() for text in texts):
      raise UserError(f"{where} is empty")
    found.texts.extend(texts)
    found.read.update(own)
  if not found.texts:
    raise UserError(f"{path} holds no document")
  return found


def read_documents(path: str) -> Documents:
  """Reads a file.

  Raises:
    UserError: if it cannot be read.
  """
  if path.endswith(prompts.JSON):
    return _read_lines(path)
  try:
    return Documents([Path(path).read_text(encoding="utf-8-sig")], {}, {})
  except OSError as error:
    raise UserError(f"cannot read {path}: {error.strerror}") from error
  except UnicodeDecodeError as error:
    raise UserError(f"{path} is not UTF-8: {error}") from error


def _pieces(text: str) -> Iterator[str]:
  start = 0
  while start < len(text):
    end = start + _PIECE
    if end < len(text):
      end = text.rfind("\n", start + 1, end) + 1 or end
    yield text[start:end]
    start = end


def _encode(tokenizer: Any, text: str) -> list[int]:
  """Returns the tokens of a document, without any that mark its ends."""
  ids: list[int] = []
  for piece in _pieces(text):
    ids += tokenizer.encode(piece, add_special_tokens=False, verbose=False)
  return ids


def _check_out(path: str) -> None:
  """Checks, before work is done, that the index can be written.

  Raises:
    UserError: if it cannot.
  """
  if not path:
    raise UserError("say where to write the index: --out=index.npz")
  checks.out_file(path)
  if Path(path).exists() and not _OVERWRITE.value:
    raise UserError(f"{path} is there already; --overwrite replaces it")


def main(files: Sequence[str]) -> int:
  """Reads, tokenizes, sorts and writes; returns the exit code."""
  start = time.perf_counter()
  _check_out(_OUT.value)
  checks.at_least(1, _MATCH, _SUCCESSORS)
  paths = find_files(files, _TEXT.value)
  with launch.user_errors():
    loaded = hub.inspect(_MODEL.value).loaded
  documents = []
  read: dict[str, None] = {}
  left: dict[str, None] = {}
  for path in tqdm(paths, desc="tokens", unit="file", disable=None):
    found = read_documents(path)
    for text in found.texts:
      documents.append(_encode(loaded.tokenizer, text))
    read |= found.read
    left |= found.left
  if read:
    names = [name + " (the first)" * (name == "turns") for name in read]
    rest = ", ".join(list(left)[:_NAMED]) or "none"
    show.note(f"fields of JSON lines: {', '.join(names)}; not read: {rest}")
  with tqdm(total=4, unit="part", disable=None) as bar:

    def stage(name: str) -> None:
      bar.set_description(name)
      bar.update()

    with launch.user_errors():
      index = corpus.build(
        documents,
        tokenizer=loaded.hashes["tokenizer"],
        vocab_size=loaded.model.config.vocab_size,
        max_match=_MATCH.value,
        max_successors=_SUCCESSORS.value,
        stage=stage,
      )
    stage("writing")
    try:
      corpus.save(index, _OUT.value)
    except OSError as error:
      raise UserError(f"cannot write {_OUT.value}: {error.strerror}") from error
  size = Path(_OUT.value).stat().st_size
  print(
    f"{_OUT.value}: {index.num_tokens:,} tokens of {index.num_documents:,} "
    f"documents, {len(index.bigram.count):,} bigrams, "
    f"{len(index.trigram.count):,} trigrams, {size / 1e6:.1f} MB in "
    f"{time.perf_counter() - start:.1f} s"
  )
  return 0


if __name__ == "__main__":
  launch.run(main, takes_files=True)
