"""Retention policies over a recorded trace: the native ones, at many cache sizes, beside Belady's optimum."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._lib import check, native, take_string
from .errors import UnsupportedError

OPTIMUM = "belady"
RIVALS = ("lru", "lfu", "slru")  # what `lean` is judged against


def summary(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a trace holds and how well it was predicted (ls_trace_summary_json in leanstream.h).

    Raises:
        ModelFileError: not a trace, or a damaged one.
    """
    ffi, lib = native()
    out = ffi.new("char **")
    check(lib.ls_trace_summary_json(os.fsencode(path), out))
    document: dict[str, Any] = json.loads(take_string(out))
    return document


def replay(
    path: str | os.PathLike[str],
    policy: str,
    n_capacity: int,
    *,
    n_warmup_tokens: int = 0,
    params: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """One policy, or `belady`, with room for `n_capacity` units.

    Returns:
        {n_tokens, n_uses, n_misses, missed_bytes, n_oversized, ns_per_use, miss_ratio}; warm-up tokens are not counted.

    Raises:
        ArgumentError: unknown policy or parameter. ModelFileError: a damaged trace.
    """
    ffi, lib = native()
    out = ffi.new("char **")
    text = json.dumps(dict(params)) if params else ""
    check(lib.ls_trace_replay_json(os.fsencode(path), policy.encode(), text.encode(), n_capacity, n_warmup_tokens, out))
    document: dict[str, Any] = json.loads(take_string(out))
    document["miss_ratio"] = document["n_misses"] / document["n_uses"] if document["n_uses"] else None
    return document


@dataclass(frozen=True)
class Curve:
    """Miss ratios of several policies at several cache sizes; `misses[policy][i]` belongs to `shares[i]`."""

    shares: tuple[float, ...]
    capacities: tuple[int, ...]
    misses: dict[str, tuple[float, ...]]
    ns_per_use: dict[str, tuple[float, ...]]

    def gap_closed(self, policy: str, i: int) -> float | None:
        """How much of the way from the best of RIVALS to the optimum `policy` goes; None where there is no gap."""
        rivals = [self.misses[name][i] for name in RIVALS if name in self.misses]
        if not rivals or OPTIMUM not in self.misses or policy not in self.misses:
            return None
        best, optimum = min(rivals), self.misses[OPTIMUM][i]
        return (best - self.misses[policy][i]) / (best - optimum) if best > optimum else None

    def to_dict(self) -> dict[str, Any]:
        closed = [self.gap_closed("lean", i) for i in range(len(self.shares))]
        return {
            "shares": self.shares,
            "capacities": self.capacities,
            "misses": self.misses,
            "ns_per_use": self.ns_per_use,
            "gap_closed_by_lean": closed,
        }


def curve(
    path: str | os.PathLike[str],
    policies: Sequence[str],
    shares: Sequence[float],
    *,
    n_warmup_tokens: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> Curve:
    """Every policy at every share of all units.

    Raises:
        ArgumentError: unknown policy. ModelFileError: a damaged trace.
    """
    n_units = int(summary(path)["n_units"])
    capacities = tuple(max(1, round(share * n_units)) for share in shares)
    misses: dict[str, tuple[float, ...]] = {}
    times: dict[str, tuple[float, ...]] = {}
    for policy in policies:
        progress(policy)
        runs = [replay(path, policy, n, n_warmup_tokens=n_warmup_tokens) for n in capacities]
        misses[policy] = tuple(run["miss_ratio"] or 0.0 for run in runs)
        times[policy] = tuple(run["ns_per_use"] for run in runs)
    return Curve(tuple(shares), capacities, misses, times)


def plot(found: Curve, path: str | os.PathLike[str], title: str) -> None:
    """Draw the curve to a file whose ending names the format.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise UnsupportedError(
            "drawing needs matplotlib, which is not installed", remedy="pip install 'leanstream-gguf[plot]', or leave --plot out"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name, values in found.misses.items():
        style = {"linestyle": "--", "color": "black"} if name == OPTIMUM else {"marker": "o", "markersize": 3}
        axes.plot([share * 100 for share in found.shares], [v * 100 for v in values], label=name, **style)
    axes.set(xlabel="cache, % of all units", ylabel="misses, % of uses", title=title, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)
