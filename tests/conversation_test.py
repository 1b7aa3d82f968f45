"""Tests of `python -m experiments.generate --chat`."""

import functools

from commands import (
  SMALL,
  built_once as built_once,
  command as command,
  model as model,
)
import pytest

import spec_jax

# ml_collections reads a configuration file with it.
pytestmark = pytest.mark.filterwarnings(
  "ignore:.*load_module:DeprecationWarning"
)


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
  return command("--chat", *SMALL, *words)


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
