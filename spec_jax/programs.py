"""The compiled programs of one static configuration, and how long they took."""

from collections.abc import Callable
import dataclasses
import functools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spec_jax import (
  drafters,
  length,
  rows as rows_lib,
  sharding,
  step as steps,
  verifiers,
)
from spec_jax.base import (
  DETERMINISTIC,
  Drafter,
  LengthPolicy,
  Model,
  PyTree,
)
from spec_jax.drafting import shown_to
from spec_jax.levels import Levels
from spec_jax.requests import make_request
from spec_jax.tree import MAX_NODES

# Nodes the target's pass is compiled for besides all: the root alone, and as
# many as a CPU reads at about the same price.
_WIDTHS = (1, 8)
# Prompt tokens read in one pass.
_CHUNK_CPU, _CHUNK = 64, 512
# More is a slip of the pen, and would take all memory.
_MOST_ROWS = 65536


@dataclasses.dataclass(frozen=True)
class EngineConfig:
  """What is static about a run; another value is another program.

  Attributes:
    drafter: a file of `spec_jax/drafters`.
    options: the drafter's options, as sorted pairs.
    verifier: a rule's name, see `verifiers.VERIFIERS`.
    verifier_options: its options, as sorted pairs.
    policy: a length policy's name, see `length.POLICIES`.
    policy_options: its options, as sorted pairs.
    batch_size: rows.
    slots: tokens a row may hold; see `slots_for`.
    chunk: prompt tokens read in one pass; 0 = 64 on CPU, 512 elsewhere, but no
      more than `slots`.
    refill_rows: prompts read together, at most `batch_size`; 0 = 1 on CPU, half
      the batch elsewhere.
    logprobs: None, "raw" or "warped".
    use: sampling settings in use.
    num_stop_ids: stop ids a row may have.
    stop_strings: whether a stop-string automaton runs.
    trace: whether `trace_step` can be called.
  """

  drafter: str = "none"
  options: tuple[tuple[str, Any], ...] = ()
  verifier: str = "token"
  verifier_options: tuple[tuple[str, Any], ...] = ()
  policy: str = "fixed"
  policy_options: tuple[tuple[str, Any], ...] = ()
  batch_size: int = 1
  slots: int = 1024
  chunk: int = 0
  refill_rows: int = 0
  logprobs: str | None = None
  use: frozenset[str] = frozenset()
  num_stop_ids: int = 1
  stop_strings: bool = False
  trace: bool = False

  def resolved(self) -> "EngineConfig":
    """Fills in what depends on the device.

    Raises:
      ValueError: if a size is out of range, or plain decoding is given another
        verifier or a policy that does not exist.
    """
    for low, names in (
      (1, ("batch_size", "slots", "num_stop_ids")),
      (0, ("chunk", "refill_rows")),
    ):
      for name in names:
        value = getattr(self, name)
        if value < low:
          raise ValueError(f"{name} must be at least {low}, got {value}")
    if self.batch_size > _MOST_ROWS:
      raise ValueError(
        f"batch_size must be at most {_MOST_ROWS}, got {self.batch_size}"
      )
    if self.chunk > self.slots:
      raise ValueError(
        f"chunk must be at most the {self.slots} slots of a row, got "
        f"{self.chunk}"
      )
    cpu = jax.default_backend() == "cpu"
    refill = self.refill_rows or (1 if cpu else max(1, self.batch_size // 2))
    plain = self.drafter == "none"  # there is no draft to decide about
    if plain:
      if self.verifier != "token":
        raise ValueError(
          f"drafter 'none' proposes nothing for verifier {self.verifier!r} to "
          f"judge"
        )
      verifiers.check(self.verifier, dict(self.verifier_options))
      deepest = Levels((MAX_NODES - 1,))  # of any drafter
      length.build(self.policy, deepest, **dict(self.policy_options))
    return dataclasses.replace(
      self,
      verifier="token" if plain else self.verifier,
      verifier_options=() if plain else self.verifier_options,
      policy="fixed" if plain else self.policy,
      policy_options=() if plain else self.policy_options,
      chunk=self.chunk or min(_CHUNK_CPU if cpu else _CHUNK, self.slots),
      refill_rows=min(refill, self.batch_size),
    )


class Program:
  """A jitted function, compiled ahead of its call so that time is apart.

  Attributes:
    compile_s: seconds spent compiling so far.
    num_compiles: programs compiled so far.
  """

  def __init__(self, jitted: Any):
    self._jitted = jitted
    self._compiled: dict[Any, Any] = {}
    self.compile_s = 0.0
    self.num_compiles = 0

  def __call__(self, params, *args):
    """Calls the program for these shapes, compiled if they are new."""
    return self.prepare(params, *args)(params, *args)

  def prepare(self, params, *args) -> Callable:
    """Compiles for these shapes and places if new; runs nothing."""
    leaves, structure = jax.tree.flatten((params, args))

    def kind(x):
      # Whether an array is committed to its place makes no other program.
      place = getattr(x, "sharding", None)
      return x.shape, x.dtype, getattr(x, "weak_type", False), place

    key = (structure, tuple(map(kind, leaves)))
    if key not in self._compiled:
      start = time.perf_counter()
      self._compiled[key] = self._jitted.lower(params, *args).compile()
      self.compile_s += time.perf_counter() - start
      self.num_compiles += 1
    return self._compiled[key]


class Programs(NamedTuple):
  """The compiled functions of one static configuration."""

  drafter: Drafter
  lossy: bool
  policy: LengthPolicy
  empty: Callable
  refill: Program
  resume: Program
  decode: Program
  trace: Program | None
  widths: tuple[int, ...]

  def same_text(self, *, greedy: bool) -> bool:
    """Tells whether texts equal plain decoding's with the same seed.

    Not where a rule is lossy or a sampled row's draft is drawn at random: the
    law is then the same, the text is not.
    """
    certain = set(self.drafter.laws) == {DETERMINISTIC}
    return not self.lossy and (greedy or certain)

  def compiled(self) -> tuple[float, int]:
    """Returns (seconds, number) of compiles so far."""
    all_ = [self.refill, self.resume, self.decode]
    all_ += [] if self.trace is None else [self.trace]
    return sum(p.compile_s for p in all_), sum(p.num_compiles for p in all_)


@functools.lru_cache(maxsize=16)
def build_programs(
  model: Model,
  draft: Model | None,
  config: EngineConfig,
  mesh,
  replicate_draft: bool,
) -> Programs:
  """Builds the programs of a configuration; compiles nothing yet.

  The same arguments give the same programs, so what one engine compiled the
  next one has.

  Args:
    model: the target.
    draft: the draft model, if the drafter has one.
    config: resolved, see `EngineConfig.resolved`.
    mesh: of axes 'data' and 'model', or None for one device.
    replicate_draft: keep the draft whole on each device of a mesh.

  Raises:
    ValueError: for an unknown drafter or option, one out of range, or a drafter
      of layers that the target does not show.
  """
  drafter = drafters.build(
    config.drafter, model, draft, slots=config.slots, **dict(config.options)
  )
  model = shown_to(drafter, model)
  policy = length.build(
    config.policy, Levels.of(drafter), **dict(config.policy_options)
  )
  verifier = verifiers.build(
    config.verifier, drafter, **dict(config.verifier_options)
  )
  B, S = config.batch_size, config.slots
  init, resume = rows_lib.make_init(
    model,
    drafter,
    policy,
    slots=S,
    chunk=config.chunk,
    logprobs=config.logprobs is not None,
    lossy=verifier.lossy,
  )
  # A step that may propose nothing should then cost what plain decoding does.
  always = config.policy == "fixed" and drafter.fills
  more: dict[str, Any] = {
    "verifier": verifier.verify,
    "widths": () if always else _WIDTHS,
  }
  more |= sharding.pins(mesh, B)
  spec_step = steps.make_step(
    model, drafter, policy, logprobs=config.logprobs, **more
  )

  def decode(params, state, max_steps, until_done):
    return steps.decode(spec_step, params, state, max_steps, until_done)

  def resume_rows(params, state, prefix, request, rows):
    R = rows.shape[0]
    start = rows_lib.take_rows(prefix, jnp.zeros((R,), jnp.int32))
    new = resume(params, start, request)
    return rows_lib.start_rows(state, new, rows, drafter.keep, policy.restart)

  request = jax.eval_shape(lambda: make_request([], config, model, B))
  abstract = _abstract_params(model, draft, drafter.tables)
  shape = jax.eval_shape(init, abstract, request)

  def empty():
    def zeros(x):
      if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), x.shape)
      return jnp.zeros(x.shape, x.dtype)

    state = jax.tree.map(zeros, shape)
    ones = jnp.ones((B,), jnp.int32)
    return dataclasses.replace(
      state,
      length=ones,
      prompt_length=ones,
      done=jnp.ones((B,), bool),
      draft=drafter.init(B),  # what it keeps of a row may not be zeros
      policy=policy.init(B),
    )

  placed = None
  if mesh is not None:
    rows = sharding.state_shardings(
      shape, model, mesh, draft=draft, replicate_draft=replicate_draft
    )
    placed = {
      "params": params_shardings(
        model, draft, drafter.tables, config, mesh, replicate_draft
      ),
      "state": rows,
    }
    empty_jit = jax.jit(empty, out_shardings=rows)
  else:
    empty_jit = jax.jit(empty)

  def program(function, num_extra, has_extra_output):
    return Program(
      sharding.jit_step(
        function,
        shardings=placed,
        num_extra=num_extra,
        has_extra_output=has_extra_output,
      )
    )

  traced = None
  if config.trace:
    traced = program(
      steps.make_step(
        model,
        drafter,
        policy,
        logprobs=config.logprobs,
        trace=True,
        **more,
      ),
      0,
      True,
    )
  return Programs(
    drafter=drafter,
    lossy=verifier.lossy,
    policy=policy,
    empty=empty_jit,
    refill=program(
      rows_lib.make_refill(init, drafter.keep, policy.restart), 2, False
    ),
    resume=program(resume_rows, 3, False),
    decode=program(decode, 2, True),
    trace=traced,
    widths=more["widths"],
  )


def _abstract_params(model, draft, tables) -> dict[str, PyTree]:
  key = jax.eval_shape(lambda: jax.random.key(0))
  params = {"target": jax.eval_shape(model.init, key)}
  if draft is not None:
    params["draft"] = jax.eval_shape(draft.init, key)
  if tables is not None:
    params["tables"] = tables
  return params


def params_shardings(
  model: Model,
  draft: Model | None,
  tables: PyTree,
  config: EngineConfig,
  mesh,
  replicate_draft: bool,
) -> dict[str, PyTree]:
  """Returns shardings of the engine's whole `params`.

  Args:
    model: the target.
    draft: the draft model, or None.
    tables: of the drafter, or None.
    config: whether there are stop strings.
    mesh: of axes 'data' and 'model'.
    replicate_draft: keep the draft whole on each device.
  """
  out = {"target": sharding.params_shardings(model, mesh)}
  if draft is not None:
    out["draft"] = sharding.params_shardings(
      draft, mesh, replicate=replicate_draft
    )
  whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  if config.stop_strings:
    out["stops"] = whole
  if length.build(config.policy, Levels((1,))).needs_costs:
    out["costs"] = whole
  if tables is not None:
    out["tables"] = jax.tree.map(lambda x: whole, tables)
  return out
