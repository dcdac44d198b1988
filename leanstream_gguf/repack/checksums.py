"""CRC-32C of records, whole or put together from the checksums of their parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .._lib import check, native
from .blocks import Bytes

_POLYNOMIAL = 0x82F63B78  # reflected: bit 31 is the coefficient of 1
_ONE, _X = 1 << 31, 1 << 30

Sums = npt.NDArray[np.uint32]


def crc32c_rows(data: Bytes) -> Any:
    """CRC-32C of each row of [n, bytes], int32 [n]."""
    ffi, lib = native()
    data = np.ascontiguousarray(data)
    out = np.empty(len(data), np.uint32)
    check(lib.ls_crc32c_rows(ffi.from_buffer(data), len(data), data.shape[1], ffi.cast("uint32_t *", out.ctypes.data)))
    return out.view(np.int32)


def joined(parts: Sequence[tuple[Any, int]]) -> Any:
    """CRC-32C int32 [n] of rows, from (CRC-32C of one part of each row, bytes of that part), part after part."""
    whole: Sums = np.zeros(len(parts[0][0]), np.uint32)
    for sums, n_bytes in parts:
        whole = _times(whole, _power_of_x(8 * n_bytes)) ^ sums.view(np.uint32)
    return whole.view(np.int32)


def _times(a: Sums, b: int) -> Sums:
    """Product of polynomials over GF(2), modulo CRC-32C's."""
    product = np.zeros_like(a)
    for bit in range(31, -1, -1):  # of b, from the coefficient of 1 up; a is multiplied by x on the way
        if b >> bit & 1:
            product ^= a
        a = a >> np.uint32(1) ^ (a & np.uint32(1)) * np.uint32(_POLYNOMIAL)
    return product


def _power_of_x(n: int) -> int:
    """x to the power n."""
    power, square = np.full(1, _ONE, np.uint32), np.full(1, _X, np.uint32)
    while n:
        if n & 1:
            power = _times(power, int(square[0]))
        square = _times(square, int(square[0]))
        n >>= 1
    return int(power[0])
