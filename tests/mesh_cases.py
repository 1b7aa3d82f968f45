"""Runs in a process of its own, with 8 fake CPU devices (see mesh_test.py).

Prints one JSON line: for each mesh and drafter the tokens of every job, where a
matrix lies and how often the decoding loop was compiled.
"""

import json

import jax
import numpy as np

from spec_jax import sharding
from spec_jax.engine import Engine
from spec_jax.models import decoder
from spec_jax.programs import EngineConfig
from spec_jax.requests import Job
from spec_jax.rope import Rope
from spec_jax.settings import Settings, in_use

DRAFTERS = {
  "none": ("none", ()),
  "chain": ("vanilla", (("num_draft", 3),)),
  "tree": (
    "vanilla",
    (("siblings", "without_replacement"), ("tree", (2, 1))),
  ),
  # Costs are measured, and followed; the copies may be asked alone.
  "cost": (
    "merge",
    (
      ("first", "prompt_lookup(num_draft=3)"),
      ("second", "vanilla(num_draft=2, siblings='top_k')"),
    ),
  ),
}
# Drafter, mesh, and whether the draft is whole on each device. On 4 and 8
# the 2 key/value heads are replicated by rule.
CASES = (
  ("none", (2, 4), True),
  ("chain", (4, 2), False),
  ("chain", (1, 8), True),
  ("tree", (2, 4), True),
  ("cost", (2, 4), True),
)


def tiny(num_layers: int):
  """Builds a decoder whose 2 key/value heads do not divide 4 or 8."""
  return decoder.DecoderConfig(
    vocab_size=64,
    width=32,
    num_layers=num_layers,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    ffn_width=64,
    max_length=96,
    rope=Rope(tuple(10.0 ** (-np.arange(4) / 2).astype(float))),
    windows=(None, 8)[:num_layers],
  )


def main():
  assert jax.device_count() == 8, jax.devices()
  rng = np.random.default_rng(0)
  model = decoder.build(tiny(2))
  params = jax.tree.map(lambda x: x * 3, model.init(jax.random.key(1)))
  draft = decoder.build(tiny(1))
  draft_params = {**params, "layers": params["layers"][:1]}
  jobs = []
  for i in range(10):
    sampled = Settings(temperature=0.8, top_p=0.9, max_new_tokens=10)
    settings = sampled if i % 2 else Settings(max_new_tokens=8 + i)
    ids = rng.integers(0, 64, rng.integers(1, 24)).tolist()
    jobs.append(Job(ids, settings, (7, i)))
  use = in_use([j.settings for j in jobs])
  found = {}
  alone = [(name, (1, 1), True) for name in DRAFTERS]
  for name, mesh, replicate in (*alone, *CASES):
    kind, options = DRAFTERS[name]
    engine = Engine(
      model,
      params,
      EngineConfig(
        drafter=kind,
        options=options,
        policy="cost" if name == "cost" else "fixed",
        batch_size=8,
        slots=64,
        chunk=16,
        use=use,
      ),
      draft=draft if kind in ("vanilla", "merge") else None,
      draft_params=draft_params,
      mesh=None if mesh == (1, 1) else sharding.make_mesh(*mesh),
      replicate_draft=replicate,
    )
    out = sorted(engine.run(jobs), key=lambda f: f.job)
    key = f"{name} {mesh[0]}x{mesh[1]}"
    found[key] = [f.ids for f in out]
    found[f"{key} compiles"] = engine.programs.decode.num_compiles
    spec = engine.params["target"]["layers"][0]["wq"].sharding
    found[f"{key} wq"] = str(getattr(spec, "spec", None))
  print(json.dumps(found))


if __name__ == "__main__":
  main()
