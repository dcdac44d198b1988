"""Reads and writes at offsets, from any thread, past the page cache where the system lets us.

A large piece that starts on a page of the file and of memory goes straight to the drive and back; everything else, and every piece on
a file system that refuses, goes through the page cache.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
import threading
from io import FileIO

import numpy as np

from .blocks import Bytes
from .format import PAGE, ceil_to

if sys.platform == "darwin":
    import fcntl

DIRECT_BYTES = 128 << 10  # smaller pieces are better off in the page cache
_CALL_BYTES = 64 << 20  # of one system call; some refuse 2 GiB
_LARGE_PAGE = 2 << 20


def allocate(n_bytes: int) -> Bytes:
    """Zeroed memory that starts on a page; in large pages if it may be: a drive reads into those at twice the rate."""
    if n_bytes < DIRECT_BYTES:
        return np.zeros(n_bytes, np.uint8)
    if sys.platform == "win32":
        return np.frombuffer(mmap.mmap(-1, n_bytes), np.uint8)
    memory = mmap.mmap(-1, n_bytes + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole: Bytes = np.frombuffer(memory, np.uint8)
    return whole[-whole.ctypes.data % _LARGE_PAGE :][:n_bytes]


class Room:
    """Memory that is used again and again: fresh pages cost as much as reading into them."""

    def __init__(self) -> None:
        self._memory = np.zeros(0, np.uint8)

    def take(self, n_bytes: int) -> Bytes:
        """`n_bytes` from the start of a page; what was taken before is given up."""
        if len(self._memory) < n_bytes:
            self._memory = allocate(ceil_to(n_bytes, PAGE))
        return self._memory[:n_bytes]


class DirectFile:
    """An open file.

    Raises:
        OSError: it cannot be opened, read or written.
    """

    def __init__(self, path: str, mode: str) -> None:
        """`mode` is that of FileIO: r, r+ or x+."""
        self._file = FileIO(path, mode)
        self._lock = threading.Lock()  # of the file's position, on systems that must move it
        self._direct = _open_direct(path, self._file.writable())

    def read(self, offset: int, out: Bytes) -> int:
        """Bytes that were read, fewer than there is room for possibly; 0 at the end of the file."""
        out = out[:_CALL_BYTES]
        if self._direct is not None and _fits(offset, out) and len(out) % PAGE == 0:
            try:
                return os.preadv(self._direct, [out.data], offset)
            except OSError as error:
                self._refused(error)
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [out.data], offset)
        with self._lock:
            self._file.seek(offset)
            return self._file.readinto(out.data) or 0

    def write(self, offset: int, data: Bytes) -> int:
        """Bytes that were written."""
        data = data[:_CALL_BYTES]
        if self._direct is not None and _fits(offset, data):
            try:
                return os.pwritev(self._direct, [data[: len(data) // PAGE * PAGE].data], offset)
            except OSError as error:
                self._refused(error)
        if hasattr(os, "pwritev"):
            return os.pwritev(self._file.fileno(), [data.data], offset)
        with self._lock:
            self._file.seek(offset)
            return self._file.write(data.data) or 0

    def _refused(self, error: OSError) -> None:
        """Some file systems open a file for direct access and then refuse it: from then on it is not tried."""
        if error.errno != errno.EINVAL:
            raise error
        self._direct = None

    def drop_cached(self, offset: int, n_bytes: int) -> None:
        """Tell the system that this range will not be read again; 0 bytes mean all."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), offset, n_bytes, os.POSIX_FADV_DONTNEED)

    def resize(self, n_bytes: int) -> None:
        self._file.truncate(n_bytes)

    def sync(self) -> None:
        """What was written survives a power cut."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None


def _open_direct(path: str, writable: bool) -> int | None:
    flags = os.O_RDWR if writable else os.O_RDONLY
    try:
        if sys.platform == "darwin":
            file = os.open(path, flags)
            fcntl.fcntl(file, fcntl.F_NOCACHE, 1)
            return file
        return os.open(path, flags | os.O_DIRECT) if hasattr(os, "O_DIRECT") else None
    except OSError:
        return None


def _fits(offset: int, data: Bytes) -> bool:
    return len(data) >= DIRECT_BYTES and offset % PAGE == 0 and data.ctypes.data % PAGE == 0
