"""An archived layer as attention takes it: prototypes and exact tokens in memory, the rest mapped from disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import torch

from ragkv.archive.codec import decode
from ragkv.archive.manifest import LayerEntry
from ragkv.archive.payload import Payload, from_bits, rounded
from ragkv.archive.rows import RowGroups, map_file, mapped_rows, read_rows, row_groups
from ragkv.archive.spread import axis_variances
from ragkv.archive.tables import Prototypes, read_key_axes, read_payload, read_prototypes
from ragkv.errors import ArchiveCorruptError, NonFiniteError

MAX_CORRECTION = 0.5
"""Limit of the Jensen correction, in nats; measured best of 0.35, 0.5, 0.7 and 1."""


@dataclass(frozen=True)
class ArchivedLayer:
    """What attention needs of one layer, on the model's device.

    ``keys`` (n_kv_heads, n_held, key_dim) and ``values`` (n_kv_heads, n_held, value_dim) hold the centroids and mean
    values first, then the tokens that are always attended exactly. ``bias`` (n_kv_heads, n_held) float32 is the
    additive logit: log(size) of a cluster with its Jensen correction (-inf where a head has fewer clusters), 0 of a
    token; None without clusters.
    ``exact_positions`` (n_exact,) int64. ``recall`` is None for sliding layers, very short documents, and layers whose
    every token is held.
    """

    index: int
    window: int | None
    keys: torch.Tensor
    values: torch.Tensor
    bias: torch.Tensor | None
    exact_positions: torch.Tensor
    recall: RecallTables | None


@dataclass(frozen=True)
class RecallTables:
    """Where the tokens behind each prototype lie.

    ``sizes`` and ``address`` (n_kv_heads, n_clusters) int64: the tokens of a cluster and the byte of its first row in
    ``mapped``, the mapped row file (n_bytes,) uint8 on the host, whose rows ``payload`` lays out. ``priority``
    (n_kv_heads, n_clusters) float32 is what a cluster's mass is weighted with when clusters are ranked, see
    `recall_priority`; ``axes`` (n_kv_heads, n_axes, key_dim) float32 and ``axis_variances`` (n_kv_heads, n_clusters,
    n_axes) float32 say how its keys spread, see `ragkv.archive.spread`. ``largest`` is the size of the largest cluster,
    ``n_tokens`` the archived tokens of a head; ``padded`` says that some head has fewer clusters than others, its last
    sizes being 0.
    """

    sizes: torch.Tensor
    priority: torch.Tensor
    axes: torch.Tensor
    axis_variances: torch.Tensor
    address: torch.Tensor
    mapped: torch.Tensor
    groups: RowGroups
    payload: Payload
    largest: int
    n_tokens: int
    padded: bool

    @property
    def n_clusters(self) -> int:
        return self.sizes.shape[1]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's key and value in the row file."""
        return self.payload.row_bytes

    def rows(self) -> torch.Tensor:
        """Every archived row, by KV head, cluster and position: (n_kv_heads, n_tokens, row_bytes) uint8."""
        return mapped_rows(self.mapped, self.groups, self.row_bytes).unflatten(0, (len(self.sizes), -1))


def load_layer(
    folder: Path, entry: LayerEntry, stored: torch.dtype, *, device: torch.device, dtype: torch.dtype
) -> ArchivedLayer:
    """Read one layer of an archive in `stored` for a model of `dtype` on `device`.

    Raises
    ------
    ArchiveCorruptError
        If a file cannot be read, or the files disagree with each other.
    NonFiniteError
        If a number does not fit the model's dtype.
    """
    try:
        exact = read_rows(folder / entry.exact_file)
        shape = (entry.n_kv_heads, entry.exact_tokens)
        both = from_bits(exact.payload, stored).reshape(*shape, -1)
        keys, values = both[..., : entry.key_dim], both[..., entry.key_dim :]
        bias = recall = None
        if entry.clusters:
            prototypes = read_prototypes(folder, entry, stored)
            recall = _recall_tables(folder, entry, prototypes, stored)
            keys = torch.cat([prototypes.centroids, keys], dim=1)
            values = torch.cat([rounded(mean_values(recall), stored), values], dim=1)
            correction = jensen_correction(prototypes.logit_variance)
            bias = torch.cat([prototypes.sizes.float().log() + correction, torch.zeros(shape)], dim=1)
    except (pa.ArrowException, OSError, RuntimeError, KeyError, ValueError) as error:
        why = " ".join(str(error).split())  # Arrow breaks lines
        raise ArchiveCorruptError(f"{str(folder)!r}: layer {entry.index} cannot be read ({why})") from error
    keys, values = keys.to(device, dtype), values.to(device, dtype)
    if dtype != stored and not bool(torch.isfinite(keys).all() & torch.isfinite(values).all()):
        raise NonFiniteError(
            f"{str(folder)!r}: layer {entry.index} does not fit {dtype} ({stored} archived); load the model in {stored}"
        )
    return ArchivedLayer(
        index=entry.index,
        window=entry.window,
        keys=keys,
        values=values,
        bias=None if bias is None else bias.to(device),
        exact_positions=exact.position.reshape(shape)[0].to(device),
        recall=None if recall is None else _on_device(recall, device),
    )


def whole_layer(layer: ArchivedLayer) -> ArchivedLayer:
    """The same layer with every archived token decoded and held, so that attention over it estimates nothing."""
    table = layer.recall
    if table is None:
        return layer
    keys, values = decode_rows(table, layer.keys[:, : table.n_clusters])
    exact = slice(table.n_clusters, None)
    return ArchivedLayer(
        index=layer.index,
        window=layer.window,
        keys=torch.cat([rounded(keys, layer.keys.dtype), layer.keys[:, exact]], dim=1),
        values=torch.cat([rounded(values, layer.values.dtype), layer.values[:, exact]], dim=1),
        bias=None,
        exact_positions=layer.exact_positions,
        recall=None,
    )


def decode_rows(table: RecallTables, centroids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys (n_kv_heads, n_tokens, key_dim) and values of all archived tokens, float32, in the order of the file."""
    rows, payload = table.rows().to(centroids.device), table.payload
    if payload.key_basis is None:
        keys = payload.keys(rows).numbers
    else:
        base = centroids.float().flatten(0, 1).repeat_interleave(table.sizes.flatten(), dim=0)
        keys = base.view(*rows.shape[:2], -1) + decode(rows[..., : payload.key_bytes], payload.key_basis)
    return keys, decode_values(rows, payload)


def mean_values(table: RecallTables) -> torch.Tensor:
    """Mean value of each cluster as its rows decode: (n_kv_heads, n_clusters, value_dim) float32, 0 where empty."""
    values = decode_values(table.rows(), table.payload).flatten(0, 1)
    sums = torch.segment_reduce(values, "sum", lengths=table.sizes.flatten(), axis=0, initial=0)
    return sums.view(*table.sizes.shape, -1) / table.sizes.clamp_min(1).unsqueeze(-1)


def decode_values(rows: torch.Tensor, payload: Payload) -> torch.Tensor:
    """Values (n_kv_heads, n_tokens, value_dim) float32 of `rows` (n_kv_heads, n_tokens, row_bytes) uint8."""
    basis = payload.value_basis
    if basis is None:
        return payload.values(rows).numbers
    return decode(rows[..., payload.key_bytes :], basis) + basis.mean.unsqueeze(1)


def jensen_correction(logit_variance: torch.Tensor) -> torch.Tensor:
    """What to add to log(size), so that the estimated mass of a cluster is right on average and not just a lower bound.

    The mean of exp(x) exceeds exp(mean of x) by half the variance of x in the exponent, to second order; the expansion
    fails for widely spread clusters, hence the limit.
    """
    return (logit_variance / 2).clamp_max(MAX_CORRECTION)


def recall_priority(logit_variance: torch.Tensor, value_spread: torch.Tensor) -> torch.Tensor:
    """Weight of a cluster's mass when clusters are ranked, next to the spread of this query's logit inside it.

    How far the cluster's values lie from the mean; the Jensen correction is taken out of the mass again. All ones where
    no value differs from the mean.
    """
    if not bool((value_spread > 0).any()):
        return torch.ones_like(value_spread)
    return value_spread.sqrt() * (-jensen_correction(logit_variance)).exp()


def _recall_tables(folder: Path, entry: LayerEntry, prototypes: Prototypes, stored: torch.dtype) -> RecallTables:
    """The tables of a layer on the host."""
    rows_path, sizes = folder / entry.rows_file, prototypes.sizes
    payload, axes = read_payload(folder, entry, stored), read_key_axes(folder, entry)
    if axes.shape[1] != prototypes.axis_scales.shape[2]:
        raise ArchiveCorruptError(f"{entry.bases_file}: its axes and those of {entry.prototypes_file} disagree")
    groups = row_groups(rows_path, payload.row_bytes)
    flat = sizes.reshape(-1)
    first_row = flat.cumsum(0) - flat  # archived rows lie head by head, cluster by cluster
    used = torch.arange(sizes.shape[1]) < torch.tensor(entry.clusters).unsqueeze(1)
    starts = torch.tensor(groups.first_row)
    group = torch.searchsorted(starts, first_row, right=True) - 1  # row group of each cluster
    inside = first_row + flat <= (starts + torch.tensor(groups.n_rows))[group]
    if int(flat.sum()) != sum(groups.n_rows) or bool((sizes[used] < 1).any()) or not bool(inside.all()):
        raise ArchiveCorruptError(f"{entry.rows_file}: cluster sizes and rows disagree")
    if not bool((sizes.sum(1) == sizes[0].sum()).all()):
        raise ArchiveCorruptError(f"{entry.prototypes_file}: KV heads have different numbers of tokens")
    address = torch.tensor(groups.first_byte)[group] + (first_row - starts[group]) * payload.row_bytes
    return RecallTables(
        sizes=sizes,
        priority=recall_priority(prototypes.logit_variance, prototypes.value_spread),
        axes=axes,
        axis_variances=axis_variances(prototypes.axis_scales),
        address=address.reshape(sizes.shape),
        mapped=map_file(rows_path),
        groups=groups,
        payload=payload,
        largest=int(flat.max()),
        n_tokens=int(sizes[0].sum()),
        padded=not bool(used.all()),
    )


def _on_device(table: RecallTables, device: torch.device) -> RecallTables:
    """The same tables with all but the mapped rows on `device`."""
    return RecallTables(
        sizes=table.sizes.to(device),
        priority=table.priority.to(device),
        axes=table.axes.to(device),
        axis_variances=table.axis_variances.to(device),
        address=table.address.to(device),
        mapped=table.mapped,
        groups=table.groups,
        payload=table.payload.to(device),
        largest=table.largest,
        n_tokens=table.n_tokens,
        padded=table.padded,
    )
