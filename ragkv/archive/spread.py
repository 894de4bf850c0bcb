"""How the keys of a cluster spread along the axes that queries see: what tells a cluster that hides a sharp match.

The keys of a cluster differ from their centroid along few directions that matter. For each KV head the first principal
axes of these differences are kept, in the metric of the queries, and for each cluster how far its keys reach along
each: then the standard deviation of *this* query's logit inside a cluster is known for the price of one small product.
"""

from __future__ import annotations

import torch

from ragkv.archive.codec import principal_axes, scale_code, scale_of
from ragkv.archive.groups import group_sizes, group_sums

N_AXES = 8
"""Principal axes kept; measured alike with 16."""


def fit_axes(residuals: torch.Tensor, *, metric: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Principal axes of key residuals (n_kv_heads, n_tokens, key_dim), and the place of each token on them.

    Returns axes (n_kv_heads, n_axes, key_dim) float32, exact in bfloat16, as long as the residuals' standard deviation
    along them; and (n_kv_heads, n_tokens, n_axes) float32, in units of it. The product of a query with a residual is
    about that of its products with the axes and the residual's places.
    """
    variance, directions, weigh = principal_axes(residuals, metric)
    n_axes = min(N_AXES, residuals.shape[2])
    deviation = variance[:, :n_axes].sqrt().unsqueeze(-1)  # (n_kv_heads, n_axes, 1)
    kept = directions[..., :n_axes].transpose(1, 2)
    axes = torch.linalg.solve(weigh, (kept * deviation).transpose(1, 2)).transpose(1, 2)
    inverse = (weigh @ kept.transpose(1, 2)) * deviation.transpose(1, 2).reciprocal().nan_to_num(posinf=0)
    places = residuals.float() @ inverse.float().to(residuals.device)
    return axes.to(torch.bfloat16).float().to(residuals.device), places


def axis_scales(places: torch.Tensor, labels: torch.Tensor, n_clusters: int) -> torch.Tensor:
    """Root mean square of the `places` of each cluster, as scale codes: (n_kv_heads, n_clusters, n_axes) uint8."""
    counts = group_sizes(labels, n_clusters).clamp_min(1).unsqueeze(-1)
    return scale_code((group_sums(places.square(), labels, n_clusters) / counts).sqrt())


def axis_variances(scales: torch.Tensor) -> torch.Tensor:
    """Mean squares that scale codes stand for, float32."""
    return scale_of(scales).square()


def logit_deviation(query: torch.Tensor, axes: torch.Tensor, variances: torch.Tensor) -> torch.Tensor:
    """Standard deviation of the logits of a cluster's keys: (n_kv_heads, n_queries, n_clusters) float32.

    `query` (n_kv_heads, n_queries, key_dim) scaled; `axes` (n_kv_heads, n_axes, key_dim); `variances` (n_kv_heads,
    n_clusters, n_axes).
    """
    along = torch.bmm(query, axes.transpose(1, 2)).square_()
    return torch.bmm(along, variances.transpose(1, 2)).sqrt_()
