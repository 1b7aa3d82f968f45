"""Every type and protocol of spec_jax: the page to read first.

Letters for shapes: `B` rows, `T` tokens fed in one call, `S` cache slots, `N`
nodes of a draft tree (root included), `K` depth, `V` vocabulary, `D` width,
`H` query heads, `G` key/value heads, `E` head width, `W` token buffer, `L`
layers, `A` tapped layers.

Words: the *target* is the model whose output law is kept; the *draft*
proposes; a *law* is a distribution over tokens; a *node* is a proposed token
in a tree whose *root* is the last committed token; to *commit* is to make
tokens part of the row's text; the *bonus token* is the one drawn from the
target after the last accepted node.

Pytrees of arrays are `flax.struct.dataclass`; bundles of pure functions are
`NamedTuple`s and never pass through `jit`. A field that is `None` is compiled
out: the structure of the pytree is the static part, the arrays are not.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax

Array = jax.Array
PyTree = Any

# How the token of a draft node was drawn (`Draft.law`).
IID = 0
WITHOUT_REPLACEMENT = 1
DETERMINISTIC = 2

# Why a row stopped (`SpecState.finish_reason`).
RUNNING = 0
STOP_ID = 1
STOP_STRING = 2
LENGTH = 3
FINISH_REASONS = ("running", "stop", "stop_string", "length")


@flax.struct.dataclass
class Cache:
  """Keys and values of committed tokens; read-only inside `Model.apply`.

  Slot of the token at position `p` in a layer with `R` slots: `p % R`. Global
  layers have `R = S` slots, sliding-window layers `min(S, window - 1)`.

  Attributes:
    k: per layer `[B, G, R, E]`, or one stacked `[L, B, G, R, E]` when the
      model scans its layers.
    v: like `k`.
    length: `[B]` int32, tokens held; positions `0 .. length - 1`.
    memory: encoder keys and values, or None for decoder-only models.
  """

  k: tuple[Array, ...]
  v: tuple[Array, ...]
  length: Array
  memory: PyTree = None


@flax.struct.dataclass
class Block:
  """Keys and values of the tokens being read now; not part of the cache.

  Attributes:
    k: per layer `[B, N, G, E]` (stacked: `[L, B, N, G, E]`).
    v: like `k`.
    positions: `[B, N]` int32.
  """

  k: tuple[Array, ...]
  v: tuple[Array, ...]
  positions: Array


@flax.struct.dataclass
class Output:
  """What a model returns.

  Attributes:
    logits: `[B, R, V]` float32, at the `R` tokens that `logits_at` names, or
      at all `T`.
    hidden: `[B, T, A, D]`, the tapped layers' outputs; by default one tap, the
      final normalised hidden state.
    block: the block with the `T` tokens written; None without a cache.
  """

  logits: Array
  hidden: Array
  block: Block | None


class Tree(NamedTuple):
  """A static tree of draft nodes; numpy arrays, closed over by a drafter.

  Attributes:
    parents: `[N]` int32; `parents[0] = -1`, `parents[i] < i`, breadth first.
    depths: `[N]` int32, 0 for the root.
    visible: `[N, N]` bool; `visible[i, j]`: `j` is `i` or its ancestor.
  """

  parents: Any
  depths: Any
  visible: Any

  @property
  def num_nodes(self) -> int:
    """Nodes, root included."""
    return len(self.parents)

  @property
  def depth(self) -> int:
    """Depth of the deepest node."""
    return int(self.depths.max())


@flax.struct.dataclass
class Draft:
  """Proposed tokens and how each was drawn.

  Rules of law: `acceptable[i]` may depend on what was known before token `i`
  was drawn, never on token `i`, unless the node is DETERMINISTIC. `probs` is
  the law after the same warping as the draw. The order of siblings (by index)
  is part of the law.

  Attributes:
    tokens: `[B, N]` int32; node 0 is the last committed token.
    parents: `[B, N]` int32, -1 for the root.
    depths: `[B, N]` int32.
    visible: `[B, N, N]` bool, ancestors and self.
    law: `[B, N]` int32: IID, WITHOUT_REPLACEMENT or DETERMINISTIC.
    probs: `[B, N, V]` float32 or None when every node is deterministic; row
      `i` is the law the children of node `i` were drawn from.
    acceptable: `[B, N]` bool; refused nodes are False. Node 0 is ignored.
    read: `[B, N]` bool, nodes the target reads for the drafter's own use
      though they cannot be accepted; None = there are none.
    cheap: `[B, N]` bool, nodes that a drafter with a `cheap_depth` would also
      have proposed without its dearer part; None = nobody asks.
  """

  tokens: Array
  parents: Array
  depths: Array
  visible: Array
  law: Array
  probs: Array | None
  acceptable: Array
  read: Array | None = None
  cheap: Array | None = None


@flax.struct.dataclass
class Noise:
  """Uniforms in [0, 1) of one step, one stream a purpose.

  Attributes:
    draft: `[B, N]`, to draw node `i`.
    accept: `[B, N]`, to accept node `i`.
    residual: `[B]`, to draw the token after a refusal.
    plain: `[B, K + 1]`, draws from the target's law at the positions
      `length .. length + K`; used only when that token is emitted.
  """

  draft: Array
  accept: Array
  residual: Array
  plain: Array


@flax.struct.dataclass
class Verdict:
  """What verification decided.

  Attributes:
    path: `[B, K + 1]` int32 node indices, root first, -1 after.
    tokens: `[B, K + 1]` int32: accepted tokens, then the corrected or bonus
      token, -1 after.
    num_accepted: `[B]` int32 draft tokens accepted.
    num_tokens: `[B]` int32 tokens to commit: `num_accepted + 1`, cut by stops
      and limits, 0 for a done row.
    accept_prob: `[B, N]` float32, probability with which the walk accepted a
      node it tried by the ratio rule; 0 for a node it did not try.
    residual: `[B, V]` float32, the law the last token was drawn from.
    plain: `[B, K + 1]` bool, True where a token was a plain draw from the
      target's law.
    divergence: `[B, K + 1]` float32, of a lossy rule: total variation between
      the law a token was drawn from, given the text before it (and the draft,
      where the rule draws nothing), and the target's; None for a lossless rule.
    hidden: `[B, K + 1, A, D]`, the target's hidden states at the nodes of the
      path, junk after it; None unless the drafter looks at them.
  """

  path: Array
  tokens: Array
  num_accepted: Array
  num_tokens: Array
  accept_prob: Array
  residual: Array
  plain: Array
  divergence: Array | None = None
  hidden: Array | None = None


@flax.struct.dataclass
class Sampling:
  """Sampling settings, one array entry a row; None = not in use, compiled out.

  Order of application (the transformers library's): repetition, presence and
  frequency penalties, bias (bans are -inf), stop ids before `min_new_tokens`;
  temperature; top-k; top-p; min-p; renormalise.

  Attributes:
    temperature: `[B]` float32, 0 = greedy. None = every row greedy.
    top_k: `[B]` int32, 0 = off; ties at the k-th place are kept.
    top_p: `[B]` float32 in (0, 1], 1 = off; the token that crosses the
      threshold and its ties are kept.
    min_p: `[B]` float32 in [0, 1], 0 = off, relative to the largest.
    repetition_penalty: `[B]` float32 > 0, 1 = off; prompt and output.
    presence_penalty: `[B]` float32, 0 = off; output only.
    frequency_penalty: `[B]` float32, 0 = off; output only.
    bias: `[B, V]` float32 added to the logits; -inf bans a token.
    min_new_tokens: `[B]` int32; stop ids are banned before it.
  """

  temperature: Array | None = None
  top_k: Array | None = None
  top_p: Array | None = None
  min_p: Array | None = None
  repetition_penalty: Array | None = None
  presence_penalty: Array | None = None
  frequency_penalty: Array | None = None
  bias: Array | None = None
  min_new_tokens: Array | None = None


@flax.struct.dataclass
class Counts:
  """What penalties and `min_new_tokens` look at; fields not in use are None.

  Attributes:
    prompt: `[B, V]` bool, token occurs in the prompt.
    output: `[B, V]` int32, occurrences in the output so far.
    num_output: `[B]` int32, output tokens so far.
    stop_ids: `[B, n]` int32, -1 padded; banned before `min_new_tokens`.
  """

  prompt: Array | None = None
  output: Array | None = None
  num_output: Array | None = None
  stop_ids: Array | None = None


@flax.struct.dataclass
class Stops:
  """Stop ids, and stop strings as an automaton over tokens.

  Attributes:
    ids: `[B, n]` int32, -1 padded.
    state: `[B]` int32, state of the automaton; None without stop strings.
    patterns: `[B]` uint32, bit `i` set: stop string `i` counts in this row.
    first: `[B]` int32, output tokens before which no stop string counts.
  """

  ids: Array
  state: Array | None = None
  patterns: Array | None = None
  first: Array | None = None


@flax.struct.dataclass
class Tally:
  """Counts of one row since its prompt was read.

  Attributes:
    num_steps: `[B]` int32 steps (target passes) taken while not done.
    num_drafted: `[B]` int32 acceptable nodes proposed.
    num_accepted: `[B]` int32 draft tokens accepted and kept.
    drafted_at: `[B, K]` int32, steps in which depth `i + 1` had an acceptable
      node under an accepted path (the chance was there).
    accepted_at: `[B, K]` int32, steps in which depth `i + 1` was accepted.
    divergence: `[B]` float32, sum of `Verdict.divergence` over the tokens kept;
      None for a lossless rule.
  """

  num_steps: Array
  num_drafted: Array
  num_accepted: Array
  drafted_at: Array
  accepted_at: Array
  divergence: Array | None = None


@flax.struct.dataclass
class SpecState:
  """Everything the next step needs; every leaf leads with `B`.

  Attributes:
    tokens: `[B, W]` int32, prompt and output.
    prompt_length: `[B]` int32.
    length: `[B]` int32 committed tokens; the cache holds `length - 1`.
    limit: `[B]` int32, `length` never exceeds it.
    done: `[B]` bool.
    finish_reason: `[B]` int32, see `FINISH_REASONS`.
    sampling: settings per row.
    stops: stop ids and stop strings.
    counts: for penalties, or None.
    logprobs: `[B, W]` float32 log-probability of each output token, or None.
    tally: counts for the report.
    target: the target's cache.
    draft: the drafter's state.
    policy: the length policy's state.
    keys: `[B]` random keys; never split, only folded (see `draw_noise`).
  """

  tokens: Array
  prompt_length: Array
  length: Array
  limit: Array
  done: Array
  finish_reason: Array
  sampling: Sampling
  stops: Stops
  counts: Counts | None
  logprobs: Array | None
  tally: Tally
  target: Cache
  draft: PyTree
  policy: PyTree
  keys: Array


@flax.struct.dataclass
class SpecInfo:
  """What one step did; not needed by the next.

  Attributes:
    num_drafted: `[B]` int32 acceptable nodes.
    num_accepted: `[B]` int32 draft tokens kept.
    num_tokens: `[B]` int32 tokens committed.
    draft: the draft, verdict and laws when tracing, else None.
    verdict: like `draft`.
    laws: `[B, K + 1, V]` float32, the target's law at each node of the path.
  """

  num_drafted: Array
  num_accepted: Array
  num_tokens: Array
  draft: Draft | None = None
  verdict: Verdict | None = None
  laws: Array | None = None


@flax.struct.dataclass
class Outcome:
  """What a length policy learns from a step.

  Attributes:
    asked: `[B]` int32, the level it asked for, cut by what room was left.
    running: `[B]` bool, rows that were not done.
    chance: `[B, K]` bool, depth `i + 1` had an acceptable node under an
      accepted path.
    accepted: `[B, K]` bool, depth `i + 1` was accepted.
    widened: `[B]` bool, whether the target read more nodes than the root for
      this row, or a draft model was asked.
    num_tokens: `[B]` int32, tokens committed.
    cheap: what the nodes of `Draft.cheap` alone had come to, as
      (chance, accepted, widened); None = there are none.
  """

  asked: Array
  running: Array
  chance: Array
  accepted: Array
  widened: Array
  num_tokens: Array
  cheap: tuple[Array, Array, Array] | None = None


@flax.struct.dataclass
class Context:
  """What a drafter may look at while it proposes.

  Attributes:
    tokens: `[B, W]` int32.
    length: `[B]` int32.
    done: `[B]` bool.
    max_depth: `[B]` int32; nodes deeper than it will be refused.
    sampling: settings per row.
    counts: for penalties, or None.
    extend: `extend(law_BnV) -> [B, n]` bool, the length policy's word on
      whether nodes get children, given the draft's law at temperature 1 after
      each, before they are drawn; None = always.
    cheap: `[B]` bool, rows in which a drafter with a `cheap_depth` shall not
      ask its dearer part; None = none.
  """

  tokens: Array
  length: Array
  done: Array
  max_depth: Array
  sampling: Sampling
  counts: Counts | None
  extend: Callable | None = flax.struct.field(pytree_node=False, default=None)
  cheap: Array | None = None


@flax.struct.dataclass
class Chunk:
  """A piece of a prompt being read.

  Attributes:
    tokens: `[B, C]` int32.
    positions: `[B, C]` int32.
    num: `[B]` int32, how many of them are real.
    upto: `[B]` int32, positions before it will be read in all.
    all_tokens: `[B, W]` int32, the rows' whole buffers.
  """

  tokens: Array
  positions: Array
  num: Array
  upto: Array
  all_tokens: Array


class Model(NamedTuple):
  """A language model as pure functions.

  Attributes:
    init: `init(key) -> params`, random weights.
    axes: `axes() -> pytree like params` of tuples of logical axis names.
    init_cache: `init_cache(batch, slots) -> Cache`, empty.
    apply: `apply(params, tokens_BT, positions_BT, cache, block, visible_BTN,
      *, start=0, logits_at=None, segment_ids=None) -> Output`. Reads the slots
      below `cache.length` and the nodes of `block` that `visible` allows; the
      `T` tokens become nodes `start .. start + T - 1` of the block.
      `logits_at: [B, R]` int32 in `[0, T)` asks for `R` rows of logits only
      (`R = 0`: none). With `cache=None`, `block=None` and `visible=None` it is
      a causal forward for training, `segment_ids: [B, T]` keeping packed
      sequences apart.
    embed: `embed(params, tokens) -> [..., D]`.
    unembed: `unembed(params, hidden) -> logits [..., V]` float32.
    config: the architecture (`vocab_size`, `max_length`, ...).
    tap: `tap(taps) -> Model`, the same model whose `Output.hidden` holds the
      residual streams after so many layers; None = it has none.
  """

  init: Callable
  axes: Callable
  init_cache: Callable
  apply: Callable
  embed: Callable
  unembed: Callable
  config: Any
  tap: Callable | None = None


class Drafter(NamedTuple):
  """A way to propose tokens, as pure functions.

  `params` is the whole `{"target": ..., "draft": ..., "tables": ...}`.

  Attributes:
    init: `init(batch) -> state`, every leaf leading with `batch`.
    prefill: `prefill(params, state, chunk, output) -> state`; `output` is the
      target's on that chunk.
    propose: `propose(params, noise, state, context) -> (Draft, carry)`.
    update: `update(params, carry, draft, verdict, output) -> state`; `verdict`
      is already cut by stops and limits, done rows have `num_tokens` 0. A part
      of another drafter may be told of more tokens than its own `K + 1`, see
      `combining.tell`.
    num_nodes: `N`, root included.
    depth: `K`.
    asks_policy: whether `propose` calls `context.extend`; drafters that copy
      have no law to show it.
    fills: whether nearly every step proposes all the nodes it may: then one
      width of the target's pass is enough.
    laws: how nodes are drawn where a row samples: some of IID,
      WITHOUT_REPLACEMENT and DETERMINISTIC.
    tables: numpy arrays that its functions find in `params["tables"]`, shared
      by all rows; None = it has none.
    vocabulary: hash of the tokenizer the tables were made with, or None.
    keep: `keep(old, new) -> state`, what a row that is refilled keeps of its
      old state, `new` having read the new prompt; None = nothing.
    host_driven: whether a step waits for the host.
    greedy_only: whether it is defined for greedy rows only.
    catches_up: whether it must read, when asked again, all tokens committed
      since it was asked last.
    alternates: whether now one part serves a row and now another, so that
      steps of one depth cost differently.
    cheap_depth: depth of the part that it can be asked for alone, without the
      one that asks a model; None = it always asks all it has.
    reads: whether it has nodes read for its own use (`Draft.read`).
    taps: which of the target's hidden states it looks at: numbers of layers,
      () = the final normalised one, None = at none.
  """

  init: Callable
  prefill: Callable
  propose: Callable
  update: Callable
  num_nodes: int
  depth: int
  asks_policy: bool = False
  fills: bool = False
  laws: tuple[int, ...] = (DETERMINISTIC,)
  tables: PyTree = None
  vocabulary: str | None = None
  keep: Callable | None = None
  host_driven: bool = False
  greedy_only: bool = False
  catches_up: bool = False
  alternates: bool = False
  cheap_depth: int | None = None
  reads: bool = False
  taps: tuple[int, ...] | None = None


class LengthPolicy(NamedTuple):
  """How deep to draft; a static `N` and `K` bound it.

  Attributes:
    init: `init(batch) -> state`, every leaf leading with `batch`. A row keeps
      it when it is refilled.
    level: `level(state, running, costs) -> [B]` int32, the depth, or another
      level of `spec_jax/levels.py`; `running: [B]` bool, `costs: [L + 1]`
      float32 seconds of a step by level, and, if there is one more, of one
      token of catching up; or None.
    update: `update(state, outcome) -> state`.
    extend: `extend(state, law_BnV) -> [B, n]` bool, see `Context`; or None.
    needs_costs: whether `level` reads `costs`.
    follows: whether costs that were measured are followed while an engine
      decodes; needs `state` to be a `cost_policy.CostState`.
    knows_ways: whether levels above `K` are meant as such; else they are cut.
    restart: `restart(state) -> state`, for rows that begin another prompt; None
      = they go on.
  """

  init: Callable
  level: Callable
  update: Callable
  extend: Callable | None = None
  needs_costs: bool = False
  follows: bool = False
  knows_ways: bool = False
  restart: Callable | None = None
