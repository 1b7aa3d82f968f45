"""Every drafter, verifier and policy with the options it is tested with."""

import atexit
import functools
from pathlib import Path
import tempfile
from typing import NamedTuple

import numpy as np

from spec_jax import corpus, drafters, length, verifiers
from spec_jax.base import DETERMINISTIC
from spec_jax.levels import Levels
from tests import fakes, two_vocabularies


class Case(NamedTuple):
  """A drafter with options, and how to build it on any target.

  Attributes:
    name: of the drafter.
    options: its options; one may be a function of the vocabulary's size.
    verifier: a verifier's name.
    policy: a length policy's name.
  """

  name: str
  options: dict
  verifier: str = "token"
  policy: str = "fixed"

  def build(self, model, draft, slots: int):
    """Builds the drafter for a target and a draft model."""
    vocab = model.config.vocab_size
    options = {
      k: v(vocab) if callable(v) else v for k, v in self.options.items()
    }
    return drafters.build(self.name, model, draft, slots=slots, **options)

  def draft_for(self, target, draft):
    """Returns the (model, params) it asks: a draft like `draft`, or heads."""
    kind = drafters.takes_heads(self.name, self.options)
    return fakes.heads_of(kind, target) if kind else draft

  def on_tiny(self):
    """Builds the drafter on the tiny decoder."""
    target = fakes.tiny()
    return self.build(target[0], self.draft_for(target, target)[0], 64)

  @property
  def deterministic(self) -> bool:
    """Whether texts are plain decoding's in rows that sample too."""
    drafter = self.on_tiny()
    lossy = verifiers.build(self.verifier, drafter).lossy
    return drafter.laws == (DETERMINISTIC,) and not lossy


@functools.cache
def index_file(vocab: int) -> str:
  """Writes a small corpus index of a vocabulary; returns its path.

  A token is often followed by itself or by the third above it, as in
  the texts of `fakes.tiny(13)`: a draft from it is right now and then.
  """
  folder = Path(_temporary_folder())
  rng = np.random.default_rng(vocab)
  texts = []
  for _ in range(40):
    text = [int(rng.integers(vocab))]
    for _ in range(60):
      jump = rng.choice([3, 0, rng.integers(vocab)], p=[0.4, 0.3, 0.3])
      text.append(int(text[-1] + jump) % vocab)
    texts.append(text)
  path = folder / f"{vocab}.npz"
  corpus.save(corpus.build(texts, tokenizer="x", vocab_size=vocab), path)
  return str(path)


@functools.cache
def _temporary_folder() -> str:
  """A folder that lives as long as the process."""
  folder = tempfile.TemporaryDirectory(prefix="spec_jax")
  atexit.register(folder.cleanup)
  return folder.name


# Options by drafter and label; a drafter that is not named here is tested with
# its defaults. An option may be a function of the vocabulary's size.
_VARIANTS: dict[str, dict[str, dict]] = {
  "best_first": {"": {"num_nodes": 8, "depth": 3, "width": 3}},
  "cascade": {"": {"inner": "prompt_lookup(num_draft=2)", "num_draft": 3}},
  "first_of": {
    "": {
      "first": "prompt_lookup(num_draft=2, min_ngram=2)",
      "second": "vanilla(num_draft=3)",
    },
  },
  "merge": {
    "mixed": {
      "first": "prompt_lookup(num_draft=2)",
      "second": "vanilla(tree=(2, 1), siblings='without_replacement')",
    },
    "eagle": {
      "first": "prompt_lookup(num_draft=4)",
      "second": "eagle(num_nodes=6, depth=2, width=3)",
    },
  },
  "lookahead": {
    "": {"window": 3, "ngram": 4, "guesses": 2, "pool": 16},
  },
  "ngram": {
    "": {"num_draft": 2, "corpus": index_file},
  },
  "medusa": {"": {"tree": (3, 2, 1)}},
  "eagle": {
    "": {"num_nodes": 8, "depth": 3, "width": 3},
    "chain": {"num_draft": 3},
  },
  "suffix": {
    "": {"num_draft": 3, "num_nodes": 6, "corpus": index_file},
  },
  "vanilla": {
    "": {},
    "tree_iid": {"tree": (2, 2, 1)},
    "tree_wor": {"tree": (3, 1), "siblings": "without_replacement"},
  },
  "tli": {"mapped": {"vocabulary_map": two_vocabularies.close}},
  "slem": {"mapped": {"vocabulary_map": two_vocabularies.close}},
}


def cases() -> dict[str, Case]:
  """Returns every drafter of the package, with its options to be tested."""
  found = {}
  for name in drafters.names():
    for label, options in _VARIANTS.get(name, {"": {}}).items():
      found[f"{name}-{label}" if label else name] = Case(name, options)
  return {**found, **_judged(found), **_bounded(found)}


def _judged(found: dict[str, Case]) -> dict[str, Case]:
  """Returns every other verifier on a drafter it takes, on a tree if it can."""
  built = {key: case.on_tiny() for key, case in found.items()}
  is_chain = lambda key: built[key].num_nodes == built[key].depth + 1
  cases = {}
  for verifier in [v for v in verifiers.VERIFIERS if v != "token"]:
    for key in sorted(built, key=is_chain):
      try:
        verifiers.build(verifier, built[key])
      except ValueError:
        continue
      if built[key].depth:
        cases[f"{key}+{verifier}"] = found[key]._replace(verifier=verifier)
        break
    else:
      raise AssertionError(f"no drafter goes with verifier {verifier!r}")
  return cases


def _bounded(found: dict[str, Case]) -> dict[str, Case]:
  """Returns every other policy: on copies, or on a chain if it asks for laws.

  What a policy has learnt moves where a random draft begins, and so the text
  of a row, if not its law.
  """
  cases = {}
  for policy in length.POLICIES:
    asks = length.build(policy, Levels((1,))).extend is not None
    key = "vanilla" if asks else "prompt_lookup"
    if policy not in ("fixed", "entropy"):  # entropy asks as confidence does
      cases[f"{key}+{policy}"] = found[key]._replace(policy=policy)
  return cases


def rig_of(case: Case, target, draft, *, slots: int = 64, **kwargs):
  """Builds the rig of a case: `target` and `draft` are (model, params)."""
  draft = case.draft_for(target, draft)
  drafter = case.build(target[0], draft[0], slots)
  verifier = verifiers.build(case.verifier, drafter)
  return fakes.Rig(
    target,
    drafter,
    draft=draft,
    slots=slots,
    verifier=verifier.verify,
    lossy=verifier.lossy,
    policy=length.build(case.policy, Levels.of(drafter)),
    **kwargs,
  )
