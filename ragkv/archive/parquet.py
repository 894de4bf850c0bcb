"""Small Parquet tables: uncompressed, without nulls, and no larger in memory than the file they come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ragkv.archive.files import system_errors
from ragkv.errors import ArchiveCorruptError

_OPTIONS = {
    "compression": "none",
    "use_dictionary": False,
    "write_statistics": False,
    "data_page_size": 1 << 30,
    "max_rows_per_page": (1 << 31) - 1,
}
_PACKED = "DELTA_BINARY_PACKED"
PLAIN_CODE, LEVELS_CODE, _PACKED_CODE = 0, 3, 5  # the encodings in a footer; levels are run lengths
_TAIL = 8  # length of the footer and magic
_DEEPEST = 16


def plain_bytes(schema: pa.Schema, columns: list[pa.Array], *, packed: Sequence[str] = ()) -> bytes:
    """The bytes of a file that holds a table as one row group of PLAIN columns, integers in `packed` as differences."""
    table, sink = pa.Table.from_arrays(columns, schema=schema), pa.BufferOutputStream()
    encodings = {field.name: _PACKED if field.name in packed else "PLAIN" for field in schema}
    pq.write_table(table, sink, row_group_size=max(1, len(table)), column_encoding=encodings, **_OPTIONS)
    return bytes(sink.getvalue())


def read_plain(name: str, raw: bytes, schema: pa.Schema) -> pa.Table:
    """The table in the bytes of a file of `plain_bytes` with this schema.

    Raises
    ------
    ArchiveCorruptError
        If the columns are others, compressed, or hold less than their number of rows says: so nothing that is
        small on disk can take much memory.
    """
    with system_errors(name):
        source = pa.BufferReader(raw)
        groups, metadata = read_row_groups(_footer(name, raw)), pq.read_metadata(source)
        if not metadata.schema.to_arrow_schema().equals(schema):
            raise ArchiveCorruptError(f"{name}: its columns are not those of the format")
        for group in groups:
            for field, chunk in zip(schema, group.columns, strict=True):
                plain = chunk.is_uncompressed and chunk.encodings <= {PLAIN_CODE, LEVELS_CODE, _PACKED_CODE}
                if not plain or chunk.uncompressed_bytes > len(raw):
                    raise ArchiveCorruptError(f"{name}: column {field.name!r} is not plain and uncompressed")
                least = _least_bytes(field.type) if _PACKED_CODE not in chunk.encodings else 0
                if group.rows * least > chunk.bytes:
                    raise ArchiveCorruptError(f"{name}: column {field.name!r} is shorter than its rows")
        if metadata.num_rows > len(raw):  # a column that is not packed holds a byte or more of each
            raise ArchiveCorruptError(f"{name}: {metadata.num_rows} rows do not fit into {len(raw)} bytes")
        table = pq.ParquetFile(source, metadata=metadata).read(use_threads=False)
        if table.num_rows != metadata.num_rows or any(column.null_count for column in table.columns):
            raise ArchiveCorruptError(f"{name}: rows are missing")
        return table.combine_chunks()


def _footer(name: str, raw: bytes) -> bytes:
    length = int.from_bytes(raw[-_TAIL:-4], "little")
    if len(raw) < _TAIL + length:
        raise ArchiveCorruptError(f"{name}: its footer does not fit into it")
    return raw[-_TAIL - length : -_TAIL]


@dataclass(frozen=True)
class ColumnChunk:
    """What a footer says of one column of a row group: its encodings as numbers, and its first page's place.

    What lies in another file or in a dictionary counts as compressed.
    """

    is_uncompressed: bool
    encodings: frozenset[int]
    values: int
    uncompressed_bytes: int
    bytes: int
    first_page: int


@dataclass(frozen=True)
class RowGroup:
    """What a footer says of one row group."""

    rows: int
    columns: tuple[ColumnChunk, ...]


def read_row_groups(footer: bytes) -> list[RowGroup]:
    """The row groups in a footer: the Thrift structure `FileMetaData` without its length and magic.

    pyarrow would tell the same, but its accessors for columns end the whole process where a footer names a codec that
    there is not, or statistics that do not fit.

    Raises
    ------
    ArchiveCorruptError, LookupError, TypeError, ValueError
        If it is none; call it where these become errors of ragkv.
    """
    reader = _Compact(footer)
    found = reader.struct()
    if reader.at != len(footer):
        raise ArchiveCorruptError("there is something behind the footer")
    return [RowGroup(_number(group, 3), tuple(map(_column, group[1]))) for group in found[4]]


def _column(chunk: dict[int, Any]) -> ColumnChunk:
    about = chunk[3]
    elsewhere = 1 in chunk or 11 in about  # in another file, or in a dictionary
    return ColumnChunk(
        is_uncompressed=_number(about, 4) == 0 and not elsewhere,
        encodings=frozenset(about[2]),
        values=_number(about, 5),
        uncompressed_bytes=_number(about, 6),
        bytes=_number(about, 7),
        first_page=_number(about, 9),
    )


def _number(struct: dict[int, Any], field: int) -> int:
    value = struct[field]
    if type(value) is not int or value < 0:
        raise ValueError(f"a count in the footer is {value!r}")
    return value


class _Compact:
    """Reads Thrift's compact protocol, as writers of Parquet write it: fields in order, each once."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.at = raw, 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """A structure as its values by number of the field."""
        if depth > _DEEPEST:
            raise ArchiveCorruptError("the footer is nested too deeply")
        found: dict[int, Any] = {}
        field, raw = 0, self.raw
        while head := raw[self.at]:
            self.at += 1
            if head < 16:
                raise ArchiveCorruptError("the fields of the footer are not in order")
            field, kind = field + (head >> 4), head & 15
            if kind == 6 or kind == 5:  # most values are whole numbers, and most of these short
                number = raw[self.at]
                if number < 128:
                    self.at += 1
                else:
                    number = self._varint()
                found[field] = number >> 1 ^ -(number & 1)
            else:
                found[field] = kind == 1 if kind < 3 else self._value(kind, depth)
        self.at += 1
        return found

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (4, 5, 6):
            number = self._varint()
            return number >> 1 ^ -(number & 1)
        if kind == 8:
            return self._bytes(self._varint())
        if kind == 9:
            return self._list(depth)
        if kind == 12:
            return self.struct(depth + 1)
        if kind in (1, 2, 3):  # booleans of a list take a byte
            return self._byte()
        if kind == 7:
            return self._bytes(8)
        raise ArchiveCorruptError(f"the footer holds a value of kind {kind}")

    def _list(self, depth: int) -> list[Any]:
        head = self._byte()
        count = head >> 4 if head >> 4 < 15 else self._varint()
        if count > len(self.raw) - self.at:  # each takes a byte or more
            raise ArchiveCorruptError("a list of the footer is longer than the footer")
        return [self._value(head & 15, depth + 1) for _ in range(count)]

    def _byte(self) -> int:
        self.at += 1
        return self.raw[self.at - 1]

    def _bytes(self, length: int) -> bytes:
        start, self.at = self.at, self.at + length
        if self.at > len(self.raw):
            raise ArchiveCorruptError("the footer was cut short")
        return self.raw[start : self.at]

    def _varint(self) -> int:
        raw, at = self.raw, self.at
        value, shift = raw[at] & 127, 0
        while raw[at] > 127:
            at, shift = at + 1, shift + 7
            if shift > 63:
                raise ArchiveCorruptError("a number of the footer is too long")
            value |= (raw[at] & 127) << shift
        self.at = at + 1
        return value


def _least_bytes(kind: pa.DataType) -> int:
    """The least that a PLAIN value of a type takes."""
    if pa.types.is_fixed_size_binary(kind):
        return int(kind.byte_width)
    return 4  # a number, or the length of a binary


def binary_column(raw: torch.Tensor) -> pa.Array:
    """(n_rows, n_bytes) uint8 as a fixed-size binary Arrow array without copying more than once."""
    bits = raw.detach().cpu().contiguous().numpy()
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(bits.shape[1]), bits.shape[0], [None, pa.py_buffer(bits)])


def read_binary(column: pa.ChunkedArray) -> torch.Tensor:
    """A fixed-size binary column as (n_rows, n_bytes) uint8."""
    width = column.type.byte_width
    if not len(column):
        return torch.empty(0, width, dtype=torch.uint8)
    array = column.combine_chunks()
    array = array.chunk(0) if isinstance(array, pa.ChunkedArray) else array
    raw = np.frombuffer(array.buffers()[1], dtype=np.uint8, count=len(array) * width, offset=array.offset * width)
    return torch.from_numpy(raw.copy()).reshape(len(array), width)


def integers(table: pa.Table, name: str) -> np.ndarray:
    """An integer column as (n_rows,) int64."""
    return np.asarray(table.column(name).to_numpy().astype(np.int64))


def binary_rows(column: pa.ChunkedArray) -> list[memoryview]:
    """The values of a binary column, not copied."""
    return [memoryview(value.as_buffer()) for chunk in column.chunks for value in chunk]


def flat_lists(column: pa.ChunkedArray) -> torch.Tensor:
    """All numbers of a column of lists, one list after another: (n,) int64."""
    chunks = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks]
    return torch.from_numpy(np.concatenate(chunks).astype(np.int64)) if chunks else torch.empty(0, dtype=torch.int64)
