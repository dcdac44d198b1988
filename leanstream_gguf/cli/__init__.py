"""The `leanstream` command: a table of sub-commands, each a module with `add_parser()` and `run()`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

# name -> module. Modules import what is heavy inside run(), so that --help answers at once.
COMMANDS = {
    "run": ".run",
    "chat": ".chat",
    "serve": ".serve",
    "plan": ".plan",
    "inspect": ".inspect",
    "verify": ".verify",
    "trace": ".trace",
    "replay": ".replay",
    "doctor": ".doctor",
    "calibrate": ".calibrate",
    "repack": ".repack",
    "unpack": ".unpack",
}

_EPILOG = """\
sizes: 900MiB, 2GiB, 1.5GB or a number of bytes; K, M, G alone are powers of 1024.
exit status: 0 success; 1 verification failed or another error; 2 wrong arguments; 3 the model file; 4 not supported;
  5 too little memory; 6 reading failed during use; 7 the native libraries; 8 writing failed; 130 interrupted.

examples:
  leanstream plan -m model.gguf                       what fits here, and how fast it would be
  leanstream run -m model.gguf -p "Once upon a time" --memory 2GiB
  leanstream chat                                     a window or page that finds your models
  leanstream serve -m model.gguf --memory 2GiB        for OpenAI's clients, on 127.0.0.1:8000
  leanstream verify -m model.gguf --memory min        prove that streaming changes no bit
  leanstream calibrate -m model.gguf                  which neurons fire
  leanstream repack model.gguf                        then: model.lean.gguf, with neurons or experts to read one by one
"""


class _JsonParser(argparse.ArgumentParser):
    """Wrong usage is a JSON document on standard output too."""

    def error(self, message: str) -> NoReturn:
        from ..errors import ArgumentError
        from ._common import print_json

        print_json({"error": ArgumentError(message).to_dict()})
        super().error(message)


def _parser(*, json: bool = False) -> argparse.ArgumentParser:
    from .. import __version__

    parser = (_JsonParser if json else argparse.ArgumentParser)(
        prog="leanstream",
        description="Run GGUF models larger than the memory you give them, with the output they always had.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"leanstream {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in COMMANDS.values():
        importlib.import_module(module, __name__).add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; only --help and wrong usage exit by themselves."""
    from ._common import guarded

    words = sys.argv[1:] if argv is None else argv
    return guarded(_parser(json="--json" in words).parse_args(words))
