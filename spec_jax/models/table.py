"""A model that is a table: logits by position and last token, for tests.

Its joint law is known in closed form, and a script of tokens is a table.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.base import Block, Cache, Model, Output

MODEL_TYPES = ()


class TableConfig(NamedTuple):
  """Architecture of a table: logits `table[position % period, token]`."""

  vocab_size: int
  period: int = 1
  max_length: int = 1 << 20


def build(config: TableConfig) -> Model:
  """Builds the model; its params are `{"table": [period, V, V] float32}`."""

  def init(key):
    shape = (config.period, config.vocab_size, config.vocab_size)
    return {"table": jax.random.normal(key, shape) * 2}

  def init_cache(batch, slots):
    del slots
    return Cache((), (), jnp.zeros((batch,), jnp.int32))

  def apply(
    params,
    tokens_BT,
    positions_BT,
    cache,
    block,
    visible_BTN,
    *,
    start=0,
    logits_at=None,
    segment_ids=None,
  ):
    del cache, visible_BTN, segment_ids
    if block is not None:
      positions = jax.lax.dynamic_update_slice_in_dim(
        block.positions, positions_BT, start, 1
      )
      block = Block((), (), positions)
    tokens = jnp.clip(tokens_BT, 0, config.vocab_size - 1)
    rows = positions_BT % config.period
    hidden = jax.nn.one_hot(tokens, config.vocab_size)[:, :, None]
    if logits_at is not None:
      tokens = jnp.take_along_axis(tokens, logits_at, 1)
      rows = jnp.take_along_axis(rows, logits_at, 1)
    return Output(params["table"][rows, tokens], hidden, block)

  return Model(
    init=init,
    axes=lambda: {"table": (None, None, None)},
    init_cache=init_cache,
    apply=apply,
    embed=lambda params, tokens: jax.nn.one_hot(tokens, config.vocab_size),
    unembed=lambda params, hidden: hidden @ params["table"][0],
    config=config,
  )


def script(tokens, vocab_size: int, *, sharpness: float = 30.0) -> np.ndarray:
  """Returns a table that emits `tokens[p]` at position `p`, in a cycle.

  Args:
    tokens: the text, indexed by position from 0.
    vocab_size: `V`.
    sharpness: logit of the scripted token; the others have 0.

  Returns:
    `[len(tokens), V, V]` float32.
  """
  period = len(tokens)
  table = np.zeros((period, vocab_size, vocab_size), np.float32)
  for position in range(period):
    table[position, :, tokens[(position + 1) % period]] = sharpness
  return table
