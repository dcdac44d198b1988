"""Runs the application on a socket: bounded connections, a graceful end, in this thread or in another."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from types import TracebackType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import ArgumentError, StateError
from .security import check_settings
from .settings import ServerSettings

START_SECONDS = 30.0


def bind(settings: ServerSettings) -> socket.socket:
    """A listening socket for the settings; port 0 takes a free one.

    Raises:
        ArgumentError: the address is in use or not ours, or lets others in without a key.
    """
    check_settings(settings)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ArgumentError(f"cannot listen on {settings.host}: {error}") from error
    try:
        if os.name == "posix":  # elsewhere it would let two servers share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ArgumentError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}",
            remedy="choose another --port, 0 for a free one",
        ) from error
    return listener


def url_of(listener: socket.socket, *, secure: bool = False) -> str:
    """`http://127.0.0.1:8000`."""
    host, port = listener.getsockname()[:2]
    return f"{'https' if secure else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def bounded_protocol(max_connections: int, head_seconds: float) -> type[H11Protocol]:
    """uvicorn's protocol, which waits for ever for the rest of a request's head, with a bound on that and on connections."""

    class BoundedProtocol(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                transport.abort()
                return
            self._arm()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._disarm()  # the body has a bound of its own
            else:
                self._arm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def _arm(self) -> None:
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(head_seconds, self.transport.abort)

        def _disarm(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return BoundedProtocol


class Server(uvicorn.Server):
    """uvicorn's server, which tells the host first that it is going to stop."""

    def __init__(self, app: FastAPI) -> None:
        settings: ServerSettings = app.state.settings
        self._host = app.state.host
        super().__init__(
            uvicorn.Config(
                app,
                http=bounded_protocol(settings.max_connections, settings.request_timeout),
                ws="none",
                lifespan="on",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=60,
                timeout_graceful_shutdown=settings.shutdown_timeout,
                ssl_keyfile=settings.ssl_keyfile,
                ssl_certfile=settings.ssl_certfile,
            )
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._host.drain()
        await super().shutdown(sockets)
        self._captured_signals.clear()  # handled: do not raise them again


def serve(app: FastAPI, listener: socket.socket) -> int:
    """Serve until SIGINT or SIGTERM; running answers finish within shutdown_timeout. Returns the exit status."""
    Server(app).run(sockets=[listener])
    return 0


class ServerThread:
    """The server in a thread of its own; for `with`, which gives the URL."""

    def __init__(self, app: FastAPI, listener: socket.socket) -> None:
        self.url = url_of(listener, secure=app.state.settings.ssl_certfile is not None)
        self._server = Server(app)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, name="leanstream-server")

    def start(self) -> str:
        """Start, wait until it listens, and return the URL.

        Raises:
            StateError: it ended at once.
        """
        self._thread.start()
        waited = 0.0
        while not self._server.started and self._thread.is_alive() and waited < START_SECONDS:
            self._thread.join(0.01)
            waited += 0.01
        if not self._server.started:
            raise StateError("the server did not start")
        return self.url

    def stop(self) -> None:
        """End it and wait for that. Idempotent."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> str:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
