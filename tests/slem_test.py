"""Two tokenizers from `generate` and the command: slem, and tli beside it."""

import functools
import json

from commands import (
  SMALL,
  VANILLA,
  built_once as built_once,
  command as command,
  model as model,
  unread as unread,
)
from generating import EOS, ids_of, spoken
import jax.numpy as jnp
import pytest
from tiny_model import tiny_model
from tiny_tokenizer import metaspace_tokenizer

from spec_jax import pairing
from spec_jax.generate import generate
from spec_jax.hub import Loaded
from spec_jax.models import table
from spec_jax.settings import Settings

# ml_collections reads a configuration file with it.
pytestmark = pytest.mark.filterwarnings(
  "ignore:.*load_module:DeprecationWarning"
)

SPACES = metaspace_tokenizer()
V_SPACES = 310
GREEDY = Settings(max_new_tokens=40)
TEXTS = ["the anthem", "in é a 日本 the", "a 👩 in the thing", "(1)\n\n the"]


@functools.cache
def _table():
  """One architecture, so that all drafts share their programs."""
  return table.build(table.TableConfig(V_SPACES, 64))


def draft_of(text, wrong=()):
  """A draft that says the text in the other tokenizer's words.

  As the target's tokens read in it; at the places in `wrong` it says "z".
  """
  target = spoken(text)
  draft = Loaded(_table(), None, SPACES, {}, "", {}, (), ())
  words = pairing.vocabulary_map_of(target, draft)
  says = [
    int(j)
    for i in [EOS, *ids_of(text), EOS]
    for j in words.pieces[i, : words.num_pieces[i]]
  ]
  for place in wrong:
    says[place] = SPACES.get_vocab()["z"]
  says += [says[-1]] * (64 - len(says))
  params = {"table": jnp.asarray(table.script(says, V_SPACES))}
  return target, draft._replace(params=params)


def speak(pair, name, settings=GREEDY, **options):
  """Generates after one token."""
  target, draft = pair
  return generate(
    target,
    [[EOS]],
    settings=settings,
    seed=0,
    drafter=name,
    draft=draft,
    options=options,
    slots=128,
  )


@pytest.mark.parametrize("text", TEXTS)
def test_a_draft_that_says_the_text_in_its_words_is_kept(text):
  """V3: characters of several tokens too, up to the end of the text.

  Half a character at the end of a draft is proposed in the next step, so with
  7 tokens a step always proposes something.
  """
  out = speak(draft_of(text), "slem", num_draft=7)
  assert out.texts == [text]
  count = len(ids_of(text)) + 1  # and the end
  assert out.report["emitted"] == count
  assert out.report["acceptance_rate"] == 1.0
  assert out.report["steps"] <= -(-count // 5) + 1


@pytest.mark.parametrize("name", ["slem", "tli"])
def test_wrong_words_are_refused_and_the_text_stays(name):
  """The draft is wrong at three places, and right again after each."""
  text = "the inn and the thing"
  pair = draft_of(text, wrong=(3, 7, 8))
  out = speak(pair, name, num_draft=3)
  assert out.texts == [text]
  assert 0 < out.report["accepted"] < out.report["drafted"]
  assert out.report["steps"] < out.report["emitted"] - 5


def test_tli_proposes_the_shared_tokens_of_the_text():
  """All of it here: both vocabularies have all bytes and the same merges."""
  text = "a 👩 in the thing"
  count = len(ids_of(text))
  settings = Settings(max_new_tokens=count)
  out = speak(draft_of(text), "tli", settings, num_draft=4)
  assert out.texts == [text] and out.report["acceptance_rate"] == 1.0
  assert out.report["steps"] == -(-count // 5)


def test_slem_is_for_greedy_rows_and_says_so():
  warm = Settings(temperature=0.7, max_new_tokens=4)
  with pytest.raises(ValueError, match="'slem' is for greedy decoding only"):
    speak(draft_of("the"), "slem", warm)


def test_a_draft_of_other_words_is_refused_with_a_hint():
  """By the drafters that cannot use it, naming those that can."""
  with pytest.raises(ValueError, match="for such a draft are slem, tli"):
    speak(draft_of("the"), "vanilla")


# --- the command -----------------------------------------------------------


@pytest.fixture
def other(tmp_path):
  """A model folder whose tokenizer is not the target's."""
  folder = tiny_model(tmp_path / "other", seed=3, vocab_size=V_SPACES)
  SPACES.save_pretrained(folder)
  return folder


def named(name, draft):
  """The command's words for a drafter and its draft."""
  return f"--config.drafter.name={name}", f"--config.drafter.draft={draft}"


def test_the_command_refuses_what_does_not_fit(command, other, unread):
  """One line each, before any weight is read."""
  warm = "--config.sampling.temperature=0.7"
  for words, message in (
    ((*named("slem", other), warm), "'slem' is for greedy decoding only: set"),
    ((*named("slem", "target"), warm), "'slem' is for greedy decoding only"),
    (("--config.drafter.name=tli",), "'tli' needs --config.drafter.draft"),
    (named("vanilla", other), "for such a draft are slem, tli"),
    (
      (*named("tli", other), "--config.drafter.draft_slots=9999"),
      "draft_slots must be in [0, 640]",
    ),
    (
      (VANILLA, "--config.drafter.draft=1", "--config.drafter.draft_slots=9"),
      "'vanilla' has no option 'draft_slots'",
    ),
  ):
    ran = command("--prompt=a", *words)
    assert ran.code == 2 and ran.err.count("\n") == 1, words
    assert ran.err.startswith("error: ") and message in ran.err, ran.err


@pytest.mark.parametrize("name", ["slem", "tli"])
def test_the_command_drafts_with_another_tokenizer(
  name, command, other, tmp_path
):
  """Its text is plain decoding's, which the command checks itself."""
  out = tmp_path / "x.jsonl"
  ran = command("--prompt=abc", *named(name, other), *SMALL, f"--out={out}")
  assert ran.code == 0, ran.err
  (line,) = map(json.loads, out.read_text("utf-8").splitlines())
  assert line["identical"] is True and line["samples"][0]["drafted"] > 0
