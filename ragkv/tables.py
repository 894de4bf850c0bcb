"""The small Parquet tables of an archive: token ids with character offsets, and the prototypes of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ragkv.errors import ArchiveCorruptError
from ragkv.faiss_io import read_centroids
from ragkv.layout import PromptTokens
from ragkv.manifest import TOKENS_FILE, LayerEntry, Manifest
from ragkv.rows import binary_column, binary_to_tensor

_OPTIONS = {"compression": "none", "use_dictionary": False, "write_statistics": False}
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

    ``centroids`` (n_kv_heads, n_clusters, key_dim), ``mean_values`` (n_kv_heads, n_clusters, value_dim) in the
    archive's dtype, ``sizes`` (n_kv_heads, n_clusters) int64; both (n_kv_heads, n_clusters) float32:
    ``logit_variance``, the mean squared change of a typical query's logit when a key is replaced by its centroid, and
    ``value_spread``, the mean squared distance of the values from the mean value of the head.
    """

    centroids: torch.Tensor
    mean_values: torch.Tensor
    sizes: torch.Tensor
    logit_variance: torch.Tensor
    value_spread: torch.Tensor


def write_tokens(folder: Path, tokens: PromptTokens) -> None:
    n_prefix = len(tokens.prefix_ids)
    columns = {
        "token_id": [*tokens.prefix_ids, *tokens.document_ids],
        "start": [NO_OFFSET] * n_prefix + [start for start, _ in tokens.offsets],
        "end": [NO_OFFSET] * n_prefix + [end for _, end in tokens.offsets],
    }
    schema = pa.schema([pa.field(name, pa.int32(), nullable=False) for name in columns])
    pq.write_table(pa.table(columns, schema=schema), folder / TOKENS_FILE, **_OPTIONS)


def read_tokens(folder: Path, manifest: Manifest) -> TokenTable:
    table = pq.read_table(folder / TOKENS_FILE)
    if table.num_rows != manifest.n_tokens:
        raise ArchiveCorruptError(f"{TOKENS_FILE}: {table.num_rows} tokens, the manifest says {manifest.n_tokens}")
    return TokenTable(*(_integers(table, name) for name in ("token_id", "start", "end")))


def write_prototypes(
    path: Path,
    used: torch.Tensor,
    sizes: torch.Tensor,
    logit_variance: torch.Tensor,
    value_spread: torch.Tensor,
    mean_values: torch.Tensor,
) -> None:
    """Write what is known of the `used` (n_kv_heads, n_clusters) clusters, in the order of the centroids."""
    heads, clusters = used.nonzero().T.cpu().numpy().astype(np.int32)
    columns = [
        pa.array(heads),
        pa.array(clusters),
        pa.array(sizes[used].cpu().numpy().astype(np.int32)),
        pa.array(logit_variance[used].cpu().numpy().astype(np.float32)),
        pa.array(value_spread[used].cpu().numpy().astype(np.float32)),
        binary_column(mean_values[used]),
    ]
    names = ["kv_head", "cluster", "size", "logit_variance", "value_spread", "mean_value"]
    schema = pa.schema([pa.field(n, c.type, nullable=False) for n, c in zip(names, columns, strict=True)])
    pq.write_table(pa.Table.from_arrays(columns, schema=schema), path, **_OPTIONS)


def read_prototypes(folder: Path, entry: LayerEntry, dtype: torch.dtype) -> Prototypes:
    """Read centroids, mean values and sizes of one layer that has clusters."""
    n_rows, n_clusters = sum(entry.clusters), max(entry.clusters)
    centroids = read_centroids(folder / entry.centroids_file, (n_rows, entry.key_dim), dtype)
    table = pq.read_table(folder / entry.prototypes_file)
    if table.num_rows != n_rows:
        raise ArchiveCorruptError(f"{entry.prototypes_file}: {table.num_rows} rows, the manifest says {n_rows}")
    used = torch.arange(n_clusters) < torch.tensor(entry.clusters).unsqueeze(1)  # (n_kv_heads, n_clusters)

    def padded(rows: torch.Tensor) -> torch.Tensor:
        out = rows.new_zeros(*used.shape, *rows.shape[1:])
        out[used] = rows
        return out

    return Prototypes(
        centroids=padded(centroids),
        mean_values=padded(binary_to_tensor(table.column("mean_value"), dtype)),
        sizes=padded(_integers(table, "size")),
        logit_variance=padded(_floats(table, "logit_variance")),
        value_spread=padded(_floats(table, "value_spread")),
    )


def _integers(table: pa.Table, name: str) -> torch.Tensor:
    return torch.from_numpy(table.column(name).to_numpy().astype(np.int64))


def _floats(table: pa.Table, name: str) -> torch.Tensor:
    return torch.from_numpy(table.column(name).to_numpy().astype(np.float32))
