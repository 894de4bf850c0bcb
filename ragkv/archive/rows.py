"""Row files: tokens of a layer as Parquet rows, and their bytes mapped straight out of the file.

The column ``key_value`` (a token's key and then its value, as `Payload` lays them out) is PLAIN, uncompressed and
without nulls, one page to a column chunk. In a file of archived rows every row group holds whole clusters of one KV
head, so a cluster's rows are one run of bytes at an address that the Parquet footer gives: recall reads them from the
mapped file, undecoded.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ragkv.archive.payload import to_numpy
from ragkv.errors import ArchiveCorruptError

EXACT = -1
"""Cluster number of rows that are always attended exactly."""

ROW_GROUP_ROWS = 2048
"""A row group of archived rows is closed once it has this many; clusters are never split."""

_MADV_POPULATE_READ = 22  # from Linux's mman.h; the mmap module has no name for it
_MAX_PAGE_HEADER = 256
_MAX_ROWS_PER_PAGE = (1 << 31) - 1
_PAGE_BYTES = 1 << 30
_KEY_VALUE_COLUMN = 3


@dataclass(frozen=True)
class Rows:
    """Tokens of one layer in file order.

    ``kv_head``, ``cluster``, ``position`` (n_rows,) int64; ``payload`` (n_rows, row_bytes) uint8.
    """

    kv_head: torch.Tensor
    cluster: torch.Tensor
    position: torch.Tensor
    payload: torch.Tensor


@dataclass(frozen=True)
class RowGroups:
    """Where the rows of a file lie, one entry per row group.

    ``first_row`` and ``n_rows`` count rows; ``first_byte`` is the file offset of the first of them.
    """

    first_row: tuple[int, ...]
    n_rows: tuple[int, ...]
    first_byte: tuple[int, ...]


def write_rows(path: Path, rows: Rows, sizes: list[list[int]] | None = None) -> None:
    """Write a row file.

    Archived rows are in order of KV head and then cluster, ``sizes[head][cluster]`` of them each, which is where row
    groups may be closed; without `sizes` all rows are one row group.
    """
    schema = _schema(rows.payload.shape[1])
    options = {
        "compression": "none",
        "use_dictionary": ["kv_head"],
        "column_encoding": {
            "cluster": "DELTA_BINARY_PACKED",
            "position": "DELTA_BINARY_PACKED",
            "key_value": "PLAIN",
        },
        "write_statistics": False,
        "data_page_size": _PAGE_BYTES,
        "max_rows_per_page": _MAX_ROWS_PER_PAGE,
    }
    table = _table(rows, schema)
    cuts = [(0, table.num_rows)] if sizes is None else _group_cuts(sizes)
    with pq.ParquetWriter(path, schema, **options) as writer:
        for start, stop in cuts:
            writer.write_table(table.slice(start, stop - start), row_group_size=max(1, stop - start))


def read_rows(path: Path) -> Rows:
    """Decode a row file with the Parquet reader."""
    table = pq.read_table(path)

    def integers(name: str) -> torch.Tensor:
        return torch.from_numpy(table.column(name).to_numpy().astype(np.int64))

    return Rows(
        kv_head=integers("kv_head"),
        cluster=integers("cluster"),
        position=integers("position"),
        payload=read_binary(table.column("key_value")),
    )


def read_positions(mapped: torch.Tensor) -> torch.Tensor:
    """The position of every row of a mapped row file, (n_rows,) int64; nothing else of it is read."""
    column = pq.read_table(pa.BufferReader(pa.py_buffer(mapped.numpy())), columns=["position"]).column("position")
    return torch.from_numpy(column.to_numpy().astype(np.int64))


def row_groups(path: Path, row_bytes: int) -> RowGroups:
    """Find the rows of a file from the Parquet footer.

    Raises
    ------
    ArchiveCorruptError
        If a column chunk is not one uncompressed PLAIN page of rows of `row_bytes` bytes.
    """
    metadata = pq.read_metadata(path)
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    n_rows = [group.num_rows for group in groups]
    return RowGroups(
        first_row=tuple(accumulate(n_rows, initial=0))[:-1],
        n_rows=tuple(n_rows),
        first_byte=tuple(_page_start(path, group, row_bytes) for group in groups),
    )


def map_file(path: Path) -> torch.Tensor:
    """The bytes of a file as a (n_bytes,) uint8 tensor, mapped rather than read.

    Copy-on-write: nothing written to the tensor could reach the file.
    """
    with path.open("rb") as handle:
        mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
    with suppress(OSError):  # older kernels fault pages in one by one instead
        mapped.madvise(_MADV_POPULATE_READ)
    return torch.from_numpy(np.frombuffer(mapped, dtype=np.uint8))


def mapped_rows(mapped: torch.Tensor, groups: RowGroups, row_bytes: int) -> torch.Tensor:
    """All rows of a mapped file, in order: (n_rows, row_bytes) uint8."""
    runs = [
        mapped[at : at + n_rows * row_bytes].view(n_rows, row_bytes)
        for at, n_rows in zip(groups.first_byte, groups.n_rows, strict=True)
    ]
    return torch.cat(runs)


def binary_column(raw: torch.Tensor) -> pa.Array:
    """(n_rows, n_bytes) uint8 as a fixed-size binary Arrow array without copying more than once."""
    bits = to_numpy(raw)
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(bits.shape[1]), bits.shape[0], [None, pa.py_buffer(bits)])


def read_binary(column: pa.ChunkedArray) -> torch.Tensor:
    """A fixed-size binary column as (n_rows, n_bytes) uint8."""
    width = column.type.byte_width
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # no rows at all
        return torch.empty(0, width, dtype=torch.uint8)
    raw = np.frombuffer(array.buffers()[1], dtype=np.uint8, count=len(array) * width, offset=array.offset * width)
    return torch.from_numpy(raw.copy()).reshape(len(array), width)


def _schema(row_bytes: int) -> pa.Schema:
    return pa.schema(
        [
            pa.field("kv_head", pa.int32(), nullable=False),
            pa.field("cluster", pa.int32(), nullable=False),
            pa.field("position", pa.int32(), nullable=False),
            pa.field("key_value", pa.binary(row_bytes), nullable=False),
        ]
    )


def _table(rows: Rows, schema: pa.Schema) -> pa.Table:
    integers = [rows.kv_head, rows.cluster, rows.position]
    columns = [pa.array(column.cpu().numpy().astype(np.int32)) for column in integers]
    return pa.Table.from_arrays([*columns, binary_column(rows.payload)], schema=schema)


def _group_cuts(sizes: list[list[int]]) -> list[tuple[int, int]]:
    """Cut archived rows at cluster borders, never across two KV heads."""
    cuts, start, stop = [], 0, 0
    for head in sizes:
        for size in head:
            stop += size
            if stop - start >= ROW_GROUP_ROWS:
                cuts.append((start, stop))
                start = stop
        if stop > start:
            cuts.append((start, stop))
            start = stop
    return cuts


def _page_start(path: Path, group: pq.RowGroupMetaData, row_bytes: int) -> int:
    """First byte of the rows in a column chunk that is a single page: what is not data is the page's header."""
    chunk = group.column(_KEY_VALUE_COLUMN)
    header = chunk.total_compressed_size - group.num_rows * row_bytes
    plain = chunk.compression == "UNCOMPRESSED" and set(chunk.encodings) <= {"PLAIN", "RLE"}
    if chunk.path_in_schema != "key_value" or not plain or not 0 < header <= _MAX_PAGE_HEADER:
        raise ArchiveCorruptError(
            f"{path.name}: column {chunk.path_in_schema!r} is not one uncompressed PLAIN page of {row_bytes}-byte rows"
        )
    return int(chunk.data_page_offset + header)
