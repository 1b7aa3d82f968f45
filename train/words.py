"""Which of the target's tokens a head learns to say."""

from collections.abc import Sequence
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np

from spec_jax.base import Array
from spec_jax.heads import Words
from train.checks import at_least
from train.records import Example

__all__ = ["check_words", "choose_words"]


def check_words(draft: Any) -> None:
  """Checks `config.draft.words` and `words_by`.

  Raises:
    ValueError: naming the field.
  """
  at_least("draft", draft, ("words",), 0)
  if draft.words_by not in ("id", "count"):
    raise ValueError(
      f"draft.words_by must be id or count, got {draft.words_by!r}"
    )


def choose_words(
  draft: Any, vocab_size: int, learn: Sequence[Example]
) -> tuple[Words, Array | None]:
  """Chooses a draft's words.

  Args:
    draft: `config.draft`: `words`, how many (0, or no fewer than there are:
      all), and `words_by`: "id" for the first, which a byte-pair encoding made
      first, "count" for the most frequent answer tokens.
    vocab_size: `V` of the target.
    learn: examples whose answer tokens are counted.

  Returns:
    (Words, `[v]` int32 rising ids if they are mapped).

  Raises:
    ValueError: see `check_words`.
  """
  check_words(draft)
  size = draft.words
  if not 0 < size < vocab_size:
    return Words(vocab_size, vocab_size), None
  counts = np.zeros(vocab_size, np.int64)
  for example in learn:
    counts += np.bincount(example.ids[example.answer], minlength=vocab_size)
  # The most frequent; of equals the first.
  chosen = np.arange(size)
  if draft.words_by == "count":
    chosen = np.sort(np.argsort(-counts, kind="stable")[:size])
  if total := counts.sum():
    share = counts[chosen].sum() / total
    print(
      f"the draft's {size} words are {share:.1%} of the answers' tokens",
      file=sys.stderr,
    )
  if draft.words_by == "id":
    return Words(size, vocab_size, own_matrix=True), None
  words = Words(size, vocab_size, own_matrix=True, mapped=True)
  return words, jnp.asarray(chosen, jnp.int32)
