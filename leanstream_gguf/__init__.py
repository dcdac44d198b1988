"""Run GGUF models larger than the memory you give them, with the output they always had.

    from leanstream_gguf import Llama
    llm = Llama("model.gguf", memory_budget="2GiB")     # otherwise llama_cpp.Llama

Importing this package points llama-cpp-python at the libraries shipped here; import it before `llama_cpp`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import _lib, errors
from .errors import (
    ArgumentError,
    BudgetError,
    EndianError,
    FileChangedError,
    FormatError,
    InternalError,
    JoinedShardsError,
    LeanStreamError,
    LeanStreamWarning,
    LibraryError,
    ModelFileError,
    ModelNotFoundError,
    ModelUnreadableError,
    OutOfMemoryError,
    ReadError,
    ShardError,
    StateError,
    TruncatedError,
    UnsupportedError,
)
from .settings import StreamConfig

if TYPE_CHECKING:
    from .drop_in import install, uninstall
    from .model import Llama

__version__ = "0.1.0"

# These need llama_cpp (half a second); the rest of the package must not wait for it.
_LAZY = {"Llama": ".model", "install": ".drop_in", "uninstall": ".drop_in"}

__all__ = [
    "ArgumentError",
    "BudgetError",
    "EndianError",
    "FileChangedError",
    "FormatError",
    "InternalError",
    "JoinedShardsError",
    "LeanStreamError",
    "LeanStreamWarning",
    "LibraryError",
    "Llama",
    "ModelFileError",
    "ModelNotFoundError",
    "ModelUnreadableError",
    "OutOfMemoryError",
    "ReadError",
    "ShardError",
    "StateError",
    "StreamConfig",
    "TruncatedError",
    "UnsupportedError",
    "__version__",
    "errors",
    "install",
    "uninstall",
]

_lib.prepare()


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_LAZY))
