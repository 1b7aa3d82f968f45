"""Medusa heads: each guesses one of the next tokens from one hidden state.

Head `k` (from 1) guesses, from the target's final normalised hidden state `h`
after token `t`, the token `t + k + 1`; the target itself gives `t + 1`. It is
`num_layers` residual blocks `x + silu(x W + b)` and an output matrix, the
target's own unless a checkpoint brings another. `W = b = 0` at the start, so a
fresh head says what the target says of the next token.

Reference: Cai et al. 2024 (Medusa), section 2.1.1.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from spec_jax.base import Array, PyTree
from spec_jax.heads import Heads, Words, words_axes, words_params
from spec_jax.models import common
from spec_jax.models.decoder import PRECISION

# No text is guessed further ahead.
MOST_HEADS = 64


@dataclasses.dataclass(frozen=True)
class MedusaConfig:
  """Sizes of Medusa heads.

  Attributes:
    width: `D` of the target.
    num_heads: `K`.
    num_layers: residual blocks of each head.
    words: what they know.
    own_matrices: whether each head has an output matrix, `[D, v]`.
    max_length: of the target.
    accuracies: `[K][R]`, how often the guess of each rank was right, by head;
      measured in training. () = unknown.
  """

  width: int
  num_heads: int
  words: Words
  max_length: int
  num_layers: int = 1
  own_matrices: bool = False
  accuracies: tuple[tuple[float, ...], ...] = ()

  def __post_init__(self):
    for name in ("num_heads", "num_layers"):
      if getattr(self, name) < 1:
        raise ValueError(
          f"{name} must be at least 1, got {getattr(self, name)}"
        )
    if max(self.num_heads, self.num_layers) > MOST_HEADS:
      raise ValueError(
        f"there are at most {MOST_HEADS} heads and layers of a head, got "
        f"{self.num_heads} and {self.num_layers}"
      )
    rates = self.accuracies
    if rates and not (
      len(rates) == self.num_heads
      and len({len(row) for row in rates}) == 1
      and all(0 <= x <= 1 for row in rates for x in row)
    ):
      raise ValueError(
        f"accuracies must be {self.num_heads} rows of as many rates in [0, 1]"
      )

  @property
  def vocab_size(self) -> int:
    """`V` of the target, which is what is proposed."""
    return self.words.target_size


@functools.lru_cache(maxsize=16)
def build(
  config: MedusaConfig, *, dtype=jnp.float32, precision: str | None = PRECISION
) -> Heads:
  """Builds Medusa heads.

  Parameters: `{"heads": ({"w0": [D, D], "b0": [D], ..., "out": [D, v] if
  own_matrices}, ...), "head": ..., "ids": ...}`, the last two if `words` has
  them.

  `apply(params, hidden) -> [..., K, D]`, states from which `logits` reads.

  Args:
    config: the sizes.
    dtype: of the parameters `init` makes.
    precision: of products, see `decoder.build`.
  """
  D, v = config.width, config.words.size

  def head(make) -> dict:
    found = {}
    for i in range(config.num_layers):
      found[f"w{i}"] = make((D, D), ("embed", None))
      found[f"b{i}"] = make((D,), ("embed",))
    if config.own_matrices:
      found["out"] = make((D, v), ("embed", None))
    return found

  def init(key):
    del key  # a head begins as the target's own output
    zeros = lambda shape, axes: jnp.zeros(shape, dtype)
    return {
      "heads": tuple(head(zeros) for _ in range(config.num_heads)),
      **words_params(config.words, D, dtype),
    }

  def axes():
    names = lambda shape, axes: axes
    return {
      "heads": tuple(head(names) for _ in range(config.num_heads)),
      **words_axes(config.words),
    }

  def apply(params: PyTree, hidden: Array) -> Array:
    states = []
    with jax.default_matmul_precision(precision):
      for w in params["heads"]:
        x = hidden
        for i in range(config.num_layers):
          x = x + jax.nn.silu(common.linear(x, w[f"w{i}"], w[f"b{i}"]))
        states.append(x)
    return jnp.stack(states, -2)

  return Heads("medusa", init, axes, apply, config, dtype)


def logits_of(
  heads: Heads, params: PyTree, target, target_params: PyTree, states: Array
) -> Array:
  """Returns `[..., K, v]` float32 logits of what `Heads.apply` returned."""
  config = heads.config
  if not config.own_matrices:
    return config.words.logits(params, target, target_params, states)
  with jax.default_matmul_precision(PRECISION):
    found = [
      common.linear(states[..., k, :], w["out"], dtype=jnp.float32)
      for k, w in enumerate(params["heads"])
    ]
  return jnp.stack(found, -2)
