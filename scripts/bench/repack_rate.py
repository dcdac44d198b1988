#!/usr/bin/env python3
"""Repacking against the drive: bytes a second of a lean file being written, over those of a plain file of the same size.

The plain file is written in large pieces and synced, once through the page cache and once past it, and the faster way counts.
Repacking reads as much as it writes: a plain copy past the page cache, reading and writing at once, says how much of that rate can be
had. The source is out of the page cache at the start of each. Peak memory is that of a process of its own. One JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe
from page_cache import evict

from leanstream_gguf.repack.direct import allocate

PIECE = 8 << 20
AT_LEAST = 0.6
MEMORY_LIMIT = 1 << 30


def plain_rate(path: Path, n_bytes: int, direct: bool) -> float:
    """Bytes a second of a file written in order and synced."""
    piece = allocate(PIECE)
    piece[:] = np.frombuffer(os.urandom(PIECE), np.uint8)
    n_bytes = n_bytes // PIECE * PIECE
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0))
    start = time.monotonic()
    os.ftruncate(file, n_bytes)
    for at in range(0, n_bytes, PIECE):
        os.pwrite(file, piece.data, at)
    os.fsync(file)
    seconds = time.monotonic() - start
    os.close(file)
    path.unlink()
    return n_bytes / seconds


def copy_rate(source: Path, path: Path) -> float:
    """The same while another thread reads the source at its own pace, whichever takes longer."""

    def read() -> None:
        file, piece = os.open(source, os.O_RDONLY | os.O_DIRECT), allocate(PIECE)
        for at in range(0, n_bytes, PIECE):
            os.preadv(file, [piece.data], at)
        os.close(file)

    n_bytes, start = source.stat().st_size // PIECE * PIECE, time.monotonic()
    reader = threading.Thread(target=read)
    reader.start()
    plain_rate(path, n_bytes, direct=True)
    reader.join()
    return n_bytes / (time.monotonic() - start)


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
        cached, direct = (plain_rate(folder / "repack-rate.plain", document["bytes"], direct) for direct in (False, True))
        checked = document["source_bytes"] / document["read_back_seconds"]
        copied = copy_rate(args.source, folder / "repack-rate.plain")
        sample = {"bytes_per_second": rate, "plain_cached": cached, "plain_direct": direct, "copy": copied}
        sample |= {"ratio": rate / max(cached, direct), "of_copy": rate / copied}
        samples.append({**sample, "read_back": checked, "peak_rss_bytes": peak})
        print(json.dumps(samples[-1]), file=sys.stderr, flush=True)
    ratios = sorted(sample["ratio"] for sample in samples)
    of_copy = sorted(sample["of_copy"] for sample in samples)[len(samples) // 2]
    result: dict[str, Any] = {"benchmark": args.name, **describe(args.source)}
    result["model"] = {"name": args.source.name, "bytes": args.source.stat().st_size}
    result |= {"arguments": more, "samples": samples, "ratio": ratios[len(ratios) // 2], "of_copy": of_copy, "at_least": AT_LEAST}
    result["peak_rss_bytes"] = max(sample["peak_rss_bytes"] for sample in samples)
    result["met"] = result["ratio"] >= AT_LEAST and result["peak_rss_bytes"] <= MEMORY_LIMIT
    print(json.dumps(result))
    if args.save:
        with (Path(__file__).parent / "results" / f"{args.name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
