"""Suffix decoding: what most often followed the row's last words.

The row's last tokens are looked up in the row's own text and, if there is an
index, in a corpus. Of the places where the longest match stood, at most
`occurrences` in each of the two, each votes for the token that followed it,
and goes on voting as long as it agrees with what was drafted. A node that `c`
of `n` places lead to has the estimated probability `c / n`: the product of the
frequencies on the way to it.

Reference: Oliaro et al. 2024, "SuffixDecoding".
"""

from jax import lax
import jax.numpy as jnp
import numpy as np

from spec_jax import corpus as corpora, tree as trees
from spec_jax.base import DETERMINISTIC, Array, Context, Draft, Drafter, Model
from spec_jax.corpus_search import longest_match, search_tables
from spec_jax.drafting import dynamic_tree, root_token, static_tree


def own_match(tokens_BW: Array, length_B: Array, max_match: int) -> Array:
  """Counts how many tokens before each index agree with the row's last ones.

  `5 6 7 5 6`: two before the 7 (index 2), none elsewhere.

  Args:
    tokens_BW: prompt and output.
    length_B: tokens of each row; 0 leaves a row out.
    max_match: counted at most.

  Returns:
    `[B, W]` int32; 0 at and past the length.
  """
  B, W = tokens_BW.shape
  padded = jnp.pad(tokens_BW, ((0, 0), (max_match, 0)), constant_values=-1)

  def goes_on(carry):
    n, run, _ = carry
    return (n <= max_match) & run.any()

  def further(carry):
    n, run, found = carry
    back = length_B - n
    wanted = jnp.take_along_axis(
      tokens_BW, jnp.clip(back, 0, W - 1)[:, None], 1
    )
    before = lax.dynamic_slice_in_dim(padded, max_match - n, W, 1)
    run = run & (before == wanted) & (back >= 0)[:, None]
    return n + 1, run, found + run

  run = jnp.arange(W)[None] < length_B[:, None]
  init = (jnp.int32(1), run, jnp.zeros((B, W), jnp.int32))
  return lax.while_loop(goes_on, further, init)[2]


def _latest(mask_BW: Array, count: int) -> Array:
  """Returns the last `count` true indices, the last first, -1 padded."""
  W = mask_BW.shape[1]
  # As floats, which hold every index below 2 ** 24: XLA's CPU code finds the
  # largest floats without sorting all.
  index = jnp.where(mask_BW, jnp.arange(W, dtype=jnp.float32)[None], -1.0)
  latest = lax.top_k(index, min(count, W))[0].astype(jnp.int32)
  more = ((0, 0), (0, count - latest.shape[1]))
  return jnp.pad(latest, more, constant_values=-1)


def _spread(low_B: Array, high_B: Array, count: int) -> Array:
  """Returns `count` places spread evenly over each range, -1 padded."""
  size = (high_B - low_B)[:, None]
  i = jnp.arange(count)[None]
  # i * size / count, without i * size: that may not fit an int32.
  offset = i * (size // count) + i * (size % count) // count
  offset = jnp.where(size > count, offset, i)
  return jnp.where(offset < size, low_B[:, None] + offset, -1)


def vote(
  follow_BOK: Array,
  limit_B: Array,
  *,
  num_nodes: int,
  chain: bool,
  min_probability: float,
) -> tuple[Array, Array, Array]:
  """Grows a tree, most frequent node first, from what followed the places.

  Three places, followed by `1 2`, `1 3`, `4 2`: node 1 is token 1 (2 of 3),
  node 2 token 2 below it (1 of 3, the first place); as a tree, node 2 is token
  4 below the root, which is as frequent and less deep.

  Args:
    follow_BOK: tokens after each place, -1 after their end; a place where
      nothing follows does not count.
    limit_B: depth of each row's tree at most.
    num_nodes: `N`, the root included.
    chain: whether each node is the child of the one before it.
    min_probability: what a node's probability must reach.

  Returns:
    (tokens `[B, N]`, parents `[B, N]`, is a node `[B, N]` bool); nodes that
    are none have parent 0, or the node before in a chain. The root's token is
    0 here.
  """
  B, num_places, K = follow_BOK.shape
  places = (follow_BOK[:, :, 0] >= 0).sum(1).astype(jnp.float32)

  def grow(i, carry):
    node, depth, tokens, parents, good = carry
    at = jnp.minimum(depth, K - 1)[:, :, None]
    token = jnp.take_along_axis(follow_BOK, at, 2)[:, :, 0]
    voting = (token >= 0) & (depth < jnp.minimum(limit_B, K)[:, None])
    if chain:
      voting = voting & (node == i - 1)
    same = (node[:, :, None] == node[:, None]) & voting[:, None]
    same = same & (token[:, :, None] == token[:, None]) & voting[:, :, None]
    count = same.sum(2)
    # The most frequent one; of equal ones the least deep, then the first.
    best = jnp.argmax(count * (K + 1) - depth * voting, 1)[:, None]
    most = jnp.take_along_axis(count, best, 1)[:, 0]
    enough = most.astype(jnp.float32) >= jnp.float32(min_probability) * places
    ok = (most > 0) & enough
    parent = jnp.take_along_axis(node, best, 1)[:, 0]
    first = jnp.take_along_axis(token, best, 1)[:, 0]
    moves = jnp.take_along_axis(same, best[:, :, None], 1)[:, 0] & ok[:, None]
    return (
      jnp.where(moves, i, node),
      depth + moves,
      tokens.at[:, i].set(jnp.where(ok, first, 0)),
      parents.at[:, i].set(jnp.where(ok, parent, i - 1 if chain else 0)),
      good.at[:, i].set(ok),
    )

  zeros = jnp.zeros((B, num_places), jnp.int32)
  empty = jnp.zeros((B, num_nodes), jnp.int32)
  init = (zeros, zeros, empty, empty.at[:, 0].set(-1), empty > 0)
  return lax.fori_loop(1, num_nodes, grow, init)[2:]


def build(
  target: Model,
  draft: Model | None,
  *,
  slots: int,
  num_draft: int = 8,
  num_nodes: int = 0,
  max_match: int = 16,
  min_match: int = 1,
  factor: float = 2.0,
  min_probability: float = 0.1,
  occurrences: int = 16,
  corpus: str | None = None,
) -> Drafter:
  """Builds suffix decoding.

  Args:
    target: the target, for the size of its vocabulary.
    draft: unused.
    slots: unused.
    num_draft: depth drafted at most, `K`.
    num_nodes: nodes of a tree below the root; 0 = a chain of `num_draft`.
    max_match: longest match that is looked for.
    min_match: shortest match that is used.
    factor: a draft is at most `factor` times as long as the match.
    min_probability: no node of a smaller estimated probability is drafted.
    occurrences: places that vote: of the row's own text the most recent ones,
      of the corpus some spread evenly over all of them as sorted by their
      contexts.
    corpus: an index from `python -m experiments.index`; None = the row's own
      text alone.

  Raises:
    ValueError: if a number is out of range or the index cannot be used.
  """
  del draft, slots
  for name, value in (("num_draft", num_draft), ("occurrences", occurrences)):
    if value < 1:
      raise ValueError(f"{name} must be at least 1, got {value}")
  if num_nodes and num_nodes < num_draft:
    raise ValueError(
      f"num_nodes must be 0 or at least num_draft ({num_draft}), got "
      f"{num_nodes}"
    )
  if not 1 <= min_match <= max_match:
    raise ValueError(
      f"need 1 <= min_match <= max_match, got {min_match} and {max_match}"
    )
  if not 0 < factor <= 1e6:
    raise ValueError(f"factor must be in (0, 1e6], got {factor}")
  if not 0 <= min_probability <= 1:
    raise ValueError(
      f"min_probability must be in [0, 1], got {min_probability}"
    )
  tables, vocabulary = None, None
  if corpus:
    index = corpora.load_for(corpus, "suffix", target.config.vocab_size)
    if max_match > index.max_match:
      raise ValueError(
        f"max_match must be at most {index.max_match} with this index, got "
        f"{max_match}"
      )
    tables = search_tables(index)
    vocabulary = index.tokenizer
  chain = num_nodes == 0
  N, K = (num_draft if chain else num_nodes) + 1, num_draft

  def look_up(params, context: Context, asked):
    """Returns what is drafted, as `vote` does."""
    tokens = context.tokens
    W = tokens.shape[1]
    length = jnp.where(asked > 0, context.length, 0)
    match = own_match(tokens, length, max_match)
    longest = match.max(1)
    if tables is not None:
      index = params["tables"]
      text, order = index["tokens"], index["order"]
      agree, low, high = longest_match(index, tokens, length, max_match)
      longest = jnp.maximum(longest, agree)
    used = longest >= min_match
    here = (match == longest[:, None]) & used[:, None]
    place = _latest(here & (match > 0), occurrences)
    at = place[:, :, None] + jnp.arange(K)[None, None]
    follow = jnp.take_along_axis(tokens[:, None], jnp.clip(at, 0, W - 1), 2)
    inside = (place >= 0)[:, :, None] & (at < length[:, None, None])
    follow = jnp.where(inside, follow, -1)
    if tables is not None:
      rank = _spread(low, high, occurrences)
      rank = jnp.where((used & (agree == longest))[:, None], rank, -1)
      at = order[jnp.maximum(rank, 0)][:, :, None] + jnp.arange(K)[None, None]
      there = text[jnp.minimum(at, text.shape[0] - 1)]
      there = jnp.where((rank >= 0)[:, :, None], there, -1)
      # What follows the end of a document is another one.
      there = jnp.where(jnp.cumprod(there >= 0, 2) > 0, there, -1)
      follow = jnp.concatenate([follow, there], 1)
    most = jnp.float32(factor) * longest.astype(jnp.float32)
    limit = jnp.minimum(asked, jnp.minimum(most, K).astype(jnp.int32))
    return vote(
      follow,
      limit,
      num_nodes=N,
      chain=chain,
      min_probability=min_probability,
    )

  def propose(params, noise, state, context):
    del noise
    B = context.length.shape[0]
    asked = jnp.where(context.done, 0, context.max_depth)

    def nothing():
      parents = np.arange(N) - 1 if chain else np.arange(N) * 0
      parents[0] = -1
      zeros = jnp.zeros((B, N), jnp.int32)
      return zeros, zeros + jnp.asarray(parents, jnp.int32)[None], zeros > 0

    tokens, parents, good = lax.cond(
      (asked > 0).any(), lambda: look_up(params, context, asked), nothing
    )
    if chain:
      shape = static_tree(trees.chain(K), B)
    else:
      shape = dynamic_tree(parents)
    return Draft(
      tokens=tokens.at[:, :1].set(root_token(context)),
      **shape,
      law=jnp.full((B, N), DETERMINISTIC, jnp.int32),
      probs=None,
      acceptable=good,
    ), state

  return Drafter(
    init=lambda batch: (),
    prefill=lambda params, state, chunk, output: state,
    propose=propose,
    update=lambda params, state, draft, verdict, output: state,
    num_nodes=N,
    depth=K,
    tables=tables,
    vocabulary=vocabulary,
  )
