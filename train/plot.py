"""Plots metrics of runs: `python -m train.plot --runs=a,b --out=plot.png`."""

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from experiments import launch
from experiments.launch import UserError
from train.report import METRICS, read_metrics

_RUNS = flags.DEFINE_list("runs", [], "Folders of runs.")
_PLOT = flags.DEFINE_string("out", "", "Picture to write: .png, .svg, .pdf.")

# Field -> what the axis says.
_PANELS = {
  "loss": "loss",
  "acceptance": "acceptance, sum min(p, q)",
  "eval_emitted_per_step": "emitted per step, held out",
  "learning_rate": "learning rate",
}


def plot(folders: Sequence[str], out: str) -> None:
  """Draws what the runs have of `_PANELS`, one curve a run.

  Raises:
    UserError: if a run has no metrics or the picture cannot be written.
  """
  from matplotlib.figure import Figure

  runs = {}
  for folder in folders:
    try:
      runs[folder] = read_metrics(folder)
    except (OSError, ValueError) as error:
      why = f"cannot read {Path(folder) / METRICS}: {error}"
      raise UserError(why) from error
    if not runs[folder]:
      raise UserError(f"{folder} holds no {METRICS} with a line")
  figure = Figure(figsize=(9, 6), layout="constrained")
  axes = figure.subplots(2, 2)
  for axis, (field, label) in zip(axes.flat, _PANELS.items(), strict=True):
    for folder, lines in runs.items():
      points = [(x["step"], x[field]) for x in lines if field in x]
      steps, values = zip(*points, strict=True) if points else ((), ())
      axis.plot(
        steps, values, label=Path(folder).name, marker="." * (len(steps) < 20)
      )
    axis.set_xlabel("step")
    axis.set_ylabel(label)
  axes.flat[0].legend()
  try:
    figure.savefig(out, dpi=120)
  except (OSError, ValueError) as error:
    raise UserError(f"cannot write {out}: {error}") from error


def main() -> int | None:
  """Runs the command."""
  if not _RUNS.value or not _PLOT.value:
    raise UserError("--runs and --out are needed")
  plot(_RUNS.value, _PLOT.value)
  print(f"{', '.join(_RUNS.value)} in {_PLOT.value}")
  return 0


if __name__ == "__main__":
  launch.run(main)
