"""Divergences between the target's law and the draft's, token by token.

`p` is the target's law, `q` the draft's, both over the same ids. A token the
target refuses (logit -inf: a filter, a reduced vocabulary, padding) has `p = 0`
and the finite log-probability `LOG_FLOOR`, chosen before any function that
could make NaN of it: a gradient through `where` is NaN if the branch that was
not taken is (the double-where pattern). A position of weight 0 may hold
anything, NaN too: neither its loss nor its gradient sees it.

No temperature squared is put in front of a loss: divergences of laws at
another temperature are what they are.

Reference: Zhou et al. 2024 (DistillSpec), section 4; Leviathan et al. 2023,
corollary 3.6, for `alpha = sum min(p, q) = 1 - TVD`.
"""

from collections.abc import Callable
from typing import NamedTuple

from jax import lax
import jax.numpy as jnp
import numpy as np

from spec_jax.base import Array

__all__ = [
  "LOG_FLOOR",
  "LOSSES",
  "Law",
  "acceptance",
  "agreement",
  "cross_entropy",
  "divergence",
  "is_likeliest",
  "keep_ids",
  "keep_top",
  "law",
]

# exp(-30) = 1e-13 is below float32's resolution of any law that sums to 1.
LOG_FLOOR = -30.0


class Law(NamedTuple):
  """Probabilities and finite log-probabilities.

  Attributes:
    probs: `[..., V]` float32; 0 where the logit was -inf.
    log_probs: `[..., V]` float32, at least `LOG_FLOOR`.
  """

  probs: Array
  log_probs: Array


def law(logits: Array, temperature: float = 1.0) -> Law:
  """Returns the law of logits, finite with finite gradients.

  Args:
    logits: `[..., V]`, -inf allowed; a row of nothing but -inf has no law and
      gives probabilities 0.
    temperature: above 0.

  Raises:
    ValueError: if the temperature is not above 0.
  """
  if temperature <= 0:
    raise ValueError(f"temperature must be above 0, got {temperature}")
  logits, total, allowed = _with_total(logits, temperature)
  # Within where: the gradient of a value that is never used must be finite.
  log_probs = jnp.where(allowed, jnp.where(allowed, logits, 0.0) - total, 0.0)
  probs = jnp.where(allowed, jnp.exp(log_probs), 0.0)
  log_probs = jnp.where(allowed, log_probs, LOG_FLOOR)
  return Law(probs, jnp.maximum(log_probs, LOG_FLOOR))


def _with_total(logits: Array, temperature: float = 1.0):
  """Returns logits, the logarithm of their weights' sum, and what is allowed.

  A row of nothing but -inf has the sum 1.
  """
  logits = logits.astype(jnp.float32) / temperature
  top = lax.stop_gradient(logits.max(-1, keepdims=True))
  some = top != -jnp.inf  # NaN stays NaN: training must see it
  top = jnp.where(some, top, 0.0)
  total = jnp.exp(logits - top).sum(-1, keepdims=True)
  total = top + jnp.log(jnp.where(some, total, 1.0))
  return logits, total, logits != -jnp.inf


def acceptance(p: Array, q: Array) -> Array:
  """Returns `alpha = sum min(p, q)`, the chance that a draft token is accepted.

  Args:
    p: `[..., V]`.
    q: `[..., V]`.

  Returns:
    `[...]`, equal to `1 - TVD(p, q)` if both sum to 1.
  """
  return jnp.minimum(p, q).sum(-1)


def _forward_kl(
  p: Law, draft: Array, temperature: float
) -> tuple[Array, Array]:
  """Returns KL(p || q) and `q`, from the draft's logits.

  Sums over the logits themselves: a quarter of the time of what goes through
  log-probabilities. What the draft refuses costs `-LOG_FLOOR`; what it allows
  costs what it costs, so that its gradient does not vanish.
  """
  logits, total, allowed = _with_total(draft, temperature)
  safe = jnp.where(allowed, logits, 0.0)
  inside = jnp.where(allowed, p.probs, 0.0).sum(-1)
  outside = p.probs.sum(-1) - inside
  value = (p.probs * p.log_probs).sum(-1) - (p.probs * safe).sum(-1)
  value = value + inside * total[..., 0] - outside * LOG_FLOOR
  return value, jnp.exp(lax.stop_gradient(logits - total))


def _reverse_kl(p: Law, q: Law, beta: float) -> Array:
  """KL(q || p); what p refuses costs `-LOG_FLOOR` at most."""
  return (q.probs * (q.log_probs - p.log_probs)).sum(-1)


def _jsd(p: Law, q: Law, beta: float) -> Array:
  """beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q."""
  m = beta * p.probs + (1 - beta) * q.probs
  there = m > 0
  log_m = jnp.where(there, jnp.log(jnp.where(there, m, 1.0)), LOG_FLOOR)
  log_m = jnp.maximum(log_m, LOG_FLOOR)
  of_p = (p.probs * (p.log_probs - log_m)).sum(-1)
  of_q = (q.probs * (q.log_probs - log_m)).sum(-1)
  return beta * of_p + (1 - beta) * of_q


def _tvd(p: Law, q: Law, beta: float) -> Array:
  """sum |p - q| / 2."""
  return 0.5 * jnp.abs(p.probs - q.probs).sum(-1)


# Name -> (p, q, beta) -> loss of each position.
_OF_LAWS: dict[str, Callable[[Law, Law, float], Array]] = {
  "reverse_kl": _reverse_kl,
  "jsd": _jsd,
  "tvd": _tvd,
}
LOSSES = ("forward_kl", *_OF_LAWS)


def divergence(
  name: str,
  target: Array | Law,
  draft: Array,
  weights: Array,
  *,
  temperature: float = 1.0,
  beta: float = 0.5,
  top_k: int = 0,
) -> tuple[Array, Array]:
  """Returns the loss and the acceptance of each position.

  Args:
    name: one of `LOSSES`.
    target: `[..., V]` logits of the target, or their law if several drafts are
      compared with it; no gradient flows into it.
    draft: `[..., V]` logits of the draft.
    weights: `[...]`, 0 = this position does not count.
    temperature: of both laws.
    beta: of JSD, in (0, 1). JSD / beta tends to the forward KL as beta tends
      to 0, JSD / (1 - beta) to the reverse KL as beta tends to 1.
    top_k: the loss sees only so many tokens of the target's law, renormalised;
      0 = all. The acceptance sees all. Needs the target's logits.

  Returns:
    `[...]` weighted losses, and `[...]` weighted acceptances; exactly 0 where
    the weight is 0.

  Raises:
    ValueError: for an unknown loss, or a number out of range.
  """
  if name not in LOSSES:
    raise ValueError(f"unknown loss {name!r}; there are {', '.join(LOSSES)}")
  if not 0 < beta < 1:
    raise ValueError(f"beta must be in (0, 1), got {beta}")
  draft = _where_counted(draft, weights)
  if isinstance(target, Law):
    if top_k:
      raise ValueError("top_k needs the target's logits, not its law")
    p = Law(*(_where_counted(x, weights) for x in target))
  else:
    target = _where_counted(target, weights)
    p = law(target, temperature)
  p = lax.stop_gradient(p)
  seen = p
  if top_k and not isinstance(target, Law):
    seen = lax.stop_gradient(law(keep_top(target, top_k), temperature))
  if name == "forward_kl":
    value, probs = _forward_kl(seen, draft, temperature)
  else:
    q = law(draft, temperature)
    value = _OF_LAWS[name](seen, q, beta)
    probs = lax.stop_gradient(q.probs)
  return value * weights, acceptance(p.probs, probs) * weights


def agreement(target: Array, draft: Array, weights: Array) -> Array:
  """Returns `[...]`, whether both likeliest tokens are one, weighted.

  Of several likeliest tokens any counts.

  Args:
    target: `[..., V]` logits.
    draft: `[..., V]` logits.
    weights: `[...]`.
  """
  # By maxima: argmax takes XLA on CPU as long as everything else here.
  best = target == target.max(-1, keepdims=True)
  theirs = jnp.where(best, draft, -jnp.inf).max(-1)
  return (theirs == draft.max(-1)) * weights


def cross_entropy(draft: Array, labels: Array, weights: Array) -> Array:
  """Returns `-weight log q(label)` of each position.

  Args:
    draft: `[..., V]` logits.
    labels: `[...]` int32; below 0 or not in the vocabulary: weight 0.
    weights: `[...]`.
  """
  V = draft.shape[-1]
  weights = jnp.where((labels >= 0) & (labels < V), weights, 0.0)
  logits, total, _ = _with_total(_where_counted(draft, weights))
  at = jnp.clip(labels, 0, V - 1)[..., None]
  found = jnp.take_along_axis(logits, at, -1)[..., 0]
  allowed = found != -jnp.inf
  found = jnp.where(allowed, found, 0.0) - total[..., 0]
  found = jnp.maximum(jnp.where(allowed, found, LOG_FLOOR), LOG_FLOOR)
  return -found * weights


def is_likeliest(logits: Array, labels: Array) -> Array:
  """Returns `[...]` bool, whether a label is the likeliest token, or one of it.

  Args:
    logits: `[..., V]`.
    labels: `[...]` int32; not in `[0, V)`: False.
  """
  V = logits.shape[-1]
  at = jnp.clip(labels, 0, V - 1)[..., None]
  found = jnp.take_along_axis(logits, at, -1)[..., 0]
  return (found == logits.max(-1)) & (labels >= 0) & (labels < V)


def _where_counted(logits: Array, weights: Array) -> Array:
  return jnp.where(weights[..., None] != 0, logits, 0.0)


def keep_top(logits: Array, k: int) -> Array:
  """Returns logits with all but the `k` largest at -inf; ties are kept.

  Raises:
    ValueError: if `k` is below 1.
  """
  if k < 1:
    raise ValueError(f"top_k must be at least 1, got {k}")
  least = lax.top_k(logits, min(k, logits.shape[-1]))[0][..., -1:]
  return jnp.where(logits >= lax.stop_gradient(least), logits, -jnp.inf)


def keep_ids(
  logits: Array, ids: int | np.ndarray | Array, weights: Array
) -> tuple[Array, Array]:
  """Takes the target's logits to a draft's own, smaller vocabulary.

  The law over the kept ids is the target's, renormalised. A position whose
  likeliest token the draft cannot say teaches nothing and gets weight 0.

  Args:
    logits: `[..., V]` of the target.
    ids: `[v]` int, the target's id of each id of the draft; or `v`, its first.
    weights: `[...]`.

  Returns:
    `[..., v]` logits and the weights of the positions that are left.

  Reference: Li et al. 2025 (EAGLE-3), the draft vocabulary.
  """
  kept = logits[..., :ids] if isinstance(ids, int) else logits[..., ids]
  inside = kept.max(-1) >= logits.max(-1)
  return kept, jnp.where(inside, weights, 0.0)
