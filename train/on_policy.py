"""Batches that hold, besides the data, what the draft itself writes.

Every `refresh` steps the draft answers some of the prompts with our own engine;
until the next time a fixed part of each batch comes from those answers. The
target's law is computed on whatever the batch holds, so the draft is taught
where it goes, not only where the target would have gone.

What was written lies in the run's folder, so a resumed run reads the very same
answers and not those of a draft that is further on.

Reference: Zhou et al. 2024 (DistillSpec), section 4; Agarwal et al. 2024 (GKD).
"""

from collections.abc import Callable, Sequence
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from experiments.results import digest
from spec_jax.base import PyTree
from train.checks import at_least
from train.data import Batches, DataError, Example, pack
from train.recipe import Recipe
from train.records import example_of

__all__ = ["OnPolicyBatches", "drafted_rows", "make_fixed", "mix"]


class OnPolicyBatches:
  """Mixes the draft's own answers into fixed data."""

  def __init__(
    self,
    fixed: Batches | None,
    prompts: Sequence[Sequence[int]],
    sample: Callable[[PyTree, Sequence[Sequence[int]], int], list[list[int]]],
    *,
    batch_size: int,
    length: int,
    refresh: int,
    prompts_each: int,
    seed: int,
    folder: Path,
  ):
    """Prepares, and samples nothing yet.

    Args:
      fixed: gives the rest of each batch; None = the draft gives it all.
      prompts: token ids, each shorter than a row.
      sample: `sample(params, prompts, seed) -> ids of the answers`.
      batch_size: rows of a batch that are the draft's.
      length: tokens of a row.
      refresh: steps between two samplings.
      prompts_each: prompts that are answered each time.
      seed: of the order and of the sampling.
      folder: where answers are kept.

    Raises:
      DataError: if no prompt leaves room for an answer.
    """
    self._prompts = [list(p) for p in prompts if 0 < len(p) < length]
    if not self._prompts:
      raise DataError(f"no prompt is shorter than a row of {length} tokens")
    self._digest = digest([list(map(int, p)) for p in self._prompts])
    self._fixed, self._sample = fixed, sample
    self._batch_size, self._length = batch_size, length
    self._refresh, self._each = refresh, min(prompts_each, len(self._prompts))
    self._seed, self._folder = seed, Path(folder)
    self._own: Batches | None = None
    self.epoch = 0 if fixed is None else fixed.epoch

  def before(self, step: int, params: PyTree) -> None:
    """Called before each step, counted from 1, with the draft as it is."""
    done = (step - 1) % self._refresh
    if done and self._own is not None:
      return
    start = step - 1 - done
    path = self._folder / f"step-{start:08d}.jsonl"
    if not path.exists():
      if done:
        raise DataError(
          f"{path} is gone: the answers a resumed run needs; start anew"
        )
      self._write(path, start, params)
    pairs = [json.loads(x) for x in path.read_text("utf-8").splitlines()]
    examples = []
    for pair in pairs:
      ids, answer = example_of(pair["prompt_ids"], pair["ids"])
      examples.append(Example(ids[: self._length], answer[: self._length]))
    rows = pack([x for x in examples if x.answer[1:].any()], self._length)
    self._own = Batches(rows, self._batch_size, self._seed + start)
    self._own.skip_to(done)

  def _write(self, path: Path, start: int, params: PyTree) -> None:
    first = start // self._refresh * self._each
    chosen = [
      self._prompts[i % len(self._prompts)]
      for i in range(first, first + self._each)
    ]
    answers = self._sample(params, chosen, self._seed + start)
    lines = [
      json.dumps({"prompt_ids": list(map(int, p)), "ids": list(map(int, a))})
      for p, a in zip(chosen, answers, strict=True)
    ]
    self._folder.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    os.replace(temporary, path)

  def __next__(self) -> dict[str, np.ndarray]:
    """Returns the next batch: rows of the data, then the draft's."""
    assert self._own is not None, "before() comes first"
    own = next(self._own)
    if self._fixed is None:
      return own
    fixed = next(self._fixed)
    return {k: np.concatenate([fixed[k], own[k]]) for k in own}

  def __iter__(self) -> "OnPolicyBatches":
    """Returns itself."""
    return self

  def position(self) -> dict[str, Any]:
    """Returns where the fixed data stands; the rest follows from the step."""
    fixed = {} if self._fixed is None else self._fixed.position()
    return {**fixed, "prompts": self._digest}

  def restore(self, position: dict[str, Any]) -> None:
    """Moves to a position that `position` gave.

    Raises:
      DataError: if it was with other prompts or data.
    """
    if position["prompts"] != self._digest:
      raise DataError(
        "the prompts have changed since this run began; give another --out"
      )
    if self._fixed is not None:
      self._fixed.restore(position)


def drafted_rows(config: Any, accumulate: int) -> int:
  """Returns how many rows of a step the draft writes.

  Raises:
    ValueError: if a number is out of range, or the part is no number of rows.
  """
  own = config.on_policy
  if not 0 <= own.part <= 1:
    raise ValueError(f"on_policy.part must be in [0, 1], got {own.part}")
  at_least("on_policy", own, ("refresh", "prompts"), 1)
  whole = config.train.batch_size * accumulate
  drafted = round(own.part * whole)
  if abs(drafted - own.part * whole) > 1e-6:
    raise ValueError(
      f"on_policy.part must be a number of the {whole} rows of a step, as in "
      f"{1 / whole:.4g} or {max(drafted, 1) / whole:.4g}, got {own.part}"
    )
  return drafted


def make_fixed(
  config: Any, rows: Sequence[dict], accumulate: int
) -> tuple[Batches | None, int]:
  """Returns batches of the data, and how many rows of each are the draft's.

  Raises:
    ValueError: see `drafted_rows`.
  """
  drafted = drafted_rows(config, accumulate)
  rest = config.train.batch_size * accumulate - drafted
  return Batches(rows, rest, config.seed) if rest else None, drafted


def mix(
  config: Any,
  fixed: Batches | None,
  drafted: int,
  learn: Sequence[Example],
  recipe: Recipe,
  folder: Path,
) -> Any:
  """Returns the batches of a run; see `make_fixed`.

  Raises:
    ValueError: if the recipe's draft cannot write alone.
  """
  if not drafted:
    return fixed
  if recipe.sample is None:
    raise ValueError(f"recipe {config.recipe!r} takes no on_policy.part")
  own = config.on_policy
  return OnPolicyBatches(
    fixed,
    [x.prompt for x in learn],
    recipe.sample,
    batch_size=drafted,
    length=config.data.length,
    refresh=own.refresh,
    prompts_each=own.prompts,
    seed=config.seed,
    folder=folder / "on_policy",
  )
