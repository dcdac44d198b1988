"""Neurons and routers that fire as measured: rows of weights over the planted dimensions (latents.py), from statistics.

A neuron's input is sum_g b_g w_g . z_g - threshold over the six groups of latents. Its random direction w decides with whom it
fires, the shares b_g^2 of the two averages how much a token's set resembles the one before, a direction common to all neurons
of a layer how the number of firing neurons varies, and the threshold how often it fires. All are solved from the statistics
of a measured layer (activity/summary.py) under the assumption that inputs are jointly normal; thresholds come from the
empirical distribution over a reference text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from .blocks import RandomSource
from .latents import N_CODE, N_CONST, N_LATENT, N_PLANTED, Floats, correlations, normals
from .quantize import dequantize, quantize

F64 = npt.NDArray[np.float64]

# How the share that is not slow is split among the code of this token and of the three before.
_LOCAL = np.array([0.45, 0.3, 0.15, 0.1])
_N_SAMPLE = 256  # neurons whose inputs give the layer's distribution
_NORMAL = NormalDist()
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(32)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()
_TAIL_AT = np.linspace(-8.0, 8.0, 3201)
_TAIL = np.array([0.5 * math.erfc(x / math.sqrt(2.0)) for x in _TAIL_AT])


def unit_rates(rates: Sequence[float], ranks: Sequence[float], n: int, density: float) -> F64:
    """float64 [n], hottest first: the sampled rates (`rates` at `ranks`) for n units, with exactly this mean."""
    found = np.interp((np.arange(n) + 0.5) / n, ranks, rates)
    for _ in range(20):  # a rate cannot pass 1: what is cut off goes to the others
        found = np.minimum(found * (density / max(float(found.mean()), 1e-12)), 0.98)
    return found


def _thresholds(rates: F64) -> F64:
    return np.array([_NORMAL.inv_cdf(1.0 - min(max(float(p), 1e-7), 1 - 1e-7)) for p in rates])


def _given(theta: F64, rho: float) -> F64:
    """[n_nodes, n]: chance to fire given the shared part of the input, which has variance rho."""
    return np.interp((theta[None, :] - math.sqrt(rho) * _NODES[:, None]) / math.sqrt(1.0 - rho), _TAIL_AT, _TAIL)


def _solve(function: Callable[[float], float], targets: Sequence[float]) -> F64:
    """The arguments in [0, 0.97] at which a rising function reaches each target."""
    grid = np.linspace(0.0, 0.985, 33) ** 2
    return np.interp(targets, [function(float(x)) for x in grid], grid)


@dataclass(frozen=True)
class Shape:
    """What is solved for a layer: shares of the two averages, and of the direction that all neurons have in common."""

    slow: tuple[float, float]
    common: float

    @property
    def shares(self) -> F64:
        """b_g^2 of the six groups, which add up to one."""
        return np.concatenate([_LOCAL * (1.0 - sum(self.slow)), self.slow])


def solve_shape(layer: dict[str, Any], ranks: Sequence[float], lags: Sequence[int], z: Floats) -> Shape:
    """Shares that give the measured overlaps at all lags and the measured spread of the number of firing neurons."""
    density = layer.get("density", float(np.mean(layer["rates"])))
    rates = unit_rates(layer["rates"], ranks, 128, density)
    theta = _thresholds(rates)

    def overlap(rho: float) -> float:
        return float((_WEIGHTS @ _given(theta, rho) ** 2).sum() / rates.sum())

    wanted = _solve(overlap, layer["overlap"])
    by_group = correlations(z, lags)
    grid = np.array([(x, y) for x in np.arange(0, 0.96, 0.02) for y in np.arange(0, 0.96 - x, 0.02)])
    groups = np.concatenate([(1.0 - grid.sum(axis=1))[:, None] * _LOCAL, grid], axis=1)
    # The first lag is the overlap of consecutive tokens: it counts as much as all others.
    weight = np.array([len(lags) - 1.0] + [1.0] * (len(lags) - 1))
    best = grid[int((weight * (groups @ by_group - wanted) ** 2).sum(axis=1).argmin())]

    def spread(rho: float) -> float:
        firing = _given(theta, rho).mean(axis=1)
        return float(np.sqrt(max(_WEIGHTS @ firing**2 - (_WEIGHTS @ firing) ** 2, 0.0)) / rates.mean())

    return Shape((float(best[0]), float(best[1])), float(_solve(spread, [layer.get("count_cv", 0.0)])[0]))


def directions(name: str, n: int, shape: Shape) -> Floats:
    """float32 [n, 192]: the neurons' weights on the latents, about unit variance of the input."""
    own, common = normals(f"{name}/own", n, N_LATENT), normals(f"{name}/common", 1, N_LATENT)
    mixed = math.sqrt(1.0 - shape.common) * own + math.sqrt(shape.common) * common
    return mixed * np.repeat(np.sqrt(shape.shares / N_CODE), N_CODE).astype(np.float32)


def shuffled(name: str, n: int) -> npt.NDArray[np.int64]:
    """A permutation of n, so that hot units lie anywhere."""
    return np.argsort(RandomSource(f"{name}/order").uniform(n, 0.0, 1.0), kind="stable")


@dataclass(frozen=True)
class Neurons:
    """Planted rows of a layer.

    Attributes:
        rows: uint8 [n, bytes of 256 columns] in the tensor's type.
        power: expected sum of squares of all activations at one token, by exponent: {1: ReLU, 2: ReLU^2}; inputs of spread 1.
    """

    rows: npt.NDArray[np.uint8]
    power: dict[int, float]


class Reference:
    """The latents of the reference text, float32 [n_tokens, 192], with their mean and covariance."""

    def __init__(self, z: Floats) -> None:
        self.z = z
        self._mean, self._covariance = z.mean(axis=0), np.cov(z.T).astype(np.float32)

    def moments(self, weights: Floats) -> tuple[Floats, Floats]:
        """Mean and standard deviation over the text of each row's product with the latents."""
        variance = ((weights @ self._covariance) * weights).sum(axis=1)
        return weights @ self._mean, np.sqrt(np.maximum(variance, 1e-20))


def plant_neurons(name: str, kind: str, rates: F64, shape: Shape, reference: Reference, gain: float) -> Neurons:
    """Rows for neurons with these rates (in the order of the tensor).

    `gain` is what the norm before the FFN divides the latents by: then a neuron's input has spread 1.
    """
    n, z = len(rates), reference.z
    weights = np.zeros((n, N_PLANTED), np.float32)
    weights[:, N_CONST:] = directions(name, n, shape) * gain
    # What the type makes of the weights is what the thresholds must fit.
    seen = dequantize(kind, quantize(kind, weights))[:, N_CONST:]
    mean, deviation = reference.moments(seen)
    sample = np.arange(n) if n <= _N_SAMPLE else shuffled(f"{name}/sample", n)[:_N_SAMPLE]
    inputs = (z @ seen[sample].T - mean[sample]) / deviation[sample]
    pooled = np.sort(inputs, axis=None)
    position = (1.0 - np.clip(rates, 0.0, 1.0)) * len(pooled)
    theta = pooled[np.clip(position.astype(int), 0, len(pooled) - 1)]
    # Neurons that never fire: a little beyond the largest input that was seen.
    theta = np.where(rates * len(z) < 0.02, pooled[-1] + 0.5, theta)
    threshold = (mean + deviation * theta).astype(np.float32)[:, None]
    weights[:, : N_CONST // 2], weights[:, N_CONST // 2 : N_CONST] = -threshold / N_CONST, threshold / N_CONST
    fired = np.maximum((inputs - theta[sample]) * deviation[sample] / gain, 0.0)
    more = n / len(sample)
    power = {e: float((fired ** (2 * e)).sum(axis=1).mean()) * more for e in (1, 2)}
    return Neurons(quantize(kind, weights), power)


def plant_router(name: str, rates: F64, n_used: int, shape: Shape, z: Floats) -> Floats:
    """float32 [n_expert, 256]: a router whose best `n_used` experts over the reference text have these rates (mean n_used / n)."""
    n = len(rates)
    rows = np.zeros((n, N_PLANTED), np.float32)
    rows[:, N_CONST:] = directions(name, n, shape)
    scores = z @ rows[:, N_CONST:].T
    scores -= scores.mean(axis=0)
    bias = -_thresholds(rates) * scores.std(axis=0)
    for step in range(60):
        chosen = np.argpartition(-(scores + bias), n_used - 1, axis=1)[:, :n_used]
        seen = (np.bincount(chosen.ravel(), minlength=n) + 0.5) / len(z)
        bias += (0.5 if step < 40 else 0.2) * np.log(rates / seen)
    bias -= (z @ rows[:, N_CONST:].T).mean(axis=0)
    bias -= bias.mean()
    rows[:, : N_CONST // 2], rows[:, N_CONST // 2 : N_CONST] = bias[:, None] / N_CONST, -bias[:, None] / N_CONST
    return rows
