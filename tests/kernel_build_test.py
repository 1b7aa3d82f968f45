"""Tests of building the CPU kernel: the cache, faults and doing without."""

import ctypes
import json
import os
from pathlib import Path
import platform
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import kernels
from spec_jax.kernels import build

# A compiler that notes each call and writes its arguments as the library.
_FAKE = """\
#!{python}
import sys, time
arguments = sys.argv[1:]
with open({log!r}, "a") as file:
  print(*arguments, file=file)
if {refuse!r} in arguments:
  sys.exit("kernel.cc:1: error: unknown flag " + {refuse!r})
target = arguments[arguments.index("-o") + 1]
with open(target, "w") as file:
  file.write("library " + str(time.time_ns()))
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("SPEC_JAX_CACHE", str(tmp_path / "cache"))
  return tmp_path / "cache"


@pytest.fixture
def fake_compiler(tmp_path, monkeypatch, cache):
  """Makes `$CXX` a fake; returns a function that counts its calls."""
  log, script = tmp_path / "log", tmp_path / "compiler"

  def install(refuse="nothing"):
    text = _FAKE.format(python=sys.executable, log=str(log), refuse=refuse)
    script.write_text(text)
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return lambda: log.read_text().splitlines() if log.exists() else []

  return install


def _python(code: str, **environment) -> str:
  """Runs code in another process; returns what it prints."""
  done = subprocess.run(
    [sys.executable, "-c", textwrap.dedent(code)],
    env=os.environ | environment,
    capture_output=True,
    text=True,
    timeout=300,
    cwd=Path(__file__).parents[1],
  )
  assert done.returncode == 0, done.stderr
  return done.stdout + done.stderr


def test_a_library_is_built_once(fake_compiler):
  """The second time it comes from the cache."""
  calls = fake_compiler()
  first = build._library()
  assert build._library() == first
  assert len(calls()) == 1
  assert first.read_text().startswith("library")


def test_what_a_library_depends_on_names_it(fake_compiler, monkeypatch):
  """Another jaxlib, processor, flag or compiler is another library."""
  calls = fake_compiler()
  build._library()
  monkeypatch.setattr(build.metadata, "version", lambda name: f"{name} 0")
  build._library()
  monkeypatch.setattr(build, "_processor", lambda: "a toaster")
  build._library()
  monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-g"))
  build._library()
  assert len(calls()) == 4
  monkeypatch.setenv("CXX", os.environ["CXX"] + " -pipe")
  build._library()
  assert len(calls()) == 5 and "-pipe" in calls()[-1].split()


@pytest.mark.parametrize("damage", ["short", "gone", "note", "empty note"])
def test_a_damaged_library_is_built_again(fake_compiler, damage):
  """Never loaded: its SHA-256 is compared first."""
  calls = fake_compiler()
  library = build._library()
  (note,) = library.parent.glob("*.json")
  if damage == "short":
    library.write_text(library.read_text()[:-1])
  elif damage == "gone":
    library.unlink()
  else:
    note.write_text("[]" if damage == "note" else "")
  again = build._library()
  assert len(calls()) == 2
  assert json.loads(note.read_text())["sha256"] == build.sha256_of(again)
  assert build._library() == again
  assert not [p for p in library.parent.iterdir() if p.is_dir()]


def test_a_machine_flag_that_is_not_known_is_left_out(fake_compiler):
  """Then the next is tried."""
  calls = fake_compiler("-march=native")
  assert build._library().exists()
  assert ["-march=native" in c for c in calls()] == [True, False]
  assert "-mcpu=native" in calls()[1]


def test_a_compiler_that_fails_is_named_with_its_first_error(
  cache, tmp_path, monkeypatch
):
  """So is one that is not there; nothing is left in the cache."""
  script = tmp_path / "bad"
  script.write_text(
    "#!/bin/sh\necho 'k.cc:3: error: no such thing' >&2\nexit 1"
  )
  script.chmod(0o755)
  monkeypatch.setenv("CXX", str(script))
  with pytest.raises(kernels.KernelError, match="error: no such thing"):
    build._library()
  monkeypatch.setenv("CXX", str(tmp_path / "nowhere"))
  with pytest.raises(kernels.KernelError, match="nowhere cannot be run"):
    build._library()
  assert not list((cache / "kernels").iterdir())


def test_a_cache_that_cannot_be_written_is_a_reason(fake_compiler, cache):
  """Not a crash."""
  fake_compiler()
  cache.write_text("a file where the folder should be")
  with pytest.raises(kernels.KernelError, match="cannot be used"):
    build._library()


def test_processes_may_build_at_the_same_time(fake_compiler, cache):
  """Each gets a whole library, and the note names one that is there."""
  fake_compiler()
  code = """
    from spec_jax.kernels import build
    path = build._library()
    assert path.read_text().startswith("library ")
  """
  start = [sys.executable, "-c", textwrap.dedent(code)]
  root = Path(__file__).parents[1]
  running = [subprocess.Popen(start, cwd=root) for _ in range(3)]
  assert [p.wait(timeout=120) for p in running] == [0, 0, 0]
  calls = fake_compiler()
  before = len(calls())
  assert build._library().read_text().startswith("library ")
  assert len(calls()) == before


def test_modes_are_checked():
  """And "off" asks nothing of the machine."""
  assert kernels.choose("off") is False
  with pytest.raises(ValueError, match="maybe"):
    kernels.choose("maybe")


def test_without_a_compiler_xla_does_the_work(tmp_path):
  """One line says why; "on" is an error; a model runs as ever."""
  out = _python(
    """
    from spec_jax import kernels
    assert kernels.choose("auto") is False
    assert kernels.choose("auto") is False
    try:
      kernels.choose("on")
    except kernels.KernelError as error:
      print("refused:", error)
    import jax.numpy as jnp
    from spec_jax.models import common
    print(common.linear(jnp.ones((2, 3)), jnp.ones((3, 4))).sum())
    try:
      kernels.matmul(jnp.ones((2, 3)), kernels.pack(jnp.ones((3, 4))))
    except kernels.KernelError as error:
      print("packed:", error)
    """,
    PATH="",
    CXX="",
    SPEC_JAX_CPU_KERNEL="",
    SPEC_JAX_CACHE=str(tmp_path),
  )
  assert out.count("no CPU kernel: there is no C++ compiler") == 1
  assert "refused: cpu_kernel=on, but there is no C++ compiler" in out
  assert "packed: weights are packed for the CPU kernel, but there is" in out
  assert "24.0" in out


def test_the_environment_can_turn_it_off(monkeypatch):
  """It stands in for "auto" only; a word it does not know is an error."""
  monkeypatch.setenv("SPEC_JAX_CPU_KERNEL", "off")
  assert kernels.choose("auto") is False
  if kernels.why_not() is None:
    assert kernels.choose("on") is True
  monkeypatch.setenv("SPEC_JAX_CPU_KERNEL", "never")
  with pytest.raises(ValueError, match="SPEC_JAX_CPU_KERNEL must be auto, on"):
    kernels.choose("auto")
  assert kernels.choose("off") is False


def test_importing_builds_nothing(tmp_path):
  """Nor does it look for a compiler or start JAX."""
  out = _python(
    """
    import subprocess
    subprocess.run = subprocess.Popen = None
    import spec_jax
    from spec_jax import kernels
    from jax._src import xla_bridge
    print("started" if xla_bridge._backends else "nothing")
    """,
    SPEC_JAX_CACHE=str(tmp_path),
  )
  assert out.strip() == "nothing"
  assert not list(tmp_path.iterdir())


# --- with a real compiler ---------------------------------------------------


@pytest.fixture
def real_library():
  if (reason := kernels.why_not()) is not None:
    pytest.skip(reason)
  return build._library()


def test_a_real_library_that_is_damaged_is_built_again(real_library, tmp_path):
  """The process goes on and multiplies."""
  folder = tmp_path / "kernels"
  folder.mkdir()
  note = real_library.parent / f"{build._key()}.json"
  (folder / note.name).write_bytes(note.read_bytes())
  whole = real_library.read_bytes()
  (folder / real_library.name).write_bytes(whole[: len(whole) // 2])
  out = _python(
    """
    import jax.numpy as jnp
    from spec_jax import kernels
    assert kernels.choose("on")
    print(kernels.matmul(jnp.ones((2, 3)), kernels.pack(jnp.ones((3, 4)))))
    """,
    SPEC_JAX_CACHE=str(tmp_path),
  )
  assert out.count("3.") == 8


@pytest.mark.skipif(
  platform.machine() not in ("x86_64", "AMD64"), reason="flags of x86"
)
@pytest.mark.parametrize(
  "flags", [("-mavx2", "-mfma"), ("-msse2",)], ids=["avx2", "generic"]
)
def test_lesser_instruction_sets_compute_the_same(
  real_library, cache, monkeypatch, flags
):
  """AVX2 to the bit, for it fuses too; the plain code up to rounding."""
  if "avx2" in flags[0] and "avx2" not in build._processor():
    pytest.skip("this CPU has no AVX2")
  random = np.random.default_rng(0)
  x = random.standard_normal((70, 300)).astype(np.float32)
  w = random.standard_normal((300, 100)).astype(np.float32)
  packs = [kernels.pack(w, weights=kind) for kind in kernels.WEIGHTS]
  sizes = (1, 2, 3, 5, 6, 7, 8, 13, 31, 64, 70)

  def products():
    return [
      [np.asarray(kernels.matmul(x[:n], p)) for n in sizes] for p in packs
    ]

  # Heads of 1 to 5 share keys of a width that fills no vector.
  q = random.standard_normal((2, 7, 10, 40)).astype(np.float32)
  old = random.standard_normal((2, 2, 30, 40)).astype(np.float32)
  new = random.standard_normal((2, 7, 2, 40)).astype(np.float32)
  sees = jnp.broadcast_to(jnp.tril(jnp.ones((7, 7), bool)), (2, 7, 7))
  length, first = jnp.array([0, 45], jnp.int32), jnp.zeros((2, 7), jnp.int32)

  def attention():
    return np.asarray(
      kernels.attend(q, old, old, new, new, sees, length, first, scale=0.3)
    )

  want, want_attention = products(), attention()
  monkeypatch.setattr(build, "_MACHINE_FLAGS", (flags,))
  library = ctypes.CDLL(str(build._library()))
  for variable in ("TARGET", "ATTENTION"):
    target = getattr(build, variable)
    handler = jax.ffi.pycapsule(getattr(library, build._SYMBOLS[target]))
    jax.ffi.register_ffi_target(target + flags[0], handler, platform="cpu")
    monkeypatch.setattr(build, variable, target + flags[0])
  np.testing.assert_allclose(attention(), want_attention, rtol=0, atol=1e-5)
  if "-mfma" in flags and "avx512" in build._processor():
    np.testing.assert_array_equal(attention(), want_attention)
  for ours, theirs in zip(products(), want, strict=True):
    for y, z, n in zip(ours, theirs, sizes, strict=True):
      np.testing.assert_array_equal(y, ours[-1][:n])
      if "-mfma" in flags and "avx512" in build._processor():
        np.testing.assert_array_equal(y, z)
      np.testing.assert_allclose(y, z, rtol=0, atol=1e-4)
