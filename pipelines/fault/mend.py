"""Make every checksum of a damaged archive hold again, so that what reads the damaged bytes is met itself."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ragkv.archive.files import FileEntry
from ragkv.archive.manifest import MANIFEST_FILE, read_manifest
from ragkv.archive.rows import ROWS_FILE, RowsFile
from ragkv.archive.transforms import TRANSFORMS_FILE

_CHECKSUMS = "ragkv.row_groups.sha256"
_TAIL = 8

Groups = list[tuple[int, int]]
"""First and last byte of each row group of a rows file."""


def row_groups(folder: Path) -> Groups:
    """Where the row groups of an undamaged archive lie."""
    rows = RowsFile(folder / ROWS_FILE, read_manifest(folder).files[ROWS_FILE]).groups
    return list(zip(rows.start.tolist(), rows.stop.tolist(), strict=True))


def mend(folder: Path, groups: Groups) -> None:
    """Mend row groups, files and the manifest's own checksum, as far as there is something to mend."""
    rows = folder / ROWS_FILE
    if _regular(rows):
        rows.write_bytes(mended_rows(rows.read_bytes(), groups))
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        edit_manifest(folder, lambda body: _entries(folder, body))


def mended_rows(raw: bytes, groups: Groups) -> bytes:
    """A rows file whose footer holds the checksums of its row groups as they are now."""
    footer, start = _footer(raw)
    at = footer.find(_CHECKSUMS.encode())
    if at < 0:
        return raw
    # They are plain text in the footer, one after another.
    now = "".join(hashlib.sha256(raw[first:last]).hexdigest() for first, last in groups).encode()
    places = [place for place in range(at + len(_CHECKSUMS), len(footer) - len(now)) if _hexadecimal(footer, place)]
    if places:
        footer = footer[: places[0]] + now + footer[places[0] + len(now) :]
    return raw[:start] + footer


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the JSON of a sealed file, and its checksum with it."""
    edit_sealed(folder / MANIFEST_FILE, change)


def edit_sealed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    if not _regular(path):
        return
    body = json.loads(path.read_text(encoding="utf-8"))
    body.pop("sha256", None)
    change(body)
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**body, "sha256": digest}) + "\n", encoding="utf-8")


class _Sink(io.BytesIO):
    """Where a Parquet file is written that stays readable when its writer closes it."""

    def close(self) -> None:
        pass


def write_rows(path: Path, tables: Sequence[pa.Table], **options: Any) -> Groups:
    """Write a rows file of one row group a table, with its checksums; returns where they lie."""
    sink = _Sink()
    plain: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    writer, groups, digests = pq.ParquetWriter(sink, tables[0].schema, **{**plain, **options}), Groups(), []
    for table in tables:
        first = sink.tell()
        writer.write_table(table, row_group_size=max(1, len(table)))
        groups.append((first, sink.tell()))
        digests.append(hashlib.sha256(sink.getvalue()[first:]).hexdigest())
    writer.add_key_value_metadata({_CHECKSUMS: "".join(digests)})
    writer.close()
    path.write_bytes(sink.getvalue())
    return groups


def read_groups(path: Path) -> list[pa.Table]:
    """The tables of a rows file, one a row group."""
    with pq.ParquetFile(path) as file:
        return [file.read_row_group(place) for place in range(file.num_row_groups)]


def _entries(folder: Path, body: dict[str, Any]) -> None:
    for name, entry in body["files"].items():
        if _regular(folder / name) and isinstance(entry, dict):
            found = _entry(folder / name)
            entry.update(bytes=found.bytes, sha256=found.sha256)
            if name == TRANSFORMS_FILE:
                body["transforms"] = found.sha256


def _entry(path: Path) -> FileEntry:
    raw = path.read_bytes()
    hashed = _footer(raw)[0] if path.name == ROWS_FILE else raw
    return FileEntry(len(raw), hashlib.sha256(hashed).hexdigest())


def _footer(raw: bytes) -> tuple[bytes, int]:
    start = max(0, len(raw) - _TAIL - int.from_bytes(raw[-_TAIL:-4], "little"))
    return raw[start:], start


def _hexadecimal(raw: bytes, place: int) -> bool:
    return all(byte in b"0123456789abcdef" for byte in raw[place : place + 64])


def _regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False
