"""Gives a llama-cpp-python that was installed without libraries links to ours: `import llama_cpp` then works in any order.

    python -m leanstream_gguf.link

Without them a program has to import leanstream_gguf before llama_cpp, which looks for libraries in its own folder only.
Libraries that are there already are left alone.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from . import _lib
from .errors import LeanStreamError, LibraryError


def llama_cpp_folder() -> Path | None:
    """Where llama_cpp looks for its libraries; None if it is not installed."""
    spec = importlib.util.find_spec("llama_cpp")
    return None if spec is None or spec.origin is None else Path(os.path.abspath(spec.origin)).parent / "lib"


def needed() -> bool:
    """Whether `import llama_cpp` finds no library unless leanstream_gguf was imported before it."""
    folder = llama_cpp_folder()
    return folder is not None and _lib.library_file("llama", folder) is None


def link() -> list[Path]:
    """Make the links; those that are there already count too. Empty: llama_cpp has libraries of its own.

    Raises:
        LibraryError: not built, no llama_cpp, or links cannot be made there.
    """
    folder = llama_cpp_folder()
    if folder is None:
        raise LibraryError("llama_cpp is not installed", remedy=f"pip install llama-cpp-python=={_lib.LLAMA_CPP_PYTHON_VERSION}")
    if _lib.library_file("llama") is None:
        raise LibraryError(f"there is no libllama in {_lib.LIB_DIR}", path=str(_lib.LIB_DIR))
    if not needed() and not _lib.is_ours(folder):
        return []
    links = []
    try:
        folder.mkdir(exist_ok=True)
        for library in sorted(_lib.LIB_DIR.iterdir()):
            link = folder / library.name
            # A link for each file: pip replaces links with what it installs, but would write through a linked folder.
            if link.is_symlink():
                link.unlink()
            os.symlink(library, link)
            links.append(link)
    except OSError as error:
        raise LibraryError(f"cannot link the libraries into {folder}: {error.strerror}", path=str(folder)) from error
    return links


def main() -> int:
    try:
        links = link()
    except LeanStreamError as error:
        print(f"leanstream: {error}", file=sys.stderr)
        return error.exit_status
    print(f"{len(links)} links in {llama_cpp_folder()}" if links else f"{llama_cpp_folder()} has libraries of its own: left alone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
