"""Sees the feed-forward activations of a running model through llama.cpp's eval callback, and may change them.

Finds them by structure, not by name: the input of the product with `blk.N.ffn_down.weight` is the layer's hidden activation,
whatever computed it. The struct below is that of the pinned ggml (include/ggml.h).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _lib
from ..errors import LibraryError, UnsupportedError

Floats = npt.NDArray[np.float32]
_DOWN = re.compile(rb"blk\.(\d+)\.ffn_down\.weight")
_INPUT = re.compile(rb"blk\.(\d+)\.ffn_(gate|up)\.weight")
_GLU_NAMES = (b"REGLU", b"GEGLU", b"SWIGLU", b"GEGLU_ERF", b"GEGLU_QUICK")


class Tensor(ctypes.Structure):
    """struct ggml_tensor."""


Tensor._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * 4),
    ("nb", ctypes.c_size_t * 4),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * 16),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(Tensor) * 10),
    ("view_src", ctypes.POINTER(Tensor)),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * 64),
]


def floats(tensor: Tensor) -> Floats:
    """The tensor's own memory as float32 [n_tokens, width]."""
    if tensor.type != 0 or tensor.ne[2] != 1 or tensor.ne[3] != 1 or tensor.nb[0] != 4 or tensor.nb[1] != 4 * tensor.ne[0]:
        raise UnsupportedError("a feed-forward activation is not stored as plain float32 rows")
    raw = (ctypes.c_float * (tensor.ne[0] * tensor.ne[1])).from_address(tensor.data)
    return np.ctypeslib.as_array(raw).reshape(tensor.ne[1], tensor.ne[0])


@dataclass(frozen=True)
class Hidden:
    """A layer's hidden activation as computed: arrays are the graph's own memory, valid during the call.

    Attributes:
        values: what the down projection will multiply, [n_tokens, n_ff].
        decided: activation of the deciding projection before it meets the other one: act(gate) (a copy), or `values` itself.
    """

    block: int
    values: Floats
    decided: Floats


@dataclass
class Taps:
    """What to call. `hidden` may write into `values`; `entering` gets the input of the deciding projection [n_tokens, n_embd]."""

    hidden: Callable[[Hidden], None] | None = None
    entering: Callable[[int, Floats], None] | None = None


def _silu(x: Floats) -> Floats:
    result: Floats = x / (1 + np.exp(-np.clip(x, -80, 80)))
    return result


def _gelu(x: Floats) -> Floats:
    result: Floats = 0.5 * x * (1 + np.tanh(np.float32(0.79788456) * (x + np.float32(0.044715) * x * x * x)))
    return result


def _gelu_quick(x: Floats) -> Floats:
    result: Floats = x / (1 + np.exp(-np.clip(np.float32(1.702) * x, -80, 80)))
    return result


def _relu(x: Floats) -> Floats:
    return np.maximum(x, 0)


_ACTIVATIONS = {b"REGLU": _relu, b"GEGLU": _gelu, b"SWIGLU": _silu, b"GEGLU_ERF": _gelu, b"GEGLU_QUICK": _gelu_quick}


class GraphTap:
    """An eval callback for llama_context_params. Keep it alive as long as the context.

    Two passes over each graph: the first graph only teaches which node feeds which down projection, so run one token before
    what counts. An exception in a tap stops the decode and is kept in `error`.
    """

    def __init__(self) -> None:
        self.taps = Taps()
        self.error: BaseException | None = None
        self.activation: dict[int, str] = {}  # by block: "SWIGLU", "REGLU", ... or the operation that makes `values`
        self._blocks: dict[bytes, int] = {}  # name of the node that makes a layer's hidden activation
        self._op_names, self._glu_ops = _operations()
        import llama_cpp.llama_cpp as low_level

        self.callback = low_level.ggml_backend_sched_eval_callback(self._on_node)

    def attach(self, params: Any) -> None:
        params.cb_eval = self.callback

    def raise_error(self) -> None:
        """Raise what a tap raised during the last decode."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    def _on_node(self, address: int, ask: bool, _user_data: int | None) -> bool:
        try:
            tensor = Tensor.from_address(address)
            return self._wanted(tensor) if ask else self._seen(tensor)
        except BaseException as error:
            self.error = error
            return False

    def _wanted(self, tensor: Tensor) -> bool:
        if self._op_names[tensor.op] == b"MUL_MAT":
            weight = tensor.src[0].contents.name
            if match := _DOWN.fullmatch(weight):
                self._learn(int(match[1]), tensor.src[1].contents)
                return False
            return self.taps.entering is not None and _INPUT.fullmatch(weight) is not None
        return self.taps.hidden is not None and tensor.name in self._blocks

    def _learn(self, block: int, hidden: Tensor) -> None:
        if hidden.name not in self._blocks:
            self._blocks[bytes(hidden.name)] = block
            is_glu = self._op_names[hidden.op] == b"GLU" and bool(hidden.src[1])
            name = self._glu_ops[hidden.op_params[0]] if is_glu else self._op_names[hidden.op]
            self.activation[block] = name.decode()

    def _seen(self, tensor: Tensor) -> bool:
        name = bytes(tensor.name)
        if name in self._blocks and self.taps.hidden is not None:
            values = floats(tensor)
            act = _ACTIVATIONS.get(self.activation[self._blocks[name]].encode())
            decided = act(floats(tensor.src[0].contents)) if act else values
            self.taps.hidden(Hidden(self._blocks[name], values, decided))
        elif self.taps.entering is not None and self._op_names[tensor.op] == b"MUL_MAT":
            match = _INPUT.fullmatch(tensor.src[0].contents.name)
            if match:
                self.taps.entering(int(match[1]), floats(tensor.src[1].contents))
        return True


def _operations() -> tuple[list[bytes], list[bytes]]:
    """Names of ggml's operations and gated activations, by number."""
    file = _lib.library_file("ggml-base")
    if file is None:
        raise LibraryError("this build has no ggml library of its own, so activations cannot be watched")
    base = ctypes.CDLL(str(file))
    for function in (base.ggml_op_name, base.ggml_glu_op_name):
        function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_int]
    n_ops = _count_ops(base)
    return [base.ggml_op_name(i) for i in range(n_ops)], [base.ggml_glu_op_name(i) for i in range(7)]


def _count_ops(base: ctypes.CDLL) -> int:
    """GGML_OP_COUNT: the table ends with GLU in the pinned version; names beyond would be out of bounds."""
    for i in range(256):
        if base.ggml_op_name(i) == b"GLU":
            return i + 1
    raise LibraryError("ggml's table of operations is not the expected one")
