"""Miss ratios of caches that a trace of uses is replayed through: LRU, LFU and Belady's optimum.

A use that misses reads the unit and keeps it; the units of one token are used one after another in the order given.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Uses = Sequence[int] | npt.NDArray[np.integer]


def lru(uses: Uses, capacity: int) -> float:
    """Share of the uses that miss when the least recently used unit leaves."""
    kept: OrderedDict[int, None] = OrderedDict()
    misses = 0
    for unit in map(int, uses):
        if unit in kept:
            kept.move_to_end(unit)
            continue
        misses += 1
        if len(kept) == capacity:
            kept.popitem(last=False)
        kept[unit] = None
    return misses / max(1, len(uses))


def lfu(uses: Uses, capacity: int) -> float:
    """As lru(), the unit with the fewest uses so far leaves (counts survive, the older of equals first)."""
    counts: dict[int, int] = {}
    kept: set[int] = set()
    order: list[tuple[int, int, int]] = []
    misses = 0
    for time, unit in enumerate(map(int, uses)):
        counts[unit] = counts.get(unit, 0) + 1
        if unit not in kept:
            misses += 1
            if len(kept) == capacity:
                _drop_least(order, counts, kept)
            kept.add(unit)
        heapq.heappush(order, (counts[unit], time, unit))
    return misses / max(1, len(uses))


def _drop_least(order: list[tuple[int, int, int]], counts: dict[int, int], kept: set[int]) -> None:
    while True:
        count, _, unit = heapq.heappop(order)
        if unit in kept and counts[unit] == count:  # else the entry is out of date
            kept.remove(unit)
            return


def belady(uses: Uses, capacity: int) -> float:
    """As lru(), the unit whose next use is farthest away leaves, or is not kept at all: no cache does better."""
    sequence = [int(unit) for unit in uses]
    never = len(sequence)
    following = [never] * len(sequence)
    last: dict[int, int] = {}
    for i in range(len(sequence) - 1, -1, -1):
        following[i] = last.get(sequence[i], never)
        last[sequence[i]] = i
    next_use: dict[int, int] = {}
    farthest: list[tuple[int, int]] = []
    misses = 0
    for i, unit in enumerate(sequence):
        misses += unit not in next_use
        next_use[unit] = following[i]
        heapq.heappush(farthest, (-following[i], unit))
        if len(next_use) > capacity:
            while True:
                at, victim = heapq.heappop(farthest)
                if next_use.get(victim) == -at:
                    del next_use[victim]
                    break
    return misses / max(1, len(sequence))


POLICIES: dict[str, Callable[[Uses, int], float]] = {"lru": lru, "lfu": lfu, "belady": belady}
SHARES = (0.10, 0.25, 0.50)


def miss_ratios(uses: Uses, n_units: int, shares: Sequence[float] = SHARES) -> dict[str, list[float]]:
    """policy -> miss ratio at each share of the units; the caches start empty."""
    return {name: [policy(uses, max(1, int(share * n_units))) for share in shares] for name, policy in POLICIES.items()}
