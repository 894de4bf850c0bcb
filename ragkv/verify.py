"""Check every promise of an archive, without its model: checksums first, then the invariants of the format.

The rules are those of ``indexes/FORMAT.md``, restated here rather than taken from the code that writes and recalls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ragkv.errors import ArchiveCorruptError, ArchiveFormatError
from ragkv.kmeans import group_sums
from ragkv.manifest import MANIFEST_FILE, TOKENS_FILE, LayerEntry, Manifest, read_manifest
from ragkv.publish import hash_file
from ragkv.rows import EXACT, Rows, map_file, read_rows, row_groups, to_bits
from ragkv.tables import NO_OFFSET, Prototypes, read_prototypes, read_tokens

_UNREADABLE = (pa.ArrowException, ArchiveCorruptError, OSError, RuntimeError, ValueError, LookupError)
"""What the readers raise for a file that is not what the manifest says it is."""

_SUM_ERROR = 1e-5
"""Rounding of a float32 sum, as a share of the mean magnitude of its terms; sums made elsewhere differ by it."""

_INTEGERS = {"kv_head": "int32", "cluster": "int32"}


@dataclass(frozen=True)
class _Spans:
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
class _LayerFiles:
    """One layer as read: all rows, of which the first `n_exact` are exact, and the prototypes of the others."""

    entry: LayerEntry
    spans: _Spans
    dtype: torch.dtype
    path: Path
    rows: Rows
    n_exact: int
    prototypes: Prototypes | None


def verify_archive(path: str | Path) -> list[str]:
    """Check the archive in the folder `path`; returns one line per fault, none if it is sound.

    No model is needed and nothing is written. A file whose checksum does not hold is not looked into any further.

    Raises
    ------
    ArchiveNotFoundError
        If there is no manifest; any other damage is returned.
    """
    folder = Path(path)
    try:
        manifest = read_manifest(folder)
    except (ArchiveCorruptError, ArchiveFormatError) as error:
        return [str(error)]
    damaged = dict(_file_faults(folder, manifest))
    faults = [*damaged.values(), *_extra_files(folder, manifest), *_count_faults(manifest)]
    if TOKENS_FILE not in damaged:
        faults += _collected(TOKENS_FILE, _token_faults(folder, manifest))
    spans = _Spans(manifest.head_tokens, manifest.head_tokens + manifest.archived_tokens, manifest.n_tokens)
    dtype = getattr(torch, manifest.fingerprint.dtype)
    for place, entry in enumerate(manifest.layers):
        faults += _entry_faults(place, entry, manifest, spans)
        if damaged.keys().isdisjoint(entry.files()):
            faults += _collected(f"layer {entry.index}", _layer_faults(folder, entry, spans, dtype))
    return faults


def _collected(name: str, found: Iterator[str]) -> list[str]:
    """Run one check to its end; a file that cannot be read is its last fault."""
    faults: list[str] = []
    try:
        for fault in found:
            faults.append(fault)
    except _UNREADABLE as error:
        faults.append(f"{name}: cannot be read ({' '.join(str(error).split())})")
    return faults


def _file_faults(folder: Path, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Name and fault of every file that is missing, or of another length or checksum than the manifest says."""
    for name, expected in manifest.files.items():
        try:
            found = hash_file(folder / name)
        except OSError as error:
            yield name, f"{name}: cannot be read ({error.strerror})"
            continue
        if found.bytes != expected.bytes:
            yield name, f"{name}: {found.bytes} bytes, the manifest says {expected.bytes}"
        elif found.sha256 != expected.sha256:
            yield name, f"{name}: SHA-256 {found.sha256[:12]}..., the manifest says {expected.sha256[:12]}..."


def _extra_files(folder: Path, manifest: Manifest) -> Iterator[str]:
    for found in sorted(folder.rglob("*")):
        name = found.relative_to(folder).as_posix()
        if not found.is_dir() and name != MANIFEST_FILE and name not in manifest.files:
            yield f"{name}: not in the manifest"


def _count_faults(manifest: Manifest) -> Iterator[str]:
    """The counts must follow from the numbers of tokens and the recipe."""
    recipe, end = manifest.recipe, manifest.n_tokens
    head = min(end, max(manifest.prefix_tokens, recipe.sink_tokens))
    archived = max(0, end - recipe.window_tokens - head)
    if manifest.document_tokens == 0:
        yield f"{MANIFEST_FILE}: document_tokens is 0"
    if manifest.head_tokens != head:
        yield f"{MANIFEST_FILE}: head_tokens is {manifest.head_tokens}, tokens and recipe give {head}"
    if manifest.archived_tokens != archived:
        yield f"{MANIFEST_FILE}: archived_tokens is {manifest.archived_tokens}, tokens and recipe give {archived}"
    if not manifest.layers:
        yield f"{MANIFEST_FILE}: there are no layers"


def _entry_faults(place: int, entry: LayerEntry, manifest: Manifest, spans: _Spans) -> Iterator[str]:
    """The manifest's entry of a layer must follow from the counts."""
    name, n_exact = f"{MANIFEST_FILE}: layer {entry.index}", spans.n_exact(entry)
    if entry.index != place:
        yield f"{name} stands at place {place}"
    if entry.exact_tokens != n_exact:
        yield f"{name}: exact_tokens is {entry.exact_tokens}, the counts give {n_exact}"
    if bool(entry.clusters) != (entry.window is None and manifest.archived_tokens > 0):
        yield f"{name}: {'has' if entry.clusters else 'has no'} clusters, against its window and archived_tokens"
    most = min(manifest.archived_tokens, manifest.clusters_asked)
    for head, count in enumerate(entry.clusters):
        if not 0 < count <= most:
            yield f"{name}, kv_head {head}: {count} clusters, allowed are 1 to {most} (tokens archived, clusters asked)"


def _token_faults(folder: Path, manifest: Manifest) -> Iterator[str]:
    _require_columns(folder / TOKENS_FILE, dict.fromkeys(("token_id", "start", "end"), "int32"))
    tokens, n_prefix = read_tokens(folder, manifest), manifest.prefix_tokens
    if bool((tokens.ids < 0).any()):
        yield f"{TOKENS_FILE}: a token id is negative"
    outside = (tokens.start == NO_OFFSET) & (tokens.end == NO_OFFSET)
    if not bool(outside[:n_prefix].all()) or bool(outside[n_prefix:].any()):
        yield f"{TOKENS_FILE}: the tokens without offsets are not the {n_prefix} of the prefix"
    start, end = tokens.start[n_prefix:], tokens.end[n_prefix:]
    if bool((start < 0).any()) or bool((end < start).any()):
        yield f"{TOKENS_FILE}: a document token has a negative offset or ends before it starts"
    if bool((start.diff() < 0).any()) or bool((end.diff() < 0).any()):
        yield f"{TOKENS_FILE}: character offsets go backwards"


def _require_columns(path: Path, columns: dict[str, str]) -> None:
    schema = pq.read_schema(path)
    found = [(field.name, str(field.type)) for field in schema]
    if found != list(columns.items()) or any(field.nullable for field in schema):
        raise ArchiveCorruptError(f"{path.name} has columns {found}, the format says {list(columns.items())}, no nulls")


def _layer_faults(folder: Path, entry: LayerEntry, spans: _Spans, dtype: torch.dtype) -> Iterator[str]:
    path, row_bytes = folder / entry.rows_file, (entry.key_dim + entry.value_dim) * dtype.itemsize
    binary = f"fixed_size_binary[{row_bytes}]"
    _require_columns(path, {**_INTEGERS, "position": "int32", "key_value": binary})
    rows = read_rows(path, entry.key_dim, dtype, exact_only=False)
    n_exact = pq.read_metadata(path).row_group(0).num_rows
    expected = entry.n_kv_heads * spans.n_exact(entry)
    archived = entry.n_kv_heads * (spans.tail - spans.head) if entry.clusters else 0
    if (n_exact, len(rows.position) - n_exact) != (expected, archived):
        yield (
            f"{entry.rows_file}: {n_exact} exact and {len(rows.position) - n_exact} archived rows, "
            f"the counts give {expected} and {archived}"
        )
        return
    prototypes = None
    if entry.clusters:
        mean = f"fixed_size_binary[{entry.value_dim * dtype.itemsize}]"
        numbers = {"size": "int32", "logit_variance": "float", "value_spread": "float"}
        _require_columns(folder / entry.prototypes_file, {**_INTEGERS, **numbers, "mean_value": mean})
        prototypes = read_prototypes(folder, entry, dtype)
        yield from _prototype_order_faults(folder, entry)
    layer = _LayerFiles(entry, spans, dtype, path, rows, n_exact, prototypes)
    yield from _exact_faults(layer)
    yield from _finite_faults(layer)
    if prototypes is not None:
        yield from _mapping_faults(layer, row_bytes)
        yield from _archived_faults(layer, prototypes)


def _exact_faults(layer: _LayerFiles) -> Iterator[str]:
    """Row group 0: the tokens attended exactly, KV head by KV head, in order of position."""
    name, rows = layer.entry.rows_file, layer.rows
    positions, exact = layer.spans.exact(layer.entry), slice(0, layer.n_exact)
    if not torch.equal(rows.kv_head[exact], torch.arange(layer.entry.n_kv_heads).repeat_interleave(len(positions))):
        yield f"{name}: the exact rows are not in order of KV head"
    if bool((rows.cluster[exact] != EXACT).any()):
        yield f"{name}: an exact row has a cluster"
    if not torch.equal(rows.position[exact], positions.repeat(layer.entry.n_kv_heads)):
        yield f"{name}: the positions of the exact rows are not those that the counts give"


def _finite_faults(layer: _LayerFiles) -> Iterator[str]:
    parts = {f"{layer.entry.rows_file}: a key": layer.rows.keys, f"{layer.entry.rows_file}: a value": layer.rows.values}
    if layer.prototypes is not None:
        parts[f"{layer.entry.centroids_file}: a centroid"] = layer.prototypes.centroids
        parts[f"{layer.entry.prototypes_file}: a mean value"] = layer.prototypes.mean_values
        for name, tensor in (
            ("logit_variance", layer.prototypes.logit_variance),
            ("value_spread", layer.prototypes.value_spread),
        ):
            if not bool((torch.isfinite(tensor) & (tensor >= 0)).all()):
                yield f"{layer.entry.prototypes_file}: a {name} is negative, NaN or infinite"
    for what, tensor in parts.items():
        if not bool(torch.isfinite(tensor).all()):
            yield f"{what} is NaN or infinite"


def _prototype_order_faults(folder: Path, entry: LayerEntry) -> Iterator[str]:
    table = pq.read_table(folder / entry.prototypes_file)
    heads = np.repeat(np.arange(entry.n_kv_heads), entry.clusters)
    clusters = np.concatenate([np.arange(count) for count in entry.clusters])
    same = np.array_equal(table["kv_head"].to_numpy(), heads) and np.array_equal(table["cluster"].to_numpy(), clusters)
    if not same:
        yield f"{entry.prototypes_file}: rows are not in order of KV head and cluster as the manifest counts them"


def _mapping_faults(layer: _LayerFiles, row_bytes: int) -> Iterator[str]:
    """Row groups hold whole clusters of one KV head, and their bytes lie where the footer says."""
    name, groups, rows = layer.entry.rows_file, row_groups(layer.path, row_bytes), layer.rows
    decoded = to_bits(torch.cat([rows.keys, rows.values], dim=1)[layer.n_exact :]).reshape(-1)
    mapped = map_file(layer.path).numpy()
    kv_head, cluster = rows.kv_head[layer.n_exact :], rows.cluster[layer.n_exact :]
    for number, (first, n_rows, at) in enumerate(
        zip(groups.first_row, groups.n_rows, groups.first_byte, strict=True), start=1
    ):
        stop = first + n_rows
        n_bytes = n_rows * row_bytes
        if not np.array_equal(mapped[at : at + n_bytes], decoded[first * row_bytes : stop * row_bytes]):
            yield f"{name}: row group {number} has other bytes at its address than it decodes to"
        if bool((kv_head[first:stop] != kv_head[first]).any()):
            yield f"{name}: row group {number} holds more than one KV head"
        if stop < len(cluster) and kv_head[stop] == kv_head[stop - 1] and cluster[stop] == cluster[stop - 1]:
            yield f"{name}: row group {number} ends inside a cluster"


def _archived_faults(layer: _LayerFiles, prototypes: Prototypes) -> Iterator[str]:
    """Archived rows: every position once per KV head, in order of cluster and position, under true prototypes."""
    entry, spans, archived = layer.entry, layer.spans, slice(layer.n_exact, None)
    shape = (entry.n_kv_heads, spans.tail - spans.head)
    heads = torch.arange(entry.n_kv_heads).unsqueeze(1)
    if not torch.equal(layer.rows.kv_head[archived].reshape(shape), heads.expand(shape)):
        yield f"{entry.rows_file}: the archived rows are not in order of KV head, {shape[1]} of each"
        return
    labels, position = layer.rows.cluster[archived].reshape(shape), layer.rows.position[archived].reshape(shape)
    wrong = (position.sort(dim=1).values != torch.arange(spans.head, spans.tail)).any(1)
    for head in wrong.nonzero().flatten().tolist():
        yield f"{entry.rows_file}: kv_head {head} does not hold every position of [{spans.head}, {spans.tail}) once"
    if bool((labels < 0).any()) or bool((labels >= torch.tensor(entry.clusters).unsqueeze(1)).any()):
        yield f"{entry.rows_file}: a cluster number is beyond the clusters that the manifest counts"
        return
    same = labels.diff(dim=1) == 0
    if bool((labels.diff(dim=1) < 0).any()) or bool((position.diff(dim=1)[same] <= 0).any()):
        yield f"{entry.rows_file}: rows are not in order of cluster and then of position"
    yield from _prototype_faults(layer, prototypes, labels)


def _prototype_faults(layer: _LayerFiles, prototypes: Prototypes, labels: torch.Tensor) -> Iterator[str]:
    entry, archived = layer.entry, slice(layer.n_exact, None)
    n_clusters = prototypes.sizes.shape[1]
    counted = torch.stack([row.bincount(minlength=n_clusters) for row in labels])  # (n_kv_heads, n_clusters)
    for head, cluster in (counted != prototypes.sizes).nonzero().tolist():
        size, found = int(prototypes.sizes[head, cluster]), int(counted[head, cluster])
        yield f"{entry.prototypes_file}: kv_head {head}, cluster {cluster} has size {size} and {found} rows"
    used = torch.arange(n_clusters) < torch.tensor(entry.clusters).unsqueeze(1)
    for head, cluster in (used & (counted == 0)).nonzero().tolist():
        yield f"{entry.rows_file}: kv_head {head}, cluster {cluster} is empty"
    for file, what, points, stored in (
        (entry.centroids_file, "centroid", layer.rows.keys, prototypes.centroids),
        (entry.prototypes_file, "mean value", layer.rows.values, prototypes.mean_values),
    ):
        wrong = used & _is_not_mean(stored, points[archived].reshape(*labels.shape, -1), labels, counted)
        for head, cluster in wrong.nonzero().tolist():
            yield f"{file}: kv_head {head}, cluster {cluster}: the {what} is not the mean of its rows"


def _is_not_mean(
    stored: torch.Tensor, points: torch.Tensor, labels: torch.Tensor, counted: torch.Tensor
) -> torch.Tensor:
    """Clusters (n_kv_heads, n_clusters) whose `stored` vector is off the mean of their points by more than rounding."""
    count, info = counted.clamp_min(1).unsqueeze(-1), torch.finfo(stored.dtype)
    mean = group_sums(points, labels, counted.shape[1]) / count
    magnitude = group_sums(points.float().abs(), labels, counted.shape[1]) / count
    allowed = info.eps * mean.abs() + _SUM_ERROR * magnitude + info.smallest_normal * info.eps
    return ((stored.float() - mean).abs() > allowed).any(-1)
