"""Damage archives on purpose: files changed under checksums that hold again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ragkv.archive import publish
from ragkv.archive.manifest import MANIFEST_FILE, LayerEntry, Manifest, read_manifest
from ragkv.archive.rows import Rows, read_rows, write_rows
from ragkv.archive.verify import verify_archive


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


def edit_rows(folder: Path, layer: int, change: Callable[[Rows], None], *, cuts: list[list[int]] | None = None) -> None:
    """Change the archived rows of a layer in place, write them and reseal.

    `cuts` are the cluster sizes per KV head at which row groups may be closed; the true ones by default.
    """
    entry = read_manifest(folder).layers[layer]
    rows = read_rows(folder / entry.rows_file)
    sizes = pq.read_table(folder / entry.prototypes_file)["size"].to_pylist()
    change(rows)
    write_rows(folder / entry.rows_file, rows, cuts or split(sizes, entry.clusters))
    reseal(folder)


def edit_exact(folder: Path, layer: int, change: Callable[[Rows], None]) -> None:
    """Change the exact rows of a layer in place, write them and reseal."""
    path = folder / read_manifest(folder).layers[layer].exact_file
    rows = read_rows(path)
    change(rows)
    write_rows(path, rows)
    reseal(folder)


def edit_table(folder: Path, name: str, column: str, change: Callable[[list[Any]], None]) -> None:
    """Change the numbers or bytes of one column of a Parquet file in place and reseal."""
    table = pq.read_table(folder / name)
    values = table[column].to_pylist()
    change(values)
    place = table.schema.get_field_index(column)
    field = table.schema.field(column)
    pq.write_table(table.set_column(place, field, pa.array(values, field.type)), folder / name)
    reseal(folder)


def entry_of(folder: Path) -> LayerEntry:
    """The manifest's entry of the layer that is damaged."""
    return read_manifest(folder).layers[1]


def first_pair(folder: Path) -> int:
    """Index of the first archived row of that layer that is in one cluster with the row after it."""
    sizes = pq.read_table(folder / entry_of(folder).prototypes_file)["size"].to_pylist()
    place = next(cluster for cluster, size in enumerate(sizes) if size > 1)
    return int(sum(sizes[:place]))


def only_layer_one(folder: Path) -> list[str]:
    """The faults of a folder, all of which must be in layer 1."""
    faults = verify_archive(folder)
    assert all("layers/001." in fault for fault in faults)
    return faults


def split(numbers: list[int], lengths: tuple[int, ...]) -> list[list[int]]:
    """Cut a list into runs of `lengths`."""
    starts = [sum(lengths[:place]) for place in range(len(lengths))]
    return [numbers[start : start + length] for start, length in zip(starts, lengths, strict=True)]
