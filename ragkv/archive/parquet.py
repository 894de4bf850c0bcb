"""Small Parquet tables: uncompressed, without nulls, and no larger in memory than the file they come from."""

from __future__ import annotations

from collections.abc import Sequence

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
        metadata = pq.read_metadata(source)
        if not metadata.schema.to_arrow_schema().equals(schema):
            raise ArchiveCorruptError(f"{name}: its columns are not those of the format")
        for place in range(metadata.num_row_groups):
            group = metadata.row_group(place)
            for index in range(group.num_columns):
                chunk = group.column(index)
                plain = chunk.compression == "UNCOMPRESSED" and set(chunk.encodings) <= {"PLAIN", "RLE", _PACKED}
                if not plain or chunk.total_uncompressed_size > len(raw):
                    raise ArchiveCorruptError(f"{name}: column {chunk.path_in_schema!r} is not plain and uncompressed")
                least = _least_bytes(schema.field(index).type) if _PACKED not in chunk.encodings else 0
                if group.num_rows * least > chunk.total_compressed_size:
                    raise ArchiveCorruptError(f"{name}: column {chunk.path_in_schema!r} is shorter than its rows")
        if metadata.num_rows > len(raw):  # a column that is not packed holds a byte or more of each
            raise ArchiveCorruptError(f"{name}: {metadata.num_rows} rows do not fit into {len(raw)} bytes")
        table = pq.ParquetFile(source, metadata=metadata).read(use_threads=False)
        if table.num_rows != metadata.num_rows or any(column.null_count for column in table.columns):
            raise ArchiveCorruptError(f"{name}: rows are missing")
        return table.combine_chunks()


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
