"""_lib.py: the right libraries or a clear error, and statuses as exceptions."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from leanstream_gguf import _lib, errors

ROOT = Path(__file__).resolve().parent.parent


def test_the_pin_is_that_of_vendor() -> None:
    pin = tomllib.loads((ROOT / "vendor" / "llama.cpp.toml").read_text())
    assert pin["llama_cpp_python"]["version"] == _lib.LLAMA_CPP_PYTHON_VERSION
    assert pin["llama_cpp"]["commit"] == _lib.LLAMA_COMMIT


@pytest.mark.parametrize("version", ["0.3.35", "0.4.0"])
def test_another_llama_cpp_python_is_refused(version: str) -> None:
    with pytest.raises(errors.LibraryError, match=version) as caught:
        _lib._check_version(version)
    assert _lib.LLAMA_CPP_PYTHON_VERSION in str(caught.value.remedy)


def test_another_library_path_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    with pytest.raises(errors.LibraryError, match="unset LLAMA_CPP_LIB_PATH"):
        _lib._point("LLAMA_CPP_LIB_PATH", "llama")
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH")
    _lib._point("LLAMA_CPP_LIB_PATH", "llama")
    _lib._point("LLAMA_CPP_LIB_PATH", "llama")
    assert os.environ["LLAMA_CPP_LIB_PATH"] == str(_lib.LIB_DIR)


def test_libraries_that_are_not_built_are_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_lib, "LIB_DIR", tmp_path)
    _lib.prepare()  # importing the package works: what needs no library still does
    with pytest.raises(errors.LibraryError, match="no libllama"):
        _lib.native.__wrapped__()


@pytest.mark.native
def test_pins_and_struct_sizes_agree(native: None) -> None:
    loaded = _lib.native()
    _lib._check_pin(loaded)
    assert loaded.ffi.string(loaded.lib.ls_llama_commit()).decode() == _lib.LLAMA_COMMIT


@pytest.mark.native
def test_check_carries_the_details(native: None, tmp_path: Path) -> None:
    ffi, lib = _lib.native()
    _lib.check(lib.LS_OK)
    missing = tmp_path / "missing ü.gguf"
    with pytest.raises(errors.ModelNotFoundError) as caught:
        _lib.check(lib.ls_model_open(os.fsencode(missing), ffi.NULL, ffi.new("ls_model **")))
    assert caught.value.path == str(missing)
    assert caught.value.filename == str(missing)
    assert "missing" in str(caught.value)


@pytest.mark.native
def test_null_arguments_are_errors(native: None) -> None:
    ffi, lib = _lib.native()
    with pytest.raises(errors.ArgumentError):
        _lib.check(lib.ls_model_open(b"x", ffi.NULL, ffi.NULL))
    with pytest.raises(errors.ArgumentError):
        _lib.check(lib.ls_model_get_stats(ffi.NULL, ffi.new("ls_stats *")))
    lib.ls_model_close(ffi.NULL)
