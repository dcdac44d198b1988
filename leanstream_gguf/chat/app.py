"""Runs the chat: the server on a loopback port, and a window or the browser showing its page."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import signal
import sys
import threading
import urllib.request
import webbrowser
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from .. import paths
from ..errors import ArgumentError, LibraryError
from . import PAGE
from .service import ChatService

SHUTDOWN_SECONDS = 3  # an answer in progress is saved by the page as it goes; quitting need not wait for its end
RUNNING = "running.json"  # where the program that uses this data folder listens


@dataclass(frozen=True)
class ChatOptions:
    """How to start.

    Attributes:
        model: settings of the model to load at once (`model`, `memory_budget`, ...), None = the one used last.
        model_options: settings of every model that is loaded from the page.
        model_folders: where to look for models; empty: the usual places.
        port: 0 = the one used last if it is free, else any free one.
        show: `window`, `browser`, `none` or `auto` (a window where pywebview is installed, else the browser).
        data: folder of conversations; None = the platform's.
    """

    model: Mapping[str, Any] | None = None
    model_options: Mapping[str, Any] = field(default_factory=dict)
    model_folders: tuple[Path, ...] = ()
    port: int = 0
    show: str = "auto"
    data: Path | None = None


def running_at(folder: Path) -> str | None:
    """The address of a program that already serves this data folder, if one answers there."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        url = str(json.loads((folder / RUNNING).read_text(encoding="utf-8"))["url"])
        if not url.startswith("http://127.0.0.1:"):
            return None
        with urllib.request.urlopen(f"{url}/chat/api/state", timeout=2) as reply:
            if json.load(reply)["data_folder"] == str(folder):
                return url
    return None


def _listen(service: ChatService, port: int) -> tuple[Any, Any]:
    """(settings, socket): the port asked for, or the one used last, so that a tab left open finds us again."""
    from ..server import ServerSettings, bind

    def at(number: int) -> tuple[Any, Any]:
        settings = ServerSettings(host="127.0.0.1", port=number, shutdown_timeout=SHUTDOWN_SECONDS)
        return settings, bind(settings)

    if port:
        return at(port)
    last = service.store.preference("port", 0)
    if isinstance(last, int) and 1024 <= last <= 65535:
        with contextlib.suppress(ArgumentError):
            return at(last)
    settings, listener = at(0)
    service.store.set_preference("port", listener.getsockname()[1])
    return settings, listener


def _models(service: ChatService, options: ChatOptions) -> list[Any]:
    """Settings of the model to load at once: the one asked for, else the one used last."""
    from ..server import ModelSettings

    chosen = options.model
    if chosen is None:
        kept = service.remembered()
        chosen = None if kept is None else {"model": kept.pop("path"), **kept}
    if chosen is None:
        return []
    return [ModelSettings(**{**options.model_options, **chosen})]


@contextlib.contextmanager
def running(options: ChatOptions, quit: Callable[[], None] | None = None, bound: Callable[[str], None] | None = None) -> Iterator[str]:
    """The server in a thread of its own; gives its address.

    Args:
        quit: what the page's Quit does; None: there is none.
        bound: gets the address before a model is loaded: llama_cpp mutes the standard streams of the process meanwhile.

    Raises:
        ArgumentError: the port is taken. StoreError: the data folder cannot be used.
    """
    from ..server import ServerThread, create_app
    from .routes import make_router

    folder = (options.data or paths.data_folder()).expanduser().absolute()
    service = ChatService(folder, model_folders=options.model_folders, model_options=options.model_options, quit=quit)
    marker = folder / RUNNING
    try:
        models = _models(service, options)
        settings, listener = _listen(service, options.port)
        app = create_app(settings, models, extra_routers=[make_router(service)], page=PAGE)
        thread = ServerThread(app, listener)
        if bound is not None:
            bound(thread.url)
        with thread as url:
            marker.write_text(json.dumps({"url": url, "pid": os.getpid()}), encoding="utf-8")
            try:
                yield url
            finally:
                marker.unlink(missing_ok=True)
    finally:
        service.close()


# ---- showing it -----------------------------------------------------------------------------------------------------------


def has_display() -> bool:
    """Whether a browser window can appear; a text browser would take the terminal."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def choose(show: str) -> str:
    """`window`, `browser` or `none` for what was asked.

    Raises:
        LibraryError: a window was asked for and pywebview is not installed.
    """
    installed = importlib.util.find_spec("webview") is not None
    if show == "window" and not installed:
        raise LibraryError("an app window needs pywebview, which is not installed", remedy="pip install 'leanstream-gguf[window]'")
    if show != "auto":
        return show
    if not has_display():
        return "none"
    return "window" if installed else "browser"


def show_window(url: str, stop: threading.Event) -> bool:
    """Show the page in a window until that is closed or `stop` is set; False if this system's window toolkit cannot."""
    import webview

    # It logs a traceback for every toolkit that is not there; one line from us says as much.
    logging.getLogger("pywebview").setLevel(logging.CRITICAL)
    webview.settings["ALLOW_DOWNLOADS"] = True  # exported conversations
    closed = threading.Event()
    try:
        window = webview.create_window("LeanStream", url, width=1280, height=840, min_size=(375, 520), text_select=True)

        def close_when_stopped() -> None:
            while not closed.is_set():
                if stop.wait(0.2) and window is not None and not closed.is_set():
                    window.destroy()
                    return

        webview.start(close_when_stopped, icon=str(PAGE / "icon-256.png"))
    except Exception as error:  # its many backends each raise their own
        print(f"leanstream: no app window ({error}); using the browser", file=sys.stderr)
        return False
    finally:
        closed.set()
    return True


@contextlib.contextmanager
def _until_stopped(stop: threading.Event) -> Iterator[None]:
    """SIGINT and SIGTERM set the event."""

    def handler(number: int, frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def run(options: ChatOptions, started: Callable[[str, str], None]) -> int:
    """Start, show the page, and stay until the window is closed, the page says so, or a signal comes.

    Args:
        started: called with the address and how it is shown.

    Raises:
        LeanStreamError: it cannot be started.
    """
    show = choose(options.show)
    folder = (options.data or paths.data_folder()).expanduser().absolute()
    already = running_at(folder) if options.model is None and not options.port else None
    if already is not None and show != "none":
        started(already, show)
        if show == "browser" or not show_window(already, threading.Event()):
            webbrowser.open(already)
        return 0
    stop = threading.Event()
    with _until_stopped(stop), running(options, stop.set, lambda url: started(url, show)) as url:
        if show == "window" and show_window(url, stop):
            return 0
        if show in ("window", "browser"):
            webbrowser.open(url)
        while not stop.wait(1.0):  # a bounded wait lets signals in on every system
            pass
    return 0
