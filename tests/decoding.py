"""Archives read back in float64 without any of ragkv's own decoding: what the tests compare recall with."""

from __future__ import annotations

from dataclasses import dataclass

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from ragkv import Archive

Vector = np.ndarray
Pair = tuple[Vector, Vector]
Widths = tuple[int, int, int]
"""How many coefficients of a vector take eight, four and two bits."""


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
    assert set(archive.manifest.recipe.codecs(index)) == {"lossless"}
    table = of_layer(pq.read_table(archive.path / "rows.parquet"), index)
    exact = pc.equal(table["cluster"], -1)
    table = pa.concat_tables([table.filter(pc.invert(exact)), table.filter(exact)])
    counts = np.array([len(positions) for positions in table["positions"].to_pylist()], dtype=np.int64)
    raw = bytearray(b"".join(table["key_value"].to_pylist()))
    both = torch.frombuffer(raw, dtype=getattr(torch, archive.manifest.fingerprint.dtype))
    both = both.view(-1, entry.key_dim + entry.value_dim)
    return Tokens(
        kv_head=torch.from_numpy(np.repeat(table["kv_head"].to_numpy().astype(np.int64), counts)),
        cluster=torch.from_numpy(np.repeat(table["cluster"].to_numpy().astype(np.int64), counts)),
        position=torch.tensor([p for positions in table["positions"].to_pylist() for p in positions]),
        keys=both[:, : entry.key_dim],
        values=both[:, entry.key_dim :],
    )


@dataclass(frozen=True)
class Decoded:
    """One layer with clusters in float64, KV head by KV head.

    ``exact`` holds the keys and values of a head's exact tokens; ``clusters[head][label]`` those of a cluster;
    ``centroids[head]`` (n_clusters, key_dim) and ``means[head]`` (n_clusters, value_dim) its coded prototypes;
    ``variance[head]`` and ``spread[head]`` (n_clusters,); ``axes[head]`` (n_axes, key_dim), and ``reach[head]``
    (n_clusters, n_axes), how far keys lie along them.
    """

    exact: list[Pair]
    clusters: list[list[Pair]]
    centroids: list[Vector]
    means: list[Vector]
    variance: list[Vector]
    spread: list[Vector]
    axes: list[Vector]
    reach: list[Vector]


def decoded(archive: Archive, index: int) -> Decoded:
    """Read a layer of a float32 archive that has its own transforms, as the format document describes it."""
    folder, entry, recipe = archive.path, archive.manifest.layers[index], archive.manifest.recipe
    prototypes = pq.read_table(folder / "prototypes.parquet")
    shard = faiss.read_index(str(folder / "centroids.faiss")).reconstruct_n(0, len(prototypes))
    own = prototypes["layer"].to_numpy() == index
    nibbles = np.rint(shard[own] + 7.5)
    prototypes = of_layer(prototypes, index)
    transforms = of_layer(pq.read_table(folder / "transforms.parquet"), index).to_pylist()
    rows = of_layer(pq.read_table(folder / "rows.parquet"), index).to_pylist()
    head_of = prototypes["kv_head"].to_numpy()
    value_codes, spreads = (raw_bytes(prototypes[name]) for name in ("value_code", "spreads"))
    found = Decoded([], [], [], [], [], [], [], [])
    for head in range(entry.n_kv_heads):
        basis, of_head = transforms[head], head_of == head
        key_codes = (nibbles[of_head, 0::2] + 16 * nibbles[of_head, 1::2]).astype(np.uint8)
        means = (mean_of(basis, "key"), mean_of(basis, "value"))
        found.centroids.append(means[0] + coded(key_codes, basis, "key_prototypes", entry.key_dim))
        found.means.append(means[1] + coded(value_codes[of_head], basis, "value_prototypes", entry.value_dim))
        scales = scale_of(spreads[of_head])
        found.variance.append(scales[:, 0] ** 2)
        found.spread.append(scales[:, 1])
        found.reach.append(scales[:, 2:])
        found.axes.append(bfloat16(basis["key_axes"]).reshape(-1, entry.key_dim))
        own_rows = [row for row in rows if row["kv_head"] == head]
        exact = [row for row in own_rows if row["cluster"] == -1]
        assert len(exact) == 1
        found.exact.append(exact_pair(exact[0], recipe.exact_codecs(index), (entry.key_dim, entry.value_dim)))
        by_label = {row["cluster"]: row for row in own_rows}
        prototypes_of = zip(found.centroids[head], found.means[head], strict=True)
        dims = (entry.key_dim, entry.value_dim)
        found.clusters.append(
            [cluster_pair(by_label[label], basis, pair, dims) for label, pair in enumerate(prototypes_of)]
        )
    return found


def cluster_pair(row: dict, basis: dict, prototypes: Pair, dims: tuple[int, int]) -> Pair:
    """Keys and values of a cluster's tokens: numbers as they are, or residuals to its coded prototypes."""
    names, split = ("key_rows", "value_rows"), []
    sizes = [
        1 + n_bytes(widths_of(basis, name)) if any(widths_of(basis, name)) else 4 * dim
        for name, dim in zip(names, dims, strict=True)
    ]
    raw = np.frombuffer(row["key_value"], np.uint8).reshape(len(row["positions"]), sum(sizes))
    parts = (raw[:, : sizes[0]], raw[:, sizes[0] :])
    for name, part, dim, prototype in zip(names, parts, dims, prototypes, strict=True):
        if any(widths_of(basis, name)):
            split.append(prototype + scale_of(part[:, :1]) * coded(part[:, 1:], basis, name, dim))
        else:
            split.append(np.ascontiguousarray(part).view(np.float32).astype(np.float64))
    return split[0], split[1]


def exact_pair(row: dict, codecs: tuple[str, str], dims: tuple[int, int]) -> Pair:
    """Keys and values of exact tokens: numbers as they are, or a float32 scale and a signed byte for each number."""
    split, at = [], 0
    raw = np.frombuffer(row["key_value"], np.uint8).reshape(len(row["positions"]), -1)
    for codec, dim in zip(codecs, dims, strict=True):
        end = at + (4 * dim if codec == "lossless" else 4 + dim)
        part, at = np.ascontiguousarray(raw[:, at:end]), end
        if codec == "lossless":
            split.append(part.view(np.float32).astype(np.float64))
        else:
            scale = np.ascontiguousarray(part[:, :4]).view(np.float32).astype(np.float64)
            split.append(scale * np.ascontiguousarray(part[:, 4:]).view(np.int8))
    assert at == raw.shape[1]
    return split[0], split[1]


def coded(codes: Vector, basis: dict, name: str, dim: int) -> Vector:
    """Codes (n, n_bytes) as vectors (n, dim): levels, moved to the middle of their step, times the rows of a basis."""
    return numbers_of(codes, widths_of(basis, name)) @ bfloat16(basis[name]).reshape(-1, dim)


def numbers_of(codes: Vector, widths: Widths) -> Vector:
    """Codes (n, n_bytes) as coefficients (n, n_kept): runs of 8, 4 and 2 bits.

    A byte of the last two holds coefficients that lie half, or quarters, of their run apart, the first lowest.
    """
    eight, four, two = widths
    assert codes.shape[1] == n_bytes(widths)
    first, second, third = np.split(codes.astype(np.int64), [eight, eight + four // 2], axis=1)
    pairs = [third // 4**place % 4 - 1.5 for place in range(4)] if two else []
    return np.concatenate([first - 127.5, second % 16 - 7.5, second // 16 - 7.5, *pairs], axis=1)


def widths_of(basis: dict, name: str) -> Widths:
    return basis[f"{name}_8"], basis[f"{name}_4"], basis[f"{name}_2"]


def n_bytes(widths: Widths) -> int:
    eight, four, two = widths
    return eight + four // 2 + two // 4


def mean_of(basis: dict, name: str) -> Vector:
    return np.frombuffer(basis[f"{name}_mean"], np.float32).astype(np.float64)


def scale_of(codes: Vector) -> Vector:
    """Scale codes as scales: eighths of an octave around 1, and 0 for 0."""
    return np.where(codes == 0, 0, 2.0 ** ((codes.astype(float) - 128) / 8))


def bfloat16(raw: bytes) -> Vector:
    upper = np.frombuffer(raw, np.uint16).astype(np.uint32)
    return (upper << 16).view(np.float32).astype(np.float64)


def of_layer(table: pa.Table, index: int) -> pa.Table:
    return table.filter(pc.equal(table["layer"], index))


def raw_bytes(column: pa.ChunkedArray) -> Vector:
    return np.array([np.frombuffer(line, np.uint8) for line in column.to_pylist()])
