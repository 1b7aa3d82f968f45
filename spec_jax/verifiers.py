"""Rules of verification by name, what they can judge, and their options.

A rule is `rule(noise, law_at, draft, depth) -> Verdict`; `verify.verify` is the
one that every drafter works with.
"""

from collections.abc import Callable, Mapping
import functools
import math
from typing import Any, NamedTuple

from spec_jax.base import DETERMINISTIC, IID, Drafter
from spec_jax.options import check_options, options_of, types_of
from spec_jax.verify import verify
from spec_jax.verify_block import verify_block
from spec_jax.verify_k_seq import verify_k_seq
from spec_jax.verify_lossy import verify_lenience, verify_typical


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


def _check_random_chain(what: str, drafter: Drafter) -> None:
  if drafter.num_nodes != drafter.depth + 1:
    raise ValueError(f"{what} is for chains, not for trees")
  if DETERMINISTIC in drafter.laws:
    raise ValueError(
      f"{what} needs tokens drawn at random, and this drafter's are certain: "
      "use the verifier 'token'"
    )


def block(drafter: Drafter) -> Verifier:
  """Builds block verification, which keeps at least as much of a chain.

  Raises:
    ValueError: if the drafter makes trees, or tokens that are certain.
  """
  _check_random_chain("block verification", drafter)
  return Verifier(verify_block)


def k_seq(drafter: Drafter, *, rho: float | None = None) -> Verifier:
  """Builds K-SEQ, which judges independent siblings by one threshold.

  Args:
    drafter: whose siblings are drawn independently.
    rho: the threshold, in [1, most children of a node]; None = the best one,
      at each node of each row. The law stays whatever it is.

  Raises:
    ValueError: if siblings are not drawn independently, or rho is out of
      range.
  """
  if any(law != IID for law in drafter.laws):
    raise ValueError(
      "K-SEQ needs siblings drawn independently (siblings=iid), and this "
      "drafter's are not: use the verifier 'token'"
    )
  # A path of `depth` nodes leaves so many for one node's children.
  most = drafter.num_nodes - drafter.depth
  if rho is not None and not 1 <= rho <= most:
    raise ValueError(f"rho must be in [1, {most}] for this tree, got {rho}")
  return Verifier(functools.partial(verify_k_seq, rho=rho))


def typical(
  drafter: Drafter, *, epsilon: float = 0.09, delta: float | None = None
) -> Verifier:
  """Builds Medusa's typical acceptance, which is lossy.

  Args:
    drafter: any.
    epsilon: in (0, 1]; a token this likely is always accepted.
    delta: above 0; how far below the law's typical probability a token may be.
      None = the square root of epsilon, as in the paper.

  Raises:
    ValueError: if one is out of range.
  """
  del drafter
  if not 0 < epsilon <= 1:
    raise ValueError(f"epsilon must be in (0, 1], got {epsilon}")
  if delta is None:
    delta = math.sqrt(epsilon)
  if not 0 < delta < math.inf:
    raise ValueError(f"delta must be above 0 and finite, got {delta}")
  return Verifier(
    functools.partial(verify_typical, epsilon=epsilon, delta=delta), lossy=True
  )


def lenience(drafter: Drafter, *, lenience: float = 0.5) -> Verifier:
  """Builds lenient acceptance of chains, which is lossy.

  Args:
    drafter: of chains drawn at random.
    lenience: in (0, 1]; no token gets more than 1 / lenience times its
      probability. 1 = the lossless rule.

  Raises:
    ValueError: if it is out of range, or the drafter makes trees or tokens that
      are certain.
  """
  _check_random_chain("lenience", drafter)
  if not 0 < lenience <= 1:
    raise ValueError(f"lenience must be in (0, 1], got {lenience}")
  return Verifier(
    functools.partial(verify_lenience, lenience=lenience), lossy=True
  )


VERIFIERS: dict[str, Callable[..., Verifier]] = {
  "token": token,
  "block": block,
  "k_seq": k_seq,
  "typical": typical,
  "lenience": lenience,
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


def check(name: str, settings: Mapping[str, Any]) -> None:
  """Checks a verifier's name, and names and types of its options.

  Raises:
    ValueError: for one that is unknown, or of another type.
  """
  options(name)  # refuses a name that there is not
  check_options(f"verifier {name!r}", settings, VERIFIERS[name])


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
  check(name, settings)
  return VERIFIERS[name](drafter, **settings)
