"""Writes trained heads as their authors publish them, for other systems.

python -m train.export --draft=runs/eagle/best --out=eagle-head
"""

from pathlib import Path

from absl import flags

from experiments import launch
from experiments.launch import UserError
import spec_jax
from spec_jax import pairing
from spec_jax.heads import Heads
from spec_jax.public_heads_write import write_public

_MODEL = flags.DEFINE_string("model", "smollm2-135m-instruct", "The target.")
_DRAFT = flags.DEFINE_string("draft", "", "Folder of trained heads.")
_OUT = flags.DEFINE_string("out", "", "Folder to write.")


def main() -> int:
  """Runs the command."""
  if not _DRAFT.value or not _OUT.value:
    raise UserError("--draft and --out are needed")
  if not Path(_DRAFT.value).expanduser().is_dir():
    raise UserError(f"--draft={_DRAFT.value} is no folder")
  with launch.user_errors():
    loaded = spec_jax.load(_MODEL.value, cpu_kernel="off")
    heads, params = pairing.resolve_draft(loaded, _DRAFT.value)
    if not isinstance(heads, Heads):
      raise UserError(
        f"{_DRAFT.value} holds layers, no heads: nobody has published a layout "
        "for them"
      )
    try:
      path = write_public(_OUT.value, heads, params, loaded)
    except OSError as error:
      raise UserError(f"cannot write {_OUT.value}: {error.strerror}") from error
  print(f"{heads.kind} heads in {path}")
  words = heads.config.words
  if words.own_matrix and not (heads.kind == "eagle" and heads.config.taps):
    print(
      f"this layout has no place for {words.size} words of "
      f"{words.target_size}: there, all of the target's are known"
    )
  return 0


if __name__ == "__main__":
  launch.run(main)
