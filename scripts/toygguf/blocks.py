"""Random tensor data in GGUF block formats: always finite, zero mean, with a chosen standard deviation.

Only raw PCG64 output is used: numpy promises that stream across versions, unlike its distributions.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Layout:
    """How ggml stores one type: its number in the file, elements in a block, bytes in a block."""

    type_id: int
    n_elements: int
    n_bytes: int


LAYOUTS: dict[str, Layout] = {
    "F32": Layout(0, 1, 4),
    "F16": Layout(1, 1, 2),
    "Q4_0": Layout(2, 32, 18),
    "Q4_1": Layout(3, 32, 20),
    "Q8_0": Layout(8, 32, 34),
    "Q4_K": Layout(12, 256, 144),
    "Q6_K": Layout(14, 256, 210),
    "BF16": Layout(30, 1, 2),
    "MXFP4": Layout(39, 32, 17),
}

# Standard deviation of a uniform integer quant, in quant steps.
_STD_4BIT = math.sqrt((16**2 - 1) / 12)
_STD_6BIT = math.sqrt((64**2 - 1) / 12)
_STD_8BIT = math.sqrt((256**2 - 1) / 12)
# MXFP4 codes are 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives.
_STD_MXFP4 = math.sqrt(sum(v * v for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8)


class RandomSource:
    """Raw random bytes and uniform numbers, the same for the same name in every numpy version."""

    def __init__(self, name: str) -> None:
        self._bits = np.random.PCG64(zlib.crc32(name.encode()))

    def bytes(self, n_rows: int, n_columns: int) -> Bytes:
        """uint8 [n_rows, n_columns]."""
        n_words = (n_rows * n_columns + 7) // 8
        raw = np.asarray(self._bits.random_raw(n_words), dtype="<u8")
        return raw.view(np.uint8)[: n_rows * n_columns].reshape(n_rows, n_columns)

    def uniform(self, n: int, low: float, high: float) -> npt.NDArray[np.float64]:
        """float64 [n], evenly spread over [low, high)."""
        raw = self.bytes(n, 4).copy().view("<u4").reshape(n).astype(np.float64)
        return low + (high - low) * raw / 2.0**32


def _half(values: npt.NDArray[np.float64]) -> Bytes:
    return values.astype("<f2").view(np.uint8).reshape(-1, 2)


def _floats(source: RandomSource, n: int, mean: float, std: float) -> npt.NDArray[np.float64]:
    spread = std * math.sqrt(3)
    return source.uniform(n, mean - spread, mean + spread)


def _f32(source: RandomSource, n: int, mean: float, std: float) -> Bytes:
    return _floats(source, n, mean, std).astype("<f4").view(np.uint8).reshape(n, 4)


def _f16(source: RandomSource, n: int, mean: float, std: float) -> Bytes:
    return _half(_floats(source, n, mean, std))


def _bf16(source: RandomSource, n: int, mean: float, std: float) -> Bytes:
    return np.ascontiguousarray(_f32(source, n, mean, std)[:, 2:])


def _scales(source: RandomSource, n: int, typical: float) -> npt.NDArray[np.float64]:
    return source.uniform(n, 0.7 * typical, 1.3 * typical)


def _q4_0(source: RandomSource, n: int, _mean: float, std: float) -> Bytes:
    return np.hstack([_half(_scales(source, n, std / _STD_4BIT)), source.bytes(n, 16)])


def _q4_1(source: RandomSource, n: int, _mean: float, std: float) -> Bytes:
    d = _scales(source, n, std / _STD_4BIT)
    return np.hstack([_half(d), _half(-7.5 * d), source.bytes(n, 16)])


def _q8_0(source: RandomSource, n: int, _mean: float, std: float) -> Bytes:
    return np.hstack([_half(_scales(source, n, std / _STD_8BIT)), source.bytes(n, 32)])


def _q4_k(source: RandomSource, n: int, _mean: float, std: float) -> Bytes:
    # weight = d * sc * q - dmin * m; with m = sc and dmin = 7.5 d the mean is zero.
    d = _scales(source, n, std / (_STD_4BIT * 40))
    sc = source.bytes(n, 8) % 32 + 24
    low, high = sc[:, :4], sc[:, 4:]
    first = low | ((high >> 4) << 6)
    last = (high & 15) | ((high & 15) << 4)
    return np.hstack([_half(d), _half(7.5 * d), first, first, last, source.bytes(n, 128)])


def _q6_k(source: RandomSource, n: int, _mean: float, std: float) -> Bytes:
    d = _scales(source, n, std / (_STD_6BIT * 40))
    sc = source.bytes(n, 16) % 32 + 24
    return np.hstack([source.bytes(n, 192), sc, _half(d)])


def _mxfp4(source: RandomSource, n: int, _mean: float, std: float) -> Bytes:
    exponent = round(math.log2(std / _STD_MXFP4)) + 127
    return np.hstack([np.full((n, 1), exponent, dtype=np.uint8), source.bytes(n, 16)])


_MAKERS: dict[str, Callable[[RandomSource, int, float, float], Bytes]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}


def random_blocks(type_name: str, n_blocks: int, name: str, std: float, mean: float = 0.0) -> Bytes:
    """uint8 [n_blocks, bytes per block], a pure function of the arguments. Quantised types ignore `mean`."""
    made = _MAKERS[type_name](RandomSource(name), n_blocks, mean, std)
    assert made.shape == (n_blocks, LAYOUTS[type_name].n_bytes)
    return np.ascontiguousarray(made)
