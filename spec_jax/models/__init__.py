"""Model families, one file each, found by name."""

import importlib
import pkgutil
from types import ModuleType


def names() -> list[str]:
  """Returns the families that have a file here."""
  return sorted(
    m.name
    for m in pkgutil.iter_modules(__path__)
    if m.name not in ("common", "decoder", "table")
  )


def load(model_type: str) -> ModuleType:
  """Returns the module of a family.

  Args:
    model_type: `model_type` of a Hugging Face config.json, e.g. "llama".

  Raises:
    ValueError: if no file here serves it.
  """
  for name in names():
    module = importlib.import_module(f"{__name__}.{name}")
    if model_type in module.MODEL_TYPES:
      return module
  raise ValueError(
    f"unknown model type {model_type!r}; supported: {', '.join(names())}"
  )
