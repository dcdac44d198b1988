"""A lean file back into the GGUF it was made from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ArgumentError, RepackError
from .format import ceil_to
from .lean_file import LeanFile, Restorer
from .progress import Progress
from .space import require_space
from .storage import Output, Source
from .threads import RunningHash, ahead


def shard_stream(lean: LeanFile, restorer: Restorer, shard: int) -> Iterator[tuple[str, int, Any]]:
    """(tensor name or "" for what lies between, offset, bytes) of a source shard, from its first byte to its last.

    Tensors that were requantised are read, for their checksums, and left out. See `_requantised_stream`.
    """
    header = lean.source_header(shard)
    changed = lean.requantised()
    yield "", 0, header
    at = len(header)
    for name, ne, kind, offset in sorted(lean.source_table(shard), key=lambda row: row[3]):
        start = len(header) + offset
        if gap := start - at:
            yield "", at, b"\0" * gap
        at = start + kind.row_bytes(ne[0]) * int(np.prod(ne[1:], dtype=np.int64))
        for piece in restorer.tensor(name):
            if name not in changed:
                yield name, start, piece
            start += len(piece)
    if tail := lean.source_bytes[shard] - at:
        yield "", at, b"\0" * tail


@dataclass(frozen=True)
class Unpacked:
    """What `unpack` wrote. `identical`: every shard has the source's SHA-256."""

    paths: list[str]
    identical: bool
    requantised: list[str]
    seconds: float


def output_names(lean: LeanFile, out: str) -> list[str]:
    """One name a shard; a split set keeps the pattern of its names."""
    n = len(lean.sha256)
    if n == 1:
        return [out]
    stem = out.removesuffix(".gguf")
    return [f"{stem}-{i + 1:05d}-of-{n:05d}.gguf" for i in range(n)]


def unpack(path: str | os.PathLike[str], out: str | os.PathLike[str], *, force: bool = False, quiet: bool = False) -> Unpacked:
    """Write the source of a lean file. Where `--down-type` was used the stored down projection is written in its own type.

    Raises:
        FormatError: `path` is no lean file, or corrupt. RepackError: no room, or the result is not the source.
        ArgumentError: `out` exists.
    """
    lean = LeanFile(path)
    names = output_names(lean, os.fspath(out))
    for name in names:
        if os.path.exists(name) and not force:
            raise ArgumentError(f"{name} exists already", path=name, remedy="choose another name, or --force")
    require_space(names[0], sum(lean.source_bytes))
    progress = Progress("unpacking", sum(lean.source_bytes), quiet=quiet)
    changed = lean.requantised()
    partial = [Path(name + ".partial") for name in names]
    with Source(lean.model.shards) as source:
        restorer = Restorer(lean, source)
        try:
            digests = [_write_shard(lean, restorer, i, partial[i], bool(changed), progress) for i in range(len(names))]
            identical = digests == lean.sha256
            if not identical and not changed:
                raise RepackError(f"what {path} gives back is not its source: the SHA-256 differs", path=os.fspath(path))
            for temporary, name in zip(partial, names, strict=True):
                os.replace(temporary, name)
        finally:
            for temporary in partial:
                temporary.unlink(missing_ok=True)
    return Unpacked(names, identical, sorted(changed), progress.finish())


def _write_shard(lean: LeanFile, restorer: Restorer, shard: int, path: Path, changed: bool, progress: Progress) -> str:
    digest = RunningHash()
    path.unlink(missing_ok=True)
    output = Output(str(path))
    try:
        stream = _requantised_stream(lean, restorer, shard) if changed else shard_stream(lean, restorer, shard)
        for _, at, piece in ahead(stream):
            digest.update(piece)
            output.write(at, piece)
            progress.add(len(piece))
        output.sync()
    finally:
        output.close()
    return digest.hexdigest()


def _requantised_stream(lean: LeanFile, restorer: Restorer, shard: int) -> Iterator[tuple[str, int, Any]]:
    """As `shard_stream` for all tensors, with a tensor table and offsets that fit the stored types."""
    header, alignment = lean.retyped_header(shard)
    yield "", 0, header
    at = len(header)
    for name, _, _, _ in lean.source_table(shard):
        for piece in restorer.tensor(name):
            yield name, at, piece
            at += len(piece)
        if gap := ceil_to(at, alignment) - at:
            yield "", at, b"\0" * gap
            at += gap
