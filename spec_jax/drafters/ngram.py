"""An n-gram language model as the draft: counts of a corpus, no network.

Interpolated Witten-Bell smoothing. With `c(h, w)` how often `w` followed the
context `h` in the corpus, `c(h)` its sum over all `w`, `T(h)` the number of
different `w`, and `h'` the context without its first token,

  P(w | h) = (c(h, w) + T(h) P(w | h')) / (c(h) + T(h)),

down to `P(w) = (c(w) + T / V) / (c + T)`; a context that never occurred has
the law of the shorter one. An index keeps the most frequent followers of a
context; what it left out counts as unseen: with `d(h)` the sum of those
counts, `T(h)` in the numerator becomes `T(h) + d(h)`.

Reference: Leviathan et al. 2023, table 3; Witten and Bell 1991, method C, as
interpolated by Chen and Goodman 1998.
"""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from spec_jax import corpus as corpora, tree as trees
from spec_jax.base import (
  DETERMINISTIC,
  IID,
  Array,
  Context,
  Draft,
  Drafter,
  Model,
  PyTree,
)
from spec_jax.drafting import root_token, static_tree
from spec_jax.sampling import (
  draw,
  first_largest,
  is_greedy,
  law,
  path_counts,
  scores,
)


def tables_of(index: corpora.Index, order: int) -> dict[str, PyTree]:
  """Returns the model's tables.

  Args:
    index: the counts.
    order: 1, 2 or 3.

  Returns:
    `unigram`: `[V]` float32 logarithms of `P(w)`. `bigram` and `trigram` as
    `order` says: lists by context, `share` being `c(h, w) / (c(h) + T(h))` of
    each follower and `back` the logarithm of the factor of `P(w | h')`;
    `first` and `second` find the contexts of trigrams.
  """
  count = index.unigram.astype(np.float64)
  kinds, V = (count > 0).sum(), index.vocab_size
  unigram = np.log((count + kinds / V) / (count.sum() + kinds))
  tables: dict[str, PyTree] = {"unigram": unigram.astype(np.float32)}
  for name in ("bigram", "trigram")[: order - 1]:
    lists: corpora.Successors = getattr(index, name)
    if not len(lists.token):
      continue  # no document has three tokens
    num = np.diff(lists.start)
    context = np.repeat(np.arange(len(num)), num)
    whole = (lists.total + lists.kinds).astype(np.float64)
    kept = np.bincount(context, lists.count, len(num))
    # A token that never had a follower: all of the law is the shorter one's.
    back = np.where(whole > 0, whole - kept, 1) / np.maximum(whole, 1)
    tables[name] = {
      "start": lists.start,
      "token": lists.token,
      "share": (lists.count / whole[context]).astype(np.float32),
      "back": np.log(back).astype(np.float32),
    }
    if name == "trigram":
      tables[name] |= {
        "first": index.trigram_first,
        "second": index.trigram_second,
      }
  return tables


def _trigram_context(table: PyTree, before_B: Array, last_B: Array) -> Array:
  """Returns the index of each pair of tokens, -1 if it never occurred."""
  second = table["second"]
  C = second.shape[0]
  first = jnp.maximum(before_B, 0)
  low, high = table["first"][first], table["first"][first + 1]
  end = high

  def halve(_, carry):
    low, high = carry
    middle = (low + high) // 2
    right = (second[jnp.minimum(middle, C - 1)] < last_B) & (low < high)
    return jnp.where(right, middle + 1, low), jnp.where(right, high, middle)

  low, _ = lax.fori_loop(0, C.bit_length(), halve, (low, high))
  found = (low < end) & (second[jnp.minimum(low, C - 1)] == last_B)
  return jnp.where(found & (before_B >= 0), low, -1)


def _interpolate(log_law_BV: Array, table: PyTree, context_B: Array, most: int):
  """Mixes the counts of a context into the law of the shorter one.

  Args:
    log_law_BV: of the shorter context.
    table: lists by context.
    context_B: index of the context, -1 = never seen.
    most: length of the longest list.

  Returns:
    `[B, V]`, the logarithm of the law.
  """
  V = log_law_BV.shape[1]
  seen = context_B >= 0
  context = jnp.maximum(context_B, 0)
  begin, end = table["start"][context], table["start"][context + 1]
  index = begin[:, None] + jnp.arange(most)[None]
  live = (index < end[:, None]) & seen[:, None]
  index = jnp.minimum(index, table["token"].shape[0] - 1)
  token = table["token"][index]
  back = jnp.where(seen, table["back"][context], 0.0)[:, None]
  longer = log_law_BV + back
  value = jnp.exp(jnp.take_along_axis(longer, token, 1)) + table["share"][index]
  where = jnp.where(live, token, V)
  return jax.vmap(lambda z, i, x: z.at[i].set(x, mode="drop"))(
    longer, where, jnp.log(value)
  )


def log_law(
  tables: dict[str, PyTree], before_B: Array, last_B: Array, most: int
) -> Array:
  """Returns the logarithm of the model's law after two tokens, `[B, V]`.

  Args:
    tables: see `tables_of`.
    before_B: the token before the last, -1 = there is none.
    last_B: the last token.
    most: length of the longest list of followers.
  """
  unigram = tables["unigram"]
  z = jnp.broadcast_to(unigram[None], (last_B.shape[0], unigram.shape[0]))
  if "bigram" in tables:
    z = _interpolate(z, tables["bigram"], last_B, most)
  if "trigram" in tables:
    context = _trigram_context(tables["trigram"], before_B, last_B)
    z = _interpolate(z, tables["trigram"], context, most)
  return z


def build(
  target: Model,
  draft: Model | None,
  *,
  slots: int,
  num_draft: int = 4,
  order: int = 3,
  corpus: str | None = None,
) -> Drafter:
  """Builds a chain of tokens drawn from an n-gram model.

  Args:
    target: the target, for the size of its vocabulary.
    draft: unused.
    slots: unused.
    num_draft: tokens drafted at most, `K`.
    order: 1, 2 or 3: unigrams, bigrams or trigrams.
    corpus: an index from `python -m experiments.index`.

  Raises:
    ValueError: if a number is out of range, or there is no index or it cannot
      be used.
  """
  del draft, slots
  if num_draft < 1:
    raise ValueError(f"num_draft must be at least 1, got {num_draft}")
  if order not in (1, 2, 3):
    raise ValueError(f"order must be 1, 2 or 3, got {order}")
  V = target.config.vocab_size
  index = corpora.load_for(corpus, "ngram", V)
  most = max(
    int(np.diff(lists.start).max(initial=1))
    for lists in (index.bigram, index.trigram)
  )
  chain = trees.chain(num_draft)
  N, K = chain.num_nodes, num_draft

  def propose(params, noise, state, context: Context):
    tables = params["tables"]
    B = context.length.shape[0]
    sampled = context.sampling.temperature is not None
    asked = jnp.where(context.done, 0, jnp.minimum(context.max_depth, K))
    deepest = asked.max()
    second = jnp.maximum(context.length - 2, 0)[:, None]
    before = jnp.take_along_axis(context.tokens, second, 1)[:, 0]
    before = jnp.where(context.length >= 2, before, -1)
    shape = static_tree(chain, B)

    def level(carry):
      d, before, tokens, probs, allowed = carry
      last = lax.dynamic_index_in_dim(tokens, d, 1, False)
      going = lax.dynamic_index_in_dim(allowed, d, 1, False)
      seen = lax.dynamic_index_in_dim(shape["visible"], d, 1, False)
      counts = context.counts
      if counts is not None:
        counts = path_counts(counts, tokens, seen)
      rest = scores(
        log_law(tables, before, last, most), context.sampling, counts
      )
      if context.extend is not None:
        going = going & context.extend(jax.nn.softmax(rest, -1)[:, None])[:, 0]
      token = first_largest(rest)
      if sampled:
        q = law(rest, context.sampling)
        probs = lax.dynamic_update_index_in_dim(probs, q, d, 1)
        u = lax.dynamic_index_in_dim(noise.draft, d + 1, 1, False)
        token = jnp.where(is_greedy(context.sampling), token, draw(q, u))
      tokens = lax.dynamic_update_index_in_dim(tokens, token, d + 1, 1)
      allowed = lax.dynamic_update_index_in_dim(allowed, going, d + 1, 1)
      return d + 1, last, tokens, probs, allowed

    def goes_on(carry):
      d, allowed = carry[0], carry[-1]
      going = lax.dynamic_index_in_dim(allowed, jnp.minimum(d, K), 1, False)
      return (d < deepest) & going.any()

    tokens = jnp.zeros((B, N), jnp.int32).at[:, :1].set(root_token(context))
    probs = jnp.zeros((B, N, V), jnp.float32) if sampled else None
    allowed = jnp.zeros((B, N), bool).at[:, 0].set(asked > 0)
    _, _, tokens, probs, allowed = lax.while_loop(
      goes_on, level, (jnp.int32(0), before, tokens, probs, allowed)
    )
    how = jnp.full((B, N), DETERMINISTIC, jnp.int32)
    if sampled:
      how = jnp.where(is_greedy(context.sampling)[:, None], how, IID)
    depths = shape["depths"]
    return Draft(
      tokens=tokens,
      **shape,
      law=how,
      probs=probs,
      acceptable=allowed & (depths > 0) & (depths <= asked[:, None]),
    ), state

  return Drafter(
    init=lambda batch: (),
    prefill=lambda params, state, chunk, output: state,
    propose=propose,
    update=lambda params, state, draft, verdict, output: state,
    num_nodes=N,
    depth=K,
    asks_policy=True,
    fills=True,
    laws=(IID,),
    tables=tables_of(index, order),
    vocabulary=index.tokenizer,
  )
