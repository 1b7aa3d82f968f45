"""Trains Medusa heads and their target together (Medusa-2).

  python -m train.main --config=configs/medusa_joint.py --out=runs/joint
  python -m experiments.generate --config.model=runs/joint/best/target \\
    --config.drafter.name=medusa --config.drafter.draft=runs/joint/best

The target becomes another one; self-distillation keeps it near what it was.

Reference: Cai et al. 2024 (Medusa-2). Not run as a reproduction.
"""

from ml_collections import ConfigDict

from configs import medusa


def get_config() -> ConfigDict:
  """Returns the configuration, locked: an unknown field is an error."""
  config = medusa.get_config().unlock()
  config.recipe = "medusa_joint"

  config.joint = ConfigDict()
  # Of KL(target as it was || target), of the data's next token, and of the
  # heads' loss (the paper's lambda_0).
  config.joint.law_weight = 1.0
  config.joint.token_weight = 0.0
  config.joint.heads_weight = 0.2
  # Learning rate of the heads as a multiple of the target's; the paper takes 4.
  config.joint.head_rate = 4.0
  # Steps in which the heads learn alone.
  config.joint.heads_first = 50

  config.optimizer.learning_rate = 1e-4
  return config.lock()
