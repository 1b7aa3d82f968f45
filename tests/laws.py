"""Joint laws by enumeration through `spec_step`, beside the target's own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import (
  drafters,
  kernels,
  length,
  verifiers,
)
from spec_jax.base import Sampling, Stops
from spec_jax.drafting import shown_to
from spec_jax.levels import Levels
from spec_jax.models import decoder, table
from spec_jax.rope import Rope
from spec_jax.rows import Request, make_init
from spec_jax.step import make_step
from tests import cases, fakes, reference, two_vocabularies
from tests.enumeration import Enumerator

V, NEW, SLOTS = 3, 3, 16

SETTINGS = {
  "greedy": {"temperature": 0.0},
  "t0.7": {"temperature": 0.7},
  "t1.5_top_p": {"temperature": 1.5, "top_p": 0.7},
  "top_k_top_p": {"temperature": 1.0, "top_k": 2, "top_p": 0.9},
  "min_p": {"temperature": 1.0, "min_p": 0.3},
  "penalties": {
    "temperature": 1.0,
    "repetition_penalty": 1.4,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.7,
  },
  "bias_ban": {"temperature": 1.0, "bias": (0.8, -1.0, -np.inf)},
}
OFF = {
  "temperature": 0.0,
  "top_k": 0,
  "top_p": 1.0,
  "min_p": 0.0,
  "repetition_penalty": 1.0,
  "presence_penalty": 0.0,
  "frequency_penalty": 0.0,
}
# Every setting beside every other in one batch, on prompts of two lengths.
PROMPTS = [[0], [2, 1, 0, 2, 1]]


def sampling_of(settings):
  arrays = {}
  for name, off in OFF.items():
    values = [s.get(name, off) for s in settings]
    dtype = jnp.int32 if name == "top_k" else jnp.float32
    arrays[name] = jnp.asarray(values, dtype)
  if any("bias" in s for s in settings):
    bias = [s.get("bias", (0.0,) * V) for s in settings]
    arrays["bias"] = jnp.asarray(bias, jnp.float32)
  return Sampling(**arrays)


def request_of(prompts, settings, slots=SLOTS, new=NEW):
  B = len(prompts)
  tokens = np.zeros((B, slots), np.int32)
  for row, prompt in enumerate(prompts):
    tokens[row, : len(prompt)] = prompt
  lengths = jnp.asarray([len(p) for p in prompts], jnp.int32)
  return Request(
    tokens=jnp.asarray(tokens),
    length=lengths,
    limit=lengths + new,
    sampling=sampling_of(settings),
    stops=Stops(ids=jnp.full((B, 1), -1, jnp.int32)),
    keys=jax.random.split(jax.random.key(0), B),
  )


DRAFTERS = {
  "none": ("none", {}),
  "chain": ("vanilla", {"num_draft": 2}),
  "own_temperature": ("vanilla", {"num_draft": 1, "draft_temperature": 2.0}),
  "pair_iid": ("vanilla", {"tree": (2,), "siblings": "iid"}),
  "tree_iid": ("vanilla", {"tree": (2, 1), "siblings": "iid"}),
  "tree_wor": ("vanilla", {"tree": (2, 1), "siblings": "without_replacement"}),
  "tree_top_k": ("vanilla", {"tree": (2, 2), "siblings": "top_k"}),
  "lookup": ("prompt_lookup", {"num_draft": 3}),
  "recycling": ("recycling", {"tree": (2, 1)}),
  "lookahead": (
    "lookahead",
    {"window": 2, "ngram": 3, "guesses": 2, "pool": 6},
  ),
  "tli": ("tli", {"num_draft": 2, "vocabulary_map": two_vocabularies.WORDS}),
  "slem": ("slem", {"num_draft": 2, "vocabulary_map": two_vocabularies.WORDS}),
  "trigram": (
    "ngram",
    {"num_draft": 2, "order": 3, "corpus": cases.index_file},
  ),
  "suffix_corpus": ("suffix", {"num_draft": 2, "corpus": cases.index_file}),
  "suffix_tree": (
    "suffix",
    {"num_draft": 2, "num_nodes": 4, "corpus": cases.index_file},
  ),
  "best_first": ("best_first", {"num_nodes": 5, "depth": 2, "width": 2}),
  "first_of": (
    "first_of",
    {
      "first": "prompt_lookup(num_draft=2, min_ngram=2)",
      "second": "vanilla(num_draft=2)",
    },
  ),
  "merge": (
    "merge",
    {
      "first": "prompt_lookup(num_draft=2)",
      "second": "vanilla(tree=(2, 1), siblings='without_replacement')",
    },
  ),
  "merge_iid": (
    "merge",
    {
      "first": "vanilla(tree=(2,))",
      "second": "prompt_lookup(num_draft=2)",
    },
  ),
  "medusa": ("medusa", {"tree": (2, 1)}),
  "eagle_chain": ("eagle", {"num_draft": 2}),
  "eagle_grown": ("eagle", {"num_nodes": 5, "depth": 2, "width": 2}),
  "eagle_static": ("eagle", {"tree": (2, 1)}),
  "medusa_words": ("medusa", {"tree": (2, 1)}),
  "eagle_words": ("eagle", {"num_draft": 2}),
  "eagle_wor": (
    "eagle",
    {
      "tree": (2, 1),
      "siblings": "without_replacement",
      "draft_temperature": 1.5,
    },
  ),
  "merge_eagle": (
    "merge",
    {
      "first": "prompt_lookup(num_draft=2)",
      "second": "eagle(num_draft=2)",
    },
  ),
  "merge_grown": (
    "merge",
    {
      "first": "prompt_lookup(num_draft=2, min_ngram=2)",
      "second": "eagle(num_nodes=5, depth=2, width=2)",
    },
  ),
  "cascade": (
    "cascade",
    {"inner": "prompt_lookup(num_draft=1)", "num_draft": 2},
  ),
}
# Length policies with options, on a drafter; passes then come in two widths.
POLICIES = {
  "chain_confidence": ("chain", "confidence", {"threshold": 0.75}),
  "tree_confidence": ("tree_wor", "confidence", {"threshold": 0.75}),
  "chain_entropy": ("chain", "entropy", {"threshold": 0.65, "scale": 0.2}),
  "chain_average": ("chain", "average", {}),
  "chain_cost": ("chain", "cost", {"probe": 1, "budget": 1.0}),
  "lookup_cost": ("lookup", "cost", {"probe": 1, "budget": 1.0}),
  "merge_cost": ("merge", "cost", {"probe": 1, "budget": 1.0}),
  "merge_iid_cost": ("merge_iid", "cost", {"probe": 1, "budget": 1.0}),
  "tli_confidence": ("tli", "confidence", {"threshold": 0.75}),
  "trigram_confidence": ("trigram", "confidence", {"threshold": 0.5}),
}
# Drafters (or policies) under other verifiers than `token`, with options.
VERIFIERS = {
  "block_chain": ("chain", "block", {}),
  "block_confidence": ("chain_confidence", "block", {}),
  "block_tli": ("tli", "block", {}),
  "k_seq_pair": ("pair_iid", "k_seq", {}),
  "k_seq_rho": ("tree_iid", "k_seq", {"rho": 1.7}),
  "block_trigram": ("trigram", "block", {}),
}
# Of heads that need a decoder's layers.
ON_LAYERS = (
  "eagle_chain",
  "eagle_grown",
  "eagle_static",
  "eagle_words",
  "eagle_wor",
  "merge_eagle",
  "merge_grown",
)
# D14: heads that know some of the three tokens.
HEAD_WORDS = {"medusa_words": (0, 2), "eagle_words": (0, 2)}
# Of two vocabularies: the draft is a table of four tokens.
TWO_VOCABULARIES = ("tli", "slem", "tli_confidence", "block_tli")
# Seconds of a step by depth: such that rows disagree about what pays.
COSTS = [1.0, 1.45, 2.0, 2.4, 2.9]


def costs_of(drafter):
  """Returns seconds by level, such that either way is asked in three tokens.

  The second, though said to be dearer, where the first was just refused.
  """
  depth, *cheap = Levels.of(drafter).depths
  more = [1.1 * x for d in cheap for x in COSTS[1 : d + 1]]
  return [*COSTS[: depth + 1], *more]


def parts_of(name):
  """Returns (base, verifier, its options, policy, its options) of a name."""
  under, judge, judge_options = VERIFIERS.get(name, (name, "token", {}))
  base, how, policy_options = POLICIES.get(under, (under, "fixed", {}))
  return base, judge, judge_options, how, policy_options


def row_by_row(policy):
  """Returns a policy that decides for each row as if it were the batch.

  Rows are experiments here, in batches that change while a step is enumerated:
  what one is asked must not depend on which others stand beside it.
  """

  def alone(function):
    def of_row(state, *args):
      batch = jax.tree.map(lambda x: x[None], (state, *args))
      return jax.tree.map(lambda x: x[0], function(*batch))

    return jax.vmap(of_row)

  return policy._replace(
    level=lambda state, running, costs: alone(
      lambda s, r: policy.level(s, r, costs)
    )(state, running),
    update=alone(policy.update),
  )


def prepare(model, params, draft_model, name):
  """Returns (params, drafter, verify, length policy, its name) of a case.

  Raises:
    ValueError: if they do not go together.
  """
  base, judge, judge_options, how, policy_options = parts_of(name)
  kind, options = DRAFTERS[base]
  case = cases.Case(kind, options)
  pair = draft_model, params.get("draft")
  target = model, params["target"]
  if base in HEAD_WORDS:
    kind = drafters.takes_heads(kind, options)
    draft_model, own = fakes.heads_of(kind, target, ids=HEAD_WORDS[base])
  else:
    draft_model, own = case.draft_for(target, pair)
  if kernels.is_packed(params["target"]) and not kernels.is_packed(own):
    own = kernels.pack_params(own)
  params = {**params, "draft": own}
  drafter = case.build(model, draft_model, SLOTS)
  if drafter.tables is not None:
    params = {**params, "tables": jax.tree.map(jnp.asarray, drafter.tables)}
  verifier = verifiers.build(judge, drafter, **judge_options).verify
  policy = length.build(how, Levels.of(drafter), **policy_options)
  length.check(policy, drafter)
  if policy.needs_costs:
    policy = row_by_row(policy)
    params = {**params, "costs": jnp.array(costs_of(drafter))}
  return params, drafter, verifier, policy, how


def measure(model, params, draft_model, name, prompts, settings, chunk=256):
  """Returns (laws by enumeration `[R, V ** NEW]`, steps)."""
  params, drafter, verifier, policy, how = prepare(
    model, params, draft_model, name
  )
  model = shown_to(drafter, model)
  init, _ = make_init(model, drafter, policy, slots=SLOTS, chunk=4)
  widths = () if how == "fixed" else (1, 2)
  step = make_step(
    model, drafter, policy, verifier=verifier, trace=True, widths=widths
  )
  state = jax.jit(init)(params, request_of(prompts, settings))
  machine = Enumerator(step, params, drafter.num_nodes, drafter.depth, chunk)
  return machine.joint_law(state)


def table_pair():
  """Two random tables; the target's logits in closed form."""
  model = table.build(table.TableConfig(V, period=2))
  params = {
    "target": model.init(jax.random.key(1)),
    "draft": model.init(jax.random.key(2)),
  }
  logits = np.asarray(params["target"]["table"])
  return model, params, lambda t: logits[(len(t) - 1) % 2, t[-1]]


@functools.cache
def transformer_pair():
  """A tiny decoder with a ring of 2 slots, and a draft like it.

  The reference reads each text from scratch, without a cache.
  """
  config = decoder.DecoderConfig(
    vocab_size=V,
    width=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    ffn_width=32,
    max_length=SLOTS,
    rope=Rope((1.0, 0.3)),
    windows=(None, 3),
  )
  model = decoder.build(config)
  target = jax.tree.map(lambda x: x * 1.2, model.init(jax.random.key(1)))
  for layer in target["layers"]:  # what was read before must matter
    layer["wv"], layer["wk"] = layer["wv"] * 3, layer["wk"] * 2
  leaves, tree = jax.tree.flatten(target)
  keys = jax.random.split(jax.random.key(3), len(leaves))
  noisy = [
    x + 0.3 * jnp.std(x) * jax.random.normal(keys[np.array(i)], x.shape)
    for i, x in enumerate(leaves)
  ]
  params = {"target": target, "draft": jax.tree.unflatten(tree, noisy)}

  @jax.jit
  def forward(tokens):
    positions = jnp.arange(SLOTS)[None]
    return model.apply(target, tokens, positions, None, None, None).logits

  @functools.cache
  def next_logits(text):
    tokens = np.zeros((1, SLOTS), np.int32)
    tokens[0, : len(text)] = text
    return np.asarray(forward(tokens))[0, len(text) - 1]

  return model, params, lambda t: next_logits(tuple(t))


@functools.cache
def packed_pair():
  """The tiny decoder with its weights packed for the CPU kernels."""
  model, params, next_logits = transformer_pair()
  packed = {name: kernels.pack_params(p) for name, p in params.items()}
  return model, packed, next_logits


def two_tables():
  """The table, and a table over four tokens that drafts for it."""
  model, params, next_logits = table_pair()
  draft, params["draft"] = two_vocabularies.table_draft()
  return model, params, next_logits, draft


def two_transformers():
  """The tiny decoder, and another over four tokens that drafts for it."""
  model, params, next_logits = transformer_pair()
  draft, weights = two_vocabularies.transformer_draft(model.config, 2 * SLOTS)
  return model, {**params, "draft": weights}, next_logits, draft


MODELS = {
  "table": table_pair,
  "two_tables": two_tables,
  "two_transformers": two_transformers,
  "transformer": transformer_pair,
  "packed": packed_pair,
}


def pair_of(kind):
  """Returns (model, params, next_logits, draft model) of a target."""
  model, params, next_logits, *other = MODELS[kind]()
  return model, params, next_logits, other[0] if other else model


def distances(kind, name, settings=tuple(SETTINGS), **options):
  """Returns for each setting the largest total variation over the prompts."""
  model, params, next_logits, draft = pair_of(kind)
  cases = [(p, s) for p in PROMPTS for s in settings]
  prompts = [p for p, _ in cases]
  chosen = [SETTINGS[s] for _, s in cases]
  laws, steps = measure(model, params, draft, name, prompts, chosen, **options)
  assert steps <= NEW
  worst = dict.fromkeys(settings, 0.0)
  for law, (prompt, setting) in zip(laws, cases, strict=True):
    expected = reference.joint_law(
      next_logits, V, prompt, SETTINGS[setting], NEW
    )
    assert abs(law.sum() - 1) < 1e-5
    far = float(np.abs(law - expected).sum() / 2)
    worst[setting] = max(worst[setting], far)
  return worst
