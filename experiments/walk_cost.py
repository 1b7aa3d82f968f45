"""What the walk of verification is timed on: 64 nodes, all accepted."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments import show
from experiments.timing import Piece
from spec_jax import Settings, tree as trees
from spec_jax.base import (
  DETERMINISTIC,
  IID,
  Counts,
  Draft,
  Noise,
  Sampling,
  Tree,
)
from spec_jax.drafting import static_tree
from spec_jax.nodes import at_node
from spec_jax.sampling import no_noise, path_counts, warp
from spec_jax.verify import verify

NUM_NODES = 64
# 7 chains of 9, and one of 63; listed level by level.
TREES = {
  "7 chains of 9": (-1, *([0] * 7), *range(1, NUM_NODES - 7)),
  "chain of 63": tuple(range(-1, NUM_NODES - 1)),
}
SAMPLINGS = {
  "greedy": Settings(),
  "T=.7 top-p .9": Settings(temperature=0.7, top_p=0.9),
}


def sampling_of(settings: Settings) -> Sampling:
  """Returns the arrays of one row's temperature and top-p; greedy: none."""
  if settings.temperature == 0:
    return Sampling()
  return Sampling(
    temperature=jnp.array([settings.temperature], jnp.float32),
    top_p=jnp.array([settings.top_p], jnp.float32),
  )


def accepted_draft(
  tree: Tree, vocab_size: int, law: int, seed: int = 0
) -> tuple[Draft, jax.Array]:
  """Returns a draft and logits `[1, N, V]` that accept its first-child path.

  The likeliest token after each node, by far, is that of its first child;
  the other nodes' tokens are others.

  Args:
    tree: of the nodes.
    vocab_size: `V`.
    law: of all nodes, DETERMINISTIC or IID; `probs` are the target's own.
    seed: of the logits.
  """
  random = np.random.default_rng(seed)
  N = tree.num_nodes
  scores = 2 * random.standard_normal((N, vocab_size), np.float32)
  tokens = random.permutation(vocab_size)[:N].astype(np.int32)
  for node in range(N):
    children = np.flatnonzero(tree.parents == node)
    likely = tokens[children[0]] if children.size else tokens[node]
    scores[node, likely] += 30
  logits = jnp.asarray(scores)[None]
  draft = Draft(
    tokens=jnp.asarray(tokens)[None],
    **static_tree(tree, 1),
    law=jnp.full((1, N), law, jnp.int32),
    probs=None if law == DETERMINISTIC else jax.nn.softmax(logits, -1),
    acceptable=jnp.arange(N)[None] > 0,
  )
  return draft, logits


def walk(params, logits, draft: Draft, sampling: Sampling, noise: Noise):
  """Verifies a draft as a step does: a law at each node arrived at."""
  del params

  def law_at(node):
    after = path_counts(Counts(), draft.tokens, at_node(draft.visible, node))
    return warp(at_node(logits, node), sampling, after)

  return verify(noise, law_at, draft, noise.plain.shape[1] - 1)


def verify_pieces(vocab_size: int) -> dict[tuple[str, str, str], Piece]:
  """Returns (tree, law, sampling) -> the walk that is timed."""
  found = {}
  for shape, parents in TREES.items():
    tree = trees.from_parents(parents)
    noise = jax.tree.map(
      lambda x: x + 0.5, no_noise(1, tree.num_nodes, tree.depth)
    )
    show.note(f"preparing verification of {shape}")
    for kind, law in (("deterministic", DETERMINISTIC), ("iid", IID)):
      draft, logits = accepted_draft(tree, vocab_size, law)
      for name, settings in SAMPLINGS.items():
        rest = (draft, sampling_of(settings), noise)
        piece = Piece(walk, None, logits, rest)
        accepted = int(piece.result().num_accepted[0])
        assert accepted == tree.depth, f"{accepted} of {tree.depth} accepted"
        found[shape, kind, name] = piece
  return found
