"""The prompts of `experiments.spec_bench`: Spec-Bench's, and edits of code."""

from collections.abc import Sequence
from typing import Any

from experiments import bench_summary as summary, prompts as prompt_files
from experiments.launch import UserError


def pick(items: Sequence[Any], count: int) -> list[Any]:
  """Returns `count` items at equal distances, all if there are fewer."""
  if count >= len(items):
    return list(items)
  return [items[i * len(items) // count] for i in range(count)]


def _question(where: str, record: Any) -> tuple[str, str, str]:
  """Returns category, id and first turn of a line of question.jsonl.

  Raises:
    UserError: naming the line, if it is no question.
  """
  if not isinstance(record, dict):
    raise UserError(
      f"{where}: a question is an object with question_id, category and turns"
    )
  category, turns = record.get("category"), record.get("turns")
  name = record.get("question_id")
  if not isinstance(category, str):
    raise UserError(f"{where}: its category is no text")
  if not isinstance(name, str | int | float):
    raise UserError(f"{where}: its question_id is no number and no text")
  if not isinstance(turns, list) or not turns:
    raise UserError(f"{where}: its turns are no list of texts")
  if not isinstance(turns[0], str) or not turns[0].strip():
    raise UserError(f"{where}: its first turn is no text, or empty")
  return category, str(name), turns[0]


def read_tasks(path: str, count: int) -> dict[str, list[tuple[str, str]]]:
  """Returns (id, text) of the prompts by subtask.

  Args:
    path: a question.jsonl; categories that are no subtask of their own are
      MT-bench's, "multi-turn".
    count: of a subtask; of the ten edits, as many in proportion to eight.

  Raises:
    UserError: if the file cannot be read, a line is no question, or there is
      none.
  """
  if not path:
    raise UserError("give --questions=PATH of Spec-Bench's question.jsonl")
  if count < 1:
    raise UserError(f"prompts_per_task must be at least 1, got {count}")
  found: dict[str, list[tuple[str, str]]] = {t: [] for t in summary.SUBTASKS}
  for where, line in prompt_files.lines_of(path):
    task, name, text = _question(where, prompt_files.record_of(where, line))
    found[task if task in found else summary.SUBTASKS[0]].append((name, text))
  if not any(found.values()):
    raise UserError(f"{path} holds no question")
  picked = {task: pick(items, count) for task, items in found.items()}
  edits = prompt_files.read(
    (), prompt_files.root("experiments/edit_prompts.jsonl")
  )
  named = [(f"edit {i}", text) for i, text in enumerate(edits)]
  picked[summary.EDITING] = pick(named, max(1, count * 10 // 8))
  return {task: items for task, items in picked.items() if items}
