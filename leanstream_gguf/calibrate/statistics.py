"""What fires: counts, magnitudes and bitmaps of every layer, gathered window by window into a folder that survives a crash.

Memory: 12 bytes for each neuron of each layer, and one batch; the bitmaps (one bit for each neuron, layer and token) go to a
file of fixed size. A model of 64 layers with 32,768 neurons each holds 25 MB of counters; its batch of 512 tokens takes 64 MB a
layer while it is looked at.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .graph_tap import Hidden

HISTOGRAM_BINS = 512
_LOWEST, _PER_OCTAVE = -32.0, 10.0  # log2 of the smallest activation told apart; bins from 2^-32 to 2^19.2


def bin_of(magnitudes: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Histogram bin of each absolute activation; zeros fall into bin 0."""
    with np.errstate(divide="ignore"):
        at = np.floor((np.log2(magnitudes) - _LOWEST) * _PER_OCTAVE) + 1
    bins: npt.NDArray[np.int64] = np.clip(at, 0, HISTOGRAM_BINS - 1).astype(np.int64)
    return bins


def edge_of(index: npt.NDArray[np.int64] | int) -> Any:
    """Smallest activation of a bin."""
    return np.where(np.asarray(index) <= 0, 0.0, 2.0 ** ((np.asarray(index) - 1) / _PER_OCTAVE + _LOWEST))


@dataclass
class LayerCounts:
    """One layer's counters over all tokens so far."""

    n_ff: int
    fired: npt.NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))  # tokens with a value other than zero
    sum_abs: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    max_abs: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(HISTOGRAM_BINS, np.int64))
    mass: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(HISTOGRAM_BINS, np.float64))  # shares of squared values

    def __post_init__(self) -> None:
        if not len(self.fired):
            self.fired = np.zeros(self.n_ff, np.uint32)
            self.sum_abs, self.max_abs = np.zeros(self.n_ff, np.float32), np.zeros(self.n_ff, np.float32)

    def add(self, hidden: Hidden, *, histogram: bool) -> None:
        values = hidden.values
        magnitudes = np.abs(values)
        self.fired += np.count_nonzero(values, axis=0).astype(np.uint32)
        self.sum_abs += magnitudes.sum(axis=0)
        np.maximum(self.max_abs, magnitudes.max(axis=0), out=self.max_abs)
        if histogram:
            at = bin_of(np.abs(hidden.decided)).reshape(-1)
            self.counts += np.bincount(at, minlength=HISTOGRAM_BINS)
            squares = magnitudes.astype(np.float64) ** 2
            # every token counts the same: the first of a text is often a thousand times larger than all others
            shares = squares / np.maximum(squares.sum(axis=1, keepdims=True), 1e-300)
            self.mass += np.bincount(at, weights=shares.reshape(-1), minlength=HISTOGRAM_BINS)


class Gathered:
    """The folder of an unfinished calibration: `state.npz`, `bits` and the identity of the work."""

    def __init__(self, folder: Path, work: dict[str, Any], widths: dict[int, int], n_windows: int, n_window: int) -> None:
        """Take up the folder's state if it is of the same work, else start afresh.

        Args:
            widths: n_ff of each block.
        """
        self.folder, self.work, self.widths = folder, work, widths
        self.n_windows, self.n_window = n_windows, n_window
        self.row_bytes = {block: -(-n_ff // 8) for block, n_ff in widths.items()}
        self._places = {block: at for at, block in enumerate(sorted(widths))}
        folder.mkdir(parents=True, exist_ok=True)
        self.counts = {block: LayerCounts(n_ff) for block, n_ff in widths.items()}
        self.done = 0  # windows
        self._load()
        self.bits = self._open_bits()

    @property
    def resumed(self) -> bool:
        return self.done > 0

    def _load(self) -> None:
        try:
            with np.load(self.folder / "state.npz") as state:
                if json.loads(str(state["work"])) != self.work:
                    return
                self.done = int(state["done"])
                for block, counts in self.counts.items():
                    for name in ("fired", "sum_abs", "max_abs", "counts", "mass"):
                        setattr(counts, name, state[f"{name}.{block}"])
        except (OSError, ValueError, KeyError):  # none, or cut by a crash: start afresh
            self.done = 0
            self.counts = {block: LayerCounts(n_ff) for block, n_ff in self.widths.items()}

    def _open_bits(self) -> npt.NDArray[np.uint8]:
        """uint8 [windows, layers, tokens of a window, bytes of the widest layer], on disk."""
        shape = (self.n_windows, len(self.widths), self.n_window, max(self.row_bytes.values()))
        path = self.folder / "bits"
        fits = path.exists() and path.stat().st_size == int(np.prod(shape, dtype=np.int64))
        if not fits:
            self.done = 0
        return np.memmap(path, np.uint8, "r+" if fits else "w+", shape=shape)

    def put_bits(self, block: int, window: int, at: int, fires: npt.NDArray[np.bool_]) -> None:
        """Which neurons fired for tokens at .. of a window: bool [n_tokens, n_ff]."""
        self.bits[window, self._places[block], at : at + len(fires), : self.row_bytes[block]] = np.packbits(
            fires, axis=1, bitorder="little"
        )

    def layer_bits(self, block: int) -> npt.NDArray[np.uint8]:
        """Of all finished windows, [windows * tokens, bytes]."""
        rows = self.bits[: self.done, self._places[block], :, : self.row_bytes[block]]
        return np.ascontiguousarray(rows).reshape(-1, self.row_bytes[block])

    def window_done(self) -> None:
        """Another window is complete: make that last."""
        self.done += 1
        self.bits.flush()  # type: ignore[attr-defined]
        state: dict[str, Any] = {"work": json.dumps(self.work), "done": self.done}
        for block, counts in self.counts.items():
            for name in ("fired", "sum_abs", "max_abs", "counts", "mass"):
                state[f"{name}.{block}"] = getattr(counts, name)
        temporary = self.folder / "state.new.npz"
        np.savez(temporary, **state)
        os.replace(temporary, self.folder / "state.npz")

    def remove(self) -> None:
        del self.bits
        for name in ("state.npz", "state.new.npz", "bits"):
            (self.folder / name).unlink(missing_ok=True)
        self.folder.rmdir()
