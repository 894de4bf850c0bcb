"""Group the keys of one layer by meaning: k-means for all KV heads in one batched product.

Lloyd's algorithm with evenly spaced initial centroids, as measured in this project to serve recall best. The
result is a partition: every token has exactly one label, and clusters that ended empty are dropped, so there are
never more clusters than distinct keys.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

from ragkv.build.groups import group_sizes, group_sums
from ragkv.recipe import Recipe

log = logging.getLogger(__name__)

PLAIN_SHARE = 0.1
"""Share of plain L2 in the metric, in units of the mean query energy per dimension; measured best of 0.03, 0.1, 0.3."""

VALUE_SHARE = 0.1
"""Spread of the values, as a share of that of the keys, in the distances."""

VALUE_AXES = 16
"""Principal axes of the values that take part in the distances; the rest would cost time and carry little."""

_SCORE_FLOATS = 1 << 18  # scores held at once: they stay in the cache, measured 1.6x as fast as 1 << 20


@dataclass(frozen=True)
class Clusters:
    """A partition of the tokens of one layer.

    ``labels`` (n_kv_heads, n_tokens) int64, compact per head; ``n_clusters`` (n_kv_heads,) int64: how many labels
    each head really uses (the effective count; the asked one is `asked`).
    """

    labels: torch.Tensor
    n_clusters: torch.Tensor
    asked: int

    @cached_property
    def sizes(self) -> torch.Tensor:
        """Tokens of each cluster: (n_kv_heads, most clusters of a head) int64, 0 where a head has fewer."""
        return group_sizes(self.labels, int(self.n_clusters.max()))


def cluster_keys(
    keys: torch.Tensor,
    recipe: Recipe,
    *,
    values: torch.Tensor | None = None,
    query_moment: torch.Tensor | None = None,
) -> Clusters:
    """Cluster the keys of one layer, every KV head on its own.

    With the second moment of queries, distances are those that queries see: the expected squared change of a logit,
    E[(q.(k - m))^2] = (k - m)^T E[q q^T] (k - m), blended with a tenth of the plain squared distance. With values, a
    tenth of the spread to be explained is theirs: a cluster is estimated well if its values are alike, too.

    Parameters
    ----------
    keys
        (n_kv_heads, n_tokens, head_dim) of any floating dtype, after RoPE.
    recipe
        ``tokens_per_cluster``, ``segment_tokens`` and ``kmeans_iterations`` are used.
    values
        (n_kv_heads, n_tokens, value_dim), or None to group by keys alone.
    query_moment
        (n_kv_heads, head_dim, head_dim) float32, or None for plain L2.
    """
    n_kv_heads, n_tokens, _ = keys.shape
    labels = torch.empty(n_kv_heads, n_tokens, dtype=torch.int64, device=keys.device)
    asked = 0
    metric = None if query_moment is None else query_metric(query_moment)
    for start, stop in _segments(n_tokens, recipe.segment_tokens):
        points = _centred(keys[:, start:stop].float())
        points = points if metric is None else points @ metric
        if values is not None:
            points = torch.cat([points, _value_points(points, _centred(values[:, start:stop].float()))], dim=2)
        n_clusters = -(-(stop - start) // recipe.tokens_per_cluster)
        labels[:, start:stop] = asked + _kmeans(points, n_clusters, recipe)
        asked += n_clusters
    labels, effective = _compact(labels, asked)
    if asked and int(effective.min()) < asked:
        log.debug("clusters: asked %d per head, effective %s", asked, effective.tolist())
    return Clusters(labels=labels, n_clusters=effective, asked=asked)


def _centred(points: torch.Tensor) -> torch.Tensor:
    """Points less their mean per head: biased keys (Qwen2) would cost the distances their precision."""
    return points - points.mean(dim=1, keepdim=True)


def _value_points(points: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Values on their principal axes, scaled so that their spread is `VALUE_SHARE` of that of `points`, per head."""
    spread, own = (each.square().sum(-1).mean(1) for each in (points, values))  # (n_heads,)
    factor = (VALUE_SHARE * spread / own.clamp_min(torch.finfo(torch.float32).tiny)).sqrt()
    _, axes = torch.linalg.eigh((values.transpose(1, 2) @ values).double())  # ascending
    return values @ axes[..., -VALUE_AXES:].float() * factor[:, None, None]


def query_metric(query_moment: torch.Tensor) -> torch.Tensor:
    """Symmetric square root A of the blended moment: |A (k - m)|^2 is the distance that queries see."""
    moment = query_moment.double()
    size = moment.diagonal(dim1=1, dim2=2).mean(1).clamp_min(torch.finfo(torch.float32).tiny)
    eye = torch.eye(moment.shape[1], dtype=moment.dtype, device=moment.device)
    values, vectors = torch.linalg.eigh(moment + PLAIN_SHARE * size[:, None, None] * eye)
    root = (vectors * values.clamp_min(0).sqrt().unsqueeze(1)) @ vectors.transpose(1, 2)
    return (root / size.sqrt()[:, None, None]).float()


def _segments(n_tokens: int, segment_tokens: int) -> list[tuple[int, int]]:
    """Cut `n_tokens` into equal runs of at most about `segment_tokens`."""
    if n_tokens == 0:
        return []
    n_segments = -(-n_tokens // segment_tokens)
    cuts = [round(i * n_tokens / n_segments) for i in range(n_segments + 1)]
    return list(pairwise(cuts))


def _kmeans(points: torch.Tensor, n_clusters: int, recipe: Recipe) -> torch.Tensor:
    """Label `points` (n_heads, n, dim) float32 with `n_clusters` centroids per head: (n_heads, n) int64."""
    n_points = points.shape[1]
    spaced = (torch.arange(n_clusters, device=points.device) * n_points) // n_clusters + n_points // (2 * n_clusters)
    centroids = points[:, spaced]
    labels = assign(points, centroids)
    for _ in range(recipe.kmeans_iterations):
        sizes = group_sizes(labels, n_clusters).unsqueeze(-1)
        means = group_sums(points, labels, n_clusters) / sizes.clamp_min(1)
        centroids = torch.where(sizes > 0, means, centroids)
        labels, previous = assign(points, centroids), labels
        if torch.equal(labels, previous):
            break
    return labels


def assign(points: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Label every point (n_heads, n, dim) with its nearest centroid (n_heads, n_clusters, dim) by L2 distance."""
    n_heads, n_points, _ = points.shape
    half_norms = centroids.square().sum(-1).mul(-0.5).unsqueeze(1)  # (n_heads, 1, n_clusters)
    by_dim = centroids.transpose(1, 2).contiguous()
    labels = torch.empty(n_heads, n_points, dtype=torch.int64, device=points.device)
    block = max(1, _SCORE_FLOATS // max(1, n_heads * centroids.shape[1]))
    for start in range(0, n_points, block):
        scores = torch.baddbmm(half_norms, points[:, start : start + block], by_dim)
        labels[:, start : start + block] = scores.argmax(-1)
    return labels


def _compact(labels: torch.Tensor, n_labels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Renumber labels so that no head has an unused one; returns the labels and the number used per head."""
    used = group_sizes(labels, n_labels) > 0
    renumbered = used.cumsum(1) - 1
    return renumbered.gather(1, labels), used.sum(1)
