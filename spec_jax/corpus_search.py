"""Searches a corpus index on the device."""

from jax import lax
import jax.numpy as jnp
import numpy as np

from spec_jax.base import Array
from spec_jax.corpus import Index

# A search divides its range into so many parts a round: XLA's CPU code takes
# about as long to look at 15 places as at one.
_PARTS = 16


def search_tables(index: Index) -> dict[str, np.ndarray]:
  """Returns what `longest_match` reads.

  Args:
    index: the corpus.

  Returns:
    `tokens` and `order` of the index, and `first`, `[V + 1]` int32: where in
    `order` the contexts that end with each token begin.
  """
  nearest = index.tokens[index.order - 1]  # sorted, as `order` is
  first = np.searchsorted(nearest, np.arange(index.vocab_size + 1))
  return {
    "tokens": index.tokens,
    "order": index.order,
    "first": first.astype(np.int32),
  }


def longest_match(
  tables: dict[str, Array], row_BW: Array, length_B: Array, max_match: int
) -> tuple[Array, Array, Array]:
  """Finds the places whose context agrees longest with a row's last tokens.

  Corpus `5 6 7 | 8 6 9`, row `5 6`: two tokens stand before the 7, one before
  the 9; the range holds the place of the 7 alone.

  Args:
    tables: from `search_tables`.
    row_BW: prompt and output.
    length_B: tokens of each row.
    max_match: longest context looked at, at most `Index.max_match`.

  Returns:
    (tokens that agree `[B]`, first of the range in `order` `[B]`, its end
    `[B]`), int32; all places where nothing agrees.
  """
  tokens, order, first = (tables[key] for key in ("tokens", "order", "first"))
  P, M = order.shape[0], max_match
  at = length_B[:, None] - 1 - np.arange(M)[None]
  query = jnp.take_along_axis(row_BW, jnp.maximum(at, 0), 1)
  query = jnp.where(at >= 0, query, -1)
  # Among the places behind the row's last token, few as a rule.
  last = query[:, :1]
  begin, end = (
    jnp.where(last >= 0, first.at[last + more].get(mode="clip"), 0)
    for more in (0, 1)
  )

  depth = np.arange(M)[None, None, None]

  def compare(place_BJn):  # (tokens that agree, whether the context is smaller)
    p = order.at[place_BJn].get(mode="clip")[..., None]
    # The corpus begins with a separator, where every context has ended.
    there = tokens.at[jnp.maximum(p - 1 - depth, 0)].get(mode="clip")
    asked = query[:, None, None]
    equal = (there == asked) & (there >= 0)
    agree = jnp.where(equal, M, depth).min(-1)
    differs = depth == agree[..., None]
    return agree, (differs & (there < asked)).any(-1)

  def search(is_before, count):  # first place that is not before, `[B, count]`
    def narrow(ends):
      low, high = (x[:, :, None] for x in ends)
      size, part = high - low, np.arange(1, _PARTS)[None, None]
      # size * part // _PARTS, without a product that may not fit an int32.
      ahead = size // _PARTS * part + size % _PARTS * part // _PARTS
      place = low + ahead
      before = is_before(place) & (ahead < size)
      low = jnp.where(before, place + 1, low).max(-1)
      return low, jnp.where(before, high, place).min(-1)

    ends = tuple(jnp.repeat(x, count, 1) for x in (begin, end))
    return lax.while_loop(lambda x: (x[0] < x[1]).any(), narrow, ends)[0]

  place = search(lambda p: compare(p)[1], 1)
  near = jnp.concatenate([place - 1, place], 1)
  agree = compare(near[:, :, None])[0][:, :, 0]
  agree = jnp.where((near >= begin) & (near < end), agree, 0)
  longest = agree.max(1)[:, None]

  def before_or_inside(p):
    agree, smaller = compare(p)
    is_end = (np.arange(2) == 1)[None, :, None]
    return jnp.where(agree >= longest[:, :, None], is_end, smaller)

  bounds = search(before_or_inside, 2)
  bounds = jnp.where(longest > 0, bounds, jnp.array([[0, P]], jnp.int32))
  return longest[:, 0], bounds[:, 0], bounds[:, 1]
