"""The GGUF container: metadata, tensor table, data; whole files and split sets, written with bounded memory.

File layout: magic "GGUF", u32 version, u64 n_tensors, u64 n_kv, the key-value pairs, the tensor table
(name, n_dims, dims, type, offset), padding to ALIGNMENT, then the tensors, each padded to ALIGNMENT.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .blocks import LAYOUTS, Bytes, random_blocks

ALIGNMENT = 32
_POOL_BLOCK_BYTES = 8 << 20

Progress = Callable[[int, int], None]
Plant = Callable[[int, Bytes], None]


class U16(int):
    """An integer stored as uint16; plain int is stored as uint32."""


class I32(int):
    """An integer stored as int32."""


@dataclass(frozen=True)
class Tensor:
    """One tensor to write: shape in ggml order (the contiguous dimension first) and how its values spread.

    `plant(first_row, rows)` changes random rows, uint8 [n_rows, bytes of a row], in place into what they shall be.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    std: float
    mean: float = 0.0
    plant: Plant | None = field(default=None, compare=False, repr=False)

    @property
    def n_blocks(self) -> int:
        layout = LAYOUTS[self.type]
        if self.shape[0] % layout.n_elements:
            raise ValueError(f"{self.name}: rows of {self.shape[0]} do not hold whole {self.type} blocks")
        return math.prod(self.shape) // layout.n_elements

    @property
    def n_bytes(self) -> int:
        return self.n_blocks * LAYOUTS[self.type].n_bytes

    @property
    def row_bytes(self) -> int:
        return self.shape[0] // LAYOUTS[self.type].n_elements * LAYOUTS[self.type].n_bytes


class BlockPool:
    """Data of large tensors, cut from one random pool per (type, spread), so that gigabytes cost seconds."""

    def __init__(self) -> None:
        self._pools: dict[tuple[str, float, float], Bytes] = {}

    def _pool(self, tensor: Tensor, seed: str) -> Bytes:
        key = (tensor.type, tensor.std, tensor.mean)
        if key not in self._pools:
            n_blocks = _POOL_BLOCK_BYTES // LAYOUTS[tensor.type].n_bytes
            self._pools[key] = random_blocks(tensor.type, n_blocks, f"{seed}/{key}", tensor.std, tensor.mean)
        return self._pools[key]

    def chunks(self, tensor: Tensor, seed: str) -> Iterator[Bytes]:
        """The tensor's blocks in order, in pieces of at most _POOL_BLOCK_BYTES; a planted tensor's in whole rows."""
        pool = self._pool(tensor, seed)
        if tensor.plant:
            yield from self._planted_chunks(tensor, tensor.plant, pool)
            return
        start, left = zlib.crc32(tensor.name.encode()) % len(pool), tensor.n_blocks
        while left:
            piece = pool[start : start + left]
            yield piece
            left -= len(piece)
            start = (start + len(piece)) % len(pool)

    def _planted_chunks(self, tensor: Tensor, plant: Plant, pool: Bytes) -> Iterator[Bytes]:
        start, flat = zlib.crc32(tensor.name.encode()) % len(pool) * pool.shape[1], pool.reshape(-1)
        n_rows, most = tensor.n_bytes // tensor.row_bytes, max(1, _POOL_BLOCK_BYTES // tensor.row_bytes)
        for first in range(0, n_rows, most):
            rows = np.empty((min(most, n_rows - first), tensor.row_bytes), np.uint8)
            out, done = rows.reshape(-1), 0
            while done < out.size:
                piece = flat[start : start + out.size - done]
                out[done : done + piece.size] = piece
                start, done = (start + piece.size) % flat.size, done + piece.size
            plant(first, rows)
            yield rows


def tensor_chunks(tensor: Tensor, seed: str, pool: BlockPool | None) -> Iterator[Bytes]:
    """All bytes of a tensor: its own random stream, or pieces of `pool` for large files."""
    if pool is not None and tensor.n_bytes > _POOL_BLOCK_BYTES // 8:
        yield from pool.chunks(tensor, seed)
        return
    blocks = random_blocks(tensor.type, tensor.n_blocks, f"{seed}/{tensor.name}", tensor.std, tensor.mean)
    if tensor.plant:
        tensor.plant(0, blocks.reshape(-1, tensor.row_bytes))
    yield blocks


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


_SCALARS: list[tuple[type, int, str]] = [
    (bool, 7, "<?"),
    (U16, 2, "<H"),
    (I32, 5, "<i"),
    (int, 4, "<I"),
    (float, 6, "<f"),
]


def _scalar(value: Any) -> tuple[int, bytes]:
    if isinstance(value, str):
        return 8, _string(value)
    for kind, type_id, form in _SCALARS:
        if isinstance(value, kind):
            return type_id, struct.pack(form, value)
    raise TypeError(f"no GGUF type for {value!r}")


def _value(value: Any) -> bytes:
    if not isinstance(value, list):
        type_id, raw = _scalar(value)
        return struct.pack("<I", type_id) + raw
    items = [_scalar(I32(item) if type(item) is int else item) for item in value]
    return struct.pack("<IIQ", 9, items[0][0], len(items)) + b"".join(raw for _, raw in items)


def header(metadata: dict[str, Any], tensors: list[Tensor], version: int = 3) -> bytes:
    """Everything before the tensor data, padded."""
    parts = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    parts += [_string(key) + _value(value) for key, value in metadata.items()]
    offset = 0
    for tensor in tensors:
        dims = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        parts.append(_string(tensor.name) + dims + struct.pack("<IQ", LAYOUTS[tensor.type].type_id, offset))
        offset += padded(tensor.n_bytes)
    raw = b"".join(parts)
    return raw.ljust(padded(len(raw)), b"\0")


def padded(n_bytes: int) -> int:
    """n_bytes rounded up to ALIGNMENT."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def _write_tensor(out: BinaryIO, tensor: Tensor, seed: str, pool: BlockPool | None) -> int:
    for chunk in tensor_chunks(tensor, seed, pool):
        out.write(np.ascontiguousarray(chunk).data)
    out.write(b"\0" * (padded(tensor.n_bytes) - tensor.n_bytes))
    return padded(tensor.n_bytes)


def write_gguf(path: Path, metadata: dict[str, Any], tensors: list[Tensor], seed: str, progress: Progress | None = None) -> None:
    """Write one file under a temporary name, then rename it. With `progress`, large tensors share a random pool."""
    pool = BlockPool() if progress else None
    total, done = sum(padded(t.n_bytes) for t in tensors), 0
    partial = path.with_name(path.name + ".tmp")
    with partial.open("wb") as out:
        out.write(header(metadata, tensors))
        for tensor in tensors:
            done += _write_tensor(out, tensor, seed, pool)
            if progress:
                progress(done, total)
    partial.rename(path)


def write_split(path: Path, metadata: dict[str, Any], tensors: list[Tensor], seed: str, n_shards: int) -> list[Path]:
    """Write `path` as a split set as gguf-split does: all metadata in the first shard, split.* in every one."""
    stem = path.name.removesuffix(".gguf")
    per_shard = -(-len(tensors) // n_shards)
    paths = [path.with_name(f"{stem}-{i + 1:05d}-of-{n_shards:05d}.gguf") for i in range(n_shards)]
    for i, shard in enumerate(paths):
        split = {"split.no": U16(i), "split.count": U16(n_shards), "split.tensors.count": I32(len(tensors))}
        part = tensors[i * per_shard : (i + 1) * per_shard]
        write_gguf(shard, {**(metadata if i == 0 else {}), **split}, part, seed)
    return paths
