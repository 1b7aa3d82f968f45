"""Every drafter of the package with the options it is tested with."""

import atexit
import functools
from pathlib import Path
import tempfile
from typing import NamedTuple

import numpy as np

from spec_jax import corpus, drafters
from spec_jax.base import DETERMINISTIC
from tests import fakes, two_vocabularies


class Case(NamedTuple):
  """A drafter with options, and how to build it on any target."""

  name: str
  options: dict

  def build(self, model, draft, slots: int):
    """Builds the drafter for a target and a draft model."""
    vocab = model.config.vocab_size
    options = {
      k: v(vocab) if callable(v) else v for k, v in self.options.items()
    }
    return drafters.build(self.name, model, draft, slots=slots, **options)

  @property
  def deterministic(self) -> bool:
    """Whether no token is drawn at random, in rows that sample too."""
    model, _ = fakes.tiny()
    return self.build(model, model, 64).laws == (DETERMINISTIC,)


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
  "lookahead": {
    "": {"pool": 64},
    "wide": {"window": 3, "ngram": 4, "guesses": 2, "pool": 5},
    "own": {"ngram": 4, "pool": 64, "prompt_as_reference": False},
  },
  "ngram": {
    "bigram": {"order": 2, "num_draft": 2, "corpus": index_file},
    "trigram": {"corpus": index_file},
  },
  "recycling": {"": {}, "tree": {"tree": (3, 2), "persistent": False}},
  "suffix": {
    "": {},
    "corpus": {"num_draft": 5, "corpus": index_file},
    "tree": {"num_draft": 3, "num_nodes": 6, "corpus": index_file},
  },
  "vanilla": {
    "": {},
    "tree_iid": {"tree": (2, 2, 1)},
    "tree_wor": {"tree": (3, 1), "siblings": "without_replacement"},
    "tree_top_k": {"tree": (2, 1, 1), "siblings": "top_k"},
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
  return found


def rig_of(case: Case, target, draft, *, slots: int = 64, **kwargs):
  """Builds the rig of a case: `target` and `draft` are (model, params)."""
  drafter = case.build(target[0], draft[0], slots)
  return fakes.Rig(target, drafter, draft=draft, slots=slots, **kwargs)
