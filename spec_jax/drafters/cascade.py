"""A chain of a draft model that is itself drafted for.

A drafter that copies proposes to the draft model, which verifies by the same
rule as the target does: where every proposal is certain, a token is drawn from
the model's own law and the walk goes on if it equals a proposal. So token `i`
is `draw(q_i, noise.draft[i])`, as the draft model alone draws it with the same
noise; the inner drafter decides only how many passes of the draft model that
takes. Passes are made until all `K` tokens are there: how many are offered
depends on no token, and their law is the draft's own.

Reference: Chen et al. 2024, "Cascade speculative drafting" (vertical cascade);
Sun et al. 2024, "TriForce".
"""

import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from spec_jax import drafters, tree as trees
from spec_jax.base import (
  DETERMINISTIC,
  IID,
  Context,
  Draft,
  Drafter,
  Model,
  Noise,
)
from spec_jax.combining import build_part, combined, params_of, tell
from spec_jax.draft_model import (
  DraftModel,
  check_temperature,
  if_wanted,
  own_temperature,
  repeat_rows,
)
from spec_jax.drafting import CATCH_UP, root_token, static_tree
from spec_jax.nodes import at_node, take_nodes
from spec_jax.sampling import (
  add_counts,
  is_greedy,
  law,
  no_noise,
  path_counts,
)
from spec_jax.verify import verify

TAKES_DRAFT = True


def build(
  target: Model,
  draft: Model | None,
  *,
  slots: int,
  inner: str = "prompt_lookup(num_draft=3)",
  num_draft: int = 4,
  draft_temperature: float | None = None,
) -> Drafter:
  """Builds a draft model with a drafter of its own.

  A length policy that looks at the draft's law is asked when all tokens are
  drawn: it spares passes of the target, not of the draft.

  Args:
    target: the target; its vocabulary rules.
    draft: the draft model; `params["draft"]` are its parameters.
    slots: `S`; the draft stops proposing where its own `max_length` ends.
    inner: the drafter that proposes to the draft model, with options; it must
      be certain of its tokens, ask no model and have no nodes of its own read.
    num_draft: `K` of the chain.
    draft_temperature: the draft's own temperature where the row's is not 0;
      None = the row's. Its law stays exact either way.

  Raises:
    ValueError: if there is no draft model, a number is out of range, or the
      inner drafter is none that fits.
  """
  asks = DraftModel("cascade", target, draft, slots=slots)
  check_temperature(draft_temperature)
  if num_draft < 2:
    raise ValueError(
      f"num_draft must be at least 2, else there is nothing to draft for, got "
      f"{num_draft}"
    )
  copies = build_part("inner", inner, target, draft, slots=slots)
  if drafters.takes_draft(*drafters.parse(inner)):
    raise ValueError(
      f"option 'inner' must be a drafter that asks no draft model, got "
      f"{inner!r}"
    )
  if copies.reads:
    raise ValueError(
      f"option 'inner' must be a drafter that has no nodes read for its own "
      f"use, got {inner!r}"
    )
  if copies.laws != (DETERMINISTIC,) or copies.num_nodes < 2:
    raise ValueError(
      f"option 'inner' must be a drafter that is certain of its tokens, got "
      f"{inner!r}"
    )
  return _Cascade(asks, copies, num_draft, draft_temperature).drafter()


class _Cascade:
  """The closures of one drafter; holds static choices only, no arrays.

  Pass `p` reads the last token drawn and the inner nodes below it at block
  nodes `C - 1 + p n ..`; pending tokens come before the first pass's.
  """

  def __init__(self, asks: DraftModel, copies: Drafter, depth, temperature):
    self.asks = asks
    self.copies = copies
    self.tree = trees.chain(depth)
    self.temperature = temperature
    model = Drafter(
      init=asks.init,
      prefill=asks.prefill,
      propose=self.propose,
      update=self.update,
      num_nodes=depth + 1,
      depth=depth,
      asks_policy=True,
      fills=True,
      laws=(IID,),
      catches_up=True,
    )
    self.parts = {"inner": copies, "model": model}

  def drafter(self) -> Drafter:
    K = self.tree.depth
    return combined(
      self.parts,
      self.propose,
      self.update,
      num_nodes=K + 1,
      depth=K,
      laws=(IID,),
    )

  def _copy(self, params, state, context: Context, tokens_BK, num, asked):
    """Asks the inner drafter below the `num` tokens drawn so far."""
    B, W = context.tokens.shape
    j = jnp.arange(self.tree.depth)[None]
    where = jnp.where(j < num[:, None], context.length[:, None] + j, W)
    put = jax.vmap(lambda row, i, x: row.at[i].set(x, mode="drop"))
    # The token after the last copied one is drawn without a copy.
    room = jnp.clip(asked - num - 1, 0, self.copies.depth)
    noise = no_noise(B, self.copies.num_nodes, self.copies.depth)
    draft, carry = self.copies.propose(
      params_of(params, "inner"),
      noise,
      state["inner"],
      dataclasses.replace(
        context,
        tokens=put(context.tokens, where, tokens_BK),
        length=context.length + num,
        max_depth=room,
        extend=None,
      ),
    )
    usable = draft.acceptable & (draft.depths <= room[:, None])
    return dataclasses.replace(draft, acceptable=usable), carry

  def propose(self, params, noise, state, context: Context):
    B, K, V = context.length.shape[0], self.tree.depth, self.asks.vocab_size
    N = K + 1
    asked = self.asks.asked(state["model"], context, K)
    sampled = context.sampling.temperature is not None
    size = CATCH_UP - 1 + K * self.copies.num_nodes
    reading = self.asks.start(params, state["model"], context, size, asked > 0)
    zeros = jnp.zeros((B,), jnp.int32)
    tokens = jnp.zeros((B, K), jnp.int32)
    copied, copied_carry = self._copy(
      params, state, context, tokens, zeros, asked
    )
    # Logits after the root and each token drawn, where someone looks at them.
    logits = None
    if sampled or context.extend is not None:
      logits = jnp.zeros((B, K, V), jnp.float32)
    places = jnp.full((B, N), -1, jnp.int32)
    tokens, logits, places, block = if_wanted(
      reading,
      lambda carry: self._draw(
        params, noise, state, context, reading, asked, copied, carry
      ),
      (tokens, logits, places, reading.block),
    )
    probs, allowed = None, jnp.ones((B, N), bool)
    if logits is not None:
      probs, allowed = self._laws(context, tokens, logits, asked)
    row_law = jnp.full((B, N), DETERMINISTIC, jnp.int32)
    if sampled:
      greedy = is_greedy(context.sampling)[:, None]
      row_law = jnp.where(greedy, DETERMINISTIC, IID) + jnp.zeros_like(row_law)
    shape = static_tree(self.tree, B)
    draft = Draft(
      tokens=jnp.concatenate([root_token(context), tokens], 1),
      **shape,
      law=row_law,
      probs=probs if sampled else None,
      acceptable=(shape["depths"] <= asked[:, None])
      & (shape["depths"] > 0)
      & allowed,
    )
    carry = (reading._replace(block=block), places, copied, copied_carry)
    return draft, carry

  def _laws(self, context: Context, tokens, logits, asked):
    """Returns the law after each node, `[B, N, V]`, and the policy's word."""
    B, K, _ = logits.shape
    N, V = K + 1, self.asks.vocab_size
    sampling, counts, chain = repeat_rows(
      (context.sampling, context.counts, jnp.pad(tokens, ((0, 0), (1, 0)))), K
    )
    seen = jnp.asarray(self.tree.visible)[:K]
    counts = path_counts(counts, chain, jnp.tile(seen, (B, 1)))
    rest = self.asks.scores(logits.reshape(B * K, -1), sampling, counts)
    allowed = jnp.ones((B, N), bool)
    if context.extend is not None:
      sure = context.extend(jax.nn.softmax(rest, -1).reshape(B, K, V))
      allowed = allowed.at[:, 1:].set(jnp.cumprod(sure, 1) > 0)
    if sampling.temperature is None:
      return None, allowed
    probs = law(rest, own_temperature(sampling, self.temperature))
    drawn = (jnp.arange(K)[None] < asked[:, None])[:, :, None]
    probs = jnp.where(drawn, probs.reshape(B, K, V), 0)
    return jnp.pad(probs, ((0, 0), (0, 1), (0, 0))), allowed

  def _draw(
    self, params, noise, state, context, reading, asked, copied, carry
  ) -> Any:
    """Passes of the draft model until each row has what it asked for."""
    tokens, logits, places, block = carry
    B, K, C = asked.shape[0], self.tree.depth, CATCH_UP
    n, size = self.copies.num_nodes, block.positions.shape[1]
    sampling = own_temperature(context.sampling, self.temperature)
    pending = self.asks.pending(reading)

    def accept(p, num, copied: Draft, out, drawn):
      """Verifies what was copied; writes what was drawn."""
      tokens, logits, places = drawn
      live = jnp.arange(K)[None] < num[:, None]
      before = add_counts(context.counts, tokens, live)

      def law_at(node):
        seen = at_node(copied.visible, node)
        after = path_counts(before, copied.tokens, seen)
        here = at_node(out.logits, node)
        return law(self.asks.scores(here, sampling, after), sampling)

      depth = self.copies.depth
      j = jnp.arange(depth + 1)[None]
      uniform = jnp.minimum(1 + num[:, None] + j, K)
      verdict = verify(
        Noise(
          draft=jnp.zeros((B, n)),
          accept=jnp.zeros((B, n)),
          residual=jnp.zeros((B,)),
          plain=jnp.take_along_axis(noise.draft, uniform, 1),
        ),
        law_at,
        copied,
        depth,
      )
      more = jnp.where(num < asked, verdict.num_tokens, 0)
      put = jax.vmap(lambda old, i, new: old.at[i].set(new, mode="drop"))
      new = j < more[:, None]
      at = jnp.where(new, num[:, None] + j, K + 1)
      tokens = put(tokens, at, verdict.tokens)
      node = jnp.maximum(verdict.path, 0)
      places = put(places, at, C - 1 + p * n + node)
      if logits is not None:
        found = take_nodes(out.logits, node)
        found = self.asks.fit(found).astype(jnp.float32)
        logits = put(logits, at, found)
      return num + more, (tokens, logits, places)

    out = self.asks.read_root(
      params,
      reading,
      context,
      (copied.tokens[:, 1:], copied.depths[:, 1:], copied.visible[:, 1:, 1:]),
    )
    num, drawn = accept(
      0, jnp.zeros_like(asked), copied, out, (tokens, logits, places)
    )

    def goes_on(carry):
      return (carry[1] < asked).any()

    def again(carry):
      p, num, (tokens, logits, places), block = carry
      copied, _ = self._copy(params, state, context, tokens, num, asked)
      start = C - 1 + p * n
      # Pending tokens, what was drawn and read before, and its own branch.
      held = (places[:, :, None] == jnp.arange(size)[None, None]).any(1)
      held = held.at[:, :C].set(pending)
      visible = jnp.broadcast_to(held[:, None], (B, n, size))
      visible = lax.dynamic_update_slice_in_dim(
        visible, copied.visible, start, 2
      )
      root = (context.length - 1 + num)[:, None]
      out = self.asks.read(
        params,
        copied.tokens,
        root + copied.depths,
        reading.cache,
        block,
        visible,
        start=start,
      )
      num, drawn = accept(p, num, copied, out, (tokens, logits, places))
      return p + 1, num, drawn, out.block

    _, _, (tokens, logits, places), block = lax.while_loop(
      goes_on, again, (jnp.int32(1), num, drawn, out.block)
    )
    return tokens, logits, places, block

  def update(self, params, carry, draft, verdict, output):
    """Commits what the draft read; the inner drafter sees the text alone."""
    reading, places, copied, copied_carry = carry
    path = verdict.path[:, 1:]
    # Node i of the chain is its i-th token.
    where = jnp.take_along_axis(places, jnp.maximum(path, 0), 1)
    where = jnp.where(path >= 0, where, -1)
    node = jnp.arange(self.copies.num_nodes)[None]
    nowhere = jnp.where(node == 0, 0, jnp.full_like(copied.parents, -1))
    return {
      "inner": tell(
        self.parts,
        "inner",
        params,
        copied_carry,
        copied,
        nowhere,
        draft,
        verdict,
        output,
      ),
      "model": self.asks.commit(reading, where, verdict.num_tokens > 0),
    }
