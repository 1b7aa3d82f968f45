"""Measures what a block of tokens costs on a CPU, with and without the kernel.

  python -m experiments.cpu_kernel --out=experiments/results/cpu_kernel.json

Three parts. `floor`: bytes per second of a copy and of reading alone, over all
processors. `stream`: products with matrices that do not fit a cache together,
XLA's dot against the kernel with float32 and bfloat16 weights. `model`: one
pass over 1, 2, ... tokens behind a half full cache, logits of each token
included. All cases of a part take turns, so that a disturbance meets all of
them; medians are printed, minima and all times written. Run it on a quiet
machine.
"""

from collections.abc import Callable
import concurrent.futures
import functools
import json
import os
from pathlib import Path
import statistics
from typing import Any

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from experiments import checks, launch, results, timing
from experiments.torch_peer import TorchPeer
from spec_jax import hub, kernels

_MODEL = flags.DEFINE_string("model", "smollm2-135m-instruct", "The target.")
_OUT = flags.DEFINE_string("out", "", "JSON file to write.")
_PLOT = flags.DEFINE_string("plot", "", "PNG file to draw the passes to.")
_PARTS = flags.DEFINE_list("parts", ["floor", "stream", "model"], "What to do.")
_REPEATS = flags.DEFINE_integer("repeats", 30, "Times each case is timed.")
_SLOTS = flags.DEFINE_integer("slots", 512, "Tokens the cache has room for.")
_TORCH = flags.DEFINE_string(
  "torch_python", "", "Python that has torch: times transformers' passes too."
)
_ROWS = flags.DEFINE_multi_integer(
  "rows", [1, 2, 4, 8, 12, 16, 32, 64], "Rows, or tokens of a pass."
)

# (K, N, matrices): the stream, then SmolLM2-135M's shapes, each more
# than the second-level caches hold.
_STREAMS = (
  (576, 3072, 30),
  (576, 576, 60),
  (576, 192, 180),
  (576, 1536, 60),
  (1536, 576, 60),
  (576, 49152, 1),
)
_FLOOR_BYTES = 512 << 20

# By (name, rows): returns when its work is done, with None or the seconds it
# took, where only a part of the call is to count.
Cases = dict[tuple[str, int], Callable[[], float | None]]


def _by_rows(cases: Cases, repeats: int) -> dict[tuple[str, int], list]:
  """Times all cases in turn, by rows first.

  So before each case another reads other weights, and nobody finds its own in
  cache.
  """
  turns = sorted(cases.items(), key=lambda item: item[0][1])
  return timing.take_turns(dict(turns), repeats)


def _finish(run: Callable, *args) -> None:
  jax.block_until_ready(run(*args))


def _lines(part: str, times, **fields) -> list[dict[str, Any]]:
  """Returns one record for each case."""
  return [
    {
      "part": part,
      **fields,
      "name": name,
      "rows": rows,
      "median_ms": 1e3 * statistics.median(seconds),
      "min_ms": 1e3 * min(seconds),
      "all_ms": [round(1e3 * s, 4) for s in seconds],
    }
    for (name, rows), seconds in times.items()
  ]


def _print_table(title: str, lines: list[dict[str, Any]]) -> None:
  rows = list(dict.fromkeys(line["rows"] for line in lines))
  print(f"{title}; median ms by rows (x one row)")
  print(f"{'':22}" + "".join(f"{r:>15}" for r in rows))
  for name in dict.fromkeys(line["name"] for line in lines):
    ours = {x["rows"]: x["median_ms"] for x in lines if x["name"] == name}
    one = ours.get(1, float("nan"))
    cells = [f"{ours[r]:8.2f} ({ours[r] / one:4.2f})" for r in rows]
    print(f"{name:22}" + "".join(cells), flush=True)


# --- floor ------------------------------------------------------------------


def measure_floor(repeats: int) -> list[dict[str, Any]]:
  """Measures bytes per second of copying and of reading, on all processors."""
  threads = len(os.sched_getaffinity(0))
  source = np.ones(_FLOOR_BYTES // 4, np.float32)
  target = np.zeros_like(source)
  parts = [
    slice(i * source.size // threads, (i + 1) * source.size // threads)
    for i in range(threads)
  ]
  with concurrent.futures.ThreadPoolExecutor(threads) as pool:

    def copy():
      list(pool.map(lambda p: np.copyto(target[p], source[p]), parts))

    def read():
      list(pool.map(lambda p: source[p].max(), parts))

    times = _by_rows({("copy", 1): copy, ("read", 1): read}, repeats)
  lines = _lines("floor", times, threads=threads)
  for line in lines:
    # A copy reads each byte and writes one.
    line["bytes"] = source.nbytes * (2 if line["name"] == "copy" else 1)
    for which in ("median", "min"):
      line[f"{which}_gb_s"] = line["bytes"] / line[f"{which}_ms"] / 1e6
    print(
      f"{line['name']}: {line['median_gb_s']:.1f} GB/s"
      f" (best {line['min_gb_s']:.1f}), {threads} threads",
      flush=True,
    )
  return lines


# --- products ---------------------------------------------------------------


def measure_stream(K: int, N: int, count: int, repeats: int) -> list:
  """Measures products of some rows with `count` matrices `[K, N]`."""
  random = np.random.default_rng(0)
  plain = [
    random.standard_normal((K, N), np.float32) / K**0.5 for _ in range(count)
  ]
  stores: dict[str, tuple[list, Callable]] = {
    "xla float32": ([jnp.asarray(w) for w in plain], jnp.matmul)
  }
  if kernels.why_not() is None:
    for weights in kernels.WEIGHTS:
      packed = [kernels.pack(w, weights=weights) for w in plain]
      stores[f"kernel {weights}"] = (packed, kernels.matmul)
  cases: Cases = {}
  for name, (store, multiply) in stores.items():
    run = jax.jit(lambda x, ws, multiply=multiply: [multiply(x, w) for w in ws])
    for rows in _ROWS.value:
      x = jnp.asarray(random.standard_normal((rows, K), np.float32))
      cases[name, rows] = functools.partial(_finish, run, x, store)
  lines = _lines("stream", _by_rows(cases, repeats), K=K, N=N, matrices=count)
  _print_table(f"{count} matrices {K} x {N}", lines)
  return lines


# --- passes -----------------------------------------------------------------


def _passes(loaded, params, slots: int) -> Callable[[int], Callable]:
  """Returns `make(n)`, which makes a function that reads n tokens."""
  return lambda n: timing.pass_of(
    loaded.model, params, n, 1, slots=slots, held=slots // 2
  )


def measure_model(
  opened: hub.Inspected, name: str, slots: int, repeats: int
) -> list[dict[str, Any]]:
  """Measures passes of a model over blocks of tokens.

  With an interpreter that has torch, the transformers library's passes take
  their turns too; their seconds are its own, without the pipe's.
  """
  loaded = opened.read()
  makers = {"xla float32": _passes(loaded, loaded.params, slots)}
  weight_bytes = {
    "xla float32": sum(x.nbytes for x in jax.tree.leaves(loaded.params))
  }
  if kernels.why_not() is None:
    for weights in kernels.WEIGHTS:
      params = kernels.pack_params(loaded.params, weights=weights)
      makers[f"kernel {weights}"] = _passes(loaded, params, slots)
      weight_bytes[f"kernel {weights}"] = sum(
        x.nbytes for x in jax.tree.leaves(params)
      )
  cases = {
    (kind, n): make(n) for kind, make in makers.items() for n in _ROWS.value
  }
  peers: dict[str, TorchPeer] = {}
  if _TORCH.value:
    for dtype in ("float32", "bfloat16"):
      peer = TorchPeer(_TORCH.value, loaded.files[0], dtype)
      peers[f"transformers {dtype}"] = peer
      for n in _ROWS.value:
        own = functools.partial(peer.forward, n, slots // 2)
        cases[f"transformers {dtype}", n] = own
      size = 4 if dtype == "float32" else 2
      weight_bytes[f"transformers {dtype}"] = (
        weight_bytes["xla float32"] * size // 4
      )
  times = _by_rows(cases, repeats)
  for peer in peers.values():
    peer.close()
  lines = _lines("model", times, model=name, slots=slots)
  for line in lines:
    line["weight_bytes"] = weight_bytes[line["name"]]
  _print_table(f"one pass of {name}, {slots} slots", lines)
  return lines


def plot(lines: list[dict[str, Any]], path: str) -> None:
  """Draws the cost of a pass against its width, and the memory floors."""
  from matplotlib import pyplot as plt

  passes = [x for x in lines if x["part"] == "model"]
  figure, axes = plt.subplots(figsize=(6, 4))
  for name in dict.fromkeys(x["name"] for x in passes):
    ours = sorted(
      (x["rows"], x["median_ms"]) for x in passes if x["name"] == name
    )
    axes.plot(*zip(*ours, strict=True), marker="o", label=name)
  sizes = [x["weight_bytes"] for x in passes]
  for line, style in zip(
    (x for x in lines if x["part"] == "floor"), ("--", ":"), strict=False
  ):
    floor = max(sizes, default=0) / line["median_gb_s"] / 1e6
    verb = {"copy": "copied", "read": "read"}[line["name"]]
    label = f"float32 weights {verb} ({line['median_gb_s']:.0f} GB/s)"
    axes.axhline(floor, color="gray", linestyle=style, label=label)
  axes.set_xscale("log", base=2)
  axes.set_ylim(bottom=0)
  axes.set_xlabel("tokens in one pass")
  axes.set_ylabel("milliseconds")
  axes.legend(fontsize=8)
  figure.tight_layout()
  figure.savefig(path, dpi=150)
  plt.close(figure)


def main() -> int:
  """Measures the parts asked for; returns the exit code."""
  known = "floor", "stream", "model"
  wrong = [part for part in _PARTS.value if part not in known]
  if wrong or not _PARTS.value:
    raise launch.UserError(
      f"--parts must be of {', '.join(known)}, got {', '.join(wrong) or 'none'}"
    )
  checks.at_least(1, _REPEATS, _ROWS)
  checks.out_file(_OUT.value)
  checks.picture(_PLOT.value)
  if "model" in _PARTS.value:
    opened = hub.inspect(
      _MODEL.value, dtype="float32", tokenizer=False, cpu_kernel="off"
    )
    # Half of them are full.
    checks.slots(opened.loaded, _SLOTS.value, 2)
  if (reason := kernels.why_not()) is not None:
    print(f"no kernel: {reason}")
  lines: list[dict[str, Any]] = []
  if "floor" in _PARTS.value:
    lines += measure_floor(_REPEATS.value)
  if "stream" in _PARTS.value:
    for K, N, count in _STREAMS:
      lines += measure_stream(K, N, count, _REPEATS.value)
  if "model" in _PARTS.value:
    lines += measure_model(opened, _MODEL.value, _SLOTS.value, _REPEATS.value)
  if _OUT.value:
    found = {"environment": results.environment(), "lines": lines}
    Path(_OUT.value).write_text(json.dumps(found, indent=1) + "\n")
  if _PLOT.value:
    plot(lines, _PLOT.value)
  return 0


if __name__ == "__main__":
  launch.run(main)
