"""Down projections in another type: the lossy `--down-type`, from the model itself or from a file of higher precision."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _lib
from ..errors import UnsupportedError
from .blocks import Bytes
from .columns import ReadRows
from .format import BlockType
from .gguf_file import Model, TensorInfo
from .layout import NeuronLayer
from .storage import Source

Floats = npt.NDArray[np.float32]


class _Traits(ctypes.Structure):  # struct ggml_type_traits
    _fields_ = [
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
        ("from_float_ref", ctypes.c_void_p),
    ]


@functools.cache
def _ggml() -> ctypes.CDLL:
    _lib.native()
    file = _lib.library_file("ggml-base")
    if file is None:
        raise UnsupportedError("this build has no ggml library of its own, so types cannot be converted")
    base = ctypes.CDLL(str(file))
    base.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
    base.ggml_get_type_traits.argtypes = [ctypes.c_int]
    base.ggml_quantize_chunk.restype = ctypes.c_size_t
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    base.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, number, number, number, pointer]
    base.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
    base.ggml_quantize_requires_imatrix.argtypes = [ctypes.c_int]
    return base


def to_float(kind: BlockType, rows: Bytes) -> Floats:
    """Rows [n, row bytes] as float32 [n, elements], by llama.cpp's own conversion.

    Raises:
        UnsupportedError: llama.cpp has none for this type.
    """
    rows = np.ascontiguousarray(rows)
    n_elements = rows.shape[1] // kind.n_bytes * kind.n_elements
    if kind.name == "F32":
        return rows.view("<f4")
    if kind.name == "F16":
        return rows.view("<f2").astype(np.float32)
    traits = _ggml().ggml_get_type_traits(kind.id).contents
    if not traits.to_float or traits.type_size != kind.n_bytes:
        raise UnsupportedError(f"weights of type {kind.name} cannot be converted")
    out = np.empty((len(rows), n_elements), np.float32)
    traits.to_float(rows.ctypes.data, out.ctypes.data, out.size)
    return out


def quantize(kind: BlockType, rows: Floats) -> Bytes:
    """float32 [n, elements] as rows of `kind` [n, row bytes], by llama.cpp's own conversion."""
    rows = np.ascontiguousarray(rows, np.float32)
    out = np.empty((len(rows), kind.row_bytes(rows.shape[1])), np.uint8)
    _ggml().ggml_quantize_chunk(kind.id, rows.ctypes.data, out.ctypes.data, 0, len(rows), rows.shape[1], None)
    return out


@dataclass
class ErrorSum:
    """Squared error of requantised weights against what they were made from."""

    squared: float = 0.0
    signal: float = 0.0

    @property
    def relative_rms(self) -> float:
        return float((self.squared / self.signal) ** 0.5) if self.signal else 0.0


@dataclass
class DownRows:
    """Gives rows of down projections as they will be stored."""

    higher: tuple[Model, Source] | None = None  # of --from-source
    errors: dict[int, ErrorSum] = field(default_factory=dict)  # by block

    def reader(self, layer: NeuronLayer, source: Source) -> ReadRows:
        if not layer.requantised:
            return lambda first, n: source.rows(layer.down, first, n)
        tensor, file = self._origin(layer, source)
        error = self.errors.setdefault(layer.block, ErrorSum())

        def read(first: int, n: int) -> Bytes:
            values = to_float(tensor.type, file.rows(tensor, first, n))
            stored = quantize(layer.down_type, values)
            back = to_float(layer.down_type, stored)
            error.squared += float(np.sum((back - values) ** 2, dtype=np.float64))
            error.signal += float(np.sum(values**2, dtype=np.float64))
            return stored

        return read

    def _origin(self, layer: NeuronLayer, source: Source) -> tuple[TensorInfo, Source]:
        if self.higher is None:
            return layer.down, source
        model, file = self.higher
        tensor = model.tensors.get(layer.down.name)
        if tensor is None or tensor.ne != layer.down.ne:
            path = model.first.path
            raise UnsupportedError(f"{path} has no {layer.down.name} of the same shape: it is not the same model", path=path)
        return tensor, file


def check_down_type(kind: Any, layers: list[NeuronLayer]) -> None:
    """
    Raises:
        UnsupportedError: the type cannot be made here, or does not fit the layers' widths.
    """
    if _ggml().ggml_quantize_requires_imatrix(kind.id):
        raise UnsupportedError(f"--down-type {kind.name} needs an importance matrix")
    for layer in layers:
        if layer.n_ff % kind.n_elements:
            raise UnsupportedError(f"blk.{layer.block}: {layer.n_ff} neurons do not fill whole {kind.name} blocks")
