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
window) has no limit: what it takes is reported. So is what the drafts that
ship for the model take, for each of their passes and for a whole step: the
draft-to-target cost ratio `c` of Leviathan et al. 2023.
"""

from collections.abc import Callable, Sequence
import dataclasses
import json
from pathlib import Path
from typing import Any

from absl import flags
import jax
import jax.numpy as jnp

from experiments import (
  checks,
  launch,
  prompts as prompt_files,
  results,
  show,
  timing,
  walk_cost,
)
from spec_jax import Settings, corpus, drafters, hub, shipped
from spec_jax.base import (
  Context,
  Counts,
  Drafter,
  Sampling,
)
from spec_jax.cache import empty_block
from spec_jax.drafting import shown_to
from spec_jax.engine import Engine
from spec_jax.generate import make_engine
from spec_jax.nodes import at_node, take_nodes
from spec_jax.sampling import no_noise, warp
from spec_jax.verify import verify
from spec_jax.work import Work

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
_TOKENS = 128  # of an answer at most
_WRITTEN = 16  # steps of the answer before a drafter is timed

# Of drafters that are made of others: none that asks a model.
_OPTIONS: dict[str, dict[str, Any]] = {
  name: {"first": "prompt_lookup", "second": "recycling"}
  for name in ("first_of", "merge")
}

# Those that look at the target's logits, here by way of `_OPTIONS` too.
_READS_LOGITS = ("recycling", "lookahead", *_OPTIONS)

# Name -> drafter and options of what drafts with a draft that ships.
_LEARNED: dict[str, tuple[str, dict[str, Any]]] = {
  "distilled layers, chain of 4": ("vanilla", {"num_draft": 4}),
  "Medusa heads, tree": ("medusa", {}),
  "EAGLE head, chain of 4": ("eagle", {"num_draft": 4}),
  "EAGLE head, tree": ("eagle", {}),
  "the default": ("merge", shipped.HEAD_OPTIONS),
}

# Passes of a draft in a step, where they are not as many as the tree is deep:
# Medusa's heads read the same state at once, copies need none.
_PASSES: dict[str, int] = {
  "medusa": 1,
  "merge": drafters.parse(shipped.HEAD_OPTIONS["second"])[1]["depth"],
}

# Shares of a target pass that must not be passed.
DRAFTER_LIMIT, VERIFY_LIMIT = 0.02, 0.05


def _plan(loaded: hub.Loaded) -> Work:
  """Returns the prompt that drafters read, checked with the flags.

  Raises:
    UserError: if it does not fit, or the index is none of the model's.
  """
  prompt = prompt_files.bench_sets()["edit"][0]
  settings = Settings(max_new_tokens=_TOKENS, stop_ids=())
  work = prompt_files.work_of(loaded, [prompt], settings)
  with launch.user_errors():
    if _CORPUS.value:
      index = corpus.load(_CORPUS.value)
      if index.tokenizer != loaded.hashes.get("tokenizer"):
        raise ValueError(
          f"corpus index {_CORPUS.value} was made with another tokenizer than "
          "the model's"
        )
  held = max(_HELD + walk_cost.NUM_NODES, len(work.jobs[0].ids) + _TOKENS)
  checks.slots(loaded, _SLOTS.value, held)
  return work


def pieces_of(engine: Engine, job: Any) -> dict[str, timing.Piece]:
  """Returns a drafter's `propose` and `update` on a row that is under way."""
  drafter = engine.programs.drafter
  model = shown_to(drafter, engine.model)
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

  proposing = timing.Piece(propose, engine.params, state.draft, (context,))
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

    verdict = verify(noise, law_at, draft, K)
    if drafter.taps is not None:
      path = jnp.maximum(verdict.path, 0)
      hidden = take_nodes(output.hidden, path)
      verdict = dataclasses.replace(verdict, hidden=hidden)
    return verdict, output

  verdict, output = judge(engine.params, state.target, draft)

  def update(params, carry, draft, verdict, output):
    return drafter.update(params, carry, draft, verdict, output)

  rest = (draft, verdict, output)
  return {
    "propose": proposing,
    "update": timing.Piece(update, engine.params, carry, rest),
  }


def with_calls(name: str, engine: Engine, job: Any) -> dict:
  """Returns (name, part) -> what is timed, and the call that does nothing."""
  show.note(f"preparing {name}")
  found = {}
  for part, piece in pieces_of(engine, job).items():
    found[name, part] = piece
    found[name, f"{part} call"] = piece.idle()
  return found


def learned_pieces(
  loaded, work: Work, wanted: Sequence[str]
) -> tuple[dict[tuple[str, str], timing.Piece], dict[str, Drafter]]:
  """Returns (name, part) -> what is timed, and name -> drafter, of `_LEARNED`.

  Says which are left out: those whose draft does not ship for the model.
  """
  found: dict[tuple[str, str], timing.Piece] = {}
  built: dict[str, Drafter] = {}
  for name, (drafter, options) in _LEARNED.items():
    if name not in wanted:
      continue
    draft = shipped.draft_for(loaded, drafter, options)
    if draft is None:
      show.note(f"left out: {name}: no draft for it ships for the model")
      continue
    engine = make_engine(
      loaded,
      work,
      drafter=drafter,
      draft=draft,
      options=options,
      batch_size=1,
      slots=_SLOTS.value,
    )
    found |= with_calls(name, engine, work.jobs[0])
    built[name] = engine.programs.drafter
  return found, built


def drafter_pieces(
  loaded, work: Work, wanted: Sequence[str]
) -> tuple[dict[tuple[str, str], timing.Piece], dict[str, int]]:
  """Returns (drafter, part) -> what is timed, and drafter -> nodes proposed.

  Says which drafters are left out: those that take a draft, and those that
  cannot be built without an index or the like.
  """
  found: dict[tuple[str, str], timing.Piece] = {}
  proposed: dict[str, int] = {}
  for name in drafters.names():
    if name not in wanted:
      continue
    options = dict(_OPTIONS.get(name, {}))
    # Before an engine is made: it would find a draft that ships by itself.
    if drafters.takes_draft(name, options):
      show.note(f"left out: {name}: it takes a draft")
      continue
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
    found |= with_calls(name, engine, work.jobs[0])
    draft, _ = found[name, "propose"].result()
    proposed[name] = int(draft.acceptable.sum())
  return found, proposed


def parts_ms(ms: dict, name: str) -> dict[str, float]:
  """Returns what a drafter's `propose` and `update` take, calls taken off."""
  return {
    part: max(ms[name, part] - ms[name, f"{part} call"], 0.0)
    for part in ("propose", "update")
  }


def learned_lines(
  ms: dict, built: dict[str, Drafter], passes_ms: dict[int, float]
) -> list[dict[str, Any]]:
  """Returns what drafting with trained drafts takes beside the target's pass.

  Args:
    ms: as for `drafter_lines`.
    built: the drafters, by name.
    passes_ms: of the target over 1 and as many tokens as each has nodes.
  """
  lines = []
  for name, drafter in built.items():
    parts, one = parts_ms(ms, name), passes_ms[1]
    drafting, block = sum(parts.values()), passes_ms[drafter.num_nodes]
    passes = _PASSES.get(_LEARNED[name][0], drafter.depth)
    lines.append(
      {
        "draft": name,
        "nodes": drafter.num_nodes,
        "passes": passes,
        **{f"{part}_ms": x for part, x in parts.items()},
        "pass_ms": one,
        "block_ms": block,
        "cost_ratio": parts["propose"] / passes / one,
        "share": drafting / one,
        "step": (drafting + block) / one,
      }
    )
  return lines


def drafter_lines(ms: dict, pass_ms: float) -> list[dict[str, Any]]:
  """Returns what each drafter's parts take beside the target's pass.

  Args:
    ms: medians by (drafter, part), "propose", "update" and the same with
      " call", which is taken off.
    pass_ms: of the target over one token.
  """
  lines = []
  for name in dict.fromkeys(drafter for drafter, _ in ms):
    parts = parts_ms(ms, name)
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


def main() -> None:
  """Times everything in turn; prints and writes the shares."""
  checks.at_least(1, _ROUNDS)
  wanted = checks.matching(_DRAFTERS, [*drafters.names(), *_LEARNED])
  checks.out_file(_OUT.value)
  opened = hub.inspect(_MODEL.value)
  work = _plan(opened.loaded)
  loaded = opened.read()
  model, params = loaded.model, loaded.params
  parts, proposed = drafter_pieces(loaded, work, wanted)
  learned, built = learned_pieces(loaded, work, wanted)
  widths = {1, walk_cost.NUM_NODES} | {x.num_nodes for x in built.values()}
  cases: dict[Any, Callable[[], float]] = {
    ("pass", width): timing.pass_of(
      model, params, width, 1, slots=_SLOTS.value, held=_HELD
    )
    for width in sorted(widths)
  }
  walks = walk_cost.verify_pieces(model.config.vocab_size)
  for key, piece in walks.items():
    cases["verify", key] = piece
    cases["verify call", key] = piece.idle()
  both = parts | learned
  cases |= {("drafter", key): piece for key, piece in both.items()}
  show.note(f"compiling and timing {len(cases)} cases, {_ROUNDS.value} rounds")
  ms = timing.medians(timing.take_turns(cases, _ROUNDS.value))
  wide = ms["pass", walk_cost.NUM_NODES]
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
  ratios = learned_lines(
    {key: ms["drafter", key] for key in learned},
    built,
    {width: ms["pass", width] for width in widths},
  )
  for line in ratios:
    print(
      f"{line['draft']}: a pass {line['cost_ratio']:.3f} of the target's, "
      f"drafting in a step {line['share']:.2f}, the step with the target's "
      f"pass over {line['nodes']} tokens {line['step']:.2f}"
    )
  verified = []
  for key in walks:
    own = max(ms["verify", key] - ms["verify call", key], 0.0)
    share = own / wide
    verified.append(
      {
        **dict(zip(("tree", "law", "sampling"), key, strict=True)),
        "nodes": walk_cost.NUM_NODES,
        "verify_ms": own,
        "pass_ms": wide,
        "share": share,
        "limit": VERIFY_LIMIT,
        "met": share <= VERIFY_LIMIT,
      }
    )
    print(
      f"verify {', '.join(key)}: {own:.3f} ms, {100 * share:.1f} % of a pass "
      f"over {walk_cost.NUM_NODES} tokens (<= {100 * VERIFY_LIMIT:.0f} %)"
      f"{'' if share <= VERIFY_LIMIT else '  MISSED'}"
    )
  if _OUT.value:
    record = {
      "environment": results.environment(),
      "model": _MODEL.value,
      "slots": _SLOTS.value,
      "rounds": _ROUNDS.value,
      "drafters": lines,
      "learned": ratios,
      "verify": verified,
    }
    Path(_OUT.value).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
  launch.run(main)
