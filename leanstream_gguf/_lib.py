"""Finds and loads the native libraries, refuses a mismatch, and turns every native status into an exception.

Two halves. `prepare()` is cheap and runs at `import leanstream_gguf`: it points llama-cpp-python at our libllama before
that is imported, or says clearly that it came too late. `native()` runs at first use: it loads the extension module and
compares pins and struct sizes, because structs that disagree are silent memory corruption.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from .errors import LibraryError, from_status

PACKAGE_DIR = Path(__file__).resolve().parent
LIB_DIR = PACKAGE_DIR / "lib"

# The pin; a test compares it with vendor/llama.cpp.toml.
LLAMA_CPP_PYTHON_VERSION = "0.3.36"
LLAMA_COMMIT = "0c1e57098bba43ac29e6e3b677cdceebdd22334f"

_REINSTALL = "reinstall with `pip install --force-reinstall leanstream-gguf`"
_STRUCTS = ("ls_error", "ls_options", "ls_memory", "ls_stats")  # order of ls_struct_sizes()


class Native(NamedTuple):
    """The cffi module: `ffi` makes C values, `lib` holds the functions."""

    ffi: Any
    lib: Any


def library_file(name: str, folder: Path | None = None) -> Path | None:
    """The library of that name in a folder, ours unless given."""
    folder = folder or LIB_DIR
    patterns = (f"lib{name}.so", f"lib{name}.dylib", f"{name}.dll", f"lib{name}.dll")
    return next((folder / p for p in patterns if (folder / p).exists()), None)


def is_ours(folder: Path) -> bool:
    """Whether the folder's libllama is ours, perhaps through a link (link.py)."""
    found = library_file("llama", folder)
    return found is not None and found.resolve().parent == LIB_DIR


def prepare() -> None:
    """Make the next `import llama_cpp` load our libraries. Idempotent, imports nothing heavy.

    Raises:
        LibraryError: llama_cpp was imported with other libraries, another LLAMA_CPP_LIB_PATH is set, or the installed
            llama-cpp-python is not the pinned version.
    """
    if library_file("llama") is None:
        return  # not built: native() says so when something needs it
    loaded = sys.modules.get("llama_cpp.llama_cpp")
    if loaded is not None:
        _check_loaded(Path(loaded._base_path))
    # OpenMP threads that wait at a barrier spin; while another waits for the drive, that takes the core its reader needs
    # (measured on two busy cores at a minimal cache: 4 s against 0.2 s). A few microseconds of spinning lose nothing.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    # Experts and layers are copied from our own memory: pages that CUDA knows travel at the bus's full rate. Other backends ignore it.
    os.environ.setdefault("GGML_CUDA_REGISTER_HOST", "1")
    _point("LLAMA_CPP_LIB_PATH", "llama")
    if library_file("mtmd") is not None:
        _point("MTMD_CPP_LIB", "mtmd")
    _check_version(_installed_version())


def _check_loaded(base: Path) -> None:
    if not is_ours(base):
        raise LibraryError(
            f"llama_cpp was already imported with the libraries in {base}",
            path=str(base),
            remedy="import leanstream_gguf before llama_cpp",
        )


def _point(variable: str, name: str) -> None:
    """Set `variable` to our directory unless it names another library of that name on purpose."""
    current = os.environ.get(variable)
    if current is not None and Path(current).resolve() != LIB_DIR:
        raise LibraryError(
            f"{variable} is set to {current}, but streaming needs lib{name} from {LIB_DIR}",
            path=current,
            remedy=f"unset {variable}",
        )
    os.environ[variable] = str(LIB_DIR)


def _installed_version() -> str | None:
    """Version of the llama_cpp package on the path, read as text so that nothing is imported; None if unknown."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return None  # not installed: native() says so when something needs it
    try:
        text = Path(spec.origin).read_text(encoding="utf-8")
    except OSError:
        return None  # frozen or zipped: checked again after the real import
    match = re.search(r"""^__version__\s*=\s*['"]([^'"]+)""", text, re.MULTILINE)
    return match[1] if match else None


def _check_version(version: str | None) -> None:
    if version is not None and version != LLAMA_CPP_PYTHON_VERSION:
        raise LibraryError(
            f"llama-cpp-python {version} is installed, but these libraries match {LLAMA_CPP_PYTHON_VERSION} only",
            remedy=f"pip install llama-cpp-python=={LLAMA_CPP_PYTHON_VERSION}",
        )


@functools.cache
def native() -> Native:
    """The loaded and checked native library.

    Raises:
        LibraryError: not built, cannot be loaded, or built from another llama.cpp than llama-cpp-python expects.
    """
    if library_file("llama") is None:
        raise LibraryError(f"there is no libllama in {LIB_DIR}", path=str(LIB_DIR), remedy=_REINSTALL)
    prepare()
    if sys.platform == "win32":
        os.add_dll_directory(str(LIB_DIR))
    try:
        llama_cpp = importlib.import_module("llama_cpp")
        module = importlib.import_module("leanstream_gguf._leanstream")
    except LibraryError:
        raise
    except (ImportError, OSError, RuntimeError) as error:
        raise LibraryError(f"the native libraries cannot be loaded: {error}", path=str(LIB_DIR), remedy=_REINSTALL) from error
    _check_version(llama_cpp.__version__)
    loaded = Native(module.ffi, module.lib)
    _check_pin(loaded)
    return loaded


def _check_pin(loaded: Native) -> None:
    ffi, lib = loaded
    commit = ffi.string(lib.ls_llama_commit()).decode()
    if commit != LLAMA_COMMIT:
        raise LibraryError(f"the libraries were built from llama.cpp {commit[:12]}, expected {LLAMA_COMMIT[:12]}", remedy=_REINSTALL)
    sizes = ffi.new("uint64_t[4]")
    lib.ls_struct_sizes(sizes)
    for name, size in zip(_STRUCTS, sizes, strict=True):
        if size != ffi.sizeof(name):
            raise LibraryError(f"{name} has {size} bytes in the library and {ffi.sizeof(name)} here", remedy=_REINSTALL)


def check(status: int) -> None:
    """Raise the typed exception for a native status other than LS_OK, with the details of this thread's last error.

    Every native call goes through here. Call it at once: another native call on the thread overwrites the details.
    """
    if status == 0:
        return
    ffi, lib = native()
    error = ffi.new("ls_error *")
    lib.ls_last_error(error)
    text = ffi.string(error.message).decode("utf-8", "replace") if error.status == status else ""
    raise from_status(
        status,
        text,
        path=ffi.string(error.path).decode("utf-8", "surrogateescape") or None,
        offset=error.offset_bytes if status in (11, 12) else None,
        used=error.used_bytes or None,
        limit=error.limit_bytes or None,
        sys_errno=error.sys_errno or None,
    )


def take_string(out: Any) -> str:
    """The text in a `char **` filled by the library, which is freed."""
    ffi, lib = native()
    try:
        return str(ffi.string(out[0]).decode("utf-8", "replace"))
    finally:
        lib.ls_string_free(out[0])
