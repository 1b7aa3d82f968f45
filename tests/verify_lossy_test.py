"""Lossy rules: what they accept, and that they say how far off they are."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import drafters, length, tree as trees, verifiers
from spec_jax.base import DETERMINISTIC, IID, Draft, Noise
from spec_jax.drafting import dynamic_tree, static_tree
from spec_jax.rows import make_init
from spec_jax.step import make_step
from spec_jax.verify import verify
from spec_jax.verify_lossy import verify_lenience, verify_typical
from tests import enumeration, fakes, laws as laws_lib, reference

V = 5


@functools.partial(fakes.jit, static_argnames=("rule", "depth"))
def _decide(draft, noise, p, options, *, rule, depth):
  def law_at(node):
    return jnp.take_along_axis(p, node[:, None, None], 1)[:, 0]

  return rule(noise, law_at, draft, depth, **options)


def random_noise(rng, B, N, K):
  """Returns noise of every purpose."""
  shapes = {"draft": (B, N), "accept": (B, N), "residual": (B,)}
  shapes["plain"] = (B, K + 1)
  return Noise(
    **{k: jnp.asarray(rng.random(s), jnp.float32) for k, s in shapes.items()}
  )


def chain_of(tokens, q, law=IID):
  """Returns chains `tokens: [B, K]` drawn from `q: [B, K + 1, V]`."""
  B, K = tokens.shape
  return Draft(
    tokens=jnp.asarray(np.pad(tokens, ((0, 0), (1, 0))), jnp.int32),
    **static_tree(trees.chain(K), B),
    law=jnp.full((B, K + 1), law, jnp.int32),
    probs=jnp.asarray(q, jnp.float32),
    acceptable=jnp.ones((B, K + 1), bool),
  )


# --- lenience -----------------------------------------------------------------


def test_a_lenience_of_one_is_the_lossless_rule_to_the_bit():
  """At random noise; its divergence is 0, and with less lenience it is not."""
  rng = np.random.default_rng(0)
  B, K = 400, 3
  p, q = rng.dirichlet(np.ones(V), (2, B, K + 1)).astype(np.float32)
  draft = chain_of(rng.integers(0, V, (B, K)), q)
  noise = random_noise(rng, B, K + 1, K)
  strict = _decide(draft, noise, p, {}, rule=verify, depth=K)
  same, less = (
    _decide(draft, noise, p, {"lenience": x}, rule=verify_lenience, depth=K)
    for x in (1.0, 0.5)
  )
  assert fakes.same(same.replace(divergence=None), strict)
  assert (same.divergence == 0).all()
  assert less.num_accepted.sum() > strict.num_accepted.sum()
  # A figure where a draft was judged, none for the bonus token.
  judged = np.arange(K + 1)[None] <= np.asarray(less.num_accepted)[:, None]
  judged[:, K] = False
  assert (np.asarray(less.divergence)[~judged] == 0).all()
  assert (np.asarray(less.divergence)[judged] > 0).mean() > 0.9


@pytest.mark.parametrize("lenience", [1.0, 0.5, 0.3, 0.1])
def test_one_token_has_the_law_of_the_formula(lenience):
  """Enumerated: law, acceptance, bound and distance of 50 random pairs."""
  rng = np.random.default_rng(1)
  for p, q in rng.dirichlet(np.full(V, 0.7), (50, 2)):
    tokens = np.arange(V)[:, None]
    draft = chain_of(tokens, np.tile(q, (V, 2, 1)))
    noise = random_noise(rng, V, 2, 1)
    noise = noise.replace(accept=jnp.full((V, 2), fakes.ALMOST_ONE))
    laws = np.tile(np.float32(p), (V, 2, 1))
    options = {"lenience": lenience}
    verdict = _decide(
      draft, noise, laws, options, rule=verify_lenience, depth=1
    )
    chance = np.asarray(verdict.accept_prob, np.float64)[:, 1]
    refused = q * (1 - chance)
    out = q * chance + refused @ np.asarray(verdict.residual, np.float64)
    kept = np.minimum(q, p / lenience)
    left = np.maximum(p - q, 0)
    np.testing.assert_allclose(
      out, kept + (1 - kept.sum()) * left / left.sum(), atol=1e-6
    )
    assert q @ chance == pytest.approx(kept.sum(), abs=1e-6)
    assert (out <= p / lenience + 1e-6).all()
    far = np.abs(out - p).sum() / 2
    np.testing.assert_allclose(verdict.divergence[:, 0], far, atol=1e-6)


def outcomes(monkeypatch, judge, options, kind, made, new, settings=("t0.7",)):
  """Enumerates `spec_step` under a lossy rule, nothing merged.

  Returns by row: total variation of the joint law from the target's, and the
  mean of the divergences that were added up.
  """
  monkeypatch.setattr(enumeration, "_merge", lambda *rows: rows)
  model, params, next_logits = laws_lib.table_pair()
  slots, vocab = laws_lib.SLOTS, laws_lib.V
  drafter = drafters.build(kind, model, model, slots=slots, **made)
  rule = verifiers.build(judge, drafter, **options)
  assert rule.lossy
  policy = length.fixed(drafter.depth)
  init, _ = make_init(model, drafter, policy, slots=slots, chunk=4, lossy=True)
  step = make_step(model, drafter, policy, verifier=rule.verify, trace=True)
  cases = [(p, s) for p in laws_lib.PROMPTS for s in settings]
  prompts = [p for p, _ in cases]
  chosen = [laws_lib.SETTINGS[s] for _, s in cases]
  request = laws_lib.request_of(prompts, chosen, new=new)
  state = jax.jit(init)(params, request)
  state = state.replace(keys=jnp.zeros_like(state.length))
  state = jax.tree.map(np.asarray, state)
  machine = enumeration.Enumerator(
    step, params, drafter.num_nodes, drafter.depth
  )
  weight, origin = np.ones(len(cases)), np.arange(len(cases))
  laws, said = np.zeros((len(cases), vocab**new)), np.zeros(len(cases))
  while len(weight):
    state, weight, origin = machine.expand(state, weight, origin)
    for r in np.flatnonzero(state.done):
      begin = state.prompt_length[r]
      text = state.tokens[r, begin : begin + new]
      code = int(np.ravel_multi_index(text, (vocab,) * new))
      laws[origin[r], code] += weight[r]
      said[origin[r]] += weight[r] * state.tally.divergence[r]
    keep = np.flatnonzero(~state.done)
    state = jax.tree.map(lambda x, k=keep: x[k], state)
    weight, origin = weight[keep], origin[keep]
  np.testing.assert_allclose(laws.sum(1), 1, atol=1e-5)
  far = [
    np.abs(law - reference.joint_law(next_logits, vocab, p, s, new)).sum() / 2
    for law, p, s in zip(laws, prompts, chosen, strict=True)
  ]
  return np.array(far), said


def test_the_divergence_of_a_step_is_the_enumerated_distance(monkeypatch):
  """One judged token and a plain one: equal. The lossless twin: 0 and 0."""
  chain = "vanilla", {"num_draft": 1}
  far, said = outcomes(
    monkeypatch, "lenience", {"lenience": 0.4}, *chain, 2, ("t0.7", "greedy")
  )
  np.testing.assert_allclose(said, far, atol=1e-6)
  assert (far[::2] > 0.01).all() and (far[1::2] < 1e-6).all()  # greedy: exact
  far, said = outcomes(monkeypatch, "lenience", {"lenience": 1.0}, *chain, 2)
  assert far.max() < 1e-6 and (said == 0).all()


@pytest.mark.parametrize(
  ("judge", "kind", "made"),
  [
    ("lenience", "vanilla", {"num_draft": 2}),
    ("typical", "vanilla", {"tree": (2,)}),
    ("typical", "prompt_lookup", {"num_draft": 2}),
  ],
)
def test_the_law_differs_and_the_divergence_bounds_it(
  judge, kind, made, monkeypatch
):
  """Of three tokens together: no more than the sum of what was said."""
  far, said = outcomes(monkeypatch, judge, {}, kind, made, 3)
  assert (far > 0.01).all()
  assert (far <= said + 1e-6).all()


# --- typical acceptance -------------------------------------------------------

TYPICAL = {"epsilon": 0.09, "delta": 0.3}


def accepts(p, token, **options):
  """Tells whether one proposed token is kept."""
  rng = np.random.default_rng(0)
  p = np.asarray(p, np.float32)
  wide = np.zeros(V, np.float32)
  wide[: len(p)] = p
  draft = chain_of(np.array([[token]]), np.zeros((1, 2, V)), DETERMINISTIC)
  verdict = _decide(
    draft,
    random_noise(rng, 1, 2, 1),
    np.tile(wide, (1, 2, 1)),
    TYPICAL | options,
    rule=verify_typical,
    depth=1,
  )
  assert int(verdict.tokens[0, verdict.num_accepted[0]]) == int(wide.argmax())
  return bool(verdict.num_accepted[0])


def test_a_token_passes_if_it_is_likely_enough():
  """Of a flat law the entropy decides, of a sharp one epsilon; strictly."""
  # H = 1.142, so the threshold is min(.09, .3 * .319) = .09.
  sharp = [0.5, 0.3, 0.15, 0.05]
  assert [accepts(sharp, t) for t in range(4)] == [True, True, True, False]
  # H = ln 5: .3 / 5 = .06 is below .09.
  flat = [0.25, 0.24, 0.24, 0.2, 0.07]
  assert accepts(flat, 4) and not accepts(flat, 4, delta=0.5)
  assert not accepts([0.5, 0.5], 0, epsilon=0.5, delta=10.0)
  assert accepts([0.5, 0.5], 0, epsilon=0.49, delta=10.0)
  # What is certain passes, what is impossible never does.
  assert accepts([1.0], 0, epsilon=1.0, delta=10.0)
  assert not accepts([1.0], 1, epsilon=1e-6, delta=1e-6)


def replay(parents, tokens, acceptable, laws, epsilon, delta):
  """The rule in plain Python: returns (path, tokens, divergences)."""

  def paths_from(node):
    yield [node]
    p = laws[node].astype(np.float64)
    entropy = -sum(x * np.log(x) for x in p if x > 0)
    least = min(epsilon, delta * np.exp(-entropy))
    for child in range(1, len(parents)):
      if parents[child] == node and acceptable[child]:
        if p[tokens[child]] > least or p[tokens[child]] >= 1:
          for rest in paths_from(child):
            yield [node, *rest]

  def worth(path):
    chances = [float(laws[a][tokens[b]]) for a, b in itertools.pairwise(path)]
    return len(path), np.prod(chances), -path[-1]

  path = max(paths_from(0), key=worth)
  last = int(np.argmax(laws[path[-1]]))
  text = [*(int(tokens[i]) for i in path[1:]), last]
  far = [1 - laws[a][t] for a, t in zip(path, text, strict=True)]
  return path, text, far


def test_the_longest_path_is_kept_in_any_tree():
  """300 random trees of 9 nodes, two thirds acceptable, against a replay."""
  rng = np.random.default_rng(3)
  B, N = 300, 9
  built = [fakes.random_tree(rng, N) for _ in range(B)]
  parents = np.stack([t.parents for t in built])
  K = max(t.depth for t in built)
  tokens = rng.integers(0, V, (B, N))
  acceptable = rng.random((B, N)) < 0.8
  laws = rng.dirichlet(np.full(V, 0.5), (B, N)).astype(np.float32)
  draft = Draft(
    tokens=jnp.asarray(tokens, jnp.int32),
    **dynamic_tree(jnp.asarray(parents)),
    law=jnp.asarray(rng.integers(0, 3, (B, N)), jnp.int32),
    probs=None,
    acceptable=jnp.asarray(acceptable),
  )
  noise = random_noise(rng, B, N, K)
  verdict = _decide(draft, noise, laws, TYPICAL, rule=verify_typical, depth=K)
  verdict = jax.tree.map(np.asarray, verdict)
  lengths, forks = [], 0
  for b in range(B):
    path, text, far = replay(
      parents[b], tokens[b], acceptable[b], laws[b], **TYPICAL
    )
    n = len(text)
    assert verdict.path[b, :n].tolist() == path
    assert verdict.tokens[b, :n].tolist() == text
    np.testing.assert_allclose(verdict.divergence[b, :n], far, atol=1e-6)
    assert (verdict.path[b, n:] == -1).all()
    assert (verdict.tokens[b, n:] == -1).all()
    assert (verdict.divergence[b, n:] == 0).all()
    assert (verdict.num_accepted[b], verdict.num_tokens[b]) == (n - 1, n)
    lengths.append(n)
    first = [i for i in range(1, N) if parents[b, i] == 0 and acceptable[b, i]]
    forks += n > 1 and path[1] != first[0]
  assert set(lengths) >= {1, 2, 3, 4} and forks > 30


def test_greedy_rows_are_verified_as_ever():
  """Point masses: the target's own text in any tree, divergence 0."""
  rng = np.random.default_rng(4)
  tree = trees.branching([3, 2, 1])
  B, N, K = 200, tree.num_nodes, tree.depth
  tokens = rng.integers(0, 3, (B, N))
  for parent in range(N):  # Siblings are distinct, as a drafter's are.
    children = np.flatnonzero(tree.parents == parent)
    tokens[:, children] = np.arange(len(children))
  p = np.eye(V, dtype=np.float32)[rng.integers(0, 3, (B, N))]
  draft = Draft(
    tokens=jnp.asarray(tokens, jnp.int32),
    **static_tree(tree, B),
    law=jnp.full((B, N), DETERMINISTIC, jnp.int32),
    probs=None,
    acceptable=jnp.asarray(rng.random((B, N)) < 0.9),
  )
  noise = random_noise(rng, B, N, K)
  same = _decide(draft, noise, p, {}, rule=verify, depth=K)
  found = _decide(draft, noise, p, TYPICAL, rule=verify_typical, depth=K)
  assert (found.divergence == 0).all()
  assert 0 < int(found.num_accepted.sum()) < B * K
  for name in ("path", "tokens", "num_accepted", "num_tokens", "residual"):
    assert fakes.same(getattr(found, name), getattr(same, name)), name


@pytest.mark.parametrize(
  ("name", "made", "settings", "words"),
  [
    ("typical", {}, {"epsilon": 0.0}, r"epsilon must be in \(0, 1\], got 0.0"),
    ("typical", {}, {"epsilon": 1.5}, r"epsilon must be in \(0, 1\], got 1.5"),
    ("typical", {}, {"epsilon": float("nan")}, "epsilon must be in"),
    ("typical", {}, {"delta": 0.0}, "delta must be above 0 and finite, got 0"),
    ("typical", {}, {"rho": 2.0}, "has no option 'rho'; it has epsilon, delta"),
    ("lenience", {}, {"lenience": 0.0}, r"must be in \(0, 1\], got 0.0"),
    ("lenience", {}, {"lenience": 1.1}, r"must be in \(0, 1\], got 1.1"),
    ("lenience", {"tree": (2,)}, {}, "lenience is for chains, not for trees"),
    ("lenience", {"siblings": "top_k"}, {}, "needs tokens drawn at random"),
  ],
)
def test_what_a_lossy_rule_cannot_take_is_refused(name, made, settings, words):
  """The message says what, the allowed range and what was given."""
  model, _ = fakes.tables()
  drafter = drafters.build("vanilla", model, model, slots=16, **made)
  with pytest.raises(ValueError, match=words):
    verifiers.build(name, drafter, **settings)


def test_only_these_are_lossy():
  """Every verifier by name; delta is the root of epsilon if it is not given."""
  model, _ = fakes.tables()
  drafter = drafters.build("vanilla", model, model, slots=16)
  lossy = {n for n in verifiers.VERIFIERS if verifiers.build(n, drafter).lossy}
  assert lossy == {"typical", "lenience"}
  rule = verifiers.build("typical", drafter, epsilon=0.04)
  assert rule.verify.keywords == {"epsilon": 0.04, "delta": pytest.approx(0.2)}
