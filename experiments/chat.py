"""A conversation in the terminal; each turn continues the cached state."""

from typing import Any

from experiments.launch import UserError, policy_arguments, user_errors
from spec_jax import metrics
from spec_jax.generate import make_engine, run
from spec_jax.hub import Loaded
from spec_jax.settings import Settings
from spec_jax.work import Work, plan

# Tokens a conversation may hold unless told otherwise.
_SLOTS = 2048

_HELP = "/reset starts anew, /quit or an empty end-of-file leaves"


def converse(
  target: Loaded,
  draft: Any,
  config,
  options: dict[str, Any],
  settings: Settings,
  mesh,
) -> int:
  """Talks until the user leaves.

  Args:
    target: the loaded model.
    draft: see `spec_jax.generate.make_engine`.
    config: of the command.
    options: the drafter's options.
    settings: sampling settings of every turn.
    mesh: or None.

  Returns:
    The exit code.
  """
  slots = config.engine.slots or min(_SLOTS, target.model.config.max_length)
  history = _opening(config)
  state, engine, turn = None, None, 0
  print(
    f"{config.model}, drafter {config.drafter.name}. {_HELP}. The first answer "
    f"waits for a compile."
  )
  while True:
    try:
      line = input("\nyou> ").strip()
    except EOFError:
      print()
      return 0
    if line in ("/quit", "/exit"):
      return 0
    if line == "/reset":
      history, state = _opening(config), None
      continue
    if not line:
      continue
    asked = [*history, {"role": "user", "content": line}]
    work = plan(target, [asked], settings, config.seed)
    # No turn may draw with the noise of another: a template may drop text, and
    # a turn then starts at a length that an earlier one went through.
    turn += 1
    job = work.jobs[0]
    work = work._replace(jobs=[job._replace(seeds=(*job.seeds, turn))])
    if len(work.jobs[0].ids) >= slots:
      print(f"the conversation fills the {slots} tokens; /reset starts anew")
      continue
    if engine is None:
      engine = make_engine(
        target,
        work,
        drafter=config.drafter.name,
        draft=draft,
        options=options,
        **policy_arguments(config),
        batch_size=1,
        slots=slots,
        chunk=config.engine.chunk,
        mesh=mesh,
        replicate_draft=config.replicate_draft,
      )
    engine.timing = metrics.Timing()
    print("bot> ", end="", flush=True)
    reply = next(
      run(
        engine,
        work,
        start=_continued(state, work),
        on_text=lambda prompt, sample, piece: print(piece, end="", flush=True),
        keep_state=True,
      )
    )
    state = reply.state
    history = [*asked, {"role": "assistant", "content": reply.text}]
    report = metrics.report(reply.counts, engine.timing)
    speed = report["decode_tokens_per_s"] or 0.0
    print(
      f"\n[{reply.counts.emitted} tokens, {speed:.1f} tokens/s, "
      f"{report['emitted_per_step']:.2f} per step, "
      f"{engine.timing.num_prompt_tokens} prompt tokens read]"
    )


def check(loaded: Loaded, config, settings: Settings) -> None:
  """Checks that a conversation can be held, before weights are read.

  Raises:
    UserError: naming what is in the way.
  """
  if not getattr(loaded.tokenizer, "chat_template", None):
    raise UserError("this model has no chat template, which --chat needs")
  if config.chat_template == "no":
    raise UserError("--chat needs the chat template; drop chat_template=no")
  if settings.num_samples != 1:
    raise UserError(
      f"--chat gives one answer a turn, got num_samples {settings.num_samples}"
    )
  hello = [*_opening(config), {"role": "user", "content": "Hello"}]
  with user_errors():
    plan(loaded, [hello], settings, config.seed)


def _opening(config) -> list[dict[str, str]]:
  """Returns what stands before the first turn."""
  if not config.system:
    return []
  return [{"role": "system", "content": config.system}]


def _continued(state, work: Work):
  """Returns the state if its text begins the new prompt, else None.

  The template may spell an earlier turn in other tokens than were emitted;
  then the conversation is read afresh.
  """
  if state is None:
    return None
  held = int(state.target.length[0])
  ids = list(work.jobs[0].ids)
  same = len(ids) > held and state.tokens[0, :held].tolist() == ids[:held]
  return state if same else None
