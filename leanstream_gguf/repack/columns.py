"""Down projections as columns: one record of quants for each neuron, and the resident planes of their scales.

Packings and orders are those of docs/lean_format.md, 3.1 to 3.3. Works in strips of outputs, so that memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .blocks import SCHEMES, Bytes, Scales, Scheme
from .format import BlockType, ceil_to, padded_outputs

_BITS = {"raw32": 32, "raw16": 16, "raw8": 8, "nib": 4, "crumb": 2, "bit": 1}
_PER_BYTE = {"nib": 2, "crumb": 4}


def pack(packing: str, q: Bytes) -> Bytes:
    """Quants [n, m] (m a multiple of 64; floats [n, m, bytes]) as bytes [n, m * bits / 8]; only the packing's bits may be set."""
    n, m = q.shape[:2]
    if packing.startswith("raw"):
        return np.ascontiguousarray(q).reshape(n, -1)
    if packing == "bit":
        return np.packbits(q, axis=-1, bitorder="little")
    per = _PER_BYTE[packing]
    lanes = q.reshape(n, m // (16 * per), per, 16)
    packed = lanes[:, :, 0].copy()
    for i in range(1, per):
        packed |= lanes[:, :, i] << (8 // per * i)
    return packed.reshape(n, -1)


def unpack(packing: str, raw: Bytes, m: int) -> Bytes:
    """Inverse of `pack`: [n, m], or [n, m, bytes] for raw16 and raw32."""
    n = raw.shape[0]
    if packing == "raw8":
        return raw
    if packing.startswith("raw"):
        return raw.reshape(n, m, -1)
    if packing == "bit":
        return np.unpackbits(raw, axis=-1, bitorder="little")
    per = _PER_BYTE[packing]
    lanes = raw.reshape(n, m // (16 * per), 1, 16) >> (np.arange(per, dtype=np.uint8) * (8 // per))[:, None]
    return (lanes & ((1 << 8 // per) - 1)).reshape(n, m)


@dataclass(frozen=True)
class ColumnLayout:
    """Where everything of a down projection lies: packings in a column, planes in the planes tensor."""

    type: BlockType
    n_ff: int
    n_embd: int

    @property
    def scheme(self) -> Scheme:
        return SCHEMES[self.type.name]

    @property
    def n_outputs(self) -> int:
        return padded_outputs(self.n_embd)

    def packings(self) -> list[tuple[str, int, int]]:
        """(packing, first bit, byte offset in the column)."""
        found, at = [], 0
        for packing, first_bit in self.scheme.packings:
            found.append((packing, first_bit, at))
            at += self.n_outputs * _BITS[packing] // 8
        return found

    @property
    def column_bytes(self) -> int:
        return sum(self.n_outputs * _BITS[packing] // 8 for packing, _ in self.scheme.packings)

    def slices(self, start: int, first: int, n: int) -> list[slice]:
        """Where a record whose column begins at `start` has outputs first .. first+n-1 (multiples of 64), packing by packing."""
        found = []
        for packing, _, at in self.packings():
            bits = _BITS[packing]
            low = start + at + first * bits // 8
            found.append(slice(low, low + n * bits // 8))
        return found

    def plane_shapes(self) -> list[tuple[str, int, int]]:
        """(numpy type, rows, byte offset in the planes tensor)."""
        found, at = [], 0
        for plane in self.scheme.planes:
            n_rows = self.n_ff // plane.n_shared
            found.append((plane.dtype, n_rows, at))
            at += n_rows * self.n_outputs * np.dtype(plane.dtype).itemsize
        return found

    @property
    def planes_bytes(self) -> int:
        return sum(n_rows * self.n_outputs * np.dtype(dtype).itemsize for dtype, n_rows, _ in self.plane_shapes())


def transposable(type_name: str) -> bool:
    """Whether a down projection of this type can be cut into columns without loss."""
    return type_name in SCHEMES


def strip_rows(layout: ColumnLayout, budget_bytes: int) -> int:
    """Outputs in a strip whose unpacked quants and temporaries stay within the budget; a multiple of 64."""
    itemsize = max(1, max(_BITS[packing] for packing, _ in layout.scheme.packings) // 8)
    per_row = layout.n_ff * itemsize * 6 + layout.type.row_bytes(layout.n_ff)
    return max(64, min(layout.n_outputs, budget_bytes // per_row // 64 * 64))


def planes_of(layout: ColumnLayout) -> tuple[Bytes, list[npt.NDArray[np.generic]]]:
    """An empty planes tensor and views of its planes [rows, E]."""
    raw = np.zeros(layout.planes_bytes, np.uint8)
    return raw, plane_views(layout, raw)


def plane_views(layout: ColumnLayout, raw: Bytes) -> list[npt.NDArray[np.generic]]:
    views: list[npt.NDArray[np.generic]] = []
    for dtype, n_rows, at in layout.plane_shapes():
        n_bytes = n_rows * layout.n_outputs * np.dtype(dtype).itemsize
        views.append(raw[at : at + n_bytes].view(dtype).reshape(n_rows, layout.n_outputs))
    return views


ReadRows = Callable[[int, int], Bytes]  # (first row, number of rows) -> bytes [rows, row bytes]


def gather_columns(
    layout: ColumnLayout, read: ReadRows, neurons: npt.NDArray[np.integer], out: Bytes, planes: list[npt.NDArray[np.generic]] | None,
    strip_budget: int,
) -> None:  # fmt: skip
    """Fill out [len(neurons), column_bytes] with the columns of these original neurons, and the planes where they are wanted."""
    step = strip_rows(layout, strip_budget)
    for first in range(0, layout.n_embd, step):
        n = min(step, layout.n_embd - first)
        blocks = read(first, n).reshape(n, -1, layout.type.n_bytes)
        quants, scales = layout.scheme.split(blocks)
        for view, scale in zip(planes or (), scales, strict=False):
            view[:, first : first + n] = scale.T
        chosen = np.swapaxes(quants[:, neurons], 0, 1)  # [neurons, outputs(, bytes)]
        missing = ceil_to(n, 64) - n
        if missing:
            chosen = np.concatenate([chosen, np.zeros((len(chosen), missing, *chosen.shape[2:]), np.uint8)], axis=1)
        for packing, first_bit, at in layout.packings():
            bits = _BITS[packing]
            part = chosen if bits >= 8 else chosen >> first_bit & ((1 << bits) - 1)
            start = at + first * bits // 8
            packed = pack(packing, part)
            out[:, start : start + packed.shape[1]] = packed


def scatter_columns(
    layout: ColumnLayout, columns: Bytes, original: npt.NDArray[np.integer], planes: list[npt.NDArray[np.generic]], first: int, n: int
) -> Bytes:
    """Rows first .. first+n of the source's down projection, bytes [n, row bytes]; `first` a multiple of 64.

    Args:
        columns: of all neurons in new order, [n_ff, column_bytes].
        original: perm, the original index of each.
    """
    m = ceil_to(n, 64)
    quants: Bytes | None = None
    for packing, first_bit, at in layout.packings():
        bits = _BITS[packing]
        start = at + first * bits // 8
        part = unpack(packing, np.ascontiguousarray(columns[:, start : start + m * bits // 8]), m)
        part = part if bits >= 8 else part << first_bit
        quants = part if quants is None else quants | part
    assert quants is not None
    rows = np.empty((n, layout.n_ff, *quants.shape[2:]), np.uint8)
    rows[:, original] = np.swapaxes(quants, 0, 1)[:n]
    scales: Scales = [np.ascontiguousarray(view[:, first : first + n].T) for view in planes]
    return layout.scheme.join(rows, scales).reshape(n, -1)
