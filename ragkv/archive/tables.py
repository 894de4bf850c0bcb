"""The small Parquet tables of an archive: token ids with offsets, and the prototypes and bases of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ragkv.archive.centroids import read_centroids
from ragkv.archive.codec import Basis, Widths
from ragkv.archive.manifest import TOKENS_FILE, LayerEntry, Manifest
from ragkv.archive.payload import Payload, from_bits, rounded, to_bits
from ragkv.archive.rows import binary_column, read_binary
from ragkv.errors import ArchiveCorruptError
from ragkv.model.prompt import PromptTokens

_OPTIONS = {"compression": "zstd", "use_dictionary": False, "write_statistics": False}
_RAW = {"compression": "none", "use_dictionary": False, "write_statistics": False}
NO_OFFSET = -1
"""Character offset of prefix tokens, which are not part of the document."""


@dataclass(frozen=True)
class TokenTable:
    """Prefix then document tokens: ``ids`` (n,) int64, ``start`` and ``end`` (n,) int64 character offsets."""

    ids: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor


@dataclass(frozen=True)
class Prototypes:
    """Prototypes of one layer, padded to the head with most clusters; padding has size 0.

    ``centroids`` (n_kv_heads, n_clusters, key_dim) in the archive's dtype, ``sizes`` (n_kv_heads, n_clusters) int64;
    both (n_kv_heads, n_clusters) float32: ``logit_variance``, the mean squared change of a typical query's logit when
    a key is replaced by its centroid, and ``value_spread``, the mean squared distance of the values from the mean
    value of the head. ``axis_scales`` (n_kv_heads, n_clusters, n_axes) uint8, see `ragkv.archive.spread`.
    """

    centroids: torch.Tensor
    sizes: torch.Tensor
    logit_variance: torch.Tensor
    value_spread: torch.Tensor
    axis_scales: torch.Tensor


def write_tokens(folder: Path, tokens: PromptTokens) -> None:
    n_prefix = len(tokens.prefix_ids)
    columns = {
        "token_id": [*tokens.prefix_ids, *tokens.document_ids],
        "start": [NO_OFFSET] * n_prefix + [start for start, _ in tokens.offsets],
        "end": [NO_OFFSET] * n_prefix + [end for _, end in tokens.offsets],
    }
    arrays = {name: pa.array(column, pa.int32()) for name, column in columns.items()}
    _write(folder / TOKENS_FILE, arrays, _OPTIONS)


def read_tokens(folder: Path, manifest: Manifest) -> TokenTable:
    table = pq.read_table(folder / TOKENS_FILE)
    if table.num_rows != manifest.n_tokens:
        raise ArchiveCorruptError(f"{TOKENS_FILE}: {table.num_rows} tokens, the manifest says {manifest.n_tokens}")
    return TokenTable(*(_integers(table, name) for name in ("token_id", "start", "end")))


def write_prototypes(
    path: Path,
    used: torch.Tensor,
    *,
    sizes: torch.Tensor,
    logit_variance: torch.Tensor,
    value_spread: torch.Tensor,
    axis_scales: torch.Tensor,
) -> None:
    """Write what is known of the `used` (n_kv_heads, n_clusters) clusters, in the order of the centroids."""
    heads, clusters = used.nonzero().T.cpu().numpy().astype(np.int32)
    columns = {
        "kv_head": heads,
        "cluster": clusters,
        "size": sizes[used].cpu().numpy().astype(np.int32),
        "logit_variance": logit_variance[used].cpu().numpy().astype(np.float32),
        "value_spread": value_spread[used].cpu().numpy().astype(np.float32),
    }
    arrays = {name: pa.array(column) for name, column in columns.items()}
    _write(path, {**arrays, "axis_scales": binary_column(axis_scales[used])}, _OPTIONS)


def read_prototypes(folder: Path, entry: LayerEntry, dtype: torch.dtype) -> Prototypes:
    """Read centroids, sizes and measures of spread of one layer that has clusters."""
    n_rows, n_clusters = sum(entry.clusters), max(entry.clusters)
    centroids = read_centroids(folder / entry.centroids_file, (n_rows, entry.key_dim))
    table = pq.read_table(folder / entry.prototypes_file)
    if table.num_rows != n_rows:
        raise ArchiveCorruptError(f"{entry.prototypes_file}: {table.num_rows} rows, the manifest says {n_rows}")
    used = torch.arange(n_clusters) < torch.tensor(entry.clusters).unsqueeze(1)  # (n_kv_heads, n_clusters)

    def padded(rows: torch.Tensor) -> torch.Tensor:
        out = rows.new_zeros(*used.shape, *rows.shape[1:])
        out[used] = rows
        return out

    mean = read_key_mean(folder, entry)
    return Prototypes(
        centroids=rounded(padded(centroids) + mean.unsqueeze(1), dtype),
        sizes=padded(_integers(table, "size")),
        logit_variance=padded(_floats(table, "logit_variance")),
        value_spread=padded(_floats(table, "value_spread")),
        axis_scales=padded(read_binary(table.column("axis_scales"))),
    )


def write_bases(
    path: Path, key_mean: torch.Tensor, key_axes: torch.Tensor, key: Basis | None, value: Basis | None
) -> None:
    """Write the transforms of a layer, one row per KV head; those of a lossless tensor have no columns.

    `key_mean` (n_kv_heads, key_dim) is what the stored centroids are taken from, `key_axes` (n_kv_heads, n_axes,
    key_dim) what the spreads of clusters are along.
    """
    columns = {
        "kv_head": pa.array(np.arange(len(key_mean), dtype=np.int32)),
        "key_mean": binary_column(to_bits(key_mean.float())),
        "key_axes": binary_column(to_bits(key_axes.to(torch.bfloat16).flatten(1))),
    }
    if key is not None:
        columns["key_rows"] = binary_column(to_bits(key.rows.to(torch.bfloat16).flatten(1)))
    if value is not None:
        columns["value_rows"] = binary_column(to_bits(value.rows.to(torch.bfloat16).flatten(1)))
        columns["value_mean"] = binary_column(to_bits(value.mean.float()))
    _write(path, columns, _RAW)


def read_key_mean(folder: Path, entry: LayerEntry) -> torch.Tensor:
    """What the centroids of a layer are stored relative to: (n_kv_heads, key_dim) float32."""
    raw = read_binary(pq.read_table(folder / entry.bases_file, columns=["key_mean"]).column("key_mean"))
    return from_bits(raw, torch.float32).reshape(entry.n_kv_heads, entry.key_dim)


def read_key_axes(folder: Path, entry: LayerEntry) -> torch.Tensor:
    """The axes that the spreads of a layer's clusters are along: (n_kv_heads, n_axes, key_dim) float32."""
    raw = read_binary(pq.read_table(folder / entry.bases_file, columns=["key_axes"]).column("key_axes"))
    return from_bits(raw, torch.bfloat16).float().reshape(entry.n_kv_heads, -1, entry.key_dim)


def read_payload(folder: Path, entry: LayerEntry, dtype: torch.dtype) -> Payload:
    """How the rows of a layer are laid out, with the transforms of its coded tensors."""
    key = value = None
    table = pq.read_table(folder / entry.bases_file)
    if entry.key_widths:
        key = _read_basis(table, "key", Widths(*entry.key_widths), entry.n_kv_heads, entry.key_dim)
    if entry.value_widths:
        value = _read_basis(table, "value", Widths(*entry.value_widths), entry.n_kv_heads, entry.value_dim)
    return Payload(dtype=dtype, key_dim=entry.key_dim, value_dim=entry.value_dim, key_basis=key, value_basis=value)


def _read_basis(table: pa.Table, tensor: str, widths: Widths, n_heads: int, dim: int) -> Basis:
    raw = read_binary(table.column(f"{tensor}_rows"))
    rows = from_bits(raw, torch.bfloat16).reshape(n_heads, widths.n_kept, dim)
    mean = torch.zeros(n_heads, dim)
    if tensor == "value":
        mean = from_bits(read_binary(table.column("value_mean")), torch.float32).reshape(n_heads, dim)
    return Basis(widths=widths, rows=rows, mean=mean)


def _write(path: Path, columns: dict[str, pa.Array], options: dict[str, object]) -> None:
    schema = pa.schema([pa.field(name, column.type, nullable=False) for name, column in columns.items()])
    pq.write_table(pa.Table.from_arrays(list(columns.values()), schema=schema), path, **options)


def _integers(table: pa.Table, name: str) -> torch.Tensor:
    return torch.from_numpy(table.column(name).to_numpy().astype(np.int64))


def _floats(table: pa.Table, name: str) -> torch.Tensor:
    return torch.from_numpy(table.column(name).to_numpy().astype(np.float32))
