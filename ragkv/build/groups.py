"""Sums and counts by label, for all KV heads at once and in the same order on every run."""

from __future__ import annotations

import torch


def group_sums(points: torch.Tensor, labels: torch.Tensor, n_groups: int) -> torch.Tensor:
    """Sum `points` (n_heads, n, dim) by `labels` (n_heads, n): (n_heads, n_groups, dim) float32, zero where empty.

    Sorted segments rather than scattered additions: the same order of summation on every run and device.
    """
    n_heads, n_points, dim = points.shape
    flat = labels + torch.arange(n_heads, device=labels.device).unsqueeze(1) * n_groups
    order = flat.reshape(-1).argsort(stable=True)
    lengths = torch.bincount(flat.reshape(-1), minlength=n_heads * n_groups)
    rows = points.reshape(n_heads * n_points, dim)[order].float()
    return torch.segment_reduce(rows, "sum", lengths=lengths, axis=0, initial=0).reshape(n_heads, n_groups, dim)


def group_sizes(labels: torch.Tensor, n_groups: int) -> torch.Tensor:
    """Count `labels` (n_heads, n) per head: (n_heads, n_groups) int64."""
    sizes = labels.new_zeros(labels.shape[0], n_groups)
    return sizes.scatter_add_(1, labels, torch.ones_like(labels))


def group_means(points: torch.Tensor, labels: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Mean of `points` (n_heads, n, dim) by label: (n_heads, n_groups, dim) float32, zero where `sizes` is."""
    return group_sums(points, labels, sizes.shape[1]) / sizes.clamp_min(1).unsqueeze(-1)
