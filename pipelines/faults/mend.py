"""Checksums that hold again over files that were altered, so that what reads the files is met and not the checksums."""

from __future__ import annotations

import hashlib
import json
import stat
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ragkv.archive.manifest import MANIFEST_FILE, OWN_TRANSFORMS
from ragkv.archive.rows import ROWS_FILE
from ragkv.model.fingerprint import json_sha256

_CHECKSUMS = b"ragkv.row_groups.sha256"
_TAIL = 8
_LARGEST = 1 << 26


def read_json(path: Path) -> dict[str, Any] | None:
    """The body of a sealed file; None where it is none any more."""
    if not is_regular(path):
        return None
    try:
        body = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def write_json(path: Path, body: dict[str, Any]) -> None:
    """Write a sealed file with the checksum of its body."""
    body = {name: value for name, value in body.items() if name != "sha256"}
    try:
        path.write_text(json.dumps({**body, "sha256": json_sha256(body)}, indent=1) + "\n", encoding="utf-8")
    except RecursionError:  # nested deeper than Python writes: then the checksum cannot be made to hold
        path.write_text('{"format": ' + "[" * 100_000 + "]" * 100_000 + "}\n", encoding="utf-8")


def is_regular(path: Path) -> bool:
    """Whether a file stands there that can be read to its end."""
    try:
        found = path.stat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size <= _LARGEST


def mend(folder: Path) -> None:
    """Make every checksum of an archive hold for the files as they are now."""
    body = read_json(folder / MANIFEST_FILE)
    if body is None or not isinstance(body.get("files"), dict):
        return
    mend_rows(folder / ROWS_FILE)
    for name, entry in body["files"].items():
        path = folder / str(name)
        if isinstance(entry, dict) and "/" not in str(name) and is_regular(path):
            raw = path.read_bytes()
            covered = footer(raw) if name == ROWS_FILE else raw
            entry["bytes"], entry["sha256"] = len(raw), hashlib.sha256(covered).hexdigest()
            if name == OWN_TRANSFORMS:
                body["transforms"] = entry["sha256"]
    write_json(folder / MANIFEST_FILE, body)


def footer(raw: bytes) -> bytes:
    """What the checksum of a rows file covers."""
    length = int.from_bytes(raw[-_TAIL:-4], "little") + _TAIL
    return raw[-length:] if length <= len(raw) else raw


def mend_rows(path: Path) -> None:
    """Make the checksums of row groups in the footer hold, as far as the footer can be read."""
    if not is_regular(path):
        return
    raw = path.read_bytes()
    try:
        metadata = pq.read_metadata(pa.BufferReader(raw))
    except (pa.ArrowException, OSError):
        return
    said, start, sums = (metadata.metadata or {}).get(_CHECKSUMS, b""), 4, []
    for place in range(metadata.num_row_groups):
        group = metadata.row_group(place)
        last = group.column(group.num_columns - 1)
        stop = max(start, min(len(raw), last.data_page_offset + last.total_compressed_size))
        sums.append(hashlib.sha256(raw[start:stop]).hexdigest())
        start = stop
    new = "".join(sums).encode()
    if len(new) == len(said) > 0:
        path.write_bytes(raw.replace(said, new))
