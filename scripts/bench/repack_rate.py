#!/usr/bin/env python3
"""Repacking against the drive: bytes a second of a lean file being written, over those of a plain file of the same size.

The plain file is written in large pieces and synced; so is the lean file. The source is out of the page cache at the start of each.
Peak memory is that of a process of its own. One JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import describe
from page_cache import evict

PIECE = 8 << 20
AT_LEAST = 0.6
MEMORY_LIMIT = 1 << 30


def plain_rate(path: Path, n_bytes: int) -> float:
    """Bytes a second of a file written in order and synced."""
    piece = os.urandom(PIECE)
    start = time.monotonic()
    with path.open("wb", buffering=0) as file:
        for _ in range(n_bytes // PIECE):
            file.write(piece)
        os.fsync(file.fileno())
    seconds = time.monotonic() - start
    path.unlink()
    return n_bytes // PIECE * PIECE / seconds


def repack(source: Path, out: Path, arguments: list[str]) -> tuple[dict[str, Any], int]:
    """(its JSON document, peak resident bytes) of one `leanstream repack`."""
    command = [sys.executable, "-m", "leanstream_gguf", "repack", str(source), str(out), "--quiet", "--json", "--force", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    out.unlink()
    return json.loads(done.stdout.splitlines()[-1]), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--work", type=Path, help="folder on the drive to measure; default: the source's")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--name", default="repack-rate", help="of the result")
    parser.add_argument("--save", action="store_true", help="append the line to results/NAME.jsonl")
    args, more = parser.parse_known_args()
    folder = args.work or args.source.parent
    samples = []
    for _ in range(args.samples):
        evict(args.source)
        document, peak = repack(args.source, folder / "repack-rate.lean.gguf", more)
        rate = document["bytes"] / document["write_seconds"]
        plain = plain_rate(folder / "repack-rate.plain", document["bytes"])
        checked = document["source_bytes"] / document["read_back_seconds"]
        samples.append({"bytes_per_second": rate, "plain": plain, "ratio": rate / plain, "read_back": checked, "peak_rss_bytes": peak})
        print(json.dumps(samples[-1]), file=sys.stderr, flush=True)
    ratios = sorted(sample["ratio"] for sample in samples)
    result: dict[str, Any] = {"benchmark": args.name, **describe(args.source)}
    result["model"] = {"name": args.source.name, "bytes": args.source.stat().st_size}
    result |= {"arguments": more, "samples": samples, "ratio": ratios[len(ratios) // 2], "at_least": AT_LEAST}
    result["peak_rss_bytes"] = max(sample["peak_rss_bytes"] for sample in samples)
    result["met"] = result["ratio"] >= AT_LEAST and result["peak_rss_bytes"] <= MEMORY_LIMIT
    print(json.dumps(result))
    if args.save:
        with (Path(__file__).parent / "results" / f"{args.name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
