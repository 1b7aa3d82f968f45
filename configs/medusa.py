"""Trains Medusa heads: `python -m train.main --config=configs/medusa.py`.

The defaults are for the built-in model on two CPU cores. Data worth having: the
target's own answers, written by `python -m train.generate`.

Reference: Cai et al. 2024 (Medusa-1). Not run as a reproduction.
"""

from ml_collections import ConfigDict

from configs import distill


def get_config() -> ConfigDict:
  """Returns the configuration, locked: an unknown field is an error."""
  config = distill.get_config().unlock()
  config.recipe = "medusa"

  config.draft = ConfigDict()
  # Heads; each guesses one token further.
  config.draft.heads = 4
  # Residual blocks of a head.
  config.draft.layers = 1
  # Words the heads know; 0 = all of the target's.
  config.draft.words = 12288
  # Which: "id" = the first, "count" = the most frequent in the answers, where
  # 8 thousand are as good as the first 16 thousand.
  config.draft.words_by = "count"

  config.loss = ConfigDict()
  # Weight of head k is head_decay ** k.
  config.loss.head_decay = 0.8
  # Positions whose logits exist at a time; divides data.length; 0 = all.
  config.loss.chunk = 128

  config.optimizer.learning_rate = 1e-3
  # Nodes of the tree that is measured, root included.
  config.eval.num_nodes = 16
  del config.eval["num_draft"]
  return config.lock()
