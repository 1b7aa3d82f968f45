"""Runs `experiments.generate` in this process: a start costs seconds."""

import importlib
import sys
from typing import NamedTuple

from absl import flags

from experiments import generate, launch, prompts


class Ran(NamedTuple):
  """What a command ended with."""

  code: int | str | None
  out: str
  err: str


def run_generate(monkeypatch, capsys, *words: str) -> Ran:
  """Runs the command with these words, as `python -m` would.

  Flags are global, so the command's module is run anew each time.
  """
  monkeypatch.setattr(sys, "argv", ["generate", *words])
  by_module = flags.FLAGS.flags_by_module_dict()
  own = {flag.name for flag in by_module.get(generate.__name__, ())}
  for name in list(flags.FLAGS):
    if name in own or name.startswith("config."):
      delattr(flags.FLAGS, name)
  flags.FLAGS.unparse_flags()
  importlib.reload(generate)
  capsys.readouterr()
  code = 0
  try:
    launch.run(generate.main, prompts.root("configs/generate.py"))
  except SystemExit as end:
    code = end.code
  shown = capsys.readouterr()
  return Ran(code, shown.out, shown.err)
