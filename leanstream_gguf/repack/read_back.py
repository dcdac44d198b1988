"""Is a lean file right? The source is restored from it and compared with the source, byte by byte."""

from __future__ import annotations

import numpy as np

from ..errors import LeanStreamError, RepackError
from . import device
from .blocks import Bytes
from .direct import Room
from .jobs import PIECE_BYTES
from .layout import Layout
from .lean_file import LeanFile, Restorer
from .progress import Progress
from .requantize import DownRows
from .storage import Source
from .threads import RunningHash, ahead
from .unpack import shard_stream


def read_back(path: str, layout: Layout, down_rows: DownRows, source: Source, *, quiet: bool = False) -> list[str]:
    """SHA-256 of each shard of the source, after comparing what the file gives back with it.

    Matrices for a device are made again. Tensors that were requantised are not the source's: of them only checksums are compared.

    Raises:
        RepackError: it is not the same.
    """
    progress = Progress("checking", layout.source.file_bytes, quiet=quiet)
    try:
        lean = LeanFile(path)
        with Source(lean.model.shards) as written:
            _compare_device(lean, layout, down_rows, written, source)
            restorer = Restorer(lean, written)
            found = [_compare(lean, restorer, shard, source, progress) for shard in range(len(source.shards))]
    except RepackError:
        raise
    except LeanStreamError as error:
        raise RepackError(f"{path} does not read back as it was written: {error}", path=path) from error
    progress.finish()
    return found


def _compare_device(lean: LeanFile, layout: Layout, down_rows: DownRows, written: Source, source: Source) -> None:
    for layer in layout.neurons:
        for name, at, data in device.matrices(layer, down_rows.reader(layer, source), source):
            if not _same(written.read(lean.tensor(name), at, len(data)), data):
                raise RepackError(f"{lean.path} does not read back as it was written: {name} differs", path=lean.path)


def _compare(lean: LeanFile, restorer: Restorer, shard: int, source: Source, progress: Progress) -> str:
    original = _Original(source, shard, progress)
    for name, start, piece in ahead(shard_stream(lean, restorer, shard)):
        original.skip_to(start)  # over what was requantised
        for at in range(0, len(piece), PIECE_BYTES):
            part = piece[at : at + PIECE_BYTES]
            if not _same(original.take(len(part)), part):
                path = source.shards[shard].path
                raise RepackError(
                    f"{lean.path} does not give back {path}: {name or 'the header'} differs",
                    path=lean.path,
                    remedy="the drive or memory may be faulty, or the source has bytes outside its tensors; nothing was renamed",
                )
    original.skip_to(source.shards[shard].file_bytes)
    return original.digest.hexdigest()


class _Original:
    """A shard of the source, read in order and hashed."""

    def __init__(self, source: Source, shard: int, progress: Progress) -> None:
        self.digest = RunningHash()
        self._source, self._shard, self._progress = source, shard, progress
        self._at = 0
        self._rooms = [Room(), Room()]  # the piece that is being hashed is in the other one

    def take(self, n_bytes: int) -> Bytes:
        """The next bytes, valid until the call after the next one."""
        self._rooms.reverse()
        piece = self._source.read_at(self._shard, self._at, n_bytes, self._rooms[0])
        self._source.drop_cached(self._shard, self._at, n_bytes)
        self.digest.update(piece)
        self._at += n_bytes
        self._progress.add(n_bytes)
        return piece

    def skip_to(self, at: int) -> None:
        while self._at < at:
            self.take(min(PIECE_BYTES, at - self._at))


def _same(a: Bytes, b: Bytes | bytes) -> bool:
    other = np.frombuffer(b, np.uint8)
    words = len(a) // 8 * 8  # eight bytes at once
    if len(a) != len(other) or not np.array_equal(a[:words].view(np.uint64), other[:words].view(np.uint64)):
        return False
    return np.array_equal(a[words:], other[words:])
