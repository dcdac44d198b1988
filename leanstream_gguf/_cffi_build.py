"""Generate the extension module's C source from leanstream.h.

Run by CMake: `python _cffi_build.py HEADER OUTPUT`. The header is the only declaration of the C API: what cffi cannot
parse (comments, preprocessor lines, LS_API, extern "C") is removed, and nothing is typed twice. Enum values come from the
C compiler, which also checks the size of every struct.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

MODULE = "leanstream_gguf._leanstream"


def cdef(header: str) -> str:
    """The header's declarations in the subset of C that cffi parses."""
    text = re.sub(r"/\*.*?\*/", " ", header, flags=re.DOTALL)
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*$", "", text, flags=re.MULTILINE)
    text = re.sub(r'extern\s+"C"\s*\{(.*)\}', r"\1", text, flags=re.DOTALL)
    text = re.sub(r"\bLS_API\b", "", text)
    text = re.sub(r"(?<==)\s*-?\d+(?=\s*[,}])", " ...", text)
    return re.sub(r"\n{2,}", "\n", text).strip() + "\n"


def generate(header: Path, output: Path) -> None:
    import cffi  # here, because the tests of cdef() need no cffi

    builder = cffi.FFI()
    builder.cdef(cdef(header.read_text(encoding="utf-8")))
    builder.set_source(MODULE, '#include "leanstream.h"')
    builder.emit_c_code(str(output))


if __name__ == "__main__":
    generate(Path(sys.argv[1]), Path(sys.argv[2]))
