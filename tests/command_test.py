"""Tests of `python -m experiments.generate`: bad input and what is shown."""

import json

from checkpoints import write_gguf
from commands import (
  SMALL,
  VANILLA,
  built_once as built_once,
  cells,
  command as command,
  model as model,
  read_lines,
  run_generate,
  unread as unread,
)
import pytest
from tiny_model import CONTEXT, tiny_model

from spec_jax import hub

# ml_collections reads a configuration file with it.
pytestmark = pytest.mark.filterwarnings(
  "ignore:.*load_module:DeprecationWarning"
)

# --- bad input ----------------------------------------------------------------

_SAMPLING, _ENGINE = "--config.sampling.", "--config.engine."
_MISTAKES = {
  "unknown flag": (["--nope=1"], "Unknown command line flag 'nope'"),
  "stray word": (["hello"], "unexpected argument 'hello'; prompts go after"),
  "unknown field": (["--config.nofield=3"], "of the configuration: nofield"),
  "unknown inner field": (["--config.drafter.nope=3"], "configuration: nope"),
  "no config file": (["--config=none.py"], "cannot read the configuration"),
  "policy": (
    ["--config.policy.name=x"],
    "unknown length policy 'x'; there are",
  ),
  "policy option": (
    ["--config.policy.name=average", "--config.policy.probe=3"],
    "length policy 'average' has no option 'probe'; it has start",
  ),
  "policy without a law": (
    ["--config.policy.name=confidence"],
    "looks at the draft's law, and this drafter has none",
  ),
  "block of copies": (
    ["--config.verifier.name=block"],
    "block verification needs tokens drawn at random",
  ),
  "block of a tree": (
    [
      "--config.verifier.name=block",
      "--config.drafter.name=vanilla",
      "--config.drafter.draft=target",
      "--config.drafter.tree=(2, 1)",
    ],
    "block verification is for chains, not for trees",
  ),
  "k_seq of copies": (
    ["--config.verifier.name=k_seq"],
    "K-SEQ needs siblings drawn independently",
  ),
  "epsilon": (
    ["--config.verifier.name=typical", "--config.verifier.epsilon=2"],
    "epsilon must be in (0, 1], got 2.0",
  ),
  "lenience of copies": (
    ["--config.verifier.name=lenience"],
    "lenience needs tokens drawn at random",
  ),
  "verifier option": (
    ["--config.verifier.rho=2"],
    "verifier 'token' has no option 'rho'; it has none",
  ),
  "verifier of nothing": (
    ["--config.drafter.name=none", "--config.verifier.name=typical"],
    "drafter 'none' proposes nothing for verifier 'typical' to judge",
  ),
  "verifier option of nothing": (
    ["--config.drafter.name=none", "--config.verifier.lenience=.5"],
    "verifier 'token' has no option 'lenience'; it has none",
  ),
  "policy option of nothing": (
    ["--config.drafter.name=none", "--config.policy.probe=0"],
    "probe must be at least 1",
  ),
  "chain too long": (
    ["--config.drafter.num_draft=100000"],
    "a draft tree has at most 1024 nodes, got 100001",
  ),
  "window too wide": (
    ["--config.drafter.name=lookahead", "--config.drafter.window=100000"],
    "a draft tree has at most 1024 nodes",
  ),
  "parent too large": (
    [
      "--config.drafter.name=recycling",
      "--config.drafter.parents=(-1,99999999999)",
    ],
    "a parent must come before its child",
  ),
  "layers without end": (
    [VANILLA, "--config.drafter.draft=0-99999999999"],
    "names layers above 9999",
  ),
  "children": (
    [VANILLA, "--config.drafter.draft=1", "--config.drafter.tree=(301,)"],
    "a node of the tree has 301 children, but there are 300 tokens",
  ),
  "costs": (
    ["--config.drafter.num_draft=2", "--config.policy.costs=(1.0,1e999,1.0)"],
    "3 costs above 0 are needed",
  ),
  "costs of words": (
    ["--config.policy.costs=('a',)"],
    "policy.costs holds seconds",
  ),
  "verifier": (["--config.verifier.name=x"], "unknown verifier 'x'; there are"),
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
  "no draft": ([VANILLA], "drafter 'vanilla' needs --config.drafter.draft"),
  "draft layers": (
    [VANILLA, "--config.drafter.draft=3"],
    "the draft's layers must be in [1, 2], got 3",
  ),
  "needless draft": (
    ["--config.drafter.name=prompt_lookup", "--config.drafter.draft=target"],
    "drafter 'prompt_lookup' takes no draft model, got 'target'",
  ),
  "draft of nobody": (
    ["--config.drafter.draft=target"],
    "drafter.draft is 'target', but for which drafter?",
  ),
  "siblings": (
    [VANILLA, "--config.drafter.draft=1", "--config.drafter.siblings=x"],
    "siblings must be one of iid, without_replacement, top_k, got 'x'",
  ),
  "tree": (
    [VANILLA, "--config.drafter.draft=1", "--config.drafter.tree=(0,)"],
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
  ran = command(VANILLA, f"--config.drafter.draft={draft}")
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
  ran = command(f"--out={out}", "--prompt=a", *SMALL)
  assert ran.code == 2 and "another configuration or other prompts" in ran.err
  assert out.read_text() == "my notes\n"
  assert [p.name for p in tmp_path.iterdir()] == ["x.jsonl"]


# --- what it shows ------------------------------------------------------------


def test_dry_run_prints_the_resolved_configuration(command, unread):
  """Every field, overrides in place, and the drafter's own defaults."""
  name = "--config.drafter.name=prompt_lookup"
  ran = command("--dry_run", name, "--config.sampling.top_p=0.5", "--prompt=a")
  assert (ran.code, ran.err) == (0, "")
  assert "  top_p: 0.5\n" in ran.out and "\nseed: 0\n" in ran.out
  # The default of `prompt_lookup`, as its docstring in the README says.
  assert "drafter_options:\n  num_draft: 7\n" in ran.out
  assert ran.out.endswith("# 1 prompts\n")


def test_no_argument_is_needed(monkeypatch, capsys, model):
  """The built-in model decodes the default prompts."""
  monkeypatch.setattr(hub, "download_builtin", lambda name: model)
  monkeypatch.setattr(hub, "_open_gguf", hub._open_folder)
  ran = run_generate(monkeypatch, capsys)
  assert ran.code == 0, ran.err
  assert ran.err.startswith("smollm2-135m-instruct | drafter prompt_lookup")
  assert ran.out.count("\n>>> ") == 3 and "(3 of 3 prompts)" in ran.out


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
    *SMALL,
  )
  assert ran.code == 0, ran.err
  first, second = read_lines(out)
  a, b = [[s["text"] for s in r["samples"]] for r in (first, second)]
  assert a[0] != a[1]
  assert ran.out.startswith(
    f"\n>>> Say 😀\n{a[0]}\n--- sample 1\n{a[1]}\n"
    f"\n>>> b\n{b[0]}\n--- sample 1\n{b[1]}\n"
  )


def test_the_table_has_plain_and_speculative_side_by_side(command):
  """Counts add up, texts are identical, compile time is apart."""
  ran = command("--prompt=aaaa bbbb", "--prompt=b", *SMALL)
  assert ran.code == 0, ran.err
  assert "                                 plain   speculative\n" in ran.out
  assert cells(ran.out, "tokens emitted") == ["24", "24"]
  assert cells(ran.out, "identical text")[0] == "yes"
  assert "(2 of 2 prompts)" in ran.out and "lossy" not in ran.out
  steps = [int(x) for x in cells(ran.out, "steps")]
  per_step = [float(x) for x in cells(ran.out, "emitted per step")]
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
    assert len(cells(ran.out, label)) == 2


def test_a_lossy_rule_is_said_to_be_lossy(command, tmp_path):
  """In the table, in each line and in the manifest."""
  out = tmp_path / "x.jsonl"
  words = (
    "--config.verifier.name=typical",
    "--config.verifier.epsilon=0.2",
    "--config.sampling.temperature=1.0",
    "--prompt=aaaa bbbb",
    *SMALL,
  )
  ran = command(f"--out={out}", *words)
  assert ran.code == 0, ran.err
  (shown,) = [x for x in ran.out.splitlines() if x.startswith("lossy: ")]
  manifest = json.loads((tmp_path / "x.manifest.json").read_text())
  report = manifest["reports"]["speculative"]
  far = report["divergence"]
  assert manifest["lossy"] is True and report["lossy"] is True
  assert 0.01 < far <= 1
  assert shown == f"lossy: mean total variation {far:.4f} per token"
  (line,) = read_lines(out)
  (sample,) = line["samples"]
  assert line["lossy"] is True
  assert abs(sample["divergence"] / sample["emitted"] - far) < 1e-6
  assert "the rule is lossy, so the law is another" in ran.out
  plain = manifest["reports"]["plain"]
  assert plain["lossy"] is False and plain["divergence"] is None


def test_without_comparison_only_speculation_runs(command):
  """--nocompare shows one column and says nothing of identical texts."""
  ran = command("--prompt=a", "--nocompare", *SMALL)
  assert ran.code == 0 and "plain" not in ran.out
  assert cells(ran.out, "tokens emitted") == ["12"]
  assert "identical" not in ran.out


def test_drafter_none_is_plain_decoding(command):
  """One token a step, nothing drafted, nothing compared."""
  ran = command("--prompt=a", "--config.drafter.name=none", *SMALL[:2])
  assert ran.code == 0 and "speculative" not in ran.out
  assert cells(ran.out, "emitted per step") == ["1.00"]
  assert cells(ran.out, "drafted per step") == ["0.00"]


def test_many_prompts_show_their_texts_too(command):
  """Five prompts run in one batch; each text is shown when it is done."""
  ran = command(*[f"--prompt={c}" for c in "abcde"], *SMALL)
  assert ran.code == 0, ran.err
  for letter in "abcde":
    assert f"\n>>> {letter}\n" in ran.out
  assert "(5 of 5 prompts)" in ran.out


def test_stop_strings_cut_the_text(command, tmp_path, model):
  """Text ends where the stop string begins; ids keep what completes it."""
  whole, cut = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
  raw = ("--config.chat_template=no", "--prompt=abc", *SMALL)
  assert command(f"--out={whole}", *raw).code == 0
  (full,) = read_lines(whole)
  stop = full["text"][3:5]
  at = full["text"].index(stop)
  ran = command(
    f"--out={cut}",
    f"--config.sampling.stop_strings=({stop!r},)",
    "--nocompare",
    *raw,
  )
  assert ran.code == 0, ran.err
  (record,) = read_lines(cut)
  (sample,) = record["samples"]
  assert sample["text"] == full["text"][:at]
  assert sample["finish_reason"] == "stop_string"
  assert sample["ids"] == full["samples"][0]["ids"][: len(sample["ids"])]
  assert sample["emitted"] == len(sample["ids"]) < 12
  assert record["identical"] is None
  assert f"\n>>> abc\n{sample['text']}\n" in ran.out
