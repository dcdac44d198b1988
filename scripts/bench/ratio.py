"""Ratios of two speeds measured in turn, with a bootstrap interval: how every comparison in this project is judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

MIN_PAIRS = 15
_N_RESAMPLES = 10_000


@dataclass(frozen=True)
class Ratio:
    """Geometric mean of the pairs' ratios and its 95 % percentile-bootstrap interval."""

    ratio: float
    low: float
    high: float
    n_pairs: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def ratio(numerator: Sequence[float], denominator: Sequence[float], seed: int = 0) -> Ratio:
    """The ratio of samples that were taken in turn: numerator[i] belongs to denominator[i].

    Raises:
        ValueError: the sequences differ in length, are empty, or hold something that is not positive.
    """
    if len(numerator) != len(denominator) or not numerator:
        raise ValueError(f"{len(numerator)} and {len(denominator)} samples are not pairs")
    if min(*numerator, *denominator) <= 0:
        raise ValueError("a ratio needs positive samples")
    logs = np.log(np.asarray(numerator, dtype=float) / np.asarray(denominator, dtype=float))
    generator = np.random.Generator(np.random.PCG64(seed))
    means = logs[generator.integers(0, len(logs), (_N_RESAMPLES, len(logs)))].mean(axis=1)
    low, high = np.exp(np.percentile(means, [2.5, 97.5]))
    return Ratio(float(np.exp(logs.mean())), float(low), float(high), len(logs))


def verdict(measured: Ratio, bound: float, at_least: bool = True) -> dict[str, Any]:
    """Whether the interval reaches the bound from below or above; `enough` tells if there were as many pairs as the rule asks for."""
    met = measured.high >= bound if at_least else measured.low <= bound
    return {**measured.to_dict(), "met": met, "enough": measured.n_pairs >= MIN_PAIRS}


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Median and quartiles, extremes and count of a list of samples."""
    low, median, high = np.percentile(np.asarray(samples, dtype=float), [25, 50, 75])
    return {
        "median": float(median), "p25": float(low), "p75": float(high),
        "min": float(min(samples)), "max": float(max(samples)), "n": len(samples),
    }  # fmt: skip
