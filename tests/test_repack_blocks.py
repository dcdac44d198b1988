"""Blocks taken apart and columns transposed: nothing is lost, and the documented formulas give llama.cpp's values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leanstream_gguf.repack import blocks, columns
from leanstream_gguf.repack.format import BY_NAME, padded_outputs

QUANTISED = [name for name in blocks.SCHEMES if name not in ("F32", "F16", "BF16")]


def random_rows(name: str, n_rows: int, n_columns: int, seed: int = 0) -> blocks.Bytes:
    kind = BY_NAME[name]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (n_rows, n_columns // kind.n_elements, kind.n_bytes), np.uint8)
    return np.ascontiguousarray(raw)


@given(
    name=st.sampled_from(sorted(blocks.SCHEMES)), n_rows=st.integers(1, 5), n_blocks=st.integers(1, 3), seed=st.integers(0, 1 << 30)
)
@settings(max_examples=150, deadline=None)
def test_join_undoes_split(name: str, n_rows: int, n_blocks: int, seed: int) -> None:
    raw = random_rows(name, n_rows, n_blocks * BY_NAME[name].n_elements, seed)
    scheme = blocks.SCHEMES[name]
    quants, scales = scheme.split(raw)
    assert quants.shape[:2] == (n_rows, n_blocks * BY_NAME[name].n_elements)
    assert len(scales) == len(scheme.planes)
    for plane, scale in zip(scheme.planes, scales, strict=True):
        assert scale.shape == (n_rows, quants.shape[1] // plane.n_shared) and scale.dtype == np.dtype(plane.dtype)
    assert scheme.join(quants, scales).tobytes() == raw.tobytes()


@given(
    packing=st.sampled_from(["raw32", "raw16", "raw8", "nib", "crumb", "bit"]), n=st.integers(1, 5), groups=st.integers(1, 4),
    seed=st.integers(0, 1 << 30),
)  # fmt: skip
@settings(deadline=None)
def test_unpack_undoes_pack(packing: str, n: int, groups: int, seed: int) -> None:
    bits = columns._BITS[packing]
    shape: Any = (n, 64 * groups) if bits <= 8 else (n, 64 * groups, bits // 8)
    q = np.random.default_rng(seed).integers(0, 1 << min(8, bits), shape, np.uint8)
    packed = columns.pack(packing, q)
    assert packed.shape == (n, 64 * groups * bits // 8)
    assert (columns.unpack(packing, packed, 64 * groups) == q).all()


def place(packing: str, column: bytes, r: int) -> int:
    """Element r of a packed column, as docs/lean_format.md 3.1 says in words."""
    if packing == "raw8":
        return column[r]
    if packing == "nib":
        return column[r // 32 * 16 + r % 16] >> (4 if r % 32 >= 16 else 0) & 15
    if packing == "crumb":
        return column[r // 64 * 16 + r % 16] >> (r % 64 // 16 * 2) & 3
    return int.from_bytes(column[r // 32 * 4 : r // 32 * 4 + 4], "little") >> (r % 32) & 1


def value_of(name: str, q: int, scale: dict[str, float]) -> float:
    """The formulas of docs/lean_format.md 3.2."""
    d, m, sc, mn = (scale.get(key, 0.0) for key in ("d", "m", "sc", "mn"))
    byte = int(sc)
    return {
        "Q8_0": lambda: d * (q - 256 if q > 127 else q),
        "Q4_0": lambda: d * (q - 8),
        "Q4_1": lambda: d * q + m,
        "Q5_0": lambda: d * (q - 16),
        "Q5_1": lambda: d * q + m,
        "Q2_K": lambda: d * (byte & 15) * q - scale["dmin"] * (byte >> 4),
        "Q3_K": lambda: d * (sc - 32) * (q - 4),
        "Q4_K": lambda: d * sc * q - scale["dmin"] * mn,
        "Q5_K": lambda: d * sc * q - scale["dmin"] * mn,
        "Q6_K": lambda: d * (sc - 256 if sc > 127 else sc) * (q - 32),
    }[name]()


def tame(name: str, raw: blocks.Bytes) -> blocks.Bytes:
    """The same blocks with finite, small scales."""
    quants, scales = blocks.SCHEMES[name].split(raw)
    halves = [(0.01 + scale % 7 * 0.003).astype("<f2").view("<u2") if scale.dtype.itemsize == 2 else scale for scale in scales]
    return blocks.SCHEMES[name].join(quants, halves)


@pytest.mark.parametrize("name", QUANTISED)
def test_documented_values_are_llama_cpps(name: str) -> None:
    """A column read by the words of the document gives what the gguf package's dequantisation gives."""
    gguf = pytest.importorskip("gguf")
    n_embd, n_ff = 70, 256
    raw = tame(name, random_rows(name, n_embd, n_ff, seed=3))
    expected = gguf.quants.dequantize(raw.reshape(n_embd, -1), gguf.GGMLQuantizationType[name])
    layout = columns.ColumnLayout(BY_NAME[name], n_ff, n_embd)
    flat = raw.reshape(n_embd, -1)
    neurons = np.array([200, 3, 255, 64])
    out = np.zeros((4, layout.column_bytes), np.uint8)
    _planes_raw, planes = columns.planes_of(layout)
    columns.gather_columns(layout, lambda first, n: flat[first : first + n], neurons, out, planes, 1)
    for i, j in enumerate(neurons):
        for r in range(n_embd):
            q = 0
            for packing, first_bit, at in layout.packings():
                q |= place(packing, out[i, at:].tobytes(), r) << first_bit
            scale = {}
            for plane, view in zip(layout.scheme.planes, planes, strict=True):
                item = view[j // plane.n_shared, r]
                scale[plane.name] = float(np.uint16(item).view(np.float16)) if plane.dtype == "<u2" else float(item)
            assert value_of(name, q, scale) == pytest.approx(expected[r, j], rel=1e-5, abs=1e-7), (name, r, j)


@given(
    name=st.sampled_from(sorted(blocks.SCHEMES)), n_embd=st.integers(1, 200), n_blocks=st.integers(1, 2), seed=st.integers(0, 1 << 30),
    budget=st.sampled_from([1, 1 << 18, 1 << 30]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_scatter_undoes_gather(name: str, n_embd: int, n_blocks: int, seed: int, budget: int) -> None:
    n_ff = n_blocks * max(32, BY_NAME[name].n_elements)
    flat = random_rows(name, n_embd, n_ff, seed).reshape(n_embd, -1)
    layout = columns.ColumnLayout(BY_NAME[name], n_ff, n_embd)
    original = np.random.default_rng(seed).permutation(n_ff)
    out = np.zeros((n_ff, layout.column_bytes), np.uint8)
    raw, planes = columns.planes_of(layout)
    columns.gather_columns(layout, lambda first, n: flat[first : first + n], original, out, planes, budget)
    assert len(raw) == layout.planes_bytes and len(raw) % 64 == 0
    views = columns.plane_views(layout, raw)
    step = columns.strip_rows(layout, budget)
    rows = [
        columns.scatter_columns(layout, out, original, views, first, min(step, n_embd - first)) for first in range(0, n_embd, step)
    ]
    assert np.concatenate(rows).tobytes() == flat.tobytes()


def test_columns_are_as_small_as_documented() -> None:
    bits = {"Q4_0": 4, "Q5_K": 5, "Q6_K": 6, "Q8_0": 8, "Q3_K": 3, "Q2_K": 2, "BF16": 16, "F32": 32}
    for name, n_bits in bits.items():
        layout = columns.ColumnLayout(BY_NAME[name], 512, 2560)
        assert layout.column_bytes == padded_outputs(2560) * n_bits // 8
