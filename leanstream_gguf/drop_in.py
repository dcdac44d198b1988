"""Streaming for programs that cannot be edited: rebinds `llama_cpp.Llama` to a class with default budgets.

In Python, before the program does `from llama_cpp import Llama`: `leanstream_gguf.install(memory_budget="2GiB")`.
From outside: `LEANSTREAM_MEMORY=2GiB python -m leanstream_gguf.drop_in program.py ARGS...` (or `-m module ARGS...`).
"""

from __future__ import annotations

import dataclasses
import runpy
import sys
from collections.abc import Sequence
from typing import Any

from .model import Llama
from .settings import Budget, StreamConfig, env_defaults

_defaults: dict[str, Any] = {}
_original: type | None = None


class InstalledLlama(Llama):
    """Llama whose `memory_budget` and `stream` default to what `install()` was given."""

    def __init__(self, model_path: str, **options: Any) -> None:
        if "memory_budget" not in options and "stream" not in options:
            options |= _defaults
        super().__init__(model_path, **options)


InstalledLlama.__init__.__signature__ = Llama.__init__.__signature__  # type: ignore[attr-defined]


def install(memory_budget: Budget | int | str | None = None, stream: StreamConfig | None = None) -> None:
    """Make every later `llama_cpp.Llama(...)` stream under this budget unless the call says otherwise.

    Args:
        memory_budget: as for Llama; None takes LEANSTREAM_MEMORY, and `"auto"` if that is not set.
        stream: as for Llama; None takes LEANSTREAM_CACHE for the expert cache if that is set.

    Raises:
        ArgumentError: the budget or a variable cannot be read.
    """
    global _original
    env_budget, env_cache = env_defaults()
    config = stream or StreamConfig()
    if stream is None and env_cache is not None:
        config = dataclasses.replace(config, cache_budget=env_cache)
    budget = Budget.parse(memory_budget) if memory_budget is not None else env_budget or Budget("auto")
    _defaults.update(memory_budget=budget, stream=config)
    if _original is None:
        _original = _rebind(InstalledLlama)


def uninstall() -> None:
    """Give `llama_cpp.Llama` back. Models made meanwhile keep streaming."""
    global _original
    if _original is not None:
        _rebind(_original)
        _original = None
    _defaults.clear()


def _rebind(cls: type) -> type:
    """Put `cls` where llama_cpp exports its class; what was there is returned."""
    before: type = sys.modules["llama_cpp"].Llama
    for name in ("llama_cpp", "llama_cpp.llama"):
        vars(sys.modules[name])["Llama"] = cls
    return before


def main(argv: Sequence[str]) -> int:
    """Run a program, `program.py ARGS...` or `-m module ARGS...`, with `llama_cpp.Llama` rebound."""
    import leanstream_gguf  # as the program will import it: run with -m, this module is another copy of itself

    if not argv or (argv[0] == "-m" and len(argv) < 2) or argv[0] in ("-h", "--help"):
        print(__doc__, file=sys.stderr)
        return 2
    leanstream_gguf.install()
    if argv[0] == "-m":
        sys.argv = list(argv[1:])
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(argv)
        runpy.run_path(argv[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
