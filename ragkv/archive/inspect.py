"""Describe an archive in plain values, from its manifest and the sizes of its clusters; no model is needed."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ragkv.archive.manifest import TOKENS_FILE, LayerEntry, Manifest, read_manifest
from ragkv.errors import ArchiveCorruptError
from ragkv.recipe import Recipe


def describe_archive(path: str | Path) -> dict[str, Any]:
    """What the archive in the folder `path` holds: strings, numbers, lists and dicts only, sizes in bytes.

    Checksums are not checked here; `verify_archive` does that.

    Raises
    ------
    ArchiveNotFoundError, ArchiveFormatError, ArchiveCorruptError
        If there is no archive, of another version, or its cluster sizes cannot be read.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    body = json.loads(manifest.to_json())
    by_kind, dense = _file_bytes(manifest), manifest.dense_bytes
    on_disk = sum(by_kind.values())
    return {
        **{name: body[name] for name in ("version", "created_by", "document", "model", "layout", "seams", "recipe")},
        "counts": {**body["counts"], "n_tokens": manifest.n_tokens},
        "layers": [_describe_layer(folder, layer, manifest.recipe) for layer in manifest.layers],
        "bytes": {**by_kind, "total": on_disk},
        "dense_bytes": dense,
        "disk_over_dense": on_disk / dense if dense else None,
    }


def _describe_layer(folder: Path, layer: LayerEntry, recipe: Recipe) -> dict[str, Any]:
    counts, sizes = layer.clusters, _cluster_sizes(folder, layer) if layer.clusters else []
    return {
        "index": layer.index,
        "kind": "global" if layer.window is None else "sliding",
        "window": layer.window,
        "n_kv_heads": layer.n_kv_heads,
        "key_dim": layer.key_dim,
        "value_dim": layer.value_dim,
        "exact_tokens": layer.exact_tokens,
        "codecs": _codecs(layer, recipe),
        "clusters": {"min": min(counts), "mean": fmean(counts), "max": max(counts)} if counts else None,
        "cluster_size": {"min": min(sizes), "median": median(sizes), "max": max(sizes)} if sizes else None,
    }


def _codecs(layer: LayerEntry, recipe: Recipe) -> dict[str, str] | None:
    """Codec of keys and of values; None where every token is exact."""
    return dict(zip(("key", "value"), recipe.codecs(layer.index), strict=True)) if layer.clusters else None


def _cluster_sizes(folder: Path, layer: LayerEntry) -> list[int]:
    try:
        column = pq.read_table(folder / layer.prototypes_file, columns=["size"])["size"]
    except (pa.ArrowException, OSError, KeyError) as error:
        raise ArchiveCorruptError(
            f"{layer.prototypes_file}: cluster sizes cannot be read ({' '.join(str(error).split())})"
        ) from error
    sizes: list[int] = column.to_pylist()
    return sizes


def _file_bytes(manifest: Manifest) -> dict[str, int]:
    """Bytes by kind of file; the manifest itself is not counted."""
    files, layers = manifest.files, manifest.layers
    clustered = [layer for layer in layers if layer.clusters]
    return {
        "rows": sum(files[layer.rows_file].bytes for layer in clustered),
        "exact": sum(files[layer.exact_file].bytes for layer in layers),
        "centroids": sum(files[layer.centroids_file].bytes for layer in clustered),
        "prototypes": sum(files[layer.prototypes_file].bytes for layer in clustered),
        "bases": sum(files[layer.bases_file].bytes for layer in clustered),
        "tokens": files[TOKENS_FILE].bytes,
    }
