"""A lean file as a table of what is where, and the source's bytes back out of it."""

from __future__ import annotations

import base64
import itertools
import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import FormatError
from . import format as f
from .blocks import Bytes
from .checksums import crc32c_rows, joined
from .columns import ColumnLayout, plane_views, scatter_columns, strip_rows
from .direct import Room
from .gguf_file import Model, TensorInfo, _Cursor, _table_row, encode_key, encode_table_row, read_model
from .jobs import PIECE_BYTES, STRIP_BUDGET
from .layout import Virtual
from .storage import WHOLE_BYTES, Source


@dataclass(frozen=True)
class NeuronPlace:
    """One block's clusters in a lean file."""

    block: int
    cluster_size: int
    n_hot: int
    n_device: int
    record_bytes: int
    clusters: TensorInfo  # [stride, n_clusters]


class LeanFile:
    """An opened lean file. Everything that can be wrong with its tables is checked here; contents by `check_bundle`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """
        Raises:
            FormatError: no lean file, a newer version, or one whose tables contradict each other.
        """
        self.path = os.fspath(path)
        self.model: Model = read_model(path)
        version = self.model.get("leanstream.version")
        if version is None:
            raise FormatError(f"{self.path} is not a lean file", path=self.path, remedy="make one with `leanstream repack`")
        if version != f.VERSION:
            raise FormatError(f"{self.path} has version {version} of the lean format; this program knows {f.VERSION}", path=self.path)
        self.virtual = self._virtual()
        self.neurons = {place.block: place for place in self._neurons()}
        self.tables = [base64.b64decode(table) for table in self._key("source.tables")]
        self.sha256: list[str] = list(self._key("source.sha256"))
        self.source_bytes: list[int] = list(self._key("source.bytes"))

    def _broken(self, why: str) -> FormatError:
        return FormatError(f"{self.path} is damaged or was edited: {why}", path=self.path, remedy="repack the source again")

    def _key(self, name: str) -> Any:
        value = self.model.get(f.PREFIX + name)
        if value is None:
            raise self._broken(f"leanstream.{name} is missing")
        return value

    def tensor(self, name: str) -> TensorInfo:
        found = self.model.tensors.get(name)
        if found is None:
            raise self._broken(f"tensor {name} is missing")
        return found

    @property
    def layout(self) -> str:
        return str(self._key("layout"))

    def _virtual(self) -> dict[str, Virtual]:
        names, types, dims = self._key("virtual.names"), self._key("virtual.types"), self._key("virtual.ne")
        bundles, offsets = self._key("virtual.bundle"), self._key("virtual.offset")
        if not len(names) == len(types) == len(bundles) == len(offsets) == len(dims) // 4:
            raise self._broken("the leanstream.virtual arrays have different lengths")
        found = {}
        for i, name in enumerate(names):
            if types[i] not in f.TYPES or name in self.model.tensors:
                raise self._broken(f"{name} is described wrongly")
            ne = (dims[4 * i], dims[4 * i + 1], dims[4 * i + 2], dims[4 * i + 3])
            item = Virtual(name, types[i], ne, bundles[i], offsets[i])
            self._check_virtual(item)
            found[name] = item
        return found

    def _check_virtual(self, item: Virtual) -> None:
        bundle, kind = self.tensor(item.bundle), f.TYPES[item.type_id]
        is_down = item.name.endswith("ffn_down.weight")
        size = kind.row_bytes(item.ne[0]) * (item.ne[1] if item.ne[2] > 1 else 1)
        size = 0 if is_down and item.ne[2] == 1 else size
        if item.ne[0] % kind.n_elements or item.offset + size > bundle.ne[0]:
            raise self._broken(f"{item.name} does not fit into {item.bundle}")

    def _neurons(self) -> Iterator[NeuronPlace]:
        blocks = self.model.get("leanstream.neurons.layers") or []
        sizes, hot = (self._key(f"neurons.{name}") if blocks else [] for name in ("cluster_size", "n_hot"))
        on_device = self.model.get("leanstream.neurons.n_device") or [0] * len(blocks)
        if not len(blocks) == len(sizes) == len(hot) == len(on_device):
            raise self._broken("the leanstream.neurons arrays have different lengths")
        for block, size, n_hot, n_device in zip(blocks, sizes, hot, on_device, strict=True):
            clusters = self.tensor(f.name_of(block, "clusters"))
            down = self.virtual.get(f"blk.{block}.ffn_down.weight")
            if down is None:
                raise self._broken(f"blk.{block} has clusters but no down projection")
            columns = self.columns(block)
            record = f.ceil_to(down.offset + columns.column_bytes, f.PART_ALIGNMENT)
            n_clusters = -(-columns.n_ff // size) if size else 0
            stride = f.ceil_to(size * record, int(self._key("alignment")))
            if not size or clusters.ne != (stride, n_clusters) or n_hot > n_clusters:
                raise self._broken(f"the clusters of blk.{block} do not have the size they should")
            if self.tensor(f.name_of(block, "perm")).ne != (columns.n_ff,):
                raise self._broken(f"the order of blk.{block}'s neurons does not have the length it should")
            if n_device and self.tensor(f.name_of(block, f.DEVICE_DOWN)).ne != (n_device, columns.n_embd):
                raise self._broken(f"the matrices of blk.{block} for a device do not have the size they should")
            yield NeuronPlace(block, size, n_hot, n_device, record, clusters)

    def columns(self, block: int) -> ColumnLayout:
        down = self.virtual[f"blk.{block}.ffn_down.weight"]
        return ColumnLayout(f.TYPES[down.type_id], down.ne[0], down.ne[1])

    # ---- the source's header and tensors -------------------------------------------------------------------------------

    def source_header(self, shard: int) -> bytes:
        """Header of a source shard, padded to its data."""
        return self._header(shard, self.tables[shard])[0]

    def retyped_header(self, shard: int) -> tuple[bytes, int]:
        """(the same with the stored types and offsets that fit them, alignment)."""
        alignment, at, rows = self._header(shard, b"")[1], 0, []
        for name, ne, kind, _ in self.source_table(shard):
            stored = f.TYPES[self.virtual[name].type_id] if name in self.virtual else kind
            rows.append(encode_table_row(name, ne, stored.id, at))
            at += f.ceil_to(stored.row_bytes(ne[0]) * math.prod(ne[1:]), alignment)
        return self._header(shard, b"".join(rows))

    def _header(self, shard: int, table: bytes) -> tuple[bytes, int]:
        if shard == 0:
            raw, n_keys, alignment = self._source_keys()
        else:
            raw = base64.b64decode(self._key("source.headers")[shard - 1])
            n_keys, alignment = _count_keys(raw, self.path)
        version = int(self.model.get("leanstream.source.version", 3))
        head = b"GGUF" + struct.pack("<IQQ", version, len(self.source_table(shard)), n_keys) + raw + table
        return head.ljust(f.ceil_to(len(head), alignment), b"\0"), alignment

    def _source_keys(self) -> tuple[bytes, int, int]:
        found, alignment = [], 32
        own_alignment = encode_key("general.alignment", "u32", f.PAGE)
        for key in self.model.first.keys:
            if key.name.startswith(f.KEPT):
                if key.name == f.KEPT + "general.alignment":
                    alignment = int(key.value)
                found.append(key.renamed(key.name.removeprefix(f.KEPT)))
            elif not key.name.startswith(f.PREFIX) and key.raw != own_alignment:
                found.append(key.raw)
        return b"".join(found), len(found), alignment

    def source_table(self, shard: int) -> list[tuple[str, tuple[int, ...], f.BlockType, int]]:
        """(name, ne, type, offset from the data's start) of a source shard's tensors."""
        cursor = _Cursor(self.tables[shard], self.path)
        rows = []
        while cursor.at < len(cursor.data):
            rows.append(_table_row(cursor))
        return rows

    def requantised(self) -> set[str]:
        """Names of tensors that were made anew (--down-type): they cannot be given back as they were."""
        return {f"blk.{block}.ffn_down.weight" for block in self.model.get("leanstream.down_type.changed") or ()}


def _count_keys(raw: bytes, path: str) -> tuple[int, int]:
    """(number of keys, alignment) of a key-value section."""
    cursor, n, alignment = _Cursor(raw, path), 0, 32
    while cursor.at < len(raw):
        name = cursor.string()
        value = cursor.value(cursor.number("<I"))
        alignment = int(value) if name == "general.alignment" else alignment
        n += 1
    return n, alignment


class Restorer:
    """Tensors of the source, byte for byte, out of a lean file. Bounded memory: one tensor's columns at most."""

    def __init__(self, lean: LeanFile, source: Source) -> None:
        self.lean, self.source = lean, source
        self._room = Room()
        self._rooms = itertools.cycle([Room() for _ in range(3)])
        self._sums: dict[str, dict[int, tuple[Any, int]]] = {}  # by bundle and offset: checksums of the slices read so far

    def tensor(self, name: str) -> Iterator[Bytes]:
        """The tensor's bytes in order, in pieces. A piece is valid until two more were asked for.

        Raises:
            FormatError: a checksum is wrong.
        """
        item = self.lean.virtual.get(name)
        if item is not None and item.bundle.endswith("ffn_exps.lean"):
            return self._experts(item)
        block = _block_of(name)
        place = self.lean.neurons.get(block) if block is not None else None
        if item is not None and place is not None:
            return self._column_tensor(place, item) if name.endswith("ffn_down.weight") else self._row_tensor(place, item)
        info = self.lean.tensor(name)
        if place is not None and name in self._permuted_names(block):
            return self._permuted(place, info)
        return self._plain(info)

    def _permuted_names(self, block: int | None) -> set[str]:
        return {f"blk.{block}.ffn_{what}.{kind}" for what in ("gate", "up") for kind in ("weight", "bias")}

    def _plain(self, info: TensorInfo) -> Iterator[Bytes]:
        for start in range(0, info.n_bytes, PIECE_BYTES):
            yield self.source.read(info, start, min(PIECE_BYTES, info.n_bytes - start), next(self._rooms))

    def _experts(self, item: Virtual) -> Iterator[Bytes]:
        """Slices, read without the rest of their records; with the last of a record's tensors its checksum is compared."""
        bundle = self.lean.tensor(item.bundle)
        starts = sorted({other.offset for other in self.lean.virtual.values() if other.bundle == item.bundle})
        number = starts.index(item.offset)
        low, end = (item.offset if number else 0), [*starts, bundle.ne[0]][number + 1]
        size = f.TYPES[item.type_id].row_bytes(item.ne[0]) * item.ne[1]
        sums, step = [], max(1, PIECE_BYTES // (end - low))
        for first in range(0, bundle.ne[1], step):
            n = min(step, bundle.ne[1] - first)
            slices = next(self._rooms).take(n * (end - low)).reshape(n, -1)
            for i in range(n):
                slices[i] = self.source.read(bundle, (first + i) * bundle.ne[0] + low, end - low, self._room)
            sums.append(crc32c_rows(slices))
            yield np.ascontiguousarray(slices[:, item.offset - low :][:, :size]).reshape(-1)
        found = self._sums.setdefault(item.bundle, {})
        found[item.offset] = np.concatenate(sums), end - low
        if len(found) == len(starts):
            self._compare(bundle, 0, joined([found[start] for start in starts]))
            del self._sums[item.bundle]

    def records(self, bundle: TensorInfo, first: int, n: int) -> Bytes:
        """Whole records or clusters [n, stride], their checksums compared.

        Raises:
            FormatError: one is corrupt.
        """
        rows = self.source.rows(bundle, first, n)
        self._compare(bundle, first, crc32c_rows(rows))
        return rows

    def _compare(self, bundle: TensorInfo, first: int, sums: Any) -> None:
        checksums = self.lean.tensor(_checksums_of(bundle.name))
        expected = self.source.read(checksums, 4 * first, 4 * len(sums)).view("<i4")
        wrong = np.nonzero(sums != expected)[0]
        if len(wrong):
            at = bundle.offset + (first + int(wrong[0])) * bundle.ne[0]
            message = f"{self.lean.path}: record {first + int(wrong[0])} of {bundle.name} is corrupt (its checksum is wrong)"
            raise FormatError(message, path=self.lean.path, offset=at, remedy="repack the source again; check the drive")

    def _perm(self, place: NeuronPlace) -> Any:
        perm = self.source.read(self.lean.tensor(f.name_of(place.block, "perm"))).view("<i4")
        if not (np.sort(perm) == np.arange(len(perm))).all():
            raise self.lean._broken(f"the order of blk.{place.block}'s neurons is no permutation")
        return perm

    def _parts(self, place: NeuronPlace, parts: list[slice]) -> Iterator[tuple[int, Bytes]]:
        """(first position, bytes of these parts of its neurons' records) through all clusters, new order."""
        n_ff = self.lean.columns(place.block).n_ff
        step = max(1, PIECE_BYTES // place.clusters.ne[0])
        used = place.cluster_size * place.record_bytes
        for first in range(0, place.clusters.ne[1], step):
            n = min(step, place.clusters.ne[1] - first)
            records = self.records(place.clusters, first, n)[:, :used].reshape(-1, place.record_bytes)
            start = first * place.cluster_size
            yield start, np.concatenate([records[: n_ff - start, part] for part in parts], axis=1)

    def _row_tensor(self, place: NeuronPlace, item: Virtual) -> Iterator[Bytes]:
        size, perm = f.TYPES[item.type_id].row_bytes(item.ne[0]), self._perm(place)
        step = max(1, WHOLE_BYTES // size)
        for low in range(0, len(perm), step):
            out = np.empty((min(step, len(perm) - low), size), np.uint8)
            for start, rows in self._parts(place, [slice(item.offset, item.offset + size)]):
                target = perm[start : start + len(rows)] - low
                inside = (target >= 0) & (target < len(out))
                out[target[inside]] = rows[inside]
            yield out.reshape(-1)

    def _permuted(self, place: NeuronPlace, info: TensorInfo) -> Iterator[Bytes]:
        perm = self._perm(place)
        position = np.argsort(perm)
        if len(info.ne) == 1:
            yield self.source.read(info).reshape(len(perm), -1)[position].reshape(-1)
            return
        whole, step = self.source.whole_rows(info), max(1, PIECE_BYTES // info.row_bytes)
        for first in range(0, len(perm), step):
            yield self.source.chosen_rows(info, position[first : first + step], whole).reshape(-1)

    def _column_tensor(self, place: NeuronPlace, item: Virtual) -> Iterator[Bytes]:
        layout, perm = self.lean.columns(place.block), self._perm(place)
        raw = self.source.read(self.lean.tensor(f.name_of(place.block, "planes"))) if layout.planes_bytes else np.zeros(0, np.uint8)
        if len(raw) != layout.planes_bytes:
            raise self.lean._broken(f"the planes of blk.{place.block} do not have the size they should")
        planes = plane_views(layout, raw)
        n_passes = -(-layout.n_ff * layout.column_bytes // WHOLE_BYTES)
        width = f.ceil_to(-(-layout.n_embd // n_passes), f.OUTPUT_GROUP)
        for low in range(0, layout.n_embd, width):
            part = ColumnLayout(layout.type, layout.n_ff, min(width, layout.n_embd - low))
            columns = np.empty((layout.n_ff, part.column_bytes), np.uint8)
            for start, found in self._parts(place, layout.slices(item.offset, low, part.n_outputs)):
                columns[start : start + len(found)] = found
            views = [view[:, low : low + part.n_outputs] for view in planes]
            step = strip_rows(part, STRIP_BUDGET)
            for first in range(0, part.n_embd, step):
                yield scatter_columns(part, columns, perm, views, first, min(step, part.n_embd - first)).reshape(-1)


def _checksums_of(bundle: str) -> str:
    return bundle.replace(".clusters.lean", ".checksums.lean").replace("ffn_exps.lean", "ffn_exps.checksums.lean")


def _block_of(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[1]) if len(parts) > 2 and parts[0] == "blk" and parts[1].isdigit() else None
