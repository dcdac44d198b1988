"""probe.py: memory limits from faked /proc and /sys, and sane figures from this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from leanstream_gguf import probe

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_cgroup_v2_takes_every_limit_of_the_hierarchy(tmp_path: Path) -> None:
    proc = write(tmp_path / "proc", {"self/cgroup": "0::/user/job\n"})
    sys_root = write(
        tmp_path / "cgroup",
        {
            "user/memory.max": f"{4 * GIB}\n",
            "user/memory.stat": f"anon {3 * GIB}\nfile 5\nkernel 7\nshmem 0\n",
            "user/job/memory.max": "max\n",
        },
    )
    groups = probe.cgroup_limits(proc, sys_root)
    assert [(group.version, group.limit_bytes) for group in groups] == [(2, 4 * GIB)]
    assert 2.5 * GIB < groups[0].used_by_others_bytes <= 3 * GIB + 7


def test_cgroup_v1(tmp_path: Path) -> None:
    proc = write(tmp_path / "proc", {"self/cgroup": "5:cpu,cpuacct:/x\n3:memory:/docker/abc\n0::/\n"})
    limits = {"memory/docker/abc/memory.limit_in_bytes": f"{GIB}\n", "memory/memory.limit_in_bytes": "9223372036854771712\n"}
    groups = probe.cgroup_limits(proc, write(tmp_path / "cgroup", limits))
    assert [(group.version, group.limit_bytes) for group in groups] == [(1, GIB)]


def test_container_that_sees_its_group_as_the_root(tmp_path: Path) -> None:
    proc = write(tmp_path / "proc", {"self/cgroup": "0::/not/visible/here\n"})
    groups = probe.cgroup_limits(proc, write(tmp_path / "cgroup", {"memory.max": f"{GIB}\n"}))
    assert [group.limit_bytes for group in groups] == [GIB]


def test_no_cgroup(tmp_path: Path) -> None:
    assert probe.cgroup_limits(tmp_path, tmp_path) == []


@pytest.mark.parametrize(("free", "budget"), [(100 << 20, 84 << 20), (4 * GIB, int(3.6 * GIB)), (64 * GIB, 63 * GIB)])
def test_automatic_budget_keeps_a_stated_reserve(monkeypatch: pytest.MonkeyPatch, free: int, budget: int) -> None:
    monkeypatch.setattr(probe, "available_memory", lambda: probe.MemoryLimit(free, "the machine"))
    monkeypatch.setattr(probe, "cgroup_limits", lambda: [])
    found = probe.automatic_budget()
    assert found.n_bytes == pytest.approx(budget, abs=1)
    assert "the machine" in found.reason and "reserve" in found.reason


def test_automatic_budget_takes_the_tightest_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [probe.Cgroup("/a", 2, 2 * GIB, GIB), probe.Cgroup("/", 2, 8 * GIB, 0)]
    monkeypatch.setattr(probe, "available_memory", lambda: probe.MemoryLimit(16 * GIB, "the machine"))
    monkeypatch.setattr(probe, "cgroup_limits", lambda: groups)
    found = probe.automatic_budget()
    assert found.n_bytes == pytest.approx(0.9 * GIB, abs=1)
    assert "/a" in found.reason and "used by others" in found.reason


def test_this_machine() -> None:
    assert 1 << 20 < probe.resident_bytes() <= probe.peak_resident_bytes() + (64 << 20)
    assert probe.cpu_count() >= 1
    assert probe.cpu_model()
    limit = probe.available_memory()
    assert limit.n_bytes > 0 and limit.reason


def test_file_system_of(tmp_path: Path) -> None:
    mount, kind = probe.filesystem_of(tmp_path)
    assert kind and (kind == "unknown" or str(tmp_path.resolve()).startswith(mount))


@pytest.mark.native
def test_drive_rate(native: None, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4 << 20))
    rate = probe.drive_rate(str(path), 64 << 10, 4, duration_ms=30)
    assert rate.bytes_per_second > 0
    assert rate.reads_per_second == pytest.approx(rate.bytes_per_second / (64 << 10), rel=0.1)
