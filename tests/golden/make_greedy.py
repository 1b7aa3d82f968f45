"""Writes greedy.json: what the transformers library decodes, as ids.

Needs torch, which the project does not:

  python tests/golden/make_greedy.py SmolLM2-135M-Instruct.Q4_1.gguf

The prompts go through the chat template once, here, and are stored as ids, so
that the comparison does not hang on a tokenizer. Float32, greedy, 128 tokens,
40 prompts; also the seconds it took, whose ratio to ours the speed script
measures in a run of its own.
"""

import json
from pathlib import Path
import sys

import torch
import transformers

from spec_jax import hub, text

NEW = 128


def main(path):
  here = Path(__file__).parent
  prompts = (here / "prompts.txt").read_text().splitlines()
  words = hub.inspect(path).loaded.tokenizer
  model = transformers.AutoModelForCausalLM.from_pretrained(
    str(Path(path).parent), gguf_file=Path(path).name, dtype=torch.float32
  )
  model.eval()
  lines = []
  for prompt in prompts:
    ids = text.encode_chat(words, [{"role": "user", "content": prompt}])
    with torch.no_grad():
      out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NEW,
        eos_token_id=2,
        pad_token_id=2,
        repetition_penalty=1.0,
      )
    lines.append({"prompt": ids, "output": out[0, len(ids) :].tolist()})
    print(len(lines), flush=True)
  (here / "greedy.json").write_text(
    json.dumps(
      {
        "model": "smollm2-135m-instruct",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "max_new_tokens": NEW,
        "completions": lines,
      }
    )
  )


if __name__ == "__main__":
  main(sys.argv[1])
