"""`leanstream unpack`: the source out of a lean file."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from . import _common


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "unpack",
        help="turn a lean file back into its source",
        description="Write the GGUF file (or split set) that a lean file was made from, byte for byte; its SHA-256 is compared. Where "
        "--down-type was used, the down projections come in the stored type.",
    )
    parser.add_argument("lean", metavar="IN.lean.gguf", help="file made by `leanstream repack`")
    parser.add_argument("out", metavar="OUT.gguf", help="file to write; a split set gets -00001-of-0000N added")
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    _common.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..repack.unpack import unpack

    _common.require_other_file(args.out, args.lean)
    done = unpack(args.lean, args.out, force=args.force, quiet=args.quiet)
    if args.json:
        _common.print_json(asdict(done))
        return 0
    verdict = "the same bytes as the source (SHA-256)"
    if not done.identical:
        verdict = f"{len(done.requantised)} tensors in another type than the source's"
    for path in done.paths:
        print(f"{path}: {verdict}")
    return 0
