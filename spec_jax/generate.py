"""From prompts to text: the host side that a user calls."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import numbers
from typing import Any

import numpy as np

from spec_jax import drafters, metrics, shipped, stops, text
from spec_jax.base import SpecState, Tree
from spec_jax.drafting import check_fit
from spec_jax.engine import Engine, Finished
from spec_jax.hub import Loaded
from spec_jax.pairing import resolve_draft, vocabulary_map_of
from spec_jax.programs import EngineConfig
from spec_jax.requests import Job, slots_for
from spec_jax.settings import Settings, in_use
from spec_jax.work import Prompt, Work, plan

# Rows a run uses unless told otherwise.
_BATCH = 8
# A prefix shared by all prompts is read once if it is at least this long.
_SHARED_PREFIX = 32


@dataclasses.dataclass(frozen=True)
class Completion:
  """One sample's output.

  Attributes:
    prompt: number of the prompt.
    sample: number of the sample of that prompt.
    prompt_ids: tokens of the prompt.
    ids: output tokens; a stop id, and the tokens of a stop string up to the
      one that completes it, are kept.
    text: output text, without special tokens and without the stop string.
    logprobs: of each id, or None.
    finish_reason: "stop" (an id), "stop_string" or "length".
    counts: what this completion counted.
    first_token_s: seconds from the start of reading to the first token.
    state: to be continued, if asked for.
  """

  prompt: int
  sample: int
  prompt_ids: tuple[int, ...]
  ids: list[int]
  text: str
  logprobs: list[float] | None
  finish_reason: str
  counts: metrics.Counts
  first_token_s: float
  state: SpecState | None = None


@dataclasses.dataclass(frozen=True)
class Generation:
  """All completions of a run, in the order of prompts and samples.

  Attributes:
    completions: one a prompt and sample.
    report: counts, rates and speeds, see `metrics.report`.
    seed: the run's seed, drawn if none was given.
  """

  completions: list[Completion]
  report: dict[str, Any]
  seed: int

  @property
  def ids(self) -> list[list[int]]:
    """Output tokens of each completion."""
    return [c.ids for c in self.completions]

  @property
  def texts(self) -> list[str]:
    """Output text of each completion."""
    return [c.text for c in self.completions]

  @property
  def logprobs(self) -> list[list[float] | None]:
    """Log-probabilities of each completion's ids."""
    return [c.logprobs for c in self.completions]


def make_engine(
  loaded: Loaded,
  work: Work,
  *,
  drafter: str = "none",
  draft: Any = None,
  options: Mapping[str, Any] | None = None,
  verifier: str = "token",
  verifier_options: Mapping[str, Any] | None = None,
  policy: str = "fixed",
  policy_options: Mapping[str, Any] | None = None,
  costs: Sequence[float] | None = None,
  batch_size: int = 0,
  slots: int = 0,
  chunk: int = 0,
  refill_rows: int = 0,
  logprobs: str | None = None,
  trace: bool = False,
  mesh=None,
  replicate_draft: bool = True,
) -> Engine:
  """Makes an engine that fits the work.

  Args:
    loaded: the target.
    work: from `plan`.
    drafter: a name from `drafters.names()`; or "auto", the best that needs no
      more files: with the built-in model a learned one.
    draft: the draft model: another loaded model, "target" for the target
      itself, a number of the target's first layers, a list of layers, "@FILE"
      for those that `experiments.search_layers` found, the folder of a trained
      draft, or a `BuiltDraft`. None = the one that comes with this package, if
      one does for this target and drafter.
    options: the drafter's options.
    verifier: how drafts are judged, a key of `verifiers.VERIFIERS`.
    verifier_options: the verifier's options.
    policy: how deep to draft, a key of `length.POLICIES`.
    policy_options: the policy's options.
    costs: see `Engine`.
    batch_size: rows; 0 = 8, or as many as there are jobs.
    slots: tokens a row may hold; 0 = the smallest size that fits.
    chunk: prompt tokens read in one pass; 0 = chosen for the device.
    refill_rows: prompts read together; 0 = chosen for the device.
    logprobs: None, "raw" or "warped".
    trace: whether `Engine.run(on_trace=...)` will be used.
    mesh: of axes 'data' and 'model', or None.
    replicate_draft: keep the draft whole on each device of a mesh.

  Raises:
    ValueError: for anything that does not fit together.
  """
  model, jobs = loaded.model, work.jobs
  longest = max(len(j.ids) + j.settings.max_new_tokens for j in jobs)
  context = model.config.max_length
  if not slots:
    slots = min(slots_for(min(longest, context)), context)
  if slots > context:
    raise ValueError(f"{slots} slots, the model's context is {context}")
  data = 1 if mesh is None else mesh.shape["data"]
  if not batch_size:
    batch_size = -(-min(_BATCH, max(1, len(jobs))) // data) * data
  if drafter == shipped.AUTO:
    if options or draft is not None:
      raise ValueError(
        "drafter 'auto' chooses its draft and options itself: name a drafter "
        "to set them"
      )
    drafter, options, draft = shipped.choose(loaded)
  elif draft is None:
    draft = shipped.draft_for(loaded, drafter, options)
  if draft is not None and drafter in drafters.names():
    if not drafters.takes_draft(drafter, options):
      raise ValueError(f"drafter {drafter!r} takes no draft model")
  any_vocabulary = (
    drafter in drafters.names() and drafters.takes_vocabulary_map(drafter)
  )
  draft_model, draft_params = resolve_draft(
    loaded, draft, any_vocabulary=any_vocabulary
  )
  options = dict(options or {})
  if any_vocabulary:
    options["vocabulary_map"] = vocabulary_map_of(loaded, draft)
  if isinstance(options.get("tree"), Tree):
    options["parents"] = options.pop("tree").parents
  for key in ("tree", "parents"):
    if options.get(key) is not None:
      options[key] = _whole(key, options[key])
  config = EngineConfig(
    drafter=drafter,
    options=tuple(sorted(options.items())),
    verifier=verifier,
    verifier_options=tuple(sorted((verifier_options or {}).items())),
    policy=policy,
    policy_options=tuple(sorted((policy_options or {}).items())),
    batch_size=batch_size,
    slots=slots,
    chunk=chunk,
    refill_rows=refill_rows,
    logprobs=logprobs,
    use=in_use([j.settings for j in jobs]),
    num_stop_ids=max((len(j.stop_ids) for j in jobs), default=1) or 1,
    stop_strings=bool(work.stop_strings),
    trace=trace,
  )
  automaton = None
  if work.stop_strings:
    assert work.token_bytes is not None
    automaton = stops.build_automaton(work.stop_strings, work.token_bytes)
  machine = Engine(
    model,
    loaded.params,
    config,
    draft=draft_model,
    draft_params=draft_params,
    automaton=automaton,
    mesh=mesh,
    replicate_draft=replicate_draft,
    costs=costs,
  )
  check_fit(
    drafter,
    machine.programs.drafter,
    sampled="temperature" in config.use,
    vocabulary=loaded.hashes.get("tokenizer"),
  )
  machine.stop_strings = work.stop_strings
  return machine


def _whole(name: str, values: Any) -> tuple[int, ...]:
  """Returns integers as a tuple.

  Raises:
    ValueError: if they are no sequence of integers.
  """
  kinds = str | numbers.Number
  if isinstance(values, kinds) or not all(
    isinstance(i, numbers.Integral) and not isinstance(i, bool) for i in values
  ):
    raise ValueError(f"{name} holds integers, got {values!r}")
  return tuple(map(int, values))


def _stream(work: Work, job: Job) -> text.StreamDecoder:
  assert work.token_bytes is not None
  return text.StreamDecoder(
    work.token_bytes,
    stop_strings=job.settings.stop_strings,
    first=job.settings.min_new_tokens,
  )


def complete(work: Work, finished: Finished) -> Completion:
  """Turns an engine's result into text."""
  job = work.jobs[finished.job]
  prompt, sample = work.origin[finished.job]
  words = ""
  if work.token_bytes is not None:
    stream = _stream(work, job)
    words = stream.push(finished.ids) + stream.flush()
  return Completion(
    prompt=prompt,
    sample=sample,
    prompt_ids=tuple(job.ids),
    ids=finished.ids,
    text=words,
    logprobs=finished.logprobs,
    finish_reason=finished.finish_reason,
    counts=finished.counts,
    first_token_s=finished.first_token_s,
    state=finished.state,
  )


def run(
  engine: Engine,
  work: Work,
  *,
  start: SpecState | None = None,
  on_text: Callable[[int, int, str], None] | None = None,
  on_trace: Callable | None = None,
  keep_state: bool = False,
) -> Iterator[Completion]:
  """Runs the work on an engine and yields completions as they finish.

  Args:
    engine: from `make_engine`.
    work: from `plan`.
    start: a state whose text begins every prompt (`Completion.state`, or
      `Engine.prefix`).
    on_text: called with (prompt, sample, piece) as text comes; pieces never
      hold half a character and join to the completion's text.
    on_trace: see `Engine.run`.
    keep_state: give each completion its state.
  """
  streams: dict[int, text.StreamDecoder] = {}

  def on_tokens(index: int, ids: list[int]) -> None:
    assert on_text is not None and work.token_bytes is not None
    if index not in streams:
      streams[index] = _stream(work, work.jobs[index])
    piece = streams[index].push(ids)
    if piece:
      on_text(*work.origin[index], piece)

  if work.stop_strings != engine.stop_strings:
    raise ValueError(
      f"this engine was made for the stop strings {engine.stop_strings}, not "
      f"{work.stop_strings}"
    )
  if on_text is not None and work.token_bytes is None:
    raise ValueError("on_text needs a tokenizer, this model has none")
  streaming = on_text is not None
  for finished in engine.run(
    work.jobs,
    start=start,
    on_tokens=on_tokens if streaming else None,
    on_trace=on_trace,
    keep_state=keep_state,
  ):
    stream = streams.pop(finished.job, None)
    if stream is not None and on_text is not None:
      tail = stream.flush()
      if tail:
        on_text(*work.origin[finished.job], tail)
    yield complete(work, finished)


def shared_prefix(jobs: Sequence[Job]) -> int:
  """Returns how many leading tokens all prompts share; 0 if few or one."""
  if len(jobs) < 2:
    return 0
  arrays = [np.asarray(j.ids) for j in jobs]
  width = min(map(len, arrays)) - 1  # a token must be left to read
  same = np.ones(max(width, 0), bool)
  for a in arrays[1:]:
    same &= a[:width] == arrays[0][:width]
  count = int(same.cumprod().sum()) if width > 0 else 0
  return count if count >= _SHARED_PREFIX else 0


def read_shared(engine: Engine, jobs: Sequence[Job]) -> SpecState | None:
  """Reads what all prompts begin with, once; None if that is little."""
  shared = shared_prefix(jobs)
  return engine.prefix([*jobs[0].ids[: shared + 1]]) if shared else None


def generate(
  loaded: Loaded,
  prompts: Prompt | Sequence[Prompt],
  *,
  settings: Settings | Sequence[Settings] | None = None,
  seed: int | None = None,
  start: SpecState | None = None,
  on_text: Callable[[int, int, str], None] | None = None,
  keep_state: bool = False,
  **engine,
) -> Generation:
  """Generates text, plainly or speculatively; the law is the target's.

  >>> out = generate(loaded, "def add(a, b):", drafter="prompt_lookup")
  >>> out.texts[0], out.report["emitted_per_step"]

  Args:
    loaded: the target, from `spec_jax.load`.
    prompts: one prompt or several: text, token ids, or chat messages.
    settings: of all prompts, or one a prompt; default greedy.
    seed: of the run; None draws one. A prompt's noise depends on its seed and
      number, not on its batch; its law on the batch by a last bit at most.
    start: a state to continue, see `run`.
    on_text: called with (prompt, sample, piece) as text comes.
    keep_state: give each completion its state.
    **engine: see `make_engine`: `drafter`, `draft`, `options`, `policy`,
      `batch_size`, `slots`, `logprobs`, `mesh`, ...

  Returns:
    Generation.

  Raises:
    ValueError: before any forward pass, for anything that does not fit.
  """
  if isinstance(prompts, str) or (
    len(prompts) > 0 and isinstance(prompts[0], (int, np.integer, Mapping))
  ):
    prompts = [prompts]  # type: ignore[assignment]
  if not prompts:
    raise ValueError("there is no prompt")
  work = plan(loaded, prompts, settings or Settings(), seed)  # type: ignore[arg-type]
  if start is not None and not engine.get("slots"):
    engine["slots"] = start.tokens.shape[1]
  machine = make_engine(loaded, work, **engine)
  if start is None:
    start = read_shared(machine, work.jobs)
  found = list(
    run(machine, work, start=start, on_text=on_text, keep_state=keep_state)
  )
  found.sort(key=lambda c: (c.prompt, c.sample))
  counts = metrics.Counts.sum([c.counts for c in found])
  report = metrics.report(counts, machine.timing, machine.policy_report())
  return Generation(found, report, work.seed)
