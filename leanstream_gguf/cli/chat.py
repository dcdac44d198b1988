"""`leanstream chat`: the chat in an app window, the browser or the terminal."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from . import _common

_DESCRIPTION = """\
Chat with a model on this computer. Starts a server on a free loopback port and shows its page in an app window (with
pywebview installed) or the browser; --tui stays in the terminal. Without a model the page helps to get one.
Conversations are kept on this computer, in one file.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        help="chat in a window, the browser or the terminal",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-m", "--model", metavar="FILE", help="GGUF file to load; default: the one used last, if there is one")
    parser.add_argument(
        "--models", metavar="FOLDER", action="append", default=[], help="look for models here; may be given several times"
    )
    parser.add_argument(
        "--data", metavar="FOLDER", type=Path, help="where conversations are kept; default: LEANSTREAM_DATA or the system's place"
    )
    parser.add_argument("--port", type=int, default=0, metavar="N", help="listen here; default: the port used last, else a free one")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--window", dest="show", action="store_const", const="window", help="an app window (pip install 'leanstream-gguf[window]')"
    )
    how.add_argument("--browser", dest="show", action="store_const", const="browser", help="the browser")
    how.add_argument("--no-open", dest="show", action="store_const", const="none", help="only serve, and print the address")
    how.add_argument("--tui", action="store_true", help="in the terminal")
    how.add_argument("--install", action="store_true", help="add LeanStream to the system's applications, and leave")
    how.add_argument("--uninstall", action="store_true", help="remove it from there, and leave")
    _common.add_memory(parser)
    _common.add_context(parser)
    _common.add_streaming(parser)
    _common.add_json(parser)
    parser.set_defaults(run=run, show="auto")


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """Settings of every model that is loaded, by their names in ModelSettings; what was not asked for is left out.

    Raises:
        ArgumentError: a value out of range.
    """
    _common.stream_config(args)
    options = {
        "n_ctx": args.ctx,
        "n_batch": args.batch,
        "n_ubatch": args.ubatch,
        "n_threads": args.threads,
        "n_threads_batch": args.threads,
        "flash_attn": args.flash_attn or None,
        "cache_budget": args.cache,
        "policy": args.policy,
        "io_threads": args.io_threads,
        "io_depth": args.io_depth,
        "io_backend": args.io_backend,
        "direct_io": not args.buffered,
        "ring_slots": args.ring_slots,
        "repack": args.repack,
    }
    return {name: value for name, value in options.items() if value is not None}


def _entries(args: argparse.Namespace) -> int:
    from ..chat import desktop

    paths = desktop.install() if args.install else desktop.uninstall()
    if args.json:
        _common.print_json({"files": [str(path) for path in paths]})
    for path in paths:
        _common.note(f"leanstream: {'wrote' if args.install else 'removed'} {path}")
    return 0


def _options(args: argparse.Namespace) -> Any:
    from ..chat.app import ChatOptions

    if not 0 <= args.port <= 65535:
        raise ArgumentError(f"--port must be from 0 to 65535, not {args.port}")
    _common.budget(args)
    options = model_options(args)
    folders = [Path(folder).expanduser() for folder in args.models]
    for folder in folders:
        if not folder.is_dir():
            raise ArgumentError(f"--models {folder} is no folder", path=str(folder))
    model = None
    if args.model is not None:
        model = {"model": os.path.abspath(os.path.expanduser(args.model)), "memory_budget": args.memory}
    return ChatOptions(model, options, tuple(folders), args.port, args.show, args.data)


def run(args: argparse.Namespace) -> int:
    if args.install or args.uninstall:
        return _entries(args)
    if args.tui:
        from ..chat import tui

        return tui.run(args)
    from ..chat import app
    from ..server import require_extra

    require_extra()

    def started(url: str, show: str) -> None:
        if args.json:
            _common.print_json({"url": url, "pid": os.getpid(), "show": show})
        _common.note(f"leanstream: the chat is at {url}" + (" (Ctrl-C ends it)" if show != "window" else ""))

    return app.run(_options(args), started)


def main() -> int:
    """What a double click starts: no terminal may be there."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for as long as the program runs
    from . import main as command

    return command(["chat", *sys.argv[1:]])
