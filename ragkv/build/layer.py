"""Write one layer of an archive: keys/values -> clusters -> codes -> files."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from ragkv.archive.centroids import read_centroids, write_centroids
from ragkv.archive.codec import Basis, encode, fit_basis
from ragkv.archive.groups import group_sizes, group_sums
from ragkv.archive.manifest import LayerEntry
from ragkv.archive.payload import rounded, to_bits
from ragkv.archive.rows import EXACT, Rows, write_rows
from ragkv.archive.spread import axis_scales, fit_axes
from ragkv.archive.tables import write_bases, write_prototypes
from ragkv.build.cluster import Clusters, cluster_keys, query_metric
from ragkv.model.prefill import CapturedLayer
from ragkv.model.prompt import PromptTokens
from ragkv.recipe import CODEC_BITS, Recipe


@dataclass(frozen=True)
class Span:
    """Positions of a prompt: exact ones are [0, head) and [tail, end), archived ones [head, tail)."""

    head: int
    tail: int
    end: int


def document_span(tokens: PromptTokens, recipe: Recipe) -> Span:
    """Which positions are archived: all but the prefix (or the first sink tokens) and the window at the end."""
    end = len(tokens.prefix_ids) + len(tokens.document_ids)
    head = min(end, max(len(tokens.prefix_ids), recipe.sink_tokens))
    return Span(head=head, tail=max(head, end - recipe.window_tokens), end=end)


def write_layer(
    folder: Path,
    index: int,
    layer: CapturedLayer,
    *,
    window: int | None,
    span: Span,
    recipe: Recipe,
    query_moment: torch.Tensor | None,
) -> tuple[LayerEntry, int]:
    """Write the files of one layer; returns its manifest entry and the clusters asked for."""
    n_kv_heads, n_tokens, key_dim = layer.keys.shape
    entry = LayerEntry(
        index=index,
        window=window,
        n_kv_heads=n_kv_heads,
        key_dim=key_dim,
        value_dim=layer.values.shape[-1],
        exact_tokens=n_tokens if window is not None else span.end - (span.tail - span.head),
        clusters=(),
    )
    if window is not None or span.tail == span.head:
        write_rows(folder / entry.exact_file, _exact_rows(layer, slice(0, n_tokens)))
        return entry, 0
    write_rows(folder / entry.exact_file, _exact_rows(layer, slice(0, span.head), slice(span.tail, span.end)))
    keys, values = layer.keys[:, span.head : span.tail], layer.values[:, span.head : span.tail]
    clusters = cluster_keys(keys, recipe, values=values, query_moment=query_moment)
    entry = dataclasses.replace(entry, clusters=tuple(clusters.n_clusters.tolist()))
    metric = None if query_moment is None else query_metric(query_moment)
    residuals, key_mean, axes = _write_prototypes(
        folder, entry, keys, values, clusters, query_moment=query_moment, metric=metric
    )
    key_codec, value_codec = recipe.codecs(index)
    key_basis, key_bits = _coded(keys, residuals, key_codec, metric=metric)
    value_mean = values.float().mean(dim=1, keepdim=True)
    value_basis, value_bits = _coded(values, values.float() - value_mean, value_codec)
    if value_basis is not None:
        value_basis = dataclasses.replace(value_basis, mean=value_mean.squeeze(1))
    write_bases(folder / entry.bases_file, key_mean, axes, key_basis, value_basis)
    cuts = [row[:n] for row, n in zip(clusters.sizes.tolist(), entry.clusters, strict=True)]
    archived = _archived_rows(clusters, torch.cat([key_bits, value_bits], dim=-1), span.head)
    write_rows(folder / entry.rows_file, archived, cuts)
    entry = dataclasses.replace(entry, key_widths=_counts(key_basis), value_widths=_counts(value_basis))
    return entry, clusters.asked


def _write_prototypes(
    folder: Path,
    entry: LayerEntry,
    keys: torch.Tensor,
    values: torch.Tensor,
    clusters: Clusters,
    *,
    query_moment: torch.Tensor | None,
    metric: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Write centroids, sizes and spreads.

    Returns the residuals (n_kv_heads, n_tokens, key_dim) float32 of `keys` to the centroids as they read back, the mean
    key (n_kv_heads, key_dim) of each head, which the stored centroids are relative to, and the axes that the spreads
    are along.
    """
    sizes, labels = clusters.sizes, clusters.labels
    n_clusters = sizes.shape[1]
    used = torch.arange(n_clusters, device=sizes.device) < clusters.n_clusters.unsqueeze(1)
    key_mean = keys.float().mean(dim=1)
    centroids = group_sums(keys, labels, n_clusters) / sizes.unsqueeze(-1).clamp_min(1) - key_mean.unsqueeze(1)
    path = folder / entry.centroids_file
    write_centroids(path, centroids[used])
    centroids[used] = read_centroids(path, (int(used.sum()), keys.shape[2])).to(centroids.device)
    stored = rounded(centroids + key_mean.unsqueeze(1), keys.dtype)
    residuals = keys.float() - stored.gather(1, labels.unsqueeze(-1).expand_as(keys)).float()
    axes, places = fit_axes(residuals, metric=metric)
    write_prototypes(
        folder / entry.prototypes_file,
        used,
        sizes=sizes,
        logit_variance=logit_variance(residuals, labels, n_clusters, query_moment),
        value_spread=value_spread(values, labels, n_clusters),
        axis_scales=axis_scales(places, labels, n_clusters),
    )
    return residuals, key_mean, axes


def logit_variance(
    residuals: torch.Tensor, labels: torch.Tensor, n_clusters: int, query_moment: torch.Tensor | None
) -> torch.Tensor:
    """Mean squared change of a typical query's logit when a key is replaced by its centroid, per cluster.

    `residuals` (n_kv_heads, n_tokens, key_dim) of the keys; (n_kv_heads, n_clusters) float32, zero without a query
    moment.
    """
    if query_moment is None:
        return torch.zeros(len(residuals), n_clusters, device=residuals.device)
    squared = ((residuals @ query_moment) * residuals).sum(-1, keepdim=True).clamp_min(0)
    return (group_sums(squared, labels, n_clusters) / group_sizes(labels, n_clusters).unsqueeze(-1).clamp_min(1))[
        ..., 0
    ]


def value_spread(values: torch.Tensor, labels: torch.Tensor, n_clusters: int) -> torch.Tensor:
    """Mean squared distance of a cluster's values from the mean value of its head: (n_kv_heads, n_clusters) float32."""
    off = values.float() - values.float().mean(dim=1, keepdim=True)
    sums = group_sums(off.square().sum(-1, keepdim=True), labels, n_clusters)
    return (sums / group_sizes(labels, n_clusters).unsqueeze(-1).clamp_min(1))[..., 0]


def _coded(
    tensor: torch.Tensor, residuals: torch.Tensor, codec: str, *, metric: torch.Tensor | None = None
) -> tuple[Basis | None, torch.Tensor]:
    """Bytes (n_kv_heads, n_tokens, n_bytes) uint8 of a tensor, and the basis they are coded in."""
    if codec not in CODEC_BITS:
        return None, to_bits(tensor)
    basis = fit_basis(residuals, CODEC_BITS[codec], metric=metric)
    return basis, encode(residuals, basis, metric=metric)


def _counts(basis: Basis | None) -> tuple[int, ...]:
    return () if basis is None else dataclasses.astuple(basis.widths)


def _archived_rows(clusters: Clusters, payload: torch.Tensor, first_position: int) -> Rows:
    """Rows in order of KV head, cluster and position, from `payload` (n_kv_heads, n_tokens, row_bytes)."""
    order = clusters.labels.argsort(dim=1, stable=True)  # positions ascend inside a cluster
    heads = torch.arange(len(order), device=order.device).unsqueeze(1).expand_as(order)
    return Rows(
        kv_head=heads.reshape(-1),
        cluster=clusters.labels.gather(1, order).reshape(-1),
        position=(order + first_position).reshape(-1),
        payload=payload[heads, order].flatten(0, 1),
    )


def _exact_rows(layer: CapturedLayer, *parts: slice) -> Rows:
    """Rows of the tokens that are attended exactly, KV head by KV head."""
    keys = torch.cat([layer.keys[:, part] for part in parts], dim=1)
    values = torch.cat([layer.values[:, part] for part in parts], dim=1)
    positions = torch.arange(layer.first_position, layer.first_position + layer.keys.shape[1])
    positions = torch.cat([positions[part] for part in parts])
    n_kv_heads, n_tokens = keys.shape[:2]
    return Rows(
        kv_head=torch.arange(n_kv_heads).repeat_interleave(n_tokens),
        cluster=torch.full((n_kv_heads * n_tokens,), EXACT),
        position=positions.repeat(n_kv_heads),
        payload=torch.cat([to_bits(keys), to_bits(values)], dim=-1).flatten(0, 1),
    )
