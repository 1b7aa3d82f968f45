"""Writes logits_*.npz: what the transformers library computes, in float32.

Needs torch and transformers 5, which no test does. Every model is tiny and
random, with weights large enough for a wrong mask, rope or bias to move the
logits far beyond the tests' tolerance.

    python tests/golden/make_logits.py

Each file holds `config` (the text of config.json), `weight:<tensor name>`
(float16: the weights are rounded to it before use), `tokens: [2, 28]`,
`logits: [2, 28, V]` and, where rope is scaled or layers slide, `long_tokens:
[1, 3100]` with `long_logits: [5, V]` of the last 5 positions.
"""

from pathlib import Path

import numpy as np
import torch
import transformers

_SHORT, _LONG, _LAST = 28, 3100, 5
_WITH_LONG = (
  "llama_linear",
  "llama_dynamic",
  "llama_yarn",
  "llama_llama3",
  "mistral",
  "gemma3",
)

_SMALL = {
  "vocab_size": 64,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 4096,
}


def _rope(kind, **fields):
  return {
    "rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}
  }


def _llama(**fields):
  # head_dim 16 is not 32 / 4; see also Llama's own default below.
  config = transformers.LlamaConfig(**{**_SMALL, "head_dim": 16, **fields})
  return transformers.LlamaForCausalLM, config


def _cases():
  original = {"original_max_position_embeddings": 512}
  yield "llama", _llama(**_rope("default"), head_dim=None)
  yield "llama_tied", _llama(**_rope("default"), tie_word_embeddings=True)
  yield "llama_linear", _llama(**_rope("linear", factor=4.0))
  yield "llama_dynamic", _llama(**_rope("dynamic", factor=4.0))
  yield "llama_yarn", _llama(**_rope("yarn", factor=8.0, **original))
  yield (
    "llama_llama3",
    _llama(
      **_rope(
        "llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        **original,
      )
    ),
  )
  yield (
    "mistral",
    (
      transformers.MistralForCausalLM,
      transformers.MistralConfig(
        **_SMALL, **_rope("default"), sliding_window=8, head_dim=16
      ),
    ),
  )
  qwen2 = transformers.Qwen2ForCausalLM
  yield (
    "qwen2",
    (qwen2, transformers.Qwen2Config(**_SMALL, **_rope("default"))),
  )
  yield (
    "qwen2_window",
    (
      qwen2,
      transformers.Qwen2Config(
        **_SMALL,
        **_rope("default"),
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=1,
        tie_word_embeddings=True,
      ),
    ),
  )
  yield (
    "qwen3",
    (
      transformers.Qwen3ForCausalLM,
      transformers.Qwen3Config(
        **_SMALL, **_rope("default"), head_dim=16, tie_word_embeddings=True
      ),
    ),
  )
  yield (
    "gemma3",
    (
      transformers.Gemma3ForCausalLM,
      transformers.Gemma3TextConfig(
        **{**_SMALL, "num_hidden_layers": 4},
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=8,
        layer_types=["sliding_attention", "sliding_attention"]
        + ["full_attention", "sliding_attention"],
        rope_parameters={
          "full_attention": {
            "rope_type": "linear",
            "factor": 8.0,
            "rope_theta": 100000.0,
          },
          "sliding_attention": {
            "rope_type": "default",
            "rope_theta": 10000.0,
          },
        },
      ),
    ),
  )
  yield (
    "gpt2",
    (
      transformers.GPT2LMHeadModel,
      transformers.GPT2Config(
        vocab_size=64,
        n_positions=64,
        n_embd=32,
        n_layer=3,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
      ),
    ),
  )


def _randomise(model, random):
  """Sets every parameter to values that float16 holds."""
  for name, p in model.named_parameters():
    noise = random.normal(size=p.shape)
    if "embed" in name or "wte" in name or "lm_head" in name:
      value = 0.5 * noise
    elif p.ndim == 2:
      value = 0.3 * noise
    elif name.endswith("bias"):
      # As large as what they are added to.
      value = 1.5 * noise
    else:  # norms; Gemma's are stored less 1
      value = 0.4 * noise + (0.0 if "Gemma" in type(model).__name__ else 1.0)
    p.data = torch.from_numpy(value.astype(np.float16).astype(np.float32))


def main():
  """Writes every file beside this one."""
  for index, (name, (family, config)) in enumerate(_cases()):
    random = np.random.default_rng(index)
    config._attn_implementation = "eager"
    model = family(config).eval().float()
    _randomise(model, random)
    model.tie_weights()
    stored = {
      f"weight:{k}": v.numpy().astype(np.float16)
      for k, v in model.state_dict().items()
      if not (config.tie_word_embeddings and k == "lm_head.weight")
    }
    tokens = random.integers(0, config.vocab_size, (2, _SHORT))
    with torch.no_grad():
      stored["tokens"] = tokens.astype(np.int16)
      stored["logits"] = model(torch.from_numpy(tokens)).logits.numpy()
      if name in _WITH_LONG:
        tokens = random.integers(0, config.vocab_size, (1, _LONG))
        stored["long_tokens"] = tokens.astype(np.int16)
        out = model(torch.from_numpy(tokens), logits_to_keep=_LAST)
        stored["long_logits"] = out.logits[0].numpy()
    stored["config"] = np.array(config.to_json_string())
    path = Path(__file__).parent / f"logits_{name}.npz"
    np.savez_compressed(path, **stored)
    print(path.name, path.stat().st_size, stored["logits"].std())


if __name__ == "__main__":
  main()
