"""Runs commands of `experiments` in this process: a start costs seconds.

A test file imports the fixtures it needs (`model as model`: meant, though
the name is not read), and `built_once`, which then holds for all its tests.
"""

import functools
import importlib
import json
import sys
from typing import NamedTuple

from absl import flags
import pytest
from tiny_model import tiny_model

import experiments
from experiments import launch, prompts
from spec_jax import weights
from spec_jax.models import decoder

# One program for most tests of the command: it is compiled once.
SMALL = (
  "--config.sampling.max_new_tokens=12",
  "--config.engine.slots=256",
  "--config.drafter.num_draft=3",
  "--config.policy.name=fixed",  # measures nothing
)
VANILLA = "--config.drafter.name=vanilla"

_build = functools.cache(decoder.build)


class Ran(NamedTuple):
  """What a command ended with."""

  code: int | str | None
  out: str
  err: str


def fresh(name: str):
  """Imports a command anew: flags are global, so others' are taken away.

  A command's module defines its flags on import; two that define the same
  one cannot be imported side by side.
  """
  by_module = flags.FLAGS.flags_by_module_dict()
  own = {
    flag.name
    for module, found in by_module.items()
    for flag in found
    if module.startswith("experiments.")
  }
  for flag in list(flags.FLAGS):
    if flag in own or flag.startswith("config."):
      delattr(flags.FLAGS, flag)
  flags.FLAGS.unparse_flags()
  module = f"experiments.{name}"
  for other in by_module:  # a command that uses another: its flags are gone too
    if other.startswith("experiments.") and other != module:
      sys.modules.pop(other, None)
      vars(experiments).pop(other.removeprefix("experiments."), None)
  if module in sys.modules:
    return importlib.reload(sys.modules[module])
  return importlib.import_module(module)


def run_command(
  monkeypatch, capsys, name, *words: str, config="", **options
) -> Ran:
  """Runs `python -m experiments.<name>` with these words, in this process.

  `config` and the options are what the command gives to `launch.run`.
  """
  monkeypatch.setattr(sys, "argv", [name, *words])
  module = fresh(name)
  capsys.readouterr()
  code = 0
  try:
    launch.run(module.main, config, **options)
  except SystemExit as end:
    code = end.code
  shown = capsys.readouterr()
  return Ran(code, shown.out, shown.err)


def run_generate(monkeypatch, capsys, *words: str) -> Ran:
  """Runs `experiments.generate` with these words."""
  config = prompts.root("configs/generate.py")
  return run_command(monkeypatch, capsys, "generate", *words, config=config)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  """A model folder that the command loads by path."""
  return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def unread(monkeypatch):
  """Makes reading any weight a failure of the test."""

  def fill(*args):
    raise AssertionError("weights were read")

  monkeypatch.setattr(weights, "_fill", fill)


@pytest.fixture(autouse=True)
def built_once(monkeypatch):
  """Gives the same functions for the same architecture: programs are kept."""
  monkeypatch.setattr(decoder, "build", _build)


@pytest.fixture
def command(model, monkeypatch, capsys):
  """Runs the command on the tiny model."""

  def run(*words):
    return run_generate(monkeypatch, capsys, *words, f"--config.model={model}")

  return run


def read_lines(path):
  """Returns the JSON of each line of a file."""
  return [json.loads(x) for x in path.read_text("utf-8").splitlines()]


def without_times(record):
  """Returns what must be the same in two runs: all but times."""
  samples = [
    {k: v for k, v in s.items() if k != "first_token_s"}
    for s in record["samples"]
  ]
  return record | {"samples": samples}


def cells(out, label):
  """Returns the words of the table's row of that label."""
  (row,) = [x for x in out.splitlines() if x.startswith(label + "  ")]
  return row[len(label) :].split()


def prompt_file(folder, count=7):
  """Writes a file of prompts and returns its flag."""
  file = folder / "prompts.jsonl"
  texts = [f"prompt {i} " + "xy " * (i % 9) for i in range(count)]
  file.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
  return f"--prompts={file}"
