"""What the lines of `experiments.spec_bench` amount to: table, bars, oracle."""

from collections.abc import Mapping, Sequence
from pathlib import Path
import re
from typing import Any, NamedTuple

from experiments import timing
from experiments.launch import UserError
from spec_jax import drafters
from spec_jax.levels import WAYS

SUBTASKS = (
  "multi-turn",
  "translation",
  "summarization",
  "qa",
  "math_reasoning",
  "rag",
)
EDITING = "editing"
# The case that the command's defaults give where no learned draft ships.
DEFAULT = "lookup cost"

# Part of a varied text's runs of four tokens that may have stood there before.
VARIED = 0.2

_MARKERS = "<!-- spec-bench -->", "<!-- /spec-bench -->"
# What the default case must reach, as a ratio to plain decoding.
_FLOORS = {"summarization": 1.15, "rag": 1.15, EDITING: 1.6}
_ALWAYS = 0.95  # of plain decoding, and of the best fixed setting

Line = Mapping[str, Any]
# What a line of `experiments.spec_bench` must hold to be summed up.
FIELDS = (
  *(f"{who}{x}" for who in ("", "plain_") for x in ("tokens", "decode_s")),
  *("prefill_s", "plain_prefill_s", "ratio", "interval", "total_ratio"),
  *("tokens_per_s", "emitted", "steps", "emitted_per_step", "accept_cond"),
  *("prompts", "text_must_agree", "identical", "different", "costs_s"),
  *("policy", "arguments", "other_draft", "corpus"),
)


class Bar(NamedTuple):
  """A value that must reach a floor.

  Attributes:
    name: what it is.
    value: measured.
    floor: to reach.
  """

  name: str
  value: float
  floor: float

  @property
  def met(self) -> bool:
    """Whether it is reached."""
    return self.value >= self.floor


def ratios(lines: Sequence[Line]) -> dict[str, Any]:
  """Returns the ratio to plain decoding over all prompts of some lines.

  Args:
    lines: with `tokens`, `decode_s`, `prefill_s` and the same of `plain_`, one
      entry a prompt.

  Returns:
    `ratio` and its `interval`; `total_ratio` and `total_interval` of the time
    that includes reading the prompt.
  """

  def column(name: str) -> list[float]:
    return [x for line in lines for x in line[name]]

  def total(who: str) -> list[float]:
    both = zip(column(f"{who}decode_s"), column(f"{who}prefill_s"), strict=True)
    return [a + b for a, b in both]

  tokens, plain = column("tokens"), column("plain_tokens")
  ratio, interval = timing.speed_ratio(
    tokens, column("decode_s"), plain, column("plain_decode_s")
  )
  whole, whole_interval = timing.speed_ratio(
    tokens, total(""), plain, total("plain_")
  )
  return {
    "ratio": ratio,
    "interval": interval,
    "total_ratio": whole,
    "total_interval": whole_interval,
  }


def one_line(line: Line) -> str:
  """Returns a line in words; says loudly if a text differs."""
  low, high = line["interval"]
  text = (
    f"T={line['temperature']:g} {line['subtask']:15} {line['case']:16} "
    f"{line['ratio']:.2f} x plain [{low:.2f}, {high:.2f}], with reading "
    f"{line['total_ratio']:.2f}, {line['tokens_per_s']:.1f} tokens/s, "
    f"{line['emitted_per_step']:.2f} a step, identical "
    f"{line['identical']} of {len(line['tokens'])}"
  )
  wrong = wrong_texts([line])
  return "\n".join([text, *wrong])


def wrong_texts(lines: Sequence[Line]) -> list[str]:
  """Returns a loud sentence for each line whose text should be plain's."""
  return [
    f"!!! TEXT DIFFERS FROM PLAIN DECODING: {x['case']}, T={x['temperature']:g}"
    f", {x['subtask']}, questions {', '.join(map(str, x['different']))}"
    for x in lines
    if x["text_must_agree"] and x["different"]
  ]


def _by(lines: Sequence[Line]) -> dict[tuple[float, str, str], Line]:
  return {(x["temperature"], x["case"], x["subtask"]): x for x in lines}


def _order(lines: Sequence[Line], name: str) -> list[Any]:
  return list(dict.fromkeys(x[name] for x in lines))


def _columns(lines: Sequence[Line]) -> list[str]:
  there = {x["subtask"] for x in lines}
  return [t for t in (*SUBTASKS, EDITING) if t in there]


def markdown(lines: Sequence[Line]) -> str:
  """Returns one table a temperature: ratio and tokens a step by subtask.

  "1.52, 2.1" is 1.52 times plain decoding's tokens/s at 2.1 tokens a step;
  `overall` pools the prompts of the subtasks of Spec-Bench, edits apart, and
  has the interval. A `!` marks a text that is not plain decoding's though it
  must be, a `-` what was not measured.
  """
  found, columns = _by(lines), _columns(lines)
  text = []
  for temperature in sorted(_order(lines, "temperature")):
    what = f"T = {temperature:g}" if temperature else "greedy"
    text += [
      f"| {what} | " + " | ".join([*columns, "overall"]) + " |",
      "|---" * (len(columns) + 2) + "|",
    ]
    for case in _order(lines, "case"):
      ours = {
        t: found[temperature, case, t]
        for t in columns
        if (temperature, case, t) in found
      }
      if not ours:
        continue
      cells = [
        f"{ours[t]['ratio']:.2f}, {ours[t]['emitted_per_step']:.1f}"
        + "!" * bool(wrong_texts([ours[t]]))
        if t in ours
        else "-"
        for t in columns
      ]
      pooled = [line for t, line in ours.items() if t != EDITING]
      whole = "-"
      if len(pooled) == len([t for t in columns if t != EDITING]) and pooled:
        all_ = ratios(pooled)
        low, high = all_["interval"]
        steps = sum(x["steps"] for x in pooled)
        mean = sum(x["emitted"] for x in pooled) / steps
        whole = f"{all_['ratio']:.2f} [{low:.2f}, {high:.2f}], {mean:.1f}"
      text.append(f"| {case} | " + " | ".join([*cells, whole]) + " |")
    text.append("")
  return "\n".join(text)


def write_between(path: Path, text: str) -> None:
  """Puts a text between the markers of a file.

  Raises:
    UserError: if the file does not hold both markers once, in order.
  """
  begin, end = _MARKERS
  whole = path.read_text(encoding="utf-8")
  pattern = f"{re.escape(begin)}.*?{re.escape(end)}"
  if len(re.findall(pattern, whole, re.DOTALL)) != 1:
    raise UserError(f"{path} needs {begin} and {end}, once each")
  new = f"{begin}\n{text.strip()}\n{end}"
  path.write_text(
    re.sub(pattern, lambda _: new, whole, flags=re.DOTALL), encoding="utf-8"
  )


def policy_of(line: Line) -> str:
  """Returns the length policy's name."""
  return line["arguments"].get("policy", "fixed")


def _same_drafter(line: Line, other: Line) -> bool:
  return all(
    line["arguments"].get(name) == other["arguments"].get(name)
    for name in ("drafter", "draft")
  )


def _fixed(lines: Sequence[Line], line: Line) -> list[Line]:
  """Returns the fixed settings of all drafters on a line's prompts."""
  return [
    x
    for x in lines
    if policy_of(x) == "fixed"
    and x["temperature"] == line["temperature"]
    and x["subtask"] == line["subtask"]
  ]


def _siblings(lines: Sequence[Line], line: Line) -> list[Line]:
  """Returns the fixed settings of a line's drafter on the same prompts."""
  return [x for x in _fixed(lines, line) if _same_drafter(x, line)]


def _options(line: Line) -> dict[str, Any]:
  """Returns all options of a line's drafter, its defaults filled in."""
  own = line["arguments"]
  found = {**drafters.options(own["drafter"]), **own.get("options", {})}
  return {name: _plain(value) for name, value in found.items()}


def _plain(value: Any) -> Any:
  return list(value) if isinstance(value, tuple) else value


def _deepest(lines: Sequence[Line]) -> Line | None:
  return max(lines, key=lambda x: len(x["accept_cond"]), default=None)


def _same_tree(lines: Sequence[Line], line: Line) -> Line | None:
  """Returns the fixed case that drafts as a line's does, but always."""
  own = _options(line)
  alike = [x for x in _siblings(lines, line) if _options(x) == own]
  return next(iter(alike), None)


def _copies(lines: Sequence[Line], line: Line) -> Line | None:
  """Returns the deepest fixed case of a merged drafter's copies alone."""
  options = line["arguments"].get("options", {})
  parts = [options[x] for x in ("first", "second") if x in options]
  names = {drafters.parse(x)[0] for x in parts}
  return _deepest(
    [
      x
      for x in _fixed(lines, line)
      if x["arguments"].get("drafter") in names
      and "draft" not in x["arguments"]
    ]
  )


def bars(lines: Sequence[Line]) -> list[Bar]:
  """Returns what the cost-aware policy must reach, and does.

  On every subtask .95 of plain decoding, and .95 of the fixed setting of the
  same drafter that turned out best (plain decoding being one of them); the
  default case also what copying tasks promise.
  """
  found = []
  for line in lines:
    if policy_of(line) != "cost":
      continue
    name = f"{line['case']}, T={line['temperature']:g}, {line['subtask']}"
    found.append(Bar(f"{name}: x plain", line["ratio"], _ALWAYS))
    fixed = _siblings(lines, line)
    if fixed:
      best = max(fixed, key=lambda x: x["ratio"])
      top, title = best["ratio"], best["case"]
      if top < 1:
        top, title = 1.0, "plain"
      found.append(
        Bar(f"{name}: x best fixed ({title})", line["ratio"] / top, _ALWAYS)
      )
    if line["case"] == DEFAULT and line["subtask"] in _FLOORS:
      floor = _FLOORS[line["subtask"]]
      found.append(Bar(f"{name}: x plain", line["ratio"], floor))
  return found


def report_bars(lines: Sequence[Line]) -> str:
  """Returns the bars in words, one a line."""
  return "\n".join(
    f"{'ok    ' if bar.met else 'MISSED'} {bar.value:5.2f} (>= "
    f"{bar.floor:.2f})  {bar.name}"
    for bar in bars(lines)
  )


def time_per_token(
  prompt: Mapping[str, Any], costs: Sequence[float], depth: int
) -> float:
  """Returns the modelled seconds of a token at a fixed depth.

  A step emits 1 and what it accepts at depths up to `depth`, and costs
  `costs[depth]` if anything is proposed, else `costs[0]`. With 10 steps, 8 with
  a proposal, 6 and 3 accepted at depths 1 and 2, and costs 1, 1.5, 2, depth 2
  takes (1 + .8 (2 - 1)) / (1 + .6 + .3) = .947 a token.

  Args:
    prompt: `steps`, and by depth `drafted_at` and `accepted_at`, counted at a
      depth that is no smaller.
    costs: seconds of a step by depth.
    depth: 0 is plain decoding.
  """
  if not depth:
    return costs[0]
  steps = prompt["steps"]
  emitted = 1 + sum(prompt["accepted_at"][:depth]) / steps
  offered = prompt["drafted_at"][0] / steps
  return (costs[0] + offered * (costs[depth] - costs[0])) / emitted


def oracle(line: Line, deepest: Line, copies: Line | None = None) -> float:
  """Returns the ratio to plain that the best depth of each prompt would give.

  Of a merged drafter that is the best depth of both parts, or of its copies
  alone where that is known.

  Modelled: acceptance is what a fixed depth measured, costs are what the
  policy went by at the end, and the depth is chosen in hindsight.

  Args:
    line: of a cost-aware case, for its costs.
    deepest: of the case that always drafts as deep, for its acceptance.
    copies: of the deepest fixed case of a merged drafter's copies alone.
  """
  costs, plain, best = line["costs_s"], 0.0, 0.0
  weights = deepest["tokens"]
  ways = [(deepest, costs)]
  if copies is not None and (own := (line["policy"] or {}).get("ways")):
    relative = own[WAYS[1]]["relative_costs"]
    ways.append((copies, [costs[0], *(x * costs[0] for x in relative)]))
  for tokens, *prompts in zip(
    weights, *(way["prompts"] for way, _ in ways), strict=True
  ):
    times = []
    for prompt, (_, prices) in zip(prompts, ways, strict=True):
      depths = range(min(len(prices), 1 + len(prompt["accepted_at"])))
      times += [time_per_token(prompt, prices, d) for d in depths]
    plain += tokens * costs[0]
    best += tokens * min(times)
  return plain / best


def report_oracle(lines: Sequence[Line]) -> str:
  """Says how close cost-aware cases come to the best depths in hindsight."""
  text = []
  for line in lines:
    deepest = _same_tree(lines, line)
    if policy_of(line) != "cost" or not line["costs_s"] or deepest is None:
      continue
    best = oracle(line, deepest, _copies(lines, line))
    text.append(
      f"{line['case']}, T={line['temperature']:g}, {line['subtask']}: "
      f"{line['ratio']:.2f} of {best:.2f} ({100 * line['ratio'] / best:.0f} %)"
    )
  title = (
    "Modelled: the best depth of each prompt in hindsight, measured costs:"
  )
  return "\n".join([title, *text]) if text else ""


def repeated(ids: Sequence[int], n: int = 4) -> float:
  """Returns the part of a text's runs of `n` tokens that stood there before.

  `1 2 3 4 5 1 2 3 4`: one of six.
  """
  runs = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
  return 1 - len(set(runs)) / len(runs) if runs else 0.0


def report_varied(lines: Sequence[Line], most: float = VARIED) -> str:
  """Says what a step emits over texts that hardly repeat themselves.

  A greedy text that goes round in a loop flatters every draft.

  Args:
    lines: of all subtasks.
    most: part of the runs of 4 tokens that may have stood there before.
  """
  sums: dict[tuple[str, float], list[int]] = {}
  for line in lines:
    for tokens, prompt in zip(line["tokens"], line["prompts"], strict=True):
      if "repeated" not in prompt:
        continue
      kept = prompt["repeated"] < most
      found = sums.setdefault((line["case"], line["temperature"]), [0] * 6)
      for at, value in enumerate((tokens, prompt["steps"], 1)):
        found[at] += value
        found[at + 3] += value * kept
  text = [
    f"Tokens a step over all texts, edits too, and over those less than "
    f"{most:.0%} repeated:"
  ]
  for (case, temperature), (a, b, c, d, e, f) in sums.items():
    some = f"{d / e:.2f}" if e else "-"
    text.append(
      f"{case}, T={temperature:g}: {a / max(b, 1):.2f} of {c} texts, {some} "
      f"of {f}"
    )
  return "\n".join(text) if sums else ""
