"""The rows file: the tokens of all layers as Parquet, one row per cluster, mapped and fetched cluster by cluster.

A row is the posting list of a cluster and the bytes of its tokens (`ragkv.archive.payload`), or all tokens of a KV head
that are always attended exactly. Every row group holds whole clusters of one KV head, its payload column is one
uncompressed PLAIN page, and a checksum of each row group stands in the footer: so recall reads a cluster's bytes
straight out of the mapped file, at an address that the footer gives, once it has looked at the checksum.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ragkv.archive.files import FileEntry, one_line, open_regular, stamp_of, system_errors
from ragkv.archive.parquet import LEVELS_CODE, PLAIN_CODE, RowGroup, read_row_groups
from ragkv.errors import ArchiveCorruptError, ArchiveReadError, ConfigError

ROWS_FILE = "rows.parquet"
EXACT = -1
"""Cluster number of the tokens that are always attended exactly."""

GROUP_TOKENS = 4096
"""A row group of archived tokens is closed once it has this many; clusters are never split."""

LENGTH_BYTES = 4
"""Bytes in front of the payload of each row, which say how long it is."""

_GROUP_BYTES = 1 << 24  # a row group of exact tokens is closed once it has so many
_PAGE_BYTES = 1 << 30  # the tokens of a row group are one page, which holds no more
_CHECKSUMS = b"ragkv.row_groups.sha256"
_MAGIC = b"PAR1"
_TAIL = 8  # length of the footer and magic
_MAX_PAGE_HEADER = 256
_LONGEST_FOOTER = 1 << 28
_SCHEMA = pa.schema(
    [
        pa.field("layer", pa.int32(), nullable=False),
        pa.field("kv_head", pa.int32(), nullable=False),
        pa.field("cluster", pa.int32(), nullable=False),
        pa.field("positions", pa.list_(pa.field("element", pa.int32(), nullable=False)), nullable=False),
        pa.field("key_value", pa.binary(), nullable=False),
    ]
)
_OPTIONS = {
    "compression": "none",
    "use_dictionary": False,
    "column_encoding": {
        "layer": "DELTA_BINARY_PACKED",
        "kv_head": "DELTA_BINARY_PACKED",
        "cluster": "DELTA_BINARY_PACKED",
        "positions.list.element": "DELTA_BINARY_PACKED",
        "key_value": "PLAIN",
    },
    "write_statistics": False,
    "data_page_size": _PAGE_BYTES,
    "max_rows_per_page": (1 << 31) - 1,
}


class RowsWriter:
    """Writes a rows file: first the exact tokens of every layer, then the clusters, layer by layer."""

    def __init__(self, path: Path) -> None:
        self._sink = _HashingFile(path)
        self._writer = pq.ParquetWriter(self._sink, _SCHEMA, **_OPTIONS)
        self._sink.begin()
        self._exact: list[pa.Table] = []

    def add_exact(self, layer: int, positions: torch.Tensor, payload: torch.Tensor) -> None:
        """Exact tokens of a layer: `positions` (n,) of every KV head, `payload` (n_kv_heads, n, row_bytes) uint8."""
        n_heads, n_tokens = payload.shape[:2]
        if not n_tokens:
            return
        for head in range(n_heads):
            self._exact.append(_table(layer, head, [EXACT], [n_tokens], positions, payload[head]))
        if sum(table.nbytes for table in self._exact) >= _GROUP_BYTES:
            self._flush_exact()

    def add_clusters(self, layer: int, sizes: list[list[int]], positions: torch.Tensor, payload: torch.Tensor) -> None:
        """Archived tokens of a layer, each KV head's by cluster: `positions` (n_kv_heads, n) int64, `payload`
        (n_kv_heads, n, row_bytes) uint8, and `sizes[head]` how many of each cluster."""
        self._flush_exact()
        for head, counts in enumerate(sizes):
            for first, last in _group_cuts(counts):
                start, stop = sum(counts[:first]), sum(counts[:last])
                self._write(
                    _table(
                        layer,
                        head,
                        range(first, last),
                        counts[first:last],
                        positions[head, start:stop],
                        payload[head, start:stop],
                    )
                )

    def close(self) -> None:
        """Write the footer, with the checksum of every row group."""
        self._flush_exact()
        self._writer.add_key_value_metadata({_CHECKSUMS.decode(): "".join(self._sink.digests)})
        self._writer.close()
        self._sink.close()

    def __enter__(self) -> RowsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        if kind is None:
            self.close()
        else:
            self._sink.close()

    def _flush_exact(self) -> None:
        if self._exact:
            self._write(pa.concat_tables(self._exact).combine_chunks())
            self._exact = []

    def _write(self, table: pa.Table) -> None:
        self._writer.write_table(table, row_group_size=len(table))
        self._sink.end_group()


class _HashingFile:
    """A file that hashes what is written between the ends of row groups; the writer sees a Python file."""

    def __init__(self, path: Path) -> None:
        self._handle = path.open("wb")
        self._hasher = hashlib.sha256()
        self.digests: list[str] = []
        self.closed = False

    def begin(self) -> None:
        self._hasher = hashlib.sha256()

    def end_group(self) -> None:
        self.digests.append(self._hasher.hexdigest())
        self.begin()

    def write(self, data: bytes) -> int:
        self._hasher.update(data)
        return self._handle.write(data)

    def tell(self) -> int:
        return self._handle.tell()

    def flush(self) -> None:
        self._handle.flush()

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        self._handle.close()
        self.closed = True


def _table(
    layer: int, head: int, clusters: range | list[int], sizes: list[int], positions: torch.Tensor, payload: torch.Tensor
) -> pa.Table:
    """Rows of some clusters of one KV head; `positions` (n,) and `payload` (n, row_bytes) of their tokens in order."""
    n_rows, row_bytes = len(sizes), payload.shape[1]
    if payload.nbytes + LENGTH_BYTES * n_rows > _PAGE_BYTES:
        raise ConfigError(
            f"{payload.nbytes:,} bytes of layer {layer}, kv_head {head} stand together and a row group holds "
            f"{_PAGE_BYTES:,}; make sink_tokens, window_tokens or tokens_per_cluster of the recipe smaller"
        )
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    raw = np.ascontiguousarray(payload.detach().cpu().numpy())
    of_bytes = (offsets.astype(np.int64) * row_bytes).astype(np.int32)
    where = pa.array(positions.cpu().numpy().astype(np.int32))
    element = _SCHEMA.field("positions").type
    columns = [
        pa.array(np.full(n_rows, layer, dtype=np.int32)),
        pa.array(np.full(n_rows, head, dtype=np.int32)),
        pa.array(np.asarray(clusters, dtype=np.int32)),
        pa.ListArray.from_arrays(pa.array(offsets), where, type=element),
        pa.Array.from_buffers(pa.binary(), n_rows, [None, pa.py_buffer(of_bytes), pa.py_buffer(raw)]),
    ]
    return pa.Table.from_arrays(columns, schema=_SCHEMA)


def _group_cuts(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Runs of clusters that make up a row group each."""
    first, held = 0, 0
    for place, size in enumerate(sizes, start=1):
        held += size
        if held >= GROUP_TOKENS or place == len(sizes):
            yield first, place
            first, held = place, 0


def rows_entry(path: Path) -> FileEntry:
    """Length of a rows file, and the SHA-256 of its footer, which holds the checksums of all that comes before it."""
    with path.open("rb") as handle:
        length = os.fstat(handle.fileno()).st_size
        handle.seek(length - _TAIL)
        n_footer = int.from_bytes(handle.read(_TAIL)[:4], "little")
        handle.seek(length - _TAIL - n_footer)
        return FileEntry(bytes=length, sha256=hashlib.sha256(handle.read()).hexdigest())


@dataclass(frozen=True)
class RowGroups:
    """The row groups of some layers, each array with one entry per row group.

    ``start`` and ``stop`` (n,) int64 bound its bytes in the file, and ``data`` (n,) int64 is where the header of its
    payload's page begins; ``rows`` (n,) int64 counts its rows; ``sha256`` is the checksum of its bytes.
    """

    start: np.ndarray
    stop: np.ndarray
    data: np.ndarray
    rows: np.ndarray
    sha256: tuple[str, ...]


class RowsFile:
    """A mapped rows file; keeps at most one descriptor, and never reads what nobody asked for.

    ``mapped`` (n_bytes,) uint8 on the host is a private mapping: nothing written to it could reach the file.
    """

    def __init__(self, path: Path, expected: FileEntry) -> None:
        """Map the file at `path` and check its length and footer.

        Raises
        ------
        ArchiveNotFoundError, ArchiveCorruptError, ArchiveReadError
            If it is not there, is not the file that the manifest speaks of, or cannot be read now.
        """
        self.path = path
        with system_errors(ROWS_FILE):
            descriptor = open_regular(path)
            try:
                self.stamp = _stamp(os.fstat(descriptor))
                if self.stamp[2] != expected.bytes or expected.bytes < 2 * _TAIL:
                    raise ArchiveCorruptError(f"{ROWS_FILE}: {self.stamp[2]} bytes, the manifest says {expected.bytes}")
                self._map = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
            finally:
                os.close(descriptor)
            self.mapped = torch.from_numpy(np.frombuffer(self._map, dtype=np.uint8))
            self._metadata, told = self._checked_footer(expected)
            self.groups = self._groups(told)
        self._good, self._fit = (np.zeros(len(self.groups.rows), dtype=bool) for _ in range(2))

    def _checked_footer(self, expected: FileEntry) -> tuple[pq.FileMetaData, list[RowGroup]]:
        raw, length = self.mapped.numpy(), expected.bytes
        n_footer = int.from_bytes(raw[length - _TAIL : length - 4].tobytes(), "little")
        first = length - _TAIL - n_footer
        if n_footer > _LONGEST_FOOTER or first < len(_MAGIC):
            raise ArchiveCorruptError(f"{ROWS_FILE}: its footer does not fit into it")
        footer = raw[first:].tobytes()
        if hashlib.sha256(footer).hexdigest() != expected.sha256:
            raise ArchiveCorruptError(f"{ROWS_FILE}: the SHA-256 of its footer is not the manifest's")
        if raw[: len(_MAGIC)].tobytes() != _MAGIC:  # the only bytes that no checksum covers
            raise ArchiveCorruptError(f"{ROWS_FILE}: it does not begin as a Parquet file does")
        self._footer_start = first
        return pq.read_metadata(pa.BufferReader(_MAGIC + footer)), read_row_groups(footer[:-_TAIL])

    def _groups(self, told: list[RowGroup]) -> RowGroups:
        """Where the row groups lie, from the footer; nothing before it is touched."""
        metadata = self._metadata
        n_groups, names = len(told), metadata.schema.to_arrow_schema()
        if not names.equals(_SCHEMA) or n_groups != metadata.num_row_groups:
            raise ArchiveCorruptError(f"{ROWS_FILE}: its columns are not those of the format")
        said = (metadata.metadata or {}).get(_CHECKSUMS, b"").decode("ascii", "replace")
        if len(said) != 64 * n_groups:
            raise ArchiveCorruptError(f"{ROWS_FILE}: it does not hold one checksum for each row group")
        start, stop, data, rows = (np.zeros(n_groups, dtype=np.int64) for _ in range(4))
        end = len(_MAGIC)
        for place, group in enumerate(told):
            payload = group.columns[-1]
            start[place], stop[place] = end, payload.first_page + payload.bytes
            data[place], rows[place] = payload.first_page, group.rows
            first = group.columns[0].first_page
            if first != end or not end < data[place] < stop[place] <= self._footer_start or not _is_bounded(group):
                raise ArchiveCorruptError(f"{ROWS_FILE}: row group {place} is not laid out as the format says")
            end = int(stop[place])
        if end != self._footer_start:
            raise ArchiveCorruptError(f"{ROWS_FILE}: there is something between its row groups and its footer")
        return RowGroups(start, stop, data, rows, tuple(said[at : at + 64] for at in range(0, len(said), 64)))

    def require(self, groups: np.ndarray) -> None:
        """Look at the checksums of these row groups (n,) int64, each once.

        Raises
        ------
        ArchiveCorruptError
            If one does not hold.
        """
        for group in groups[~self._good[groups]].tolist():
            first, last = int(self.groups.start[group]), int(self.groups.stop[group])
            if hashlib.sha256(memoryview(self._map)[first:last]).hexdigest() != self.groups.sha256[group]:
                raise ArchiveCorruptError(
                    f"{str(self.path)!r}: row group {group} has another SHA-256 than its footer says; the archive is "
                    "damaged: build it again"
                )
            self._good[group] = True

    def require_bytes(
        self, addresses: torch.Tensor, first: int, last: int, *, fits: Callable[[int, int], bool] | None = None
    ) -> None:
        """Look at the checksums of the row groups, from `first` up to `last`, that hold the bytes `addresses` (n,).

        `fits` is asked of the first and the last byte of each group, once, whether its numbers can be attended.

        Raises
        ------
        ArchiveCorruptError
            If a checksum does not hold, or numbers do not fit.
        """
        looked_at = self._good if fits is None else self._fit
        if bool(looked_at[first:last].all()):
            return
        found = np.searchsorted(self.groups.start[first:last], addresses.cpu().numpy(), side="right") - 1
        groups = np.unique(found) + first
        self.require(groups)
        for group in groups[~looked_at[groups]].tolist():
            if fits is not None and not fits(int(self.groups.start[group]), int(self.groups.stop[group])):
                raise ArchiveCorruptError(
                    f"{str(self.path)!r}: row group {group} holds a number that is NaN or infinite, or too large; the "
                    "archive is damaged: build it again"
                )
            looked_at[group] = True

    def changed(self) -> bool:
        """Whether the file was changed in place since it was mapped: other bytes, or fewer, may stand there now.

        A file that was put in its place, or deleted, changes nothing: the mapped one lives on.
        """
        try:
            now = stamp_of(self.path)
            if self._map.size() != self.stamp[2]:
                return True
        except (OSError, ValueError) as error:
            raise ArchiveReadError(f"{str(self.path)!r} cannot be looked at now: {one_line(error)}") from error
        return now is not None and now[0] == self.stamp[0] and now != self.stamp

    def columns(self, groups: list[int], names: list[str]) -> pa.Table:
        """Decode some columns of some row groups with the Parquet reader."""
        self.require(np.asarray(groups, dtype=np.int64))
        with system_errors(ROWS_FILE):
            reader = pq.ParquetFile(pa.BufferReader(pa.py_buffer(self.mapped.numpy())), metadata=self._metadata)
            return reader.read_row_groups(groups, columns=names, use_threads=False)

    @property
    def resident_bytes(self) -> int:
        """Bytes held about the file, and none of it."""
        groups = self.groups
        return groups.start.nbytes * 4 + 32 * len(groups.sha256)


def _is_bounded(group: RowGroup) -> bool:
    """Whether a row group has rows, all of it is uncompressed, and its tokens are as many as its payload can hold.

    Else little on disk could be much in memory.
    """
    *numbers, positions, payload = group.columns
    most = payload.bytes
    return (
        len(group.columns) == len(_SCHEMA)
        and all(column.is_uncompressed and column.uncompressed_bytes == column.bytes for column in group.columns)
        and payload.encodings <= {PLAIN_CODE, LEVELS_CODE}
        and all(column.values == group.rows for column in (*numbers, payload))
        and 0 < LENGTH_BYTES * group.rows < most
        and group.rows <= positions.values <= most
    )


def payload_start(rows: RowsFile, group: int, n_bytes: int) -> int:
    """First byte of the payload page's rows in a row group whose rows hold `n_bytes` bytes.

    Raises
    ------
    ArchiveCorruptError
        If the page does not hold as many.
    """
    groups = rows.groups
    size = int(groups.stop[group] - groups.data[group])
    header = size - n_bytes - LENGTH_BYTES * int(groups.rows[group])
    if not 0 < header <= _MAX_PAGE_HEADER:
        raise ArchiveCorruptError(
            f"{ROWS_FILE}: row group {group} does not hold the bytes that its clusters' sizes say"
        )
    return int(groups.data[group]) + header


def _stamp(found: os.stat_result) -> tuple[int, int, int]:
    return (found.st_ino, found.st_mtime_ns, found.st_size)
