"""Counters of one streamed model: native snapshot -> dataclass -> dict or Prometheus text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

_T = TypeVar("_T", bound="_FromStruct")


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


@dataclass(frozen=True)
class _FromStruct:
    @classmethod
    def from_struct(cls: type[_T], struct: Any) -> _T:
        """Copy the fields of the same names from a native struct."""
        return cls(**{item.name: int(getattr(struct, item.name)) for item in fields(cls)})


@dataclass(frozen=True)
class Memory(_FromStruct):
    """Bytes by purpose (ls_memory in leanstream.h); `total_bytes` is what the budget is compared with."""

    baseline_bytes: int
    metadata_bytes: int
    kv_bytes: int
    compute_bytes: int
    resident_bytes: int
    pinned_bytes: int
    ring_bytes: int
    cache_bytes: int
    margin_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(getattr(self, item.name) for item in fields(self))

    def to_dict(self) -> dict[str, int]:
        return {**asdict(self), "total_bytes": self.total_bytes}


@dataclass(frozen=True)
class Stats(_FromStruct):
    """Counters since activation or the last reset (ls_stats in leanstream.h), times in nanoseconds."""

    n_tokens: int
    n_graphs: int
    read_bytes: int
    needed_bytes: int
    n_reads: int
    read_busy_ns: int
    hits: int
    misses: int
    n_evictions: int
    dense_hits: int
    dense_waits: int
    stall_ns: int
    compute_ns: int
    load_bytes: int
    load_ns: int
    resident_now_bytes: int
    budget_bytes: int
    cached_experts: int
    cache_capacity_bytes: int
    used_buffered_io: int
    n_waves: int
    neurons_fired: int
    neurons_fired_bytes: int
    cluster_hits: int
    cluster_misses: int
    cluster_capacity_bytes: int
    n_ahead: int
    n_ahead_used: int
    n_ahead_late: int
    n_ahead_wasted: int
    n_ahead_cancelled: int
    ahead_bytes: int
    ahead_used_bytes: int
    ahead_wasted_bytes: int
    ahead_cancelled_bytes: int
    device_budget_bytes: int
    device_used_bytes: int
    device_copied_bytes: int
    device_hits: int
    device_misses: int
    device_syncs: int
    device_host_experts: int

    @property
    def hit_ratio(self) -> float | None:
        """Share of uses of experts and neuron clusters that found them resident; without both, of layers that were ready."""
        hits, misses = self.hits + self.cluster_hits, self.misses + self.cluster_misses
        if hits + misses:
            return _ratio(hits, hits + misses)
        return _ratio(self.dense_hits, self.dense_hits + self.dense_waits)

    @property
    def device_hit_ratio(self) -> float | None:
        """Share of expert uses and passes of a layer that found the weights in device memory, and of firing neurons that were
        summed there; None without a device."""
        return _ratio(self.device_hits, self.device_hits + self.device_misses)

    @property
    def device_syncs_per_token(self) -> float | None:
        """Times the host waited for the device because of streaming, for one token."""
        return _ratio(self.device_syncs, self.n_tokens)

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes read from the device for one token, prompt tokens included."""
        return _ratio(self.read_bytes, self.n_tokens)

    @property
    def read_bandwidth(self) -> float | None:
        """Bytes per second while at least one read was in flight."""
        return _ratio(self.read_bytes * 1e9, self.read_busy_ns)

    @property
    def load_bandwidth(self) -> float | None:
        """Bytes per second while pinned weights were loaded."""
        return _ratio(self.load_bytes * 1e9, self.load_ns)

    @property
    def stall_share(self) -> float | None:
        """Share of the time inside graphs that compute waited for data."""
        return _ratio(self.stall_ns, self.compute_ns)

    @property
    def overlap_share(self) -> float | None:
        """Share of the reading time that compute did not wait for."""
        return max(0.0, 1 - self.stall_ns / self.read_busy_ns) if self.read_busy_ns else None

    @property
    def wasted_share(self) -> float | None:
        """Bytes read ahead and given up unused, as a share of all bytes read."""
        return _ratio(self.ahead_wasted_bytes, self.read_bytes)

    def to_dict(self) -> dict[str, Any]:
        """All counters and the derived ratios (None where nothing was counted yet)."""
        names = ("hit_ratio", "bytes_per_token", "read_bandwidth", "load_bandwidth", "stall_share", "overlap_share", "wasted_share")
        device = ("device_hit_ratio", "device_syncs_per_token")
        return {**asdict(self), **{name: getattr(self, name) for name in (*names, *device)}}

    def to_prometheus(self, labels: Mapping[str, str] | None = None, *, prefix: str = "leanstream") -> str:
        """Prometheus text exposition. Times become seconds; ratios that are unknown are left out."""
        text = _labels(labels or {})
        lines = []
        for key, value in self.to_dict().items():
            if value is None:
                continue
            kind = "gauge" if key in _GAUGES else "counter"
            name = key[:-3] + "_seconds" if key.endswith("_ns") else key
            value = value / 1e9 if key.endswith("_ns") else value
            name = f"{prefix}_{name}{'_total' if kind == 'counter' else ''}"
            lines += [f"# TYPE {name} {kind}", f"{name}{text} {value:.10g}"]
        return "\n".join(lines) + "\n"


_GAUGES = frozenset(
    {
        "resident_now_bytes",
        "budget_bytes",
        "cached_experts",
        "cache_capacity_bytes",
        "cluster_capacity_bytes",
        "used_buffered_io",
        "hit_ratio",
        "bytes_per_token",
        "read_bandwidth",
        "load_bandwidth",
        "stall_share",
        "overlap_share",
        "wasted_share",
        "device_budget_bytes",
        "device_used_bytes",
        "device_hit_ratio",
        "device_syncs_per_token",
    }
)


def _labels(labels: Mapping[str, str]) -> str:
    escape = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    parts = [f'{key}="{value.translate(escape)}"' for key, value in sorted(labels.items())]
    return "{" + ",".join(parts) + "}" if parts else ""
