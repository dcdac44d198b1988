"""Server-sent events over plain ASGI, without a global exit hook, and ended at once when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

COMMENT_SECONDS = 10.0  # a line that keeps proxies and clients from giving up while nothing else is sent
SEND_SECONDS = 30.0  # a client that reads nothing for so long is dropped


def to_json(document: Any) -> str:
    """JSON of a reply; llama_cpp's logprobs are numpy's numbers."""
    return json.dumps(document, default=lambda number: number.item())


async def disconnected(receive: Receive) -> None:
    """Return when the client is gone. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """`data: ...` events from an iterator of JSON values or strings; the iterator is closed at the end, however that comes.

    Args:
        source: dicts are sent as JSON, strings as they are.
        comments: send a comment now and then while the source has nothing.
    """

    media_type = "text/event-stream"

    def __init__(self, source: AsyncIterator[dict[str, Any] | str], *, comments: bool = True) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.source = source
        self.comments = comments

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(disconnected(receive))
        work = asyncio.ensure_future(self._send_all(send))
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            work.cancel()
            await asyncio.wait({work})  # its own cancellation frees the model before this request ends
        with contextlib.suppress(asyncio.CancelledError, TimeoutError, OSError):
            work.result()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        source = self.source
        waiting: asyncio.Future[Any] | None = None
        try:
            while True:
                waiting = waiting or asyncio.ensure_future(anext(source))
                done, _ = await asyncio.wait({waiting}, timeout=COMMENT_SECONDS)
                if not done:
                    if self.comments:
                        await self._chunk(send, ": waiting\n\n")
                    continue
                try:
                    event = waiting.result()
                except StopAsyncIteration:
                    break
                finally:
                    waiting = None
                await self._chunk(send, f"data: {event if isinstance(event, str) else to_json(event)}\n\n")
        finally:
            if waiting is not None:
                waiting.cancel()
                await asyncio.wait({waiting})
            if hasattr(source, "aclose"):
                await source.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @staticmethod
    async def _chunk(send: Send, text: str) -> None:
        async with asyncio.timeout(SEND_SECONDS):
            await send({"type": "http.response.body", "body": text.encode("utf-8", "replace"), "more_body": True})
