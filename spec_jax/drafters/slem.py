"""String-level exact match: a draft with another tokenizer, greedy only.

The draft says its own most likely tokens; the host turns them to text and
tokenises that as the target would (`retokenize`). What comes out is certain,
not drawn: the target keeps it where it would have said the same.

Reference: Timor et al. 2025, algorithm 2.
"""

import jax
from jax import lax
import jax.numpy as jnp

from spec_jax import tree as trees
from spec_jax.base import DETERMINISTIC, Draft, Drafter, Model
from spec_jax.draft_stream import DraftStream
from spec_jax.drafting import root_token, static_tree
from spec_jax.retokenize import LOOK_BEHIND
from spec_jax.sampling import first_largest
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
  """Builds a drafter that matches text with a draft of another tokenizer.

  Args:
    target: the target.
    draft: the draft model; `params["draft"]` are its parameters.
    slots: tokens a row may hold.
    vocabulary_map: how one tokenizer's words are said in the other's; None if
      ids mean the same in both.
    num_draft: `K`, tokens the draft says, and target tokens proposed at most.
    draft_slots: draft tokens a row may hold; a row that has no room stops
      drafting. 0 = twice the slots, if the draft's context has so many.

  Raises:
    ValueError: if there is no draft model, the vocabularies share nothing, or
      a setting is out of range.
  """
  stream = DraftStream(
    "slem",
    target,
    draft,
    vocabulary_map,
    depth=num_draft,
    slots=slots,
    draft_slots=draft_slots,
  )
  words = None if vocabulary_map is None else vocabulary_map.retokenize
  if vocabulary_map is not None and words is None:
    raise ValueError("drafter 'slem' needs tokenizers, the map has none")
  V = target.config.vocab_size
  tree = trees.chain(num_draft)

  def choose(d, logits, made):
    del d
    going = jnp.ones(logits.shape[:1], bool)
    return made, first_largest(logits), going

  def translate(context, said, asked):
    """Returns `[B, K]` target tokens, -1 where there is none."""
    if words is None:
      return jnp.where(said < V, said, -1)
    # The tail alone, not the buffer: a callback's large arguments can stop
    # a CPU whose threads are few.
    back = jnp.arange(LOOK_BEHIND)[None] - LOOK_BEHIND
    index = context.length[:, None] + back
    tail = jnp.take_along_axis(context.tokens, jnp.maximum(index, 0), 1)
    tail = jnp.where(index >= 0, tail, -1)
    shape = jax.ShapeDtypeStruct(said.shape, jnp.int32)
    return lax.cond(
      (asked > 0).any(),
      lambda tail, said, wanted: jax.pure_callback(
        words.rows, shape, tail, said, wanted
      ),
      lambda tail, said, wanted: jnp.full(said.shape, -1, jnp.int32),
      tail,
      said,
      asked > 0,
    )

  def propose(params, noise, cache, context):
    del noise
    B = context.length.shape[0]
    _, asked, carry = stream.say(params, cache, context, choose, ())
    # The draft may have said less than `K`: the rest is no word of its.
    spoken = jnp.arange(num_draft)[None] < carry.num_read
    tokens = translate(context, jnp.where(spoken, carry.said, -1), asked)
    given = jnp.cumprod(tokens >= 0, 1).astype(bool)
    given = given & (jnp.arange(num_draft)[None] < asked[:, None])
    root = root_token(context)
    return Draft(
      tokens=jnp.concatenate([root, jnp.where(given, tokens, 0)], 1),
      **static_tree(tree, B),
      law=jnp.full((B, tree.num_nodes), DETERMINISTIC, jnp.int32),
      probs=None,
      acceptable=jnp.concatenate([jnp.zeros((B, 1), bool), given], 1),
    ), carry

  return Drafter(
    init=stream.init,
    prefill=stream.prefill,
    propose=propose,
    update=lambda params, carry, draft, verdict, output: stream.update(
      params, carry, verdict
    ),
    num_nodes=tree.num_nodes,
    depth=num_draft,
    tables=stream.tables,
    host_driven=True,
    greedy_only=True,
    catches_up=True,
  )
