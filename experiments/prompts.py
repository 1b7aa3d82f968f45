"""Prompts of the commands: defaults, files, chat templates."""

from collections.abc import Sequence
import json
from pathlib import Path
from typing import Any

from experiments.launch import UserError, user_errors
from spec_jax.hub import Loaded
from spec_jax.settings import Settings
from spec_jax.work import Work, plan

# An edit that copies most of its input, a chat question, and code.
DEFAULT = (
  "Repeat this text and change nothing except the year, which must be 1925: "
  "The station was opened in the spring of 1907. The station has two "
  "platforms and a small waiting room. The waiting room was closed in the "
  "spring of 1907 and opened again a year later.",
  "Why is the sky blue? Answer in three sentences.",
  "Write a Python class Point with fields x and y, and methods add, subtract "
  "and scale.",
)

# Names of files that hold a record a line.
JSON = (".jsonl", ".json")
# Fields of a JSON line that may hold the prompt, first found first.
_FIELDS = ("messages", "prompt", "turns", "text", "question", "instruction")


def root(path: str) -> str:
  """Returns a path of this source tree."""
  return str(Path(__file__).resolve().parent.parent / path)


def bench_sets() -> dict[str, list[Any]]:
  """Returns the prompts that speeds are measured on, by kind.

  "edit" asks for an edit of a text or a code, so that much is copied; in
  "chat" little is.
  """
  golden = Path(root("tests/golden/prompts.txt")).read_text()
  return {
    "edit": read((), root("experiments/edit_prompts.jsonl")),
    "chat": [*DEFAULT[1:], *golden.splitlines()[:6]],
  }


def read(given: Sequence[str], path: str) -> list[Any]:
  """Returns the prompts of a command: given ones, a file's, or the defaults.

  Args:
    given: texts from the command line.
    path: a file, or "".

  Returns:
    Texts, or lists of chat messages.

  Raises:
    UserError: if one is empty or the file cannot be read.
  """
  found: list[Any] = list(given)
  if path:
    found += _read_file(path)
  if not found and not given and not path:
    found = list(DEFAULT)
  if not found:
    raise UserError(f"{path} holds no prompt")
  for number, prompt in enumerate(found):
    if isinstance(prompt, str) and not prompt.strip():
      raise UserError(f"prompt {number} is empty")
  return found


def lines_of(path: str) -> list[tuple[str, str]]:
  """Returns (where it stands, for errors; text) of lines that are not blank.

  Raises:
    UserError: if the file cannot be read.
  """
  try:
    text = Path(path).read_text(encoding="utf-8-sig")
  except OSError as error:
    raise UserError(f"cannot read {path}: {error.strerror}") from error
  except UnicodeDecodeError as error:
    raise UserError(f"{path} is not UTF-8: {error}") from error
  # Not `splitlines`: a line of JSON may hold U+2028 or U+0085 as it is.
  numbered = enumerate(text.split("\n"), 1)
  return [
    (f"{path} line {n}", x.rstrip("\r")) for n, x in numbered if x.strip()
  ]


def _read_file(path: str) -> list[Any]:
  lines = lines_of(path)
  if not path.endswith(JSON):
    return [line for _, line in lines]
  return [prompt_of(where, record_of(where, x))[1] for where, x in lines]


def record_of(where: str, line: str) -> Any:
  """Returns what a line of JSON holds.

  Raises:
    UserError: naming the line, if it is no JSON.
  """
  try:
    return json.loads(line)
  except ValueError as error:
    raise UserError(f"{where} is not JSON: {error}") from error
  except RecursionError as error:
    raise UserError(f"{where} is not JSON: it is nested too deep") from error


def prompt_of(where: str, record: Any) -> tuple[str, Any]:
  """Returns a record's field that is the prompt, "" for a text, and its value.

  Raises:
    UserError: naming the line, if there is none.
  """
  if isinstance(record, str):
    return "", record
  if isinstance(record, dict):
    for field in _FIELDS:
      value = record.get(field)
      if not value:
        continue
      if field == "turns" and isinstance(value, list):
        value = value[0]
      if field == "messages":
        return field, _messages(where, value)
      if isinstance(value, str):
        return field, value
  raise UserError(f"{where} has no text in any of {', '.join(_FIELDS)}")


def _messages(where: str, value: Any) -> list[dict[str, str]]:
  ok = isinstance(value, list) and all(
    isinstance(m, dict)
    and isinstance(m.get("role"), str)
    and isinstance(m.get("content"), str)
    for m in value
  )
  if not ok:
    raise UserError(f"{where}: messages need a role and a content each")
  return value


def with_template(
  tokenizer: Any, prompts: Sequence[Any], mode: str, system: str
) -> list[Any]:
  """Turns texts into chat messages where the model's template is used.

  Args:
    tokenizer: of the model, or None.
    prompts: texts or messages.
    mode: "auto" (if there is a template), "yes" or "no".
    system: a system message for texts, or "".

  Raises:
    UserError: if a template is asked for and there is none.
  """
  has = bool(getattr(tokenizer, "chat_template", None))
  if mode == "yes" and not has:
    raise UserError("this model has no chat template; use chat_template=no")
  use = has and mode != "no"
  if system and not use:
    raise UserError("a system message needs a chat template")
  first = [{"role": "system", "content": system}] if system else []
  return [
    [*first, {"role": "user", "content": p}]
    if use and isinstance(p, str)
    else p
    for p in prompts
  ]


def work_of(
  loaded: Loaded,
  prompts: Sequence[Any],
  settings: Settings,
  *,
  slots: int = 0,
  seed: int = 0,
) -> Work:
  """Returns the prompts as jobs, through the model's template if it has one.

  Args:
    loaded: the target; its weights need not be read yet.
    prompts: texts or messages.
    settings: of all of them.
    slots: tokens a row has room for; 0 = the model's context.
    seed: of what is sampled.

  Raises:
    UserError: for a setting out of range, or a prompt that does not fit.
  """
  chats = with_template(loaded.tokenizer, prompts, "auto", "")
  with user_errors():
    work = plan(loaded, chats, settings, seed)
  check_fits(loaded, work, slots)
  return work


def check_fits(loaded: Loaded, work: Work, slots: int) -> None:
  """Checks prompt lengths against the context, before weights are read.

  Raises:
    UserError: naming the prompt, its tokens and the context.
  """
  context = loaded.model.config.max_length
  room = min(slots or context, context)
  for (prompt, _), job in zip(work.origin, work.jobs, strict=True):
    if len(job.ids) >= room:
      raise UserError(
        f"prompt {prompt} has {len(job.ids)} tokens; the context is {room}"
      )
