"""Reads of sources and writes of outputs at given offsets, with errors that say what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from io import FileIO
from types import TracebackType
from typing import Any

import numpy as np

from ..errors import ModelUnreadableError, ReadError, RepackError, TruncatedError
from .blocks import Bytes
from .gguf_file import Header, TensorInfo

_CALL_BYTES = 64 << 20  # of one system call; some refuse 2 GiB
WHOLE_BYTES = 160 << 20  # a tensor up to this size may be held in memory; rows of larger ones are read one by one


def allocate(n_bytes: int) -> Bytes:
    return np.empty(n_bytes, np.uint8)


class Source:
    """The shards of a model, open for reading at offsets."""

    def __init__(self, shards: Sequence[Header]) -> None:
        self.shards = list(shards)
        self._files: list[FileIO] = []
        try:
            for shard in shards:
                self._files.append(FileIO(shard.path, "r"))
        except OSError as error:
            self.close()
            raise ModelUnreadableError(f"{shard.path} cannot be read: {error.strerror}", path=shard.path) from error

    def read_at(self, shard: int, offset: int, n_bytes: int) -> Bytes:
        """
        Raises:
            TruncatedError, ReadError
        """
        out = allocate(n_bytes)
        view, done = memoryview(out.data), 0
        path = self.shards[shard].path
        while done < n_bytes:
            try:
                self._files[shard].seek(offset + done)
                n = self._files[shard].readinto(view[done : done + _CALL_BYTES])
            except OSError as error:
                raise ReadError(f"{path} cannot be read at {offset + done}: {error.strerror}", path=path, offset=offset) from error
            if not n:
                raise TruncatedError(f"{path} became shorter while it was read", path=path, offset=offset + done)
            done += n
        return out

    def read(self, tensor: TensorInfo, start: int = 0, n_bytes: int | None = None) -> Bytes:
        """Bytes of a tensor."""
        return self.read_at(tensor.shard, tensor.offset + start, tensor.n_bytes - start if n_bytes is None else n_bytes)

    def rows(self, tensor: TensorInfo, first: int, n: int) -> Bytes:
        """Consecutive rows [n, row bytes]."""
        return self.read(tensor, first * tensor.row_bytes, n * tensor.row_bytes).reshape(n, tensor.row_bytes)

    def chosen_rows(self, tensor: TensorInfo, rows: Any, whole: Bytes | None = None) -> Bytes:
        """Rows in any order [len(rows), row bytes]; `whole` are all rows where the caller holds them."""
        if whole is not None:
            chosen: Bytes = whole[rows]
            return chosen
        out = np.empty((len(rows), tensor.row_bytes), np.uint8)
        for i, row in enumerate(rows):
            out[i] = self.read(tensor, int(row) * tensor.row_bytes, tensor.row_bytes)
        return out

    def whole_rows(self, tensor: TensorInfo) -> Bytes | None:
        """All rows if they may be held in memory."""
        return self.rows(tensor, 0, tensor.n_rows) if tensor.n_bytes <= WHOLE_BYTES else None

    def drop_cached(self, shard: int, offset: int, n_bytes: int) -> None:
        """Tell the system that this range will not be read again."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._files[shard].fileno(), offset, n_bytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        while self._files:
            self._files.pop().close()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Output:
    """The file being written, by offset; `sync()` makes what was written survive a power cut."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.n_written = 0
        try:
            self._file = FileIO(path, "r+" if os.path.exists(path) else "x+")
        except OSError as error:
            raise RepackError(f"{path} cannot be written: {error.strerror}", path=path, sys_errno=error.errno) from error

    def write(self, offset: int, data: Any) -> None:
        """
        Raises:
            RepackError: the disk is full or fails.
        """
        view = memoryview(data).cast("B")
        done = 0
        try:
            self._file.seek(offset)
            while done < len(view):
                done += self._file.write(view[done : done + _CALL_BYTES]) or 0
        except OSError as error:
            raise RepackError(
                f"{self.path} cannot be written at {offset + done}: {error.strerror}",
                path=self.path,
                sys_errno=error.errno,
                remedy="free some space and run the same command again: it goes on where it stopped"
                if error.errno in (errno.ENOSPC, errno.EDQUOT)
                else None,
            ) from error
        self.n_written += len(view)

    def resize(self, n_bytes: int) -> None:
        self._file.truncate(n_bytes)

    def sync(self) -> None:
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise RepackError(f"{self.path} cannot be written: {error.strerror}", path=self.path, sys_errno=error.errno) from error

    def close(self) -> None:
        self._file.close()
