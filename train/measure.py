"""What recipes share that measure their draft with the real decoder."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spec_jax import drafters
from spec_jax.base import PyTree
from spec_jax.generate import Generation, generate
from spec_jax.hub import Loaded
from spec_jax.settings import Settings

__all__ = ["HeldOut", "cast", "no_remat", "precision_of", "rows_for"]


def rows_for(count: int, most: int, mesh: Any) -> int:
  """Returns the rows of a batch for so many prompts, a mesh's multiple."""
  rows = 1 if mesh is None else mesh.shape["data"]
  return -(-min(most, count) // rows) * rows


class HeldOut(NamedTuple):
  """Prompts that are not trained on, and how they are decoded.

  Attributes:
    loaded: the target.
    prompts: token ids.
    eval: `config.eval`.
    seed: of what is sampled.
    mesh: or None.
  """

  loaded: Loaded
  prompts: Sequence[Sequence[int]]
  eval: Any
  seed: int
  mesh: Any

  def check(self, drafter: str, draft: Any, options: Mapping[str, Any]) -> None:
    """Checks that a draft could be measured so; decodes nothing.

    Args:
      drafter: its name.
      draft: a model or heads.
      options: of the drafter.

    Raises:
      ValueError: naming what is out of range.
    """
    self._settings().check(self.loaded.model.config.vocab_size)
    model = self.loaded.model
    slots = model.config.max_length
    drafters.build(drafter, model, draft, slots=slots, **options)

  def _settings(self) -> Settings:
    return Settings(
      temperature=self.eval.temperature,
      max_new_tokens=self.eval.max_new_tokens,
      stop_ids=self.loaded.stop_ids,
    )

  def decode(self, **how) -> Generation:
    """Decodes all prompts; `how` is given to `generate`."""
    return generate(
      self.loaded,
      self.prompts,
      settings=self._settings(),
      batch_size=rows_for(len(self.prompts), self.eval.batch_size, self.mesh),
      seed=self.seed,
      mesh=self.mesh,
      **how,
    )

  def rates(
    self, drafter: str, draft: Any, options: Mapping[str, Any]
  ) -> dict[str, float]:
    """Returns what a draft reaches: "emitted_per_step" and the rest."""
    out = self.decode(drafter=drafter, draft=draft, options=options)
    names = ("emitted_per_step", "acceptance_rate")
    return {name: float(out.report[name] or 0.0) for name in names}


def precision_of(config: Any) -> str | None:
  """Returns the precision of products that a configuration names."""
  name = config.execution.matmul_precision
  return None if name == "default" else name


def no_remat(config: Any) -> None:
  """Refuses `train.remat` where no layer of the target is trained.

  Raises:
    ValueError: if it is set.
  """
  if config.train.remat:
    raise ValueError(
      "train.remat is for recipes that train layers of the target; here "
      "loss.chunk saves memory"
    )


def cast(params: PyTree, dtype) -> PyTree:
  """Returns floating arrays in a dtype; others as they are."""
  return jax.tree.map(
    lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x,
    params,
  )
