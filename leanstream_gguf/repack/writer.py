"""Writes a lean file: under a temporary name, resumable, read back, then renamed."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._lib import native
from ..errors import ArgumentError, RepackError
from . import format as f
from . import jobs
from .journal import Journal
from .layout import Layout, header_bytes
from .lean_file import LeanFile
from .progress import Progress
from .read_back import read_back
from .requantize import DownRows
from .space import require_space
from .storage import Output, Source
from .threads import in_parallel

SYNC_BYTES = 256 << 20  # written between two syncs: what a killed run does again at most
WORKERS = 3  # one reads, one copies, one writes
WORKER_BYTES = 256 << 20  # in the hands of all workers
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
    if final.is_dir():
        raise ArgumentError(f"{out} is a folder; name a file", path=out)
    allocated = partial.stat().st_blocks * 512 if partial.exists() and hasattr(partial.stat(), "st_blocks") else 0
    require_space(out, layout.file_bytes, allocated)
    usable = partial.exists() and partial.stat().st_size == layout.file_bytes
    journal = Journal(Path(out + ".partial.journal"), work_id(layout), usable=usable)
    if not journal.resumed:
        partial.unlink(missing_ok=True)
    output = Output(str(partial))
    rows = down_rows or DownRows()
    try:
        resumed = journal.resumed and len(journal.done) > 0
        output.resize(layout.file_bytes)
        with Source(layout.source.shards) as source:
            write_seconds = _run_jobs(layout, source, output, rows, journal, quiet)
            _write_header(output, layout, ["0" * 64] * len(layout.source.shards))
            started = time.monotonic()
            sha256 = _read_back(str(partial), layout, rows, source, journal, quiet)
        _write_header(output, layout, sha256)
        if LeanFile(str(partial)).sha256 != sha256:
            raise RepackError(f"{partial} does not read back as it was written: its header differs", path=str(partial))
        verify_seconds = time.monotonic() - started
        checked = check(str(partial)) if check else None
        output.close()
        os.replace(partial, final)
        _sync_folder(final.parent)
        journal.remove()
    finally:
        output.close()
        journal.close()
    errors = {block: error.relative_rms for block, error in rows.errors.items()}
    source_bytes = layout.source.file_bytes
    return Written(out, layout.file_bytes, source_bytes, resumed, write_seconds, verify_seconds, sha256, errors, checked)


def _read_back(path: str, layout: Layout, rows: DownRows, source: Source, journal: Journal, quiet: bool) -> list[str]:
    """A file that does not read back is written anew next time."""
    try:
        return read_back(path, layout, rows, source, quiet=quiet)
    except RepackError:
        journal.remove()
        raise


def _same_file(a: str, b: str) -> bool:
    return os.path.exists(b) and os.path.samefile(a, b)


def _write_header(output: Output, layout: Layout, sha256: list[str]) -> None:
    output.write(0, header_bytes(layout, sha256).ljust(layout.data_offset, b"\0"))
    output.sync()
    output.drop_cached()


def _run_jobs(layout: Layout, source: Source, output: Output, rows: DownRows, journal: Journal, quiet: bool) -> float:
    """Do what the journal lacks; seconds."""
    native()  # loaded once, before several threads ask for it
    pieces: list[jobs.Job] = list(jobs.jobs_of(layout))
    progress = Progress("repacking", sum(job.n_bytes for job in pieces), quiet=quiet)
    progress.skip(sum(job.n_bytes for i, job in enumerate(pieces) if i in journal.done))
    pending: list[int] = []
    unsynced = 0

    def worker() -> Callable[[int], None]:
        target = jobs.Target(layout, source, output, rows)
        return lambda i: pieces[i].run(target)

    left = [i for i in range(len(pieces)) if i not in journal.done]
    for i in in_parallel(left, [worker() for _ in range(_n_workers(layout, pieces))]):
        progress.add(pieces[i].n_bytes)
        pending.append(i)
        unsynced += pieces[i].n_bytes
        if unsynced >= SYNC_BYTES:
            output.sync()
            journal.note(pending)
            pending, unsynced = [], 0
    output.sync()
    journal.note(pending)
    return progress.finish()


def _n_workers(layout: Layout, pieces: list[jobs.Job]) -> int:
    """Fewer where pieces are large; one where there are neurons, which take much memory."""
    largest = max((job.n_bytes for job in pieces), default=1)
    return 1 if layout.neurons else max(1, min(WORKERS, WORKER_BYTES // largest))


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
