"""Times the transformers library with torch, in another interpreter.

The project itself does not need torch: a peer is started only when a script is
given an interpreter that has it.
"""

import json
from pathlib import Path
import subprocess
import tempfile

from experiments import launch, prompts

_WORKER = "tests/golden/torch_worker.py"


class TorchPeer:
  """A model in the transformers library, asked over a pipe.

  Attributes:
    version: of torch.
  """

  def __init__(self, python: str, path: Path, dtype: str):
    """Starts the interpreter and loads the model.

    Args:
      python: an interpreter that has torch, transformers and gguf.
      path: a GGUF file.
      dtype: "float32" or "bfloat16".

    Raises:
      UserError: if the interpreter cannot load it.
    """
    # A file, not a pipe: nobody reads while a request is on its way.
    self._errors = tempfile.TemporaryFile("w+")
    try:
      self._process = subprocess.Popen(
        [python, prompts.root(_WORKER), str(path), dtype],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=self._errors,
        text=True,
      )
    except OSError as error:
      self._errors.close()
      raise launch.UserError(
        f"cannot run {python}: {error.strerror}"
      ) from error
    self.version = self._answer()["ready"]

  def generate(self, ids: list[int], tokens: int) -> tuple[float, list[int]]:
    """Decodes greedily; returns (seconds, the new ids)."""
    answer = self._ask({"generate": ids, "tokens": tokens})
    return answer["seconds"], answer["ids"]

  def forward(self, width: int, past: int) -> float:
    """Reads `width` tokens behind a cache of `past`; returns seconds."""
    return self._ask({"forward": width, "past": past})["seconds"]

  def close(self) -> None:
    """Ends the other process."""
    self._process.communicate()
    self._errors.close()

  def _ask(self, request: dict) -> dict:
    assert self._process.stdin is not None
    self._process.stdin.write(json.dumps(request) + "\n")
    self._process.stdin.flush()
    return self._answer()

  def _answer(self) -> dict:
    assert self._process.stdout is not None
    line = self._process.stdout.readline()
    if not line:
      self._process.communicate()
      self._errors.seek(0)
      errors = self._errors.read().strip().splitlines()
      reason = errors[-1] if errors else "it ended without a word"
      raise launch.UserError(f"the interpreter with torch failed: {reason}")
    return json.loads(line)
