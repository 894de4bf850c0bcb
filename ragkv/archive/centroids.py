"""The one door to FAISS: centroid shards on disk, and k-means for very large cluster counts."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from ragkv.errors import ArchiveCorruptError, MissingExtraError

_RANGES_AT = 65
"""Where the file of an IndexScalarQuantizer gives the length of its first list."""


def faiss_kmeans(points: torch.Tensor, centroids: torch.Tensor, iterations: int, seed: int) -> torch.Tensor:
    """Refine `centroids` (n_heads, n_clusters, dim) on `points` (n_heads, n, dim), float32, one head after another.

    Every point is used (FAISS would otherwise sample 256 per centroid) and nothing is drawn at random, since the
    initial centroids are given.
    """
    faiss = _faiss()
    refined = torch.empty_like(centroids)
    for head, (head_points, start) in enumerate(zip(points, centroids, strict=True)):
        trainer = faiss.Kmeans(
            points.shape[-1],
            centroids.shape[1],
            niter=max(1, iterations),
            seed=seed,
            min_points_per_centroid=1,
            max_points_per_centroid=points.shape[1],
        )
        trainer.train(head_points.contiguous().cpu().numpy(), init_centroids=start.contiguous().cpu().numpy())
        refined[head] = torch.from_numpy(trainer.centroids).to(centroids)
    return refined


def write_centroids(path: Path, centroids: torch.Tensor) -> None:
    """Write centroids (n_rows, head_dim) as one inner-product FAISS index with a byte per number.

    Each dimension has its own range, from its smallest to its largest number.
    """
    faiss = _faiss()
    rows = centroids.float().cpu().numpy()
    kind = faiss.ScalarQuantizer.QT_8bit
    index = faiss.IndexScalarQuantizer(centroids.shape[1], kind, faiss.METRIC_INNER_PRODUCT)
    index.train(rows)
    index.add(rows)
    path.write_bytes(faiss.serialize_index(index).tobytes())


def read_centroids(path: Path, shape: tuple[int, int]) -> torch.Tensor:
    """Read a shard of `write_centroids`: float32 of `shape`, decoded as FAISS does.

    Raises
    ------
    ArchiveCorruptError
        If FAISS cannot parse the file or it holds another number of rows, another dimension or another kind of code.
    """
    faiss, raw = _faiss(), path.read_bytes()
    _check_lengths(path.name, raw)
    try:
        index = faiss.deserialize_index(np.frombuffer(raw, dtype=np.uint8))
    except (RuntimeError, MemoryError) as error:
        raise ArchiveCorruptError(f"{path.name}: not a FAISS index that can be read") from error
    if (index.ntotal, index.d) != shape:
        raise ArchiveCorruptError(f"{path.name}: holds {index.ntotal} x {index.d} centroids, the manifest says {shape}")
    if not isinstance(index, faiss.IndexScalarQuantizer) or index.sq.qtype != faiss.ScalarQuantizer.QT_8bit:
        raise ArchiveCorruptError(f"{path.name}: centroids are not stored as one byte per number")
    low, width = faiss.vector_to_array(index.sq.trained).reshape(2, shape[1])
    codes = faiss.vector_to_array(index.codes).reshape(shape)
    return torch.from_numpy(low + (codes.astype(np.float32) + np.float32(0.5)) / np.float32(255) * width)


def _check_lengths(name: str, raw: bytes) -> None:
    """Refuse another kind of index, and lists longer than the file, which FAISS would take memory for."""
    if raw[:4] != b"IxSQ":
        raise ArchiveCorruptError(f"{name}: centroids are not stored as one byte per number")
    at = _RANGES_AT
    for itemsize in (4, 1):  # the ranges of the dimensions, the codes
        length = int.from_bytes(raw[at : at + 8], "little")
        at += 8 + length * itemsize
        if at > len(raw):
            raise ArchiveCorruptError(f"{name}: not a FAISS index that can be read")


def _faiss() -> ModuleType:
    try:
        import faiss
    except ImportError as error:
        raise MissingExtraError(
            "FAISS is not installed; install one of the extras: pip install 'ragkv[cpu]' or 'ragkv[gpu]'"
        ) from error
    return faiss
