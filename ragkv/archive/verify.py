"""Check every promise of an archive, without its model: checksums first, then the invariants of the format.

The rules are those of ``indexes/FORMAT.md``. Nothing is written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from ragkv.archive.files import is_there, local_path, system_errors
from ragkv.archive.manifest import MANIFEST_FILE, LayerEntry, Manifest, read_manifest
from ragkv.archive.parquet import binary_rows, flat_lists, integers
from ragkv.archive.payload import Payload, fits, from_bits
from ragkv.archive.rows import LENGTH_BYTES, ROWS_FILE, payload_start
from ragkv.archive.snapshot import Snapshot, read_snapshot
from ragkv.archive.tokens import NO_OFFSET, TOKENS_FILE
from ragkv.archive.transforms import Transforms
from ragkv.errors import (
    ArchiveCorruptError,
    ArchiveFormatError,
    ArchiveNotFoundError,
    ConfigError,
)

_DAMAGE = (ArchiveNotFoundError, ArchiveFormatError, ArchiveCorruptError, ConfigError)


def verify_archive(path: str | Path, *, transforms: Callable[[str], Transforms] | None = None) -> list[str]:
    """Check the archive in the folder `path`; returns one line per fault, none if it is sound.

    No model is needed and nothing is written. All that is checked is of one archive, also while it is being replaced. A
    file whose checksum does not hold is not looked into any further.

    Raises
    ------
    ArchiveNotFoundError
        If there is no manifest; any other damage is returned.
    ArchiveReadError
        If the system did not let it be read just now.
    """
    folder = local_path(path)
    try:
        snapshot = read_snapshot(folder, transforms=transforms)
    except ArchiveNotFoundError as error:
        with system_errors(f"{str(folder)!r}: {MANIFEST_FILE}"):
            if not is_there(folder / MANIFEST_FILE):
                raise
        return [str(error)]
    except (ArchiveFormatError, ArchiveCorruptError, ConfigError) as error:
        return [str(error)]
    faults = [*_extra_files(folder, snapshot.manifest), *_token_faults(snapshot)]
    groups = len(snapshot.rows.groups.rows)
    damaged = []
    for group in range(groups):
        try:
            snapshot.rows.require(np.asarray([group]))
        except ArchiveCorruptError:
            damaged.append(group)
            faults.append(f"{ROWS_FILE}: the SHA-256 of row group {group} is not that of its footer")
    for entry in snapshot.manifest.layers:
        if entry.clusters and not any(
            first <= g < last for g in damaged for first, last in [snapshot.groups[entry.index]]
        ):
            faults += _collected(f"{ROWS_FILE}: layer {entry.index}", _layer_faults(snapshot, entry))
    return faults


def is_sound(path: str | Path, manifest: Manifest, *, transforms: Callable[[str], Transforms] | None = None) -> bool:
    """Whether the archive at `path` is that of `manifest` and every checksum of it holds.

    Raises
    ------
    ArchiveReadError
        If the system did not let it be read just now.
    """
    try:
        snapshot = read_snapshot(path, transforms=transforms)
        snapshot.rows.require(np.arange(len(snapshot.rows.groups.rows)))
    except _DAMAGE:
        return False
    return snapshot.manifest == manifest


def _collected(name: str, found: Iterator[str]) -> list[str]:
    """Run one check to its end; a file that cannot be read is its last fault."""
    faults: list[str] = []
    try:
        with system_errors(name):
            for fault in found:
                faults.append(fault)
    except ArchiveCorruptError as error:
        faults.append(str(error))
    return faults


def _extra_files(folder: Path, manifest: Manifest) -> Iterator[str]:
    try:
        with system_errors(f"archive {str(folder)!r}"):
            found = sorted(os.listdir(folder))
            if read_manifest(folder) != manifest:
                return  # it was replaced meanwhile: these are the files of another archive
    except _DAMAGE:
        return  # it is being replaced
    for name in found:
        if name != MANIFEST_FILE and name not in manifest.files:
            yield f"{name}: not in the manifest"


def _token_faults(snapshot: Snapshot) -> Iterator[str]:
    tokens, n_prefix = snapshot.tokens, snapshot.manifest.prefix_tokens
    outside = (tokens.start == NO_OFFSET) & (tokens.end == NO_OFFSET)
    if not bool(outside[:n_prefix].all()) or bool(outside[n_prefix:].any()):
        yield f"{TOKENS_FILE}: the tokens without offsets are not the {n_prefix} of the prefix"
    start, end = tokens.start[n_prefix:], tokens.end[n_prefix:]
    if bool((start < 0).any()) or bool((end < start).any()):
        yield f"{TOKENS_FILE}: a document token has a negative offset or ends before it starts"
    if bool((start.diff() < 0).any()) or bool((end.diff() < 0).any()):
        yield f"{TOKENS_FILE}: character offsets go backwards"


def _layer_faults(snapshot: Snapshot, entry: LayerEntry) -> Iterator[str]:
    """Clusters of a layer: in order, of the sizes that are stored, and a partition of the archived positions."""
    assert snapshot.transforms is not None
    name, manifest = f"{ROWS_FILE}: layer {entry.index}", snapshot.manifest
    payload = snapshot.transforms.layers[entry.index].payload(getattr(torch, manifest.fingerprint.dtype))
    first, last = snapshot.groups[entry.index]
    table = snapshot.rows.columns(list(range(first, last)), ["layer", "kv_head", "cluster", "positions", "key_value"])
    heads = np.repeat(np.arange(entry.n_kv_heads), entry.clusters)
    clusters = np.concatenate([np.arange(count) for count in entry.clusters])
    right = (("layer", np.full(len(heads), entry.index)), ("kv_head", heads), ("cluster", clusters))
    if any(not np.array_equal(integers(table, column), wanted) for column, wanted in right):
        yield f"{name}: its rows are not its clusters in order of KV head and cluster"
        return
    sizes = snapshot.prototypes[entry.index].sizes
    flat = sizes[sizes > 0].long()
    if bool((sizes.long().sum(1) != manifest.archived_tokens).any()):
        yield f"{name}: sizes of clusters do not add up to the archived tokens of every KV head"
        return
    lengths = torch.from_numpy(table.column("positions").combine_chunks().value_lengths().to_numpy().astype(np.int64))
    if not torch.equal(lengths, flat):
        yield f"{name}: a cluster has another number of positions than its size says"
        return
    raw = binary_rows(table.column("key_value"))
    if any(len(own) != size * payload.row_bytes for own, size in zip(raw, flat.tolist(), strict=True)):
        yield f"{name}: a cluster has another number of bytes than its size says"
        return
    yield from _position_faults(snapshot, entry, flat_lists(table.column("positions")), flat)
    yield from _group_faults(snapshot, entry, heads, raw)
    yield from _finite_faults(name, raw, payload)


def _position_faults(
    snapshot: Snapshot, entry: LayerEntry, positions: torch.Tensor, sizes: torch.Tensor
) -> Iterator[str]:
    manifest = snapshot.manifest
    begin, end = manifest.head_tokens, manifest.head_tokens + manifest.archived_tokens
    inside = torch.ones(len(positions), dtype=torch.bool)
    inside[sizes.cumsum(0)[:-1]] = False
    inside[0] = False
    if bool((positions.diff() <= 0)[inside[1:]].any()):
        yield f"{ROWS_FILE}: layer {entry.index}: the positions of a cluster are not in order"
    by_head = positions.view(entry.n_kv_heads, -1)
    wrong = (by_head.sort(dim=1).values != torch.arange(begin, end)).any(1)
    for head in wrong.nonzero().flatten().tolist():
        yield f"{ROWS_FILE}: layer {entry.index}, kv_head {head} does not hold every position of [{begin}, {end}) once"


def _group_faults(snapshot: Snapshot, entry: LayerEntry, heads: np.ndarray, raw: list[memoryview]) -> Iterator[str]:
    """Row groups of one KV head, whose bytes lie where recall looks for them without decoding."""
    rows, at = snapshot.rows, 0
    for group in range(*snapshot.groups[entry.index]):
        stop = at + int(rows.groups.rows[group])
        if (heads[at:stop] != heads[at]).any():
            yield f"{ROWS_FILE}: layer {entry.index}: row group {group} holds more than one KV head"
        wanted = b"".join(len(own).to_bytes(LENGTH_BYTES, "little") + bytes(own) for own in raw[at:stop])
        start = payload_start(rows, group, len(wanted) - LENGTH_BYTES * (stop - at))
        if rows.mapped[start : start + len(wanted)].numpy().tobytes() != wanted:
            yield f"{ROWS_FILE}: layer {entry.index}: the tokens of row group {group} are not one plain page"
        at = stop


def _finite_faults(name: str, raw: list[memoryview], payload: Payload) -> Iterator[str]:
    """Lossless numbers must be some that archives take; every code stands for a finite one."""
    rows = torch.frombuffer(bytearray(b"".join(raw)), dtype=torch.uint8).view(-1, payload.row_bytes)
    for what, basis, part in (
        ("key", payload.key_basis, payload.key_part(rows)),
        ("value", payload.value_basis, payload.value_part(rows)),
    ):
        if basis is None and not fits(from_bits(part, payload.dtype)):
            yield f"{name}: a {what} is NaN or infinite, or too large"
