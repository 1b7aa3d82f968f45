"""What a user asks of one prompt, checked before any forward pass."""

from collections.abc import Sequence
import dataclasses
import math
import operator
from typing import Any

import jax.numpy as jnp
import numpy as np

from spec_jax.base import Sampling


@dataclasses.dataclass(frozen=True)
class Settings:
  """Sampling settings, stops and limits of one prompt.

  Attributes:
    temperature: 0 decodes greedily.
    top_k: keep the k most probable tokens (and ties at the k-th); 0 = off.
    top_p: keep the most probable tokens that reach this mass; 1 = off.
    min_p: keep tokens at least this fraction of the largest; 0 = off.
    repetition_penalty: divides positive and multiplies negative logits of
      tokens that occur in prompt or output; 1 = off.
    presence_penalty: taken off logits of tokens that occur in the output.
    frequency_penalty: the same, times the occurrences.
    logit_bias: token id -> added to its logit.
    banned_tokens: ids that are never emitted.
    min_new_tokens: stop ids are banned, and stop strings do not count, before
      so many tokens.
    max_new_tokens: output tokens at most.
    stop_ids: token ids that end the text (and are kept in `ids`); None = the
      model's own.
    stop_strings: the text ends where one of them begins; `ids` keep the tokens
      up to the one that completes it.
    seed: of this prompt's random key; None = from the run's seed and the
      prompt's number.
    num_samples: independent samples of this prompt.
  """

  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  repetition_penalty: float = 1.0
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0
  logit_bias: tuple[tuple[int, float], ...] = ()
  banned_tokens: tuple[int, ...] = ()
  min_new_tokens: int = 0
  max_new_tokens: int = 128
  stop_ids: tuple[int, ...] | None = None
  stop_strings: tuple[str, ...] = ()
  seed: int | None = None
  num_samples: int = 1

  def __post_init__(self):
    bias = self.logit_bias
    pairs = bias.items() if isinstance(bias, dict) else bias
    try:
      added = tuple((_id(i), float(b)) for i, b in pairs)
    except (TypeError, ValueError) as error:
      raise ValueError(
        f"logit_bias holds pairs of a token id and a number, got {bias!r}"
      ) from error
    fixed = {
      "logit_bias": added,
      "banned_tokens": tuple(map(_id, self.banned_tokens)),
      "stop_strings": (self.stop_strings,)
      if isinstance(self.stop_strings, str)
      else tuple(self.stop_strings),
    }
    if self.stop_ids is not None:
      fixed["stop_ids"] = tuple(map(_id, self.stop_ids))
    for name, value in fixed.items():
      object.__setattr__(self, name, value)

  def check(self, vocab_size: int) -> None:
    """Checks every value.

    Raises:
      ValueError: naming the setting, its value and its range.
    """
    ranges = {
      # Beyond 1e30 a device's 1 / temperature is 0, and 0 x -inf no number.
      "temperature": (0.0, 1e30),
      "min_p": (0.0, 1.0),
      "presence_penalty": (-math.inf, math.inf),
      "frequency_penalty": (-math.inf, math.inf),
    }
    for name, (low, high) in ranges.items():
      value = getattr(self, name)
      if not _finite(value):
        raise ValueError(f"{name} must be a float32, got {value}")
      if not low <= value <= high:
        raise ValueError(f"{name} must be in [{low}, {high}], got {value}")
    if not 0 < np.float32(self.top_p) <= 1:
      raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
    penalty = self.repetition_penalty
    if not (_finite(penalty) and np.float32(penalty) > _TINY):
      raise ValueError(f"repetition_penalty must be above 0, got {penalty}")
    for name, low in (
      ("top_k", 0),
      ("min_new_tokens", 0),
      ("max_new_tokens", 1),
      ("num_samples", 1),
    ):
      value = getattr(self, name)
      if isinstance(value, bool) or value != int(value) or value < low:
        raise ValueError(f"{name} must be an integer >= {low}, got {value}")
      if value >= 2**31:
        raise ValueError(f"{name} must be below 2**31, got {value}")
    if self.num_samples > _MOST_SAMPLES:
      raise ValueError(
        f"num_samples must be at most {_MOST_SAMPLES}, got {self.num_samples}"
      )
    if self.min_new_tokens > self.max_new_tokens:
      raise ValueError(
        f"min_new_tokens {self.min_new_tokens} is above max_new_tokens "
        f"{self.max_new_tokens}"
      )
    if self.seed is not None and not 0 <= self.seed < 2**63:
      raise ValueError(f"seed must be in [0, 2**63), got {self.seed}")
    for name, ids in (
      ("logit_bias", [i for i, _ in self.logit_bias]),
      ("banned_tokens", self.banned_tokens),
      ("stop_ids", self.stop_ids or ()),
    ):
      wrong = [i for i in ids if not 0 <= i < vocab_size]
      if wrong and wrong[0] < 0:
        raise ValueError(f"{name} holds id {wrong[0]}, which no vocabulary has")
      if wrong:
        raise ValueError(
          f"{name} holds id {wrong[0]}, the vocabulary has {vocab_size} ids"
        )
    if any(not _finite(b) and b != -math.inf for _, b in self.logit_bias):
      raise ValueError("logit_bias must be a float32 or -inf")
    banned = set(self.banned_tokens)
    banned |= {i for i, b in self.logit_bias if b == -math.inf}
    if len(banned) >= vocab_size:
      raise ValueError(f"all {vocab_size} tokens are banned")
    if self.min_new_tokens and len(banned | set(self.stop_ids or ())) >= (
      vocab_size
    ):
      raise ValueError(
        f"all {vocab_size} tokens are banned, or stop ids before min_new_tokens"
      )
    for string in self.stop_strings:
      if not isinstance(string, str) or not string:
        raise ValueError(f"a stop string is text, not empty; got {string!r}")


# Of a prompt: each is a job that is planned beforehand.
_MOST_SAMPLES = 1_000_000
# Smaller float32 numbers count as 0 on most devices.
_TINY = np.finfo(np.float32).tiny


def _id(token: Any) -> int:
  """Returns a token id as an integer; ValueError if it is none."""
  try:
    return operator.index(token)
  except TypeError:
    raise ValueError(f"token ids are integers, got {token!r}") from None


def _finite(value: float) -> bool:
  """Tells whether a number is finite as float32, which devices compute in."""
  with np.errstate(over="ignore"):
    return bool(np.isfinite(np.float32(value)))


# The settings that are one array a row, and the value that turns each off.
_OFF = {
  "temperature": (0.0, jnp.float32),
  "top_k": (0, jnp.int32),
  "top_p": (1.0, jnp.float32),
  "min_p": (0.0, jnp.float32),
  "repetition_penalty": (1.0, jnp.float32),
  "presence_penalty": (0.0, jnp.float32),
  "frequency_penalty": (0.0, jnp.float32),
  "min_new_tokens": (0, jnp.int32),
}


def in_use(settings: Sequence[Settings]) -> frozenset[str]:
  """Returns the names of `Sampling` fields that any of the settings needs.

  What is not in use is compiled out; what is in use is an array, so values
  change without a compile.
  """
  names = {
    name
    for name, (off, _) in _OFF.items()
    if any(getattr(s, name) != off for s in settings)
  }
  if any(s.logit_bias or s.banned_tokens for s in settings):
    names.add("bias")
  return frozenset(names)


def to_arrays(
  settings: Sequence[Settings], use: frozenset[str], vocab_size: int
) -> Sampling:
  """Returns the settings of `B` rows as arrays; fields not in use are None."""
  fields = {
    name: jnp.asarray([getattr(s, name) for s in settings], dtype)
    for name, (_, dtype) in _OFF.items()
    if name in use
  }
  if "bias" in use:
    bias = np.zeros((len(settings), vocab_size), np.float32)
    for row, s in enumerate(settings):
      for token, value in s.logit_bias:
        bias[row, token] = value
      bias[row, list(s.banned_tokens)] = -np.inf
    fields["bias"] = jnp.asarray(bias)
  return Sampling(**fields)
