"""Jobs: what rows are asked to do, and the arrays that ask for it."""

from collections.abc import Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import rows as rows_lib
from spec_jax.base import Model, Stops
from spec_jax.settings import Settings, in_use, to_arrays

# Sizes of the cache and token buffer: few, so that few programs exist.
_SLOT_SIZES = tuple(256 << i for i in range(13))


def slots_for(num_tokens: int) -> int:
  """Returns the smallest cache size that holds `num_tokens`."""
  for size in _SLOT_SIZES:
    if size >= num_tokens:
      return size
  raise ValueError(
    f"{num_tokens} tokens a row; the largest cache has {_SLOT_SIZES[-1]}"
  )


class Job(NamedTuple):
  """One row's work.

  Attributes:
    ids: prompt tokens.
    settings: checked settings.
    seeds: an integer seed, then integers folded into its key.
    stop_ids: ids that end the text.
    patterns: bits of the stop strings that count (see `stops`).
  """

  ids: Sequence[int]
  settings: Settings
  seeds: tuple[int, ...]
  stop_ids: tuple[int, ...] = ()
  patterns: int = 0


def make_request(
  jobs: Sequence[Job], config, model: Model, rows: int
) -> rows_lib.Request:
  """Returns the jobs as arrays of `rows` rows; the last job fills up."""
  blank = Job((0,), Settings(), (0,))
  padded = list(jobs) + [jobs[-1] if jobs else blank] * (rows - len(jobs))
  S = config.slots
  tokens = np.zeros((rows, S), np.int32)
  stop_ids = np.full((rows, config.num_stop_ids), -1, np.int32)
  lengths = np.array([len(j.ids) for j in padded], np.int32)
  for row, job in enumerate(padded):
    tokens[row, : len(job.ids)] = job.ids
    stop_ids[row, : len(job.stop_ids)] = job.stop_ids
  settings = [j.settings for j in padded]
  new = np.array([s.max_new_tokens for s in settings], np.int64)
  limit = np.minimum(lengths + new, min(S, model.config.max_length))
  stops = Stops(ids=jnp.asarray(stop_ids))
  if config.stop_strings:
    first = np.array([s.min_new_tokens for s in settings], np.int32)
    stops = dataclasses.replace(
      stops,
      state=jnp.zeros((rows,), jnp.int32),
      patterns=jnp.asarray([j.patterns for j in padded], jnp.uint32),
      first=jnp.asarray(first),
    )
  return rows_lib.Request(
    tokens=jnp.asarray(tokens),
    length=jnp.asarray(lengths),
    limit=jnp.asarray(limit, jnp.int32),
    sampling=to_arrays(settings, config.use, model.config.vocab_size),
    stops=stops,
    keys=_keys([j.seeds for j in padded]),
  )


def _keys(seeds: Sequence[tuple[int, ...]]):
  """Returns `[B]` keys: `key(seed)` with the other integers folded in."""

  def one(seed, *folds):
    key = jax.random.key(seed & 0xFFFFFFFF)
    for fold in (seed >> 32, *folds):
      key = jax.random.fold_in(key, fold)
    return key

  return jnp.stack([one(*s) for s in seeds])


def check_job(job: Job, config: Any, max_length: int) -> None:
  """Checks that a job fits an engine.

  Args:
    job: what to run.
    config: the engine's `EngineConfig`.
    max_length: the model's context.

  Raises:
    ValueError: if the prompt is empty or does not fit the context, or a
      setting is one that the engine was not made for.
  """
  more = in_use([job.settings]) - config.use
  if more:
    raise ValueError(
      f"this engine was made without {', '.join(sorted(more))}: name all "
      f"settings in EngineConfig.use"
    )
  if job.patterns and not config.stop_strings:
    raise ValueError("this engine was made without stop strings")
  room = min(config.slots, max_length)
  if not 0 < len(job.ids) < room:
    raise ValueError(
      f"a prompt of {len(job.ids)} tokens does not fit a context of {room} "
      f"(one token at least, and room for one more)"
    )
  if len(job.ids) + job.settings.min_new_tokens > room:
    raise ValueError(
      f"{len(job.ids)} prompt tokens and min_new_tokens "
      f"{job.settings.min_new_tokens} do not fit a context of {room}"
    )
  if len(job.stop_ids) > config.num_stop_ids:
    raise ValueError(
      f"{len(job.stop_ids)} stop ids, room for {config.num_stop_ids}"
    )
