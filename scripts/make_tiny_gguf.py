#!/usr/bin/env python3
"""Write the toy models used by the tests: deterministic, random weights, 1 to 5 MiB each, every tensor layout."""

from __future__ import annotations

import argparse
from pathlib import Path

from toygguf.models import MODELS, write_model


def main() -> None:
    """Write the named models, or all of them."""
    listing = "\n".join(f"  {name:16} {make.__doc__}" for name, make in MODELS.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"models:\n{listing}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where to write NAME.gguf")
    parser.add_argument("names", nargs="*", metavar="NAME", help="models to write (all)")
    parser.add_argument("--shards", type=int, default=1, metavar="N", help="write split sets of N files")
    args = parser.parse_intermixed_args()
    unknown = set(args.names) - set(MODELS)
    if unknown:
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.names or MODELS:
        path = write_model(name, args.folder, args.shards)
        print(f"{path}  {path.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
