"""Helpers for the tests of the chat page: the program in a process of its own, and a page that was opened in Chromium."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
from serving import until

WAIT_S = 240.0  # generous: a busy machine is no failure
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


class Program:
    """`leanstream chat --no-open` on a data folder; it can be killed and started again on the same port."""

    def __init__(self, data: Path, models: Path, *arguments: str) -> None:
        self.data, self.models, self.arguments = data, models, arguments
        self.url = ""
        self.start()

    def start(self) -> None:
        port = ["--port", self.url.rsplit(":", 1)[1]] if self.url else []
        command = [sys.executable, "-m", "leanstream_gguf", "chat", "--no-open", "--json", "--data", str(self.data)]
        command += ["--models", str(self.models), *port, *self.arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it did not start: {self.process.stderr.read() if self.process.stderr else ''}"
        self.url = json.loads(line)["url"]
        self.http = httpx.Client(base_url=self.url, timeout=WAIT_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.http.close()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(timeout=60)

    def stats(self) -> dict[str, Any]:
        return dict(self.http.get("/v1/stream/stats").json())

    def resident_bytes(self) -> int:
        """Measured by the system, not by the program."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def load(self, path: Path, memory_budget: str = "full") -> None:
        """Load a model and wait for it."""
        reply = self.http.post("/chat/api/models/load", json={"path": str(path), "memory_budget": memory_budget})
        assert reply.status_code == 202, reply.text
        alias = reply.json()["model"]
        until(lambda: (s := self.stats())["model"] == alias and s["state"] in ("ready", "failed"), "the model is loaded")
        assert self.stats()["state"] == "ready"

    def defaults(self, **settings: Any) -> None:
        """Sampling of new conversations."""
        body = {"system": "", "settings": {"temperature": 0, "seed": 1, "max_tokens": 48, **settings}}
        assert self.http.put("/chat/api/preferences/defaults", json=body).status_code == 204


class ChatPage:
    """A tab with the chat in it."""

    def __init__(self, page: Any, url: str) -> None:
        self.page, self.url = page, url
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: self._console(message))
        page.set_default_timeout(WAIT_S * 1000)

    def _console(self, message: Any) -> None:
        lost = "Failed to load resource" in message.text or "ERR_" in message.text  # the browser's own words for a server that is away
        if message.type == "error" and not lost:
            self.errors.append(message.text)

    def open(self) -> ChatPage:
        self.page.goto(self.url)
        self.page.wait_for_selector("body.is-ready")
        return self

    def ask(self, text: str) -> None:
        self.page.fill("#prompt", text)
        self.page.wait_for_selector("#send:not([disabled])")
        self.page.press("#prompt", "Enter")

    def answer(self) -> str:
        """What the last answer shows now."""
        found = self.page.locator(".message.assistant .markdown").last
        return str(found.inner_text()) if found.count() else ""

    def wait_answer(self) -> str:
        """The last answer once it is complete."""
        self.page.wait_for_selector(".message.assistant:last-child .retry:not([disabled])")
        return self.answer()

    def wait_growing(self, n_characters: int = 1) -> str:
        return str(until(lambda: (text := self.answer()) if len(self.answer()) >= n_characters else "", "the answer grows"))

    def new_chat(self) -> None:
        self.page.click("#new-chat")
        self.page.wait_for_selector(".welcome")

    def titles(self) -> list[str]:
        return [str(text) for text in self.page.locator(".conversation .title").all_inner_texts()]
