"""Decodes with the transformers library and torch, on request, for timing.

Started by `experiments.torch_peer` in an environment that has torch (the
project does not need it). Reads one JSON line a request from standard input,
answers with one: `{"generate": [ids], "tokens": n}` -> `{"seconds": s, "ids":
[...]}`, `{"forward": width, "past": n}` -> `{"seconds": s}`.
"""

import json
import os
from pathlib import Path
import sys
import time

import torch
import transformers


def main(path: str, dtype: str) -> None:
  """Serves until standard input ends."""
  torch.set_num_threads(len(os.sched_getaffinity(0)))
  where = Path(path)
  model = transformers.AutoModelForCausalLM.from_pretrained(
    str(where.parent), gguf_file=where.name, dtype=getattr(torch, dtype)
  )
  model.eval()
  caches: dict[int, transformers.DynamicCache] = {}
  print(json.dumps({"ready": torch.__version__}), flush=True)
  for line in sys.stdin:
    request = json.loads(line)
    with torch.no_grad():
      if "generate" in request:
        ids = torch.tensor([request["generate"]])
        begin = time.perf_counter()
        out = model.generate(
          ids,
          attention_mask=torch.ones_like(ids),
          do_sample=False,
          min_new_tokens=request["tokens"],
          max_new_tokens=request["tokens"],
          pad_token_id=2,
        )
        seconds = time.perf_counter() - begin
        answer = {"seconds": seconds, "ids": out[0, ids.shape[1] :].tolist()}
      else:
        held = request["past"]
        if held not in caches:
          ids = torch.ones(1, held, dtype=torch.long)
          caches[held] = model(ids, use_cache=True).past_key_values
        tokens = torch.ones(1, request["forward"], dtype=torch.long)
        begin = time.perf_counter()
        model(tokens, past_key_values=caches[held], use_cache=True)
        answer = {"seconds": time.perf_counter() - begin}
        caches[held].crop(-request["forward"])
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
  main(*sys.argv[1:])
