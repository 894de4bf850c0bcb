"""Damage archives on purpose: files changed under checksums that hold again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from ragkv import publish
from ragkv.manifest import MANIFEST_FILE, Manifest, read_manifest
from ragkv.rows import Rows, read_rows, write_rows


def listing(folder: Path) -> dict[str, tuple[int, str]]:
    """Time of change and SHA-256 of every file below `folder`; folders too, without a hash."""
    return {
        found.relative_to(folder).as_posix(): (
            found.stat().st_mtime_ns,
            hashlib.sha256(found.read_bytes()).hexdigest() if found.is_file() else "",
        )
        for found in folder.rglob("*")
    }


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below `folder`."""
    return {name: digest for name, (_, digest) in listing(folder).items() if digest}


def reseal(folder: Path, **changes: Any) -> Manifest:
    """Write the manifest again with `changes` and the checksums of the files as they are now."""
    manifest = dataclasses.replace(read_manifest(folder), **changes)
    (folder / MANIFEST_FILE).unlink()
    return publish.seal(folder, manifest)


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], None], *, checksum: bool = True) -> None:
    """Change the manifest's JSON; with `checksum` its own checksum is made to hold again."""
    path = folder / MANIFEST_FILE
    body = json.loads(path.read_text(encoding="utf-8"))
    old = body.pop("sha256")
    change(body)
    new = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**body, "sha256": new if checksum else old}) + "\n", encoding="utf-8")


def edit_rows(
    folder: Path, layer: int, change: Callable[[Rows, Rows], None], *, cuts: list[list[int]] | None = None
) -> None:
    """Change the exact and archived rows of a layer in place, write them and reseal.

    `cuts` are the cluster sizes per KV head at which row groups may be closed; the true ones by default.
    """
    manifest = read_manifest(folder)
    entry = manifest.layers[layer]
    path = folder / entry.rows_file
    rows = read_rows(path, entry.key_dim, getattr(torch, manifest.fingerprint.dtype), exact_only=False)
    n_exact = entry.n_kv_heads * entry.exact_tokens
    exact, archived = part(rows, slice(0, n_exact)), part(rows, slice(n_exact, None))
    sizes = pq.read_table(folder / entry.prototypes_file)["size"].to_pylist()
    change(exact, archived)
    write_rows(path, exact, archived, cuts or [list(head) for head in split(sizes, entry.clusters)])
    reseal(folder)


def part(rows: Rows, which: slice) -> Rows:
    return Rows(**{field.name: getattr(rows, field.name)[which].clone() for field in dataclasses.fields(Rows)})


def split(numbers: list[int], lengths: tuple[int, ...]) -> list[list[int]]:
    """Cut a list into runs of `lengths`."""
    starts = [sum(lengths[:place]) for place in range(len(lengths))]
    return [numbers[start : start + length] for start, length in zip(starts, lengths, strict=True)]
