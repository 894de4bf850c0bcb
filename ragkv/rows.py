"""Layer files: keys and values as Parquet rows, and their bytes mapped straight out of the file.

Row group 0 holds the tokens that are always attended exactly; every further row group holds whole clusters of one KV
head. The column ``key_value`` (a token's key and then its value) is PLAIN, uncompressed and without nulls, one page to
a column chunk, so a cluster's rows are one run of bytes at an address that the Parquet footer gives: recall reads them
from the mapped file, undecoded.
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

from ragkv.errors import ArchiveCorruptError

EXACT = -1
"""Cluster number of rows that are always attended exactly."""

ROW_GROUP_ROWS = 2048
"""A row group is closed once it has this many rows; clusters are never split."""

_MADV_POPULATE_READ = 22  # from Linux's mman.h; the mmap module has no name for it
_MAX_PAGE_HEADER = 256
_MAX_ROWS_PER_PAGE = (1 << 31) - 1
_PAGE_BYTES = 1 << 30
_KEY_VALUE_COLUMN = 3


@dataclass(frozen=True)
class Rows:
    """Tokens of one layer in file order.

    ``kv_head``, ``cluster``, ``position`` (n_rows,) int64; ``keys`` (n_rows, key_dim); ``values`` (n_rows, value_dim).
    """

    kv_head: torch.Tensor
    cluster: torch.Tensor
    position: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class RowGroups:
    """Where the archived rows of a layer file lie, one entry per row group (that of the exact rows left out).

    ``first_row`` and ``n_rows`` count archived rows; ``first_byte`` is the file offset of the first of them.
    """

    first_row: tuple[int, ...]
    n_rows: tuple[int, ...]
    first_byte: tuple[int, ...]


def write_rows(path: Path, exact: Rows, archived: Rows | None, sizes: list[list[int]]) -> None:
    """Write a layer file.

    `archived` rows are in order of KV head and then cluster, `sizes[head][cluster]` of them each.
    """
    schema = _schema((exact.keys.shape[1] + exact.values.shape[1]) * exact.keys.element_size())
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
    with pq.ParquetWriter(path, schema, **options) as writer:
        table = _table(exact, schema)
        writer.write_table(table, row_group_size=max(1, table.num_rows))
        if archived is not None:
            table = _table(archived, schema)
            for start, stop in _group_cuts(sizes):
                writer.write_table(table.slice(start, stop - start), row_group_size=stop - start)


def read_rows(path: Path, key_dim: int, dtype: torch.dtype, *, exact_only: bool) -> Rows:
    """Decode a layer file with the Parquet reader: row group 0, or all of them."""
    with pq.ParquetFile(path) as file:
        groups = [0] if exact_only else list(range(file.num_row_groups))
        table = file.read_row_groups(groups)

    def integers(name: str) -> torch.Tensor:
        return torch.from_numpy(table.column(name).to_numpy().astype(np.int64))

    both = binary_to_tensor(table.column("key_value"), dtype)
    return Rows(
        kv_head=integers("kv_head"),
        cluster=integers("cluster"),
        position=integers("position"),
        keys=both[:, :key_dim],
        values=both[:, key_dim:],
    )


def row_groups(path: Path, row_bytes: int) -> RowGroups:
    """Find the archived rows from the Parquet footer.

    Raises
    ------
    ArchiveCorruptError
        If a column chunk is not one uncompressed PLAIN page of rows of `row_bytes` bytes.
    """
    metadata = pq.read_metadata(path)
    groups = [metadata.row_group(index) for index in range(1, metadata.num_row_groups)]
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


def to_bits(tensor: torch.Tensor) -> np.ndarray:
    """(n_rows, dim) of any floating dtype as (n_rows, dim * itemsize) uint8, bit for bit."""
    return tensor.detach().cpu().contiguous().view(torch.uint8).reshape(tensor.shape[0], -1).numpy()


def binary_column(tensor: torch.Tensor) -> pa.Array:
    """(n_rows, dim) as a fixed-size binary Arrow array without copying more than once."""
    bits = to_bits(tensor)
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(bits.shape[1]), bits.shape[0], [None, pa.py_buffer(bits)])


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
    both = binary_column(torch.cat([rows.keys, rows.values], dim=1))
    return pa.Table.from_arrays([*columns, both], schema=schema)


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


def binary_to_tensor(column: pa.ChunkedArray, dtype: torch.dtype) -> torch.Tensor:
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # no rows at all
        return torch.empty(0, column.type.byte_width // dtype.itemsize, dtype=dtype)
    width = array.type.byte_width
    raw = np.frombuffer(array.buffers()[1], dtype=np.uint8, count=len(array) * width, offset=array.offset * width)
    return torch.from_numpy(raw.copy()).view(dtype).reshape(len(array), width // dtype.itemsize)


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
