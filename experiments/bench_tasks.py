"""The prompts of `experiments.spec_bench`: Spec-Bench's, and edits of code."""

from collections.abc import Sequence
import json
from pathlib import Path
from typing import Any

from experiments import bench_summary as summary, prompts as prompt_files
from experiments.launch import UserError


def pick(items: Sequence[Any], count: int) -> list[Any]:
  """Returns `count` items at equal distances, all if there are fewer."""
  if count >= len(items):
    return list(items)
  return [items[i * len(items) // count] for i in range(count)]


def read_tasks(path: str, count: int) -> dict[str, list[tuple[str, str]]]:
  """Returns (id, text) of the prompts by subtask.

  Args:
    path: a question.jsonl; categories that are no subtask of their own are
      MT-bench's, "multi-turn".
    count: of a subtask; of the ten edits, as many in proportion to eight.

  Raises:
    UserError: if the file cannot be read or holds no question.
  """
  if not path:
    raise UserError("give --questions=PATH of Spec-Bench's question.jsonl")
  if count < 1:
    raise UserError(f"prompts_per_task must be at least 1, got {count}")
  found: dict[str, list[tuple[str, str]]] = {t: [] for t in summary.SUBTASKS}
  try:
    for line in Path(path).read_text(encoding="utf-8").split("\n"):
      if line.strip():
        record = json.loads(line)
        task = record["category"]
        task = task if task in found else summary.SUBTASKS[0]
        found[task].append((str(record["question_id"]), record["turns"][0]))
  except OSError as error:
    raise UserError(f"cannot read {path}: {error.strerror}") from error
  except (ValueError, TypeError, LookupError) as error:
    raise UserError(f"{path} is no question.jsonl: {error!r}") from error
  if not any(found.values()):
    raise UserError(f"{path} holds no question")
  picked = {task: pick(items, count) for task, items in found.items()}
  edits = prompt_files.read(
    (), prompt_files.root("experiments/edit_prompts.jsonl")
  )
  named = [(f"edit {i}", text) for i, text in enumerate(edits)]
  picked[summary.EDITING] = pick(named, max(1, count * 10 // 8))
  return {task: items for task, items in picked.items() if items}
