"""The engines of `experiments.spec_bench`, which take turns by prompts."""

from collections.abc import Iterator, Sequence
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from experiments import show
import spec_jax
from spec_jax import metrics, rows
from spec_jax.base import SpecState
from spec_jax.engine import Engine, Finished
from spec_jax.generate import make_engine
from spec_jax.requests import Job, slots_for
from spec_jax.work import Work

PLAIN = "plain"
# Sizes of the cache: few, since each is a program for every case.
_SLOTS = (512, 2048)
_WARM_UP = 8  # tokens read, and written, before anything counts
_GROUP = 4  # cases between two runs of plain decoding


class Run(NamedTuple):
  """A prompt decoded once: the text and counts, and the seconds."""

  done: Finished
  spent: metrics.Timing


def adopt(engine: Engine, prefix: SpecState) -> SpecState | None:
  """Returns a state that begins where another engine's prefix ends.

  Args:
    engine: of the same target and number of slots.
    prefix: from `Engine.prefix`.

  Returns:
    None if this engine's drafter keeps a state: it must read for itself.
  """
  if jax.tree.leaves(jax.eval_shape(engine.programs.empty).draft):
    return None
  own = rows.take_rows(engine.programs.empty(), jnp.zeros((1,), jnp.int32))
  return dataclasses.replace(own, target=prefix.target, tokens=prefix.tokens)


class Bench:
  """The engines of one temperature, and what they are asked.

  Attributes:
    work: all prompts of all subtasks.
    cases: name -> arguments of `make_engine`.
  """

  def __init__(
    self, loaded: spec_jax.Loaded, work: Work, cases: dict[str, dict]
  ):
    self.loaded, self.work = loaded, work
    self.cases = {PLAIN: {}, **cases}
    self._engines: dict[tuple[str, int], Engine] = {}

  def engine(self, case: str, slots: int) -> Engine:
    """Returns a case's engine of a size, warmed up."""
    if (case, slots) not in self._engines:
      show.note(f"preparing {case}, {slots} slots")
      engine = make_engine(
        self.loaded,
        self.work,
        batch_size=1,
        slots=slots,
        **self.cases[case],
      )
      self._engines[case, slots] = engine
      if engine.programs.policy.needs_costs:
        engine.measure_costs(self.jobs_of(slots))
      job = self.work.jobs[0]
      short = dataclasses.replace(job.settings, max_new_tokens=_WARM_UP)
      job = job._replace(ids=job.ids[:_WARM_UP], settings=short)
      plain = self.engine(PLAIN, slots)
      list(engine.run([job], start=adopt(engine, plain.prefix(job.ids))))
    return self._engines[case, slots]

  def measure(self, cases: Sequence[str], numbers: Sequence[int]) -> None:
    """Measures what steps cost, as a run of these prompts alone would."""
    jobs = [self.work.jobs[n] for n in numbers]
    for case in cases:
      engine = self.engine(case, self.slots(numbers))
      if engine.programs.policy.needs_costs:
        engine.measure_costs(jobs)

  def slots(self, numbers: Sequence[int]) -> int:
    """Returns the size of the cache that a subtask's prompts need."""
    return max(self._slots_of(self.work.jobs[n]) for n in numbers)

  def jobs_of(self, slots: int) -> list[Job]:
    """Returns the jobs that need a cache of this size, all if none does."""
    found = [job for job in self.work.jobs if self._slots_of(job) == slots]
    return found or list(self.work.jobs)

  def _slots_of(self, job: Job) -> int:
    wanted = len(job.ids) + job.settings.max_new_tokens
    fits = [size for size in _SLOTS if size >= wanted]
    context = self.loaded.model.config.max_length
    return min(fits[0] if fits else slots_for(wanted), context)

  def decode(
    self, number: int, cases: Sequence[str], turn: int, slots: int
  ) -> Iterator[tuple[str, Run, Run]]:
    """Decodes one prompt by all cases, and by plain decoding between them.

    A machine that others use too is now faster, now slower, within one prompt:
    each case is held against the plain runs next before and after it.

    Args:
      number: of the prompt.
      cases: names.
      turn: which of them begins: nobody shall always come first.
      slots: of the subtask.

    Yields:
      (case, its run, plain decoding's with the mean of both runs' seconds).
    """
    job = self.work.jobs[number]
    engines = {case: self.engine(case, slots) for case in (PLAIN, *cases)}
    plain = engines[PLAIN]
    plain.timing = metrics.Timing()
    shared = plain.prefix(job.ids)
    read_s = plain.timing.prefill_s

    def run(case) -> Run:
      engine = engines[case]
      start = adopt(engine, shared)
      engine.timing = metrics.Timing()
      (done,) = engine.run([job], start=start)
      spent = engine.timing
      if start is not None:
        spent = dataclasses.replace(spent, prefill_s=read_s)
      return Run(done, spent)

    turn %= max(1, len(cases))
    order = [*cases[turn:], *cases[:turn]]
    before = run(PLAIN)
    for first in range(0, len(order), _GROUP):
      ours = {case: run(case) for case in order[first : first + _GROUP]}
      after = run(PLAIN)
      seconds = (before.spent.decode_s + after.spent.decode_s) / 2
      spent = dataclasses.replace(after.spent, decode_s=seconds)
      for case, found in ours.items():
        yield case, found, Run(after.done, spent)
      before = after

  def must_agree(self, case: str, slots: int) -> bool:
    """Tells whether a case's text must be plain decoding's."""
    programs = self.engine(case, slots).programs
    greedy = self.work.jobs[0].settings.temperature == 0
    return programs.same_text(greedy=greedy)
