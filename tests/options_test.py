"""Options are checked by name and by type, from a function's signature."""

from collections.abc import Sequence

import numpy as np
import pytest

from spec_jax import drafters, length, verifiers
from spec_jax.levels import Levels
from spec_jax.options import check_types, types_of
from tests import fakes


def _made(
  *, depth: int = 3, part: float | None = None, tree: Sequence[int] = ()
):
  """Takes one option of each kind."""


def test_types_come_from_annotations():
  assert types_of(_made) == {"depth": int, "part": float, "tree": tuple}


@pytest.mark.parametrize(
  ("name", "value", "good"),
  [
    ("depth", 3, True),
    ("depth", np.int64(3), True),
    ("depth", 2.5, False),
    ("depth", "3", False),
    ("depth", True, False),
    ("depth", None, False),
    ("part", 1, True),
    ("part", np.float32(0.5), True),
    ("part", None, True),
    ("part", "x", False),
    ("tree", [2, 1], True),
    ("tree", "21", False),
    ("tree", 3, False),
  ],
)
def test_a_value_of_another_type_is_refused(name, value, good):
  if good:
    check_types("x", {name: value}, _made)
    return
  with pytest.raises(ValueError, match=f"{name} of x must be"):
    check_types("x", {name: value}, _made)


def test_drafters_verifiers_and_policies_check_types():
  model, _ = fakes.tables()
  with pytest.raises(ValueError, match=r"num_draft of drafter .* an integer"):
    drafters.build("suffix", model, None, slots=8, num_draft=2.5)
  plain = drafters.build("prompt_lookup", model, None, slots=8)
  with pytest.raises(ValueError, match=r"epsilon of verifier .* a number"):
    verifiers.build("typical", plain, epsilon="x")
  with pytest.raises(ValueError, match=r"probe of length policy .* an integer"):
    length.build("cost", Levels((2,)), probe=1.5)


def test_one_name_has_one_type():
  """The command has one field for an option that several drafters have."""
  for table in (drafters, verifiers, length):
    kinds = table.option_types()
    assert kinds and set(kinds.values()) <= {bool, int, float, str, tuple}
  for name in drafters.names():
    own = {k: type(v) for k, v in drafters.options(name).items()}
    for option, kind in own.items():
      if kind in (bool, int, float, str):
        assert kind is drafters.option_types()[option], (name, option)
