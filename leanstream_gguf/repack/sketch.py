"""The 2-bit image of a deciding projection: docs/lean_format.md 3.4."""

from __future__ import annotations

import numpy as np

from .blocks import Bytes
from .columns import pack, unpack
from .format import SKETCH_GROUP, BlockType, padded_outputs, sketch_row_bytes
from .requantize import Floats, to_float

_ROUNDS = 4  # of scale and codes improving each other; more change nothing measurable


def encode(kind: BlockType, rows: Bytes, n_inputs: int) -> Bytes:
    """Sketch rows [n, sketch row bytes] of weight rows [n, row bytes]."""
    values = to_float(kind, rows)
    width = padded_outputs(n_inputs)
    if width != n_inputs:
        values = np.concatenate([values, np.zeros((len(values), width - n_inputs), np.float32)], axis=1)
    groups = values.reshape(len(values), -1, SKETCH_GROUP)
    codes, scales = _fit(groups)
    crumbs = pack("crumb", codes.reshape(len(values), width))
    out = np.concatenate([crumbs, scales.astype("<f2").view(np.uint8).reshape(len(values), -1)], axis=1)
    assert out.shape[1] == sketch_row_bytes(n_inputs)
    return out


def _fit(groups: Floats) -> tuple[Bytes, Floats]:
    """Codes 0..3 and the scale of least squared error for each group [..., 32], level = scale * (2 code - 3)."""
    scales = np.sqrt(np.mean(groups**2, axis=-1)) * np.float32(0.498)  # best uniform step of a normal distribution
    codes = np.zeros(groups.shape, np.uint8)
    for _ in range(_ROUNDS):
        safe = np.where(scales > 0, scales, 1)[..., None]
        codes = np.clip(np.floor(groups / (2 * safe)) + 2, 0, 3).astype(np.uint8)
        levels = 2 * codes.astype(np.float32) - 3
        scales = np.maximum(0, np.sum(levels * groups, axis=-1) / np.sum(levels * levels, axis=-1))
    return codes, scales


def decode(image: Bytes, n_inputs: int) -> Floats:
    """float32 [n, n_inputs] of sketch rows."""
    width = padded_outputs(n_inputs)
    codes = unpack("crumb", image[:, : width // 4], width).astype(np.float32)
    scales = np.ascontiguousarray(image[:, width // 4 :]).view("<f2").astype(np.float32)
    values: Floats = (2 * codes - 3) * np.repeat(scales, SKETCH_GROUP, axis=1)
    return values[:, :n_inputs]
