"""Every setting counts with drafts as without, or is refused at once."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_tokenizer import byte_level_tokenizer

from spec_jax.generate import generate, make_engine, run
from spec_jax.hub import Loaded
from spec_jax.models import table
from spec_jax.settings import Settings, in_use, to_arrays
from spec_jax.text import token_bytes
from spec_jax.work import plan

V, PERIOD = 300, 2
PROMPT = [65, 66, 67]


@functools.cache
def loaded():
  """A table over a byte-level vocabulary that says lower-case letters."""
  tokenizer = byte_level_tokenizer()
  pieces = token_bytes(tokenizer, V)
  letters = [i for i, piece in enumerate(pieces) if piece in LETTERS]
  logits = np.full((PERIOD, V, V), -20, np.float32)
  rng = np.random.default_rng(0)
  shape = (PERIOD, V, len(letters))
  logits[:, :, letters] = 2 * rng.normal(size=shape)
  model = table.build(table.TableConfig(V, PERIOD, max_length=64))
  params = {"table": jnp.asarray(logits)}
  return Loaded(model, params, tokenizer, {}, "table", {}, (), ())


LETTERS = [bytes([b]) for b in b"abcdefghij"]


@functools.cache
def greedy_tokens():
  """The first tokens of greedy text, read off the table."""
  logits = np.asarray(loaded().params["table"])
  text = list(PROMPT)
  for _ in range(4):
    text.append(int(np.argmax(logits[(len(text) - 1) % PERIOD, text[-1]])))
  return text[len(PROMPT) :]


def pairs():
  """Returns for each field of `Settings` two settings that differ in it."""
  first, second, third, fourth = greedy_tokens()
  spelled = token_bytes(loaded().tokenizer, V)
  string = (spelled[second] + spelled[third]).decode()
  cold = Settings(seed=9, max_new_tokens=24)
  warm = dataclasses.replace(cold, temperature=1)
  stopping = dataclasses.replace(cold, stop_ids=(second,))
  changes = {
    "temperature": (cold, 1.2),
    "top_k": (warm, 2),
    "top_p": (warm, 0.4),
    "min_p": (warm, 0.7),
    "repetition_penalty": (cold, 1.8),
    "presence_penalty": (cold, 2.0),
    "frequency_penalty": (cold, 1.5),
    "logit_bias": (cold, {fourth: -3.0, first: 4.0}),
    "banned_tokens": (cold, (third,)),
    "min_new_tokens": (stopping, 5),
    "max_new_tokens": (cold, 7),
    "stop_ids": (cold, (third,)),
    "stop_strings": (cold, (string,)),
    "seed": (warm, 5),
    "num_samples": (warm, 3),
  }
  return {
    name: (base, dataclasses.replace(base, **{name: value}))
    for name, (base, value) in changes.items()
  }


FIELDS = [field.name for field in dataclasses.fields(Settings)]
DRAFTERS = {
  "none": {},
  "prompt_lookup": {"drafter": "prompt_lookup"},
  "vanilla": {
    "drafter": "vanilla",
    "draft": "target",
    "options": {"tree": (2, 1), "siblings": "top_k"},
  },
}


@functools.cache
def run_all(drafter):
  """Runs both settings of every field in one call; results by number."""
  settings = [s for pair in pairs().values() for s in pair]
  out = generate(
    loaded(),
    [PROMPT] * len(settings),
    settings=settings,
    seed=1,
    batch_size=8,
    slots=64,
    **DRAFTERS[drafter],
  )
  found = {}
  for c in out.completions:
    found.setdefault(c.prompt, []).append((c.ids, c.text, c.finish_reason))
  return found, out.report


def test_every_field_has_its_test():
  """S3: a new setting cannot be forgotten here."""
  assert set(pairs()) == set(FIELDS)


@pytest.mark.parametrize("drafter", [d for d in DRAFTERS if d != "none"])
@pytest.mark.parametrize("field", FIELDS)
def test_a_setting_does_the_same_with_drafts(field, drafter):
  """S3: it changes plain text, and speculative text in the same way."""
  number = 2 * list(pairs()).index(field)
  plain, _ = run_all("none")
  assert plain[number] != plain[number + 1]
  found, report = run_all(drafter)
  assert found[number] == plain[number]
  assert found[number + 1] == plain[number + 1]
  assert report["accepted"] > 0


def test_settings_that_end_a_text_end_it_there():
  """T1, T4: the id is kept, the string is not part of the text."""
  first, second, third, _ = greedy_tokens()
  plain, _ = run_all("none")
  at = {name: plain[2 * i + 1][0] for i, name in enumerate(pairs())}
  assert at["stop_ids"][0] == [first, second, third]
  assert at["stop_ids"][2] == "stop"
  ids, text, reason = at["stop_strings"]
  spelled = token_bytes(loaded().tokenizer, V)
  assert (ids, reason) == ([first, second, third], "stop_string")
  assert text == spelled[first].decode()
  assert len(at["max_new_tokens"][0]) == 7
  assert at["max_new_tokens"][2] == "length"
  assert second not in at["min_new_tokens"][0][:5]


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"temperature": -0.1}, r"temperature must be in .*, got -0.1"),
    ({"temperature": float("nan")}, "temperature .* got nan"),
    ({"temperature": float("inf")}, "temperature .* got inf"),
    ({"top_k": -1}, "top_k must be an integer >= 0, got -1"),
    ({"top_k": 1.5}, "top_k must be an integer >= 0, got 1.5"),
    ({"top_k": True}, "top_k must be an integer >= 0, got True"),
    ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
    ({"top_p": 1.1}, "top_p .* got 1.1"),
    ({"min_p": 1.1}, r"min_p must be in \[0.0, 1.0\], got 1.1"),
    ({"repetition_penalty": 0.0}, "repetition_penalty .* got 0.0"),
    ({"presence_penalty": float("inf")}, "presence_penalty .* got inf"),
    ({"frequency_penalty": float("nan")}, "frequency_penalty .* got nan"),
    ({"logit_bias": {9: 1.0}}, "logit_bias holds id 9, .* has 9 ids"),
    ({"logit_bias": {1: float("inf")}}, "logit_bias must be a float32 or -inf"),
    ({"banned_tokens": (-1,)}, "banned_tokens holds id -1"),
    ({"banned_tokens": range(9)}, "all 9 tokens are banned"),
    ({"min_new_tokens": 129}, "min_new_tokens 129 is above .* 128"),
    ({"min_new_tokens": -1}, "min_new_tokens .* got -1"),
    ({"max_new_tokens": 0}, "max_new_tokens must be an integer >= 1, got 0"),
    ({"stop_ids": (12,)}, "stop_ids holds id 12"),
    ({"stop_strings": ("a", "")}, "a stop string is text, not empty"),
    ({"stop_strings": (5,)}, "a stop string is text, not empty; got 5"),
    ({"temperature": 1e31}, "temperature must be in"),
    ({"frequency_penalty": 1e39}, "frequency_penalty must be a float32"),
    ({"num_samples": 10**7}, "num_samples must be at most 1000000"),
    ({"stop_ids": (-1,)}, "stop_ids holds id -1, which no vocabulary has"),
    ({"logit_bias": {1: 1e39}}, "logit_bias must be a float32"),
    ({"repetition_penalty": 1e-46}, "repetition_penalty must be above 0"),
    ({"top_k": 2**31}, "top_k must be below 2"),
    (
      {"min_new_tokens": 1, "stop_ids": range(9)},
      "all 9 tokens are banned, or",
    ),
    ({"seed": -1}, r"seed must be in \[0, 2\*\*63\), got -1"),
    ({"seed": 2**63}, "seed must be"),
    ({"num_samples": 0}, "num_samples must be an integer >= 1, got 0"),
  ],
)
def test_a_value_out_of_range_is_refused(change, words):
  """S3: naming the setting, the value and the range."""
  with pytest.raises(ValueError, match=words):
    Settings(**change).check(9)


@pytest.mark.parametrize("bias", [(3, 1), "((3,nan),)", ((3, "x"),)])
def test_a_bias_that_is_no_pairs_is_refused(bias):
  with pytest.raises(ValueError, match="pairs of a token id and a number, got"):
    Settings(logit_bias=bias)


def test_every_field_can_be_refused():
  """Each field has a value out of range in the test above."""
  cases = test_a_value_out_of_range_is_refused.pytestmark[0].args[1]
  assert {name for change, _ in cases for name in change} == set(FIELDS)


def test_lists_and_mappings_become_tuples_that_hash():
  """A settings object is a key of caches, whatever it was made from."""
  settings = Settings(
    logit_bias={np.int64(3): np.float32(0.5)},
    banned_tokens=[np.int32(1)],
    stop_ids=np.array([2]),
    stop_strings="end",
  )
  assert settings.logit_bias == ((3, 0.5),)
  assert settings.banned_tokens == (1,) and settings.stop_ids == (2,)
  assert settings.stop_strings == ("end",)
  assert hash(settings) == hash(dataclasses.replace(settings))
  assert Settings().stop_ids is None


def test_only_what_is_in_use_becomes_an_array():
  """Rows that do not use a setting get the value that turns it off."""
  settings = [Settings(), Settings(top_k=3, banned_tokens=(1,))]
  use = in_use(settings)
  assert use == {"top_k", "bias"}
  assert in_use([Settings()]) == frozenset()
  sampling = to_arrays(settings, use, 4)
  assert sampling.top_k.tolist() == [0, 3]
  assert sampling.bias.tolist() == [[0] * 4, [0, -np.inf, 0, 0]]
  assert sampling.temperature is None and sampling.top_p is None


def test_a_bias_and_a_ban_of_one_token_is_a_ban():
  """The ban wins over any bias; biases of other tokens stay."""
  settings = Settings(logit_bias={1: 5.0, 2: 1.5}, banned_tokens=(1,))
  bias = to_arrays([settings], in_use([settings]), 3).bias
  assert bias.tolist() == [[0, -np.inf, 1.5]]


def test_numbers_of_any_kind_compile_one_program():
  """J3, J13: Python, numpy and JAX numbers; prompts of 1 to 40 tokens."""
  kinds = [
    {"temperature": 1, "top_k": 3, "top_p": 0.5},
    {"temperature": 0.5, "top_k": np.int64(7), "top_p": np.float64(0.9)},
    {
      "temperature": jnp.float32(2),
      "top_k": np.array(4),
      "top_p": jnp.asarray(0.25),
    },
  ]
  compiled = []
  for i, kind in enumerate(kinds):
    prompts = [[65] * n for n in range(1 + i, 41, 3)]
    settings = Settings(max_new_tokens=4 + i, **kind)
    work = plan(loaded(), prompts, settings, seed=i)
    engine = make_engine(
      loaded(), work, drafter="prompt_lookup", batch_size=3, slots=64, chunk=16
    )
    done = list(run(engine, work))
    assert [len(c.ids) for c in done] == [4 + i] * len(prompts)
    compiled.append(engine.num_compiles)
  assert compiled == [2, 0, 0]  # Reading and decoding.
