"""Prototypes of clusters: a table of sizes, coded mean values and spreads, and a FAISS shard of coded centroids.

The keys of a cluster differ from their centroid along few directions that matter. For each KV head the first principal
axes of these differences are kept with its transforms, and for each cluster how far its keys reach along each: then the
standard deviation of *this* query's logit inside a cluster is known for the price of one small product.

In the shard every column is four bits. A coefficient of eight bits is two columns, its low and its high four bits: so
what FAISS decodes (the nibble less 7.5) is the coefficient in steps of its quantiser, whatever bits it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from ragkv.archive.files import system_errors
from ragkv.archive.manifest import LayerEntry
from ragkv.archive.parquet import binary_column, integers, plain_bytes, read_binary, read_plain
from ragkv.errors import ArchiveCorruptError, MissingExtraError

PROTOTYPES_FILE = "prototypes.parquet"
CENTROIDS_FILE = "centroids.faiss"
_KIND, _QT_4BIT, _INNER_PRODUCT = b"IxSQ", 1, 0
_LOW, _WIDTH = -8.0, 15.0
"""FAISS decodes a code c as low + (c + 0.5) / 15 * width: with these, as c - 7.5."""


@dataclass(frozen=True)
class Prototypes:
    """Prototypes of one layer, padded to the head with most clusters; padding has size 0 and codes of 0.

    ``key_codes`` (n_kv_heads, n_clusters, n_bytes) and ``value_codes`` (n_kv_heads, n_clusters, n_bytes) uint8 are
    centroids and mean values in the bases of the layer's transforms; ``sizes`` (n_kv_heads, n_clusters) in the smallest
    integer type that holds them. ``spreads`` (n_kv_heads, n_clusters, 2 + n_axes) uint8 are scale codes
    (`ragkv.archive.codec.scale_of`): the root mean square change of a typical query's logit when a key is replaced by
    its centroid, the root mean square distance of the values from the mean value of the head, and how far keys reach
    along each axis, in units of its length.
    """

    key_codes: torch.Tensor
    value_codes: torch.Tensor
    sizes: torch.Tensor
    spreads: torch.Tensor

    @property
    def used(self) -> torch.Tensor:
        """Which places are clusters: (n_kv_heads, n_clusters) boolean."""
        return self.sizes > 0

    @property
    def resident_bytes(self) -> int:
        return self.key_codes.nbytes + self.value_codes.nbytes + self.sizes.nbytes + self.spreads.nbytes


def write_prototypes(folder: Path, layers: Mapping[int, Prototypes]) -> None:
    """Write prototypes in order of layer, KV head and cluster: the table, and the shard of their centroids."""
    layer_of, head_of, tables = [], [], []
    for index, layer in sorted(layers.items()):
        used = layer.used
        heads = used.nonzero()[:, 0].cpu()
        layer_of.append(torch.full_like(heads, index))
        head_of.append(heads)
        tables.append([each[used].cpu() for each in (layer.sizes, layer.value_codes, layer.spreads, layer.key_codes)])
    sizes, values, spreads, keys = (torch.cat(each) for each in zip(*tables, strict=True))
    whole = [torch.cat(layer_of), torch.cat(head_of), sizes]
    schema = _schema(values.shape[1], spreads.shape[1])
    columns = [pa.array(each.numpy().astype(np.int32)) for each in whole]
    columns += [binary_column(values), binary_column(spreads)]
    raw = plain_bytes(schema, columns, packed=("layer", "kv_head", "size"))
    (folder / PROTOTYPES_FILE).write_bytes(raw)
    (folder / CENTROIDS_FILE).write_bytes(write_centroids(keys))


def read_prototypes(
    table_raw: bytes, shard_raw: bytes, entries: Sequence[LayerEntry], *, key_bytes: int, value_bytes: int, n_axes: int
) -> dict[int, Prototypes]:
    """The prototypes of every layer that has clusters, from the bytes of both files.

    Raises
    ------
    ArchiveCorruptError
        If the files do not hold the clusters of `entries` in order, or codes of the sizes that are given.
    """
    counts = [(entry.index, head, count) for entry in entries for head, count in enumerate(entry.clusters)]
    total = sum(count for _, _, count in counts)
    codes = read_centroids(shard_raw, (total, key_bytes))
    table = read_plain(PROTOTYPES_FILE, table_raw, _schema(value_bytes, 2 + n_axes))
    with system_errors(PROTOTYPES_FILE):
        repeats = np.array([count for _, _, count in counts])
        for name, place in (("layer", 0), ("kv_head", 1)):
            wanted = np.repeat(np.array([each[place] for each in counts]), repeats)
            if not np.array_equal(integers(table, name), wanted):
                raise ArchiveCorruptError(f"{PROTOTYPES_FILE}: its rows are not the clusters that the manifest counts")
        sizes = torch.from_numpy(integers(table, "size"))
        if len(sizes) and int(sizes.min()) < 1:
            raise ArchiveCorruptError(f"{PROTOTYPES_FILE}: a cluster has size {int(sizes.min())}")
        values, spreads = read_binary(table.column("value_code")), read_binary(table.column("spreads"))
        found, at = {}, 0
        for entry in entries:
            if entry.clusters:
                n_rows = sum(entry.clusters)
                own = slice(at, at + n_rows)
                found[entry.index] = _padded(entry.clusters, codes[own], values[own], sizes[own], spreads[own])
                at += n_rows
    return found


def _padded(counts: Sequence[int], *columns: torch.Tensor) -> Prototypes:
    keys, values, sizes, spreads = (_by_head(counts, column) for column in columns)
    return Prototypes(keys, values, sizes.to(smallest_dtype(int(sizes.max()))), spreads)


def _by_head(counts: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
    """Rows (n, ...) as (n_heads, most of any head, ...), 0 behind the `counts` of each head."""
    n_heads, most = len(counts), max(counts)
    if min(counts) == most:
        return rows.unflatten(0, (n_heads, most))
    out = rows.new_zeros(n_heads, most, *rows.shape[1:])
    for head, part in enumerate(rows.split(list(counts))):
        out[head, : len(part)] = part
    return out


def smallest_dtype(largest: int) -> torch.dtype:
    """The smallest integer type that holds numbers from 0 to `largest`."""
    return torch.uint8 if largest < 1 << 8 else torch.int32 if largest < 1 << 31 else torch.int64


def _schema(value_bytes: int, n_spreads: int) -> pa.Schema:
    whole = [pa.field(name, pa.int32(), nullable=False) for name in ("layer", "kv_head", "size")]
    sizes = {"value_code": value_bytes, "spreads": n_spreads}
    return pa.schema([*whole, *(pa.field(name, pa.binary(size), nullable=False) for name, size in sizes.items())])


def write_centroids(codes: torch.Tensor) -> bytes:
    """The bytes of a shard of `codes` (n_centroids, n_bytes) uint8, as FAISS writes them.

    Raises
    ------
    MissingExtraError
        If FAISS is not installed.
    """
    try:
        import faiss
    except ImportError as error:
        raise MissingExtraError(
            "FAISS is not installed; install one of the extras: pip install 'ragkv[cpu]' or 'ragkv[gpu]'"
        ) from error
    raw = codes.cpu().contiguous().numpy()
    n_columns = 2 * raw.shape[1]
    index = faiss.IndexScalarQuantizer(n_columns, faiss.ScalarQuantizer.QT_4bit, faiss.METRIC_INNER_PRODUCT)
    trained = np.repeat(np.asarray([_LOW, _WIDTH], dtype=np.float32), n_columns)
    faiss.copy_array_to_vector(trained, index.sq.trained)
    index.is_trained = True
    index.add_sa_codes(raw)
    return bytes(faiss.serialize_index(index).tobytes())


def read_centroids(raw: bytes, shape: tuple[int, int]) -> torch.Tensor:
    """The codes (n_centroids, n_bytes) uint8 in the bytes of a shard; parsed here, and compared with every field.

    Raises
    ------
    ArchiveCorruptError
        If it is another kind of index, or of another number or size of centroids than `shape`.
    """
    head = shard_head(*shape)
    if len(raw) != len(head) + shape[0] * shape[1] or raw[:41] != head[:41] or raw[49 : len(head)] != head[49:]:
        raise ArchiveCorruptError(
            f"{CENTROIDS_FILE}: not a FAISS shard of {shape[0]} centroids of {shape[1]} bytes, as the manifest says"
        )
    codes = np.frombuffer(raw, dtype=np.uint8, offset=len(head)).reshape(shape)
    return torch.from_numpy(codes.copy())


def shard_head(n_centroids: int, n_bytes: int) -> bytes:
    """All bytes of a shard before its codes; the eight from 41 on are not looked at."""
    d = 2 * n_bytes

    def number(value: int, size: int) -> bytes:
        return value.to_bytes(size, "little")

    fields = [_KIND, number(d, 4), number(n_centroids, 8), number(1 << 20, 8) * 2, b"\x01", number(_INNER_PRODUCT, 4)]
    fields += [number(_QT_4BIT, 4), bytes(8), number(d, 8), number(n_bytes, 8), number(2 * d, 8)]
    trained = np.repeat(np.asarray([_LOW, _WIDTH], dtype="<f4"), d).tobytes()
    return b"".join([*fields, trained, number(n_centroids * n_bytes, 8)])
