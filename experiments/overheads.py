"""Measures what drafting from tables and verifying cost beside a target pass.

  python -m experiments.overheads --out=experiments/results/overheads.json

Each drafter that asks no draft model and is sure of its tokens: `propose` and
`update` compiled alone, on the state of a row that has read a real prompt and
written some of its answer, against the target's pass over one token. The walk
of verification over 64 nodes, all of it accepted to the deepest leaf, against
the target's pass of that width. All cases take turns and medians count; the
time of a call that does nothing with the same arguments is taken off. Nothing
else should run.

A drafter that looks at the target's logits (recycling's top-k, lookahead's
window) has no limit: what it takes is reported.
"""

from collections.abc import Callable
import dataclasses
import json
from pathlib import Path
import re
from typing import Any
import warnings

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from experiments import launch, prompts as prompt_files, results, show, timing
import spec_jax
from spec_jax import Settings, drafters, tree as trees
from spec_jax.base import (
  DETERMINISTIC,
  IID,
  Context,
  Counts,
  Draft,
  Drafter,
  Noise,
  Sampling,
  Tree,
)
from spec_jax.cache import empty_block
from spec_jax.drafting import static_tree
from spec_jax.engine import Engine
from spec_jax.generate import make_engine
from spec_jax.nodes import at_node
from spec_jax.sampling import no_noise, path_counts, warp
from spec_jax.verify import verify
from spec_jax.work import plan

_MODEL = flags.DEFINE_string("model", "smollm2-135m-instruct", "The target.")
_OUT = flags.DEFINE_string("out", "", "JSON file to write.")
_CORPUS = flags.DEFINE_string(
  "corpus", "", "An index of a corpus, for drafters that read one."
)
_DRAFTERS = flags.DEFINE_string(
  "drafters", "", "Regular expression: drafters to time."
)
_ROUNDS = flags.DEFINE_integer("rounds", 31, "Counted repetitions.")
_SLOTS = flags.DEFINE_integer("slots", 512, "Tokens a row has room for.")
_HELD = 200  # tokens behind a timed pass
_WRITTEN = 16  # steps of the answer before a drafter is timed

# Of drafters that are made of others: none that asks a model.
_OPTIONS: dict[str, dict[str, Any]] = {
  name: {"first": "prompt_lookup", "second": "recycling"}
  for name in ("first_of", "merge")
}

# Those that look at the target's logits, here by way of `_OPTIONS` too.
_READS_LOGITS = ("recycling", "lookahead", *_OPTIONS)

# Shares of a target pass that must not be passed.
DRAFTER_LIMIT, VERIFY_LIMIT = 0.02, 0.05
NUM_NODES = 64
# 7 chains of 9, and one of 63; listed level by level.
TREES = {
  "7 chains of 9": (-1, *([0] * 7), *range(1, NUM_NODES - 7)),
  "chain of 63": tuple(range(-1, NUM_NODES - 1)),
}
SAMPLINGS = {
  "greedy": Settings(),
  "T=.7 top-p .9": Settings(temperature=0.7, top_p=0.9),
}


def sampling_of(settings: Settings) -> Sampling:
  """Returns the arrays of one row's temperature and top-p; greedy: none."""
  if settings.temperature == 0:
    return Sampling()
  return Sampling(
    temperature=jnp.array([settings.temperature], jnp.float32),
    top_p=jnp.array([settings.top_p], jnp.float32),
  )


# --- drafters ---------------------------------------------------------------


@dataclasses.dataclass
class Piece:
  """A compiled function that is timed on fresh copies of what it consumes.

  Attributes:
    function: takes (params, consumed, *rest); the second is donated, as the
      loop's state is.
    params: first argument.
    consumed: second argument.
    rest: further arguments.
  """

  function: Callable
  params: Any
  consumed: Any
  rest: tuple

  def __post_init__(self):
    # Arguments that are not looked at are passed too, so that the idle piece
    # has as many of them.
    self._jitted = jax.jit(self.function, donate_argnums=1, keep_unused=True)

  def __call__(self) -> float:
    """Returns the seconds of one call; copying is not part of it.

    Of the second of two: the first brings the call's own data near, which
    other cases have driven out.
    """
    with warnings.catch_warnings():
      # What a function only reads cannot be donated.
      warnings.filterwarnings("ignore", message="Some donated buffers")
      for _ in range(2):
        copy = jax.block_until_ready(jax.tree.map(jnp.copy, self.consumed))
        seconds = timing.timed(self._jitted, self.params, copy, *self.rest)
    return seconds

  def result(self) -> Any:
    """Returns what the function returns, nothing consumed."""
    return jax.jit(self.function)(self.params, self.consumed, *self.rest)

  def idle(self) -> "Piece":
    """Returns the piece that returns what it consumes, as it was."""
    nothing = lambda params, consumed, *rest: consumed
    return Piece(nothing, self.params, self.consumed, self.rest)


def pieces_of(engine: Engine, job: Any) -> dict[str, Piece]:
  """Returns a drafter's `propose` and `update` on a row that is under way."""
  drafter, model = engine.programs.drafter, engine.model
  N, K = drafter.num_nodes, drafter.depth
  state, _ = engine.read([job], [0], engine.programs.empty(), None)
  limits = jnp.int32(_WRITTEN), jnp.int32(2)
  (state, _), _ = engine.timed(engine.programs.decode, state, *limits)
  context = Context(
    tokens=state.tokens,
    length=state.length,
    done=jnp.zeros((1,), bool),
    max_depth=jnp.full((1,), K, jnp.int32),
    sampling=state.sampling,
    counts=Counts(
      num_output=state.length - state.prompt_length,
      stop_ids=state.stops.ids,
    ),
  )
  noise = no_noise(1, N, K)

  def propose(params, draft_state, context):
    return drafter.propose(params, noise, draft_state, context)

  proposing = Piece(propose, engine.params, state.draft, (context,))
  draft, carry = proposing.result()

  @jax.jit
  def judge(params, cache, draft):
    positions = cache.length[:, None] + draft.depths
    block = empty_block(cache, N)
    output = model.apply(
      params["target"], draft.tokens, positions, cache, block, draft.visible
    )

    def law_at(node):
      return warp(at_node(output.logits, node), Sampling(), Counts())

    return verify(noise, law_at, draft, K), output

  verdict, output = judge(engine.params, state.target, draft)

  def update(params, carry, draft, verdict, output):
    return drafter.update(params, carry, draft, verdict, output)

  rest = (draft, verdict, output)
  return {
    "propose": proposing,
    "update": Piece(update, engine.params, carry, rest),
  }


def drafter_pieces(
  loaded,
) -> tuple[dict[tuple[str, str], Piece], dict[str, int]]:
  """Returns (drafter, part) -> what is timed, and drafter -> nodes proposed.

  Says which drafters are left out: those that cannot be built without a draft
  model, an index or the like.
  """
  prompt = prompt_files.bench_sets()["edit"][0]
  chats = prompt_files.with_template(loaded.tokenizer, [prompt], "auto", "")
  settings = Settings(max_new_tokens=128, stop_ids=())
  work = plan(loaded, chats, settings, 0)
  found: dict[tuple[str, str], Piece] = {}
  proposed: dict[str, int] = {}
  for name in drafters.names():
    if not re.search(_DRAFTERS.value, name):
      continue
    options = dict(_OPTIONS.get(name, {}))
    if _CORPUS.value and "corpus" in drafters.options(name):
      options["corpus"] = _CORPUS.value
    try:
      engine = make_engine(
        loaded,
        work,
        drafter=name,
        options=options,
        batch_size=1,
        slots=_SLOTS.value,
      )
    except ValueError as error:
      show.note(f"left out: {name}: {error}")
      continue
    drafter: Drafter = engine.programs.drafter
    certain = engine.programs.same_text(greedy=False)
    if not drafter.depth:
      continue
    if not certain or drafter.host_driven:
      show.note(f"left out: {name}: it draws from a law, or waits for the host")
      continue
    show.note(f"preparing {name}")
    for part, piece in pieces_of(engine, work.jobs[0]).items():
      found[name, part] = piece
      found[name, f"{part} call"] = piece.idle()
    draft, _ = found[name, "propose"].result()
    proposed[name] = int(draft.acceptable.sum())
  return found, proposed


def drafter_lines(ms: dict, pass_ms: float) -> list[dict[str, Any]]:
  """Returns what each drafter's parts take beside the target's pass.

  Args:
    ms: medians by (drafter, part), "propose", "update" and the same with
      " call", which is taken off.
    pass_ms: of the target over one token.
  """
  lines = []
  for name in dict.fromkeys(drafter for drafter, _ in ms):
    parts = {
      part: max(ms[name, part] - ms[name, f"{part} call"], 0.0)
      for part in ("propose", "update")
    }
    share = sum(parts.values()) / pass_ms
    limit = None if name in _READS_LOGITS else DRAFTER_LIMIT
    lines.append(
      {
        "drafter": name,
        **{f"{part}_ms": x for part, x in parts.items()},
        "call_ms": ms[name, "propose call"] + ms[name, "update call"],
        "pass_ms": pass_ms,
        "share": share,
        "limit": limit,
        "met": limit is None or share <= limit,
      }
    )
  return lines


# --- verification -----------------------------------------------------------


def accepted_draft(
  tree: Tree, vocab_size: int, law: int, seed: int = 0
) -> tuple[Draft, jax.Array]:
  """Returns a draft and logits `[1, N, V]` that accept its first-child path.

  The likeliest token after each node, by far, is that of its first child;
  the other nodes' tokens are others.

  Args:
    tree: of the nodes.
    vocab_size: `V`.
    law: of all nodes, DETERMINISTIC or IID; `probs` are the target's own.
    seed: of the logits.
  """
  random = np.random.default_rng(seed)
  N = tree.num_nodes
  scores = 2 * random.standard_normal((N, vocab_size), np.float32)
  tokens = random.permutation(vocab_size)[:N].astype(np.int32)
  for node in range(N):
    children = np.flatnonzero(tree.parents == node)
    likely = tokens[children[0]] if children.size else tokens[node]
    scores[node, likely] += 30
  logits = jnp.asarray(scores)[None]
  draft = Draft(
    tokens=jnp.asarray(tokens)[None],
    **static_tree(tree, 1),
    law=jnp.full((1, N), law, jnp.int32),
    probs=None if law == DETERMINISTIC else jax.nn.softmax(logits, -1),
    acceptable=jnp.arange(N)[None] > 0,
  )
  return draft, logits


def walk(params, logits, draft: Draft, sampling: Sampling, noise: Noise):
  """Verifies a draft as a step does: a law at each node arrived at."""
  del params

  def law_at(node):
    after = path_counts(Counts(), draft.tokens, at_node(draft.visible, node))
    return warp(at_node(logits, node), sampling, after)

  return verify(noise, law_at, draft, noise.plain.shape[1] - 1)


def verify_pieces(vocab_size: int) -> dict[tuple[str, str, str], Piece]:
  """Returns (tree, law, sampling) -> the walk that is timed."""
  found = {}
  for shape, parents in TREES.items():
    tree = trees.from_parents(parents)
    noise = jax.tree.map(
      lambda x: x + 0.5, no_noise(1, tree.num_nodes, tree.depth)
    )
    show.note(f"preparing verification of {shape}")
    for kind, law in (("deterministic", DETERMINISTIC), ("iid", IID)):
      draft, logits = accepted_draft(tree, vocab_size, law)
      for name, settings in SAMPLINGS.items():
        rest = (draft, sampling_of(settings), noise)
        piece = Piece(walk, None, logits, rest)
        accepted = int(piece.result().num_accepted[0])
        assert accepted == tree.depth, f"{accepted} of {tree.depth} accepted"
        found[shape, kind, name] = piece
  return found


def main() -> None:
  """Times everything in turn; prints and writes the shares."""
  loaded = spec_jax.load(_MODEL.value)
  model, params = loaded.model, loaded.params
  cases: dict[Any, Callable[[], float]] = {
    ("pass", width): timing.pass_of(
      model, params, width, 1, slots=_SLOTS.value, held=_HELD
    )
    for width in (1, NUM_NODES)
  }
  parts, proposed = drafter_pieces(loaded)
  walks = verify_pieces(model.config.vocab_size)
  for key, piece in walks.items():
    cases["verify", key] = piece
    cases["verify call", key] = piece.idle()
  cases |= {("drafter", key): piece for key, piece in parts.items()}
  show.note(f"compiling and timing {len(cases)} cases, {_ROUNDS.value} rounds")
  ms = timing.medians(timing.take_turns(cases, _ROUNDS.value))
  wide = ms["pass", NUM_NODES]
  lines = drafter_lines(
    {key: ms["drafter", key] for key in parts}, ms["pass", 1]
  )
  for line in lines:
    line["proposed"] = proposed[line["drafter"]]
    limit = "no limit"
    if line["limit"] is not None:
      limit = f"<= {100 * line['limit']:.0f} %"
    print(
      f"{line['drafter']}: propose {line['propose_ms']:.3f} ms, update "
      f"{line['update_ms']:.3f} ms, {100 * line['share']:.1f} % of a pass "
      f"({limit}), {line['proposed']} nodes"
      f"{'' if line['met'] else '  MISSED'}"
    )
  verified = []
  for key in walks:
    own = max(ms["verify", key] - ms["verify call", key], 0.0)
    share = own / wide
    verified.append(
      {
        **dict(zip(("tree", "law", "sampling"), key, strict=True)),
        "nodes": NUM_NODES,
        "verify_ms": own,
        "pass_ms": wide,
        "share": share,
        "limit": VERIFY_LIMIT,
        "met": share <= VERIFY_LIMIT,
      }
    )
    print(
      f"verify {', '.join(key)}: {own:.3f} ms, {100 * share:.1f} % of a pass "
      f"over {NUM_NODES} tokens (<= {100 * VERIFY_LIMIT:.0f} %)"
      f"{'' if share <= VERIFY_LIMIT else '  MISSED'}"
    )
  if _OUT.value:
    record = {
      "environment": results.environment(),
      "model": _MODEL.value,
      "slots": _SLOTS.value,
      "rounds": _ROUNDS.value,
      "drafters": lines,
      "verify": verified,
    }
    Path(_OUT.value).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
  launch.run(main)
