"""Finds stop strings on the device.

A stop string may begin in one token and end in another, in this block or one
before, or lie inside a token. So an Aho-Corasick automaton over bytes is
lifted to tokens: a table says, for each state and token, in which state the
token's bytes leave the automaton and which stop strings were completed on the
way. `advance` walks it along the tokens of a step; the state of a row goes to
`SpecState.stops.state`, and matches across blocks need nothing else.

The automaton goes on after a match, so a row in which that stop string does
not count is unaffected by it. State 0 is the start: nothing seen.

Reference: Aho and Corasick 1975, "Efficient string matching".
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import lax
import jax.numpy as jnp
import numpy as np

from spec_jax.base import Array
from spec_jax.text import stop_bytes

__all__ = ["Automaton", "advance", "build_automaton"]

_MAX_PATTERNS = 32  # Bits of `Stops.patterns`.
_MAX_TABLE_BYTES = 256 * 2**20  # Near 220 bytes of stop strings at V = 152064.


class Automaton(NamedTuple):
  """Stop strings as a table over tokens; pass it to `jit` as an argument.

  Attributes:
    next: `[n_states, V]` int32, the state after the token's bytes.
    match: `[n_states, V]` uint32, bit `i` set: stop string `i` is completed
      while the token's bytes are read.
  """

  next: Any
  match: Any


def build_automaton(
  stop_strings: Sequence[str | bytes], token_bytes: Sequence[bytes]
) -> Automaton:
  """Builds the table of some stop strings for a vocabulary.

  With stop string "bc" and tokens "ab", "c": state 1 is "b" seen, and
  `next[0] = [1, 0]`, `match[0] = [0, 0]`, `match[1] = [0, 1]`.

  Args:
    stop_strings: at most 32 strings or bytes, none empty; bit `i` is the
      `i`-th.
    token_bytes: `V` entries, from `text.token_bytes`; tokens of no bytes leave
      the state as it is.

  Returns:
    Automaton of numpy arrays. States are at most the bytes of all stop strings
    and one.

  Raises:
    ValueError: if a stop string is empty, there are more than 32, or the table
      would exceed 256 MiB.
  """
  patterns = stop_bytes(stop_strings)
  if len(patterns) > _MAX_PATTERNS:
    raise ValueError(
      f"at most {_MAX_PATTERNS} stop strings fit one automaton, got "
      f"{len(patterns)}"
    )
  step, output = _byte_automaton(patterns)
  num_states, num_tokens = len(step), len(token_bytes)
  num_bytes = num_states * num_tokens * 8  # int32 and uint32.
  if num_bytes > _MAX_TABLE_BYTES:
    raise ValueError(
      f"the stop strings' table would take {num_bytes / 2**20:.0f} MiB "
      f"({num_states} states, {num_tokens} tokens), more than "
      f"{_MAX_TABLE_BYTES // 2**20} MiB: use fewer or shorter stop strings"
    )

  # Longest tokens first, so that the tokens with a p-th byte are the first
  # `counts[p]` and position p of all of them is one gather.
  lengths = np.array([len(piece) for piece in token_bytes], np.int64)
  order = np.argsort(-lengths, kind="stable")
  offsets = (np.cumsum(lengths) - lengths)[order]
  flat = np.frombuffer(b"".join(token_bytes), np.uint8)
  longest = int(lengths.max(initial=0))
  counts = np.searchsorted(-lengths[order], -np.arange(longest), "left")
  columns = [flat[offsets[:n] + p] for p, n in enumerate(counts)]

  next_ = np.empty((num_states, num_tokens), np.int32)
  match = np.empty((num_states, num_tokens), np.uint32)
  for state in range(num_states):
    at = np.full(num_tokens, state, np.int32)
    found = np.zeros(num_tokens, np.uint32)
    for n, column in zip(counts, columns, strict=True):
      at[:n] = step[at[:n], column]
      found[:n] |= output[at[:n]]
    next_[state, order] = at
    match[state, order] = found
  return Automaton(next_, match)


def _byte_automaton(
  patterns: Sequence[bytes],
) -> tuple[np.ndarray, np.ndarray]:
  """Builds the automaton over bytes.

  Args:
    patterns: none empty.

  Returns:
    `[n_states, 256]` int32 next states, and `[n_states]` uint32 bits of the
    patterns that end in each state.
  """
  children: list[dict[int, int]] = [{}]
  output = [0]
  for bit, pattern in enumerate(patterns):
    state = 0
    for byte in pattern:
      if byte not in children[state]:
        children[state][byte] = len(children)
        children.append({})
        output.append(0)
      state = children[state][byte]
    output[state] |= 1 << bit

  # Breadth first: the state of a longest proper end is complete before it is
  # copied from. Bytes without a child go where they go from there.
  step = np.zeros((len(children), 256), np.int32)
  shorter = [0] * len(children)
  queue = deque([0])
  while queue:
    state = queue.popleft()
    if state:
      step[state] = step[shorter[state]]
      output[state] |= output[shorter[state]]
    for byte, child in children[state].items():
      shorter[child] = int(step[state, byte]) if state else 0
      step[state, byte] = child
      queue.append(child)
  return step, np.array(output, np.uint32)


def advance(
  automaton: Automaton,
  state_B: Array,
  tokens_BJ: Array,
  patterns_B: Array,
  first_B: Array,
  num_output_B: Array,
) -> tuple[Array, Array]:
  """Walks the automaton along the tokens of one step.

  Token `j` is output token number `num_output + j + 1`. It is a hit if a stop
  string that counts in the row is completed in it and that number is at least
  `first`. The row's text ends with its first hit; the state to keep is the one
  after the last token committed.

  Args:
    automaton: from `build_automaton`; `V` tokens.
    state_B: `[B]` int32, states before the tokens.
    tokens_BJ: `[B, J]` int32; those outside `[0, V)` (-1 after the end, ids
      that only the model has) leave the state as it is and are no hit.
    patterns_B: `[B]` uint32, bit `i` set: stop string `i` counts in the row.
    first_B: `[B]` int32, output tokens that must come before or with a hit.
    num_output_B: `[B]` int32, output tokens before these.

  Returns:
    `[B, J]` int32 states after each token, and `[B, J]` bool hits.
  """
  next_ = jnp.asarray(automaton.next)
  match = jnp.asarray(automaton.match)
  num_tokens = next_.shape[1]

  def read(state_B, token_B):
    real_B = (token_B >= 0) & (token_B < num_tokens)
    token_B = jnp.where(real_B, token_B, 0)
    found_B = jnp.where(real_B, match[state_B, token_B], jnp.uint32(0))
    state_B = jnp.where(real_B, next_[state_B, token_B], state_B)
    return state_B, (state_B, found_B)

  _, (states_JB, found_JB) = lax.scan(read, state_B, tokens_BJ.T)
  number_BJ = num_output_B[:, None] + 1 + jnp.arange(tokens_BJ.shape[1])[None]
  hit_BJ = (found_JB.T & patterns_B[:, None]) != 0
  return states_JB.T, hit_BJ & (number_BJ >= first_B[:, None])
