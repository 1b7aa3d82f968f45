"""The classic exercise: histograms of speculative and of direct tokens."""

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from spec_jax import drafters, length, step as steps, verify
from spec_jax.models import table
from spec_jax.rows import make_init
from tests.laws import request_of

V, ROWS, NEW = 8, 500, 100  # 50,000 tokens


def histogram(seed):
  """Returns the counts of 50,000 tokens of the speculative loop, and the law.

  Every row of the table is the same law, so that tokens are independent, as
  the test of the histogram needs.
  """
  model = table.build(table.TableConfig(V))
  rng = np.random.default_rng(3)
  target, draft = rng.standard_normal((2, V)).astype(np.float32)
  params = {
    "target": {"table": jnp.broadcast_to(target, (1, V, V))},
    "draft": {"table": jnp.broadcast_to(draft, (1, V, V))},
  }
  drafter = drafters.build("vanilla", model, model, slots=NEW + 4, num_draft=4)
  policy = length.fixed(4)
  init, _ = make_init(model, drafter, policy, slots=NEW + 4, chunk=4)
  step = steps.make_step(model, drafter, policy)
  request = request_of(
    [[0]] * ROWS, [{"temperature": 1.0}] * ROWS, slots=NEW + 4, new=NEW
  )
  request = request.replace(keys=jax.random.split(jax.random.key(seed), ROWS))

  @jax.jit
  def run(params, request):
    state = init(params, request)
    limits = jnp.int32(10**6), jnp.int32(ROWS)
    return steps.decode(step, params, state, *limits)[0]

  tokens = np.asarray(run(params, request).tokens)[:, 1 : NEW + 1]
  assert tokens.size == 50_000
  law = np.exp(target - target.max(), dtype=np.float64)
  return np.bincount(tokens.ravel(), minlength=V), law / law.sum()


def direct(law):
  """Returns the counts of 50,000 tokens drawn one by one from the law."""
  return np.random.default_rng(11).multinomial(50_000, law)


def test_a_histogram_of_50000_tokens_is_that_of_direct_sampling():
  counts, law = histogram(0)
  assert stats.chi2_contingency([counts, direct(law)]).pvalue > 0.05
  assert stats.chisquare(counts, law * counts.sum()).pvalue > 0.05


def test_a_loop_without_the_residual_is_seen(monkeypatch):
  monkeypatch.setattr(verify, "residual_law", lambda law, draft_law: law)
  counts, law = histogram(0)
  assert stats.chi2_contingency([counts, direct(law)]).pvalue < 1e-6
