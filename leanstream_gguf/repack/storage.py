"""Reads of sources and writes of outputs at given offsets, with errors that say what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from ..errors import ModelUnreadableError, ReadError, RepackError, TruncatedError
from . import format as f
from .blocks import Bytes
from .direct import DIRECT_BYTES, DirectFile, Room
from .gguf_file import Header, TensorInfo

READ_BYTES = 8 << 20  # in hand while rows are put in their places
WHOLE_BYTES = 160 << 20  # a tensor up to this size may be held in memory; rows of larger ones are read one by one


class Source:
    """The shards of a model, open for reading at offsets, from any thread."""

    def __init__(self, shards: Sequence[Header]) -> None:
        self.shards = list(shards)
        self._files: list[DirectFile] = []
        try:
            for shard in shards:
                self._files.append(DirectFile(shard.path, "r"))
        except OSError as error:
            self.close()
            raise ModelUnreadableError(f"{shard.path} cannot be read: {error.strerror}", path=shard.path) from error

    def read_at(self, shard: int, offset: int, n_bytes: int, room: Room | None = None) -> Bytes:
        """
        Args:
            room: memory to read into, instead of new memory.

        Raises:
            TruncatedError, ReadError
        """
        start, end = offset, offset + n_bytes
        whole_pages = n_bytes >= DIRECT_BYTES
        if whole_pages:
            start -= offset % f.PAGE
        out = (room or Room()).take(f.ceil_to(end, f.PAGE) - start if whole_pages else n_bytes)
        path, done = self.shards[shard].path, 0
        while start + done < end:
            try:
                n = self._files[shard].read(start + done, out[done:])
            except OSError as error:
                raise ReadError(f"{path} cannot be read at {start + done}: {error.strerror}", path=path, offset=offset) from error
            if not n:
                raise TruncatedError(f"{path} became shorter while it was read", path=path, offset=start + done)
            done += n
        return out[offset - start :][:n_bytes]

    def read_rows(self, shard: int, offset: int, out: Bytes, room: Room) -> None:
        """Fill `out` [n, row bytes], whose rows may lie apart, with consecutive bytes of the file."""
        n_bytes = out.shape[0] * out.shape[1]
        for start in range(0, n_bytes, READ_BYTES):
            spread(self.read_at(shard, offset + start, min(READ_BYTES, n_bytes - start), room), start, out)

    def read(self, tensor: TensorInfo, start: int = 0, n_bytes: int | None = None, room: Room | None = None) -> Bytes:
        """Bytes of a tensor."""
        return self.read_at(tensor.shard, tensor.offset + start, tensor.n_bytes - start if n_bytes is None else n_bytes, room)

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
        self._files[shard].drop_cached(offset, n_bytes)

    def close(self) -> None:
        while self._files:
            self._files.pop().close()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def spread(piece: Bytes, at: int, rows: Bytes) -> None:
    """Put `piece` where bytes `at`, `at` + 1, ... of `rows` [n, row bytes], counted row after row, belong."""
    size = rows.shape[1]
    while len(piece):
        row, column = divmod(at, size)
        if column or len(piece) < size:
            used = min(size - column, len(piece))
            rows[row, column : column + used] = piece[:used]
        else:
            n = len(piece) // size
            used = n * size
            rows[row : row + n] = piece[:used].reshape(n, size)
        piece, at = piece[used:], at + used


class Output:
    """The file being written, by offset, from any thread; `sync()` makes what was written survive a power cut."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._file = DirectFile(path, "r+" if os.path.exists(path) else "x+")
        except OSError as error:
            raise RepackError(f"{path} cannot be written: {error.strerror}", path=path, sys_errno=error.errno) from error

    def write(self, offset: int, data: Any) -> None:
        """
        Raises:
            RepackError: the disk is full or fails.
        """
        raw, done = np.asarray(memoryview(data).cast("B")), 0
        try:
            while done < len(raw):
                done += self._file.write(offset + done, raw[done:])
        except OSError as error:
            raise RepackError(
                f"{self.path} cannot be written at {offset + done}: {error.strerror}",
                path=self.path,
                sys_errno=error.errno,
                remedy="free some space and run the same command again: it goes on where it stopped"
                if error.errno in (errno.ENOSPC, errno.EDQUOT)
                else None,
            ) from error

    def resize(self, n_bytes: int) -> None:
        self._file.resize(n_bytes)

    def sync(self) -> None:
        try:
            self._file.sync()
        except OSError as error:
            raise RepackError(f"{self.path} cannot be written: {error.strerror}", path=self.path, sys_errno=error.errno) from error

    def drop_cached(self) -> None:
        """So that reading back reads the drive."""
        self._file.drop_cached(0, 0)

    def close(self) -> None:
        self._file.close()
