"""Helpers for the tests of the server: one in a thread, raw requests, waiting without fixed sleeps."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

WAIT_S = 60.0
LETTERS = "root ::= [a-z] root"  # a toy model's bytes are text, so that each is sent at once, and no answer ends early
CHAT = {"messages": [{"role": "user", "content": "the quick brown fox"}], "temperature": 0, "max_tokens": 8}


@dataclass(frozen=True)
class Running:
    """A server under test."""

    url: str
    app: Any
    http: httpx.Client

    @property
    def port(self) -> int:
        return httpx.URL(self.url).port or 0

    @property
    def host(self) -> Any:
        return self.app.state.host

    def chat(self, **settings: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json={**CHAT, **settings})

    def text(self, **settings: Any) -> str:
        reply = self.chat(**settings)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["message"]["content"])

    def stats(self) -> dict[str, Any]:
        return dict(self.http.get("/v1/stream/stats").json())

    def raw(self, data: bytes, timeout_s: float = 10.0) -> bytes:
        """Everything the server answers to these bytes until it closes or falls silent."""
        with socket.create_connection(("127.0.0.1", self.port), timeout_s) as connection:
            connection.sendall(data)
            return received(connection, timeout_s)


def received(connection: socket.socket, timeout_s: float = 10.0) -> bytes:
    """What arrives until the other side closes; b"" if it resets."""
    connection.settimeout(timeout_s)
    data = b""
    with contextlib.suppress(OSError):
        while chunk := connection.recv(65536):
            data += chunk
    return data


def until(condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    """The first true value of `condition`; fails after the timeout."""
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {timeout_s:g} s in vain until {what}"
        time.sleep(0.01)
    return value


@contextlib.contextmanager
def held(running: Running) -> Iterator[None]:
    """The model computes nothing until the block ends: whoever has the turn keeps it, the others wait."""
    llm, gate = running.host.llm, threading.Event()
    compute = llm.eval

    def wait_and_compute(tokens: Any) -> None:
        assert gate.wait(WAIT_S)
        compute(tokens)

    llm.eval = wait_and_compute
    try:
        yield
    finally:
        del llm.eval
        gate.set()


@contextlib.contextmanager
def serving(*models: Path, wait: bool = True, app_options: dict[str, Any] | None = None, **settings: Any) -> Iterator[Running]:
    """A server in a thread on a free port with these models; `settings` are those of ServerSettings and ModelSettings."""
    from leanstream_gguf.server import ModelSettings, ServerSettings, ServerThread, bind, create_app

    of_server = {name: settings.pop(name) for name in list(settings) if name in ServerSettings.model_fields}
    server = ServerSettings(port=0, **of_server)
    of_model = {"memory_budget": "min+50%", "n_ctx": 256, "n_batch": 64, "n_threads": 1, "n_threads_batch": 1, "seed": 7, **settings}
    app = create_app(server, [ModelSettings(model=str(path), **of_model) for path in models], **app_options or {})
    headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    with ServerThread(app, bind(server)) as url, httpx.Client(base_url=url, headers=headers, timeout=WAIT_S) as http:
        running = Running(url, app, http)
        if wait and models:
            until(lambda: app.state.host.state in ("ready", "failed"), "the model is loaded")
        yield running
