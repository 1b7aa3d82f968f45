"""Tests of the notebooks: they run from top to bottom, on a tiny model."""

from pathlib import Path

import jupytext
import nbclient
import pytest
from tiny_model import tiny_model

_ROOT = Path(__file__).resolve().parents[1]
_QUICK_START = _ROOT / "experiments" / "notebooks" / "quick_start.py"


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
  """Keeps the kernel's own warnings out of the test's."""
  monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
  monkeypatch.setenv("PYTHONPATH", str(_ROOT))
  # The kernel shows plots in the notebook, whatever the tests do.
  monkeypatch.delenv("MPLBACKEND", raising=False)


def _execute(notebook):
  """Runs a notebook's cells in a kernel of this interpreter."""
  client = nbclient.NotebookClient(
    notebook, timeout=300, kernel_name="python3", resources={}
  )
  return client.execute(cwd=str(_ROOT))


def _printed(cell):
  """Returns what a cell wrote."""
  return "".join(o.text for o in cell.outputs if o.output_type == "stream")


def _code(notebook):
  return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.filterwarnings("default")
def test_the_quick_start_runs(tmp_path, monkeypatch):
  """No cell fails; versions, tables, a plot and a trace are shown."""
  monkeypatch.setenv("SPEC_JAX_NOTEBOOK_MODEL", str(tiny_model(tmp_path)))
  notebook = _execute(jupytext.read(_QUICK_START))
  cells = _code(notebook)
  assert all(c.execution_count for c in cells)
  assert not [o for c in cells for o in c.outputs if o.output_type == "error"]
  first, model, plain, *_ = map(_printed, cells)
  assert "jax 0." in first and "jaxlib 0." in first and "cpu" in first
  assert "2 layers, vocabulary of 300, context of 640" in model
  shown = "\n".join(map(_printed, cells))
  assert plain.count("prompt lookup") == 1
  assert shown.count("\ndecode, tokens/s  ") == 3
  rows = [x for x in shown.splitlines() if x.startswith("same text as the")]
  # Greedy: all alike. Sampled: deterministic drafts as plain.
  assert rows[0].split()[-2:] == ["yes"] * 2
  assert rows[1].split()[-4:] == ["yes"] * 4
  assert rows[2].split()[-3:-1] == ["yes"] * 2
  assert "\nstep 0: " in "\n" + _printed(cells[-1])
  images = [o for c in cells for o in c.outputs if "data" in o]
  assert any("image/png" in o.data for o in images)


@pytest.mark.filterwarnings("default")
def test_another_platform_than_asked_for_stops_the_first_cell(monkeypatch):
  """The message says what to do about it."""
  monkeypatch.setenv("SPEC_JAX_NOTEBOOK_PLATFORM", "tpu")
  notebook = jupytext.read(_QUICK_START)
  with pytest.raises(nbclient.exceptions.CellExecutionError) as error:
    _execute(notebook)
  assert "asked to run on 'tpu', but JAX found 'cpu'" in str(error.value)
  assert "Change runtime type" in str(error.value)
  first, *others = _code(notebook)
  assert first.execution_count == 1
  assert not any(cell.outputs for cell in others)
