"""`leanstream replay`: every retention policy, and Belady's optimum, over a recorded trace."""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import ArgumentError
from ..settings import POLICIES
from ..units import parse_share
from . import _common

_SHARES = "5%,10%,12.5%,20%,25%,30%,40%,50%,75%"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "replay",
        help="compare retention policies on a recorded trace",
        description="Run the runtime's own retention policies, and Belady's optimum, which knows the future, over a trace of "
        "`leanstream trace` at several cache sizes. Prints misses as a share of uses; no model is needed.",
    )
    parser.add_argument("trace", metavar="TRACE", help="file written by `leanstream trace`")
    known = ["belady", *POLICIES]
    parser.add_argument("--policies", default=",".join(known), metavar="LIST", help=f"of {', '.join(known)}; default all")
    parser.add_argument(
        "--shares", default=_SHARES, metavar="LIST", help="cache sizes as shares of all units; default " + _SHARES.replace("%", "%%")
    )
    parser.add_argument("--warmup", type=int, default=256, metavar="N", help="tokens that are not counted; default 256")
    parser.add_argument("--plot", metavar="FILE", help="draw the curve to this file (.svg, .png, .pdf); needs the extra `plot`")
    _common.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from .. import replay

    shares = [share for share in map(parse_share, args.shares.split(",")) if share]
    if len(shares) != len(args.shares.split(",")) or max(shares) > 1:
        raise ArgumentError(f"--shares takes shares above 0 % and up to 100 % such as 10%,25%, not {args.shares!r}")
    if args.warmup < 0:
        raise ArgumentError("--warmup must be at least 0")
    policies = args.policies.split(",")
    found = replay.curve(
        args.trace, policies, shares, n_warmup_tokens=args.warmup, progress=lambda name: _common.note(f"replaying {name}")
    )
    if args.plot:
        replay.plot(found, args.plot, f"Misses by cache size, {args.trace}")
    if args.json:
        _common.print_json({"trace": args.trace, "n_warmup_tokens": args.warmup, **found.to_dict()})
    else:
        print(text_of(found))
    return 0


def text_of(found: Any) -> str:
    """Misses by policy and size, and how far `lean` comes towards the optimum."""
    rows: list[tuple[str, ...]] = [("cache", *(f"{share * 100:g} %" for share in found.shares), "ns/use")]
    for name, values in found.misses.items():
        rows.append((name, *(f"{v:.4f}" for v in values), f"{sum(found.ns_per_use[name]) / len(values):.0f}"))
    closed = [found.gap_closed("lean", i) for i in range(len(found.shares))]
    if any(value is not None for value in closed):
        rows.append(("gap closed by lean", *("-" if v is None else f"{v * 100:.0f} %" for v in closed), ""))
    return "misses, share of uses\n" + _common.table(rows)
