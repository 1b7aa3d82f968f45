"""Lookahead decoding: the target drafts for itself by Jacobi iteration.

One pass reads two things besides the root. The *verification branch*: up to
`G` n-grams of the row's pool that begin with the last token. The *lookahead
branch*: a window of `N - 1` levels by `W` columns, whose column `j` holds
guesses for the positions from `j` after the root on, each level computed from
the one above a step before. What the target says after the last level makes
`W` new n-grams, which go into the pool; the window then moves by one token: the
first level is dropped and what the target said becomes the last. Until all
levels are there it grows by one a step.

As a tree the window is a comb: level 0 is a chain from the root, and level `l`
of a column hangs under level `l - 1` of it. Its nodes are read and never
accepted. Window and pool belong to the prompt.

The window moves by one token however many were accepted, as the published code
does by default: its guesses then lag, but stay different from each other.
While it grows, the last column is repeated; the published code begins wider.

Reference: Fu et al. 2024 (lookahead decoding), algorithm 2.
"""

from typing import NamedTuple

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from spec_jax import tree as trees
from spec_jax.base import DETERMINISTIC, Array, Context, Draft, Drafter, Model
from spec_jax.drafting import root_token
from spec_jax.nodes import take_nodes
from spec_jax.sampling import first_largest

# Spreads the first guesses over the text: 2^16 over the golden ratio.
_SPREAD = 40503
# The pool is compared with every new n-gram in each step.
_MAX_POOL = 1 << 16


@flax.struct.dataclass
class Window:
  """The lookahead branch.

  Attributes:
    tokens: `[B, N - 1, W]` int32, level by column; column 0 of level 0 is the
      root's place.
    filled: `[B]` int32, levels that hold something; 0 for a new prompt.
  """

  tokens: Array
  filled: Array


@flax.struct.dataclass
class Pool:
  """The newest n-grams of a row, each once.

  Attributes:
    ngrams: `[B, P, N]` int32, -1 = empty.
    head: `[B]` int32, the entry to be written next, which is the oldest.
  """

  ngrams: Array
  head: Array


class Layout(NamedTuple):
  """Where the nodes lie: root, guesses, window; numpy arrays.

  Attributes:
    num_nodes: `(W + G) (N - 1)`, root included.
    guess: `[G, N - 1]` node of a guess's token.
    window: `[N - 1, W]` node of a window's token; the root at (0, 0).
    parents: `[nodes]`, of the window's nodes; of a guess's as if no two
      guesses began alike.
    depths: `[nodes]`.
    visible: `[nodes, nodes]`, likewise.
    level: `[nodes]` level of the window's nodes, -1 for the others.
  """

  num_nodes: int
  guess: np.ndarray
  window: np.ndarray
  parents: np.ndarray
  depths: np.ndarray
  visible: np.ndarray
  level: np.ndarray


def layout(window: int, ngram: int, guesses: int) -> Layout:
  """Lays out a pass: the root, the guesses, then the window."""
  W, K, G = window, ngram - 1, guesses
  guess = 1 + np.arange(G * K).reshape(G, K)
  comb = G * K + np.arange(K * W).reshape(K, W)
  comb[0, 0] = 0
  N = (W + G) * K
  parents = np.full(N, -1, np.int32)
  level = np.full(N, -1, np.int32)
  parents[guess] = np.concatenate([np.zeros((G, 1), int), guess[:, :-1]], 1)
  parents[comb[1:]] = comb[:-1]
  parents[comb[0, 1:]] = comb[0, :-1]
  level[comb] = np.arange(K)[:, None]
  parents[0] = level[0] = -1
  depths = np.zeros(N, np.int32)
  visible = np.eye(N, dtype=bool)
  for i in range(1, N):
    depths[i] = depths[parents[i]] + 1
    visible[i] |= visible[parents[i]]
  return Layout(N, guess, comb, parents, depths, visible, level)


def collect(window: Window, said_BW: Array) -> Array:
  """Returns `[B, W, N]`, the n-grams that end in what the target said."""
  levels = jnp.concatenate([window.tokens, said_BW[:, None]], 1)
  return jnp.swapaxes(levels, 1, 2)


def advance(window: Window, said_BW: Array, num: int = 1) -> Window:
  """Moves the window `num` tokens on, with what the target said at its end.

  A full window drops level 0 and is then `num - 1` columns further left; one
  that is not full gets one more level and moves `num` columns. Columns with
  nothing to the right (left) repeat the last (first).

  With `num = 0` nothing was committed: a Jacobi iteration, in which a token
  moves to the column of the position it is a guess for.

  Args:
    window: as it was read; the root at level 0, column 0.
    said_BW: `[B, W]` the target's tokens after its last filled level.
    num: 0 or 1.
  """
  tokens, filled = window.tokens, window.filled
  K, W = tokens.shape[1:]
  full = (filled >= K)[:, None, None]
  here = jnp.arange(K)[None, :, None] == filled[:, None, None]
  grown = jnp.where(here, said_BW[:, None], tokens)
  moved = jnp.concatenate([tokens[:, 1:], said_BW[:, None]], 1)
  columns = np.arange(W)
  grown = grown[:, :, np.clip(columns + num, 0, W - 1)]
  moved = moved[:, :, np.clip(columns + num - 1, 0, W - 1)]
  return Window(
    tokens=jnp.where(full, moved, grown), filled=jnp.minimum(filled + 1, K)
  )


def insert(pool: Pool, new_BMN: Array, valid_BM: Array) -> Pool:
  """Adds n-grams, the last one newest; one that was there already moves up.

  The oldest make room. While the pool is large enough, each first token so has
  a list with the most recently seen n-gram in front, as in the published code.

  Args:
    pool: the pool.
    new_BMN: `[B, M, N]` n-grams.
    valid_BM: `[B, M]` bool, which of them to add.
  """
  P, M = pool.ngrams.shape[1], new_BMN.shape[1]
  rows = jnp.arange(new_BMN.shape[0])[:, None]
  later = np.triu(np.ones((1, M, M), bool), 1)
  twice = (new_BMN[:, :, None] == new_BMN[:, None]).all(-1)
  valid = valid_BM & ~(twice & later & valid_BM[:, None]).any(-1)
  known = (pool.ngrams[:, :, None] == new_BMN[:, None]).all(-1)
  old = jnp.where((known & valid[:, None]).any(-1)[..., None], -1, pool.ngrams)
  rank, total = jnp.cumsum(valid, -1) - 1, valid.sum(-1)
  fits = valid & (rank >= total[:, None] - P)  # of too many the last
  index = jnp.where(fits, (pool.head[:, None] + rank) % P, P)
  return Pool(
    ngrams=old.at[rows, index].set(new_BMN, mode="drop"),
    head=(pool.head + total) % P,
  )


def find(pool: Pool, first_B: Array, num: int) -> tuple[Array, Array]:
  """Finds the newest n-grams that begin with a token.

  Args:
    pool: the pool.
    first_B: the token.
    num: n-grams wanted, `G`.

  Returns:
    (`[B, G, N - 1]` what follows it, newest first, `[B, G]` bool found).
  """
  P = pool.ngrams.shape[1]
  newest = (pool.head[:, None] - 1 - jnp.arange(P)[None]) % P
  first = jnp.take_along_axis(pool.ngrams[:, :, 0], newest, 1)
  count = jnp.cumsum(first == first_B[:, None], -1)
  # The g-th match lies where the count reaches g.
  wanted = np.arange(1, num + 1)[None, :, None]
  place = (count[:, None] < wanted).sum(-1)
  slot = jnp.take_along_axis(newest, jnp.minimum(place, P - 1), 1)
  found = jnp.take_along_axis(pool.ngrams, slot[:, :, None], 1)
  return found[:, :, 1:], place < P


def share(guess_BGK: Array, found_BG: Array) -> Array:
  """Returns `[B, G, K]`: the first guess that begins with the same tokens.

  Verification goes to one child, so two guesses that begin alike must share
  their first nodes, or the second could not be followed. Guesses 4 5 and
  4 6: `[[0, 0], [0, 1]]`.

  Args:
    guess_BGK: tokens of the guesses.
    found_BG: bool, which of them there are; the others share with nobody.
  """
  G = guess_BGK.shape[1]
  same = (guess_BGK[:, :, None] == guess_BGK[:, None]).astype(jnp.int32)
  alike = jnp.cumprod(same, -1) > 0  # [B, G, G, K], up to this token
  alike = alike & (found_BG[:, :, None] & found_BG[:, None])[..., None]
  alike = alike | np.eye(G, dtype=bool)[None, :, :, None]
  return jnp.argmax(alike, 2).astype(jnp.int32)


class Branches(NamedTuple):
  """What differs between rows: how the guesses hang together.

  Attributes:
    parents: `[B, nodes]` int32.
    visible: `[B, nodes, nodes]` bool.
    own: `[B, G, K]` bool, nodes that no earlier guess has.
  """

  parents: Array
  visible: Array
  own: Array


def _branches(owner_BGK: Array, shape: Layout) -> Branches:
  """Hangs the guesses into the tree; `owner`: see `share`."""
  B, G, K = owner_BGK.shape
  last = 1 + G * K
  guess = jnp.asarray(shape.guess)
  above = guess[owner_BGK[:, :, :-1], np.arange(K - 1)[None, None]]
  above = jnp.concatenate([jnp.zeros((B, G, 1), jnp.int32), above], 2)
  parents = jnp.broadcast_to(
    jnp.asarray(shape.parents)[None], (B, shape.num_nodes)
  )
  # A node sees the owners of its guess's tokens before it, and itself.
  there = owner_BGK[:, :, None] == np.arange(G)[None, None, :, None]
  before = np.tril(np.ones((K, K), bool), -1)[None, None, :, None]
  sees = (there[:, :, None] & before).reshape(B, G * K, G * K)
  visible = jnp.broadcast_to(
    jnp.asarray(shape.visible)[None], (B, *shape.visible.shape)
  )
  return Branches(
    parents=parents.at[:, 1:last].set(above.reshape(B, -1)),
    visible=visible.at[:, 1:last, 1:last].set(
      sees | np.eye(G * K, dtype=bool)[None]
    ),
    own=owner_BGK == np.arange(G)[None, :, None],
  )


def _begin(window: Window, root_B1: Array, context: Context) -> Window:
  """Puts the root into the window; a new prompt's level 0 is its own words."""
  W = window.tokens.shape[2]
  at = (np.arange(W)[None] * _SPREAD) % context.length[:, None]
  words = jnp.take_along_axis(context.tokens, at, 1)
  new = (window.filled == 0)[:, None]
  first = jnp.where(new, words, window.tokens[:, 0]).at[:, 0].set(root_B1[:, 0])
  return Window(
    tokens=window.tokens.at[:, 0].set(first),
    filled=jnp.maximum(window.filled, 1),
  )


def build(
  target: Model,
  draft: Model | None,
  *,
  slots: int,
  window: int = 4,
  ngram: int = 3,
  guesses: int = 4,
  pool: int = 1024,
  prompt_as_reference: bool = True,
) -> Drafter:
  """Builds lookahead decoding.

  A pass holds `(W + G) (N - 1)` tokens, root included: 16 by default, for a
  CPU; the paper's 15, 5, 15 are 120, for an accelerator with room to spare.

  A step in which a row may draft nothing (the last token, or the length
  policy's word) does not read its window, and leaves window and pool alone.

  Args:
    target: the target.
    draft: unused.
    slots: unused.
    window: `W`, columns of the window.
    ngram: `N`, tokens of an n-gram; `N - 1` levels and drafted tokens.
    guesses: `G`, n-grams verified in a step.
    pool: n-grams a row remembers.
    prompt_as_reference: whether n-grams of the row's own text go into the pool
      too: the prompt's, and the output's as it is written.

  Raises:
    ValueError: if a number is out of range.
  """
  del draft, slots
  for name, value, low in (
    ("window", window, 1),
    ("ngram", ngram, 2),
    ("guesses", guesses, 1),
    ("pool", pool, 1),
  ):
    if value < low:
      raise ValueError(f"{name} must be at least {low}, got {value}")
  trees.check_size((window + guesses) * (ngram - 1))
  if pool > _MAX_POOL:
    raise ValueError(f"pool must be at most {_MAX_POOL}, got {pool}")
  W, K, G, P, N = window, ngram - 1, guesses, pool, ngram
  V = target.config.vocab_size
  shape = layout(window, ngram, guesses)
  nodes = shape.num_nodes

  def init(batch):
    zeros = jnp.zeros((batch,), jnp.int32)
    return (
      Window(jnp.zeros((batch, K, W), jnp.int32), zeros),
      Pool(jnp.full((batch, P, N), -1, jnp.int32), zeros),
    )

  def prefill(params, state, chunk, output):
    if not prompt_as_reference:
      return state
    comb, known = state
    # By the last token, not the first: a text that is continued then has the
    # n-grams across its seam too.
    last = chunk.positions + 1
    index = last[:, :, None] + np.arange(1 - N, 1)[None, None]
    B, C = last.shape
    inside = jnp.clip(index, 0, chunk.all_tokens.shape[1] - 1)
    text = jnp.take_along_axis(chunk.all_tokens, inside.reshape(B, -1), 1)
    real = (jnp.arange(C)[None] < chunk.num[:, None]) & (index[:, :, 0] >= 0)
    return comb, insert(known, text.reshape(B, C, N), real)

  def propose(params, noise, state, context):
    comb, known = state
    root = root_token(context)
    reads = context.max_depth > 0
    shown = _begin(comb, root, context)
    follows, found = find(known, root[:, 0], G)
    branches = _branches(share(follows, found), shape)
    B = reads.shape[0]
    tokens = [root, follows.reshape(B, -1), shown.tokens.reshape(B, -1)[:, 1:]]
    usable = branches.own & found[:, :, None] & reads[:, None, None]
    level = shape.level[None]
    read = (level >= 0) & (level < shown.filled[:, None]) & reads[:, None]
    acceptable = jnp.zeros((B, nodes), bool)
    drafted = Draft(
      tokens=jnp.maximum(jnp.concatenate(tokens, 1), 0),
      parents=branches.parents,
      depths=jnp.broadcast_to(jnp.asarray(shape.depths)[None], (B, nodes)),
      visible=branches.visible,
      law=jnp.full((B, nodes), DETERMINISTIC, jnp.int32),
      probs=None,
      acceptable=acceptable.at[:, 1 : 1 + G * K].set(usable.reshape(B, -1)),
      read=read,
    )
    back = context.length[:, None] + np.arange(-K, 0)[None]
    recent = jnp.take_along_axis(context.tokens, jnp.maximum(back, 0), 1)
    recent = jnp.where(back >= 0, recent, -1)
    return drafted, (state, shown, reads, recent, read)

  def update(params, carry, draft, verdict, output):
    state, shown, reads, recent, window = carry
    B, J = verdict.tokens.shape
    # Where another part's draft was read instead, nothing is said of a window.
    moves = reads & (draft.read == window).all(1)

    def move():
      comb, known = state
      at = jnp.asarray(shape.window)[shown.filled - 1]
      logits = take_nodes(output.logits, at)
      said = first_largest(logits.reshape(B * W, V)).reshape(B, W)
      new = collect(shown, said)
      full = moves & (shown.filled == K)
      valid = jnp.broadcast_to(full[:, None], (B, W))
      if prompt_as_reference:
        text = jnp.concatenate([recent, verdict.tokens], 1)
        ends = np.arange(J)[:, None] + np.arange(N)[None]
        text = text[:, ends]  # [B, J, N]; -1 before and after the text
        real = (text >= 0).all(-1) & reads[:, None]
        new = jnp.concatenate([new, text], 1)
        valid = jnp.concatenate([valid, real], 1)
      after = advance(shown, said)
      stay = jax.tree.map(
        lambda a, b: jnp.where(moves.reshape(-1, *(1,) * (a.ndim - 1)), a, b),
        after,
        comb,
      )
      return stay, insert(known, new, valid)

    return lax.cond(reads.any(), move, lambda: state)

  return Drafter(
    init=init,
    prefill=prefill,
    propose=propose,
    update=update,
    num_nodes=nodes,
    depth=K,
    reads=True,
  )
