"""Putting a file out of the page cache, and proof that it is out (mincore)."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)


def resident_bytes(path: Path) -> int:
    """Bytes of the file that are in the page cache."""
    n_bytes = path.stat().st_size
    if n_bytes == 0:
        return 0
    n_pages = -(-n_bytes // mmap.PAGESIZE)
    # Private and writable only so that ctypes may take the address; nothing is written or read.
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as view:
        anchor = ctypes.c_char.from_buffer(view)
        states = (ctypes.c_ubyte * n_pages)()
        failed = _libc.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(n_bytes), states)
        del anchor
    if failed:
        raise OSError(ctypes.get_errno(), "mincore failed", str(path))
    return sum(state & 1 for state in bytes(states)) * mmap.PAGESIZE


def evict(path: Path, allowed_bytes: int = 1 << 20) -> int:
    """Drop the file from the page cache and return what is left of it there.

    Raises:
        RuntimeError: more than `allowed_bytes` stayed, so a run would not be cold.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    left = resident_bytes(path)
    if left > allowed_bytes:
        raise RuntimeError(f"{left} bytes of {path} stay in the page cache; does another process map the file?")
    return left


def warm(path: Path) -> int:
    """Read the whole file through the page cache and return how much of it is there then."""
    with path.open("rb", buffering=0) as file:
        block = bytearray(4 << 20)
        while file.readinto(block):
            pass
    return resident_bytes(path)


def filesystem_drops_pages(path: Path) -> bool:
    """False on file systems that live in the page cache (tmpfs), where nothing can be evicted."""
    target = str(path.resolve())
    rows = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    inside = [(len(mount), kind) for mount, kind in rows if target.startswith(mount.rstrip("/") + "/")]
    return max(inside)[1] not in ("tmpfs", "ramfs")
