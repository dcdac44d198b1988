"""Writes a lean file: under a temporary name, resumable, read back, then renamed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, LeanStreamError, ModelUnreadableError, RepackError
from . import device, jobs
from . import format as f
from .hashing import SourceHashes
from .journal import Journal
from .layout import Layout, header_bytes
from .lean_file import LeanFile, Restorer
from .progress import Progress
from .requantize import DownRows
from .space import require_space
from .storage import Output, Source
from .unpack import shard_stream, stream_hash

SYNC_BYTES = 256 << 20  # written between two syncs: what a killed run does again at most
Check = Callable[[str], dict[str, Any]]


@dataclass
class Written:
    """What `write` did."""

    path: str
    n_bytes: int
    source_bytes: int
    resumed: bool
    write_seconds: float
    verify_seconds: float
    sha256: list[str]
    down_errors: dict[int, float] = field(default_factory=dict)  # relative RMS of requantised down projections, by block
    check: dict[str, Any] | None = None  # what the run against the source said


def work_id(layout: Layout) -> str:
    """Names everything that the bytes of the output depend on, as far as headers and file times tell."""
    digest = hashlib.sha256(header_bytes(layout, ["0" * 64] * len(layout.source.shards)))
    digest.update(str(jobs.PIECE_BYTES).encode())  # pieces are numbered
    for layer in layout.neurons:
        digest.update(layer.perm.tobytes())
    for shard in layout.source.shards:
        status = os.stat(shard.path)
        digest.update(json.dumps([os.path.abspath(shard.path), status.st_size, status.st_mtime_ns]).encode())
    return digest.hexdigest()


def write(
    layout: Layout,
    out: str,
    *,
    down_rows: DownRows | None = None,
    force: bool = False,
    quiet: bool = False,
    check: Check | None = None,
) -> Written:
    """Write the file, read it back and give it its name.

    Args:
        check: called with the path of the finished file before it gets its name; raises if the file is not good.

    Raises:
        RepackError: no room, a failing drive, or a file that does not read back; what is there serves a next try.
        ArgumentError: `out` exists.
    """
    final, partial = Path(out), Path(out + ".partial")
    if final.exists() and not force:
        raise ArgumentError(f"{out} exists already", path=out, remedy="choose another name, or --force")
    if any(os.path.exists(shard.path) and _same_file(shard.path, out) for shard in layout.source.shards):
        raise ArgumentError(f"{out} is the source itself", path=out)
    allocated = partial.stat().st_blocks * 512 if partial.exists() and hasattr(partial.stat(), "st_blocks") else 0
    require_space(out, layout.file_bytes, allocated)
    journal = Journal(Path(out + ".partial.journal"), work_id(layout))
    if not journal.resumed:
        partial.unlink(missing_ok=True)
    hashes = SourceHashes(layout.source.shards)
    output = Output(str(partial))
    rows = down_rows or DownRows()
    try:
        resumed = journal.resumed and len(journal.done) > 0
        output.resize(layout.file_bytes)
        with Source(layout.source.shards) as source:
            write_seconds = _run_jobs(jobs.Target(layout, source, output, rows), journal, quiet)
        sha256 = _result(hashes, layout)
        output.write(0, header_bytes(layout, sha256).ljust(layout.data_offset, b"\0"))
        output.sync()
        _drop_from_cache(partial)
        verify_seconds = read_back(str(partial), layout, rows, quiet=quiet)
        checked = check(str(partial)) if check else None
    except BaseException:
        hashes.stop()
        raise
    finally:
        output.close()
        journal.close()
    os.replace(partial, final)
    _sync_folder(final.parent)
    journal.remove()
    errors = {block: error.relative_rms for block, error in rows.errors.items()}
    source_bytes = layout.source.file_bytes
    return Written(out, layout.file_bytes, source_bytes, resumed, write_seconds, verify_seconds, sha256, errors, checked)


def _same_file(a: str, b: str) -> bool:
    return os.path.exists(b) and os.path.samefile(a, b)


def _result(hashes: SourceHashes, layout: Layout) -> list[str]:
    try:
        return hashes.result()
    except OSError as error:
        path = layout.source.first.path
        raise ModelUnreadableError(f"{path} cannot be read: {error.strerror}", path=path, sys_errno=error.errno) from error


def _run_jobs(target: jobs.Target, journal: Journal, quiet: bool) -> float:
    """Do what the journal lacks; seconds."""
    pieces: list[jobs.Job] = list(jobs.jobs_of(target.layout))
    progress = Progress("repacking", sum(job.n_bytes for job in pieces), quiet=quiet)
    progress.skip(sum(job.n_bytes for i, job in enumerate(pieces) if i in journal.done))
    pending: list[int] = []
    unsynced = 0
    for i, job in enumerate(pieces):
        if i in journal.done:
            continue
        job.run(target)
        progress.add(job.n_bytes)
        pending.append(i)
        unsynced += job.n_bytes
        if unsynced >= SYNC_BYTES:
            target.output.sync()
            journal.note(pending)
            pending, unsynced = [], 0
    target.output.sync()
    journal.note(pending)
    return progress.finish()


def read_back(path: str, layout: Layout, down_rows: DownRows, *, quiet: bool = False) -> float:
    """Restore the source from the file and compare its SHA-256 with the source's; seconds. Matrices for a device are made again.

    Tensors that were requantised cannot be compared so; their records' checksums are, and the rest byte by byte.

    Raises:
        RepackError: it is not the same.
    """
    progress = Progress("checking", layout.source.file_bytes, quiet=quiet)
    try:
        lean = LeanFile(path)
        changed = lean.requantised()
        with Source(lean.model.shards) as written, Source(layout.source.shards) as source:
            restorer = Restorer(lean, written)
            _compare_device(lean, layout, down_rows, written, source)
            for shard in range(len(lean.sha256)):
                if changed:
                    _compare(lean, restorer, shard, source, changed, progress)
                elif stream_hash(lean, restorer, shard, progress) != lean.sha256[shard]:
                    name = layout.source.shards[shard].path
                    raise RepackError(
                        f"{path} does not give back {name}: the SHA-256 differs",
                        path=path,
                        remedy="the drive or memory may be faulty, or the source has bytes outside its tensors; nothing was renamed",
                    )
    except RepackError:
        raise
    except LeanStreamError as error:
        raise RepackError(f"{path} does not read back as it was written: {error}", path=path) from error
    return progress.finish()


def _compare_device(lean: LeanFile, layout: Layout, down_rows: DownRows, written: Source, source: Source) -> None:
    for layer in layout.neurons:
        for name, at, data in device.matrices(layer, down_rows.reader(layer, source), source):
            if written.read(lean.tensor(name), at, len(data)).tobytes() != data.tobytes():
                raise RepackError(f"{lean.path} does not read back as it was written: {name} differs", path=lean.path)


def _compare(lean: LeanFile, restorer: Restorer, shard: int, source: Source, changed: set[str], progress: Progress) -> None:
    """Restored pieces against the source's bytes, the requantised tensors left out."""
    at = 0
    sizes = {name: kind.row_bytes(ne[0]) * _product(ne[1:]) for name, ne, kind, _ in lean.source_table(shard)}
    skipped = ""
    for name, piece in shard_stream(lean, restorer, shard):
        if name in changed:
            if name != skipped:
                at += sizes[name]
                skipped = name
            continue
        if source.read_at(shard, at, len(piece)).tobytes() != bytes(piece):
            raise RepackError(f"{lean.path} does not give back its source: {name or 'the header'} differs", path=lean.path)
        at += len(piece)
        progress.add(len(piece))


def _product(dims: tuple[int, ...]) -> int:
    n = 1
    for dim in dims:
        n *= dim
    return n


def _drop_from_cache(path: Path) -> None:
    """So that reading back reads the drive."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _sync_folder(folder: Path) -> None:
    """Make the rename survive a power cut, where the system lets a folder be synced."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def output_name(source: str) -> str:
    """`model.lean.gguf` for `model.gguf` or `model-00001-of-00003.gguf`."""
    name = source.removesuffix(".gguf")
    stem, _, count = name.rpartition("-of-")
    if stem and count.isdigit():
        name = stem.rpartition("-")[0]
    return name + f.SUFFIX
