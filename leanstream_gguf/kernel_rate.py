"""How fast this machine multiplies a model's own weight types: timed with ggml's kernels, without the model.

A token's compute is dominated by matrix-vector products whose weights come from memory once. So each distinct (type,
shape) of the model is multiplied for a moment over a working set larger than the processor's cache, and the time of one
token is the sum over its tensors, its keys and values, and the vocabulary it is sampled from, plus a fixed cost for each node of the
graph.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import _lib, planner, probe
from .errors import LibraryError

WORKING_SET_BYTES = 192 << 20  # beyond the last-level cache of ordinary machines
SECONDS_PER_SHAPE = 0.25
MAX_SHAPES = 6  # the largest by bytes are measured, the rest goes by their mean rate
NODES_PER_LAYER = 22  # of a transformer layer besides the products: norms, rope, attention, adds
CONTEXT_TOKENS = 256  # that attention goes over: llama.cpp rounds up to so many
SAMPLING_SECONDS = 5e-9  # for each token of the vocabulary, of which the likeliest are chosen (measured on one of 262,144)
_SLACK_BYTES = 8 << 20  # tensor headers and the graph


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


class _Plan(ctypes.Structure):  # struct ggml_cplan
    _fields_ = [
        ("work_size", ctypes.c_size_t),
        ("work_data", ctypes.c_void_p),
        ("n_threads", ctypes.c_int),
        ("threadpool", ctypes.c_void_p),
        ("abort_callback", ctypes.c_void_p),
        ("abort_callback_data", ctypes.c_void_p),
        ("use_ref", ctypes.c_bool),
    ]


def _declare(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(library, name)
    function.restype, function.argtypes = result, list(arguments)
    return function


class Ggml:
    """The dozen ggml functions that are needed, from our library folder."""

    def __init__(self, folder: Path | None = None) -> None:
        """
        Raises:
            LibraryError: this build has no CPU kernels in a library of their own.
        """
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
        try:
            base, cpu = (self._load(folder or _lib.LIB_DIR, name) for name in ("ggml-base", "ggml-cpu"))
            self.init = _declare(base, "ggml_init", pointer, _InitParams)
            self.free = _declare(base, "ggml_free", None, pointer)
            self.tensor_2d = _declare(base, "ggml_new_tensor_2d", pointer, pointer, ctypes.c_int, number, number)
            self.mul_mat = _declare(base, "ggml_mul_mat", pointer, pointer, pointer, pointer)
            self.graph = _declare(base, "ggml_new_graph_custom", pointer, pointer, size, ctypes.c_bool)
            self.expand = _declare(base, "ggml_build_forward_expand", None, pointer, pointer)
            self.data = _declare(base, "ggml_get_data", pointer, pointer)
            self.row_size = _declare(base, "ggml_row_size", size, ctypes.c_int, number)
            self.type_name = _declare(base, "ggml_type_name", ctypes.c_char_p, ctypes.c_int)
            self.quantize = _declare(
                base, "ggml_quantize_chunk", size, ctypes.c_int, pointer, pointer, number, number, number, pointer
            )
            self.plan = _declare(cpu, "ggml_graph_plan", _Plan, pointer, ctypes.c_int, pointer)
            self.compute = _declare(cpu, "ggml_graph_compute", ctypes.c_int, pointer, ctypes.POINTER(_Plan))
        except (OSError, AttributeError, StopIteration) as error:
            raise LibraryError(f"the CPU kernels cannot be timed: {error}") from error

    @staticmethod
    def _load(folder: Path, name: str) -> ctypes.CDLL:
        names = (f"lib{name}.so", f"lib{name}.dylib", f"{name}.dll")
        return ctypes.CDLL(str(next(folder / n for n in names if (folder / n).exists())))

    def type_id(self, name: str) -> int | None:
        """The ggml_type of a name such as `q4_K`, None if there is none."""
        from llama_cpp import GGML_TYPE_COUNT

        names = [(self.type_name(number) or b"").decode().lower() for number in range(GGML_TYPE_COUNT)]
        return names.index(name.lower()) if name.lower() in names else None

    @contextlib.contextmanager
    def context(self, n_bytes: int) -> Iterator[int]:
        handle = self.init(_InitParams(n_bytes, None, False))
        if not handle:
            raise LibraryError(f"no memory to time the CPU kernels ({n_bytes} bytes)")
        try:
            yield handle
        finally:
            self.free(handle)


@dataclass(frozen=True)
class Product:
    """One matrix that a token is multiplied with, [n_in, n_out] of `type`; `uses` of them in a token (experts: a mean)."""

    type: str
    n_in: int
    n_out: int
    n_bytes: int
    uses: float


def products(index: Mapping[str, Any]) -> list[Product]:
    """The matrix products of one token, from ls_model_index_json: equal ones joined, largest share of bytes first."""
    names = {tensor["name"] for tensor in index["tensors"]}
    tied = "output.weight" not in names
    used = int(index.get("n_expert_used") or 0) / max(1, int(index.get("n_expert") or 0))
    uses: dict[tuple[str, int, int, int], float] = {}
    for tensor in index["tensors"]:
        shape, name = [*tensor["shape"], 1, 1], tensor["name"]
        looked_up = re.search(r"per_layer_token", name) or ("token_embd." in name and not tied)
        if shape[1] == 1 or not name.endswith(".weight") or looked_up:
            continue
        key = (tensor["type"], shape[0], shape[1], tensor["bytes"] // shape[2])
        uses[key] = uses.get(key, 0.0) + (shape[2] * used if shape[2] > 1 else 1.0)
    found = [Product(*key, count) for key, count in uses.items() if count]
    return sorted(found, key=lambda product: -product.n_bytes * product.uses)


def _fill(ggml: Ggml, kind: int, product: Product, address: int) -> None:
    """Write valid, ordinary weights: one quantised row of small numbers, repeated."""
    row_bytes = ggml.row_size(kind, product.n_in)
    values = (ctypes.c_float * product.n_in)(*[((i * 37) % 101 - 50) / 500 for i in range(product.n_in)])
    importance = (ctypes.c_float * product.n_in)(*[1.0] * product.n_in)  # some types insist on it
    row = ctypes.create_string_buffer(row_bytes)
    if ggml.type_name(kind) in (b"f32", b"f16", b"bf16"):
        row.raw = (b"\x00\x3c" * (row_bytes // 2))[:row_bytes]
    else:
        ggml.quantize(kind, values, row, 0, 1, product.n_in, importance)
    block = row.raw * max(1, (1 << 20) // row_bytes)
    total = row_bytes * product.n_out
    for offset in range(0, total, len(block)):
        ctypes.memmove(address + offset, block, min(len(block), total - offset))


def _run_seconds(ggml: Ggml, graph: int, n_threads: int, seconds: float) -> float:
    """Seconds of one run of a graph over about `seconds`, after a warm-up: the lower quartile, because whatever else runs
    for a moment only ever adds."""
    plan = ggml.plan(graph, n_threads, None)
    work = ctypes.create_string_buffer(max(1, plan.work_size))
    plan.work_data = ctypes.addressof(work)
    ggml.compute(graph, ctypes.byref(plan))
    times: list[float] = []
    deadline = time.monotonic() + seconds
    while len(times) < 3 or (time.monotonic() < deadline and len(times) < 50):
        start = time.perf_counter()
        ggml.compute(graph, ctypes.byref(plan))
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 4]


def product_seconds(ggml: Ggml, product: Product, n_threads: int) -> float | None:
    """Seconds of one matrix-vector product with weights that are not in the processor's cache; None: unknown type."""
    kind = ggml.type_id(product.type)
    if kind is None:
        return None
    room = min(WORKING_SET_BYTES, probe.automatic_budget().n_bytes // 4)
    copies = max(1, min(256, room // product.n_bytes))
    with ggml.context(copies * (product.n_bytes + (1 << 12)) + _SLACK_BYTES) as context:
        graph = ggml.graph(context, 1024, False)
        vector = ggml.tensor_2d(context, 0, product.n_in, 1)
        ctypes.memset(ggml.data(vector), 0, 4 * product.n_in)
        for _ in range(copies):
            weights = ggml.tensor_2d(context, kind, product.n_in, product.n_out)
            _fill(ggml, kind, product, ggml.data(weights))
            ggml.expand(graph, ggml.mul_mat(context, weights, vector))
        return _run_seconds(ggml, graph, n_threads, SECONDS_PER_SHAPE) / copies


def node_seconds(ggml: Ggml, n_threads: int) -> float:
    """Fixed cost of one node of a graph: the threads meet after each."""
    n_nodes = 500
    with ggml.context(_SLACK_BYTES) as context:
        graph = ggml.graph(context, 1024, False)
        vector = ggml.tensor_2d(context, 0, 32, 1)
        matrix = ggml.tensor_2d(context, 0, 32, 32)
        ctypes.memset(ggml.data(vector), 0, 4 * 32)
        ctypes.memset(ggml.data(matrix), 0, 4 * 32 * 32)
        for _ in range(n_nodes):
            ggml.expand(graph, ggml.mul_mat(context, matrix, vector))
        return _run_seconds(ggml, graph, n_threads, 0.1) / n_nodes


@dataclass(frozen=True)
class ComputeRate:
    """Expected compute of one token with everything resident."""

    seconds_per_token: float
    weight_bytes_per_token: int
    bytes_per_second: float
    node_seconds: float
    reason: str


def compute_rate(index: Mapping[str, Any], n_threads: int, ggml: Ggml | None = None) -> ComputeRate:
    """Time the model's largest products and add up one token.

    Raises:
        LibraryError: the kernels cannot be timed in this build.
    """
    ggml = ggml or Ggml()
    wanted: Sequence[Product] = products(index)
    seconds = measured = unmeasured = 0.0
    for position, product in enumerate(wanted):
        one = product_seconds(ggml, product, n_threads) if position < MAX_SHAPES else None
        if one is None:
            unmeasured += product.n_bytes * product.uses
        else:
            seconds += one * product.uses
            measured += product.n_bytes * product.uses
    if not measured:
        raise LibraryError("none of the model's weight types can be timed")
    seconds *= (measured + unmeasured) / measured
    node = node_seconds(ggml, n_threads)
    n_bytes = int(measured + unmeasured)
    shape = planner.Shape.from_index(index)
    attention = planner.kv_bytes(shape, CONTEXT_TOKENS) * seconds / n_bytes
    total = seconds + node * NODES_PER_LAYER * shape.n_layer + attention + SAMPLING_SECONDS * shape.n_vocab
    reason = f"{min(MAX_SHAPES, len(wanted))} of {len(wanted)} weight shapes timed with {n_threads} threads"
    return ComputeRate(total, n_bytes, n_bytes / seconds, node, reason)
