"""What a decoder-only transformer is, apart from how it is run."""

from collections.abc import Sequence
import dataclasses
from typing import Any

from spec_jax.models import common
from spec_jax.rope import Rope


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """An architecture; nothing about how it is run.

  Attributes:
    vocab_size: `V`, rows of the embedding.
    width: `D`.
    num_layers: `L`.
    num_heads: `H`.
    num_kv_heads: `G`, divides `H`.
    head_dim: `E`.
    ffn_width: `F`.
    max_length: tokens a row may hold, prompt and output.
    norm_eps: epsilon of every norm.
    rope: of all layers, or of those without a window; None means a learned
      table of `max_length` positions.
    rope_local: of the layers with a window, when it differs.
    windows: per layer the sliding window in tokens (the token itself counts),
      or None; `()` means none in any layer.
    norm: "rms", "rms_plus_one" (weights stored less 1) or "layer".
    qkv_bias: query, key and value projections add a bias.
    out_bias: attention output and feed-forward add biases.
    qk_norm: queries and keys are RMS-normalised per head, before rope.
    post_norms: attention and feed-forward outputs are normalised too.
    activation: a key of `common.ACTIVATIONS`.
    gated: the feed-forward has a gate.
    tied: logits come from the embedding.
    embed_scale: multiplies embeddings, rounded to the compute dtype.
    attention_scale: multiplies scores; None means `head_dim ** -0.5`.
    num_words: columns of the output matrix, of the first tokens; the others
      have logit -inf. 0 = all. Of drafts that know some words only, not tied.
  """

  vocab_size: int
  width: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  ffn_width: int
  max_length: int
  norm_eps: float = 1e-6
  rope: Rope | None = None
  rope_local: Rope | None = None
  windows: tuple[int | None, ...] = ()
  norm: str = "rms"
  qkv_bias: bool = False
  out_bias: bool = False
  qk_norm: bool = False
  post_norms: bool = False
  activation: str = "silu"
  gated: bool = True
  tied: bool = False
  embed_scale: float = 1.0
  attention_scale: float | None = None
  num_words: int = 0

  def __post_init__(self):
    if not self.windows:
      object.__setattr__(self, "windows", (None,) * self.num_layers)
    if len(self.windows) != self.num_layers:
      raise ValueError(
        f"{len(self.windows)} windows for {self.num_layers} layers"
      )
    if not 0 <= self.num_words <= self.vocab_size:
      raise ValueError(
        f"num_words must be in [0, {self.vocab_size}], got {self.num_words}"
      )
    if self.num_words and self.tied:
      raise ValueError("a model that knows some words only cannot be tied")
    if any(w is not None and w < 1 for w in self.windows):
      raise ValueError(f"a window must be at least 1, got {self.windows}")
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"{self.num_heads} heads are not a multiple of "
        f"{self.num_kv_heads} key/value heads"
      )
    if self.norm not in ("rms", "rms_plus_one", "layer"):
      raise ValueError(f"unknown norm {self.norm!r}")
    if self.activation not in common.ACTIVATIONS:
      raise ValueError(f"unknown activation {self.activation!r}")
    for rope in (self.rope, self.rope_local):
      if rope is not None and 2 * len(rope.frequencies) != self.head_dim:
        raise ValueError(
          f"{len(rope.frequencies)} rope frequencies for head_dim "
          f"{self.head_dim}"
        )


def check_layers(config: Any, draft: int | Sequence[int]) -> list[int]:
  """Returns the layers that a number of first layers, or a list, stands for.

  Args:
    config: of the target.
    draft: a number, or numbers of layers that rise.

  Raises:
    ValueError: if there is none, one is out of range, or they do not rise.
  """
  L = config.num_layers
  if isinstance(draft, int):
    if not 1 <= draft <= L:
      raise ValueError(f"the draft's layers must be in [1, {L}], got {draft}")
    return list(range(draft))
  layers = [int(i) for i in draft]
  if not layers or not all(0 <= i < L for i in layers):
    raise ValueError(
      f"the draft's layers must be in [0, {L - 1}], one at least, got {layers}"
    )
  if sorted(set(layers)) != layers:
    raise ValueError(f"the draft's layers must rise, got {layers}")
  return layers


def shallow_config(
  config: Any, layers: Sequence[int], num_words: int = 0
) -> Any:
  """Returns the architecture of a model made of some layers of another.

  Args:
    config: of the other.
    layers: which.
    num_words: see `DecoderConfig`.
  """
  words = {"num_words": num_words, "tied": False} if num_words else {}
  return dataclasses.replace(
    config,
    num_layers=len(layers),
    windows=tuple(config.windows[i] for i in layers),
    **words,
  )
