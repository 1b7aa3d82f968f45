"""Which drafter and draft a configuration names, checked against a target."""

from collections.abc import Mapping
from pathlib import Path
import re
from typing import Any

from ml_collections import ConfigDict

from experiments.launch import (
  UserError,
  inspect,
  plain_dict,
  policy_arguments,
  set_options,
  user_errors,
)
from spec_jax import drafters, hub, length, programs, shipped, verifiers
from spec_jax.architecture import check_layers
from spec_jax.costs import check_costs
from spec_jax.drafting import check_fit
from spec_jax.levels import Levels
from spec_jax.pairing import (
  check_same_vocabulary,
  names_layers_file,
  open_folder,
  parse_draft,
  read_layers,
  vocabulary_map_of,
)
from spec_jax.trained_draft import TrainedDraft

# A draft that a configuration names, its weights not yet read.
Draft = hub.Inspected | TrainedDraft | str | int | tuple[int, ...] | None


def drafter_options(drafter: ConfigDict) -> dict[str, Any]:
  """Returns the options that are set, checked against the drafter's.

  Raises:
    UserError: for an unknown drafter, or an option it does not have.
  """
  named = ConfigDict(drafter)
  named.name = _name_of(drafter)
  if named.name == shipped.AUTO:
    return {}
  chosen = set_options(named, ("name", "draft"), "drafter", drafters.options)
  for key in ("tree", "parents"):
    if key in chosen and not all(type(i) is int for i in chosen[key]):
      raise UserError(f"{key} holds integers, got {chosen[key]}")
  return chosen


def _name_of(drafter: ConfigDict) -> str:
  """Returns the drafter's name; "auto" with options of its own is ALONE.

  Raises:
    UserError: if "auto" is given a draft.
  """
  if drafter.name != shipped.AUTO:
    return drafter.name
  if drafter.draft:
    raise UserError(
      f"drafter.draft is {str(drafter.draft)!r}, but for which drafter? With "
      "drafter.name=auto the draft is chosen"
    )
  fields = [value for name, value in drafter.items() if name != "name"]
  if any(value not in (None, "") for value in fields):
    return shipped.ALONE
  return shipped.AUTO


def choose_drafter(config: ConfigDict, target: hub.Inspected) -> dict[str, Any]:
  """Settles which drafter drafts for a target; returns its options.

  `config.drafter` afterwards holds no "auto", and names the draft that comes
  with this package where none was given and one does.

  Raises:
    UserError: see `drafter_options`.
  """
  own, options = config.drafter, drafter_options(config.drafter)
  own.name = _name_of(own)
  if own.name == shipped.AUTO:
    own.name, options, draft = shipped.choose(target.loaded)
    own.update(options)
  elif own.draft:
    return options
  else:
    with user_errors():
      draft = shipped.draft_for(target.loaded, own.name, options)
  own.draft = draft or ""
  return options


def effective(config: ConfigDict, options: Mapping[str, Any]) -> dict[str, Any]:
  """Returns all options of the drafter, its defaults filled in."""
  name = _name_of(config.drafter)
  if name == shipped.AUTO:
    return {}
  return plain_dict({**drafters.options(name), **options})


def inspect_draft(config: ConfigDict, target: hub.Inspected) -> Draft:
  """Returns the draft that a configuration names, not yet read.

  Raises:
    UserError: if it is missing, superfluous, or its vocabulary differs.
  """
  name, draft = config.drafter.name, str(config.drafter.draft)
  with user_errors():
    takes_draft = drafters.takes_draft(name, drafter_options(config.drafter))
  if not takes_draft:
    if draft:
      raise UserError(f"drafter {name!r} takes no draft model, got {draft!r}")
    return None
  with user_errors():
    kind = drafters.takes_heads(name, drafter_options(config.drafter))
  if kind:
    return _inspect_heads(name, kind, draft, target)
  if not draft:
    raise UserError(
      f"drafter {name!r} needs --config.drafter.draft: a model's name, "
      "'target', a number of the target's layers, layers like 0-5,24-29, or "
      "@FILE of a search or the folder of a trained draft"
    )
  if names_layers_file(draft):
    with user_errors():
      return read_layers(draft, target.loaded)
  with user_errors():
    parsed = parse_draft(draft)
  if parsed == "target":
    return parsed
  if not isinstance(parsed, str):
    with user_errors():
      check_layers(target.loaded.model.config, parsed)
    return parsed
  found = open_folder(draft, target.loaded)
  if found is not None:
    return found
  opened = inspect(draft, config)
  if not drafters.takes_vocabulary_map(name):
    with user_errors():
      check_same_vocabulary(target.loaded.tokenizer, opened.loaded.tokenizer)
  return opened


def _inspect_heads(
  name: str, kind: str, draft: str, target: hub.Inspected
) -> Draft:
  """Returns the heads of a drafter, from a folder or the hub.

  Raises:
    UserError: if there are none.
  """
  if not draft:
    raise UserError(
      f"drafter {name!r} needs --config.drafter.draft: the folder of trained "
      f"{kind} heads, or their name on the hub"
    )
  folder = draft
  on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", draft)
  if on_hub and not Path(draft).expanduser().exists():
    folder = str(hub.snapshot(draft))
  found = open_folder(folder, target.loaded)
  if found is None:
    raise UserError(
      f"{draft} holds no {kind} heads (a card of a training, or config.json "
      "and safetensors; .bin and .pt files must be saved as safetensors)"
    )
  return found


def check_sizes(
  target: hub.Inspected,
  draft: Draft,
  config: ConfigDict,
  options: Mapping[str, Any],
) -> None:
  """Checks the engine's sizes and the drafter's options; reads no weight.

  Raises:
    UserError: naming what is out of range.
  """
  engine, model = config.engine, target.loaded.model
  draft_model = vocabulary_map = None
  if draft is not None:
    # The options do not depend on which layers of the target draft.
    if isinstance(draft, TrainedDraft):
      draft_model = draft.model
    else:
      opened = draft if isinstance(draft, hub.Inspected) else target
      draft_model = opened.loaded.model
  context = model.config.max_length
  if engine.slots > context:
    raise UserError(f"{engine.slots} slots; the model's context is {context}")
  chosen = policy_arguments(config)
  with user_errors():
    programs.EngineConfig(
      batch_size=engine.batch_size or 1,
      slots=engine.slots or context,
      chunk=engine.chunk,
      refill_rows=engine.refill_rows,
      drafter=config.drafter.name,
      verifier=config.verifier.name,
      policy=config.policy.name,
      policy_options=tuple(chosen["policy_options"].items()),
    ).resolved()
    if drafters.takes_vocabulary_map(config.drafter.name):
      words = getattr(draft, "loaded", draft)
      vocabulary_map = vocabulary_map_of(target.loaded, words)
    drafter = drafters.build(
      config.drafter.name,
      model,
      draft_model,
      slots=engine.slots or context,
      vocabulary_map=vocabulary_map,
      **options,
    )
    check_fit(
      config.drafter.name,
      drafter,
      sampled=config.sampling.temperature > 0,
      vocabulary=target.loaded.hashes.get("tokenizer"),
    )
    if drafter.depth:
      options = chosen["policy_options"]
      policy = length.build(config.policy.name, Levels.of(drafter), **options)
      length.check(policy, drafter)
      verifiers.build(
        config.verifier.name, drafter, **chosen["verifier_options"]
      )
      if chosen["costs"] is not None and policy.needs_costs:
        check_costs(chosen["costs"], drafter)


def read_draft(draft: Draft):
  """Reads the draft's weights if it is another model."""
  return draft.read() if isinstance(draft, hub.Inspected) else draft
