"""The cases of the benchmarks: drafters with what they need, by name.

`experiments.spec_bench` times them, `experiments.acceptance` counts what they
emit. A case stands for arguments of `make_engine`; what it needs of this
machine, a folder or another model, it names by the flag that says where.
"""

from collections.abc import Mapping
import json
from pathlib import Path
import re
from typing import Any

from absl import flags

from experiments import bench_summary as summary, show
from experiments.launch import UserError
import spec_jax
from spec_jax import drafters, shipped, trained
from spec_jax.generate import make_engine
from spec_jax.work import Work

MODEL = flags.DEFINE_string("model", "smollm2-135m-instruct", "The target.")
OTHER_DRAFT = flags.DEFINE_string(
  "other_draft", "", "A small model with another tokenizer, for cases with one."
)
INDEX = flags.DEFINE_string(
  "corpus", "", "An index of a corpus, for cases with one."
)
DRAFTS = flags.DEFINE_string(
  "drafts",
  "",
  "Folder of trained drafts, distill, medusa and eagle, for cases with one; "
  "those that ship if not given.",
)
PATTERN = flags.DEFINE_string("cases", "", "Regular expression: cases to run.")

# Stand for the values of the flags of these names.
OTHER, CORPUS = "--other_draft", "--corpus"
# Stands for a folder of trained drafts; "--drafts/eagle" for one of them.
TRAINED = "--drafts"
TRAINED_DRAFTS = _DISTILLED, _MEDUSA, _EAGLE = tuple(
  f"{TRAINED}/{name}" for name in ("distill", "medusa", "eagle")
)
_COST, _INDEX = {"policy": "cost"}, {"corpus": CORPUS}
_LOOKUP_AND = {"first": "prompt_lookup", "second": "recycling"}
_CHAIN, _TREE = {"num_draft": 4}, {"tree": (4, 2, 1), "siblings": "top_k"}
# Name -> keyword arguments of `make_engine`; a case is one line. Those whose
# drafter has no file, or needs what is not there, are left out and said.
CASES: dict[str, dict[str, Any]] = {
  "lookup 3": {"drafter": "prompt_lookup", "options": {"num_draft": 3}},
  "lookup 7": {"drafter": "prompt_lookup", "options": {"num_draft": 7}},
  summary.DEFAULT: {"drafter": "prompt_lookup", "policy": "cost"},
  "suffix cost": {"drafter": "suffix", "policy": "cost"},
  "suffix corpus": {**_COST, "drafter": "suffix", "options": _INDEX},
  "ngram cost": {**_COST, "drafter": "ngram", "options": _INDEX},
  "recycling cost": {"drafter": "recycling", "policy": "cost"},
  "lookahead cost": {"drafter": "lookahead", "policy": "cost"},
  "first of cost": {**_COST, "drafter": "first_of", "options": _LOOKUP_AND},
  "merge cost": {**_COST, "drafter": "merge", "options": _LOOKUP_AND},
  "cascade cost": {"drafter": "cascade", "draft": 8, "policy": "cost"},
  "8 layers cost": {"drafter": "vanilla", "draft": 8, "policy": "cost"},
  "best first": {"drafter": "best_first", "draft": 8, "policy": "cost"},
  "tli cost": {"drafter": "tli", "draft": OTHER, "policy": "cost"},
  "slem cost": {"drafter": "slem", "draft": OTHER, "policy": "cost"},
  "distilled chain": {
    "drafter": "vanilla",
    "draft": _DISTILLED,
    "options": _CHAIN,
  },
  "distilled tree": {
    "drafter": "vanilla",
    "draft": _DISTILLED,
    "options": _TREE,
  },
  "distilled best first": {
    "drafter": "best_first",
    "draft": _DISTILLED,
    "options": {"num_nodes": 16, "depth": 5, "width": 4},
  },
  "distilled cost": {**_COST, "drafter": "vanilla", "draft": _DISTILLED},
  "medusa chain": {
    "drafter": "medusa",
    "draft": _MEDUSA,
    "options": {"tree": (1, 1, 1, 1)},
  },
  "medusa tree": {"drafter": "medusa", "draft": _MEDUSA},
  "medusa cost": {**_COST, "drafter": "medusa", "draft": _MEDUSA},
  "eagle chain": {"drafter": "eagle", "draft": _EAGLE, "options": _CHAIN},
  "eagle tree": {"drafter": "eagle", "draft": _EAGLE},
  "eagle cost": {**_COST, "drafter": "eagle", "draft": _EAGLE},
  "lookup and eagle": {
    "drafter": "merge",
    "draft": _EAGLE,
    "options": shipped.HEAD_OPTIONS,
  },
  "lookup and eagle 16": {
    "drafter": "merge",
    "draft": _EAGLE,
    "options": {"first": "prompt_lookup", "second": "eagle"},
  },
  "lookup and eagle cost": {
    **_COST,
    "drafter": "merge",
    "draft": _EAGLE,
    "options": shipped.HEAD_OPTIONS,
  },
}


def trained_folder(name: str) -> str:
  """Returns the folder of "--drafts/NAME", or "" if there is none.

  A run of `train.main` serves too: its best is taken. Without the flag it is
  the draft that ships for the model.
  """
  own = name.removeprefix(f"{TRAINED}/")
  if not DRAFTS.value:
    try:
      return str(shipped.folder_of(f"shipped:{MODEL.value}/{own}"))
    except spec_jax.LoadError:
      return ""
  folder = Path(DRAFTS.value) / own
  for place in (folder, folder / "best"):
    if (place / trained.CARD).is_file():
      return str(place)
  return ""


def draft_hash(case: str) -> str | None:
  """Returns the hash of the weights of a case's trained draft, or None."""
  name = CASES.get(case, {}).get("draft")
  folder = trained_folder(name) if name in TRAINED_DRAFTS else ""
  if not folder:
    return None
  card = json.loads((Path(folder) / trained.CARD).read_text("utf-8"))
  return card["weights_sha256"]


def usable_cases(
  loaded: spec_jax.Loaded, work: Work, pattern: str
) -> dict[str, dict[str, Any]]:
  """Returns the cases that can run here, drafts loaded; says which cannot.

  Raises:
    UserError: if there is none.
  """
  given = {OTHER: OTHER_DRAFT.value, CORPUS: INDEX.value}
  given |= {name: trained_folder(name) for name in TRAINED_DRAFTS}
  found = {}
  for name, case in CASES.items():
    if not re.search(pattern, name):
      continue
    made = {**case, "options": dict(case.get("options", {}))}
    asked = [made.get("draft"), *made["options"].values()]
    needs = {x for x in asked if isinstance(x, str) and x in given}
    try:
      if case["drafter"] not in drafters.names():
        raise ValueError(f"there is no drafter {case['drafter']!r}")
      if missing := sorted(x for x in needs if not given[x]):
        raise ValueError(f"it needs {missing[0]}")
      if made.get("draft") == OTHER:
        made["draft"] = spec_jax.load(OTHER_DRAFT.value)
      if made.get("draft") in TRAINED_DRAFTS:
        made["draft"] = given[made["draft"]]
      if CORPUS in needs:
        made["options"]["corpus"] = INDEX.value
      make_engine(loaded, work, batch_size=1, **made)
      found[name] = made
    except (ValueError, spec_jax.LoadError) as error:
      show.note(f"left out: {name}: {error}")
  if not found:
    raise UserError(f"no case of --cases={pattern!r} can run")
  return found


def recorded(case: str) -> dict[str, Any]:
  """Returns what a line says of how its case was measured."""
  return {
    "arguments": CASES.get(case, {}),
    "other_draft": OTHER_DRAFT.value or None,
    "corpus": INDEX.value or None,
    "draft_sha256": draft_hash(case),
  }


def check_arguments(done: Mapping[Any, Mapping], cases: Mapping) -> None:
  """Checks that the lines there are were measured as the cases now say.

  Raises:
    UserError: naming the case that has changed.
  """
  now = {case: recorded(case) for case in cases}
  for line in done.values():
    case = line["case"]
    if case not in now:
      continue
    wanted = json.loads(json.dumps(now[case]))
    for name in "other_draft", "corpus":
      used = f"--{name}" in json.dumps(wanted["arguments"])
      if used and line[name] != wanted[name]:
        raise UserError(
          f"case {case!r} was measured with --{name}={line[name]}, not "
          f"{wanted[name]}"
        )
    if line.get("draft_sha256") != wanted["draft_sha256"]:
      raise UserError(
        f"case {case!r} was measured with another draft than that of --drafts: "
        f"take its lines out of the file"
      )
    if line["arguments"] != wanted["arguments"]:
      raise UserError(
        f"case {case!r} was measured with {line['arguments']}, now it is "
        f"{CASES[case]}: give it another name or take its lines out of the file"
      )
