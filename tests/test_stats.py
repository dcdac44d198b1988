"""stats.py: snapshots, ratios and Prometheus text."""

from __future__ import annotations

import re
from dataclasses import fields
from types import SimpleNamespace

import pytest

from leanstream_gguf.stats import Memory, Stats


def stats(**values: int) -> Stats:
    return Stats(**{field.name: values.get(field.name, 0) for field in fields(Stats)})


def test_ratios_are_unknown_before_anything_happened() -> None:
    found = stats().to_dict()
    assert {found[name] for name in ("hit_ratio", "bytes_per_token", "read_bandwidth", "load_bandwidth", "stall_share")} == {None}


def test_ratios() -> None:
    found = stats(hits=3, misses=1, read_bytes=1000, n_tokens=10, read_busy_ns=10**9, compute_ns=100, stall_ns=25)
    assert (found.hit_ratio, found.bytes_per_token, found.read_bandwidth, found.stall_share) == (0.75, 100, 1000, 0.25)
    assert stats(dense_hits=1, dense_waits=3).hit_ratio == 0.25


def test_memory_total() -> None:
    memory = Memory(*range(1, len(fields(Memory)) + 1))
    assert memory.total_bytes == sum(range(1, len(fields(Memory)) + 1))
    assert memory.to_dict()["total_bytes"] == memory.total_bytes


def test_from_struct_copies_by_name() -> None:
    struct = SimpleNamespace(**{field.name: i for i, field in enumerate(fields(Stats))}, later_field=1)
    assert Stats.from_struct(struct).n_graphs == 1


def test_prometheus_text() -> None:
    text = stats(hits=3, misses=1, read_bytes=1 << 40, stall_ns=1_500_000_000).to_prometheus({"model": 'a"b\\c\nd'})
    assert 'leanstream_stall_seconds_total{model="a\\"b\\\\c\\nd"} 1.5' in text
    assert 'leanstream_hit_ratio{model="a\\"b\\\\c\\nd"} 0.75' in text
    assert "# TYPE leanstream_read_bytes_total counter" in text
    assert "1.099511628e+12" in text or "1099511627776" in text
    for line in text.splitlines():
        assert re.fullmatch(r"# TYPE \w+ (gauge|counter)|\w+\{.*\} \S+", line), line


@pytest.mark.native
def test_fields_match_the_header(native: None) -> None:
    from leanstream_gguf import _lib

    ffi = _lib.native().ffi
    for cls, name in ((Stats, "ls_stats"), (Memory, "ls_memory")):
        assert [field.name for field in fields(cls)] == [field for field, _ in ffi.typeof(name).fields]
