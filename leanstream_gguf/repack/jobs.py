"""The pieces of work of which a lean file is made. Each writes fixed ranges of the output and nothing else, so that a piece can
be done again after a crash, and the file is the same in the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from . import device, sketch
from . import format as f
from .blocks import Bytes
from .checksums import crc32c_rows
from .columns import gather_columns, planes_of
from .direct import Room, allocate
from .gguf_file import TensorInfo
from .layout import ExpertLayer, Layout, NeuronLayer
from .requantize import DownRows
from .storage import WHOLE_BYTES, Output, Source

PIECE_BYTES = 16 << 20  # of a copy, and of experts in hand at once
STRIP_BUDGET = 64 << 20


@dataclass(frozen=True)
class Target:
    """What jobs read and write, and memory to do it in: one job at a time has a target."""

    layout: Layout
    source: Source
    output: Output
    down_rows: DownRows
    reading: Room = field(default_factory=Room)
    writing: Room = field(default_factory=Room)

    def put(self, name: str, data: Any, at: int = 0) -> None:
        """Write bytes of a tensor of ours, from `at` on."""
        self.output.write(self.layout.data_offset + self.layout.tensors[name].offset + at, data)


class Job(Protocol):
    @property
    def n_bytes(self) -> int: ...

    def run(self, target: Target) -> None: ...


@dataclass(frozen=True)
class Copy:
    """A stretch of a tensor that stays as it is."""

    tensor: TensorInfo
    start: int
    n_bytes: int

    def run(self, target: Target) -> None:
        piece = target.writing.take(self.n_bytes)
        where = self.tensor.offset + self.start
        target.source.read_rows(self.tensor.shard, where, piece.reshape(1, -1), target.reading)
        target.put(self.tensor.name, piece, self.start)
        target.source.drop_cached(self.tensor.shard, where, self.n_bytes)


@dataclass(frozen=True)
class Experts:
    """Records of experts first .. first+n-1, and their checksums."""

    layer: ExpertLayer
    first: int
    n: int

    @property
    def n_bytes(self) -> int:
        return self.n * self.layer.stride

    def run(self, target: Target) -> None:
        records = target.writing.take(self.n_bytes).reshape(self.n, self.layer.stride)
        end = 0
        for part, at in zip(self.layer.parts, self.layer.offsets(), strict=True):
            size = self.layer.slice_bytes(part)
            where = part.offset + self.first * size
            records[:, end:at] = 0
            end = at + size
            target.source.read_rows(part.shard, where, records[:, at:end], target.reading)
            target.source.drop_cached(part.shard, where, self.n * size)
        records[:, end:] = 0
        target.put(f.name_experts(self.layer.block), records, self.first * self.layer.stride)
        target.put(f.name_expert_checksums(self.layer.block), crc32c_rows(records), 4 * self.first)


@dataclass(frozen=True)
class Neurons:
    """One layer's clusters and everything that belongs to them."""

    layer: NeuronLayer

    @property
    def n_bytes(self) -> int:
        layer = self.layer
        return layer.stride * layer.n_clusters + layer.columns.planes_bytes + layer.deciding.n_bytes

    def run(self, target: Target) -> None:
        layer, source = self.layer, target.source
        perm = layer.perm
        target.put(layer.name("perm"), perm)
        for bias in layer.biases:
            raw = source.read(bias).reshape(layer.n_ff, -1)
            target.put(bias.name, np.ascontiguousarray(raw[perm]))
        if not layer.faithful:
            self._permuted(target, layer.deciding)
        else:
            self._sketch(target)
        planes_raw, planes = planes_of(layer.columns)
        per_pass = max(1, WHOLE_BYTES // layer.stride) * layer.cluster_size
        rows = {part.name: source.whole_rows(part) for part in layer.row_parts}
        for first in range(0, layer.n_ff, per_pass):
            chosen = perm[first : first + per_pass]
            clusters = self._clusters(target, chosen, rows, planes if first == 0 else None)
            target.put(layer.name("clusters"), clusters, first // layer.cluster_size * layer.stride)
            target.put(layer.name("checksums"), crc32c_rows(clusters), first // layer.cluster_size * 4)
        if len(planes_raw):
            target.put(layer.name("planes"), planes_raw)
        for name, at, data in device.matrices(layer, target.down_rows.reader(layer, source), source):
            target.put(name, data, at)
        for part in (*layer.row_parts, layer.deciding, layer.down):
            source.drop_cached(part.shard, part.offset, part.n_bytes)

    def _clusters(self, target: Target, chosen: Any, rows: dict[str, Bytes | None], planes: Any) -> Bytes:
        """Whole clusters [n, stride] of these neurons, the last one padded."""
        layer = self.layer
        size, record = layer.cluster_size, layer.record_bytes
        n_clusters = -(-len(chosen) // size)
        clusters = allocate(n_clusters * layer.stride).reshape(n_clusters, layer.stride)
        records = np.zeros((n_clusters * size, record), np.uint8)
        row_offsets, column_offset = layer.part_offsets()
        for part, at in zip(layer.row_parts, row_offsets, strict=True):
            found = target.source.chosen_rows(part, chosen, rows[part.name])
            records[: len(chosen), at : at + part.row_bytes] = found
        columns = records[: len(chosen), column_offset : column_offset + layer.columns.column_bytes]
        gather_columns(layer.columns, target.down_rows.reader(layer, target.source), chosen, columns, planes, STRIP_BUDGET)
        clusters[:, : size * record] = records.reshape(n_clusters, size * record)
        return clusters

    def _permuted(self, target: Target, tensor: TensorInfo) -> None:
        whole = target.source.whole_rows(tensor)
        step = max(1, PIECE_BYTES // tensor.row_bytes)
        for first in range(0, tensor.n_rows, step):
            rows = target.source.chosen_rows(tensor, self.layer.perm[first : first + step], whole)
            target.put(tensor.name, rows, first * tensor.row_bytes)

    def _sketch(self, target: Target) -> None:
        tensor, name = self.layer.deciding, self.layer.name("sketch")
        whole = target.source.whole_rows(tensor)
        step = max(1, PIECE_BYTES // (4 * tensor.ne[0]))
        for first in range(0, tensor.n_rows, step):
            rows = target.source.chosen_rows(tensor, self.layer.perm[first : first + step], whole)
            image = sketch.encode(tensor.type, rows, tensor.ne[0])
            target.put(name, image, first * image.shape[1])


def jobs_of(layout: Layout) -> Iterator[Job]:
    """All work, in the source's order of bytes as far as that goes."""
    found: list[tuple[tuple[int, int], Job]] = []
    by_neurons = {name for layer in layout.neurons for name in _names(layer)}
    by_experts = {part.name for layer in layout.experts for part in layer.parts}
    for tensor in layout.source.tensors.values():
        if tensor.name in by_neurons or tensor.name in by_experts:
            continue
        for start in range(0, tensor.n_bytes, PIECE_BYTES):
            size = min(PIECE_BYTES, tensor.n_bytes - start)
            found.append(((tensor.shard, tensor.offset + start), Copy(tensor, start, size)))
    for layer in layout.neurons:
        found.append((min((part.shard, part.offset) for part in (layer.up, layer.down, layer.deciding)), Neurons(layer)))
    for stack in layout.experts:
        step = max(1, PIECE_BYTES // stack.stride)
        where = min((part.shard, part.offset) for part in stack.parts)
        for first in range(0, stack.n_experts, step):
            found.append((where, Experts(stack, first, min(step, stack.n_experts - first))))
    found.sort(key=lambda item: item[0])  # stable: experts of a layer stay in order
    return iter([job for _, job in found])


def _names(layer: NeuronLayer) -> set[str]:
    return {part.name for part in (layer.up, layer.down, layer.deciding, *layer.biases)}
