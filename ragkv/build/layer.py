"""One layer of an archive: keys/values -> clusters -> transforms -> codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ragkv.archive.codec import (
    Basis,
    allocate,
    decode,
    encode,
    encode_plain,
    expected_distortion,
    fit_basis,
    principal_axes,
    scale_code,
)
from ragkv.archive.payload import encode_exact, to_bits
from ragkv.archive.prototypes import Prototypes, smallest_dtype
from ragkv.archive.transforms import N_AXES, LayerTransforms
from ragkv.build.cluster import Clusters, cluster_keys, query_metric
from ragkv.build.groups import group_means
from ragkv.model.prefill import CapturedLayer
from ragkv.model.prompt import PromptTokens
from ragkv.recipe import CODEC_BITS, Recipe

_FIT_TOKENS = 2048
"""Tokens, spread over the document, that tell how well transforms fit."""

_FEWEST = 8
"""Tokens per dimension below which that cannot be told: transforms of its own would fit any document."""


@dataclass(frozen=True)
class Span:
    """Positions of a prompt: exact ones are [0, head) and [tail, end), archived ones [head, tail)."""

    head: int
    tail: int
    end: int

    def exact(self, *, first: int, window: int | None) -> torch.Tensor:
        """Which positions of a layer, cached from `first` on, are always attended exactly."""
        if window is not None:
            return torch.arange(first, self.end)
        return torch.cat([torch.arange(self.head), torch.arange(self.tail, self.end)])


def document_span(tokens: PromptTokens, recipe: Recipe) -> Span:
    """Which positions are archived: all but the prefix (or the first sink tokens) and the window at the end."""
    end = len(tokens.prefix_ids) + len(tokens.document_ids)
    head = min(end, max(len(tokens.prefix_ids), recipe.sink_tokens))
    return Span(head=head, tail=max(head, end - recipe.window_tokens), end=end)


@dataclass(frozen=True)
class ClusteredLayer:
    """The archived tokens of one layer of one document, and their clusters.

    ``keys`` and ``values`` (n_kv_heads, n_tokens, dim) in the model's dtype, ``first`` the position of the first of
    them; ``moment`` (n_kv_heads, key_dim, key_dim) is the second moment of queries, None without probes.
    """

    keys: torch.Tensor
    values: torch.Tensor
    first: int
    clusters: Clusters
    moment: torch.Tensor | None


@dataclass(frozen=True)
class CodedLayer:
    """What the files hold of the archived tokens of a layer.

    ``positions`` (n_kv_heads, n_tokens) int64 and ``payload`` (n_kv_heads, n_tokens, row_bytes) uint8 are in order of
    cluster and position, ``sizes[head]`` the tokens of each cluster. ``misfit`` is the distortion of the codes as a
    multiple of that of transforms of its own.
    """

    prototypes: Prototypes
    positions: torch.Tensor
    payload: torch.Tensor
    sizes: list[list[int]]
    misfit: float


def exact_payload(layer: CapturedLayer, positions: torch.Tensor, codecs: tuple[str, str]) -> torch.Tensor:
    """Bytes of the tokens at `positions` (n,): (n_kv_heads, n, row_bytes) uint8."""
    own = positions.to(layer.keys.device) - layer.first_position
    pairs = zip((layer.keys, layer.values), codecs, strict=True)
    return torch.cat([encode_exact(tensor[:, own], codec) for tensor, codec in pairs], dim=-1)


def cluster_layer(layer: CapturedLayer, span: Span, recipe: Recipe, *, moment: torch.Tensor | None) -> ClusteredLayer:
    """Group the archived tokens of a global layer."""
    keys, values = (tensor[:, span.head : span.tail] for tensor in (layer.keys, layer.values))
    clusters = cluster_keys(keys, recipe, values=values, query_moment=moment)
    return ClusteredLayer(keys, values, span.head, clusters, moment)


def fit_layer(parts: Sequence[ClusteredLayer], recipe: Recipe, index: int) -> LayerTransforms:
    """Transforms that suit layer `index` of some documents: of each kind of vectors, the basis that decorrelates it."""
    moments = [part.moment for part in parts if part.moment is not None]
    moment = torch.stack(moments).mean(0) if moments else None
    metric = None if moment is None else query_metric(moment)
    key_mean, value_mean = (_mean([getattr(part, name) for part in parts]) for name in ("keys", "values"))
    key_codec, value_codec = recipe.codecs(index)
    key_prototypes, key_residuals = _fit_prototypes(
        [(part.keys, part.clusters) for part in parts], key_mean, recipe.key_prototype_bits, metric
    )
    value_prototypes, value_residuals = _fit_prototypes(
        [(part.values, part.clusters) for part in parts], value_mean, recipe.value_prototype_bits, None
    )
    return LayerTransforms(
        key_mean=key_mean,
        value_mean=value_mean,
        key_axes=_fit_axes(key_residuals, metric),
        key_prototypes=key_prototypes,
        value_prototypes=value_prototypes,
        key_rows=_fit_rows(key_residuals, key_codec, metric),
        value_rows=_fit_rows(value_residuals, value_codec, None),
        query_moment=None if moment is None else moment.to(torch.bfloat16).float(),
    )


def encode_layer(part: ClusteredLayer, transforms: LayerTransforms, *, judged: bool = True) -> CodedLayer:
    """Code prototypes, and every token against the coded prototype of its cluster.

    How well transforms fit is only told where they are `judged`: there is no better fit than transforms of its own.
    """
    clusters, labels = part.clusters, part.clusters.labels
    moment = transforms.query_moment
    metric = None if moment is None else query_metric(moment)
    used = (clusters.sizes > 0).unsqueeze(-1)
    key_codes, key_residuals = _coded_prototypes(
        part.keys, clusters, transforms.key_mean, transforms.key_prototypes, metric
    )
    value_codes, value_residuals = _coded_prototypes(
        part.values, clusters, transforms.value_mean, transforms.value_prototypes, None
    )
    off = part.values.float() - transforms.value_mean.unsqueeze(1)
    squares = [_logit_squares(key_residuals, moment), off.square().sum(-1, keepdim=True)]
    squares.append(_places(key_residuals, transforms.key_axes, metric).square())
    spreads = scale_code(group_means(torch.cat(squares, dim=-1), labels, clusters.sizes).sqrt())
    key_bits = _coded(part.keys, key_residuals, transforms.key_rows, metric)
    value_bits = _coded(part.values, value_residuals, transforms.value_rows, None)
    order = labels.argsort(dim=1, stable=True)  # positions ascend inside a cluster
    heads = torch.arange(len(order), device=order.device).unsqueeze(1)
    prototypes = Prototypes(
        key_codes=key_codes * used,
        value_codes=value_codes * used,
        sizes=clusters.sizes.to(smallest_dtype(int(clusters.sizes.max()))),
        spreads=spreads * used,
    )
    counts = clusters.n_clusters.tolist()
    misfits = [1.0]
    if judged:
        misfits = [
            _misfit(key_residuals, key_bits, transforms.key_rows, metric),
            _misfit(value_residuals, value_bits, transforms.value_rows, None),
        ]
    return CodedLayer(
        prototypes=prototypes,
        positions=order + part.first,
        payload=torch.cat([key_bits, value_bits], dim=-1)[heads, order],
        sizes=[row[:count] for row, count in zip(clusters.sizes.tolist(), counts, strict=True)],
        misfit=max(misfits),
    )


def _mean(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Mean over the tokens of all documents: (n_kv_heads, dim) float32."""
    return torch.stack([tensor.float().sum(1) for tensor in tensors]).sum(0) / sum(each.shape[1] for each in tensors)


def _fit_prototypes(
    parts: Sequence[tuple[torch.Tensor, Clusters]], mean: torch.Tensor, bits: int, metric: torch.Tensor | None
) -> tuple[Basis, torch.Tensor]:
    """The basis of the means of clusters, each counted by its size, and the residuals that are left of all tokens."""
    weighted = []
    for tensor, clusters in parts:
        means = group_means(tensor.float(), clusters.labels, clusters.sizes) - mean.unsqueeze(1)
        weighted.append(means * clusters.sizes.unsqueeze(-1).float().sqrt())
    points = torch.cat(weighted, dim=1)
    n_tokens = sum(tensor.shape[1] for tensor, _ in parts)
    basis = fit_basis(points * (points.shape[1] / n_tokens) ** 0.5, bits, metric=metric, pairs=False)
    residuals = [_coded_prototypes(tensor, clusters, mean, basis, metric)[1] for tensor, clusters in parts]
    return basis, torch.cat(residuals, dim=1)


def _coded_prototypes(
    tensor: torch.Tensor, clusters: Clusters, mean: torch.Tensor, basis: Basis, metric: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (n_kv_heads, n_clusters, n_bytes) of the means of clusters, and the residuals of all tokens to them."""
    means = group_means(tensor.float(), clusters.labels, clusters.sizes)
    codes = encode_plain(means - mean.unsqueeze(1), basis, metric=metric)
    coded = mean.unsqueeze(1) + basis.restored(basis.numbers(codes))
    own = clusters.labels.unsqueeze(-1).expand(-1, -1, tensor.shape[2])
    return codes, tensor.float() - coded.gather(1, own)


def _fit_axes(residuals: torch.Tensor, metric: torch.Tensor | None) -> torch.Tensor:
    """Principal axes of key residuals (n_kv_heads, n_axes, key_dim) bfloat16, as long as their deviation along them."""
    variance, directions, weigh = principal_axes(residuals, metric)
    n_axes = min(N_AXES, residuals.shape[2])
    kept = directions[..., :n_axes].transpose(1, 2) * variance[:, :n_axes].sqrt().unsqueeze(-1)
    axes = torch.linalg.solve(weigh, kept.transpose(1, 2)).transpose(1, 2)
    return axes.to(torch.bfloat16).to(residuals.device)


def _places(residuals: torch.Tensor, axes: torch.Tensor, metric: torch.Tensor | None) -> torch.Tensor:
    """Where residuals lie on axes, in units of their length: (n_kv_heads, n_tokens, n_axes) float32."""
    seen = axes.double() if metric is None else axes.double() @ metric.double()
    length = seen.square().sum(-1, keepdim=True)
    onto = (seen / length.masked_fill(length == 0, 1)).transpose(1, 2)
    return residuals @ (onto if metric is None else metric.double() @ onto).float()


def _logit_squares(residuals: torch.Tensor, moment: torch.Tensor | None) -> torch.Tensor:
    """Squared change of a typical query's logit when a key is replaced by its centroid: (n_kv_heads, n_tokens, 1)."""
    if moment is None:
        return residuals.new_zeros(*residuals.shape[:2], 1)
    return ((residuals @ moment) * residuals).sum(-1, keepdim=True).clamp_min(0)


def _fit_rows(residuals: torch.Tensor, codec: str, metric: torch.Tensor | None) -> Basis | None:
    return None if codec not in CODEC_BITS else fit_basis(residuals, CODEC_BITS[codec], metric=metric)


def _coded(
    tensor: torch.Tensor, residuals: torch.Tensor, basis: Basis | None, metric: torch.Tensor | None
) -> torch.Tensor:
    """Bytes (n_kv_heads, n_tokens, n_bytes) uint8 of a tensor, or of its residuals where it is coded."""
    return to_bits(tensor) if basis is None else encode(residuals, basis, metric=metric)


def _misfit(residuals: torch.Tensor, coded: torch.Tensor, basis: Basis | None, metric: torch.Tensor | None) -> float:
    """Squared error of codes as a multiple of that in a basis of their own; 1 where none are, or too few to tell."""
    if basis is None:
        return 1.0
    if residuals.shape[1] < _FEWEST * residuals.shape[2]:
        return 1.0
    step = -(-residuals.shape[1] // _FIT_TOKENS)
    sample, raw = residuals[:, ::step], coded[:, ::step]
    off = sample - decode(raw, basis)
    found = float((off if metric is None else off @ metric).square().sum()) / sample.shape[1]
    variance, _, _ = principal_axes(sample, metric)
    own = expected_distortion(variance, allocate(variance, basis.widths.n_bytes))
    return found / own if own > 0 else 1.0
