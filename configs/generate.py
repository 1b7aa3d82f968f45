"""Defaults of `python -m experiments.generate`: the built-in model, greedy.

Every field can be overridden on the command line, e.g.
`--config.drafter.name=vanilla --config.drafter.draft=8
--config.sampling.temperature=0.7`. A drafter's option that is not set keeps
the drafter's own default.
"""

from ml_collections import ConfigDict, config_dict

from spec_jax import drafters, length, verifiers
from spec_jax.settings import Settings


def get_config() -> ConfigDict:
  """Returns the configuration, locked: an unknown field is an error."""
  settings = Settings()
  config = ConfigDict()
  # A built-in name, a folder, a .gguf file, or organisation/model.
  config.model = "smollm2-135m-instruct"
  # float32, bfloat16 or float16; "" = float32 on CPU, bfloat16 elsewhere.
  config.dtype = ""
  config.execution = ConfigDict()
  # auto, on or off: on a CPU, read a block at about the price of one token.
  config.execution.cpu_kernel = "auto"
  # What that kernel stores: float32, or bfloat16 (rounded: another model).
  config.execution.weights = "float32"
  # Of matrix products: highest, high, or default = the device's own.
  config.execution.matmul_precision = "highest"
  # Of rows whose sampling gives no seed of its own.
  config.seed = 0
  # Prompts are put through the model's chat template: auto, yes or no.
  config.chat_template = "auto"
  # A system message before every chat prompt; "" = the template's default.
  config.system = ""

  config.drafter = ConfigDict()
  # A file of spec_jax/drafters, or auto: prompt_lookup, merged with the learned
  # head that comes with this package if one does for the model; with an option
  # set, prompt_lookup.
  config.drafter.name = "auto"
  # Of drafters that ask a draft model: a model's name, "target", a number of
  # the target's first layers, layers like "0-5,24-29", "@FILE" of
  # experiments.search_layers, or the folder of a trained draft. "" = the one
  # that comes with this package, if one does for the model and the drafter.
  config.drafter.draft = ""
  # Options of the drafters, see their files; None = the drafter's own default.
  for option, kind in drafters.option_types().items():
    config.drafter[option] = config_dict.placeholder(kind)

  # token; for drafts that a draft model draws at random also block (chains)
  # and k_seq (trees); lossy: typical, and lenience (chains drawn at random).
  config.verifier = ConfigDict()
  config.verifier.name = "token"
  # Options of the verifiers; None = the verifier's own default.
  for option, kind in verifiers.option_types().items():
    config.verifier[option] = config_dict.placeholder(kind)

  # How deep to draft: cost (as deep as pays on this device, or not at all; what
  # a step costs is measured at the start and followed while decoding), fixed,
  # average, confidence, entropy.
  config.policy = ConfigDict()
  config.policy.name = "cost"
  # Seconds of a step by depth (of a merge with a model, then of its copies
  # alone), from another run's manifest, which are not followed; () = measured.
  config.policy.costs = ()
  # Options of the policies; None = the policy's own default.
  for option, kind in length.option_types().items():
    config.policy[option] = config_dict.placeholder(kind)

  config.sampling = ConfigDict()
  for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
    config.sampling[name] = float(getattr(settings, name))
  for name in ("presence_penalty", "frequency_penalty"):
    config.sampling[name] = float(getattr(settings, name))
  for name in ("top_k", "min_new_tokens", "max_new_tokens", "num_samples"):
    config.sampling[name] = getattr(settings, name)
  config.sampling.seed = config_dict.placeholder(int)
  config.sampling.banned_tokens = ()
  # Pairs of id and bias: ((198, -1.5), (11, 2.0)).
  config.sampling.logit_bias = ()
  # None = the model's own.
  config.sampling.stop_ids = config_dict.placeholder(tuple)
  config.sampling.stop_strings = ()

  # "", raw or warped: log-probability of each emitted token.
  config.logprobs = ""

  config.engine = ConfigDict()
  # Rows; 0 = 1 for up to four prompts (they are streamed), else 8.
  config.engine.batch_size = 0
  # Tokens a row may hold; 0 = the smallest size that fits (chat: 2048).
  config.engine.slots = 0
  # Prompt tokens read in one pass, and prompts read together; 0 = by device.
  config.engine.chunk = 0
  config.engine.refill_rows = 0

  # "" = one device, or rows x model, e.g. "2x4".
  config.mesh = ""
  # Whether each device of a mesh keeps the whole draft.
  config.replicate_draft = True
  return config.lock()
