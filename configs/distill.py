"""Distils the first layers of a target into a draft: `python -m train.main`.

The defaults are for the built-in model on two CPU cores, where a step of 2 x
512 tokens takes 1.3 seconds (.55 with the target's states on disk). Data
for a draft worth having: the target's own answers, written by `python -m
train.generate`; the default is text that any machine has, to see the command
work.

Reference: Zhou et al. 2024 (DistillSpec). Not run as a reproduction.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
  """Returns the configuration, locked: an unknown field is an error."""
  config = ConfigDict()
  # A file of train/ with `build`.
  config.recipe = "distill"
  # The target: a built-in name, a folder, a .gguf file, organisation/model.
  config.model = "smollm2-135m-instruct"
  # float32, bfloat16 or float16 to compute in; "" = float32 on CPU, bfloat16
  # elsewhere. What is trained is kept in float32.
  config.dtype = ""
  # Of the draft's weights on disk: bfloat16 or float32.
  config.dtype_saved = "bfloat16"
  config.execution = ConfigDict()
  # Training needs plain arrays.
  config.execution.cpu_kernel = "off"
  config.execution.weights = "float32"
  config.execution.matmul_precision = "highest"
  # "" = one device, or rows x model, e.g. "2x4".
  config.mesh = ""
  # Of the order of the data and whatever is drawn.
  config.seed = 0

  config.draft = ConfigDict()
  # A number of the target's first layers, or layers like "0,1,28,29".
  config.draft.layers = "2"
  # A trained draft of the same layers to go on from, its folder or
  # "shipped:..."; "" = the target's own layers.
  config.draft.start = ""
  # Words the draft knows, the target's first; 0, or no fewer than there are =
  # all.
  config.draft.words = 16384

  config.loss = ConfigDict()
  # forward_kl, reverse_kl, jsd, tvd, or cross_entropy with the data's tokens.
  config.loss.name = "forward_kl"
  # Of both laws.
  config.loss.temperature = 1.0
  # Of jsd, in (0, 1).
  config.loss.beta = 0.5
  # Tokens of the target's law that the loss sees; 0 = all.
  config.loss.top_k = 0
  # Positions whose logits exist at a time; divides data.length; 0 = all.
  config.loss.chunk = 128

  config.data = ConfigDict()
  # .jsonl, .txt, names of hub data sets, "python" = Python's help pages.
  config.data.files = ("python",)
  # Tokens of a row; sequences are packed into rows.
  config.data.length = 512
  # Whether prompts that are texts become chats: auto, yes or no.
  config.data.chat_template = "auto"
  # A system message before them; "" = the template's default.
  config.data.system = ""
  # Examples to read at most; 0 = all.
  config.data.limit = 0
  # A folder where the target's states are kept, bfloat16, for several epochs or
  # recipes; "" = the target runs in each step.
  config.data.features = ""

  # The draft's own answers to the data's prompts, written as it learns.
  config.on_policy = ConfigDict()
  # Part of each batch: 0 = the data alone, 1 = the draft's answers alone.
  config.on_policy.part = 0.0
  # Steps between two writings, and prompts answered each time.
  config.on_policy.refresh = 50
  config.on_policy.prompts = 64
  config.on_policy.temperature = 1.0

  config.optimizer = ConfigDict()
  config.optimizer.learning_rate = 1e-3
  # Steps; then a cosine down to `final` of the highest rate.
  config.optimizer.warmup = 20
  config.optimizer.final = 0.1
  # Largest norm of a gradient; 0 = none.
  config.optimizer.clip = 1.0
  config.optimizer.weight_decay = 0.0
  config.optimizer.b1 = 0.9
  config.optimizer.b2 = 0.95

  config.train = ConfigDict()
  # All numbers of steps are optimiser steps.
  config.train.steps = 1000
  # Rows of a micro-batch, and micro-batches of a step.
  config.train.batch_size = 2
  config.train.accumulate = 1
  # Compute each layer again in the backward pass: less memory, more time.
  config.train.remat = False
  config.train.log_every = 5
  # 0 = at the end only.
  config.train.save_every = 100
  # Checkpoints that are kept.
  config.train.keep = 2

  # The real decoder on prompts that are not trained on decides what is best.
  config.eval = ConfigDict()
  # Steps between measurements; 0 = at the end only.
  config.eval.every = 500
  # Examples held out of the data; 0 = measure nothing, keep the last.
  config.eval.prompts = 16
  config.eval.num_draft = 4
  config.eval.max_new_tokens = 64
  config.eval.temperature = 0.0
  config.eval.batch_size = 8
  return config.lock()
