"""The one door to FAISS: centroid shards on disk, and k-means for very large cluster counts."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from ragkv.errors import ArchiveCorruptError, MissingExtraError

_SCALAR_KINDS = {torch.bfloat16: "QT_bf16", torch.float16: "QT_fp16"}


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
    """Write centroids (n_rows, head_dim), bit for bit, as one flat inner-product FAISS index.

    bfloat16 and float16 become scalar-quantiser codes of the same dtype, float32 a plain flat index.
    """
    faiss = _faiss()
    dim = centroids.shape[1]
    kind = _SCALAR_KINDS.get(centroids.dtype)
    if kind is None:
        index = faiss.IndexFlatIP(dim)
    else:
        index = faiss.IndexScalarQuantizer(dim, getattr(faiss.ScalarQuantizer, kind), faiss.METRIC_INNER_PRODUCT)
    index.add(centroids.float().cpu().numpy())
    path.write_bytes(faiss.serialize_index(index).tobytes())


def read_centroids(path: Path, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Read a shard of `write_centroids` as a tensor of `shape` and `dtype`.

    Raises
    ------
    ArchiveCorruptError
        If FAISS cannot parse the file or it holds another number of rows, another dimension or another dtype.
    """
    faiss = _faiss()
    try:
        index = faiss.deserialize_index(np.frombuffer(path.read_bytes(), dtype=np.uint8))
    except RuntimeError as error:
        raise ArchiveCorruptError(f"{path.name}: not a FAISS index that can be read") from error
    if (index.ntotal, index.d) != shape:
        raise ArchiveCorruptError(f"{path.name}: holds {index.ntotal} x {index.d} centroids, the manifest says {shape}")
    codes = getattr(index, "codes", None)
    n_bytes = shape[0] * shape[1] * dtype.itemsize
    if codes is None or codes.size() != n_bytes:
        raise ArchiveCorruptError(f"{path.name}: centroids are not stored as {dtype}")
    raw = faiss.vector_to_array(codes)
    return torch.from_numpy(raw).view(dtype).reshape(shape) if n_bytes else torch.empty(shape, dtype=dtype)


def _faiss() -> ModuleType:
    try:
        import faiss
    except ImportError as error:
        raise MissingExtraError(
            "FAISS is not installed; install one of the extras: pip install 'ragkv[cpu]' or 'ragkv[gpu]'"
        ) from error
    return faiss
