"""Reading and writing past the page cache, several at a time, and checksums put together from parts."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leanstream_gguf.repack import checksums, direct, storage, threads
from leanstream_gguf.repack.gguf_file import Header


def noise(n: int) -> Any:
    return np.random.default_rng(n).integers(0, 256, n, dtype=np.uint8)


def source_of(path: Path, data: Any) -> storage.Source:
    path.write_bytes(data.tobytes())
    return storage.Source([Header(str(path), 3, (), (), b"", 0, len(data), 32)])


@pytest.fixture(params=["direct", "no direct access", "refused later"])
def access(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """File systems that go past the page cache, that do not, and that say so only when asked to read or write."""
    open_direct, way = direct._open_direct, str(request.param)
    if way == "no direct access":
        monkeypatch.setattr(direct, "_open_direct", lambda path, writable: None)
    if way == "refused later":
        if not hasattr(os, "preadv"):
            pytest.skip("no preadv")
        refused: set[int | None] = set()
        read, write = os.preadv, os.pwritev

        def opened(path: str, writable: bool) -> int | None:
            refused.add(found := open_direct(path, writable))
            return found

        def refuse(call: Any) -> Any:
            def wrapped(file: int, buffers: Any, offset: int) -> int:
                if file in refused:
                    raise OSError(errno.EINVAL, "not here")
                return int(call(file, buffers, offset))

            return wrapped

        monkeypatch.setattr(direct, "_open_direct", opened)
        monkeypatch.setattr(os, "preadv", refuse(read))
        monkeypatch.setattr(os, "pwritev", refuse(write))
    return way


@pytest.mark.usefixtures("access")
class TestFiles:
    @pytest.mark.parametrize("offset", [0, 32, 4096, 100_000])
    @pytest.mark.parametrize("n_bytes", [1, 5000, direct.DIRECT_BYTES, 300_001])
    def test_reads_at_any_offset(self, tmp_path: Path, offset: int, n_bytes: int) -> None:
        data = noise(500_001)
        with source_of(tmp_path / "x", data) as source:
            assert (source.read_at(0, offset, n_bytes) == data[offset : offset + n_bytes]).all()
            assert (source.read_at(0, len(data) - n_bytes, n_bytes) == data[-n_bytes:]).all()
            with pytest.raises(storage.TruncatedError):
                source.read_at(0, len(data) - n_bytes + 1, n_bytes)

    @pytest.mark.parametrize("size", [100, 70_000, 600_000])
    def test_rows_that_lie_apart(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        monkeypatch.setattr(storage, "READ_BYTES", 160_000)
        data, out = noise(2_000_000), np.zeros((3, size + 50), np.uint8)
        with source_of(tmp_path / "x", data) as source:
            source.read_rows(0, 77, out[:, 20 : 20 + size], direct.Room())
        assert (out[:, 20 : 20 + size].ravel() == data[77 : 77 + 3 * size]).all() and not out[:, :20].any()

    def test_writes_at_any_offset(self, tmp_path: Path) -> None:
        room, expected = direct.Room(), np.zeros(1_000_000, np.uint8)
        output = storage.Output(str(tmp_path / "x"))
        output.resize(len(expected))
        for offset, n_bytes in ((0, 300_001), (400_000, 5), (409_600, 262_144), (700_003, 200_000)):
            piece = room.take(n_bytes)
            piece[:] = noise(n_bytes)
            output.write(offset, piece)
            expected[offset : offset + n_bytes] = piece
        output.sync()
        output.close()
        assert (tmp_path / "x").read_bytes() == expected.tobytes()


def test_other_errors_of_a_drive_are_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(file: int, buffers: Any, offset: int) -> int:
        raise OSError(errno.EIO, "broken")

    with source_of(tmp_path / "x", noise(500_000)) as source:
        monkeypatch.setattr(os, "preadv", failing)
        with pytest.raises(storage.ReadError, match="broken"):
            source.read_at(0, 0, 400_000)


def test_a_room_is_used_again() -> None:
    room = direct.Room()
    first = room.take(200_000)
    assert room.take(100).ctypes.data == first.ctypes.data and first.ctypes.data % 4096 == 0
    assert len(room.take(300_000)) == 300_000


@pytest.mark.native
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("cuts", [(0, 100), (0, 1, 100), (0, 33, 34, 100)])
def test_checksums_of_parts_give_that_of_the_whole(cuts: tuple[int, ...]) -> None:
    rows = noise(700).reshape(7, 100)
    parts = [(checksums.crc32c_rows(rows[:, a:b]), b - a) for a, b in itertools.pairwise(cuts)]
    assert (checksums.joined(parts) == checksums.crc32c_rows(rows)).all()


def test_work_is_shared_out_and_each_piece_done_once() -> None:
    together = threading.Barrier(3, timeout=10)
    done: list[int] = []

    def worker(i: int) -> None:
        if i < 3:
            together.wait()  # three at the same time
        done.append(i)

    assert sorted(threads.in_parallel(range(50), [worker] * 3)) == list(range(50)) == sorted(done)


def test_a_failure_comes_after_what_was_finished_before_it() -> None:
    def worker(i: int) -> None:
        if i == 3:
            raise ValueError("three")

    finished = []
    with pytest.raises(ValueError, match="three"):
        for i in threads.in_parallel(range(50), [worker]):
            finished.append(i)
    assert finished == [0, 1, 2]


def test_the_next_item_is_made_ahead_and_its_error_comes_in_its_place() -> None:
    def items() -> Any:
        yield 1
        yield 2
        raise ValueError("no third")

    found = []
    with pytest.raises(ValueError, match="no third"):
        for item in threads.ahead(items()):
            found.append(item)
    assert found == [1, 2]
