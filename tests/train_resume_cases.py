"""Trains in a process of its own, see train_loop_test.py: FOLDER STOP ..."""

from pathlib import Path
import sys

from tests import train_rig
from train import loop

STEPS = 8


def main(*words: str) -> None:
  """Trains in each folder until its stop, from whatever the folder holds."""
  recipe = train_rig.recipe(train_rig.target())
  for folder, stop in zip(words[::2], words[1::2], strict=True):
    schedule = loop.Schedule(
      STEPS, stop_after=int(stop), accumulate=2, log_every=1
    )
    train_rig.train(Path(folder), recipe, schedule)


if __name__ == "__main__":
  main(*sys.argv[1:])
