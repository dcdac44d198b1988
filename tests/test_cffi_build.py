"""The declarations that cffi gets are the header's, all of them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "leanstream_gguf"
HEADER = (PACKAGE / "native" / "include" / "leanstream.h").read_text(encoding="utf-8")

spec = importlib.util.spec_from_file_location("_cffi_build", PACKAGE / "_cffi_build.py")
assert spec and spec.loader
cffi_build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cffi_build)


def test_every_exported_function_is_declared() -> None:
    exported = set(re.findall(r"^LS_API [^(]*?(\w+)\(", HEADER, re.MULTILINE))
    declared = set(re.findall(r"(ls_\w+)\(", cffi_build.cdef(HEADER)))
    assert exported and declared == exported


def test_enum_values_are_left_to_the_compiler() -> None:
    text = cffi_build.cdef(HEADER)
    values = re.findall(r"(LS_\w+)\s*=\s*([^,}\s]+)", text)
    assert values and {value for _, value in values} == {"..."}


def test_nothing_is_left_that_cffi_cannot_parse() -> None:
    text = cffi_build.cdef(HEADER)
    assert not re.search(r'#|//|/\*|extern|LS_API|__declspec|"C"', text)
    pytest.importorskip("cffi").FFI().cdef(text)


@pytest.mark.native
@pytest.mark.usefixtures("native")
def test_the_compiled_module_has_every_name_of_the_header() -> None:
    from leanstream_gguf import _lib

    lib = _lib.native().lib
    names = set(re.findall(r"(ls_\w+)\(", cffi_build.cdef(HEADER))) | set(re.findall(r"\bLS_(?:OK|ERR_\w+)", cffi_build.cdef(HEADER)))
    assert sorted(names - set(dir(lib))) == []
    assert lib.LS_ERR_INTERNAL == 15, "Python maps statuses by number"
