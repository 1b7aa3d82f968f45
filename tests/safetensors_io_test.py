"""Tests of reading safetensors: exact bits, and damage found at once."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from spec_jax.safetensors_io import LoadError, open_safetensors


def _write(path: Path, entries: dict, data: bytes) -> Path:
  header = json.dumps(entries).encode()
  path.write_bytes(len(header).to_bytes(8, "little") + header + data)
  return path


def _entry(dtype, shape, begin, end):
  return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_bfloat16_bits_survive(tmp_path):
  # 1.5, -2, about 3e38, NaN: sign, 8 bits of exponent, 7 of fraction.
  bits = np.array([0x3FC0, 0xC000, 0x7F62, 0x7FC1], "<u2")
  path = _write(
    tmp_path / "a.safetensors", {"x": _entry("BF16", [4], 0, 8)}, bits.tobytes()
  )
  tensor = open_safetensors(path)["x"]
  value = tensor.read(0, 4)
  assert value.dtype == ml_dtypes.bfloat16 == tensor.dtype
  np.testing.assert_array_equal(value.view("<u2"), bits)
  assert [float(v) for v in value[:2]] == [1.5, -2.0]
  assert 2.9e38 < float(value[2]) < 3.1e38 and np.isnan(float(value[3]))


@pytest.mark.parametrize(
  "dtype", ["float16", "float32", "float64", "int64", "int8", "uint8", "bool"]
)
def test_reads_what_the_safetensors_package_writes(tmp_path, dtype):
  value = np.arange(24).reshape(4, 6).astype(dtype)
  save_file({"b": value, "a": value[:1]}, tmp_path / "a.safetensors")
  tensors = open_safetensors(tmp_path / "a.safetensors")
  assert tensors["b"].shape == (4, 6) and tensors["b"].dtype == dtype
  np.testing.assert_array_equal(tensors["b"].read(0, 4), value)
  np.testing.assert_array_equal(tensors["b"].read(1, 3), value[1:3])
  np.testing.assert_array_equal(tensors["a"].read(0, 1), value[:1])


@pytest.mark.parametrize("keep", [-1, -64, -1000, 4])
def test_a_truncated_file_is_refused_by_name(tmp_path, keep):
  path = tmp_path / "model.safetensors"
  save_file({"x": np.ones((40, 10), np.float32)}, path)
  path.write_bytes(path.read_bytes()[:keep])
  with pytest.raises(LoadError, match=r"model\.safetensors.* truncated"):
    open_safetensors(path)


@pytest.mark.parametrize(
  "entries",
  [
    {"x": _entry("F32", [2], 0, 4)},  # 8 bytes needed
    {"x": _entry("F32", [1], 4, 8)},  # a hole before it
    {"x": _entry("F32", [1], 0, 4)},  # 4 bytes too many behind it
    {"x": _entry("F32", [2], 0, 8), "y": _entry("F32", [1], 4, 8)},  # overlap
    {"x": _entry("F33", [2], 0, 8)},
    {"x": _entry("F32", [-2], 0, 8)},
    {"x": {"dtype": "F32"}},
    {"x": 3},
    ["x"],
  ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path, entries):
  path = _write(tmp_path / "odd.safetensors", entries, bytes(8))
  with pytest.raises(LoadError, match=r"odd\.safetensors"):
    open_safetensors(path)


def test_what_is_no_safetensors_file_is_refused(tmp_path):
  path = tmp_path / "odd.safetensors"
  for data in (b"", b"abc", b"version https://git-lfs", (9).to_bytes(8) * 3):
    path.write_bytes(data)
    with pytest.raises(LoadError, match=r"odd\.safetensors"):
      open_safetensors(path)
  path.write_bytes((4).to_bytes(8, "little") + b"{{{{")
  with pytest.raises(LoadError, match="not JSON"):
    open_safetensors(path)
  with pytest.raises(LoadError, match="cannot read"):
    open_safetensors(tmp_path / "none.safetensors")
