"""Where everything goes in a lean file: a pure function of the source's headers and the decisions taken for each layer.

Offsets, names, keys; no data. docs/lean_format.md is the specification.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UnsupportedError
from . import format as f
from .columns import ColumnLayout, transposable
from .gguf_file import Model, TensorInfo, encode_key, encode_table_row

EXPERT_PARTS = (("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), ("ffn_gate_up_exps", "ffn_down_exps"))


@dataclass(frozen=True)
class OutTensor:
    """A tensor of the lean file; `offset` from the start of the data."""

    name: str
    ne: tuple[int, ...]
    type_id: int
    n_bytes: int
    offset: int = 0


@dataclass(frozen=True)
class Virtual:
    """A tensor of the source that lives in records of a bundle."""

    name: str
    type_id: int
    ne: tuple[int, int, int, int]
    bundle: str
    offset: int  # of its part within a record


@dataclass(frozen=True)
class ExpertLayer:
    """Stacked experts of one block."""

    block: int
    parts: tuple[TensorInfo, ...]  # in record order

    @property
    def n_experts(self) -> int:
        return self.parts[0].ne[2]

    @staticmethod
    def slice_bytes(part: TensorInfo) -> int:
        return part.row_bytes * part.ne[1]

    def offsets(self) -> list[int]:
        """Where each part starts in a record."""
        found, at = [], 0
        for part in self.parts:
            found.append(at)
            at = f.ceil_to(at + self.slice_bytes(part), f.SLICE_ALIGNMENT)
        return found

    @property
    def stride(self) -> int:
        return f.ceil_to(self.offsets()[-1] + self.slice_bytes(self.parts[-1]), f.PAGE)


@dataclass(frozen=True)
class NeuronLayer:
    """A dense feed-forward layer cut into clusters, and what was decided about it.

    `faithful` puts the deciding rows into the records too. `requantised`: the stored down projection is not the source's.
    `n_device`: leading neurons, whole blocks of the down projection, that the file holds as matrices too.
    """

    block: int
    gate: TensorInfo | None
    up: TensorInfo
    down: TensorInfo
    down_type: f.BlockType
    biases: tuple[TensorInfo, ...]  # [n_ff] vectors, permuted
    perm: npt.NDArray[np.int32]  # original index of each new position
    cluster_size: int
    n_hot: int
    alignment: int
    faithful: bool
    requantised: bool = False
    n_device: int = 0

    @property
    def n_ff(self) -> int:
        return self.down.ne[0]

    @property
    def deciding(self) -> TensorInfo:
        return self.gate or self.up

    @property
    def columns(self) -> ColumnLayout:
        return ColumnLayout(self.down_type, self.n_ff, self.down.ne[1])

    @property
    def row_parts(self) -> list[TensorInfo]:
        """Tensors whose rows are in the records, in order."""
        rows = [] if self.gate is None else [self.gate]
        rows.append(self.up)
        return rows if self.faithful else [row for row in rows if row is not self.deciding]

    def part_offsets(self) -> tuple[list[int], int]:
        """(offset of each row part, offset of the column)."""
        at, found = 0, []
        for row in self.row_parts:
            found.append(at)
            at = f.ceil_to(at + row.row_bytes, f.PART_ALIGNMENT)
        return found, at

    @property
    def record_bytes(self) -> int:
        return f.ceil_to(self.part_offsets()[1] + self.columns.column_bytes, f.PART_ALIGNMENT)

    @property
    def stride(self) -> int:
        return f.ceil_to(self.cluster_size * self.record_bytes, self.alignment)

    @property
    def n_clusters(self) -> int:
        return -(-self.n_ff // self.cluster_size)

    def name(self, what: str) -> str:
        return f.name_of(self.block, what)


@dataclass
class Layout:
    """Everything about a lean file but its data."""

    source: Model
    experts: list[ExpertLayer]
    neurons: list[NeuronLayer]
    alignment: int
    extra_keys: list[bytes] = field(default_factory=list)  # calibration and costs, encoded
    tensors: dict[str, OutTensor] = field(default_factory=dict)
    virtual: list[Virtual] = field(default_factory=list)
    data_offset: int = 0

    @property
    def data_bytes(self) -> int:
        return max((f.ceil_to(t.offset + t.n_bytes, f.PAGE) for t in self.tensors.values()), default=0)

    @property
    def file_bytes(self) -> int:
        return self.data_offset + self.data_bytes


def find_experts(source: Model) -> list[ExpertLayer]:
    """Blocks whose experts can be bundled."""
    found = []
    for block in range(int(source.arch_key("block_count", 0) or 0)):
        for names in EXPERT_PARTS:
            parts = [source.tensors.get(f"blk.{block}.{name}.weight") for name in names]
            present = tuple(part for part in parts if part is not None and len(part.ne) == 3)
            complete = len(present) >= 2 and present[-1].name.endswith("ffn_down_exps.weight")
            if complete and len({part.ne[2] for part in present}) == 1 and present[0].ne[2] > 1:
                found.append(ExpertLayer(block, present))
                break
    return found


@dataclass(frozen=True)
class DenseFfn:
    """A dense feed-forward layer of the source, and why it cannot be cut into neurons, if it cannot."""

    block: int
    gate: TensorInfo | None
    up: TensorInfo
    down: TensorInfo
    biases: tuple[TensorInfo, ...]
    why_not: str | None


def find_dense(source: Model) -> list[DenseFfn]:
    """Dense feed-forward layers, in order."""
    found = []
    for block in range(int(source.arch_key("block_count", 0) or 0)):
        gate, up, down = (source.tensors.get(f"blk.{block}.ffn_{what}.weight") for what in ("gate", "up", "down"))
        if up is None or down is None or len(up.ne) != 2 or len(down.ne) != 2:
            continue
        biases = [source.tensors.get(f"blk.{block}.ffn_{what}.bias") for what in ("gate", "up")]
        present = tuple(bias for bias in biases if bias is not None)
        found.append(DenseFfn(block, gate, up, down, present, _why_not(source, block, gate, up, down)))
    return found


def _why_not(source: Model, block: int, gate: TensorInfo | None, up: TensorInfo, down: TensorInfo) -> str | None:
    if up.ne[1] != down.ne[0]:
        return "gate and up are fused into one matrix"
    if gate is not None and gate.ne != up.ne:
        return "gate and up have different shapes"
    if gate is not None and f"blk.{block}.ffn_up.bias" in source.tensors:
        return "the projection that does not decide has a bias"
    scales = [name for what in ("gate", "up", "down") if (name := f"blk.{block}.ffn_{what}.scale") in source.tensors]
    if scales:
        return f"it has a scale ({scales[0]})"
    if not transposable(down.type.name):
        return f"a down projection of type {down.type.name} cannot be cut into columns without loss"
    return None


def make_layout(
    source: Model, experts: Sequence[ExpertLayer], neurons: Sequence[NeuronLayer], alignment: int, extra_keys: Sequence[bytes]
) -> Layout:
    """Assign every tensor its place.

    Raises:
        UnsupportedError: there is nothing to rearrange, or the file is a lean one already.
    """
    if source.get(f.PREFIX + "version") is not None:
        raise UnsupportedError(f"{source.first.path} is a lean file already", remedy="give the source, or unpack it first")
    if not experts and not neurons:
        raise UnsupportedError(f"{source.first.path} has nothing to repack: no experts, and no layer with neurons that stay at zero")
    layout = Layout(source, list(experts), list(neurons), alignment, list(extra_keys))
    layout.virtual = _virtual(experts, neurons)
    hidden = {item.name for item in layout.virtual}
    for tensor in source.tensors.values():
        if tensor.name not in hidden:
            _add(layout, tensor.name, tensor.ne, tensor.type.id, tensor.n_bytes)
    for layer in neurons:
        _add_neurons(layout, layer)
    for bundle in experts:
        _add(layout, f.name_expert_checksums(bundle.block), (bundle.n_experts,), f.TYPE_I32, 4 * bundle.n_experts)
        size = bundle.stride * bundle.n_experts
        _add(layout, f.name_experts(bundle.block), (bundle.stride, bundle.n_experts), f.TYPE_I8, size)
    layout.data_offset = f.ceil_to(len(header_bytes(layout, _zero_hashes(source))), f.PAGE)
    return layout


def _virtual(experts: Sequence[ExpertLayer], neurons: Sequence[NeuronLayer]) -> list[Virtual]:
    found = []
    for layer in neurons:
        row_offsets, column_offset = layer.part_offsets()
        bundle = layer.name("clusters")
        for row, at in zip(layer.row_parts, row_offsets, strict=True):
            found.append(Virtual(row.name, row.type.id, row.ne4, bundle, at))
        found.append(Virtual(layer.down.name, layer.down_type.id, layer.down.ne4, bundle, column_offset))
    for stack in experts:
        for part, at in zip(stack.parts, stack.offsets(), strict=True):
            found.append(Virtual(part.name, part.type.id, part.ne4, f.name_experts(stack.block), at))
    return found


def _add(layout: Layout, name: str, ne: tuple[int, ...], type_id: int, n_bytes: int) -> None:
    layout.tensors[name] = OutTensor(name, ne, type_id, n_bytes, layout.data_bytes)


def _add_neurons(layout: Layout, layer: NeuronLayer) -> None:
    columns = layer.columns
    _add(layout, layer.name("perm"), (layer.n_ff,), f.TYPE_I32, 4 * layer.n_ff)
    if columns.planes_bytes:
        _add(layout, layer.name("planes"), (columns.planes_bytes,), f.TYPE_I8, columns.planes_bytes)
    if layer.faithful:
        row = f.sketch_row_bytes(layer.deciding.ne[0])
        _add(layout, layer.name("sketch"), (row, layer.n_ff), f.TYPE_I8, row * layer.n_ff)
    _add(layout, layer.name("checksums"), (layer.n_clusters,), f.TYPE_I32, 4 * layer.n_clusters)
    if n := layer.n_device:
        n_embd, kind = layer.down.ne[1], layer.down_type
        if layer.gate is not None:
            _add(layout, layer.name(f.DEVICE_UP), (layer.up.ne[0], n), layer.up.type.id, n * layer.up.row_bytes)
        _add(layout, layer.name(f.DEVICE_DOWN), (n, n_embd), kind.id, n_embd * kind.row_bytes(n))
    size = layer.stride * layer.n_clusters
    _add(layout, layer.name("clusters"), (layer.stride, layer.n_clusters), f.TYPE_I8, size)


def _zero_hashes(source: Model) -> list[str]:
    return ["0" * 64 for _ in source.shards]


def header_bytes(layout: Layout, sha256: Sequence[str]) -> bytes:
    """Everything before the data, not padded; its length does not depend on the hashes."""
    source = layout.source.first
    keys = []
    for key in source.keys:
        kept = key.name.startswith(f.MISLEADING)
        keys.append(key.renamed(f.KEPT + key.name) if kept else key.raw)
    keys += _own_keys(layout, sha256)
    rows = [encode_table_row(t.name, t.ne, t.type_id, t.offset) for t in layout.tensors.values()]
    return b"GGUF" + struct.pack("<IQQ", 3, len(rows), len(keys)) + b"".join(keys) + b"".join(rows)


def _own_keys(layout: Layout, sha256: Sequence[str]) -> list[bytes]:
    shards, layers = layout.source.shards, layout.neurons
    name = "experts" if not layers else "faithful" if layers[0].faithful else "exact"
    virtual = layout.virtual
    entries: list[tuple[str, str, Any]] = [
        ("version", "u32", f.VERSION),
        ("layout", "string", name),
        ("alignment", "u32", layout.alignment),
        ("virtual.names", "string[]", [item.name for item in virtual]),
        ("virtual.types", "u32[]", [item.type_id for item in virtual]),
        ("virtual.ne", "u64[]", [dim for item in virtual for dim in item.ne]),
        ("virtual.bundle", "string[]", [item.bundle for item in virtual]),
        ("virtual.offset", "u64[]", [item.offset for item in virtual]),
        ("source.name", "string", Path(shards[0].path).name),
        ("source.version", "u32", shards[0].version),
        ("source.sha256", "string[]", list(sha256)),
        ("source.bytes", "u64[]", [shard.file_bytes for shard in shards]),
        ("source.tables", "string[]", [_base64(shard.table) for shard in shards]),
    ]
    if len(shards) > 1:
        further = [_base64(b"".join(key.raw for key in shard.keys)) for shard in shards[1:]]
        entries.append(("source.headers", "string[]", further))
    if layers:
        entries += [
            ("neurons.layers", "u32[]", [layer.block for layer in layers]),
            ("neurons.deciding", "string", "ffn_gate" if layers[0].gate else "ffn_up"),
            ("neurons.gated", "bool", layers[0].gate is not None),
            ("neurons.cluster_size", "u32[]", [layer.cluster_size for layer in layers]),
            ("neurons.n_hot", "u32[]", [layer.n_hot for layer in layers]),
        ]
    if any(layer.n_device for layer in layers):
        entries.append(("neurons.n_device", "u32[]", [layer.n_device for layer in layers]))
    if changed := [layer.block for layer in layers if layer.requantised]:
        entries.append(("down_type.changed", "u32[]", changed))
    own = [encode_key(f.PREFIX + key, kind, value) for key, kind, value in entries]
    return [*own, *layout.extra_keys, encode_key("general.alignment", "u32", f.PAGE)]


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
