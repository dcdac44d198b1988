"""What this machine offers: memory, limits, processors. Each figure comes with the reason it has that value.

Reads /proc and /sys on Linux, asks the system elsewhere; needs no native library except for `drive_rate()`.
All amounts are bytes.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .units import format_bytes

_UNLIMITED = 1 << 60  # cgroup v1 writes a huge number for "no limit"
RESERVE_SHARE = 0.10  # of the limit, kept free by an automatic budget
RESERVE_MAX = 1 << 30
RESERVE_MIN = 16 << 20


@dataclass(frozen=True)
class MemoryLimit:
    """The most memory a process should take, and why."""

    n_bytes: int
    reason: str


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _read_int(path: Path) -> int | None:
    text = (_read_text(path) or "").strip()
    return int(text) if text.isdigit() else None


def resident_bytes() -> int:
    """Resident set of this process, file mappings included; 0 where the system does not say."""
    text = _read_text(Path("/proc/self/statm"))
    if text is not None:
        return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if sys.platform == "win32":
        return _windows_working_set()[0]
    try:
        out = subprocess.run(["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, text=True, check=True)
        return int(out.stdout) * 1024
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0


def peak_resident_bytes() -> int:
    """Largest resident set of this process so far; 0 where the system does not say."""
    match = re.search(r"VmHWM:\s*(\d+) kB", _read_text(Path("/proc/self/status")) or "")
    if match:
        return int(match[1]) * 1024
    if sys.platform == "win32":
        return _windows_working_set()[1]
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _windows_working_set() -> tuple[int, int]:
    """(current, peak) working set from GetProcessMemoryInfo."""

    class Counters(ctypes.Structure):
        _fields_ = [("cb", ctypes.c_ulong), ("faults", ctypes.c_ulong)] + [
            (name, ctypes.c_size_t) for name in ("peak", "now", "q1", "q2", "q3", "q4", "pagefile", "peak_pagefile")
        ]

    counters = Counters(cb=ctypes.sizeof(Counters))
    windll = ctypes.windll  # type: ignore[attr-defined]
    windll.kernel32.GetCurrentProcess.restype = ctypes.c_void_p
    process = ctypes.c_void_p(windll.kernel32.GetCurrentProcess())
    windll.psapi.GetProcessMemoryInfo(process, ctypes.byref(counters), counters.cb)
    return counters.now, counters.peak


def meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes; empty elsewhere."""
    rows = re.findall(r"^(\w+):\s+(\d+) kB", _read_text(Path("/proc/meminfo")) or "", re.MULTILINE)
    return {name: int(value) * 1024 for name, value in rows}


def available_memory() -> MemoryLimit:
    """What the machine could give without swapping, this process included."""
    info = meminfo()
    if "MemAvailable" in info:
        total = info["MemAvailable"] + resident_bytes()
        return MemoryLimit(total, f"{format_bytes(info['MemAvailable'])} available, and what this process holds already")
    if sys.platform == "darwin":
        out = subprocess.run(["sysctl", "-n", "hw.memsize"], capture_output=True, text=True, check=True)
        return MemoryLimit(int(out.stdout) * 3 // 4, "three quarters of the memory installed")
    if sys.platform == "win32":
        return _windows_available()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return MemoryLimit(total // 2, "half of the memory installed: the system does not say what is available")


def _windows_available() -> MemoryLimit:
    class Status(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ulong), ("load", ctypes.c_ulong)] + [
            (name, ctypes.c_ulonglong) for name in ("total", "available", "p1", "p2", "v1", "v2", "x")
        ]

    status = Status(length=ctypes.sizeof(Status))
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # type: ignore[attr-defined]
    return MemoryLimit(status.available + resident_bytes(), "memory reported as available by the system")


@dataclass(frozen=True)
class Cgroup:
    """One memory control group: its limit, and what others in it use that cannot be reclaimed."""

    path: str
    version: int
    limit_bytes: int
    used_by_others_bytes: int


def _cgroup_dirs(proc: Path, sys_root: Path) -> list[tuple[int, Path]]:
    """(version, directory) of the memory controller and all its ancestors, innermost first."""
    found: list[tuple[int, Path]] = []
    for line in (_read_text(proc / "self/cgroup") or "").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            version, root = 2, sys_root
        elif "memory" in controllers.split(","):
            version, root = 1, sys_root / "memory"
        else:
            continue
        inner = root / path.lstrip("/")
        inner = inner if inner.is_dir() else root  # a container sees its own group as the root
        found += [(version, d) for d in (inner, *inner.parents) if d == root or root in d.parents]
    return found


def _unreclaimable(directory: Path) -> int:
    """Anonymous, shared and kernel memory of a group, from memory.stat."""
    rows = dict(line.split() for line in (_read_text(directory / "memory.stat") or "").splitlines() if line.count(" ") == 1)
    if "anon" in rows:
        return sum(int(rows.get(name, 0)) for name in ("anon", "shmem", "kernel"))
    return sum(int(rows.get(name, 0)) for name in ("total_rss", "total_shmem"))


def cgroup_limits(proc: Path = Path("/proc"), sys_root: Path = Path("/sys/fs/cgroup")) -> list[Cgroup]:
    """The memory-limited groups this process is in, innermost first; empty where there are none."""
    groups = []
    for version, directory in _cgroup_dirs(proc, sys_root):
        limit = _read_int(directory / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        if limit is None or limit >= _UNLIMITED:
            continue
        others = max(0, _unreclaimable(directory) - resident_bytes())
        groups.append(Cgroup(str(directory), version, limit, others))
    return groups


def automatic_budget() -> MemoryLimit:
    """The budget that `auto` means: the tightest limit of cgroups and machine, less a reserve for everything else.

    The reserve is a tenth, at least 16 MiB and at most 1 GiB.
    """
    limit = available_memory()
    for group in cgroup_limits():
        free = max(0, group.limit_bytes - group.used_by_others_bytes)
        if free < limit.n_bytes:
            others = f", {format_bytes(group.used_by_others_bytes)} of it used by others" if group.used_by_others_bytes else ""
            reason = f"cgroup v{group.version} limit of {format_bytes(group.limit_bytes)} ({group.path}){others}"
            limit = MemoryLimit(free, reason)
    reserve = min(RESERVE_MAX, max(RESERVE_MIN, int(limit.n_bytes * RESERVE_SHARE)))
    return MemoryLimit(max(0, limit.n_bytes - reserve), f"{limit.reason}; less a reserve of {format_bytes(reserve)}")


def cpu_count() -> int:
    """Processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_model() -> str:
    """Name of the processor, `unknown` where the system does not say."""
    match = re.search(r"^model name\s*:\s*(.+)$", _read_text(Path("/proc/cpuinfo")) or "", re.MULTILINE)
    if match:
        return match[1].strip()
    import platform

    return platform.processor() or "unknown"


def filesystem_of(path: str | os.PathLike[str]) -> tuple[str, str]:
    """(mount point, file system type) of a path; ("", "unknown") where the system does not say."""
    best = ("", "unknown")
    target = os.path.realpath(path)
    for line in (_read_text(Path("/proc/self/mounts")) or "").splitlines():
        parts = line.split()
        mount = parts[1].encode().decode("unicode_escape")
        inside = target == mount or target.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best[0]):
            best = (mount, parts[2])
    return best


def gpus() -> list[dict[str, Any]]:
    """The GPUs that this build of llama.cpp can use, in main_gpu's order (ls_devices_json in leanstream.h).

    Raises:
        LeanStreamError: the library is missing.
    """
    from ._lib import check, native, take_string

    ffi, lib = native()
    out = ffi.new("char **")
    check(lib.ls_devices_json(out))
    found: list[dict[str, Any]] = json.loads(take_string(out))
    return found


@dataclass(frozen=True)
class DriveRate:
    """One measured point: reads of `block_bytes` with `depth` in flight."""

    block_bytes: int
    depth: int
    sequential: bool
    bytes_per_second: float
    reads_per_second: float
    direct: bool  # the page cache was bypassed


def drive_rate(
    path: str, block_bytes: int, depth: int, *, sequential: bool = False, duration_ms: int = 300, io_backend: int = 0
) -> DriveRate:
    """Read `path` for about `duration_ms` and report the rates.

    Raises:
        LeanStreamError: the file cannot be read, or the library is missing.
    """
    from ._lib import check, native

    ffi, lib = native()
    rate, reads, direct = ffi.new("double *"), ffi.new("double *"), ffi.new("uint32_t *")
    encoded = os.fsencode(path)
    check(lib.ls_probe_reads(encoded, block_bytes, depth, int(sequential), duration_ms, io_backend, rate, reads, direct))
    return DriveRate(block_bytes, depth, sequential, rate[0], reads[0], bool(direct[0]))
