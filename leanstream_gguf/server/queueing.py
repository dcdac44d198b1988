"""Whose turn it is: one request uses the model at a time, clients alternate, each client's requests keep their order."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator

from ..errors import LeanStreamError
from .errors import QueueFullError


class FairQueue:
    """A lock that is handed round between clients, so that one with many requests does not keep the others waiting.

    Belongs to one event loop.

    Attributes:
        limit: requests that may wait.
        running: 1 while somebody has the turn.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.running = 0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._closed: LeanStreamError | None = None

    @property
    def waiting(self) -> int:
        return sum(len(queue) for queue in self._waiting.values())

    @contextlib.asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Wait for a turn and keep it while entered.

        Raises:
            QueueFullError: `limit` requests wait already. StoppingError: or what `close()` was given.
        """
        await self._acquire(client)
        try:
            yield
        finally:
            self._next()

    async def _acquire(self, client: str) -> None:
        if self._closed is not None:
            raise self._closed
        if not self.running:
            self.running = 1
            return
        if self.waiting >= self.limit:
            raise QueueFullError(f"{self.limit} requests are waiting already", remedy="try again later")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._next()  # the turn arrived together with the cancellation
            else:
                self._forget(client, future)
            raise

    def _forget(self, client: str, future: asyncio.Future[None]) -> None:
        queue = self._waiting.get(client)
        if queue is not None and future in queue:
            queue.remove(future)
            if not queue:
                del self._waiting[client]

    def _next(self) -> None:
        """Give the turn to the client that has waited longest since its last one."""
        while self._waiting:
            client, queue = self._waiting.popitem(last=False)
            future = queue.popleft()
            if queue:
                self._waiting[client] = queue  # at the end: the others first
            if not future.done():
                future.set_result(None)
                return
        self.running = 0

    def close(self, error: LeanStreamError) -> None:
        """Refuse everybody who waits or will come; who has the turn keeps it."""
        self._closed = error
        for queue in self._waiting.values():
            for future in queue:
                if not future.done():
                    future.set_exception(error)
        self._waiting.clear()
