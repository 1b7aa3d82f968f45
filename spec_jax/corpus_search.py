"""Searches a corpus index on the device."""

from jax import lax
import jax.numpy as jnp

from spec_jax.base import Array


def longest_match(
  tokens: Array,
  order: Array,
  row_BW: Array,
  length_B: Array,
  max_match: int,
) -> tuple[Array, Array, Array]:
  """Finds the places whose context agrees longest with a row's last tokens.

  Corpus `5 6 7 | 8 6 9`, row `5 6`: two tokens stand before the 7, one before
  the 9; the range holds the place of the 7 alone.

  Args:
    tokens: `Index.tokens`.
    order: `Index.order`.
    row_BW: prompt and output.
    length_B: tokens of each row.
    max_match: longest context looked at, at most `Index.max_match`.

  Returns:
    (tokens that agree `[B]`, first of the range in `order` `[B]`, its end
    `[B]`), int32; all places where nothing agrees.
  """
  B, P, M = length_B.shape[0], order.shape[0], max_match
  back = jnp.arange(M)[None]
  at = length_B[:, None] - 1 - back
  query = jnp.take_along_axis(row_BW, jnp.maximum(at, 0), 1)
  query = jnp.where(at >= 0, query, -1)[:, None]  # [B, 1, M]

  def compare(place_BJ):  # (tokens that agree, whether the context is smaller)
    p = order[jnp.clip(place_BJ, 0, P - 1)]
    # The corpus begins with a separator, where every context has ended.
    there = tokens[jnp.maximum(p[:, :, None] - 1 - back[None], 0)]
    equal = (there == query) & (there >= 0)
    agree = jnp.cumprod(equal.astype(jnp.int32), -1).sum(-1)
    next_ = jnp.minimum(agree, M - 1)[:, :, None]
    mine = jnp.take_along_axis(jnp.broadcast_to(query, there.shape), next_, -1)
    smaller = jnp.take_along_axis(there, next_, -1) < mine
    return agree, smaller[:, :, 0]

  def bisect(is_before, count):  # first place that is not before, `[B, count]`
    def body(_, carry):
      low, high = carry
      middle = (low + high) // 2
      right = is_before(middle) & (low < high)
      return jnp.where(right, middle + 1, low), jnp.where(right, high, middle)

    zeros = jnp.zeros((B, count), jnp.int32)
    return lax.fori_loop(0, P.bit_length(), body, (zeros, zeros + P))[0]

  place = bisect(lambda p: compare(p)[1], 1)
  near = jnp.concatenate([place - 1, place], 1)
  agree = jnp.where((near >= 0) & (near < P), compare(near)[0], 0)
  longest = agree.max(1)[:, None]

  def before_or_inside(p):
    agree, smaller = compare(p)
    inside = agree >= longest
    is_end = jnp.arange(2)[None] == 1
    return jnp.where(inside, is_end, smaller)

  bounds = bisect(before_or_inside, 2)
  return longest[:, 0], bounds[:, 0], bounds[:, 1]
