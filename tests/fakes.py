"""Fakes with known answers: scripted models, a tiny decoder, a test rig."""

from collections.abc import Callable, Sequence
import functools

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import (
  drafters,
  eagle,
  length,
  medusa,
  rows as rows_lib,
  step as steps,
  tree as trees,
)
from spec_jax.base import (
  DETERMINISTIC,
  Cache,
  Draft,
  Drafter,
  Noise,
  Stops,
)
from spec_jax.cache import slot_positions
from spec_jax.costs import num_costs
from spec_jax.drafting import root_token, shown_to, static_tree
from spec_jax.heads import Words
from spec_jax.models import decoder, table
from spec_jax.rope import Rope
from spec_jax.settings import Settings, in_use, to_arrays

ALMOST_ONE = np.float32(1) - np.float32(2**-24)

_DEFAULT = Settings()
# Every sampling field at a value that is not off.
_EVERY = Settings(
  temperature=1,
  top_k=2,
  top_p=0.5,
  min_p=0.1,
  repetition_penalty=2,
  presence_penalty=1,
  frequency_penalty=1,
  banned_tokens=(0,),
  min_new_tokens=1,
)
ALL = in_use([_EVERY])
GREEDY: frozenset[str] = frozenset()  # Compiles in a third of the time.
# Draft models are the target with noise of this size: some drafts are
# accepted, some refused.
_NOISE = 0.25


# A third of the compile time goes into optimising what runs for milliseconds;
# the enumeration of laws runs what XLA makes by default.
jit = functools.partial(
  jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


def tiny(vocab=13, *, windows=(None, 4), max_length=256, seed=5):
  """Returns (model, params) of a decoder whose layers have these windows."""
  config = decoder.DecoderConfig(
    vocab_size=vocab,
    width=16,
    num_layers=len(windows),
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    ffn_width=24,
    max_length=max_length,
    rope=Rope((1.0, 0.1)),
    windows=tuple(windows),
  )
  return _seeded(decoder.build(config), seed)


def _drawn(shapes, seed):
  """Draws parameters of these shapes: norms about 1, matrices of unit gain."""
  rng = np.random.default_rng(seed)

  def draw(x):
    values = rng.normal(size=x.shape).astype(np.float32)
    if len(x.shape) == 1:
      return jnp.asarray(1 + 0.1 * values)
    return jnp.asarray(values * np.float32(x.shape[0] ** -0.5))

  return jax.tree.map(draw, shapes)


def _seeded(model, seed):
  """Draws parameters with numpy: `init` would compile each leaf's draw."""
  shapes = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))
  params = _drawn(shapes, seed)
  # Sharper than at random, else greedy text is one token for ever and a wrong
  # key goes unseen.
  layers = [
    layer | {name: layer[name] * 3 for name in ("wq", "wo")}
    for layer in params["layers"]
  ]
  return model, params | {"head": params["head"] * 3, "layers": tuple(layers)}


def noisy(params, seed=1, size=_NOISE):
  """Returns params with noise: a draft that is right now and then."""
  rng = np.random.default_rng(seed)

  def add(x):
    x = np.asarray(x)
    return jnp.asarray(
      x + size * x.std() * rng.normal(size=x.shape).astype(x.dtype)
    )

  return jax.tree.map(add, params)


def heads_of(kind, target, *, ids=None, version=3, seed=4):
  """Returns (heads, params) at random for (model, params).

  Args:
    kind: "medusa" or "eagle".
    target: (model, params).
    ids: the tokens they know, with a matrix for them; None = all.
    version: of EAGLE.
    seed: of the parameters.
  """
  model, _ = target
  vocab = model.config.vocab_size
  words = Words(vocab, vocab)
  if ids is not None:
    words = Words(len(ids), vocab, own_matrix=True, mapped=True)
  if kind == "medusa":
    width = getattr(model.config, "width", vocab)
    config = medusa.MedusaConfig(
      width=width, num_heads=3, words=words, max_length=256
    )
    made = medusa.build(config)
  else:
    taps = (0, 1, 2) if version == 3 else ()
    made = eagle.build(eagle.config_of(model.config, version, words, taps=taps))
  shapes = jax.eval_shape(made.init, jax.eval_shape(lambda: jax.random.key(0)))
  known = {k: v for k, v in shapes.items() if k != "ids"}
  params = _drawn(known, seed)
  if ids is not None:
    params["ids"] = jnp.asarray(ids, jnp.int32)
  return made, params


def tables(vocab=5, *, period=7, seed=0):
  """Returns (model, params) of a random table."""
  model = table.build(table.TableConfig(vocab, period))
  rng = np.random.default_rng(seed)
  logits = 2 * rng.normal(size=(period, vocab, vocab)).astype(np.float32)
  return model, {"table": jnp.asarray(logits)}


def scripted(text, vocab, *, max_length=1 << 20):
  """Returns (model, params) of a model that says `text[p]` at position `p`."""
  config = table.TableConfig(vocab, len(text), max_length)
  # Logit 10: a log-probability of -7e-4, which is not 0 in float32.
  logits = table.script(text, vocab, sharpness=10.0)
  return table.build(config), {"table": jnp.asarray(logits)}


def law_model(law):
  """Returns (model, params) of a model whose law is `law` everywhere."""
  law = np.asarray(law, np.float64)
  with np.errstate(divide="ignore"):
    logits = np.log(law).astype(np.float32)
  V = len(law)
  model = table.build(table.TableConfig(V))
  return model, {"table": jnp.broadcast_to(jnp.asarray(logits), (1, V, V))}


def scripted_drafter(tree) -> Drafter:
  """Builds a drafter that proposes what `params["draft"]` says.

  `params["draft"]` is `[B, W, N]` int32: the nodes' tokens in row `b` at
  length `l`; -1 is a node that is not acceptable. The nodes are deterministic.
  """

  def propose(params, noise, state, context):
    B, N = context.length.shape[0], tree.num_nodes
    script = params["draft"]
    tokens = script[jnp.arange(B), context.length]
    return Draft(
      tokens=jnp.concatenate(
        [root_token(context), jnp.maximum(tokens[:, 1:], 0)], 1
      ),
      **static_tree(tree, B),
      law=jnp.full((B, N), DETERMINISTIC, jnp.int32),
      probs=None,
      acceptable=tokens >= 0,
    ), state

  return Drafter(
    init=lambda batch: (),
    prefill=lambda params, state, chunk, output: state,
    propose=propose,
    update=lambda params, state, draft, verdict, output: state,
    num_nodes=tree.num_nodes,
    depth=tree.depth,
  )


def oracle(text, depth, slots):
  """Returns `[W, N]`: what a scripted chain that knows `text` proposes."""
  index = np.arange(slots)[:, None] + np.arange(depth + 1)[None] - 1
  return np.asarray(text)[index % len(text)].astype(np.int32)


class Rig:
  """A target, a drafter and their compiled functions.

  One program serves all settings: every sampling field is an array unless
  `use` says otherwise.
  """

  def __init__(
    self,
    target,
    drafter="none",
    *,
    draft=None,
    slots=64,
    chunk=8,
    use=ALL,
    logprobs=None,
    trace=False,
    verifier=None,
    options=None,
    stops=None,
    depth=None,
    policy=None,
    lossy=False,
  ):
    """Args: `target` and `draft` are (model, params) pairs."""
    self.model, params = target
    self.draft_model, draft_params = draft or (None, None)
    if isinstance(drafter, str):
      drafter = drafters.build(
        drafter, self.model, self.draft_model, slots=slots, **(options or {})
      )
    self.drafter = drafter
    self.params = {"target": params, "draft": draft_params}
    if drafter.tables is not None:
      self.params["tables"] = jax.tree.map(jnp.asarray, drafter.tables)
    if stops is not None:
      self.params["stops"] = stops
    self.slots, self.use = slots, use
    if policy is None:
      policy = length.fixed(drafter.depth if depth is None else depth)
    if policy.needs_costs:  # A draft pays, a deep one a little less.
      costs = np.linspace(1.0, 1.1, num_costs(drafter))
      self.params["costs"] = jnp.asarray(costs, jnp.float32)
    shown = shown_to(drafter, self.model)
    init, resume = rows_lib.make_init(
      shown,
      drafter,
      policy,
      slots=slots,
      chunk=chunk,
      logprobs=logprobs is not None,
      lossy=lossy,
    )
    extra = {} if verifier is None else {"verifier": verifier}
    self.raw_init = init
    self.raw_step = steps.make_step(
      shown, drafter, policy, logprobs=logprobs, trace=trace, **extra
    )
    self.init, self.resume = jit(init), jit(resume)
    self.step = jit(self.raw_step)

  def request(
    self,
    prompts: Sequence[Sequence[int]],
    settings: Settings | Sequence[Settings] = _DEFAULT,
    *,
    seeds: Sequence[int] | None = None,
    junk: int = 0,
    patterns: Sequence[int] | None = None,
  ) -> rows_lib.Request:
    """Returns the request of these rows; `junk` fills what is past a prompt."""
    B = len(prompts)
    if isinstance(settings, Settings):
      settings = [settings] * B
    tokens = np.full((B, self.slots), junk, np.int32)
    stop_ids = np.full((B, 2), -1, np.int32)
    for row, (prompt, s) in enumerate(zip(prompts, settings, strict=True)):
      tokens[row, : len(prompt)] = prompt
      stop_ids[row, : len(s.stop_ids or ())] = s.stop_ids or ()
    lengths = np.array([len(p) for p in prompts], np.int32)
    new = np.array([s.max_new_tokens for s in settings])
    limit = np.minimum(lengths + new, self.slots)
    seeds = range(B) if seeds is None else seeds
    stops = Stops(ids=jnp.asarray(stop_ids))
    if "stops" in self.params:
      stops = stops.replace(
        state=jnp.zeros((B,), jnp.int32),
        patterns=jnp.asarray(patterns, jnp.uint32),
        first=jnp.asarray([s.min_new_tokens for s in settings], jnp.int32),
      )
    return rows_lib.Request(
      tokens=jnp.asarray(tokens),
      length=jnp.asarray(lengths),
      limit=jnp.asarray(limit, jnp.int32),
      sampling=to_arrays(settings, self.use, self.model.config.vocab_size),
      stops=stops,
      keys=jax.vmap(jax.random.key)(jnp.asarray(list(seeds), jnp.uint32)),
    )

  def start(self, *args, **kwargs):
    """Reads the prompts; takes what `request` takes."""
    return self.init(self.params, self.request(*args, **kwargs))

  def finish(self, state):
    """Steps until every row is done; `step` is compiled, `decode` is not."""
    for _ in range(10_000):
      if state.done.all():
        return state
      state, _ = self.step(self.params, state)
    raise AssertionError("rows do not finish")

  def run(self, *args, **kwargs):
    """Reads and decodes; returns the final state."""
    return self.finish(self.start(*args, **kwargs))

  def texts(self, *args, **kwargs):
    """Reads and decodes; returns each row's output tokens."""
    return outputs(self.run(*args, **kwargs))


def noise(drafter, batch, **fields) -> Noise:
  """Returns noise of .5 everywhere but in the fields given."""
  N, K = drafter.num_nodes, drafter.depth
  shapes = {"draft": (N,), "accept": (N,), "residual": (), "plain": (K + 1,)}
  arrays = {
    name: np.broadcast_to(
      np.asarray(fields.get(name, 0.5), np.float32), (batch, *shape)
    )
    for name, shape in shapes.items()
  }
  return Noise(**jax.tree.map(jnp.asarray, arrays))


def outputs(state) -> list[list[int]]:
  """Returns each row's output tokens."""
  tokens = np.asarray(state.tokens)
  begin, end = np.asarray(state.prompt_length), np.asarray(state.length)
  return [t[b:e].tolist() for t, b, e in zip(tokens, begin, end, strict=True)]


def map_caches(function: Callable, state):
  """Applies `function` to every `Cache` in a state, the drafter's too."""
  is_cache = lambda x: isinstance(x, Cache)
  return jax.tree.map(
    lambda x: function(x) if is_cache(x) else x, state, is_leaf=is_cache
  )


def poison(cache: Cache, value: float) -> Cache:
  """Fills every slot that holds no position below the length."""

  def fill(x):
    empty = slot_positions(cache.length, x.shape[2]) < 0
    return jnp.where(empty[:, None, :, None], value, x)

  return cache.replace(k=tuple(map(fill, cache.k)), v=tuple(map(fill, cache.v)))


def held(cache: Cache):
  """Returns per row a dict (layer, position) -> (key, value)."""
  rows: list[dict] = [{} for _ in cache.length]
  for layer, (k, v) in enumerate(zip(cache.k, cache.v, strict=True)):
    positions = np.asarray(slot_positions(cache.length, k.shape[2]))
    k, v = np.asarray(k), np.asarray(v)
    for row, slot in np.argwhere(positions >= 0):
      key = (layer, int(positions[row, slot]))
      rows[row][key] = (k[row, :, slot], v[row, :, slot])
  return rows


def path_to(tree, node):
  """Returns the nodes from the root to `node`."""
  path = [node]
  while tree.parents[path[-1]] >= 0:
    path.append(int(tree.parents[path[-1]]))
  return path[::-1]


def random_tree(rng, num_nodes):
  """Returns a random tree of so many nodes, listed level by level."""
  parents = [-1]
  for i in range(1, num_nodes):
    # Non-decreasing parents are breadth first.
    parents.append(int(rng.integers(max(0, parents[-1]), i)))
  return trees.from_parents(parents)


def same(a, b) -> bool:
  """Tells whether two pytrees are equal bit for bit."""

  def plain(x):
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
      x = jax.random.key_data(x)
    return np.asarray(x)

  equal = jax.tree.map(lambda x, y: np.array_equal(plain(x), plain(y)), a, b)
  return all(jax.tree.leaves(equal))
