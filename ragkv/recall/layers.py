"""An archived layer as attention takes it: coded prototypes and exact tokens in memory, the rest mapped from disk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ragkv.archive.codec import scale_of
from ragkv.archive.payload import Payload, rounded
from ragkv.archive.prototypes import Prototypes, smallest_dtype
from ragkv.archive.rows import LENGTH_BYTES, RowsFile, payload_start
from ragkv.archive.transforms import LayerTransforms
from ragkv.errors import ArchiveCorruptError

MAX_CORRECTION = 0.5
"""Limit of the Jensen correction, in nats; measured best of 0.35, 0.5, 0.7 and 1."""


@dataclass(frozen=True)
class ArchivedLayer:
    """What attention needs of one layer, on the model's device.

    ``keys`` (n_kv_heads, n_exact, key_dim) and ``values`` (n_kv_heads, n_exact, value_dim) of the tokens that are
    always attended exactly stand at ``exact_positions`` (n_exact,) int64. ``clusters`` is None for sliding layers, very
    short documents, and layers whose every token is held.
    """

    index: int
    window: int | None
    keys: torch.Tensor
    values: torch.Tensor
    exact_positions: torch.Tensor
    clusters: ClusterTable | None

    @property
    def n_clusters(self) -> int:
        return 0 if self.clusters is None else self.clusters.n_clusters

    @property
    def n_held(self) -> int:
        """Columns that a query is scored against: clusters, then exact tokens."""
        return self.n_clusters + self.keys.shape[1]

    @property
    def resident_bytes(self) -> int:
        """Bytes held in memory; transforms, which archives of a catalog share, are not counted."""
        exact = self.keys.nbytes + self.values.nbytes + self.exact_positions.nbytes
        return exact + (0 if self.clusters is None else self.clusters.resident_bytes)


@dataclass(frozen=True)
class ClusterTable:
    """The clusters of one layer: coded prototypes, and where the tokens behind each lie.

    ``address`` (n_kv_heads, n_clusters) is the byte of a cluster's first token in ``rows``, less ``first_byte``, in the
    smallest integer type that holds it; its tokens follow one another as ``payload`` lays them out. ``groups`` are the
    row groups [first, last) of the layer. ``largest`` is the size of the largest cluster, ``n_tokens`` the archived
    tokens of a head; ``padded`` says that some head has fewer clusters than others, its last sizes being 0.
    """

    prototypes: Prototypes
    transforms: LayerTransforms
    payload: Payload
    rows: RowsFile
    address: torch.Tensor
    first_byte: int
    groups: tuple[int, int]
    largest: int
    n_tokens: int
    padded: bool

    @property
    def n_clusters(self) -> int:
        return self.prototypes.sizes.shape[1]

    @property
    def sizes(self) -> torch.Tensor:
        """Tokens of each cluster: (n_kv_heads, n_clusters), 0 where a head has fewer clusters."""
        return self.prototypes.sizes

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's key and value in the rows file."""
        return self.payload.row_bytes

    @property
    def resident_bytes(self) -> int:
        return self.prototypes.resident_bytes + self.address.nbytes

    def spread_scales(self) -> torch.Tensor:
        """What the measures of spread stand for: (n_kv_heads, n_clusters, 2 + n_axes) float32, see `Prototypes`."""
        return scale_of(self.prototypes.spreads)

    def bias(self, scales: torch.Tensor) -> torch.Tensor:
        """The additive logit of each prototype: log(size) with its Jensen correction, (n_kv_heads, n_clusters) float32.

        -inf where a head has fewer clusters. `scales` are those of `spread_scales`.
        """
        return self.sizes.float().log_().add_(jensen_correction(scales[..., 0].square()))

    def priority(self, scales: torch.Tensor) -> torch.Tensor:
        """What a cluster's mass is weighted with when clusters are ranked: (n_kv_heads, n_clusters) float32.

        How far the cluster's values lie from the mean, next to the spread of this query's logit inside it; the Jensen
        correction is taken out of the mass again.
        """
        correction = jensen_correction(scales[..., 0].square())
        return scales[..., 1].clamp_min(torch.finfo(torch.float32).tiny).mul_(correction.neg_().exp_())

    def logit_deviation(self, query: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Standard deviation of the logits of each cluster's keys: (n_kv_heads, n, n_clusters) float32.

        `query` (n_kv_heads, n, key_dim) float32, scaled.
        """
        along = torch.bmm(query, self.transforms.key_axes.float().transpose(1, 2)).square_()
        return torch.bmm(along, scales[..., 2:].square().transpose(1, 2)).sqrt_()

    def key_products(self, query: torch.Tensor) -> torch.Tensor:
        """Products of `query` (n_kv_heads, n, key_dim) float32 with all centroids: (n_kv_heads, n, n_clusters)."""
        basis = self.transforms.key_prototypes
        along = basis.along(query)
        same = query @ self.transforms.key_mean.unsqueeze(-1) + (along @ basis.middles).unsqueeze(-1)
        return torch.baddbmm(same, along, basis.levels(self.prototypes.key_codes).transpose(1, 2))

    def value_sums(self, weights: torch.Tensor) -> torch.Tensor:
        """Mean values summed with `weights` (n_kv_heads, n, n_clusters) float32: (n_kv_heads, n, value_dim)."""
        basis, mass = self.transforms.value_prototypes, weights.sum(-1, keepdim=True)
        numbers = torch.bmm(weights, basis.levels(self.prototypes.value_codes)).add_(mass * basis.middles)
        return basis.restored(numbers).add_(mass * self.transforms.value_mean.unsqueeze(1))

    def centroids(self) -> torch.Tensor:
        """Centroids as they are attended: (n_kv_heads, n_clusters, key_dim) float32."""
        basis = self.transforms.key_prototypes
        return basis.restored(basis.numbers(self.prototypes.key_codes)) + self.transforms.key_mean.unsqueeze(1)

    def mean_values(self) -> torch.Tensor:
        """Mean values as they are attended: (n_kv_heads, n_clusters, value_dim) float32."""
        basis = self.transforms.value_prototypes
        return basis.restored(basis.numbers(self.prototypes.value_codes)) + self.transforms.value_mean.unsqueeze(1)

    def all_rows(self) -> torch.Tensor:
        """Every archived token's bytes, by KV head, cluster and position: (n_kv_heads, n_tokens, row_bytes) uint8.

        Raises
        ------
        ArchiveCorruptError
            If the checksum of a row group does not hold, or a number is NaN or infinite.
        """
        return self.fetch(self._all_bytes()).view(len(self.sizes), -1, self.row_bytes)

    def fetch(self, byte: torch.Tensor) -> torch.Tensor:
        """The rows that begin at the bytes `byte` (n,) int64 of the file: (n, row_bytes) uint8 on the host.

        Raises
        ------
        ArchiveCorruptError
            If the checksum of a row group that is touched for the first time does not hold, or a number in it is NaN
            or infinite.
        """
        byte = byte.to(self.rows.mapped.device)
        self.rows.require_bytes(byte, *self.groups, fits=self._fits if self.payload.has_numbers else None)
        return self._fetch(byte)

    def _fits(self, first: int, last: int) -> bool:
        byte = self._all_bytes()
        return self.payload.fits(self._fetch(byte[(byte >= first) & (byte < last)]))

    def _all_bytes(self) -> torch.Tensor:
        """First byte of every archived token, by KV head, cluster and position: (n_kv_heads * n_tokens,) int64."""
        sizes = self.sizes.cpu().long().flatten()
        first = (self.address.cpu().long().flatten() + self.first_byte).repeat_interleave(sizes)
        inside = torch.arange(len(first)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        return first + inside * self.row_bytes

    def _fetch(self, byte: torch.Tensor) -> torch.Tensor:
        mapped = self.rows.mapped
        n_starts = mapped.shape[0] - self.row_bytes + 1
        return mapped.as_strided((n_starts, self.row_bytes), (1, 1)).index_select(0, byte)

    @property
    def first_rows(self) -> torch.Tensor:
        """Place of each cluster's first token among its head's: (n_kv_heads, n_clusters) int64."""
        sizes = self.sizes.long()
        return sizes.cumsum(1) - sizes


def cluster_table(
    prototypes: Prototypes,
    transforms: LayerTransforms,
    payload: Payload,
    rows: RowsFile,
    groups: tuple[int, int],
    *,
    n_tokens: int,
    device: torch.device,
) -> ClusterTable:
    """Find where the clusters of a layer lie in its row groups [first, last); everything moves to `device`.

    Raises
    ------
    ArchiveCorruptError
        If sizes and row groups do not fit together.
    """
    sizes = prototypes.sizes.numpy().astype(np.int64)  # numpy: these are too small for threads to pay
    used = sizes > 0
    counts, flat = used.sum(1), sizes[used]
    if (sizes.sum(1) != n_tokens).any():
        raise ArchiveCorruptError("sizes of clusters do not add up to the archived tokens of every KV head")
    of_group = rows.groups.rows[slice(*groups)]
    last = np.cumsum(of_group)
    if not len(last) or last[-1] != len(flat) or not np.isin(np.cumsum(counts), last).all():
        raise ArchiveCorruptError("row groups and clusters do not fit together")
    n_bytes = flat * payload.row_bytes + LENGTH_BYTES
    before = np.cumsum(n_bytes) - n_bytes
    group = np.repeat(np.arange(len(of_group)), of_group)
    first = last - of_group  # first cluster of each row group
    ends = np.append(before[first[1:]], n_bytes.sum())
    starts = [
        payload_start(rows, groups[0] + place, int(stop - before[begin]) - LENGTH_BYTES * int(count))
        for place, (begin, stop, count) in enumerate(zip(first, ends, of_group, strict=True))
    ]
    address = np.asarray(starts)[group] + before - before[first[group]] + LENGTH_BYTES
    first_byte = int(address.min())
    placed = np.zeros_like(sizes)
    placed[used] = address - first_byte
    return ClusterTable(
        prototypes=on_device(prototypes, device),
        transforms=transforms,
        payload=payload,
        rows=rows,
        address=torch.from_numpy(placed).to(smallest_dtype(int(address.max()) - first_byte)).to(device),
        first_byte=first_byte,
        groups=groups,
        largest=int(flat.max()),
        n_tokens=n_tokens,
        padded=bool((counts < sizes.shape[1]).any()),
    )


def on_device(prototypes: Prototypes, device: torch.device) -> Prototypes:
    """The same prototypes on `device`."""
    return Prototypes(
        key_codes=prototypes.key_codes.to(device),
        value_codes=prototypes.value_codes.to(device),
        sizes=prototypes.sizes.to(device),
        spreads=prototypes.spreads.to(device),
    )


def whole_layer(layer: ArchivedLayer, positions: torch.Tensor) -> ArchivedLayer:
    """The same layer with every archived token decoded and held, so that attention over it estimates nothing.

    `positions` (n_kv_heads, n_tokens) int64 are those of the archived rows in the order of the file. Tokens are put in
    order of position, the exact ones last.
    """
    table = layer.clusters
    if table is None:
        return layer
    keys, values = decode_rows(table)
    order = positions.argsort(1).unsqueeze(-1).to(keys.device)
    keys, values = (
        rounded(each.gather(1, order.expand_as(each)), held.dtype)
        for each, held in zip((keys, values), (layer.keys, layer.values), strict=True)
    )
    return ArchivedLayer(
        index=layer.index,
        window=layer.window,
        keys=torch.cat([keys, layer.keys], dim=1),
        values=torch.cat([values, layer.values], dim=1),
        exact_positions=torch.cat([positions[0].sort().values.to(layer.exact_positions), layer.exact_positions]),
        clusters=None,
    )


def decode_rows(table: ClusterTable) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys (n_kv_heads, n_tokens, key_dim) and values of all archived tokens, float32, in the order of the file."""
    rows, payload = table.all_rows().to(table.address.device), table.payload
    sizes = table.sizes.long().flatten()

    def of_tokens(prototypes: torch.Tensor) -> torch.Tensor:
        return prototypes.flatten(0, 1).repeat_interleave(sizes, dim=0).view(*rows.shape[:2], -1)

    keys, values = payload.keys(rows), payload.values(rows)
    if payload.key_basis is not None:
        keys = keys + of_tokens(table.centroids())
    if payload.value_basis is not None:
        values = values + of_tokens(table.mean_values())
    return keys, values


def jensen_correction(logit_variance: torch.Tensor) -> torch.Tensor:
    """What to add to log(size), so that the estimated mass of a cluster is right on average and not just a lower bound.

    The mean of exp(x) exceeds exp(mean of x) by half the variance of x in the exponent, to second order; the expansion
    fails for widely spread clusters, hence the limit.
    """
    return (logit_variance / 2).clamp_max(MAX_CORRECTION)
