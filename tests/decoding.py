"""Archives read back in float64 without any of ragkv's own decoding: what the tests compare recall with."""

from __future__ import annotations

from dataclasses import dataclass

import faiss
import numpy as np
import pyarrow.parquet as pq
import torch

from ragkv import Archive
from ragkv.archive.manifest import LayerEntry
from ragkv.archive.payload import from_bits
from ragkv.archive.rows import read_rows

Vector = np.ndarray
Pair = tuple[Vector, Vector]


@dataclass(frozen=True)
class Tokens:
    """All stored tokens of one layer of a lossless archive, archived ones first, then exact ones (cluster -1).

    ``kv_head``, ``cluster``, ``position`` (n_rows,) int64; ``keys`` and ``values`` (n_rows, dim) in its dtype.
    """

    kv_head: torch.Tensor
    cluster: torch.Tensor
    position: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def stored_tokens(archive: Archive, index: int) -> Tokens:
    entry = archive.manifest.layers[index]
    assert not entry.key_widths
    assert not entry.value_widths
    names = [entry.rows_file, entry.exact_file] if entry.clusters else [entry.exact_file]
    files = [read_rows(archive.path / name) for name in names]
    dtype = getattr(torch, archive.manifest.fingerprint.dtype)
    both = from_bits(torch.cat([rows.payload for rows in files]), dtype)
    return Tokens(
        *(torch.cat([getattr(rows, name) for rows in files]) for name in ("kv_head", "cluster", "position")),
        keys=both[:, : entry.key_dim],
        values=both[:, entry.key_dim :],
    )


@dataclass(frozen=True)
class Decoded:
    """One layer with clusters in float64, KV head by KV head.

    ``exact`` holds the keys and values of a head's exact tokens; ``clusters[head][label]`` those of a cluster;
    ``centroids[head]`` (n_clusters, key_dim); ``variance[head]`` and ``spread[head]`` (n_clusters,); ``axes[head]``
    (n_axes, key_dim), and ``reach[head]`` (n_clusters, n_axes), how far keys lie along them.
    """

    exact: list[Pair]
    clusters: list[list[Pair]]
    centroids: list[Vector]
    variance: list[Vector]
    spread: list[Vector]
    axes: list[Vector]
    reach: list[Vector]


def decoded(archive: Archive, index: int) -> Decoded:
    """Read a layer of a float32 archive as the format document describes it."""
    folder, entry = archive.path, archive.manifest.layers[index]
    prototypes, bases = (pq.read_table(folder / name) for name in (entry.prototypes_file, entry.bases_file))
    head_of = prototypes["kv_head"].to_numpy()
    key_mean = floats(bases["key_mean"], np.float32)
    relative = faiss.read_index(str(folder / entry.centroids_file)).reconstruct_n(0, len(head_of))
    centroids = (relative + key_mean[head_of]).astype(np.float64)
    heads = range(entry.n_kv_heads)
    by_head = [centroids[head_of == head] for head in heads]
    rows = pq.read_table(folder / entry.rows_file)
    row_head, row_cluster = rows["kv_head"].to_numpy(), rows["cluster"].to_numpy()
    raw = raw_bytes(rows["key_value"])
    clusters: list[list[Pair]] = []
    for head in heads:
        own = row_head == head
        keys, values = _decode_head(raw[own], entry, bases, head)
        label = row_cluster[own]
        if entry.key_widths:
            keys = by_head[head][label] + keys
        clusters.append([(keys[label == c], values[label == c]) for c in range(len(by_head[head]))])
    exact = pq.read_table(folder / entry.exact_file)
    both = floats(exact["key_value"], np.float32).astype(np.float64)
    exact_head = exact["kv_head"].to_numpy()
    variance, spread = (prototypes[name].to_numpy().astype(float) for name in ("logit_variance", "value_spread"))
    codes = raw_bytes(prototypes["axis_scales"]).astype(float)
    reach = np.where(codes == 0, 0, 2.0 ** ((codes - 128) / 8))
    return Decoded(
        exact=[(both[exact_head == h, : entry.key_dim], both[exact_head == h, entry.key_dim :]) for h in heads],
        clusters=clusters,
        centroids=by_head,
        variance=[variance[head_of == head] for head in heads],
        spread=[spread[head_of == head] for head in heads],
        axes=[basis_rows(bases, "key_axes", head, entry.key_dim) for head in heads],
        reach=[reach[head_of == head] for head in heads],
    )


def _decode_head(raw: Vector, entry: LayerEntry, bases: object, head: int) -> Pair:
    """Keys (residuals of them where coded) and values of one head's rows (n_rows, row_bytes)."""
    n_keys = coded_bytes(entry.key_widths) if entry.key_widths else entry.key_dim * 4
    key_raw, value_raw = raw[:, :n_keys], raw[:, n_keys:]
    keys = values = None
    if entry.key_widths:
        keys = residuals(key_raw, entry.key_widths, basis_rows(bases, "key_rows", head, entry.key_dim))
    if entry.value_widths:
        values = residuals(value_raw, entry.value_widths, basis_rows(bases, "value_rows", head, entry.value_dim))
        values = values + floats(bases["value_mean"], np.float32)[head].astype(np.float64)
    keys = np.ascontiguousarray(key_raw).view(np.float32).astype(np.float64) if keys is None else keys
    values = np.ascontiguousarray(value_raw).view(np.float32).astype(np.float64) if values is None else values
    return keys, values


def coded_bytes(widths: tuple[int, ...]) -> int:
    eight, four, two = widths
    return 1 + eight + four // 2 + two // 4


def basis_rows(bases: object, name: str, head: int, dim: int) -> Vector:
    """The stored transform of a head, bfloat16 on disk, as (n_kept, dim) float64."""
    upper = floats(bases[name], np.uint16)[head].astype(np.uint32)
    return (upper << 16).view(np.float32).astype(np.float64).reshape(-1, dim)


def residuals(raw: Vector, widths: tuple[int, ...], rows: Vector) -> Vector:
    """Coded tokens (n, n_bytes) as (n, dim): each number is its level, moved to the middle of its step, times scale."""
    eight, four, _ = widths
    out = np.zeros((len(raw), rows.shape[1]))
    for token, line in enumerate(raw.tolist()):
        code, body = line[0], line[1:]
        scale = 0.0 if code == 0 else 2.0 ** ((code - 128) / 8)
        numbers = [level - 127.5 for level in body[:eight]]
        for byte in body[eight : eight + four // 2]:
            numbers += [byte % 16 - 7.5, byte // 16 - 7.5]
        for byte in body[eight + four // 2 :]:
            numbers += [byte // 4**place % 4 - 1.5 for place in range(4)]
        out[token] = scale * (np.array(numbers) @ rows)
    return out


def floats(column: object, dtype: type) -> Vector:
    """A fixed-size binary column as numbers (n_rows, n)."""
    return np.ascontiguousarray(raw_bytes(column)).view(dtype)


def raw_bytes(column: object) -> Vector:
    return np.array([np.frombuffer(line, np.uint8) for line in column.to_pylist()])
