"""Neurons that the file holds once more for a device: which, and the bytes of their matrices (docs/lean_format.md, 3.5).

A device multiplies with ordinary matrices, whose down rows are blocks of neighbouring neurons. So neurons are chosen block by
block of the down projection's type, and whole blocks are copied: nothing is quantised again.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from . import format as f
from .blocks import Bytes
from .columns import ReadRows
from .layout import NeuronLayer
from .storage import Source

PIECE_BYTES = 32 << 20


def hottest_first(
    perm: npt.NDArray[np.int32], fired: npt.NDArray[np.uint32], block: int, share: float
) -> tuple[npt.NDArray[np.int32], int]:
    """(perm with the hottest blocks of neighbours in front, in the source's order, how many neurons they are).

    Args:
        fired: tokens for which each neuron fired, in the original order.
        block: neurons in a block of the down projection.
        share: of all neurons.
    """
    heat = fired.reshape(-1, block).sum(axis=1, dtype=np.int64)
    chosen = np.sort(np.argsort(-heat, kind="stable")[: round(share * len(heat))])
    front = (chosen[:, None] * block + np.arange(block)).ravel()
    rest = perm[~np.isin(perm, front)]
    return np.concatenate([front, rest]).astype(np.int32), len(front)


def matrices(layer: NeuronLayer, read_down: ReadRows, source: Source) -> Iterator[tuple[str, int, Bytes]]:
    """(tensor, offset in it, bytes) of the layer's matrices for a device, in pieces."""
    if not layer.n_device:
        return
    front = layer.perm[: layer.n_device]
    if layer.gate is not None:
        row = layer.up.row_bytes
        step = max(1, PIECE_BYTES // row)
        for first in range(0, len(front), step):
            rows = source.chosen_rows(layer.up, front[first : first + step])
            yield layer.name(f.DEVICE_UP), first * row, rows.reshape(-1)
    kind, n_embd = layer.down_type, layer.down.ne[1]
    blocks = front[:: kind.n_elements] // kind.n_elements
    step = max(1, PIECE_BYTES // kind.row_bytes(layer.n_ff))
    for first in range(0, n_embd, step):
        n = min(step, n_embd - first)
        whole = read_down(first, n).reshape(n, -1, kind.n_bytes)
        yield layer.name(f.DEVICE_DOWN), first * kind.row_bytes(layer.n_device), np.ascontiguousarray(whole[:, blocks]).reshape(-1)
