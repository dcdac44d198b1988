"""Blocks of ggml's types taken apart into quants and scales, and put together again, without loss.

All arrays are uint8 unless said. R rows, nb blocks in a row, n = elements of a row. `split` takes blocks [R, nb, block bytes] and
gives quants [R, n] (whole numbers as stored, or raw bytes [R, n, 2 or 4] of floats) and scales: a list of [R, n / elements per
scale] arrays, in the order of docs/lean_format.md 3.3; `join` is its inverse. Layouts: ggml-common.h of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[Any]  # uint8; numpy types shifts of it as wider integers
Half = npt.NDArray[np.uint16]  # raw bits of float16
Scales = list[npt.NDArray[np.generic]]
Split = Callable[[Bytes], tuple[Bytes, Scales]]
Join = Callable[[Bytes, Scales], Bytes]


@dataclass(frozen=True)
class Plane:
    """A scale: its name, numpy type, and how many neurons share one."""

    name: str
    dtype: str
    n_shared: int


@dataclass(frozen=True)
class Scheme:
    """How the quants of a type are packed in a column, its planes, and the functions that convert."""

    packings: tuple[tuple[str, int], ...]  # (packing, first bit of the quant in it)
    planes: tuple[Plane, ...]
    split: Split
    join: Join


def _half(raw: Bytes) -> Half:
    """[..., 2] bytes as [...] raw halves."""
    return np.ascontiguousarray(raw).view("<u2")[..., 0]


def _raw(half: npt.NDArray[np.generic]) -> Bytes:
    return np.ascontiguousarray(half.astype("<u2", copy=False))[..., None].view(np.uint8)


def _flat(q: Bytes) -> Bytes:
    return q.reshape(q.shape[0], -1)


def _two_nibbles(raw: Bytes) -> Bytes:
    """[..., m] bytes as [..., 2 m]: all low nibbles, then all high ones."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _from_nibbles(q: Bytes) -> Bytes:
    low, high = np.split(q, 2, axis=-1)
    packed: Bytes = low | high << 4
    return packed


# ---- blocks of 32 ---------------------------------------------------------------------------------------------------------


def _simple(n_scales: int, high_bits: bool, wide: bool = False) -> tuple[Split, Join]:
    """Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0: n_scales halves, the fifth bits, then quants."""
    at_bits = 2 * n_scales
    at_quants = at_bits + (4 if high_bits else 0)

    def split(blocks: Bytes) -> tuple[Bytes, Scales]:
        scales: Scales = [_half(blocks[..., 2 * i : 2 * i + 2]) for i in range(n_scales)]
        quants = blocks[..., at_quants:]
        q = quants if wide else _two_nibbles(quants)
        if high_bits:
            q = q | np.unpackbits(blocks[..., at_bits:at_quants], axis=-1, bitorder="little") << 4
        return _flat(q), scales

    def join(q: Bytes, scales: Scales) -> Bytes:
        q = q.reshape(q.shape[0], -1, 32)
        parts = [_raw(scale) for scale in scales]
        if high_bits:
            parts.append(np.packbits(q >> 4, axis=-1, bitorder="little"))
        parts.append(q if wide else _from_nibbles(q & 15))
        return np.concatenate(parts, axis=-1)

    return split, join


def _float(n_bytes: int) -> tuple[Split, Join]:
    """Floats are their own quants: [R, n, n_bytes]."""

    def split(blocks: Bytes) -> tuple[Bytes, Scales]:
        return blocks, []

    def join(q: Bytes, scales: Scales) -> Bytes:
        return q.reshape(q.shape[0], -1, n_bytes)

    return split, join


# ---- blocks of 256 --------------------------------------------------------------------------------------------------------


def _crumbs(raw: Bytes) -> Bytes:
    """Q2_K's order: [..., 64] bytes as [..., 256] pairs of bits."""
    halves = raw.reshape(*raw.shape[:-1], 2, 1, 32)
    pairs: Bytes = halves >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    return pairs.reshape(*raw.shape[:-1], 256)


def _from_crumbs(q: Bytes) -> Bytes:
    parts = q.reshape(*q.shape[:-1], 2, 4, 32)
    packed: Bytes = parts[..., 0, :] | parts[..., 1, :] << 2 | parts[..., 2, :] << 4 | parts[..., 3, :] << 6
    return packed.reshape(*q.shape[:-1], 64)


def _bits(raw: Bytes) -> Bytes:
    """[..., 32] bytes as [..., 256]: bit b of byte l is element 32 b + l."""
    bits: Bytes = raw[..., None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return bits.reshape(*raw.shape[:-1], 256)


def _from_bits(q: Bytes) -> Bytes:
    parts = q.reshape(*q.shape[:-1], 8, 32) << np.arange(8, dtype=np.uint8)[:, None]
    packed: Bytes = np.bitwise_or.reduce(parts, axis=-2)
    return packed


def _split_q2_k(blocks: Bytes) -> tuple[Bytes, Scales]:
    q = _crumbs(blocks[..., 16:80])
    return _flat(q), [_half(blocks[..., 80:82]), _half(blocks[..., 82:84]), _flat(blocks[..., :16])]


def _join_q2_k(q: Bytes, scales: Scales) -> Bytes:
    d, dmin, sc = scales
    n_rows = q.shape[0]
    parts = [sc.reshape(n_rows, -1, 16), _from_crumbs(q.reshape(n_rows, -1, 256)), _raw(d), _raw(dmin)]
    return np.concatenate(parts, axis=-1).astype(np.uint8, copy=False)


def _split_q3_k(blocks: Bytes) -> tuple[Bytes, Scales]:
    q = _crumbs(blocks[..., 32:96]) | _bits(blocks[..., :32]) << 2
    packed = blocks[..., 96:108]
    low = _two_nibbles(packed[..., :8])
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = (packed[..., None, 8:] >> shifts & 3).reshape(low.shape)
    return _flat(q), [_half(blocks[..., 108:110]), _flat(low | high << 4)]


def _join_q3_k(q: Bytes, scales: Scales) -> Bytes:
    d, flat = scales
    n_rows = q.shape[0]
    q, sc = q.reshape(n_rows, -1, 256), flat.astype(np.uint8, copy=False).reshape(n_rows, -1, 16)
    high = (sc >> 4).reshape(*sc.shape[:-1], 4, 4) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    parts = [_from_bits(q >> 2), _from_crumbs(q & 3), _from_nibbles(sc & 15), np.bitwise_or.reduce(high, axis=-2), _raw(d)]
    return np.concatenate(parts, axis=-1)


def _split_scales_k4(packed: Bytes) -> Scales:
    """The 12 bytes of Q4_K and Q5_K: 8 scales and 8 minima of 6 bits."""
    a, b, c = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    sc = np.concatenate([a & 63, c & 15 | a >> 6 << 4], axis=-1)
    mn = np.concatenate([b & 63, c >> 4 | b >> 6 << 4], axis=-1)
    return [_flat(sc), _flat(mn)]


def _join_scales_k4(sc: Bytes, mn: Bytes) -> Bytes:
    a = sc[..., :4] | sc[..., 4:] >> 4 << 6
    b = mn[..., :4] | mn[..., 4:] >> 4 << 6
    return np.concatenate([a, b, sc[..., 4:] & 15 | (mn[..., 4:] & 15) << 4], axis=-1)


def _chunk_nibbles(raw: Bytes) -> Bytes:
    """Q4_K's order: each 32 bytes hold 64 elements, low nibbles first."""
    return _two_nibbles(raw.reshape(*raw.shape[:-1], 4, 32)).reshape(*raw.shape[:-1], 256)


def _from_chunk_nibbles(q: Bytes) -> Bytes:
    return _from_nibbles(q.reshape(*q.shape[:-1], 4, 64)).reshape(*q.shape[:-1], 128)


def _k4(high_bits: bool) -> tuple[Split, Join]:
    """Q4_K and Q5_K."""
    at_quants = 48 if high_bits else 16

    def split(blocks: Bytes) -> tuple[Bytes, Scales]:
        q = _chunk_nibbles(blocks[..., at_quants:])
        if high_bits:
            q = q | _bits(blocks[..., 16:48]) << 4
        return _flat(q), [_half(blocks[..., 0:2]), _half(blocks[..., 2:4]), *_split_scales_k4(blocks[..., 4:16])]

    def join(q: Bytes, scales: Scales) -> Bytes:
        n_rows = q.shape[0]
        q = q.reshape(n_rows, -1, 256)
        sc, mn = (scale.astype(np.uint8, copy=False).reshape(n_rows, -1, 8) for scale in scales[2:])
        parts = [_raw(scales[0]), _raw(scales[1]), _join_scales_k4(sc, mn)]
        parts += [_from_bits(q >> 4)] if high_bits else []
        return np.concatenate([*parts, _from_chunk_nibbles(q & 15)], axis=-1)

    return split, join


def _split_q6_k(blocks: Bytes) -> tuple[Bytes, Scales]:
    halves = blocks[..., :128].reshape(*blocks.shape[:-1], 2, 64)
    q = _two_nibbles(halves).reshape(*blocks.shape[:-1], 256) | _crumbs(blocks[..., 128:192]) << 4
    return _flat(q), [_half(blocks[..., 208:210]), _flat(blocks[..., 192:208])]


def _join_q6_k(q: Bytes, scales: Scales) -> Bytes:
    d, sc = scales
    n_rows = q.shape[0]
    q = q.reshape(n_rows, -1, 256)
    low = _from_nibbles((q & 15).reshape(*q.shape[:-1], 2, 128)).reshape(*q.shape[:-1], 128)
    parts = [low, _from_crumbs(q >> 4), sc.astype(np.uint8, copy=False).reshape(n_rows, -1, 16), _raw(d)]
    return np.concatenate(parts, axis=-1)


_D = Plane("d", "<u2", 32)
_M = Plane("m", "<u2", 32)
_D_K, _DMIN_K = Plane("d", "<u2", 256), Plane("dmin", "<u2", 256)
_NIB, _NIB_BIT = (("nib", 0),), (("nib", 0), ("bit", 4))

SCHEMES: dict[str, Scheme] = {
    "F32": Scheme((("raw32", 0),), (), *_float(4)),
    "F16": Scheme((("raw16", 0),), (), *_float(2)),
    "BF16": Scheme((("raw16", 0),), (), *_float(2)),
    "Q8_0": Scheme((("raw8", 0),), (_D,), *_simple(1, False, wide=True)),
    "Q4_0": Scheme(_NIB, (_D,), *_simple(1, False)),
    "Q4_1": Scheme(_NIB, (_D, _M), *_simple(2, False)),
    "Q5_0": Scheme(_NIB_BIT, (_D,), *_simple(1, True)),
    "Q5_1": Scheme(_NIB_BIT, (_D, _M), *_simple(2, True)),
    "Q2_K": Scheme((("crumb", 0),), (_D_K, _DMIN_K, Plane("sc", "u1", 16)), _split_q2_k, _join_q2_k),
    "Q3_K": Scheme((("crumb", 0), ("bit", 2)), (_D_K, Plane("sc", "u1", 16)), _split_q3_k, _join_q3_k),
    "Q4_K": Scheme(_NIB, (_D_K, _DMIN_K, Plane("sc", "u1", 32), Plane("mn", "u1", 32)), *_k4(False)),
    "Q5_K": Scheme(_NIB_BIT, (_D_K, _DMIN_K, Plane("sc", "u1", 32), Plane("mn", "u1", 32)), *_k4(True)),
    "Q6_K": Scheme((("nib", 0), ("crumb", 4)), (_D_K, Plane("sc", "u1", 16)), _split_q6_k, _join_q6_k),
}
