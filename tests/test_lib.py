"""_lib.py: the right libraries or a clear error, and statuses as exceptions."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from support import run_python

from leanstream_gguf import _lib, errors, link

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


# ---- llama_cpp first ------------------------------------------------------------------------------------------------------


@pytest.fixture
def bare_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A llama_cpp without libraries, before the installed one on the path; the folder where it looks for them."""
    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None and spec.origin is not None
    copy = tmp_path / "llama_cpp"
    shutil.copytree(Path(spec.origin).parent, copy, ignore=shutil.ignore_patterns("lib", "__pycache__"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(link, "llama_cpp_folder", lambda: copy / "lib")
    for variable in ("LLAMA_CPP_LIB_PATH", "MTMD_CPP_LIB"):
        monkeypatch.delenv(variable, raising=False)
    return copy / "lib"


LLAMA_CPP_FIRST = """
import json, sys
import llama_cpp
import leanstream_gguf

llm = leanstream_gguf.Llama(sys.argv[1], memory_budget="min", n_ctx=64, verbose=False)
text = llm("the quick", max_tokens=2, temperature=0)["choices"][0]["text"]
maps = open("/proc/self/maps").read() if sys.platform == "linux" else ""
libraries = {line.split()[-1] for line in maps.splitlines() if "libllama" in line}
print(json.dumps({"file": llama_cpp.__file__, "text": text, "libraries": sorted(libraries)}))
"""


@pytest.mark.native
@pytest.mark.skipif(os.name == "nt", reason="links need a privilege there")
def test_linked_libraries_let_llama_cpp_be_imported_first(native: None, bare_llama_cpp: Path, tiny: Callable[..., Path]) -> None:
    model = tiny("moe_qwen3")
    assert link.needed()
    assert "FileNotFoundError" in run_python(LLAMA_CPP_FIRST, model).stderr
    assert link.main() == 0 and not link.needed()
    assert link.link() == sorted(bare_llama_cpp.iterdir())  # again: no harm
    result = run_python(LLAMA_CPP_FIRST, model).require()
    assert result["file"] == str(bare_llama_cpp.parent / "__init__.py")
    assert result["text"] and len(result["libraries"]) <= 1, "two copies of the library are loaded"


@pytest.mark.native
def test_libraries_of_its_own_are_left_alone(native: None, bare_llama_cpp: Path) -> None:
    bare_llama_cpp.mkdir()
    own = bare_llama_cpp / _lib.library_file("llama").name  # type: ignore[union-attr]
    own.write_bytes(b"theirs")
    assert link.link() == [] and own.read_bytes() == b"theirs"
    assert not _lib.is_ours(bare_llama_cpp)
    with pytest.raises(errors.LibraryError, match="already imported"):
        _lib._check_loaded(bare_llama_cpp)
