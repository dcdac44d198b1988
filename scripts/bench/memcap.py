#!/usr/bin/env python3
"""Run a command in a memory cgroup of a fixed size, with the model file out of the page cache, and report what it used.

    memcap.py --limit 900MiB --evict model.gguf -- leanstream run -m model.gguf -p Hello --memory 900MiB

Needs the right to create cgroups (root, or a delegated v2 group). The report is one JSON line on stderr or in --json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import page_cache

SYS_ROOT = Path("/sys/fs/cgroup")
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes from "900MiB", "2GiB" or a plain number."""
    for unit, factor in _UNITS.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    return int(text)


def _rows(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return {key: int(value) for key, value in (line.split()[:2] for line in lines if " " in line)}


def _number(path: Path) -> int:
    text = path.read_text(encoding="utf-8").strip()
    return int(text) if text.isdigit() else 0


class MemoryGroup:
    """A cgroup with a memory limit and no swap; a context manager that removes the group."""

    version: int
    folder: Path

    def __init__(self, limit_bytes: int, root: Path = SYS_ROOT) -> None:
        self.limit_bytes = limit_bytes
        name = f"leanstream-bench-{os.getpid()}-{time.monotonic_ns()}"
        self.version = 1 if (root / "memory" / "memory.limit_in_bytes").exists() else 2
        if self.version == 2 and not (root / "cgroup.controllers").exists():
            raise RuntimeError(f"no memory cgroup under {root}; is /sys/fs/cgroup mounted?")
        self.folder = (root / "memory" if self.version == 1 else root) / name
        if self.version == 2:
            _write(root / "cgroup.subtree_control", "+memory")
        self.folder.mkdir()
        for file, value in self._limits():
            if (self.folder / file).exists():
                _write(self.folder / file, value)

    def _limits(self) -> list[tuple[str, str]]:
        limit = str(self.limit_bytes)
        if self.version == 1:
            return [("memory.limit_in_bytes", limit), ("memory.memsw.limit_in_bytes", limit), ("memory.swappiness", "0")]
        return [("memory.max", limit), ("memory.swap.max", "0")]

    def enter(self) -> None:
        """Move the calling process in; for preexec_fn."""
        _write(self.folder / "cgroup.procs", str(os.getpid()))

    def snapshot(self) -> dict[str, int]:
        """Bytes now and at the peak, and how often the limit was hit."""
        return self._snapshot_v1() if self.version == 1 else self._snapshot_v2()

    def _snapshot_v1(self) -> dict[str, int]:
        stat, oom = _rows(self.folder / "memory.stat"), _rows(self.folder / "memory.oom_control")
        return {
            "usage_bytes": _number(self.folder / "memory.usage_in_bytes"),
            "peak_bytes": _number(self.folder / "memory.max_usage_in_bytes"),
            "anon_bytes": stat.get("rss", 0),
            "shmem_bytes": stat.get("shmem", 0),
            "kernel_bytes": _number(self.folder / "memory.kmem.usage_in_bytes"),
            "file_bytes": stat.get("cache", 0) - stat.get("shmem", 0),
            "limit_hits": _number(self.folder / "memory.failcnt"),
            "oom_kills": oom.get("oom_kill", 0),
        }

    def _snapshot_v2(self) -> dict[str, int]:
        stat, events = _rows(self.folder / "memory.stat"), _rows(self.folder / "memory.events")
        peak = self.folder / "memory.peak"
        usage = _number(self.folder / "memory.current")
        return {
            "usage_bytes": usage,
            "peak_bytes": _number(peak) if peak.exists() else usage,
            "anon_bytes": stat.get("anon", 0),
            "shmem_bytes": stat.get("shmem", 0),
            "kernel_bytes": stat.get("kernel", 0),
            "file_bytes": stat.get("file", 0) - stat.get("shmem", 0),
            "limit_hits": events.get("max", 0),
            "oom_kills": events.get("oom_kill", 0),
        }

    def __enter__(self) -> MemoryGroup:
        return self

    def __exit__(self, *_: object) -> None:
        for _attempt in range(50):
            try:
                self.folder.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:  # the kernel still empties the group
                time.sleep(0.1)


def _write(path: Path, value: str) -> None:
    try:
        path.write_text(value, encoding="utf-8")
    except OSError as error:
        raise RuntimeError(f"cannot write {value} to {path}: {error.strerror}; run as root or in a delegated group") from error


class Watcher:
    """Samples a group from a thread; keeps the largest unreclaimable sum and the course of the limit's hit counter."""

    def __init__(self, group: MemoryGroup, interval_s: float = 0.1) -> None:
        self._group, self._interval_s = group, interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._start = time.monotonic()
        self.peak_owned_bytes = 0
        self.course: list[tuple[float, int]] = []

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.look()

    def look(self) -> dict[str, int]:
        """One sample: also called between the measured parts of a run."""
        now = self._group.snapshot()
        owned = now["anon_bytes"] + now["shmem_bytes"] + now["kernel_bytes"]
        self.peak_owned_bytes = max(self.peak_owned_bytes, owned)
        if not self.course or self.course[-1][1] != now["limit_hits"]:
            self.course.append((round(time.monotonic() - self._start, 1), now["limit_hits"]))
        return now

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def report(self) -> dict[str, Any]:
        """The last sample with the peaks; `limit_hits_course` lists [seconds, hits] where the counter moved."""
        last = self.look()
        return {
            "cgroup_version": self._group.version,
            "limit_bytes": self._group.limit_bytes,
            **last,
            "peak_owned_bytes": self.peak_owned_bytes,  # anonymous + shared + kernel memory
            "within_limit": self.peak_owned_bytes <= self._group.limit_bytes and last["oom_kills"] == 0,
            "limit_hits_course": self.course[-200:],
        }


def run(command: list[str], limit_bytes: int, evicted: list[Path]) -> dict[str, Any]:
    """Run the command under the limit and return the report with its exit code."""
    left = {str(path): page_cache.evict(path) for path in evicted}
    with MemoryGroup(limit_bytes) as group:
        start = time.monotonic()
        with Watcher(group) as watcher:
            code = subprocess.run(command, preexec_fn=group.enter, check=False).returncode
        report = watcher.report()
    return {"exit_code": code, "seconds": round(time.monotonic() - start, 3), "left_in_page_cache": left, **report}


def main() -> int:
    """Parse the command line, run, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", required=True, type=parse_size, help="size of the group, e.g. 900MiB")
    parser.add_argument("--evict", action="append", default=[], type=Path, metavar="FILE", help="put FILE out of the page cache first")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write the report (stderr)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command, after --")
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("no command given")
    report = run(command, args.limit, args.evict)
    line = json.dumps(report)
    if args.json:
        args.json.write_text(line + "\n", encoding="utf-8")
    else:
        print(line, file=sys.stderr)
    return int(report["exit_code"]) if report["exit_code"] >= 0 else 128 - int(report["exit_code"])


if __name__ == "__main__":
    sys.exit(main())
