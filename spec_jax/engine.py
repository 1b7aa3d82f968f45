"""Runs jobs through a fixed batch of rows: refill, decode, collect.

Everything a step needs stays on the device; the host looks in when a row is
done, or often enough to stream. Rows that finish are refilled with the next
prompts inside the donated state, so thousands of prompts run at full batch.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
import dataclasses
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import cost_policy, kernels, length, metrics, rows as rows_lib
from spec_jax.base import (
  FINISH_REASONS,
  LENGTH,
  RUNNING,
  Model,
  PyTree,
  SpecInfo,
  SpecState,
)
from spec_jax.costs import (
  check_costs,
  measure_costs,
  num_costs,
  typical_length,
)
from spec_jax.following import LOOK_STEPS, CostFollower, seen
from spec_jax.levels import Levels
from spec_jax.programs import (
  EngineConfig,
  Program,
  Programs,
  build_programs,
  params_shardings,
)
from spec_jax.requests import Job, check_job, make_request
from spec_jax.settings import Settings

# Seconds of a call: streaming, and otherwise.
_STREAM_S, _CALL_S = 0.05, 1.0
_MAX_STEPS = 256


class Finished(NamedTuple):
  """One row's result.

  Attributes:
    job: number of the job.
    ids: output tokens, the stop included.
    logprobs: of each output token, or None.
    finish_reason: one of `FINISH_REASONS`, or "context" if the context or the
      cache ended before `max_new_tokens`.
    counts: what the row counted.
    first_token_s: seconds from the start of its reading to its first token.
    state: the row's state, to be continued, if asked for.
  """

  job: int
  ids: list[int]
  logprobs: list[float] | None
  finish_reason: str
  counts: metrics.Counts
  first_token_s: float
  state: SpecState | None


class Engine:
  """A batch of rows on a device or mesh, ready to run jobs.

  Attributes:
    config: the resolved static configuration.
    timing: seconds by part, added up over runs.
    stop_strings: what the automaton knows, in the order of `Job.patterns`.
  """

  def __init__(
    self,
    model: Model,
    params: PyTree,
    config: EngineConfig,
    *,
    draft: Model | None = None,
    draft_params: PyTree = None,
    automaton: PyTree = None,
    mesh=None,
    replicate_draft: bool = True,
    costs: Sequence[float] | None = None,
  ):
    """Builds the programs; compiles nothing yet.

    Args:
      model: the target.
      params: its parameters.
      config: what is static.
      draft: the draft model, if the drafter has one.
      draft_params: its parameters.
      automaton: of the stop strings, if `config.stop_strings`.
      mesh: of axes 'data' and 'model', or None for one device.
      replicate_draft: keep the draft whole on each device.
      costs: `L + 1` seconds of a step by level (`spec_jax/levels.py`), and one
        of a token of catching up if the drafter does so, for a length policy
        that needs them; None = measured on this device before the first run.

    Raises:
      ValueError: for an unknown drafter, policy or option, or a size out of
        range.
    """
    self.config = config.resolved()
    if mesh is not None:
      if kernels.is_packed(params) or kernels.is_packed(draft_params):
        raise ValueError(
          "weights are packed for one CPU: load them with cpu_kernel='off' for "
          "a mesh"
        )
      data = mesh.shape["data"]
      for name in ("batch_size", "refill_rows"):
        size = getattr(self.config, name)
        if name == "refill_rows" and size % data:
          self.config = dataclasses.replace(self.config, refill_rows=data)
        elif size % data:
          raise ValueError(
            f"{name} {size} is not a multiple of the mesh's data size {data}"
          )
    self.model = model
    self.mesh = mesh
    self._programs = build_programs(
      model, draft, self.config, mesh, replicate_draft
    )
    self._levels = Levels.of(self._programs.drafter)
    self.params: dict[str, PyTree] = {"target": params}
    if self._programs.policy.needs_costs:  # until they are known
      self.params["costs"] = jnp.ones(
        (num_costs(self._programs.drafter),), jnp.float32
      )
    if draft is not None:
      self.params["draft"] = draft_params
    tables = self._programs.drafter.tables
    if tables is not None:
      self.params["tables"] = jax.tree.map(jnp.asarray, tables)
    if self.config.stop_strings:
      self.params["stops"] = jax.tree.map(jnp.asarray, automaton)
    if mesh is not None:
      self.params = jax.device_put(
        self.params,
        params_shardings(
          model, draft, tables, self.config, mesh, replicate_draft
        ),
      )
    self._costs: list[float] | None = None
    self._follower: CostFollower | None = None
    if costs is not None:
      self.set_costs(costs)
    # What the length policy knows outlives a run, and what a drafter keeps.
    self._policy_state: PyTree = None
    self._draft_state: PyTree = None
    self._compiled_before = self._programs.compiled()
    self.timing = metrics.Timing()
    self.stop_strings: tuple[str, ...] = ()

  @property
  def depth(self) -> int:
    """The drafter's depth `K`."""
    return self._programs.drafter.depth

  @property
  def costs(self) -> list[float] | None:
    """See the argument; None if not needed or not yet measured.

    Measured ones are followed in decoding, if the policy wants that.
    """
    return self._costs

  def policy_report(self) -> dict[str, Any] | None:
    """Returns what the length policy did so far; see `length.report`."""
    if self._policy_state is None:
      return None
    name, follower = self.config.policy, self._follower
    said = length.report(name, self._levels, self._policy_state, self._costs)
    if said is None or follower is None:
      return said
    return said | follower.report()

  @property
  def programs(self) -> Programs:
    """The compiled functions."""
    return self._programs

  def set_costs(self, costs: Sequence[float]) -> None:
    """Says what steps cost, for good; see the argument `costs`.

    Raises:
      ValueError: if the policy takes none, their number is wrong, or one is not
        above 0.
    """
    if not self._programs.policy.needs_costs:
      raise ValueError(f"length policy {self.config.policy!r} takes no costs")
    check_costs(costs, self._programs.drafter)
    self._follower = None
    self._put_costs(costs)

  def measure_costs(self, jobs: Sequence[Job]) -> list[float]:
    """Measures, and returns, `costs` behind texts as long as the jobs'."""
    costs, call_s = measure_costs(self, tokens=typical_length(jobs))
    self.set_costs(costs)
    # Hosts that each believe their own clock would draft differently.
    if self._programs.policy.follows and jax.process_count() == 1:
      self._follower = CostFollower(costs, self._levels, call_s)
    return costs

  def _put_costs(self, costs: Sequence[float]) -> None:
    self._costs = [float(x) for x in costs]
    new = jnp.asarray(self._costs, jnp.float32)
    self.params["costs"] = jax.device_put(new, self.params["costs"].sharding)

  @property
  def num_compiles(self) -> int:
    """Programs compiled since this engine was made."""
    return self._programs.compiled()[1] - self._compiled_before[1]

  def _add_time(self, **seconds):
    old = self.timing
    changes = {k: getattr(old, k) + v for k, v in seconds.items()}
    compile_s = self._programs.compiled()[0] - self._compiled_before[0]
    self.timing = dataclasses.replace(old, compile_s=compile_s, **changes)

  def timed(self, program: Program, *args):
    """Calls a program; returns (result, seconds without compile)."""
    compiled = program.compile_s
    start = time.perf_counter()
    out = jax.block_until_ready(program(self.params, *args))
    spent = time.perf_counter() - start
    return out, spent - (program.compile_s - compiled)

  def check(self, job: Job) -> None:
    """Checks that a job fits.

    Raises:
      ValueError: if the prompt is empty or does not fit the context, or a
        setting is one that this engine was not made for.
    """
    check_job(job, self.config, self.model.config.max_length)

  def prefix(self, ids: Sequence[int]) -> SpecState:
    """Reads a prefix once; pass the result to `run` as `start`.

    Args:
      ids: at least 2 tokens that begin every job; the last one is not cached.
    """
    settings = Settings(max_new_tokens=1)
    job = Job(ids, settings, (0,))
    self.check(job)
    state, seconds = self.read([job], [0], self._programs.empty(), None)
    self._add_time(prefill_s=seconds, num_prompt_tokens=len(ids))
    return rows_lib.take_rows(state, jnp.zeros((1,), jnp.int32))

  def read(self, jobs, rows, state, start):
    """Reads jobs into rows of a state; returns (state, seconds)."""
    R, B = self.config.refill_rows, self.config.batch_size
    request = make_request(jobs, self.config, self.model, R)
    where = jnp.asarray([*rows] + [B] * (R - len(rows)), jnp.int32)
    if start is None:
      return self.timed(self._programs.refill, state, request, where)
    return self.timed(self._programs.resume, state, start, request, where)

  def run(
    self,
    jobs: Sequence[Job],
    *,
    start: SpecState | None = None,
    on_tokens: Callable[[int, list[int]], None] | None = None,
    on_trace: Callable[[dict[int, int], SpecInfo], None] | None = None,
    keep_state: bool = False,
  ) -> Iterator[Finished]:
    """Runs jobs at full batch; yields each as it finishes.

    Args:
      jobs: in the order they are started.
      start: a state of one row whose text begins every job, made with these
        weights (which is not checked).
      on_tokens: called with (job, new tokens) as they come.
      on_trace: called after each step with ({row: job}, SpecInfo on the
        host); needs `config.trace`, and steps one by one.
      keep_state: give each result its state.

    Raises:
      ValueError: before anything runs, if a job does not fit or does not
        continue `start`, or the engine was not made to be traced.
    """
    if on_trace is not None and self._programs.trace is None:
      raise ValueError("on_trace needs EngineConfig.trace")
    for job in jobs:
      self.check(job)
    if start is not None:
      want = jax.eval_shape(self._programs.empty)
      rows_lib.check_start(start, want, [job.ids for job in jobs])
    return self._run(jobs, start, on_tokens, on_trace, keep_state)

  def _run(self, jobs, start, on_tokens, on_trace, keep_state):
    B, R = self.config.batch_size, self.config.refill_rows
    held = 0 if start is None else int(start.target.length[0])
    queue = deque(enumerate(jobs))
    owner: dict[int, int] = {}  # row -> job
    began: dict[int, float] = {}
    first: dict[int, float] = {}
    shown: dict[int, int] = {}
    if self._programs.policy.needs_costs and self._costs is None:
      timing, compiled = self.timing, self._programs.compiled()[0]
      begun = time.perf_counter()
      self.measure_costs(jobs)
      spent = time.perf_counter() - begun
      self.timing = timing
      self._add_time(
        measure_s=spent - (self._programs.compiled()[0] - compiled)
      )
    state = self._programs.empty()
    # Copies: a step takes its state along, also one that is broken off.
    if self._policy_state is not None:
      policy = jax.tree.map(jnp.copy, self._policy_state)
      state = dataclasses.replace(state, policy=policy)
    if self._draft_state is not None:
      draft = jax.tree.map(jnp.copy, self._draft_state)
      state = dataclasses.replace(state, draft=draft)
    if on_trace is None:  # so that no prompt waits for a compile
      limits = jnp.int32(0), jnp.int32(0)
      self._programs.decode.prepare(self.params, state, *limits)
    step_s, call_s = 0.0, _STREAM_S if on_tokens else _CALL_S
    look, follower = None, self._follower
    if follower is not None:
      follower.begin(seen(state.policy, self._levels))
    while True:
      fresh = False
      free = [r for r in range(B) if r not in owner]
      while queue and free:
        rows, free = free[:R], free[R:]
        rows = rows[: len(queue)]
        batch = [queue.popleft() for _ in rows]
        state, seconds = self.read([j for _, j in batch], rows, state, start)
        self._add_time(
          prefill_s=seconds,
          num_prompt_tokens=sum(len(j.ids) - held for _, j in batch),
        )
        # A compile is not part of the time to the first token.
        now = time.perf_counter() - seconds
        for row, (index, job) in zip(rows, batch, strict=True):
          owner[row], began[row] = index, now
          shown[row] = len(job.ids)
          first.pop(row, None)
        fresh = True
      if not owner:
        return
      until = B - len(owner) + 1
      if on_trace is not None:
        assert self._programs.trace is not None
        (state, info), seconds = self.timed(self._programs.trace, state)
        on_trace(dict(owner), jax.device_get(info))
        taken = 1
      else:
        wanted = 1 if fresh or not step_s else int(call_s / step_s)
        wanted = min(max(wanted, 1), _MAX_STEPS)
        # The first token of a prompt does not wait for a look.
        look = None if follower is None or fresh else follower.look()
        if look is None:
          state, taken, seconds = self._decode(state, wanted, until)
        else:
          state, taken, seconds = self._look(state, look, until)
        if follower is not None and follower.add(
          seconds, seen(state.policy, self._levels), look
        ):
          self._put_costs(follower.costs())
      self._add_time(decode_s=seconds)
      if taken and look is None:
        step_s = seconds / taken
      lengths, done = jax.device_get((state.length, state.done))
      now = time.perf_counter()
      for row in list(owner):
        if lengths[row] > shown[row] and row not in first:
          first[row] = now - began[row]
        if on_tokens is not None and lengths[row] > shown[row]:
          new = np.asarray(state.tokens[row])[shown[row] : lengths[row]]
          shown[row] = int(lengths[row])
          on_tokens(owner[row], new.tolist())
        if done[row]:
          index = owner.pop(row)
          finished = self._collect(state, row, index, keep_state)
          finished = finished._replace(first_token_s=first.get(row, 0.0))
          wanted = jobs[index].settings.max_new_tokens
          if finished.finish_reason == "length" and len(finished.ids) < wanted:
            finished = finished._replace(finish_reason="context")
          times = (*self.timing.first_token_s, finished.first_token_s)
          self.timing = dataclasses.replace(self.timing, first_token_s=times)
          self._policy_state = jax.tree.map(jnp.copy, state.policy)
          if self._programs.drafter.keep is not None:
            self._draft_state = jax.tree.map(jnp.copy, state.draft)
          yield finished

  def _decode(self, state, wanted, until):
    """Takes steps; returns (state, how many, seconds)."""
    limits = jnp.int32(wanted), jnp.int32(until)
    (state, taken), seconds = self.timed(self._programs.decode, state, *limits)
    return state, int(taken), seconds

  def _look(self, state, level, until):
    """Takes some steps at a level, to see what they cost; see `_decode`."""
    policy = cost_policy.forced(state.policy, level)
    state = dataclasses.replace(state, policy=policy)
    state, *found = self._decode(state, LOOK_STEPS, until)
    policy = cost_policy.forced(state.policy, -1)
    return dataclasses.replace(state, policy=policy), *found

  def _collect(self, state, row, index, keep_state) -> Finished:
    def get(x):
      return np.asarray(x[row])

    begin, end = int(get(state.prompt_length)), int(get(state.length))
    tally = jax.tree.map(get, state.tally)
    counts = metrics.Counts(
      emitted=end - begin,
      steps=int(tally.num_steps),
      drafted=int(tally.num_drafted),
      accepted=int(tally.num_accepted),
      drafted_at=tuple(int(x) for x in tally.drafted_at),
      accepted_at=tuple(int(x) for x in tally.accepted_at),
      divergence=None if tally.divergence is None else float(tally.divergence),
    )
    logprobs = None
    if state.logprobs is not None:
      logprobs = [float(x) for x in get(state.logprobs)[begin:end]]
    reason = int(get(state.finish_reason))
    kept = None
    if keep_state:
      kept = rows_lib.take_rows(state, jnp.asarray([row], jnp.int32))
    return Finished(
      job=index,
      ids=get(state.tokens)[begin:end].tolist(),
      logprobs=logprobs,
      finish_reason=FINISH_REASONS[LENGTH if reason == RUNNING else reason],
      counts=counts,
      first_token_s=0.0,
      state=kept,
    )
