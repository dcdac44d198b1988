"""The benchmark tools: ratios, memory groups, the page cache, workloads."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import bounds
import machine
import memcap
import numpy as np
import page_cache
import pytest
import quality
import ratio

ROOT = Path(__file__).resolve().parents[1]
FOUND = {path: json.loads(path.read_text()) for path in sorted((ROOT / "scripts" / "bench" / "workloads").glob("*.json"))}
WORKLOADS = [path for path, workload in FOUND.items() if "task" in workload]  # of decode.py
QUALITY = [path for path, workload in FOUND.items() if "windows" in workload]
CGROUP_V1 = Path("/sys/fs/cgroup/memory")


def test_ratio_of_equal_samples_is_one() -> None:
    measured = ratio.ratio([2.0] * 15, [2.0] * 15)
    assert (measured.ratio, measured.low, measured.high) == (1.0, 1.0, 1.0)


def test_ratio_interval_holds_the_true_ratio() -> None:
    noise = [1.0 + 0.1 * ((7 * i) % 11 - 5) / 5 for i in range(20)]
    measured = ratio.ratio([0.9 * n for n in noise], list(reversed(noise)))
    assert measured.low < 0.9 < measured.high


def test_pairs_are_compared_and_not_medians() -> None:
    drifting = [float(i) for i in range(1, 16)]
    measured = ratio.ratio([0.5 * x for x in drifting], drifting)
    assert measured.low == pytest.approx(0.5) and measured.high == pytest.approx(0.5)


@pytest.mark.parametrize("pair", [([1.0], []), ([], []), ([1.0, 0.0], [1.0, 1.0])])
def test_what_is_no_pair_is_refused(pair: tuple[list[float], list[float]]) -> None:
    with pytest.raises(ValueError):
        ratio.ratio(*pair)


def test_verdict_is_met_where_the_interval_reaches_the_bound() -> None:
    measured = ratio.Ratio(0.96, 0.94, 0.98, 15)
    assert ratio.verdict(measured, 0.97)["met"]
    assert not ratio.verdict(measured, 0.99)["met"]
    assert ratio.verdict(measured, 0.95, at_least=False)["met"]
    assert not ratio.verdict(ratio.Ratio(1, 1, 1, 5), 1)["enough"]


def test_ceiling_takes_the_slower_of_compute_and_drive() -> None:
    plan = {"dense": {"streamed_bytes": 100}, "experts": {"total_bytes": 0, "capacity_bytes": 0}}
    fast = [{"tokens_per_second": 10.0}] * 15
    run = {
        "variants": {"r": {"samples": fast}, "s": {"build": {"plan": plan}, "samples": [{"tokens_per_second": 4.5}] * 15}},
        "drive": [500.0] * 15,
    }
    judged = bounds.judge(run, [{"kind": "share_of_ceiling", "of": "s", "compute": "r", "at_least": 0.9}])[0]
    assert judged["ratio"] == pytest.approx(0.9)
    assert judged["met"]


def test_a_bound_that_cannot_be_judged_is_not_met() -> None:
    judged = bounds.judge({"variants": {}, "drive": []}, [{"kind": "load_rate", "of": "x", "at_least": 1}])[0]
    assert judged["met"] is False and "KeyError" in judged["error"]


@pytest.mark.parametrize("path", WORKLOADS, ids=lambda p: p.stem)
def test_workload_is_consistent(path: Path) -> None:
    workload = FOUND[path]
    assert workload["name"] == path.stem and workload["about"]
    names = set(workload["variants"])
    assert set(workload.get("same_bits", [])) <= names
    for bound in workload["bounds"]:
        assert bound["kind"] in bounds.KINDS
        assert {bound["of"], bound.get("over", bound["of"]), bound.get("compute", bound["of"])} <= names
        if bound["kind"] == "speed_ratio":
            assert workload["samples"] >= ratio.MIN_PAIRS


@pytest.mark.parametrize("path", QUALITY, ids=lambda p: p.stem)
def test_quality_workload_is_consistent(path: Path) -> None:
    workload = FOUND[path]
    assert workload["name"] == path.stem and workload["about"] and workload["windows"] >= 4
    names = {"source", "noise_floor", *workload["variants"]}
    for bound in workload["bounds"]:
        assert bound["kind"] in quality.BOUNDS and bound["at_most"] >= 0
        assert {bound["of"], bound.get("over", bound["of"])} <= names


def test_quality_of_known_logits(tmp_path: Path) -> None:
    source, other = np.zeros((3, 4), np.float32), np.zeros((3, 4), np.float32)
    other[0, 1] = 1.0
    source.tofile(tmp_path / "source")
    other.tofile(tmp_path / "other")
    tally = quality.Tally()
    tally.add(tmp_path / "other", tmp_path / "source", 4, [0, 1, 2])
    found = tally.result()
    total = 3 + math.e
    assert found["kl_mean"] == pytest.approx((math.log(total) - math.log(4) - 0.25) / 3)
    assert found["perplexity"] == pytest.approx(math.exp((math.log(total) - 1 + math.log(4)) / 2))
    assert found["same_bytes"] is False


def test_read_bound_takes_the_slower_of_compute_and_reads() -> None:
    counters = {"n_reads": 400, "misses": 300, "n_ahead": 250, "n_ahead_late": 150}
    samples = [{"tokens_per_second": 4.0, "n_tokens": 4, "counters": counters}] * 15
    run = {
        "variants": {"r": {"samples": [{"tokens_per_second": 10.0}] * 15}, "s": {"samples": samples, "reads_per_second": [500.0] * 15}}
    }
    judged = bounds.judge(run, [{"kind": "share_of_read_bound", "of": "s", "compute": "r", "at_least": 0.85}])[0]
    assert judged["ratio"] == pytest.approx(0.8) and not judged["met"]
    assert bounds.judge(run, [{"kind": "reads_per_miss", "of": "s", "at_most": 1.0}])[0]["reads_per_miss"] == pytest.approx(1.0)


def test_sizes() -> None:
    assert [memcap.parse_size(text) for text in ("900MiB", "2GiB", "1.5KiB", "77")] == [900 << 20, 2 << 30, 1536, 77]


def test_evicted_file_is_out_of_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(4 << 20))
    assert page_cache.warm(path) == 4 << 20
    if page_cache.filesystem_drops_pages(path):
        assert page_cache.evict(path) == 0


def test_result_line_names_commit_pin_and_machine() -> None:
    found = machine.describe(Path(__file__))
    assert len(found["pin"]) == 40 and found["machine"]["n_cpus"] >= 1 and found["drive"]["file_system"]


@pytest.fixture
def group_v2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> memcap.MemoryGroup:
    """A v2 group in a make-believe /sys/fs/cgroup."""
    (tmp_path / "cgroup.controllers").write_text("memory")
    made = Path.mkdir

    def with_files(path: Path, *args: object, **kwargs: object) -> None:
        made(path)
        for name in ("memory.max", "memory.swap.max", "cgroup.procs"):
            (path / name).write_text("")
        (path / "memory.current").write_text("300")
        (path / "memory.peak").write_text("400")
        (path / "memory.stat").write_text("anon 100\nfile 150\nkernel 20\nshmem 30\n")
        (path / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 0\noom_kill 0\n")

    monkeypatch.setattr(Path, "mkdir", with_files)
    return memcap.MemoryGroup(1 << 20, root=tmp_path)


def test_cgroup_v2_limit_and_counters(group_v2: memcap.MemoryGroup) -> None:
    assert group_v2.version == 2
    assert (group_v2.folder / "memory.max").read_text() == str(1 << 20)
    assert (group_v2.folder / "memory.swap.max").read_text() == "0"
    now = group_v2.snapshot()
    assert now["peak_bytes"] == 400 and now["limit_hits"] == 7 and now["file_bytes"] == 120
    assert now["anon_bytes"] + now["shmem_bytes"] + now["kernel_bytes"] == 150


@pytest.mark.skipif(not os.access(CGROUP_V1, os.W_OK), reason="needs a writable memory cgroup (v1)")
def test_cgroup_v1_stops_what_is_too_large() -> None:
    eat = "import sys; b = bytearray(int(sys.argv[1]) << 20); print(len(b))"
    small = memcap.run([sys.executable, "-c", eat, "20"], 64 << 20, [])
    assert small["exit_code"] == 0 and small["within_limit"] and 20 << 20 < small["peak_bytes"] < 64 << 20
    large = memcap.run([sys.executable, "-c", eat, "200"], 64 << 20, [])
    assert large["exit_code"] != 0 and large["oom_kills"] >= 1 and not large["within_limit"]
    assert not list(CGROUP_V1.glob(f"leanstream-bench-{os.getpid()}-*"))
