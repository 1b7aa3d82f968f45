"""Tests of `python -m experiments.generate`: what users type, see and keep."""

import functools
import json
import os
from pathlib import Path
import signal
import subprocess
import sys
import time

from checkpoints import write_gguf
from commands import run_generate
import pytest
from tiny_model import CONTEXT, tiny_model
from tiny_tokenizer import byte_level_tokenizer

import spec_jax
from spec_jax import hub, weights
from spec_jax.models import decoder

# ml_collections reads a configuration file with it.
pytestmark = pytest.mark.filterwarnings(
  "ignore:.*load_module:DeprecationWarning"
)

_build = functools.cache(decoder.build)

_ROOT = Path(__file__).resolve().parents[1]
# One program for most tests below: it is compiled once.
_SMALL = (
  "--config.sampling.max_new_tokens=12",
  "--config.engine.slots=256",
  "--config.drafter.num_draft=3",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  """A model folder that the command loads by path."""
  return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def unread(monkeypatch):
  """Makes reading any weight a failure of the test."""

  def fill(*args):
    raise AssertionError("weights were read")

  monkeypatch.setattr(weights, "_fill", fill)


@pytest.fixture(autouse=True)
def _built_once(monkeypatch):
  """Gives the same functions for the same architecture: programs are kept."""
  monkeypatch.setattr(decoder, "build", _build)


@pytest.fixture
def command(model, monkeypatch, capsys):
  """Runs the command on the tiny model."""

  def run(*words):
    return run_generate(monkeypatch, capsys, *words, f"--config.model={model}")

  return run


def _lines(path):
  """Returns the JSON of each line of a file."""
  return [json.loads(x) for x in path.read_text("utf-8").splitlines()]


def _text(record):
  """Returns what must be the same in two runs: all but times."""
  samples = [
    {k: v for k, v in s.items() if k != "first_token_s"}
    for s in record["samples"]
  ]
  return record | {"samples": samples}


# --- bad input ----------------------------------------------------------------

_SAMPLING, _ENGINE = "--config.sampling.", "--config.engine."
_VANILLA = "--config.drafter.name=vanilla"
_MISTAKES = {
  "unknown flag": (["--nope=1"], "Unknown command line flag 'nope'"),
  "stray word": (["hello"], "unexpected argument 'hello'; prompts go after"),
  "unknown field": (["--config.nofield=3"], "of the configuration: nofield"),
  "unknown inner field": (["--config.drafter.nope=3"], "configuration: nope"),
  "no config file": (["--config=none.py"], "cannot read the configuration"),
  "not a number": ([f"{_SAMPLING}top_p=x"], "could not convert string to"),
  "top_p 0": ([f"{_SAMPLING}top_p=0"], "top_p must be in (0, 1], got 0.0"),
  "top_p 1.5": ([f"{_SAMPLING}top_p=1.5"], "top_p must be in (0, 1], got 1.5"),
  "temperature": ([f"{_SAMPLING}temperature=-1"], "temperature must be in [0"),
  "temperature nan": ([f"{_SAMPLING}temperature=nan"], "temperature must be"),
  "top_k": ([f"{_SAMPLING}top_k=-1"], "top_k must be an integer >= 0, got -1"),
  "no tokens": ([f"{_SAMPLING}max_new_tokens=0"], "max_new_tokens must be"),
  "no samples": ([f"{_SAMPLING}num_samples=0"], "num_samples must be an"),
  "banned id": ([f"{_SAMPLING}banned_tokens=(300,)"], "holds id 300, the"),
  "biased id": ([f"{_SAMPLING}logit_bias=((999,1.0),)"], "holds id 999, the"),
  "33 stops": (
    [f"{_SAMPLING}stop_strings={tuple(map(str, range(10, 43)))}"],
    "at most 32 stop strings fit one automaton, got 33",
  ),
  "seed": (["--config.seed=-1"], "seed must be in [0, 2**63), got -1"),
  "k": (["--config.drafter.num_draft=0"], "num_draft must be at least 1, got"),
  "n-gram": (["--config.drafter.max_ngram=0"], "need 1 <= min_ngram <= max_"),
  "drafter": (["--config.drafter.name=magic"], "unknown drafter 'magic'; ther"),
  "option": (
    ["--config.drafter.tree=(2,2)"],
    "drafter 'prompt_lookup' has no option 'tree'; it has num_draft, max_ngram",
  ),
  "no draft": ([_VANILLA], "drafter 'vanilla' needs --config.drafter.draft"),
  "draft layers": (
    [_VANILLA, "--config.drafter.draft=3"],
    "the draft's layers must be in [1, 2], got 3",
  ),
  "needless draft": (
    ["--config.drafter.draft=target"],
    "drafter 'prompt_lookup' takes no draft model, got 'target'",
  ),
  "siblings": (
    [_VANILLA, "--config.drafter.draft=1", "--config.drafter.siblings=x"],
    "siblings must be one of iid, without_replacement, top_k, got 'x'",
  ),
  "tree": (
    [_VANILLA, "--config.drafter.draft=1", "--config.drafter.tree=(0,)"],
    "must be",
  ),
  "slots": ([f"{_ENGINE}slots=-1"], "slots must be at least 1, got -1"),
  "many slots": ([f"{_ENGINE}slots=9999"], "9999 slots; the model's context"),
  "rows": ([f"{_ENGINE}batch_size=-1"], "batch_size must be at least 1, got"),
  "chunk": ([f"{_ENGINE}chunk=-1"], "chunk must be at least 0, got -1"),
  "mesh": (["--config.mesh=3"], "mesh must look like 2x4 (rows x model), got"),
  "large mesh": (["--config.mesh=3x99"], "needs 297 devices"),
  "rows of a mesh": (
    ["--config.mesh=2x1", f"{_ENGINE}batch_size=3"],
    "batch_size 3 is not a multiple of the mesh's 2 row devices",
  ),
  "dtype": (["--config.dtype=int8"], "dtype 'int8' is not float32, bfloat16"),
  "log-probabilities": (["--config.logprobs=x"], "logprobs must be one of"),
  "template": (["--config.chat_template=x"], "chat_template must be one of"),
  "empty prompt": (["--prompt="], "prompt 0 is empty"),
  "blank prompt": (["--prompt=a", "--prompt= "], "prompt 1 is empty"),
  "long prompt": (
    ["--prompt=" + CONTEXT * "x"],
    f"tokens; the context is {CONTEXT}",
  ),
  "prompt beyond the slots": (
    ["--prompt=" + 64 * "x", f"{_ENGINE}slots=64"],
    "prompt 0 has 82 tokens; the context is 64",
  ),
  "no prompts": (["--prompts=nowhere.txt"], "cannot read nowhere.txt: No such"),
  "no folder": (["--out=nowhere/x.jsonl"], "nowhere is no folder"),
  "chat and prompt": (["--chat", "--prompt=a"], "--chat takes no --prompt"),
  "chat of two": (
    ["--chat", f"{_SAMPLING}num_samples=2"],
    "--chat gives one answer a turn, got num_samples 2",
  ),
  "chat without template": (
    ["--chat", "--config.chat_template=no"],
    "--chat needs the chat template",
  ),
}


@pytest.mark.parametrize("name", _MISTAKES)
def test_bad_input_is_one_line_before_weights(command, unread, name):
  """A mistake ends in one plain line and code 2; no weight has been read."""
  words, message = _MISTAKES[name]
  ran = command(*words)
  assert ran.code == 2 and ran.out == ""
  assert ran.err.startswith("error: ") and ran.err.count("\n") == 1
  assert message in ran.err


def _nothing(folder):
  return folder / "nothing", "is no folder, no .gguf file, no built-in model"


def _truncated(folder):
  file = tiny_model(folder) / "model.safetensors"
  file.write_bytes(file.read_bytes()[:-7])
  return folder, "is truncated"


def _not_gguf(folder):
  folder.mkdir()
  (folder / "x.gguf").write_bytes(b"no such thing, but long enough")
  return folder / "x.gguf", "x.gguf"


def _short_gguf(folder):
  folder.mkdir()
  file = write_gguf(folder / "x.gguf")
  file.write_bytes(file.read_bytes()[:2000])
  return file, "x.gguf"


def _bad_config(folder):
  (tiny_model(folder) / "config.json").write_text("{")
  return folder, "config.json cannot be read"


def _other_type(folder):
  return tiny_model(folder, model_type="mamba"), "unknown model type 'mamba'"


@pytest.mark.parametrize(
  "make",
  [_nothing, _truncated, _not_gguf, _short_gguf, _bad_config, _other_type],
)
def test_a_bad_model_is_one_line(tmp_path, monkeypatch, capsys, unread, make):
  """Unknown, damaged and unsupported models are refused in one line."""
  path, message = make(tmp_path / "m")
  ran = run_generate(monkeypatch, capsys, f"--config.model={path}")
  assert ran.code == 2 and ran.out == ""
  assert ran.err.startswith("error: ") and ran.err.count("\n") == 1
  assert message in ran.err


def test_a_draft_of_another_vocabulary_is_named_by_its_first_id(
  command, tmp_path, unread
):
  """The first id that means two things stands in the message."""
  draft = tiny_model(tmp_path / "draft")
  words = json.loads((draft / "tokenizer.json").read_text())
  vocab = words["model"]["vocab"]
  vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
  (draft / "tokenizer.json").write_text(json.dumps(words))
  ran = command(_VANILLA, f"--config.drafter.draft={draft}")
  first = min(vocab["A"], vocab["B"])
  assert ran.code == 2 and ran.err.count("\n") == 1
  assert f"differ first at id {first}: 'A' and 'B'" in ran.err


def test_a_refused_run_leaves_no_file(command, tmp_path, unread):
  """A new --out is taken away again if nothing came of the run."""
  out = tmp_path / "x.jsonl"
  ran = command(f"--out={out}", "--config.drafter.num_draft=0")
  assert ran.code == 2 and list(tmp_path.iterdir()) == []


def test_nothing_written_is_lost(command, tmp_path):
  """A file of another run, or of anything else, is left as it is."""
  out = tmp_path / "x.jsonl"
  out.write_text("my notes\n")
  ran = command(f"--out={out}", "--prompt=a", *_SMALL)
  assert ran.code == 2 and "another configuration or other prompts" in ran.err
  assert out.read_text() == "my notes\n"
  assert [p.name for p in tmp_path.iterdir()] == ["x.jsonl"]


# --- what it shows ------------------------------------------------------------


def test_dry_run_prints_the_resolved_configuration(command, unread):
  """Every field, overrides in place, and the drafter's own defaults."""
  ran = command("--dry_run", "--config.sampling.top_p=0.5", "--prompt=a")
  assert (ran.code, ran.err) == (0, "")
  assert "  top_p: 0.5\n" in ran.out and "\nseed: 0\n" in ran.out
  # The default of `prompt_lookup`, as its docstring in the README says.
  assert "drafter_options:\n  num_draft: 3\n" in ran.out
  assert ran.out.endswith("# 1 prompts\n")


def test_no_argument_is_needed(monkeypatch, capsys, model):
  """The built-in model decodes the default prompts."""
  monkeypatch.setattr(hub, "download_builtin", lambda name: model)
  monkeypatch.setattr(hub, "_open_gguf", hub._open_folder)
  ran = run_generate(monkeypatch, capsys)
  assert ran.code == 0, ran.err
  assert ran.err.startswith("smollm2-135m-instruct | drafter prompt_lookup")
  assert ran.out.count("\n>>> ") == 3 and "(3 of 3 prompts)" in ran.out


def _cells(out, label):
  """Returns the words of the table's row of that label."""
  (row,) = [x for x in out.splitlines() if x.startswith(label + "  ")]
  return row[len(label) :].split()


def test_streamed_text_is_the_recorded_text(command, tmp_path):
  """What is streamed joins to the text of the file, sample by sample."""
  out = tmp_path / "x.jsonl"
  ran = command(
    "--prompt=Say 😀",
    "--prompt=b",
    f"--out={out}",
    "--config.sampling.num_samples=2",
    "--config.sampling.temperature=1.0",
    "--nocompare",
    *_SMALL,
  )
  assert ran.code == 0, ran.err
  first, second = _lines(out)
  a, b = [[s["text"] for s in r["samples"]] for r in (first, second)]
  assert a[0] != a[1]
  assert ran.out.startswith(
    f"\n>>> Say 😀\n{a[0]}\n--- sample 1\n{a[1]}\n"
    f"\n>>> b\n{b[0]}\n--- sample 1\n{b[1]}\n"
  )


def test_the_table_has_plain_and_speculative_side_by_side(command):
  """Counts add up, texts are identical, compile time is apart."""
  ran = command("--prompt=aaaa bbbb", "--prompt=b", *_SMALL)
  assert ran.code == 0, ran.err
  assert "                                 plain   speculative\n" in ran.out
  assert _cells(ran.out, "tokens emitted") == ["24", "24"]
  assert _cells(ran.out, "identical text")[0] == "yes"
  assert "(2 of 2 prompts)" in ran.out
  steps = [int(x) for x in _cells(ran.out, "steps")]
  per_step = [float(x) for x in _cells(ran.out, "emitted per step")]
  assert steps[0] == 24 and per_step[0] == 1.0
  assert steps[1] <= 24 and abs(per_step[1] - 24 / steps[1]) < 0.006
  for label in (
    "compile, s",
    "prefill, tokens/s",
    "time to first token, s",
    "decode, tokens/s",
    "drafted per step",
    "accepted per step",
  ):
    assert len(_cells(ran.out, label)) == 2


def test_without_comparison_only_speculation_runs(command):
  """--nocompare shows one column and says nothing of identical texts."""
  ran = command("--prompt=a", "--nocompare", *_SMALL)
  assert ran.code == 0 and "plain" not in ran.out
  assert _cells(ran.out, "tokens emitted") == ["12"]
  assert "identical" not in ran.out


def test_drafter_none_is_plain_decoding(command):
  """One token a step, nothing drafted, nothing compared."""
  ran = command("--prompt=a", "--config.drafter.name=none", *_SMALL[:2])
  assert ran.code == 0 and "speculative" not in ran.out
  assert _cells(ran.out, "emitted per step") == ["1.00"]
  assert _cells(ran.out, "drafted per step") == ["0.00"]


def test_many_prompts_show_their_texts_too(command):
  """Five prompts run in one batch; each text is shown when it is done."""
  ran = command(*[f"--prompt={c}" for c in "abcde"], *_SMALL)
  assert ran.code == 0, ran.err
  for letter in "abcde":
    assert f"\n>>> {letter}\n" in ran.out
  assert "(5 of 5 prompts)" in ran.out


def test_stop_strings_cut_the_text(command, tmp_path, model):
  """Text ends where the stop string begins; ids keep what completes it."""
  whole, cut = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
  raw = ("--config.chat_template=no", "--prompt=abc", *_SMALL)
  assert command(f"--out={whole}", *raw).code == 0
  (full,) = _lines(whole)
  stop = full["text"][3:5]
  at = full["text"].index(stop)
  ran = command(
    f"--out={cut}",
    f"--config.sampling.stop_strings=({stop!r},)",
    "--nocompare",
    *raw,
  )
  assert ran.code == 0, ran.err
  (record,) = _lines(cut)
  (sample,) = record["samples"]
  assert sample["text"] == full["text"][:at]
  assert sample["finish_reason"] == "stop_string"
  assert sample["ids"] == full["samples"][0]["ids"][: len(sample["ids"])]
  assert sample["emitted"] == len(sample["ids"]) < 12
  assert record["identical"] is None
  assert f"\n>>> abc\n{sample['text']}\n" in ran.out


# --- what it keeps ------------------------------------------------------------


def test_a_line_holds_text_ids_counts_and_identical(command, tmp_path):
  """Each prompt is one line, in order; greedy texts are identical."""
  out = tmp_path / "x.jsonl"
  prompts = [f"--prompt={c}" for c in "abcdef"]
  ran = command(f"--out={out}", *prompts, *_SMALL)
  assert ran.code == 0, ran.err
  assert f"6 of 6 prompts in {out}\n" in ran.out
  lines = _lines(out)
  assert [x["prompt"] for x in lines] == list(range(6))
  words = byte_level_tokenizer()
  for line in lines:
    (sample,) = line["samples"]
    assert line["identical"] is True and line["text"] == sample["text"]
    assert words.decode(sample["ids"], skip_special_tokens=True) == line["text"]
    assert len(sample["ids"]) == sample["emitted"] == 12
    # One token a step beside the accepted ones; the limit may cut one.
    assert 0 <= sample["steps"] + sample["accepted"] - sample["emitted"] <= 1


def test_the_manifest_says_what_the_numbers_depend_on(command, tmp_path, model):
  """Configuration and defaults, seed, versions, device, hashes, reports."""
  out = tmp_path / "x.jsonl"
  ran = command(f"--out={out}", "--prompt=a", "--config.seed=5", *_SMALL)
  assert ran.code == 0, ran.err
  manifest = json.loads((tmp_path / "x.manifest.json").read_text())
  assert manifest["seed"] == 5 and manifest["lossy"] is False
  assert manifest["config"]["sampling"]["max_new_tokens"] == 12
  # What was not set is there too, at the value that was used.
  assert manifest["drafter_options"] == {
    "num_draft": 3,
    "max_ngram": 3,
    "min_ngram": 1,
    "match": "last",
  }
  assert manifest["engine"]["batch_size"] == 1
  assert manifest["engine"]["slots"] == 256 and manifest["engine"]["chunk"] > 0
  assert manifest["dtype"] == "float32" and manifest["num_prompts"] == 1
  environment = manifest["environment"]
  assert environment["platform"] == "cpu" and environment["device"]
  assert {"jax", "jaxlib", "numpy"} <= environment["versions"].keys()
  assert {"commit", "date", "python", "cpus"} <= environment.keys()
  for name, file in (
    ("weights_sha256", "model.safetensors"),
    ("tokenizer_sha256", "tokenizer.json"),
  ):
    listed = subprocess.run(
      ["sha256sum", model / file], capture_output=True, text=True, check=True
    )
    assert manifest[name] == listed.stdout.split()[0]
  assert manifest["draft_weights_sha256"] is None
  assert manifest["reports"]["speculative"]["emitted"] == 12
  assert manifest["reports"]["plain"]["steps"] == 12


def _prompt_file(folder, count=7):
  """Writes a file of prompts and returns its flag."""
  file = folder / "prompts.jsonl"
  texts = [f"prompt {i} " + "xy " * (i % 9) for i in range(count)]
  file.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
  return f"--prompts={file}"


def test_a_run_resumes_after_a_torn_line(command, tmp_path, monkeypatch):
  """Whole lines are kept and not decoded again; the file ends the same."""
  out, prompts = tmp_path / "x.jsonl", _prompt_file(tmp_path)
  words = (prompts, f"--out={out}", *_SMALL)
  assert command(*words).code == 0
  whole = out.read_bytes().splitlines(keepends=True)
  out.write_bytes(b"".join(whole[:4]) + whole[4][:20])
  ran = command(*words)
  assert ran.code == 0 and f"7 of 7 prompts in {out}\n" in ran.out
  again = out.read_bytes().splitlines(keepends=True)
  assert again[:4] == whole[:4]  # untouched, times and all
  same = [_text(json.loads(x)) for x in whole]
  assert [_text(json.loads(x)) for x in again] == same
  # Three prompts were decoded, not seven.
  assert _cells(ran.out, "tokens emitted") == ["36", "36"]


def test_a_finished_run_stays_as_it_is(command, tmp_path):
  """Asked again, the command decodes nothing and changes no line."""
  out = tmp_path / "x.jsonl"
  words = ("--prompt=a", f"--out={out}", *_SMALL)
  assert command(*words).code == 0
  before = out.read_bytes()
  ran = command(*words)
  assert ran.code == 0 and out.read_bytes() == before
  assert _cells(ran.out, "tokens emitted") == ["0", "0"]
  assert "nan" not in ran.out
  json.loads(
    (tmp_path / "x.manifest.json").read_text(), parse_constant=pytest.fail
  )


@pytest.mark.parametrize(
  "change",
  [
    ["--config.sampling.temperature=0.5"],
    ["--config.seed=1"],
    ["--prompt=b"],
    ["--trace"],
    ["--nocompare"],
  ],
)
def test_another_run_does_not_write_into_a_file(
  command, tmp_path, unread, change
):
  """Settings, seed, prompts and flags belong to a file."""
  out = tmp_path / "x.jsonl"
  manifest = tmp_path / "x.manifest.json"
  from experiments import results

  words = (f"--out={out}", "--prompt=a")
  seen = []
  keep = results.ResultFile.__init__

  def look(self, path, identity):
    seen.append(results.digest(identity))
    keep(self, path, identity)

  results.ResultFile.__init__ = look
  try:
    with pytest.raises(AssertionError, match="weights were read"):
      command(*words)
    out.write_text('{"prompt": 0}\n')
    manifest.write_text(json.dumps({"identity": seen[0]}))
    ran = command(*words, *change)
  finally:
    results.ResultFile.__init__ = keep
  assert ran.code == 2 and "another configuration or other prompts" in ran.err
  assert out.read_text() == '{"prompt": 0}\n'


def test_a_file_made_with_other_weights_is_not_continued(
  monkeypatch, capsys, tmp_path
):
  """The same path with other weights is another model."""
  folder, out = tmp_path / "m", tmp_path / "x.jsonl"
  words = (f"--config.model={folder}", f"--out={out}", "--prompt=a", *_SMALL)
  tiny_model(folder)
  assert run_generate(monkeypatch, capsys, *words).code == 0
  before = out.read_bytes()
  tiny_model(folder, seed=1)
  ran = run_generate(monkeypatch, capsys, *words)
  assert ran.code == 2 and "with another weights_sha256" in ran.err
  assert out.read_bytes() == before


def test_a_trace_adds_up(command, tmp_path):
  """Tokens of the steps join to the ids; p, q and the last draw are laws."""
  out = tmp_path / "x.jsonl"
  ran = command(
    "--trace",
    "--prompt=a",
    f"--out={out}",
    "--nocompare",
    _VANILLA,
    "--config.drafter.draft=1",
    "--config.logprobs=raw",
    "--config.sampling.temperature=1.0",
    "--config.sampling.num_samples=2",
    *_SMALL,
  )
  assert ran.code == 0, ran.err
  refused = 0
  for sample in _lines(out)[0]["samples"]:
    steps = sample["trace"]
    assert len(sample["logprobs"]) == 12 and max(sample["logprobs"]) <= 0
    assert len(steps) == sample["steps"]
    assert [i for s in steps for i in s["ids"]] == sample["ids"]
    assert sum(len(s["drafted"]) for s in steps) == sample["drafted"]
    assert sum(s["num_accepted"] for s in steps) == sample["accepted"]
    for step in steps:
      accepted = [n["token"] for n in step["drafted"] if n["accepted"]]
      last = step["last"]
      walked = [*accepted, last["token"]]
      assert step["ids"] == walked[: step["num_tokens"]]
      assert 0 < last["p"] <= 1 and last["from"] in ("target", "residual")
      for node in step["drafted"]:
        assert 0 < node["q"] <= 1 and node["law"] == "iid"
        known = node["p"] is not None
        # The walk went by the first node after the accepted ones, no deeper.
        assert known == (node["node"] <= len(accepted) + 1)
        assert not known or 0 <= node["p"] <= 1
      if len(accepted) < len(step["drafted"]):
        assert last["from"] == "residual"
        refused += 1
  assert refused


def test_without_a_file_a_trace_is_shown(command):
  """Each step is one line with its drafted words and its last one."""
  ran = command("--trace", "--prompt=aaaa", "--nocompare", *_SMALL)
  assert ran.code == 0, ran.err
  steps = [x for x in ran.out.splitlines() if x.startswith("step ")]
  assert len(steps) == int(_cells(ran.out, "steps")[0])
  assert all(" -> " in x and " (p=" in x for x in steps)


# --- a conversation -----------------------------------------------------------


def _talk(command, monkeypatch, *lines, words=()):
  """Types these lines and then end-of-file; returns what was run."""
  typed = iter(lines)

  def answer(prompt=""):
    print(prompt, end="")
    try:
      return next(typed)
    except StopIteration:
      raise EOFError from None

  monkeypatch.setattr("builtins.input", answer)
  return command("--chat", *_SMALL, *words)


def _replies(out):
  """Returns (text, prompt tokens read) of each turn."""
  found = []
  for part in out.split("bot> ")[1:]:
    text, _, rest = part.rpartition("\n[12 tokens, ")
    found.append((text, int(rest.split(" prompt tokens")[0].split()[-1])))
  return found


def test_a_second_turn_continues_the_state(command, monkeypatch, model):
  """Turn 2 reads the new tokens only, and says what a fresh run says."""
  ran = _talk(command, monkeypatch, "Hello", "", "And you?")
  assert ran.code == 0, ran.err
  (first, read_1), (second, read_2) = _replies(ran.out)
  run = functools.partial(
    spec_jax.generate,
    spec_jax.load(model),
    settings=spec_jax.Settings(max_new_tokens=12),
    slots=256,
    seed=0,
  )
  talk = [{"role": "user", "content": "Hello"}]
  fresh = run(talk)
  assert fresh.texts == [first]
  assert read_1 == len(fresh.completions[0].prompt_ids)
  talk += [
    {"role": "assistant", "content": first},
    {"role": "user", "content": "And you?"},
  ]
  fresh = run(talk)
  assert fresh.texts == [second]
  # Held: the first prompt and its 12 tokens but the last one.
  whole = len(fresh.completions[0].prompt_ids)
  assert read_2 == whole - (read_1 + 11)


def test_reset_forgets_and_quit_leaves(command, monkeypatch):
  """After /reset the same words get the same answer; /quit ends."""
  ran = _talk(command, monkeypatch, "Hello", "/reset", "Hello", "/quit", "x")
  assert ran.code == 0
  first, again = _replies(ran.out)
  assert first == again


def test_a_full_conversation_says_so(command, monkeypatch):
  """What does not fit is not read; the conversation goes on."""
  ran = _talk(command, monkeypatch, "x" * 300, "Hello")
  assert "the conversation fills the 256 tokens; /reset starts" in ran.out
  assert ran.code == 0 and len(_replies(ran.out)) == 1


# --- true processes -----------------------------------------------------------


# A shell's background jobs ignore SIGINT, and so would their children.
_PROGRAM = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("experiments.generate", run_name="__main__", alter_sys=True)
"""


def _start(folder, *words, **kwargs):
  """Starts the command as a user would."""
  return subprocess.Popen(
    [sys.executable, "-c", _PROGRAM, *words],
    cwd=_ROOT,
    env=os.environ | {"SPEC_JAX_CACHE": str(folder / "cache")},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    **kwargs,
  )


def _wait_for_lines(process, out, count):
  """Waits until a file has so many whole lines."""
  deadline = time.monotonic() + 120
  while time.monotonic() < deadline and process.poll() is None:
    if out.exists() and out.read_bytes().count(b"\n") >= count:
      return
    time.sleep(0.01)
  process.kill()
  raise AssertionError(process.communicate())


def test_a_killed_run_resumes_to_the_same_file(command, tmp_path, model):
  """kill -9 in the middle, then the same command: the whole file."""
  whole, out = tmp_path / "whole.jsonl", tmp_path / "x.jsonl"
  words = (_prompt_file(tmp_path, 60), *_SMALL, "--config.engine.batch_size=1")
  process = _start(tmp_path, f"--config.model={model}", f"--out={out}", *words)
  _wait_for_lines(process, out, 4)
  process.send_signal(signal.SIGKILL)
  process.communicate()
  killed = out.read_bytes()
  assert 4 <= killed.count(b"\n") < 60
  assert command(f"--out={out}", *words).code == 0
  assert out.read_bytes().startswith(killed[: killed.rindex(b"\n") + 1])
  assert command(f"--out={whole}", *words).code == 0
  assert list(map(_text, _lines(out))) == list(map(_text, _lines(whole)))


def test_ctrl_c_leaves_a_valid_file(tmp_path, model):
  """An interrupt ends in one line; every line and the manifest are whole."""
  out = tmp_path / "x.jsonl"
  process = _start(
    tmp_path,
    f"--config.model={model}",
    f"--out={out}",
    _prompt_file(tmp_path, 400),
    *_SMALL,
    "--config.engine.batch_size=1",
  )
  _wait_for_lines(process, out, 4)
  process.send_signal(signal.SIGINT)
  shown, err = process.communicate(timeout=60)
  assert process.returncode == 130
  assert "Traceback" not in err and err.endswith("\nstopped\n")
  lines = _lines(out)
  assert 4 <= len(lines) < 400
  assert [x["prompt"] for x in lines] == list(range(len(lines)))
  assert f"{len(lines)} of 400 prompts in {out}\n" in shown
  manifest = json.loads((tmp_path / "x.manifest.json").read_text())
  assert manifest["reports"]["speculative"]["emitted"] >= 12 * len(lines)
