"""From one record of a data set to token ids and which of them are answer.

Layouts:
  {"messages": [{"role": "user", "content": ...}, ...]}
  {"conversations": [{"from": "human", "value": ...}, ...]}      (ShareGPT)
  {"prompt": ..., "answer": ...}      and other names, see `_PROMPT`, `ANSWERS`
  {"prompt_ids": [...], "ids": [...]}      what `train.generate` writes
  {"text": ...} or a string            every token is answer
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from spec_jax import text

_ROLES = {
  "human": "user",
  "user": "user",
  "gpt": "assistant",
  "chatgpt": "assistant",
  "assistant": "assistant",
  "model": "assistant",
  "bing": "assistant",
  "bard": "assistant",
  "system": "system",
  "tool": "tool",
}
_PROMPT = ("prompt", "instruction", "question")
ANSWERS = ("answer", "response", "completion", "output")


# Tokens of a text that stand in for a prompt where it is continued.
_BEGINNING = 32


class DataError(ValueError):
  """Data that cannot be used; the message is one plain line."""

  def __init__(self, message: str):
    super().__init__(" ".join(str(message).split()))


class Example(NamedTuple):
  """One sequence.

  Attributes:
    ids: `[n]` int32.
    answer: `[n]` bool, the token is part of an answer.
  """

  ids: np.ndarray
  answer: np.ndarray

  def pieces(self, length: int) -> Iterator["Example"]:
    """Yields the first `length` tokens; of a text, where all counts, the rest.

    Ids and mask are cut alike. A piece with nothing to predict is left out.
    """
    stop = len(self.ids) if self.answer.all() else 1
    for start in range(0, stop, length):
      at = slice(start, start + length)
      piece = Example(self.ids[at], self.answer[at])
      if piece.answer[1:].any():
        yield piece

  @property
  def prompt(self) -> list[int]:
    """What stands before the first answer token; of a text, its beginning."""
    n = int(self.answer.argmax()) or min(_BEGINNING, len(self.ids) // 2)
    return self.ids[:n].tolist()


def example_of(prompt: Sequence[int], answer: Sequence[int]) -> Example:
  """Returns a prompt with its answer."""
  ids = np.asarray([*prompt, *answer], np.int32)
  return Example(ids, np.arange(len(ids)) >= len(prompt))


class Reader:
  """Turns records into examples with the ids that decoding would use.

  Attributes:
    tokenizer: of the target.
    vocab_size: of the target.
    stop_ids: ids that end its texts.
    template: whether a prompt that is a text is put into a chat.
    system: a system message before such a prompt, or "".
  """

  def __init__(self, loaded: Any, template: bool | None, system: str):
    """Takes the target; template None = if there is one.

    Raises:
      DataError: if there is no tokenizer, or a chat template is asked for and
        there is none.
    """
    if loaded.tokenizer is None:
      raise DataError("this model has no tokenizer, so no data can be read")
    has = bool(getattr(loaded.tokenizer, "chat_template", None))
    if template and not has:
      raise DataError("this model has no chat template; use chat_template=no")
    self.template = has if template is None else template
    if system and not self.template:
      raise DataError("a system message needs a chat template")
    self.tokenizer, self.system = loaded.tokenizer, system
    self.vocab_size = loaded.model.config.vocab_size
    self.stop_ids = frozenset(loaded.stop_ids)
    self._end = list(loaded.stop_ids[:1])

  def examples(self, record: Any, where: str) -> list[Example]:
    """Returns the examples of a record, one for most.

    Args:
      record: see the layouts above.
      where: names the record in errors.

    Raises:
      DataError: if it is of no known layout or has no answer.
    """
    try:
      found = self._examples(record, where)
    except DataError:
      raise
    except ValueError as error:
      raise DataError(f"{where}: {error}") from error
    for example in found:
      wrong = example.ids[(example.ids < 0) | (example.ids >= self.vocab_size)]
      if wrong.size:
        raise DataError(
          f"{where} holds id {wrong[0]}, the vocabulary has {self.vocab_size}"
        )
    return found

  def _examples(self, record: Any, where: str) -> list[Example]:
    if isinstance(record, str):
      record = {"text": record}
    if not isinstance(record, Mapping):
      raise DataError(f"{where} is neither a text nor an object")
    if "prompt_ids" in record and "ids" in record:
      return [example_of(_ids(record, "prompt_ids"), _ids(record, "ids"))]
    for field in ("messages", "conversations"):
      if field in record:
        return self._chat(_messages(record[field], where))
    question = _first(record, _PROMPT, where)
    answer = _first(record, ANSWERS, where)
    if question is not None and answer is not None:
      extra = record.get("input")
      if isinstance(extra, str) and extra:
        question = f"{question}\n\n{extra}"
      if not self.template:
        return [self._plain(question, answer)]
      turns = [_turn("user", question), _turn("assistant", answer)]
      if self.system:
        turns = [_turn("system", self.system), *turns]
      return self._chat(turns)
    if isinstance(record.get("text"), str):
      ids = text.encode_prompt(self.tokenizer, record["text"])
      return [Example(np.asarray(ids, np.int32), np.ones(len(ids), bool))]
    raise DataError(
      f"{where} has none of messages, conversations, text, or a prompt "
      f"({', '.join(_PROMPT)}) with an answer ({', '.join(ANSWERS)}); it has "
      f"{', '.join(map(str, record)) or 'nothing'}"
    )

  def _plain(self, question: str, answer: str) -> Example:
    """A prompt and its answer as raw text, ended as the target would end."""
    prompt = text.encode_prompt(self.tokenizer, question)
    given = self.tokenizer(answer, add_special_tokens=False)["input_ids"]
    return example_of(prompt, [*given, *self._end])

  def _chat(self, turns: Sequence[Mapping[str, str]]) -> list[Example]:
    """A conversation; each answer's prompt has the ids decoding would have.

    Where a template writes earlier answers otherwise than the last one, one
    example would not be true for all answers: then there is one for each.
    """
    spans = []
    for i, turn in enumerate(turns):
      if turn["role"] == "assistant" and i > 0:
        prompt = text.encode_chat(self.tokenizer, turns[:i])
        spans.append((prompt, self._answer(prompt, turns[: i + 1])))
    if not spans:
      return []
    whole = [*spans[-1][0], *spans[-1][1]]
    if not all(whole[: len(p) + len(a)] == [*p, *a] for p, a in spans):
      return [example_of(p, a) for p, a in spans]
    answer = np.zeros(len(whole), bool)
    for p, a in spans:
      answer[len(p) : len(p) + len(a)] = True
    return [Example(np.asarray(whole, np.int32), answer)]

  def _answer(
    self, prompt: list[int], turns: Sequence[Mapping[str, str]]
  ) -> list[int]:
    """Returns the ids the target would have emitted for the last turn."""
    ids = text.encode_chat(self.tokenizer, turns, add_generation_prompt=False)
    if ids[: len(prompt)] == prompt:
      ids = ids[len(prompt) :]
    else:  # the template adds to a prompt what no answer holds
      said = turns[-1]["content"]
      ids = list(self.tokenizer(said, add_special_tokens=False)["input_ids"])
      ids += self._end
    for at, token in enumerate(ids):
      if token in self.stop_ids:  # a line end after it is never emitted
        return ids[: at + 1]
    return ids


def _turn(role: str, content: str) -> dict[str, str]:
  return {"role": role, "content": content}


def _ids(record: Mapping, field: str) -> list[int]:
  value = record[field]
  if not isinstance(value, list) or not all(type(i) is int for i in value):
    raise ValueError(f"{field} is no list of token ids")
  if any(abs(i) >= 1 << 31 for i in value):
    raise ValueError(f"{field} holds ids that no vocabulary has")
  return value


def _first(record: Mapping, names: Sequence[str], where: str) -> str | None:
  for name in names:
    value = record.get(name)
    if isinstance(value, str):
      return value
    if value is not None:
      raise DataError(f"{where}: {name} is no text")
  return None


def _messages(value: Any, where: str) -> list[dict[str, str]]:
  """Returns turns under one naming, or raises DataError."""
  turns = []
  for turn in value if isinstance(value, list) else [None]:
    if not isinstance(turn, Mapping):
      raise DataError(f"{where}: a conversation is a list of turns")
    role, said = turn.get("role", turn.get("from")), turn.get("content")
    said = turn.get("value") if said is None else said
    known = isinstance(role, str) and role in _ROLES
    if not known or not isinstance(said, str):
      raise DataError(
        f"{where}: a turn needs a role ({', '.join(sorted(_ROLES))}) and a "
        f"text, got {role!r} and {type(said).__name__}"
      )
    turns.append(_turn(_ROLES[role], said))
  return turns
