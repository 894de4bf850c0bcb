"""Describe an archive in plain values, from its manifest and the sizes of its clusters; no model is needed."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ragkv.archive.manifest import LayerEntry
from ragkv.archive.snapshot import Snapshot, read_snapshot
from ragkv.recipe import Recipe


def describe_archive(path: str | Path) -> dict[str, Any]:
    """What the archive in the folder `path` holds: strings, numbers, lists and dicts only, sizes in bytes.

    The checksums of its archived rows are not looked at here; `verify_archive` does that.

    Raises
    ------
    ArchiveNotFoundError, ArchiveFormatError, ArchiveCorruptError, ArchiveReadError
        If there is no archive, of another version, damaged, or it cannot be read now.
    """
    snapshot = read_snapshot(path)
    manifest = snapshot.manifest
    body = json.loads(manifest.to_json())
    by_file, dense = {name.split(".")[0]: entry.bytes for name, entry in manifest.files.items()}, manifest.dense_bytes
    on_disk = sum(by_file.values())
    names = ("version", "created_by", "document", "model", "layout", "seams", "recipe", "policy", "transforms")
    return {
        **{name: body[name] for name in names},
        "counts": {**body["counts"], "n_tokens": manifest.n_tokens},
        "layers": [_describe_layer(snapshot, layer, manifest.recipe) for layer in manifest.layers],
        "bytes": {**by_file, "total": on_disk},
        "dense_bytes": dense,
        "disk_over_dense": on_disk / dense if dense else None,
    }


def _describe_layer(snapshot: Snapshot, layer: LayerEntry, recipe: Recipe) -> dict[str, Any]:
    sizes: list[int] = []
    if layer.clusters:
        held = snapshot.prototypes[layer.index].sizes
        sizes = held[held > 0].tolist()
    counts = layer.clusters
    return {
        "index": layer.index,
        "kind": "global" if layer.window is None else "sliding",
        "window": layer.window,
        "n_kv_heads": layer.n_kv_heads,
        "key_dim": layer.key_dim,
        "value_dim": layer.value_dim,
        "exact_tokens": layer.exact_tokens,
        "codecs": dict(zip(("key", "value"), recipe.codecs(layer.index), strict=True)) if counts else None,
        "clusters": {"min": min(counts), "mean": fmean(counts), "max": max(counts)} if counts else None,
        "cluster_size": {"min": min(sizes), "median": median(sizes), "max": max(sizes)} if sizes else None,
    }
