"""The FAISS shard: coded centroids of all layers as one index with four bits to a column.

A coefficient of eight bits is two columns, its low and its high four bits: so every column is a nibble, and what FAISS
decodes (the nibble less 7.5) is the coefficient in steps of its quantiser, whatever bits it has.
"""

from __future__ import annotations

import numpy as np
import torch

from ragkv.errors import ArchiveCorruptError, MissingExtraError

CENTROIDS_FILE = "centroids.faiss"
_KIND, _QT_4BIT, _INNER_PRODUCT = b"IxSQ", 1, 0
_LOW, _WIDTH = -8.0, 15.0
"""FAISS decodes a code c as low + (c + 0.5) / 15 * width: with these, as c - 7.5."""


def write_centroids(codes: torch.Tensor) -> bytes:
    """The bytes of a shard of `codes` (n_centroids, n_bytes) uint8, as FAISS writes them.

    Raises
    ------
    MissingExtraError
        If FAISS is not installed.
    """
    try:
        import faiss
    except ImportError as error:
        raise MissingExtraError(
            "FAISS is not installed; install one of the extras: pip install 'ragkv[cpu]' or 'ragkv[gpu]'"
        ) from error
    raw = codes.cpu().contiguous().numpy()
    n_columns = 2 * raw.shape[1]
    index = faiss.IndexScalarQuantizer(n_columns, faiss.ScalarQuantizer.QT_4bit, faiss.METRIC_INNER_PRODUCT)
    trained = np.repeat(np.asarray([_LOW, _WIDTH], dtype=np.float32), n_columns)
    faiss.copy_array_to_vector(trained, index.sq.trained)
    index.is_trained = True
    index.add_sa_codes(raw)
    return bytes(faiss.serialize_index(index).tobytes())


def read_centroids(raw: bytes, shape: tuple[int, int]) -> torch.Tensor:
    """The codes (n_centroids, n_bytes) uint8 in the bytes of a shard; parsed here, and compared with every field.

    Raises
    ------
    ArchiveCorruptError
        If it is another kind of index, or of another number or size of centroids than `shape`.
    """
    head = shard_head(*shape)
    if len(raw) != len(head) + shape[0] * shape[1] or raw[:41] != head[:41] or raw[49 : len(head)] != head[49:]:
        raise ArchiveCorruptError(
            f"{CENTROIDS_FILE}: not a FAISS shard of {shape[0]} centroids of {shape[1]} bytes, as the manifest says"
        )
    codes = np.frombuffer(raw, dtype=np.uint8, offset=len(head)).reshape(shape)
    return torch.from_numpy(codes.copy())


def shard_head(n_centroids: int, n_bytes: int) -> bytes:
    """All bytes of a shard before its codes; the eight from 41 on are not looked at."""
    d = 2 * n_bytes

    def number(value: int, size: int) -> bytes:
        return value.to_bytes(size, "little")

    fields = [_KIND, number(d, 4), number(n_centroids, 8), number(1 << 20, 8) * 2, b"\x01", number(_INNER_PRODUCT, 4)]
    fields += [number(_QT_4BIT, 4), bytes(8), number(d, 8), number(n_bytes, 8), number(2 * d, 8)]
    trained = np.repeat(np.asarray([_LOW, _WIDTH], dtype="<f4"), d).tobytes()
    return b"".join([*fields, trained, number(n_centroids * n_bytes, 8)])
