"""Chosen numbers into GGUF blocks and back: for the few weights of a synthetic model that are planted and not random.

Plain rounding to the nearest, no search for better scales. The tests compare with the gguf package.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .blocks import LAYOUTS, Bytes

Floats = npt.NDArray[np.float32]


def _half(values: npt.NDArray[np.floating]) -> Bytes:
    return np.ascontiguousarray(values.astype("<f2")).view(np.uint8).reshape(len(values), -1)


def _from_half(raw: Bytes) -> Floats:
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _inverse(scale: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    return np.divide(1.0, scale, out=np.zeros_like(scale), where=scale != 0)


def _q4_0(x: Floats) -> Bytes:
    largest = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
    d = (largest / -8).astype(np.float16).astype(np.float32)
    q = np.clip(np.rint(x * _inverse(d)) + 8, 0, 15).astype(np.uint8)
    return np.hstack([_half(d), q[:, :16] | (q[:, 16:] << 4)])


def _from_q4_0(raw: Bytes) -> Floats:
    q = np.hstack([raw[:, 2:] & 15, raw[:, 2:] >> 4]).astype(np.float32) - 8
    return _from_half(raw[:, :2]) * q


def _q8_0(x: Floats) -> Bytes:
    d = (np.abs(x).max(axis=1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
    return np.hstack([_half(d), np.clip(np.rint(x * _inverse(d)), -127, 127).astype(np.int8).view(np.uint8)])


def _from_q8_0(raw: Bytes) -> Floats:
    return _from_half(raw[:, :2]) * np.ascontiguousarray(raw[:, 2:]).view(np.int8).astype(np.float32)


def _pack_scales(sc: Bytes, m: Bytes) -> Bytes:
    """Eight 6-bit scales and minima in twelve bytes, as Q4_K has them."""
    first = (sc[:, :4] & 63) | ((sc[:, 4:] >> 4) << 6)
    second = (m[:, :4] & 63) | ((m[:, 4:] >> 4) << 6)
    return np.hstack([first, second, (sc[:, 4:] & 15) | ((m[:, 4:] & 15) << 4)])


def _unpack_scales(raw: Bytes) -> tuple[Bytes, Bytes]:
    first, second, low = raw[:, :4], raw[:, 4:8], raw[:, 8:]
    sc = np.hstack([first & 63, (low & 15) | ((first >> 6) << 4)])
    return sc, np.hstack([second & 63, (low >> 4) | ((second >> 6) << 4)])


def _q4_k(x: Floats) -> Bytes:
    sub = x.reshape(-1, 8, 32)
    low = np.maximum(-sub.min(axis=2), 0)
    scale = (np.maximum(sub.max(axis=2), 0) + low) / 15
    d = (scale.max(axis=1, keepdims=True) / 63).astype(np.float16).astype(np.float32)
    dmin = (low.max(axis=1, keepdims=True) / 63).astype(np.float16).astype(np.float32)
    sc = np.clip(np.rint(scale * _inverse(d)), 0, 63).astype(np.uint8)
    m = np.clip(np.rint(low * _inverse(dmin)), 0, 63).astype(np.uint8)
    step, floor = (d * sc)[:, :, None], (dmin * m)[:, :, None]
    q = np.clip(np.rint((sub + floor) * _inverse(step)), 0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    return np.hstack([_half(d), _half(dmin), _pack_scales(sc, m), (q[:, :, 0] | (q[:, :, 1] << 4)).reshape(-1, 128)])


def _from_q4_k(raw: Bytes) -> Floats:
    d, dmin = _from_half(raw[:, 0:2]), _from_half(raw[:, 2:4])
    sc, m = _unpack_scales(raw[:, 4:16])
    packed = raw[:, 16:].reshape(-1, 4, 32)
    q = np.stack([packed & 15, packed >> 4], axis=2).reshape(-1, 8, 32).astype(np.float32)
    return ((d * sc)[:, :, None] * q - (dmin * m)[:, :, None]).reshape(-1, 256)


def _q6_k(x: Floats) -> Bytes:
    sub = x.reshape(-1, 16, 16)
    scale = np.abs(sub).max(axis=2) / 31
    d = (scale.max(axis=1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
    sc = np.clip(np.rint(scale * _inverse(d)), 0, 127)
    q = np.clip(np.rint(sub * _inverse(d * sc)[:, :, None]) + 32, 0, 63).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = np.stack([q[:, :, 0] & 15 | (q[:, :, 2] & 15) << 4, q[:, :, 1] & 15 | (q[:, :, 3] & 15) << 4], axis=2)
    high = q[:, :, 0] >> 4 | q[:, :, 1] >> 4 << 2 | q[:, :, 2] >> 4 << 4 | q[:, :, 3] >> 4 << 6
    return np.hstack([low.reshape(-1, 128), high.reshape(-1, 64), sc.astype(np.int8).view(np.uint8), _half(d)])


def _from_q6_k(raw: Bytes) -> Floats:
    low, high = raw[:, :128].reshape(-1, 2, 2, 32), raw[:, 128:192].reshape(-1, 2, 1, 32)
    nibbles = np.concatenate([low & 15, low >> 4], axis=2)
    tops = np.concatenate([high & 3, high >> 2 & 3, high >> 4 & 3, high >> 6], axis=2)
    q = (nibbles | tops << 4).reshape(-1, 16, 16).astype(np.float32) - 32
    sc = np.ascontiguousarray(raw[:, 192:208]).view(np.int8).astype(np.float32)
    return ((_from_half(raw[:, 208:]) * sc)[:, :, None] * q).reshape(-1, 256)


_CODECS: dict[str, tuple[Callable[[Floats], Bytes], Callable[[Bytes], Floats]]] = {
    "F32": (lambda x: np.ascontiguousarray(x, "<f4").view(np.uint8).reshape(-1, 4), lambda raw: raw.view("<f4")),
    "F16": (lambda x: _half(x), _from_half),
    "Q4_0": (_q4_0, _from_q4_0),
    "Q8_0": (_q8_0, _from_q8_0),
    "Q4_K": (_q4_k, _from_q4_k),
    "Q6_K": (_q6_k, _from_q6_k),
}

TYPES = tuple(_CODECS)


def quantize(kind: str, values: Floats) -> Bytes:
    """float32 [n_rows, n_columns] as uint8 [n_rows, bytes of a row]; the columns must be whole blocks."""
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, LAYOUTS[kind].n_elements)
    return np.ascontiguousarray(_CODECS[kind][0](blocks)).reshape(len(values), -1)


def dequantize(kind: str, raw: Bytes) -> Floats:
    """The float32 [n_rows, n_columns] that uint8 [n_rows, bytes of a row] stand for."""
    blocks = np.ascontiguousarray(raw).reshape(-1, LAYOUTS[kind].n_bytes)
    return np.ascontiguousarray(_CODECS[kind][1](blocks)).reshape(len(raw), -1)
