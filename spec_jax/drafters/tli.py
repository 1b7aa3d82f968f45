"""Token-level intersection: a draft model with another tokenizer, in a chain.

The draft's law is restricted to the tokens that both vocabularies have and
renormalised; it is then a law over the target's ids like any other. What the
draft reads is the row's text in its own tokens, see `draft_stream`.

Reference: Timor et al. 2025, algorithm 4.
"""

import jax
import jax.numpy as jnp

from spec_jax import tree as trees
from spec_jax.base import DETERMINISTIC, IID, Draft, Drafter, Model
from spec_jax.draft_stream import DraftStream
from spec_jax.drafting import root_token, static_tree
from spec_jax.sampling import (
  draw,
  first_largest,
  is_greedy,
  law,
  path_counts,
  scores,
)
from spec_jax.vocabulary_map import VocabularyMap

TAKES_DRAFT = True
TAKES_VOCABULARY_MAP = True


def build(
  target: Model,
  draft: Model | None,
  *,
  slots: int,
  vocabulary_map: VocabularyMap | None = None,
  num_draft: int = 4,
  draft_slots: int = 0,
) -> Drafter:
  """Builds a drafter whose draft model has a tokenizer of its own.

  Args:
    target: the target; drafted tokens are its own.
    draft: the draft model; `params["draft"]` are its parameters.
    slots: tokens a row may hold.
    vocabulary_map: what is shared and how the rest is said; None if ids mean
      the same in both.
    num_draft: `K`.
    draft_slots: draft tokens a row may hold; a row that has no room stops
      drafting. 0 = twice the slots, if the draft's context has so many.

  Raises:
    ValueError: if there is no draft model, the vocabularies share nothing, or
      a setting is out of range.
  """
  stream = DraftStream(
    "tli",
    target,
    draft,
    vocabulary_map,
    depth=num_draft,
    slots=slots,
    draft_slots=draft_slots,
  )
  tree = trees.chain(num_draft)
  N, V = tree.num_nodes, target.config.vocab_size

  def propose(params, noise, cache, context):
    B = context.length.shape[0]
    draft_ids = params["tables"]["draft_ids"]
    shared = draft_ids >= 0
    sampling = context.sampling
    sampled = sampling.temperature is not None

    def choose(d, logits, made):
      """Draws node `d + 1` from the draft's law on the shared tokens."""
      tokens, probs, allowed = made
      seen = jnp.broadcast_to(jnp.arange(N)[None] <= d, (B, N))
      counts = path_counts(context.counts, tokens, seen)
      ours = jnp.where(shared, logits[:, jnp.maximum(draft_ids, 0)], -jnp.inf)
      rest = scores(ours, sampling, counts)
      # Every shared token may be banned: then nothing is proposed.
      some = jnp.isfinite(rest).any(-1)
      rest = jnp.where(some[:, None], rest, 0.0)
      going = jax.lax.dynamic_index_in_dim(allowed, d, 1, False) & some
      if context.extend is not None:
        going = going & context.extend(jax.nn.softmax(rest, -1)[:, None])[:, 0]
      token = first_largest(rest)
      if sampled:
        q = law(rest, sampling)
        probs = probs.at[:, d].set(q)
        token = jnp.where(
          is_greedy(sampling), token, draw(q, noise.draft[:, d + 1])
        )
      tokens = tokens.at[:, d + 1].set(token)
      allowed = allowed.at[:, d + 1].set(going)
      said = jnp.maximum(draft_ids[token], 0)
      return (tokens, probs, allowed), said, going

    tokens = jnp.zeros((B, N), jnp.int32).at[:, :1].set(root_token(context))
    probs = jnp.zeros((B, N, V), jnp.float32) if sampled else None
    allowed = jnp.zeros((B, N), bool).at[:, 0].set(True)
    (tokens, probs, allowed), asked, carry = stream.say(
      params, cache, context, choose, (tokens, probs, allowed)
    )
    how = jnp.full((B, N), DETERMINISTIC, jnp.int32)
    if sampled:
      greedy = is_greedy(sampling)[:, None]
      how = jnp.where(greedy, DETERMINISTIC, jnp.full((B, N), IID, jnp.int32))
    depths = jnp.arange(N)[None]
    return Draft(
      tokens=tokens,
      **static_tree(tree, B),
      law=how,
      probs=probs,
      acceptable=allowed & (depths > 0) & (depths <= asked[:, None]),
    ), carry

  return Drafter(
    init=stream.init,
    prefill=stream.prefill,
    propose=propose,
    update=lambda params, carry, draft, verdict, output: stream.update(
      params, carry, verdict
    ),
    num_nodes=N,
    depth=num_draft,
    asks_policy=True,
    fills=True,
    laws=(IID,),
    tables=stream.tables,
    catches_up=True,
  )
