"""Check the files of one layer of an archive against each other and against the manifest.

The rules are those of ``indexes/FORMAT.md``; files are read with the readers of the package, rules are restated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch

from ragkv.archive.centroids import read_centroids
from ragkv.archive.codec import Basis, coefficients, decode
from ragkv.archive.groups import group_sums
from ragkv.archive.manifest import LayerEntry
from ragkv.archive.payload import Payload, from_bits
from ragkv.archive.rows import EXACT, Rows, map_file, read_rows, row_groups
from ragkv.archive.tables import Prototypes, read_key_axes, read_key_mean, read_payload, read_prototypes
from ragkv.errors import ArchiveCorruptError

_SUM_ERROR = 1e-5
"""Rounding of a float32 sum, as a share of the mean magnitude of its terms; sums made elsewhere differ by it."""

_OBLIQUE = 8
"""How much farther a rounded centroid may move a coefficient than if the rows of the transform were orthogonal.

Keys are coded in the metric of queries, whose axes are oblique. The most unequal metric of this writer gives 18 at 128
dimensions along the worst of all directions; along random ones, as rounding takes, four standard deviations are 4.
"""

_INTEGERS = {"kv_head": "int32", "cluster": "int32"}


@dataclass(frozen=True)
class Spans:
    """Positions that the counts of the manifest promise: exact ones are [0, head) and [tail, end)."""

    head: int
    tail: int
    end: int

    def n_exact(self, entry: LayerEntry) -> int:
        """How many tokens one KV head of a layer attends exactly."""
        if entry.window is not None:
            return max(0, min(self.end, entry.window - 1))
        return self.head + max(0, self.end - self.tail)

    def exact(self, entry: LayerEntry) -> torch.Tensor:
        """The positions (n_exact,) of those tokens."""
        if entry.window is not None:
            return torch.arange(self.end - self.n_exact(entry), self.end)
        return torch.cat([torch.arange(self.head), torch.arange(self.tail, self.end)])


@dataclass(frozen=True)
class _Archived:
    """The files of a layer's archived tokens as read, rows in the order of the file.

    ``labels`` and ``positions`` (n_kv_heads, n_tokens) int64 and ``payload`` (n_kv_heads, n_tokens, row_bytes) uint8;
    ``relative`` (n_centroids, key_dim) float32 are the centroids before ``key_mean`` (n_kv_heads, key_dim) is added;
    ``half_step`` (key_dim,) float32 is how far their one-byte code may be off.
    """

    entry: LayerEntry
    labels: torch.Tensor
    positions: torch.Tensor
    payload: torch.Tensor
    layout: Payload
    prototypes: Prototypes
    relative: torch.Tensor
    key_mean: torch.Tensor
    key_axes: torch.Tensor
    half_step: torch.Tensor


def require_columns(path: Path, columns: dict[str, str]) -> None:
    """Refuse a Parquet file with other columns, or with columns that may hold nulls."""
    schema = pq.read_schema(path)
    found = [(field.name, str(field.type)) for field in schema]
    if found != list(columns.items()) or any(field.nullable for field in schema):
        raise ArchiveCorruptError(f"{path.name} has columns {found}, the format says {list(columns.items())}, no nulls")


def layer_faults(folder: Path, entry: LayerEntry, spans: Spans, dtype: torch.dtype) -> Iterator[str]:
    """One line for every fault in the files of a layer."""
    yield from _exact_faults(folder, entry, spans, dtype)
    if entry.clusters:
        yield from _archived_faults(folder, entry, spans, dtype)


def _exact_faults(folder: Path, entry: LayerEntry, spans: Spans, dtype: torch.dtype) -> Iterator[str]:
    """The tokens that are attended exactly: KV head by KV head, in order of position, finite."""
    name, positions = entry.exact_file, spans.exact(entry)
    row_bytes = (entry.key_dim + entry.value_dim) * dtype.itemsize
    require_columns(folder / name, _row_columns(row_bytes))
    rows, expected = read_rows(folder / name), entry.n_kv_heads * len(positions)
    if len(rows.position) != expected:
        yield f"{name}: {len(rows.position)} rows, the counts give {expected}"
        return
    if not torch.equal(rows.kv_head, torch.arange(entry.n_kv_heads).repeat_interleave(len(positions))):
        yield f"{name}: the rows are not in order of KV head"
    if bool((rows.cluster != EXACT).any()):
        yield f"{name}: an exact row has a cluster"
    if not torch.equal(rows.position, positions.repeat(entry.n_kv_heads)):
        yield f"{name}: the positions are not those that the counts give"
    if not bool(torch.isfinite(from_bits(rows.payload, dtype)).all()):
        yield f"{name}: a key or value is NaN or infinite"


def _archived_faults(folder: Path, entry: LayerEntry, spans: Spans, dtype: torch.dtype) -> Iterator[str]:
    key_bytes = _coded_bytes(entry.key_widths) or entry.key_dim * dtype.itemsize
    value_bytes = _coded_bytes(entry.value_widths) or entry.value_dim * dtype.itemsize
    require_columns(folder / entry.rows_file, _row_columns(key_bytes + value_bytes))
    require_columns(folder / entry.bases_file, _base_columns(entry))
    numbers = {"size": "int32", "logit_variance": "float", "value_spread": "float"}
    axes = {"axis_scales": f"fixed_size_binary[{_n_axes(entry)}]"}
    require_columns(folder / entry.prototypes_file, {**_INTEGERS, **numbers, **axes})
    yield from _prototype_order_faults(folder, entry)
    rows, shape = read_rows(folder / entry.rows_file), (entry.n_kv_heads, spans.tail - spans.head)
    if len(rows.position) != shape[0] * shape[1]:
        yield f"{entry.rows_file}: {len(rows.position)} rows, the counts give {shape[0] * shape[1]}"
        return
    yield from _mapping_faults(folder / entry.rows_file, entry.rows_file, rows)
    yield from _base_faults(folder, entry)
    if not torch.equal(rows.kv_head.view(shape), torch.arange(shape[0]).unsqueeze(1).expand(shape)):
        yield f"{entry.rows_file}: the rows are not in order of KV head, {shape[1]} of each"
        return
    layer = _Archived(
        entry=entry,
        labels=rows.cluster.view(shape),
        positions=rows.position.view(shape),
        payload=rows.payload.view(*shape, -1),
        layout=read_payload(folder, entry, dtype),
        prototypes=read_prototypes(folder, entry, dtype),
        relative=read_centroids(folder / entry.centroids_file, (sum(entry.clusters), entry.key_dim)),
        key_mean=read_key_mean(folder, entry),
        key_axes=read_key_axes(folder, entry),
        half_step=_half_step(folder / entry.centroids_file, entry.key_dim),
    )
    yield from _finite_faults(layer)
    yield from _partition_faults(layer, spans)


def _row_columns(row_bytes: int) -> dict[str, str]:
    return {**_INTEGERS, "position": "int32", "key_value": f"fixed_size_binary[{row_bytes}]"}


def _base_columns(entry: LayerEntry) -> dict[str, str]:
    """A transform has two bytes a number, a mean four."""
    sizes = {"key_mean": 4 * entry.key_dim, "key_axes": 2 * _n_axes(entry) * entry.key_dim}
    if entry.key_widths:
        sizes["key_rows"] = 2 * sum(entry.key_widths) * entry.key_dim
    if entry.value_widths:
        sizes |= {"value_rows": 2 * sum(entry.value_widths) * entry.value_dim, "value_mean": 4 * entry.value_dim}
    return {"kv_head": "int32", **{name: f"fixed_size_binary[{size}]" for name, size in sizes.items()}}


def _n_axes(entry: LayerEntry) -> int:
    return min(8, entry.key_dim)


def _coded_bytes(widths: tuple[int, ...]) -> int:
    """Bytes of a coded tensor of one token: a scale, and 8, 4 and 2 bits a coefficient; 0 where it is lossless."""
    return 1 + widths[0] + widths[1] // 2 + widths[2] // 4 if widths else 0


def _half_step(path: Path, dim: int) -> torch.Tensor:
    """Half of what one step of a centroid's byte is worth in each dimension: (dim,) float32.

    The widths of the ranges follow 73 bytes of header and the `dim` low ends.
    """
    widths = np.frombuffer(path.read_bytes(), dtype="<f4", count=dim, offset=73 + 4 * dim)
    return torch.from_numpy(widths.copy()) / 510


def _prototype_order_faults(folder: Path, entry: LayerEntry) -> Iterator[str]:
    table = pq.read_table(folder / entry.prototypes_file)
    heads = np.repeat(np.arange(entry.n_kv_heads), entry.clusters)
    clusters = np.concatenate([np.arange(count) for count in entry.clusters])
    same = np.array_equal(table["kv_head"].to_numpy(), heads) and np.array_equal(table["cluster"].to_numpy(), clusters)
    if not same:
        yield f"{entry.prototypes_file}: rows are not in order of KV head and cluster as the manifest counts them"


def _base_faults(folder: Path, entry: LayerEntry) -> Iterator[str]:
    table = pq.read_table(folder / entry.bases_file)
    if not np.array_equal(table["kv_head"].to_numpy(), np.arange(entry.n_kv_heads)):
        yield f"{entry.bases_file}: rows are not one for each KV head in order"


def _mapping_faults(path: Path, name: str, rows: Rows) -> Iterator[str]:
    """Row groups hold whole clusters of one KV head, and their bytes lie where the footer says."""
    row_bytes = rows.payload.shape[1]
    groups, decoded, mapped = row_groups(path, row_bytes), rows.payload.reshape(-1).numpy(), map_file(path).numpy()
    for number, (first, n_rows, at) in enumerate(zip(groups.first_row, groups.n_rows, groups.first_byte, strict=True)):
        stop = first + n_rows
        if not n_rows:
            yield f"{name}: row group {number} is empty"
            continue
        if not np.array_equal(mapped[at : at + n_rows * row_bytes], decoded[first * row_bytes : stop * row_bytes]):
            yield f"{name}: row group {number} has other bytes at its address than it decodes to"
        if bool((rows.kv_head[first:stop] != rows.kv_head[first]).any()):
            yield f"{name}: row group {number} holds more than one KV head"
        same_head = stop < len(rows.cluster) and rows.kv_head[stop] == rows.kv_head[stop - 1]
        if same_head and rows.cluster[stop] == rows.cluster[stop - 1]:
            yield f"{name}: row group {number} ends inside a cluster"


def _finite_faults(layer: _Archived) -> Iterator[str]:
    entry, layout = layer.entry, layer.layout
    parts = {
        f"{entry.centroids_file}: a centroid": layer.relative,
        f"{entry.bases_file}: a number of key_mean": layer.key_mean,
        f"{entry.bases_file}: a number of key_axes": layer.key_axes,
    }
    for name, basis, numbers in (
        ("key", layout.key_basis, layout.keys(layer.payload)),
        ("value", layout.value_basis, layout.values(layer.payload)),
    ):
        if basis is None:
            parts[f"{entry.rows_file}: a {name}"] = numbers.numbers
        else:
            parts[f"{entry.bases_file}: a number of {name}_rows"] = basis.rows
    if layout.value_basis is not None:
        parts[f"{entry.bases_file}: a number of value_mean"] = layout.value_basis.mean
    for what, tensor in parts.items():
        if not bool(torch.isfinite(tensor).all()):
            yield f"{what} is NaN or infinite"
    for name, tensor in (
        ("logit_variance", layer.prototypes.logit_variance),
        ("value_spread", layer.prototypes.value_spread),
    ):
        if not bool((torch.isfinite(tensor) & (tensor >= 0)).all()):
            yield f"{entry.prototypes_file}: a {name} is negative, NaN or infinite"


def _partition_faults(layer: _Archived, spans: Spans) -> Iterator[str]:
    """Every position once per KV head, in order of cluster and position, in clusters of the sizes that are stored."""
    entry, labels, position, sizes = layer.entry, layer.labels, layer.positions, layer.prototypes.sizes
    wrong = (position.sort(dim=1).values != torch.arange(spans.head, spans.tail)).any(1)
    for head in wrong.nonzero().flatten().tolist():
        yield f"{entry.rows_file}: kv_head {head} does not hold every position of [{spans.head}, {spans.tail}) once"
    if bool((labels < 0).any()) or bool((labels >= torch.tensor(entry.clusters).unsqueeze(1)).any()):
        yield f"{entry.rows_file}: a cluster number is beyond the clusters that the manifest counts"
        return
    same = labels.diff(dim=1) == 0
    if bool((labels.diff(dim=1) < 0).any()) or bool((position.diff(dim=1)[same] <= 0).any()):
        yield f"{entry.rows_file}: rows are not in order of cluster and then of position"
    counted = torch.stack([row.bincount(minlength=sizes.shape[1]) for row in labels])  # (n_kv_heads, n_clusters)
    for head, cluster in (counted != sizes).nonzero().tolist():
        size, found = int(sizes[head, cluster]), int(counted[head, cluster])
        yield f"{entry.prototypes_file}: kv_head {head}, cluster {cluster} has size {size} and {found} rows"
    used = torch.arange(sizes.shape[1]) < torch.tensor(entry.clusters).unsqueeze(1)
    for head, cluster in (used & (counted == 0)).nonzero().tolist():
        yield f"{entry.rows_file}: kv_head {head}, cluster {cluster} is empty"
    yield from _key_mean_faults(layer, counted[used])
    yield from _key_faults(layer, counted)
    yield from _value_faults(layer, counted)


def _key_mean_faults(layer: _Archived, sizes: torch.Tensor) -> Iterator[str]:
    """Centroids are relative to the mean of all archived keys, so by their `sizes` (n_centroids,) they add up to 0."""
    basis, clusters = layer.layout.key_basis, layer.entry.clusters
    raw = layer.payload[..., : layer.layout.key_bytes]
    keys = layer.layout.keys(layer.payload).numbers if basis is None else decode(raw, basis)
    magnitude = keys.abs().mean(dim=1) + layer.key_mean.abs() + 510 * layer.half_step  # (n_kv_heads, key_dim)
    for head, (relative, size) in enumerate(zip(layer.relative.split(clusters), sizes.split(clusters), strict=True)):
        mean = (relative.double() * size.unsqueeze(1)).sum(0) / size.sum()
        rounding = _SUM_ERROR * (magnitude[head] + relative.abs().amax(0)) + torch.finfo(torch.float32).tiny
        if bool((mean.abs() > layer.half_step + rounding).any()):
            yield f"{layer.entry.centroids_file}: kv_head {head}: the centroids are not about the mean of all keys"


def _key_faults(layer: _Archived, counted: torch.Tensor) -> Iterator[str]:
    """A centroid is the mean of the keys of its cluster.

    Coded keys are only known relative to their centroid, so what can be told is whether their residuals may have the
    mean 0.
    """
    entry, centroids, basis = layer.entry, layer.prototypes.centroids.float(), layer.layout.key_basis
    eps, n_key_bytes = torch.finfo(layer.layout.dtype).eps, layer.layout.key_bytes
    magnitude = layer.key_mean.abs().unsqueeze(1) + centroids.abs() + 510 * layer.half_step
    rounding = eps * centroids.abs().clamp_min(torch.finfo(layer.layout.dtype).smallest_normal)
    allowed = (1 + eps) * layer.half_step + rounding + _SUM_ERROR * magnitude
    if basis is not None:
        raw = layer.payload[..., :n_key_bytes]
        wrong = _lopsided(raw, basis, layer.labels, counted, allowed * _OBLIQUE)
        for head, cluster in wrong.nonzero().tolist():
            yield f"{entry.rows_file}: kv_head {head}, cluster {cluster}: the keys are not about their centroid"
        return
    count, n_clusters = counted.clamp_min(1).unsqueeze(-1), counted.shape[1]
    keys = layer.layout.keys(layer.payload).numbers
    mean = group_sums(keys, layer.labels, n_clusters) / count
    allowed = allowed + _SUM_ERROR * group_sums(keys.abs(), layer.labels, n_clusters) / count
    wrong = (counted > 0) & ((centroids - mean).abs() > allowed).any(-1)
    for head, cluster in wrong.nonzero().tolist():
        yield f"{entry.centroids_file}: kv_head {head}, cluster {cluster}: the centroid is not the mean of its rows"


def _value_faults(layer: _Archived, counted: torch.Tensor) -> Iterator[str]:
    """Lossless values have the spread that is stored; the residuals of coded ones may have the mean 0."""
    entry, basis = layer.entry, layer.layout.value_basis
    if basis is not None:
        allowed = _SUM_ERROR * basis.mean.abs().unsqueeze(1)  # (n_kv_heads, 1, value_dim)
        everything = torch.full((len(counted), 1), layer.labels.shape[1])
        raw = layer.payload[..., layer.layout.key_bytes :]
        wrong = _lopsided(raw, basis, torch.zeros_like(layer.labels), everything, allowed)
        for head in wrong[:, 0].nonzero().flatten().tolist():
            yield f"{entry.rows_file}: kv_head {head}: the values are not about value_mean"
        return
    numbers = layer.layout.values(layer.payload).numbers
    squared = (numbers - numbers.mean(dim=1, keepdim=True)).square().sum(-1, keepdim=True)
    magnitude = numbers.square().sum(-1).mean(1, keepdim=True)  # (n_kv_heads, 1)
    spread = group_sums(squared, layer.labels, counted.shape[1])[..., 0] / counted.clamp_min(1)
    off = (layer.prototypes.value_spread - spread).abs() > 10 * _SUM_ERROR * (spread + magnitude)
    for head, cluster in ((counted > 0) & off).nonzero().tolist():
        yield f"{entry.prototypes_file}: kv_head {head}, cluster {cluster}: value_spread is not that of its rows"


def _lopsided(
    raw: torch.Tensor, basis: Basis, labels: torch.Tensor, counted: torch.Tensor, allowed: torch.Tensor
) -> torch.Tensor:
    """Groups (n_kv_heads, n_groups) whose residuals cannot have a mean that is at most `allowed` from 0.

    A level stands for an interval one step wide, the outermost ones for all that lies beyond as well. The mean of a
    coefficient lies between the means of the lower and of the upper ends. `allowed` (n_kv_heads, n_groups or 1, dim).
    """
    levels, scale = coefficients(raw, basis)
    scale = scale.unsqueeze(-1)
    edge, count = basis.widths.per_coefficient(127.5, 7.5, 1.5), counted.clamp_min(1).unsqueeze(-1)
    reach = allowed.norm(dim=-1, keepdim=True) / basis.rows.float().norm(dim=-1).unsqueeze(1)  # (n_kv_heads, ., n_kept)
    wrong = torch.zeros_like(counted, dtype=torch.bool)
    for side in (-1, 1):
        inward = levels * side
        ends = torch.where((inward == edge) & (scale > 0), torch.inf, (inward + 0.5) * scale)
        mean = group_sums(ends, labels, counted.shape[1]) / count
        rounding = _SUM_ERROR * group_sums((inward * scale).abs(), labels, counted.shape[1]) / count
        wrong |= ((counted > 0).unsqueeze(-1) & (mean + rounding < -reach)).any(-1)
    return wrong
