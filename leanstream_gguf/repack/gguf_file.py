"""GGUF containers as byte spans: keys and tensor tables are kept verbatim, so that a source can be restored byte for byte.

Every file is opened by the native index first (which says what is wrong with a broken one in typed errors); this reader then
only has to be exact.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import FormatError, ModelNotFoundError, ModelUnreadableError, ShardError, TruncatedError
from .format import TYPES, BlockType, ceil_to

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_BY_KIND = {"u32": 4, "i32": 5, "f32": 6, "bool": 7, "string": _STRING, "u64": 10}
_MAX_HEADER = 1 << 30
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True)
class Key:
    """One key-value pair; `raw` is the whole of it as in the file, `value` None for arrays longer than 65,536."""

    name: str
    raw: bytes
    value: Any

    def renamed(self, name: str) -> bytes:
        return encode_string(name) + self.raw[8 + len(self.name.encode()) :]


@dataclass(frozen=True)
class TensorInfo:
    """One row of a tensor table. `offset` counts from the start of the file."""

    name: str
    ne: tuple[int, ...]
    type: BlockType
    offset: int
    shard: int = 0

    @property
    def n_elements(self) -> int:
        n = 1
        for dim in self.ne:
            n *= dim
        return n

    @property
    def n_rows(self) -> int:
        return self.n_elements // self.ne[0]

    @property
    def row_bytes(self) -> int:
        return self.type.row_bytes(self.ne[0])

    @property
    def n_bytes(self) -> int:
        return self.n_rows * self.row_bytes

    @property
    def ne4(self) -> tuple[int, int, int, int]:
        ne = (*self.ne, 1, 1, 1, 1)
        return ne[0], ne[1], ne[2], ne[3]


@dataclass(frozen=True)
class Header:
    """Everything before the data of one GGUF file, taken apart."""

    path: str
    version: int
    keys: tuple[Key, ...]
    tensors: tuple[TensorInfo, ...]
    table: bytes  # the tensor table verbatim
    data_offset: int
    file_bytes: int
    alignment: int

    def get(self, name: str, default: Any = None) -> Any:
        return next((key.value for key in self.keys if key.name == name), default)


@dataclass
class Model:
    """A source or lean file with its shards."""

    shards: list[Header]
    tensors: dict[str, TensorInfo] = field(default_factory=dict)

    @property
    def first(self) -> Header:
        return self.shards[0]

    @property
    def file_bytes(self) -> int:
        return sum(shard.file_bytes for shard in self.shards)

    def get(self, name: str, default: Any = None) -> Any:
        return self.first.get(name, default)

    def arch_key(self, name: str, default: Any = None) -> Any:
        return self.get(f"{self.get('general.architecture')}.{name}", default)


class _Cursor:
    """Reads little-endian values from bytes; running off the end is a FormatError."""

    def __init__(self, data: bytes, path: str) -> None:
        self.data, self.at, self.path = data, 0, path

    def take(self, n_bytes: int) -> bytes:
        if n_bytes < 0 or self.at + n_bytes > len(self.data):
            raise TruncatedError(f"{self.path} ends inside its header; download it again", path=self.path)
        self.at += n_bytes
        return self.data[self.at - n_bytes : self.at]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def string(self) -> str:
        return self.take(self.number("<Q")).decode("utf-8", "surrogateescape")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise FormatError(f"{self.path} has a key of the unknown type {kind}; download it again", path=self.path)
        return self.number(_SCALARS[kind])

    def _array(self) -> Any:
        kind, n = self.number("<I"), self.number("<Q")
        if kind in _SCALARS:
            size = struct.calcsize(_SCALARS[kind])
            raw = self.take(n * size)
            return [item[0] for item in struct.iter_unpack(_SCALARS[kind], raw)] if n <= 1 << 16 else None
        values = [self.value(kind) for _ in range(n)]
        return values if n <= 1 << 16 else None


def _read_head(path: str) -> bytes:
    """The header's bytes: read in growing pieces until it parses is wasteful, so take what precedes the data generously."""
    with open(path, "rb") as file:
        return file.read(_MAX_HEADER if os.path.getsize(path) < 64 << 20 else 64 << 20)


def read_header(path: str, shard: int = 0) -> Header:
    """Take one file's header apart.

    Raises:
        FormatError, TruncatedError, ModelNotFoundError, ModelUnreadableError
    """
    try:
        data = _read_head(path)
        file_bytes = os.path.getsize(path)
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"{path}: no such file; check the path", path=path) from error
    except OSError as error:
        raise ModelUnreadableError(f"{path} cannot be read: {error.strerror}", path=path, sys_errno=error.errno) from error
    cursor = _Cursor(data, path)
    if cursor.take(4) != b"GGUF":
        raise FormatError(f"{path} is not a GGUF file", path=path)
    version, n_tensors, n_keys = cursor.number("<I"), cursor.number("<Q"), cursor.number("<Q")
    if version not in (2, 3):
        raise FormatError(f"{path} is GGUF version {version}; versions 2 and 3 can be repacked", path=path)
    keys = []
    for _ in range(n_keys):
        start = cursor.at
        name = cursor.string()
        value = cursor.value(cursor.number("<I"))
        keys.append(Key(name, data[start : cursor.at], value))
    start = cursor.at
    rows = [_table_row(cursor) for _ in range(n_tensors)]
    table = data[start : cursor.at]
    alignment = next((key.value for key in keys if key.name == "general.alignment"), 32)
    data_offset = ceil_to(cursor.at, alignment)
    tensors = tuple(TensorInfo(name, ne, kind, data_offset + offset, shard) for name, ne, kind, offset in rows)
    for tensor in tensors:
        if tensor.offset + tensor.n_bytes > file_bytes:
            message = f"{path} is cut short: tensor '{tensor.name}' ends at {tensor.offset + tensor.n_bytes}"
            raise TruncatedError(message, path=path, used=file_bytes, limit=tensor.offset + tensor.n_bytes)
    return Header(path, version, tuple(keys), tensors, table, data_offset, file_bytes, alignment)


def _table_row(cursor: _Cursor) -> tuple[str, tuple[int, ...], BlockType, int]:
    name, n_dims = cursor.string(), cursor.number("<I")
    if not 1 <= n_dims <= 4:
        raise FormatError(f"{cursor.path}: tensor '{name}' has {n_dims} dimensions", path=cursor.path)
    ne = tuple(cursor.number("<Q") for _ in range(n_dims))
    kind = cursor.number("<I")
    if kind not in TYPES:
        raise FormatError(f"{cursor.path}: tensor '{name}' has the type {kind}, which this version does not know", path=cursor.path)
    return name, ne, TYPES[kind], cursor.number("<Q")


def read_model(path: str | os.PathLike[str]) -> Model:
    """Headers of all shards of a model. Give the first one.

    Raises:
        FormatError and its relatives, ShardError
    """
    path = os.fspath(path)
    first = read_header(path)
    count = int(first.get("split.count", 1) or 1)
    if int(first.get("split.no", 0) or 0) != 0:
        raise ShardError(f"{path} is not the first part of its set; give the first", path=path)
    shards = [first]
    match = _SHARD.search(path)
    if count > 1 and (match is None or int(match[2]) != count):
        raise ShardError(f"{path} is one of {count} parts, but is not named ...-00001-of-{count:05d}.gguf", path=path)
    for i in range(1, count):
        assert match is not None
        part = f"{path[: match.start()]}-{i + 1:05d}-of-{count:05d}.gguf"
        if not Path(part).exists():
            raise ShardError(f"part {i + 1} of {count} is missing: {part}; put it beside the first part", path=part)
        shards.append(read_header(part, i))
    return Model(shards, {tensor.name: tensor for shard in shards for tensor in shard.tensors})


def encode_string(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def encode_key(name: str, kind: str, value: Any) -> bytes:
    """A key-value pair; `kind` is u32, i32, u64, f32, bool, string, or one of these with [] for an array."""
    base = kind.removesuffix("[]")
    code = _BY_KIND[base]
    values: Sequence[Any] = value if kind.endswith("[]") else [value]
    raw = b"".join(encode_string(item) if code == _STRING else struct.pack(_SCALARS[code], item) for item in values)
    head = struct.pack("<I", code) if base == kind else struct.pack("<IIQ", _ARRAY, code, len(values))
    return encode_string(name) + head + raw


def encode_table_row(name: str, ne: Sequence[int], kind: int, offset: int) -> bytes:
    return encode_string(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, kind, offset)
