"""What a trace says in a few numbers: density, skew, overlap of tokens in a row, co-activation, cache misses.

The same functions describe a measured model and a synthetic one, so that the two can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .replay import SHARES, miss_ratios
from .trace import Bits, Trace

LAGS = (1, 2, 4, 8, 16, 32)
N_REPLAY = 1024  # tokens of a replay that starts with an empty cache
CLUSTERS = (4, 8)
# Ranks (0 = hottest, 1 = coldest) at which the rates are kept: dense where they differ most.
RANKS = tuple(float(x) for x in np.round(np.linspace(0, 1, 33) ** 2, 6))

Floats = npt.NDArray[np.float64]


def sampled_rates(rates: Floats) -> list[float]:
    """The sorted rates at RANKS."""
    ordered = np.sort(rates)[::-1]
    at = (np.arange(len(ordered)) + 0.5) / len(ordered)
    return [float(f"{x:.4g}") for x in np.interp(RANKS, at, ordered)]


def overlaps(used: Bits, n_window: int) -> list[float]:
    """Share of a token's units that the token `lag` before used too, for each lag of LAGS; never across windows."""
    found = []
    for lag in LAGS:
        shared = total = 0
        for start in range(0, len(used) - lag, n_window):
            window = used[start : start + n_window]
            shared += int((window[lag:] & window[:-lag]).sum())
            total += int(window[lag:].sum())
        found.append(round(shared / max(1, total), 4))
    return found


def chance_overlap(rates: Floats) -> float:
    """The overlap of two tokens that have nothing to do with each other: units differ in their rates only."""
    return float((rates**2).sum() / max(rates.sum(), 1e-12))


def clusters_touched(used: Bits, size: int) -> tuple[float, float]:
    """Share of the clusters with at least one firing neuron: clusters of neurons that fire together, and random ones.

    Greedy: the hottest neuron left and the size - 1 that fired with it most often. The clusters come from the first half
    of the tokens, the share from the second.
    """
    half = len(used) // 2
    learn, judge = used[:half].astype(np.float32), used[half:]
    together = learn.T @ learn
    rates = np.diag(together).copy()
    left = np.ones(len(rates), dtype=bool)
    order: list[int] = []
    for seed in np.argsort(-rates, kind="stable"):
        if not left[seed]:
            continue
        left[seed] = False
        score = np.where(left, together[seed] + 1e-3 * rates / max(rates.max(), 1), -1)
        n = min(size - 1, int(left.sum()))
        partners = np.argpartition(-score, n - 1)[:n] if n else np.empty(0, dtype=int)
        left[partners] = False
        order += [int(seed), *map(int, partners)]
    n_whole = len(order) // size * size
    shuffled = np.argsort(np.asarray(np.random.PCG64(1).random_raw(len(order))))

    def touched(ids: npt.NDArray[np.int64]) -> float:
        return float(judge[:, ids[:n_whole]].reshape(len(judge), -1, size).any(axis=2).mean())

    return touched(np.asarray(order)), touched(shuffled)


def mean_misses(uses_of_window: Sequence[tuple[npt.NDArray[np.integer], int]]) -> dict[str, list[float]]:
    """Miss ratios averaged over several replays, each (uses, number of units)."""
    replays = [miss_ratios(uses, n_units) for uses, n_units in uses_of_window]
    return {policy: [round(float(x), 4) for x in np.mean([r[policy] for r in replays], axis=0)] for policy in replays[0]}


def neuron_layer(used: Bits, n_window: int, n_windows: int) -> dict[str, Any]:
    """Statistics of one dense layer; `used` is bool [n_tokens, n_ff]."""
    counts, rates = used.sum(axis=1), used.mean(axis=0)
    starts = range(0, n_windows * N_REPLAY, N_REPLAY)
    replays = [(np.nonzero(used[s : s + N_REPLAY])[1], used.shape[1]) for s in starts]
    return {
        "density": round(float(rates.mean()), 5),
        "rates": sampled_rates(rates),
        "overlap": overlaps(used, n_window),
        "count_cv": round(float(counts.std() / counts.mean()), 4),
        "touched": {str(size): [round(x, 4) for x in clusters_touched(used[: 8 * N_REPLAY], size)] for size in CLUSTERS},
        "misses": mean_misses(replays),
    }


def expert_bits(ids: npt.NDArray[np.int32], n_expert: int) -> Bits:
    """bool [n_tokens, n_expert] from the ids of each token."""
    bits = np.zeros((len(ids), n_expert), dtype=bool)
    np.put_along_axis(bits, ids.astype(np.int64), True, axis=1)
    return bits


def expert_uses(trace: Trace, start: int, n_tokens: int) -> tuple[npt.NDArray[np.integer], int]:
    """The uses of one cache for all experts of the model, in the order of the computation."""
    layers = sorted(trace.experts)
    ids = np.stack([trace.experts[layer][start : start + n_tokens] for layer in layers], axis=1)
    return (ids + trace.n_expert * np.arange(len(layers))[None, :, None]).reshape(-1), trace.n_expert * len(layers)


def summarise(trace: Trace, n_windows: int = 4) -> dict[str, Any]:
    """All statistics of a trace: `neurons` per dense layer, `experts` per layer with one cache for all of them."""
    result: dict[str, Any] = {"lags": LAGS, "ranks": RANKS, "cache_shares": SHARES, "n_replay": N_REPLAY}
    if trace.neurons:
        result["neurons"] = [neuron_layer(used, trace.n_window, n_windows) for _, used in sorted(trace.neurons.items())]
    if trace.experts:
        result["n_expert"], result["n_used"] = trace.n_expert, next(iter(trace.experts.values())).shape[1]
        result["experts"] = []
        for _, ids in sorted(trace.experts.items()):
            used = expert_bits(ids, trace.n_expert)
            rates = sorted((float(f"{x:.4g}") for x in used.mean(axis=0)), reverse=True)
            result["experts"].append({"rates": rates, "overlap": overlaps(used, trace.n_window)})
        result["misses"] = mean_misses([expert_uses(trace, w * N_REPLAY, N_REPLAY) for w in range(n_windows)])
    if trace.expert_density:
        result["expert_density"] = [round(x, 5) for _, x in sorted(trace.expert_density.items())]
    return result
