"""What a training recipe is; the loop knows nothing else of it."""

from collections.abc import Callable
import importlib
from pathlib import Path
from typing import Any, NamedTuple

from spec_jax.base import Model, PyTree
from spec_jax.models.decoder import FINAL

# The fields of a batch, see `data.pack`; `features.FIELD` may be another.
FIELDS = ("tokens", "labels", "segment_ids", "positions", "weights")


class Recipe(NamedTuple):
  """A way to train a draft, as functions.

  A recipe is a file of this folder with
  `build(config, loaded, mesh, held_out, learn) -> Recipe` and `check(config)`.

  Attributes:
    init: `init(key) -> params`, what is trained, float32.
    loss: `loss(params, frozen, batch, key) -> (total, sums)`: the loss and
      other quantities, each added up over the positions that count; `sums`
      holds "tokens", their number (weight). Sums, not means, so that pieces of
      a batch add up to the batch.
    frozen: parameters that get neither gradient nor optimiser state.
    shardings: `shardings(mesh) -> (of params, of frozen)`.
    measure: `measure(params) -> {"emitted_per_step": ..., ...}` by the real
      decoder on held-out prompts; None = there are none.
    save: `save(params, folder, info)` writes what decoding can load.
    sample: `sample(params, prompts, seed) -> ids` of the draft's own answers to
      prompts given as ids; None = it cannot write alone.
    target: the target, which shows the states that `loss` reads; None = they
      cannot be kept on disk.
    taps: the layers it shows, see `decoder`.
    rates: `rates(step) -> prefix of params`, what each part's learning rate is
      multiplied with; None = all learn alike.
  """

  init: Callable[[Any], PyTree]
  loss: Callable[..., tuple[Any, dict[str, Any]]]
  frozen: PyTree
  shardings: Callable[[Any], tuple[PyTree, PyTree]]
  measure: Callable[[PyTree], dict[str, float]] | None
  save: Callable[[PyTree, Path, dict[str, Any]], None]
  sample: Callable[[PyTree, Any, int], list[list[int]]] | None = None
  target: Model | None = None
  taps: tuple[int, ...] = (FINAL,)
  rates: Callable[[Any], PyTree] | None = None


def load(name: str) -> Any:
  """Returns the module of a recipe.

  Raises:
    ValueError: if no file of this folder is a recipe of that name.
  """
  here = Path(__file__).parent
  names = sorted(
    path.stem
    for path in here.glob("*.py")
    if "\ndef build(" in path.read_text("utf-8")
  )
  if name not in names:
    raise ValueError(f"unknown recipe {name!r}; there is {', '.join(names)}")
  return importlib.import_module(f"train.{name}")
