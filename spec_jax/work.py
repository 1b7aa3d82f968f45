"""From prompts and settings to jobs; no forward pass."""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import secrets
from typing import Any, NamedTuple

from spec_jax import text
from spec_jax.hub import Loaded
from spec_jax.requests import Job
from spec_jax.settings import Settings

# A prompt: text, token ids, or chat messages with "role" and "content".
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


class Work(NamedTuple):
  """Jobs and what decoding them back to text needs.

  Attributes:
    jobs: one a prompt and sample.
    origin: (prompt, sample) of each job.
    stop_strings: all stop strings of the run; bits of `Job.patterns`.
    token_bytes: bytes of each id, or None without a tokenizer.
    seed: the run's seed.
  """

  jobs: list[Job]
  origin: list[tuple[int, int]]
  stop_strings: tuple[str, ...]
  token_bytes: list[bytes] | None
  seed: int


def encode(tokenizer: Any, prompt: Prompt) -> tuple[int, ...]:
  """Returns the ids of a prompt: text, ids as they are, or chat messages.

  Raises:
    ValueError: if it is empty, no prompt, or there is no tokenizer for it.
  """
  if isinstance(prompt, Mapping):
    raise ValueError("a prompt of messages is a list of them, got one alone")
  if not isinstance(prompt, str) and len(prompt) == 0:
    raise ValueError("a prompt is empty")
  if not isinstance(prompt, str) and not isinstance(prompt[0], Mapping):
    return tuple(int(i) for i in prompt)  # type: ignore[arg-type]
  if tokenizer is None:
    raise ValueError("this model has no tokenizer: give prompts as token ids")
  if isinstance(prompt, str):
    return tuple(text.encode_prompt(tokenizer, prompt))
  return tuple(text.encode_chat(tokenizer, prompt))  # type: ignore[arg-type]


def _special_tokens(tokenizer: Any) -> set[str]:
  added = getattr(tokenizer, "added_tokens_decoder", {}).values()
  return {
    *tokenizer.all_special_tokens,
    *(str(token) for token in added if token.special),
  }


@functools.lru_cache(maxsize=4)
def _token_bytes_of(tokenizer: Any, vocab_size: int) -> list[bytes]:
  return text.token_bytes(tokenizer, vocab_size)


def plan(
  loaded: Loaded,
  prompts: Sequence[Prompt],
  settings: Settings | Sequence[Settings],
  seed: int | None,
) -> Work:
  """Checks settings and turns prompts into jobs; no forward pass.

  Raises:
    ValueError: for a setting out of range, an empty prompt, a token id outside
      the vocabulary, or stop strings without a tokenizer.
  """
  V = loaded.model.config.vocab_size
  if isinstance(settings, Settings):
    settings = [settings] * len(prompts)
  if len(settings) != len(prompts):
    raise ValueError(f"{len(settings)} settings for {len(prompts)} prompts")
  seed = secrets.randbits(32) if seed is None else seed
  if not 0 <= seed < 2**63:
    raise ValueError(f"seed must be in [0, 2**63), got {seed}")
  stop_strings = tuple(
    dict.fromkeys(x for s in settings for x in s.stop_strings)
  )
  if stop_strings and loaded.tokenizer is None:
    raise ValueError("stop strings need a tokenizer, this model has none")
  special = _special_tokens(loaded.tokenizer) if stop_strings else set()
  for string in stop_strings:
    if string in special:
      raise ValueError(
        f"stop string {string!r} is a special token, which no text shows: "
        f"use stop_ids with {loaded.tokenizer.convert_tokens_to_ids(string)}"
      )
  jobs, origin = [], []
  for number, (prompt, s) in enumerate(zip(prompts, settings, strict=True)):
    own = loaded.stop_ids if s.stop_ids is None else s.stop_ids
    dataclasses.replace(s, stop_ids=own).check(V)
    ids = encode(loaded.tokenizer, prompt)
    wrong = [i for i in ids if not 0 <= i < V]
    if wrong:
      raise ValueError(
        f"prompt {number} holds id {wrong[0]}, the vocabulary has {V} ids"
      )
    bits = sum(1 << stop_strings.index(x) for x in set(s.stop_strings))
    for sample in range(s.num_samples):
      seeds = (seed, number) if s.seed is None else (s.seed,)
      jobs.append(Job(ids, s, (*seeds, sample), tuple(own), bits))
      origin.append((number, sample))
  table = None
  if loaded.tokenizer is not None:
    table = _token_bytes_of(loaded.tokenizer, V)
  return Work(jobs, origin, stop_strings, table, seed)
