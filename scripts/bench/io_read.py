#!/usr/bin/env python3
"""Bandwidth of a drive by read size and depth, through the runtime's own reader: one JSON result line.

io_read.py model.gguf --sizes 4KiB,64KiB,1MiB --depths 1,4,16
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import machine
import ratio
from memcap import parse_size

from leanstream_gguf import probe

BACKENDS = {"auto": 0, "pread": 1, "uring": 2}


def measure(
    path: Path, block_bytes: int, depth: int, sequential: bool, samples: int, duration_ms: int, backend: str
) -> dict[str, Any]:
    """Several samples of one point, with their spread."""
    rates = [
        probe.drive_rate(str(path), block_bytes, depth, sequential=sequential, duration_ms=duration_ms, io_backend=BACKENDS[backend])
        for _ in range(samples)
    ]
    return {
        "block_bytes": block_bytes,
        "depth": depth,
        "sequential": sequential,
        "direct": all(rate.direct for rate in rates),
        "bytes_per_second": ratio.spread([rate.bytes_per_second for rate in rates]),
        "reads_per_second": ratio.spread([rate.reads_per_second for rate in rates]),
    }


def ceiling(path: Path, duration_ms: int = 1000) -> float:
    """The most bytes per second that this drive gave just now, over the shapes of read that streaming uses."""
    points = [(1 << 20, 1), (1 << 20, 4), (1 << 20, 16), (4 << 20, 4), (4 << 20, 8)]
    return max(
        probe.drive_rate(str(path), size, depth, sequential=True, duration_ms=duration_ms // len(points)).bytes_per_second
        for size, depth in points
    )


def reads_like(path: Path, sample: dict[str, Any], duration_ms: int = 500) -> float:
    """Reads per second that this drive gave just now for random reads as large as those of a measured sample."""
    counters = sample["counters"]
    size = max(4096, counters["read_bytes"] // max(1, counters["n_reads"]) // 4096 * 4096)
    rates = [probe.drive_rate(str(path), size, depth, duration_ms=duration_ms // 2).reads_per_second for depth in (16, 64)]
    return max(rates)


def main() -> None:
    """Measure the grid and print the result line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a large file on the drive, read only")
    parser.add_argument("--sizes", default="4KiB,16KiB,64KiB,256KiB,1MiB,4MiB")
    parser.add_argument("--depths", default="1,4,16")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--duration-ms", type=int, default=300)
    parser.add_argument("--backend", choices=BACKENDS, default="auto")
    parser.add_argument("--sequential", action="store_true", help="in file order (random)")
    args = parser.parse_args()
    points = [
        measure(args.file, parse_size(size), int(depth), args.sequential, args.samples, args.duration_ms, args.backend)
        for size in args.sizes.split(",")
        for depth in args.depths.split(",")
    ]
    settings = {"backend": args.backend, "samples": args.samples, "duration_ms": args.duration_ms}
    print(json.dumps({"benchmark": "io_read", **machine.describe(args.file), "settings": settings, "points": points}))


if __name__ == "__main__":
    main()
