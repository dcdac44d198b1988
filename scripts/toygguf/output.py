"""Writing a large model for a command: room on the disk first, progress meanwhile, its size at the end."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from .container import padded, write_gguf
from .shapes import Model


class ProgressLine:
    """Prints how far writing has got, at most twice a second."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._last = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._last < 0.5 and done < total:
            return
        self._last = now
        rate = done / max(now - self._start, 1e-6) / 2**20
        print(f"\r{done / 2**20:7.0f} of {total / 2**20:.0f} MiB, {rate:.0f} MiB/s", end="", file=sys.stderr, flush=True)
        if done == total:
            print(file=sys.stderr)


def write_for(parser: argparse.ArgumentParser, path: Path, model: Model, seed: str) -> None:
    """Write the model to `path`, or end the command with what is missing."""
    folder = path.resolve().parent
    n_bytes = sum(padded(t.n_bytes) for t in model.tensors)
    free = shutil.disk_usage(folder).free
    if n_bytes > free:
        parser.error(f"{n_bytes / 2**30:.1f} GiB are needed, {free / 2**30:.1f} GiB are free in {folder}")
    write_gguf(path, model.metadata, model.tensors, seed, progress=ProgressLine())
    print(f"{path}: {path.stat().st_size / 2**30:.2f} GiB, {len(model.tensors)} tensors")
