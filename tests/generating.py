"""A tiny model, models that say a given text, and calls of `generate`."""

import functools

import jax.numpy as jnp
import pytest
from tiny_model import tiny_model
from tiny_tokenizer import byte_level_tokenizer

import spec_jax
from spec_jax.generate import generate
from spec_jax.hub import Loaded
from spec_jax.models import table
from spec_jax.settings import Settings

WORDS = byte_level_tokenizer()
EOS = WORDS.eos_token_id
SAMPLED = Settings(temperature=1.0, top_k=20, max_new_tokens=12)
PENALTIES = Settings(
  temperature=0.9,
  repetition_penalty=1.3,
  presence_penalty=0.4,
  frequency_penalty=0.3,
  max_new_tokens=12,
)
# Two rows and one size of cache nearly everywhere: few programs.
generate_small = functools.partial(
  generate, drafter="prompt_lookup", batch_size=2, slots=256
)


@functools.cache
def _load(folder):
  return spec_jax.load(tiny_model(folder))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
  """A tiny model with a tokenizer: one for all files, programs are kept."""
  return _load(tmp_path_factory.getbasetemp() / "tiny")


_PERIOD = 64
_table = functools.cache(lambda: table.build(table.TableConfig(300, _PERIOD)))


def spoken(text):
  """Returns a model that says `text` and then EOS, from position 1 on.

  So the output after a prompt of one token is the text, token by token. All
  are one architecture, so that they share their programs.
  """
  ids = [EOS, *ids_of(text)]
  ids += [EOS] * (_PERIOD - len(ids))
  params = {"table": jnp.asarray(table.script(ids, 300))}
  return Loaded(_table(), params, WORDS, {}, "spoken", {}, (EOS,), ())


def ids_of(text):
  """Returns the text's ids: each is whole in the tiny tokenizer."""
  return WORDS(text)["input_ids"]


def changed(settings, **change):
  """Returns settings that differ in these fields."""
  return Settings(**{**vars(settings), **change})
