"""Gathers prompts to train drafts on, none of which is evaluated on.

  python -m train.prompts --data=DATA --out=prompts.jsonl

DATA is a folder of public prompt sets and texts; `SOURCES` says which files of
it are read, how a prompt is made of a record, and how many are taken. A prompt
that shares 13 words in a row, or the whole text, with a prompt of `HELD_OUT` is
left out; both are compared in lower case, without punctuation.

The prompts are shuffled, so that any first part of the file is the same mix.
"""

from collections.abc import Callable, Iterator
import gzip
import json
from pathlib import Path
import random
import re
from typing import Any, NamedTuple
import zipfile
import zlib

from absl import flags

from experiments import checks, launch
from experiments.launch import UserError

_DATA = flags.DEFINE_string("data", "", "Folder of prompt sets and texts.")
_OUT = flags.DEFINE_string("out", "", "JSON-lines file to write.")
_SCALE = flags.DEFINE_float("scale", 1.0, "Part of each source to take.")
_SEED = flags.DEFINE_integer("seed", 0, "Of choice and order.")

# Words in a row that two prompts may not share.
_NGRAM = 13
# Words of a passage that is to be summarised or asked about.
_PASSAGE = (90, 260)

# Whose prompts are never trained on.
HELD_OUT = (
  "spec_bench/*.jsonl",
  "mt_bench/*question.jsonl",
  "eagle_eval/*.jsonl",
  "humaneval/*.jsonl.gz",
  "gsm8k/test.jsonl",
)


def words_of(text: str) -> list[str]:
  """Returns a text's words in lower case, punctuation left out."""
  return re.findall(r"[^\W_]+", text.lower())


def ngrams(text: str) -> set[tuple[str, ...]]:
  """Returns every run of `_NGRAM` words, or the whole of a shorter text."""
  words = words_of(text)
  if len(words) < _NGRAM:
    return {tuple(words)}
  return {tuple(words[i : i + _NGRAM]) for i in range(len(words) - _NGRAM + 1)}


# --- files --------------------------------------------------------------------


def _text(path: Path) -> str:
  try:
    if path.suffix == ".gz":
      return gzip.decompress(path.read_bytes()).decode("utf-8")
    return path.read_text("utf-8", errors="replace")
  except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
    why = getattr(error, "strerror", None) or error
    raise UserError(f"cannot read {path}: {why}") from error


def _records(path: Path) -> list[Any]:
  """Returns the records of a .json or .jsonl file, perhaps packed."""
  text = _text(path)
  try:
    if ".jsonl" in path.name:
      return [json.loads(x) for x in text.split("\n") if x.strip()]
    found = json.loads(text)
    if not isinstance(found, list):
      raise ValueError("it holds no list of records")
    return found
  except ValueError as error:
    raise UserError(f"{path} is not JSON: {error}") from error


def _strings(value: Any) -> Iterator[str]:
  """Yields every text in a record."""
  if isinstance(value, str):
    yield value
  elif isinstance(value, dict | list):
    for item in value.values() if isinstance(value, dict) else value:
      yield from _strings(item)


def held_out(folder: Path) -> set[tuple[str, ...]]:
  """Returns the runs of words of everything that is evaluated on.

  Raises:
    UserError: if a pattern of `HELD_OUT` finds no file.
  """
  found: set[tuple[str, ...]] = set()
  for pattern in HELD_OUT:
    paths = sorted(folder.glob(pattern))
    if not paths:
      raise UserError(f"{folder / pattern} is missing: what is evaluated on")
    for path in paths:
      for record in _records(path):
        for text in _strings(record):
          found |= ngrams(text)
  found.discard(())
  return found


# --- prompts ------------------------------------------------------------------


def _passages(texts: Iterator[str], rng: random.Random) -> Iterator[str]:
  """Yields passages of several sentences."""
  for text in texts:
    text = re.sub(r"\s+", " ", text)
    sentences = re.split(r"(?<=[.!?]) (?=[A-Z\"'])", text)
    passage: list[str] = []
    want = rng.randint(*_PASSAGE)
    for sentence in sentences:
      passage.append(sentence)
      if sum(len(x.split()) for x in passage) >= want:
        yield " ".join(passage)
        passage, want = [], rng.randint(*_PASSAGE)


def _zip_texts(path: Path) -> Iterator[str]:
  try:
    with zipfile.ZipFile(path) as archive:
      for name in sorted(archive.namelist()):
        if name.endswith(".txt"):
          yield archive.read(name).decode("utf-8", errors="replace")
  except (OSError, zipfile.BadZipFile) as error:
    raise UserError(f"cannot read {path}: {error}") from error


def _instruction(record: dict, rng: random.Random) -> Iterator[str]:
  """An instruction and perhaps its input."""
  extra = record.get("input") or ""
  if not extra and record.get("instances"):
    extra = record["instances"][0].get("input") or ""
  text = record["instruction"]
  yield f"{text}\n\n{extra}" if extra.strip() else text


def _question(record: dict, rng: random.Random) -> Iterator[str]:
  yield record["question"]


def _article(record: dict, rng: random.Random) -> Iterator[str]:
  """An article to be summarised, its beginning, asked for in several ways."""
  article = record["prompt"].split(":", 1)[-1].strip()
  words = article.split()[: rng.randint(*_PASSAGE)]
  ask = rng.choice(
    ("Summarize: ", "Summarize this article: ", "Sum up in brief: ")
  )
  yield ask + " ".join(words)


def _summary(passage: str, rng: random.Random) -> str:
  return rng.choice(("Summarize: ", "Summarize the text: ")) + passage


def _asked(passage: str, rng: random.Random) -> str:
  """A passage with a question about something it names, as in retrieval."""
  names = re.findall(r"(?<=[a-z,] )[A-Z][a-z]{3,}(?: [A-Z][a-z]+)*", passage)
  name = rng.choice(names) if names else "the main point"
  ask = rng.choice(
    (
      "What does the text say about {}?",
      "Who or what is {}?",
      "According to the text, why does {} matter?",
      "What happened with {}?",
    )
  )
  return f"{passage}\n{ask.format(name)}"


class Source(NamedTuple):
  """Where prompts come from.

  Attributes:
    files: pattern within the data folder.
    most: prompts taken.
    make: `make(path, rng)` yields prompts.
  """

  files: str
  most: int
  make: Callable[[Path, random.Random], Iterator[str]]


def _each(make) -> Callable[[Path, random.Random], Iterator[str]]:
  def read(path, rng):
    for number, record in enumerate(_records(path), 1):
      try:
        yield from make(record, rng)
      except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise UserError(
          f"{path} record {number} is not as expected: {error}"
        ) from error

  return read


def _from_zip(make) -> Callable[[Path, random.Random], Iterator[str]]:
  def read(path, rng):
    for passage in _passages(_zip_texts(path), rng):
      yield make(passage, rng)

  return read


def _translations(path: Path, rng: random.Random) -> Iterator[str]:
  lines = [x.strip() for x in _text(path).split("\n") if x.strip()]
  into = "English" if path.name.endswith(".de.gz") else "German"
  begin = "German" if into == "English" else "English"
  for i in range(0, len(lines) - 1, 2):
    both = lines[i] if rng.random() < 0.5 else f"{lines[i]} {lines[i + 1]}"
    yield f"Translate {begin} to {into}: {both}"


SOURCES = {
  "chat": Source("alpaca_eval/zephyr-7b-beta.json", 800, _each(_instruction)),
  "tasks": Source("self_instruct/*.jsonl", 420, _each(_instruction)),
  "code": Source("gpteacher/codegen*.json", 1400, _each(_instruction)),
  "roles": Source("gpteacher/roleplay*.json", 900, _each(_instruction)),
  "mathematics": Source("gsm8k/train.jsonl", 1400, _each(_question)),
  "translation": Source("multi30k/train.de.gz", 900, _translations),
  "articles": Source("t0_summarization/*.jsonl", 300, _each(_article)),
  "speeches": Source("nltk_corpora/state_union.zip", 200, _from_zip(_summary)),
  "reviews": Source("nltk_corpora/movie_reviews.zip", 200, _from_zip(_summary)),
  "passages": Source("nltk_corpora/inaugural.zip", 250, _from_zip(_asked)),
  "retrieval": Source("nltk_corpora/state_union.zip", 350, _from_zip(_asked)),
}


def gather(
  folder: Path, scale: float, seed: int
) -> tuple[list[tuple[str, str]], dict[str, int]]:
  """Returns (source, prompt) shuffled, and how many each source lost.

  Args:
    folder: the data.
    scale: part of what each source gives at most.
    seed: of choice and order.

  Raises:
    UserError: if a source has no file or cannot be read.
  """
  forbidden = held_out(folder)
  rng = random.Random(seed)
  found: list[tuple[str, str]] = []
  dropped: dict[str, int] = {}
  seen: set[str] = set()
  for name, source in SOURCES.items():
    paths = sorted(folder.glob(source.files))
    if not paths:
      raise UserError(f"{folder / source.files} is missing")
    texts = [text for path in paths for text in source.make(path, rng)]
    rng.shuffle(texts)
    dropped[name], taken = 0, 0
    for text in texts:
      if taken >= round(source.most * scale):
        break
      if ngrams(text) & forbidden:
        dropped[name] += 1
      elif text.strip() and text not in seen:
        seen.add(text)
        found.append((name, text))
        taken += 1
  rng.shuffle(found)
  return found, dropped


def main() -> int:
  """Runs the command."""
  if not _DATA.value or not _OUT.value:
    raise UserError("--data and --out are needed")
  if not 0 < _SCALE.value <= 1:
    raise UserError(f"--scale must be in (0, 1], got {_SCALE.value}")
  checks.out_file(_OUT.value)
  found, dropped = gather(Path(_DATA.value), _SCALE.value, _SEED.value)
  lines = [
    json.dumps({"prompt": text, "source": name}, ensure_ascii=False)
    for name, text in found
  ]
  try:
    Path(_OUT.value).write_text("\n".join(lines) + "\n", encoding="utf-8")
  except OSError as error:
    raise UserError(f"cannot write {_OUT.value}: {error.strerror}") from error
  for name in SOURCES:
    count = sum(source == name for source, _ in found)
    print(f"{name}: {count} prompts, {dropped[name]} shared with an evaluation")
  print(f"{len(found)} prompts in {_OUT.value}")
  return 0


if __name__ == "__main__":
  launch.run(main)
