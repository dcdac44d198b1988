"""What a result was measured on: commit, pin, processor, memory, kernel, drive."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _pin() -> str:
    """The pinned llama.cpp commit."""
    text = (ROOT / "vendor" / "llama.cpp.toml").read_text(encoding="utf-8")
    return str(tomllib.loads(text)["llama_cpp"]["commit"])


def _first(path: str, pattern: str) -> str:
    try:
        found = re.search(pattern, Path(path).read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return "unknown"
    return found[1].strip() if found else "unknown"


def drive_of(path: Path) -> dict[str, str]:
    """Mount point, file system and device of a file."""
    best = ("", "unknown", "unknown")
    target = str(path.resolve())
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        device, mount, kind = line.split()[:3]
        inside = target == mount or target.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best[0]):
            best = (mount, kind, device)
    return {"file_system": best[1], "device": best[2]}


def describe(model: Path | None = None) -> dict[str, Any]:
    """The keys that every result line starts with."""
    changed = _git("status", "--porcelain", "--", "leanstream_gguf", "patches", "vendor")
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(changed),
        "pin": _pin(),
        "machine": {
            "processor": _first("/proc/cpuinfo", r"^model name\s*:\s*(.+)$"),
            "n_cpus": len(os.sched_getaffinity(0)),
            "memory_mib": int(_first("/proc/meminfo", r"^MemTotal:\s+(\d+)").replace("unknown", "0")) // 1024,
            "kernel": platform.release(),
            "load_1min": round(os.getloadavg()[0], 2),
        },
        "drive": drive_of(model) if model else None,
    }
