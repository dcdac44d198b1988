"""Work on a few threads: reading, copying and writing at the same time. Whatever takes long here releases the interpreter."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def in_parallel(items: Iterable[T], workers: Sequence[Callable[[T], None]]) -> Iterator[T]:
    """Each item goes to the next idle worker, a function with a thread of its own; yields those that are done, as they finish.

    Raises:
        What a worker raised, after the items that were finished before it; the others then end with the item they have.
    """
    waiting, lock, stopped = iter(items), threading.Lock(), threading.Event()
    finished: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def loop(worker: Callable[[T], None]) -> None:
        try:
            while not stopped.is_set():
                with lock:
                    item = next(waiting, None)
                if item is None:
                    break
                worker(item)
                finished.put((item, None))
        except BaseException as error:
            finished.put((None, error))
        else:
            finished.put((None, None))

    threads = [threading.Thread(target=loop, args=(worker,), name="leanstream-repack", daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    running = len(threads)
    try:
        while running:
            item, error = finished.get()
            if error is not None:
                raise error
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        stopped.set()
        for thread in threads:
            thread.join()


def ahead(items: Iterable[T]) -> Iterator[T]:
    """The items; while one is used, the next is made on another thread."""
    iterator, end = iter(items), object()
    with ThreadPoolExecutor(1, "leanstream-ahead") as pool:
        coming: Future[Any] = pool.submit(next, iterator, end)
        while (item := coming.result()) is not end:
            coming = pool.submit(next, iterator, end)
            yield item


class RunningHash:
    """SHA-256 of pieces in order, on a thread of its own, one piece behind."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._pool = ThreadPoolExecutor(1, "leanstream-hash")
        self._last: Future[None] | None = None

    def update(self, piece: Any) -> None:
        """The piece must stay as it is until the next call."""
        self._wait()
        self._last = self._pool.submit(self._digest.update, piece)

    def hexdigest(self) -> str:
        self._wait()
        return self._digest.hexdigest()

    def _wait(self) -> None:
        if self._last is not None:
            self._last.result()
            self._last = None
