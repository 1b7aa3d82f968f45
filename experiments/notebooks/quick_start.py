# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Speculative decoding in JAX: a quick start
#
# Runs in Colab on a TPU, a GPU or a CPU, and on your own machine. `jupytext
# --to ipynb experiments/notebooks/quick_start.py` makes a notebook of this
# file; run its cells from top to bottom.
#
# The first cell gets what is missing, checks the device, and says which
# versions run.

# %%
"""Load a model, decode plainly and speculatively, look into a step."""
# ruff: noqa: E402  (a cell imports what it shows)

# "tpu", "gpu" or "cpu" to insist on one; "any" takes what is there.
import os

PLATFORM = os.environ.get("SPEC_JAX_NOTEBOOK_PLATFORM", "any")
# A built-in name, a folder, a .gguf file, or organisation/model on the hub.
MODEL = os.environ.get("SPEC_JAX_NOTEBOOK_MODEL", "smollm2-135m-instruct")
# Where the source comes from if it is not here yet: a git URL or a folder.
SOURCE = os.environ.get("SPEC_JAX_NOTEBOOK_SOURCE", "")

from importlib import metadata
from pathlib import Path
import subprocess
import sys


def get_source():
  """Installs spec_jax and what it needs, unless it can be imported."""
  # In another process: a module that is loaded cannot be replaced.
  check = [sys.executable, "-c", "import spec_jax"]
  if subprocess.run(check, capture_output=True).returncode == 0:
    return
  here = Path.cwd()
  folders = [here / "spec_jax_source", here, *here.parents]
  roots = [f for f in folders if (f / "spec_jax" / "base.py").exists()]
  if not roots:
    if not SOURCE:
      raise RuntimeError(
        "spec_jax is not here: set SOURCE above to the repository's git URL, "
        "or upload it and open this notebook inside it"
      )
    subprocess.run(["git", "clone", "-q", SOURCE, folders[0]], check=True)
    roots = folders[:1]
  needs = ["-r", str(roots[0] / "requirements.txt")]
  tpu = any(Path(f).exists() for f in ("/dev/vfio/0", "/dev/accel0"))
  if PLATFORM == "tpu" or tpu:
    needs.append("jax[tpu]")
  elif PLATFORM == "gpu" or Path("/dev/nvidia0").exists():
    needs.append("jax[cuda12]")
  subprocess.run(
    [sys.executable, "-m", "pip", "install", "--quiet", *needs], check=True
  )
  sys.path.insert(0, str(roots[0]))


get_source()
import jax

device = jax.devices()[0]
if PLATFORM not in ("any", device.platform):
  raise RuntimeError(
    f"this notebook was asked to run on {PLATFORM!r}, but JAX found "
    f"{device.platform!r} ({device.device_kind}). In Colab: Runtime > Change "
    f"runtime type, choose a {PLATFORM.upper()}, then run all cells again. "
    "Elsewhere: install JAX for that device, or set PLATFORM = 'any'."
  )
print(
  f"python {sys.version.split()[0]}, jax {jax.__version__}, "
  f"jaxlib {metadata.version('jaxlib')}"
)
print(f"{jax.device_count()} x {device.device_kind} ({device.platform})")

# %% [markdown]
# ## Load a model
#
# The built-in one has 135 million parameters and comes as a Python package
# (98 MB). Weights are kept in float32 on a CPU and in bfloat16 elsewhere.

# %%
import spec_jax

loaded = spec_jax.load(MODEL)
architecture = loaded.model.config
print(
  f"{loaded.name}: {architecture.num_layers} layers, vocabulary of "
  f"{architecture.vocab_size}, context of {architecture.max_length}"
)

# %% [markdown]
# ## Plain and speculative decoding, side by side
#
# Prompt lookup drafts for free: it copies what followed the last words where
# they stood before. The target reads the copied tokens in one pass and keeps
# those it would have said itself, so the text is the same and only the number
# of steps changes. A first call compiles; it is not timed here.

# %%
QUESTION = (
  "Repeat this text and change nothing except the year, which must be 1925: "
  "The station was opened in the spring of 1907. It has two platforms."
)
NEW = 48


def prompt_of(text):
  """Returns a chat message where the model has a chat template."""
  if getattr(loaded.tokenizer, "chat_template", None):
    return [{"role": "user", "content": text}]
  return text


def decode(drafter="none", text=QUESTION, **kwargs):
  """Decodes one prompt, after a call that compiles."""
  settings = kwargs.pop("settings", spec_jax.Settings(max_new_tokens=NEW))
  on_text = kwargs.pop("on_text", None)
  common = {"drafter": drafter, "settings": settings, "seed": 0, **kwargs}
  spec_jax.generate(loaded, [prompt_of(text)], **common)
  return spec_jax.generate(loaded, [prompt_of(text)], on_text=on_text, **common)


def show_table(runs):
  """Prints the figures of several runs side by side."""
  rows = {
    "decode, tokens/s": "decode_tokens_per_s",
    "steps": "steps",
    "emitted per step": "emitted_per_step",
    "accepted per step": "accepted_per_step",
    "drafted per step": "drafted_per_step",
    "time to first token, s": "first_token_s",
  }
  print(f"{'':24}" + "".join(f"{name:>18}" for name in runs))
  for label, key in rows.items():
    cells = [f"{run.report[key]:18.2f}" for run in runs.values()]
    print(f"{label:24}" + "".join(cells))
  first = next(iter(runs.values()))
  same = ["yes" if run.ids == first.ids else "no" for run in runs.values()]
  print(f"{'same text as the first':24}" + "".join(f"{x:>18}" for x in same))


runs = {"plain": decode(), "prompt lookup": decode("prompt_lookup")}
print(runs["plain"].texts[0], "\n")
show_table(runs)

# %% [markdown]
# ## Another drafter
#
# Any model with the same vocabulary can draft, and so can the first layers of
# the target itself, which need no training and no memory. `num_draft` is how
# many tokens are drafted in a step; a `tree` drafts several branches.

# %%
half = max(1, architecture.num_layers // 2)
layers = {"drafter": "vanilla", "draft": half}
runs["first layers"] = decode(**layers, options={"num_draft": 3})
runs["a tree of them"] = decode(**layers, options={"tree": (2, 2, 1)})
show_table(runs)

# %% [markdown]
# How often is each depth of the draft accepted, where it had its chance? The
# deeper a token, the rarer its chance, but the chance that is taken says how
# well the draft follows the target.

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(6, 3))
for name, run in runs.items():
  known = [x for x in run.report["accept_cond"] if x is not None]
  if known:
    axes.plot(range(1, len(known) + 1), known, marker="o", label=name)
axes.set_xlabel("depth of the draft token")
axes.set_ylabel("accepted, where tried")
axes.set_ylim(-0.05, 1.05)
axes.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Sampling
#
# The law of the text is the target's at every setting. Prompt lookup is
# deterministic, so with the same seed it says what plain decoding says even
# when sampling. A draft that samples gives other words of the same law.

# %%
sampled = spec_jax.Settings(temperature=0.8, top_p=0.95, max_new_tokens=NEW)
runs = {
  "plain": decode(settings=sampled),
  "prompt lookup": decode("prompt_lookup", settings=sampled),
  "first layers": decode(**layers, settings=sampled),
}
for name, run in runs.items():
  print(f"{name}: {run.texts[0]!r}\n")
show_table(runs)

# %% [markdown]
# Text can be streamed; the pieces join to exactly the text that is returned.

# %%
pieces = []
out = decode(
  "prompt_lookup", settings=sampled, on_text=lambda *x: pieces.append(x)
)
print([piece for prompt, sample, piece in pieces])

# %% [markdown]
# ## One step from the inside
#
# A step drafts, scores, accepts, and draws one more token from what is left of
# the target's law. Here are the first steps of one text, with the target's
# probability `p` and the draft's `q` of each drafted token, `+` for accepted
# and `-` for refused.

# %%
from experiments import show
from spec_jax.generate import make_engine, plan, run as run_jobs

work = plan(loaded, [prompt_of(QUESTION)], sampled, seed=0)
engine = make_engine(
  loaded, work, **layers, options={"num_draft": 3}, trace=True
)
steps = []


def on_trace(owner, info):
  """Keeps what the only row did."""
  steps.append(show.trace_step(info, 0, work.token_bytes))


(completion,) = run_jobs(engine, work, on_trace=on_trace)
assert [i for step in steps for i in step["ids"]] == completion.ids
show.print_trace({"samples": [{"trace": steps[:8]}]})

# %% [markdown]
# ## Where to go from here
#
# The command line does all of this, for thousands of prompts, and resumes
# after a kill:
#
# ```bash
# python -m experiments.generate --prompts=questions.jsonl --out=answers.jsonl
# python -m experiments.generate --chat
# python -m experiments.generate --dry_run   # everything that can be set
# ```
#
# `spec_jax/base.py` defines every type and is the page to read first;
# README.md says how to add a drafter and a model.
