"""Rules of verification by name, what they can judge, and their options.

A rule is `rule(noise, law_at, draft, depth) -> Verdict`; `verify.verify` is the
one that every drafter works with.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from spec_jax.base import DETERMINISTIC, Drafter
from spec_jax.options import check_known, options_of, types_of
from spec_jax.verify import verify
from spec_jax.verify_block import verify_block


class Verifier(NamedTuple):
  """A rule of verification.

  Attributes:
    verify: `verify(noise, law_at, draft, depth) -> Verdict`.
    lossy: whether the output law may differ from the target's; its verdicts
      then say by how much.
  """

  verify: Callable
  lossy: bool = False


def token(drafter: Drafter) -> Verifier:
  """Builds the rule that judges token by token, in any tree."""
  del drafter
  return Verifier(verify)


def block(drafter: Drafter) -> Verifier:
  """Builds block verification, which keeps at least as much of a chain.

  Raises:
    ValueError: if the drafter makes trees, or tokens that are certain.
  """
  if drafter.num_nodes != drafter.depth + 1:
    raise ValueError("block verification is for chains, not for trees")
  if DETERMINISTIC in drafter.laws:
    raise ValueError(
      "block verification needs tokens drawn at random, and this drafter's are "
      "certain: use the verifier 'token'"
    )
  return Verifier(verify_block)


VERIFIERS: dict[str, Callable[..., Verifier]] = {
  "token": token,
  "block": block,
}


def options(name: str) -> dict[str, Any]:
  """Returns a verifier's options and their defaults.

  Raises:
    ValueError: if there is no such verifier.
  """
  if name not in VERIFIERS:
    raise ValueError(
      f"unknown verifier {name!r}; there are {', '.join(VERIFIERS)}"
    )
  return options_of(VERIFIERS[name])


def option_types() -> dict[str, type]:
  """Returns every option that a verifier has, and its type."""
  found: dict[str, type] = {}
  for make in VERIFIERS.values():
    found |= types_of(make)
  return found


def build(name: str, drafter: Drafter, **settings) -> Verifier:
  """Builds a verifier by name.

  Args:
    name: a key of `VERIFIERS`.
    drafter: whose drafts it shall judge.
    **settings: the verifier's options.

  Raises:
    ValueError: for an unknown verifier or option, an option out of range, or
      a drafter whose drafts it cannot judge.
  """
  check_known(f"verifier {name!r}", settings, options(name))
  return VERIFIERS[name](drafter, **settings)
