"""Cluster sizes by predicted reading time: how a drive answers reads of each size, and which reads a layer's tokens cause.

Pure but for `measure_drive`. The prediction replays bitmaps of real tokens: for each token the clusters that hold a firing neuron
and are not cached are read, neighbouring ones in one read of the runtime's size, and copied. Large clusters make fewer reads, but
fill a cache with neurons that nobody asked for; so the time is the mean over caches of several sizes, which hold the clusters used
most on other tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError
from ..probe import drive_rate
from . import format as f

PROBE_SIZES = (4096, 8192, 16384, 32768, 65536, 131072, 262144, 1048576)
PROBE_DEPTH = 16
PROBE_ROUNDS = 4
CLUSTER_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 48, 64, 96, 128)
COPY_RATE = 4e9  # bytes a second of one core, from a read's buffer to where clusters lie in memory
READ_BYTES = 64 << 10  # kReadBytes of neurons_setup.cpp
HOT_SHARE = 0.5  # leading clusters that at least this share of the tokens touch are hot
CACHE_SIZES = (2, 4, 8)  # over the bytes that fire for a token, as the runtime shares a cache out among layers
AMPLIFICATION_LIMIT = 1.6  # where a neuron's record is a page or more, a read is worth it without neighbours
DENSE_LIMIT = 0.6  # density from which a layer is better left whole


@dataclass(frozen=True)
class Drive:
    """Reads a second by size, many in flight; `reason` says where the figures come from."""

    sizes: tuple[int, ...]
    reads_per_second: tuple[float, ...]
    alignment: int
    reason: str

    def seconds(self, n_bytes: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Time that a read of each size takes of a busy drive: linear between measured sizes, by the last rate beyond."""
        times = 1 / np.asarray(self.reads_per_second)
        inside = np.interp(n_bytes, self.sizes, times)
        beyond = n_bytes / self.sizes[-1] * times[-1]
        return np.where(n_bytes > self.sizes[-1], beyond, inside)

    def to_dict(self) -> dict[str, Any]:
        rates = [round(rate, 1) for rate in self.reads_per_second]
        return {"sizes": list(self.sizes), "reads_per_second": rates, "reason": self.reason}

    @classmethod
    def load(cls, path: str, alignment: int) -> Drive:
        """From a JSON file that holds what `to_dict()` gave, alone or as the member `drive`.

        Raises:
            ArgumentError: it does not.
        """
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
            found = document.get("drive", document)
            sizes, rates = tuple(map(int, found["sizes"])), tuple(map(float, found["reads_per_second"]))
            if not sizes or len(sizes) != len(rates) or sorted(sizes) != list(sizes) or min(rates) <= 0:
                raise ValueError("sizes must rise and rates be positive")
            return cls(sizes, rates, alignment, str(found.get("reason", path)))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArgumentError(f"{path} holds no drive's rates: {error}", path=path) from error


def drive_alignment(path: str) -> tuple[int, str]:
    """(512 or 4096, why): what offsets of direct reads must be multiples of on the drive that holds this folder or file."""
    try:
        device = os.stat(path).st_dev
        base = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
        for queue in (f"{base}/queue", f"{base}/../queue"):
            file = f"{queue}/logical_block_size"
            if os.path.exists(file):
                with open(file, encoding="ascii") as handle:
                    size = int(handle.read())
                return (512, "the drive's logical blocks") if size <= 512 else (4096, "the drive's logical blocks")
    except (OSError, ValueError, AttributeError):
        pass
    return 4096, "the drive does not say, so pages"


def measure_drive(file: str, alignment: int) -> Drive:
    """Time random direct reads of a large file on the drive: about three seconds. The best of several rounds counts, because
    other users of the machine only ever make it slower.

    Raises:
        LeanStreamError: the file cannot be read so.
    """
    n_bytes = os.path.getsize(file)
    sizes = tuple(size for size in PROBE_SIZES if size * 8 <= n_bytes) or PROBE_SIZES[:1]
    rounds = [[drive_rate(file, size, PROBE_DEPTH, duration_ms=100) for size in sizes] for _ in range(PROBE_ROUNDS)]
    seconds = [min(1 / max(1.0, rate.reads_per_second) for rate in same) for same in zip(*rounds, strict=True)]
    # a smaller read is never slower than a larger one
    seconds = np.minimum.accumulate(seconds[::-1])[::-1].tolist()
    how = "measured" if all(rate.direct for rate in rounds[0]) else "measured through the page cache"
    return Drive(sizes, tuple(1 / s for s in seconds), alignment, f"{how}, {PROBE_DEPTH} reads in flight, best of {PROBE_ROUNDS}")


@dataclass(frozen=True)
class ClusterCost:
    """What one cluster size costs a layer, per token; all but `seconds` with an empty cache."""

    cluster_size: int
    stride: int
    seconds: float  # of reading and copying, mean over CACHE_SIZES
    n_reads: float
    n_bytes: float
    amplification: float  # bytes read over bytes of firing neurons
    n_hot: int


def touched(fires: npt.NDArray[np.bool_], cluster_size: int) -> npt.NDArray[np.bool_]:
    """[n_tokens, n_clusters]: clusters with a firing neuron, of neurons [n_tokens, n_ff] in file order."""
    n_ff = fires.shape[1]
    missing = -n_ff % cluster_size
    padded: Any = np.pad(fires, ((0, 0), (0, missing))) if missing else fires
    result: npt.NDArray[np.bool_] = padded.reshape(len(fires), -1, cluster_size).any(axis=2)
    return result


def runs(clusters: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Lengths of all stretches of neighbouring clusters, token by token."""
    edged = np.zeros((len(clusters), clusters.shape[1] + 2), np.int8)
    edged[:, 1:-1] = clusters
    change = np.diff(edged, axis=1).ravel()
    starts, ends = np.nonzero(change == 1)[0], np.nonzero(change == -1)[0]
    lengths: npt.NDArray[np.int64] = ends - starts
    return lengths


def reads(lengths: npt.NDArray[np.int64], stride: int) -> npt.NDArray[np.int64]:
    """Bytes of each read for stretches of so many clusters: the runtime's buffers hold READ_BYTES, or one cluster."""
    most = max(1, READ_BYTES // stride)
    whole, rest = lengths // most, lengths % most
    return np.concatenate([np.full(int(whole.sum()), most, np.int64), rest[rest > 0]]) * stride


def cluster_cost(fires: npt.NDArray[np.bool_], cluster_size: int, record_bytes: int, drive: Drive) -> ClusterCost:
    """Replay tokens over clusters of this size."""
    stride = f.ceil_to(cluster_size * record_bytes, drive.alignment)
    clusters = touched(fires, cluster_size)
    lengths = runs(clusters)
    n_tokens, n_fired = len(fires), max(1, int(np.count_nonzero(fires)))
    half = n_tokens // 2
    by_use = np.argsort(-clusters[:half].sum(axis=0), kind="stable")
    seconds = []
    at_once = reads(lengths, stride)
    for size in CACHE_SIZES:
        missing = clusters[half:].copy()
        missing[:, by_use[: int(size * n_fired / (n_tokens * cluster_size))]] = False
        sizes = reads(runs(missing), stride)
        seconds.append(float(drive.seconds(sizes).sum() + sizes.sum() / COPY_RATE) / max(1, n_tokens - half))
    cold: Any = np.nonzero(clusters.mean(axis=0) < HOT_SHARE)[0]
    n_hot = int(cold[0]) if len(cold) else clusters.shape[1]
    return ClusterCost(
        cluster_size=cluster_size,
        stride=stride,
        seconds=float(np.mean(seconds)),
        n_reads=len(at_once) / n_tokens,
        n_bytes=float(at_once.sum()) / n_tokens,
        amplification=float(at_once.sum()) / (n_fired * record_bytes),
        n_hot=n_hot,
    )


def choose(fires: npt.NDArray[np.bool_], record_bytes: int, drive: Drive, sizes: Sequence[int] = CLUSTER_SIZES) -> ClusterCost:
    """The cluster size of least predicted time; of those within one percent, the one that reads least.

    Where a record fills a page, only sizes within AMPLIFICATION_LIMIT come into question.
    """
    costs = [cluster_cost(fires, size, record_bytes, drive) for size in sizes if size <= fires.shape[1]]
    lean = [cost for cost in costs if cost.amplification <= AMPLIFICATION_LIMIT]
    costs = lean if record_bytes >= f.PAGE and lean else costs
    fastest = min(cost.seconds for cost in costs)
    return min((cost for cost in costs if cost.seconds <= 1.01 * fastest), key=lambda cost: cost.n_bytes)


def unpack_sample(sample: npt.NDArray[np.uint8], n_ff: int) -> npt.NDArray[np.bool_]:
    """Bitmaps of a calibration record as bool [n_tokens, n_ff]."""
    result: npt.NDArray[np.bool_] = np.unpackbits(sample, axis=1, bitorder="little")[:, :n_ff].astype(bool)
    return result
