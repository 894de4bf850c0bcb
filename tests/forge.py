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
from ragkv.archive.manifest import MANIFEST_FILE, Manifest, read_manifest


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


def edit_table(folder: Path, name: str, column: str, change: Callable[[list[Any]], None]) -> None:
    """Change the numbers or bytes of one column of a Parquet file in place and reseal."""
    table = pq.read_table(folder / name)
    values = table[column].to_pylist()
    change(values)
    place = table.schema.get_field_index(column)
    field = table.schema.field(column)
    pq.write_table(table.set_column(place, field, pa.array(values, field.type)), folder / name)
    reseal(folder)
