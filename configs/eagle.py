"""Trains an EAGLE-3 head: `python -m train.main --config=configs/eagle.py`.

`--config.draft.version=1 --config.loss.steps=1` trains an EAGLE-1 head (also
for EAGLE-2, which drafts another tree). The defaults are for the built-in model
on two CPU cores. Data worth having: the target's own answers, written by
`python -m train.generate`.

Reference: Li et al. 2024 (EAGLE), 2025 (EAGLE-3). Not run as a reproduction.
"""

from ml_collections import ConfigDict

from configs import distill


def get_config() -> ConfigDict:
  """Returns the configuration, locked: an unknown field is an error."""
  config = distill.get_config().unlock()
  config.recipe = "eagle"

  config.draft = ConfigDict()
  # 1 or 3.
  config.draft.version = 3
  # Layers of the target that version 3 looks at; () = 2, L // 2 and L - 3.
  config.draft.taps = ()
  # Of the head's feed-forward; 0 = the target's.
  config.draft.ffn_width = 0
  # Words the head knows; 0 = all of the target's.
  config.draft.words = 12288
  # Which: "id" = the first, "count" = the most frequent in the answers, where
  # 8 thousand are as good as the first 16 thousand.
  config.draft.words_by = "count"

  config.loss = ConfigDict()
  # Passes of training-time test; the paper makes 7. Version 1: 1.
  config.loss.steps = 3
  # Weight of pass s, from 0, is step_decay ** s.
  config.loss.step_decay = 0.8
  # Of version 1: weight of the law beside the feature, and the largest noise
  # added to a feature.
  config.loss.law_weight = 0.1
  config.loss.noise = 0.1
  # Positions whose logits exist at a time; divides data.length; 0 = all.
  config.loss.chunk = 128

  config.optimizer.learning_rate = 1e-3
  config.optimizer.clip = 0.5
  # The tree that is measured.
  config.eval.num_nodes = 16
  config.eval.depth = 5
  config.eval.width = 4
  del config.eval["num_draft"]
  return config.lock()
