"""What may be left out: thresholds for a KL that is asked for, and margins of the 2-bit sketch, both tried on the running model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import CalibrationError
from ..repack import sketch
from ..repack.gguf_file import Model, TensorInfo
from ..repack.requantize import to_float
from ..repack.storage import Source
from .graph_tap import Hidden, Taps
from .record import Setting
from .runner import Costs, Runner, compare
from .statistics import LayerCounts, edge_of

Floats = npt.NDArray[np.float32]
Windows = Sequence[Sequence[int]]
Tick = Callable[[int], None]

AIM = 0.9  # of the KL asked for: what the search accepts on its own text, because other text costs more or less
CLOSE = 0.85  # of the aim: near enough to stop
SEARCH_STEPS = 6
FIRST_LOSS, LARGEST_LOSS = 3e-3, 0.5  # share of a token's squared activation that every layer loses, on average
LOSSES = (1e-7, 1e-6, 1e-5, 1e-4)  # of squared activation, tried for sketch margins, fine to coarse
_SAMPLE_BYTES = 128 << 20  # inputs kept for the margins, all layers together
_ROWS = 2048  # neurons of which float32 weights are in memory at once


@dataclass
class Used:
    """Neurons used and squared activation kept, summed."""

    n_used: int = 0
    n_all: int = 0
    kept: float = 0.0
    mass: float = 0.0

    def add(self, values: Floats, keep: npt.NDArray[np.bool_]) -> None:
        squares = np.square(values, dtype=np.float64)
        self.n_used += int(np.count_nonzero(keep))
        self.n_all += keep.size
        self.mass += float(squares.sum())
        self.kept += float(squares[keep].sum())

    @property
    def share(self) -> float:
        return self.n_used / max(1, self.n_all)

    @property
    def recall(self) -> float:
        return self.kept / self.mass if self.mass else 1.0


def thresholds_for(counts: Mapping[int, LayerCounts], loss: float) -> dict[int, float]:
    """By block: the largest threshold below which lies at most this share of the layer's squared activation."""
    found = {}
    for block, layer in counts.items():
        cumulative = np.cumsum(layer.mass)
        total = cumulative[-1]
        n_below = int(np.searchsorted(cumulative, loss * total, side="right")) if total > 0 else 0
        found[block] = float(edge_of(n_below))
    return found


def measure_thresholds(runner: Runner, windows: Windows, thresholds: Mapping[int, float], tick: Tick) -> tuple[Costs, Used]:
    """Run with every value zeroed whose deciding activation is below its layer's threshold, against the model as it is."""
    used = Used()

    def apply(hidden: Hidden) -> None:
        keep = np.abs(hidden.decided) >= thresholds.get(hidden.block, 0.0)
        keep &= hidden.values != 0
        used.add(hidden.values, keep)
        hidden.values[~keep] = 0

    runner.tap.taps = Taps(hidden=apply)
    try:
        costs = Costs()
        for window in windows:
            part = compare(runner, [window], "plain", "tapped")
            costs = merged(costs, part)
            tick(len(window))
        return costs, used
    finally:
        runner.tap.taps = Taps()


def merged(a: Costs, b: Costs) -> Costs:
    return Costs(*(x + y for x, y in zip(vars(a).values(), vars(b).values(), strict=True)))


@dataclass
class Search:
    """Losses that were tried and what they cost on `fit`; a later search starts from them."""

    runner: Runner
    fit: Windows
    counts: Mapping[int, LayerCounts]
    tick: Tick
    tried: dict[float, float] = field(default_factory=dict)  # loss -> KL

    def next_loss(self, wanted: float) -> float:
        """Where the KL should be as wanted, if it is a power of the loss between (or beyond) what was tried."""
        points = sorted(self.tried.items())
        if not points:
            return FIRST_LOSS
        above = [point for point in points if point[1] > wanted]
        below = [point for point in points if point[1] <= wanted]
        pair = (below[-1], above[0]) if below and above else tuple(points[:2] if above else points[-2:])
        (x0, y0), (x1, y1) = pair[0], pair[-1]
        slope = np.log(y1 / y0) / np.log(x1 / x0) if x1 > x0 and y1 > y0 else 1.0
        start = (x0, y0) if above else (x1, y1)
        guess = float(start[0] * np.exp(np.clip(np.log(wanted / start[1]) / max(0.3, slope), -3, 3)))
        return min(LARGEST_LOSS, guess)

    def find(self, max_kl: float) -> dict[int, float]:
        """Thresholds whose KL on `fit` is at most AIM * max_kl, and not far below.

        Raises:
            CalibrationError: even a tiny loss costs more.
        """
        wanted = AIM * max_kl
        for _ in range(SEARCH_STEPS):
            found = [kl for kl in self.tried.values() if CLOSE * wanted <= kl <= wanted]
            loss = self.next_loss((1 + CLOSE) / 2 * wanted)
            if found or loss in self.tried:
                break
            costs, _used = measure_thresholds(self.runner, self.fit, thresholds_for(self.counts, loss), self.tick)
            self.tried[loss] = max(1e-12, costs.mean_kl)
        good = [loss for loss, kl in self.tried.items() if kl <= wanted]
        if not good:
            raise CalibrationError(
                f"no thresholds keep the KL below {max_kl:g}: leaving out anything costs more", remedy="ask for more"
            )
        return thresholds_for(self.counts, max(good))


def measure_setting(runner: Runner, held: Windows, max_kl: float, thresholds: dict[int, float], tick: Tick) -> Setting:
    """What thresholds cost on text that they were not chosen from."""
    costs, used = measure_thresholds(runner, held, thresholds, tick)
    return Setting(max_kl, costs.mean_kl, costs.perplexity_change, used.share, used.recall, thresholds)


# ---- the sketch ------------------------------------------------------------------------------------------------------------


@dataclass
class Inputs:
    """Inputs of the deciding projections for some tokens, by block: [n, n_embd]."""

    n_wanted: int
    rows: dict[int, list[Floats]] = field(default_factory=dict)

    @classmethod
    def sized(cls, n_layers: int, n_embd: int) -> Inputs:
        return cls(min(512, max(32, _SAMPLE_BYTES // max(1, n_layers * n_embd * 4))))

    def take(self, block: int, x: Floats) -> None:
        have = sum(map(len, self.rows.setdefault(block, [])))
        step = max(1, len(x) // 64)
        if have < self.n_wanted:
            self.rows[block].append(np.array(x[::step][: self.n_wanted - have]))

    def of(self, block: int) -> Floats:
        return np.concatenate(self.rows[block])


class Sketches:
    """Sketch rows of the deciding projections, made from the model's own weights, in the original order of neurons."""

    def __init__(self, model: Model, source: Source, deciding: Mapping[int, TensorInfo]) -> None:
        self.model, self.source, self.deciding = model, source, dict(deciding)
        self._images: dict[int, Any] = {}

    def image(self, block: int) -> Any:
        if block not in self._images:
            tensor = self.deciding[block]
            parts = [
                sketch.encode(tensor.type, self.source.rows(tensor, at, min(_ROWS, tensor.n_rows - at)), tensor.ne[0])
                for at in range(0, tensor.n_rows, _ROWS)
            ]
            self._images[block] = np.concatenate(parts)
        return self._images[block]

    def scores(self, block: int, x: Floats) -> Floats:
        """Sketched pre-activations [n_tokens, n_ff]."""
        image, n_inputs = self.image(block), self.deciding[block].ne[0]
        parts = [x @ sketch.decode(image[at : at + _ROWS], n_inputs).T for at in range(0, len(image), _ROWS)]
        return np.concatenate(parts, axis=1)

    def exact(self, block: int, x: Floats) -> Floats:
        """Pre-activations [n_tokens, n_ff] with the weights themselves."""
        tensor = self.deciding[block]
        parts = [
            x @ to_float(tensor.type, self.source.rows(tensor, at, min(_ROWS, tensor.n_rows - at))).T
            for at in range(0, tensor.n_rows, _ROWS)
        ]
        return np.concatenate(parts, axis=1)

    def margins(self, inputs: Inputs, losses: Sequence[float], *, squared: bool) -> dict[float, dict[int, float]]:
        """By loss, by block: the margin at which this share of the squared activation is missed.

        Args:
            squared: the activation is ReLU squared, so a neuron's weight is the fourth power of its input.
        """
        found: dict[float, dict[int, float]] = {loss: {} for loss in losses}
        for block in self.deciding:
            x = inputs.of(block)
            scores, values = self.scores(block, x), self.exact(block, x)
            fires = values > 0
            mass = values[fires].astype(np.float64) ** (4 if squared else 2)
            order = np.argsort(scores[fires])  # those the sketch puts lowest are missed first
            cumulative = np.cumsum(mass[order])
            for loss in losses:
                n_missed = int(np.searchsorted(cumulative, loss * cumulative[-1], side="right"))
                lowest = scores[fires][order[min(n_missed, len(order) - 1)]]
                found[loss][block] = float(-np.nextafter(lowest, np.float32(-np.inf)))
        return found


def measure_margins(
    runner: Runner, windows: Windows, sketches: Sketches, margins: Mapping[int, float], tick: Tick
) -> tuple[Costs, Used, Used]:
    """Run with every neuron zeroed that the sketch does not pick: (costs, neurons that fire and are kept, neurons picked)."""
    used, picked, entered = Used(), Used(), {}

    def enter(block: int, x: Floats) -> None:
        if block in margins:
            entered[block] = np.array(x)

    def apply(hidden: Hidden) -> None:
        if hidden.block not in margins:
            return
        x = entered.pop(hidden.block)
        pick = sketches.scores(hidden.block, x) > -margins[hidden.block]
        picked.add(hidden.values, pick)
        used.add(hidden.values, pick & (hidden.values != 0))
        hidden.values[~pick] = 0

    runner.tap.taps = Taps(hidden=apply, entering=enter)
    try:
        costs = Costs()
        for window in windows:
            costs = merged(costs, compare(runner, [window], "plain", "tapped"))
            tick(len(window))
        return costs, used, picked
    finally:
        runner.tap.taps = Taps()
