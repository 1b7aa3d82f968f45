"""Strict settings for every test, set before JAX starts a back end.

Environment variables reach the commands that tests start; `jax.config` holds
in this process only. None is set that the caller has set already.

The key-reuse check also counts slicing, joining and selecting (`keys[i:j]`,
`jnp.concatenate`, `jnp.where`) as the one use of a key array; gathering does
not: write `keys[jnp.array([i])]` to take the same row twice.
"""

import gc
import os
from pathlib import Path

import pytest

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# A second run reads its compiled programs from here.
os.environ.setdefault(
  "JAX_COMPILATION_CACHE_DIR", str(_CACHE / "spec_jax" / "xla")
)
# 0.1 s: below it, reading a file costs what compiling does.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
# Nothing is downloaded; a test that would need to shows it at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# libtpu compiles for TPUs; do not look for one in the cloud's metadata.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
# Plots without a screen.
os.environ.setdefault("MPLBACKEND", "agg")

# As `launch.prepare_jax` does where there are several.
_ORDER = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_ORDER}".strip()

import jax  # noqa: E402

# Meshes up to 4 x 2, without an accelerator.
if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
  jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(autouse=True, scope="module")
def free_programs():
  """Frees the compiled programs of a file of tests when it is done.

  Each maps memory: all of them together pass the system's limit of maps, and
  the process ends.
  """
  yield
  jax.clear_caches()
  gc.collect()
