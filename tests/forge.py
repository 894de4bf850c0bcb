"""Damage archives on purpose: files changed under checksums that hold again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ragkv.archive import publish, rows
from ragkv.archive.manifest import MANIFEST_FILE, OWN_TRANSFORMS, LayerEntry, Manifest, read_manifest
from ragkv.archive.parquet import plain_bytes
from ragkv.archive.rows import EXACT, ROWS_FILE, RowsWriter
from ragkv.archive.verify import verify_archive

LAYER = 1
"""The layer that is damaged."""


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


@dataclass
class Row:
    """One row of a rows file: a cluster of a KV head, or with cluster -1 all its exact tokens.

    ``positions`` (n,) int64 and ``payload`` (n, row_bytes) uint8, the token bytes.
    """

    layer: int
    kv_head: int
    cluster: int
    positions: torch.Tensor
    payload: torch.Tensor


def read_row_list(folder: Path) -> list[list[Row]]:
    """Every row of an archive, row group by row group, as any Parquet reader gives them."""
    found = []
    with pq.ParquetFile(folder / ROWS_FILE) as file:
        for place in range(file.num_row_groups):
            found.append([_row(line) for line in file.read_row_group(place).to_pylist()])
    return found


def _row(line: dict[str, Any]) -> Row:
    raw = torch.frombuffer(bytearray(line["key_value"]), dtype=torch.uint8)
    positions = torch.tensor(line["positions"], dtype=torch.int64)
    return Row(line["layer"], line["kv_head"], line["cluster"], positions, raw.view(len(positions), -1))


def write_row_list(folder: Path, groups: list[list[Row]]) -> None:
    """Write a rows file of these row groups and reseal."""
    with RowsWriter(folder / ROWS_FILE) as writer:
        for group in groups:
            tables = [
                rows._table(row.layer, row.kv_head, [row.cluster], [len(row.positions)], row.positions, row.payload)
                for row in group
            ]
            writer._write(pa.concat_tables(tables).combine_chunks())
    reseal(folder)


def edit_rows(folder: Path, change: Callable[[list[Row]], object]) -> None:
    """Change the clusters of `LAYER` in place, write them in the same row groups and reseal."""
    _edit(folder, change, exact=False)


def edit_exact(folder: Path, change: Callable[[list[Row]], object]) -> None:
    """The same of the exact tokens of `LAYER`, one row a KV head."""
    _edit(folder, change, exact=True)


def _edit(folder: Path, change: Callable[[list[Row]], object], *, exact: bool) -> None:
    groups = read_row_list(folder)
    change([row for group in groups for row in group if row.layer == LAYER and (row.cluster == EXACT) == exact])
    write_row_list(folder, groups)


def damage_group(folder: Path, layer: int) -> int:
    """Flip a bit of the first row group of clusters of a layer, and of nothing else; returns its number."""
    path, footer = folder / ROWS_FILE, pq.read_metadata(folder / ROWS_FILE)
    group = next(
        place
        for place, members in enumerate(read_row_list(folder))
        if members[0].layer == layer and members[0].cluster != EXACT
    )
    chunk = footer.row_group(group).column(footer.num_columns - 1)
    with path.open("rb+") as handle:
        handle.seek(chunk.data_page_offset + chunk.total_compressed_size - 1)  # the last byte of its last token
        [byte] = handle.read(1)
        handle.seek(-1, os.SEEK_CUR)
        handle.write(bytes([byte ^ 1]))
    return group


def edit_table(folder: Path, name: str, column: str, change: Callable[[list[Any]], None]) -> None:
    """Change the numbers or bytes of one column of a small table in place and reseal."""
    table = pq.read_table(folder / name)
    values = table[column].to_pylist()
    change(values)
    place, field = table.schema.get_field_index(column), table.schema.field(column)
    edited = table.set_column(place, field, pa.array(values, field.type)).combine_chunks()
    columns = [each.chunk(0) for each in edited.columns]
    (folder / name).write_bytes(plain_bytes(edited.schema.remove_metadata(), columns))
    changes = {"transforms": publish.hash_file(folder / name).sha256} if name == OWN_TRANSFORMS else {}
    reseal(folder, **changes)


def entry_of(folder: Path) -> LayerEntry:
    """The manifest's entry of the layer that is damaged."""
    return read_manifest(folder).layers[LAYER]


def only_that_layer(folder: Path) -> list[str]:
    """The faults of a folder, all of which must be in `LAYER`."""
    faults = verify_archive(folder)
    assert all(f"layer {LAYER}" in fault for fault in faults)
    return faults
