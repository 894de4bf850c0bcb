"""Check every promise of an archive, without its model: checksums first, then the invariants of the format.

The rules are those of ``indexes/FORMAT.md``, restated here rather than taken from the code that writes and recalls.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import torch

from ragkv.archive.manifest import MANIFEST_FILE, TOKENS_FILE, LayerEntry, Manifest, read_manifest
from ragkv.archive.publish import hash_file
from ragkv.archive.tables import NO_OFFSET, read_tokens
from ragkv.archive.verify_layer import Spans, layer_faults, require_columns
from ragkv.errors import ArchiveCorruptError, ArchiveFormatError, ConfigError

_UNREADABLE = (pa.ArrowException, ArchiveCorruptError, OSError, RuntimeError, ValueError, LookupError)
"""What the readers raise for a file that is not what the manifest says it is."""

_CODEC_BITS = {"int8": 8, "int4": 4, "int3": 3, "int2": 2}
"""Bits per number that a coded tensor may take on average, its scale not counted."""


def verify_archive(path: str | Path) -> list[str]:
    """Check the archive in the folder `path`; returns one line per fault, none if it is sound.

    No model is needed and nothing is written. A file whose checksum does not hold is not looked into any further.

    Raises
    ------
    ArchiveNotFoundError
        If there is no manifest; any other damage is returned.
    """
    folder = Path(path)
    try:
        manifest = read_manifest(folder)
    except (ArchiveCorruptError, ArchiveFormatError) as error:
        return [str(error)]
    damaged = dict(_file_faults(folder, manifest))
    faults = [*damaged.values(), *_extra_files(folder, manifest), *_count_faults(manifest)]
    if TOKENS_FILE not in damaged:
        faults += _collected(TOKENS_FILE, _token_faults(folder, manifest))
    spans = Spans(manifest.head_tokens, manifest.head_tokens + manifest.archived_tokens, manifest.n_tokens)
    dtype = getattr(torch, manifest.fingerprint.dtype)
    for place, entry in enumerate(manifest.layers):
        faults += _entry_faults(place, entry, manifest, spans)
        if damaged.keys().isdisjoint(entry.files()):
            faults += _collected(f"layer {entry.index}", layer_faults(folder, entry, spans, dtype))
    return faults


def _collected(name: str, found: Iterator[str]) -> list[str]:
    """Run one check to its end; a file that cannot be read is its last fault."""
    faults: list[str] = []
    try:
        for fault in found:
            faults.append(fault)
    except _UNREADABLE as error:
        faults.append(f"{name}: cannot be read ({' '.join(str(error).split())})")
    return faults


def _file_faults(folder: Path, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Name and fault of every file that is missing, or of another length or checksum than the manifest says."""
    for name, expected in manifest.files.items():
        try:
            found = hash_file(folder / name)
        except OSError as error:
            yield name, f"{name}: cannot be read ({error.strerror})"
            continue
        if found.bytes != expected.bytes:
            yield name, f"{name}: {found.bytes} bytes, the manifest says {expected.bytes}"
        elif found.sha256 != expected.sha256:
            yield name, f"{name}: SHA-256 {found.sha256[:12]}..., the manifest says {expected.sha256[:12]}..."


def _extra_files(folder: Path, manifest: Manifest) -> Iterator[str]:
    for found in sorted(folder.rglob("*")):
        name = found.relative_to(folder).as_posix()
        if not found.is_dir() and name != MANIFEST_FILE and name not in manifest.files:
            yield f"{name}: not in the manifest"


def _count_faults(manifest: Manifest) -> Iterator[str]:
    """The counts must follow from the numbers of tokens and the recipe."""
    recipe, end = manifest.recipe, manifest.n_tokens
    head = min(end, max(manifest.prefix_tokens, recipe.sink_tokens))
    archived = max(0, end - recipe.window_tokens - head)
    if manifest.document_tokens == 0:
        yield f"{MANIFEST_FILE}: document_tokens is 0"
    if manifest.head_tokens != head:
        yield f"{MANIFEST_FILE}: head_tokens is {manifest.head_tokens}, tokens and recipe give {head}"
    if manifest.archived_tokens != archived:
        yield f"{MANIFEST_FILE}: archived_tokens is {manifest.archived_tokens}, tokens and recipe give {archived}"
    if not manifest.layers:
        yield f"{MANIFEST_FILE}: there are no layers"
    try:
        recipe.check_layers(len(manifest.layers))
    except ConfigError as error:
        yield f"{MANIFEST_FILE}: {error}"


def _entry_faults(place: int, entry: LayerEntry, manifest: Manifest, spans: Spans) -> Iterator[str]:
    """The manifest's entry of a layer must follow from the counts and the recipe."""
    name, n_exact = f"{MANIFEST_FILE}: layer {entry.index}", spans.n_exact(entry)
    if entry.index != place:
        yield f"{name} stands at place {place}"
    if entry.exact_tokens != n_exact:
        yield f"{name}: exact_tokens is {entry.exact_tokens}, the counts give {n_exact}"
    if bool(entry.clusters) != (entry.window is None and manifest.archived_tokens > 0):
        yield f"{name}: {'has' if entry.clusters else 'has no'} clusters, against its window and archived_tokens"
    most = min(manifest.archived_tokens, manifest.clusters_asked)
    for head, count in enumerate(entry.clusters):
        if not 0 < count <= most:
            yield f"{name}, kv_head {head}: {count} clusters, allowed are 1 to {most} (tokens archived, clusters asked)"
    if entry.clusters:
        key_codec, value_codec = manifest.recipe.codecs(place)
        yield from _width_faults(f"{name}: key_widths", entry.key_widths, entry.key_dim, key_codec)
        yield from _width_faults(f"{name}: value_widths", entry.value_widths, entry.value_dim, value_codec)


def _width_faults(name: str, widths: tuple[int, ...], dim: int, codec: str) -> Iterator[str]:
    """Widths must be those of the recipe's codec, fill whole bytes, and take no more bytes than it has."""
    if bool(widths) != (codec != "lossless"):
        yield f"{name} is {list(widths)}, the recipe's codec is {codec}"
        return
    if not widths:
        return
    eight, four, two = widths
    if eight + four + two > dim:
        yield f"{name} is {list(widths)}, more than the {dim} numbers of a token"
    if four % 2 or two % 4:
        yield f"{name} is {list(widths)}; the second must be even and the third a multiple of 4"
    n_bytes, most = eight + four // 2 + two // 4, (dim * _CODEC_BITS[codec] + 7) // 8
    if n_bytes > most:
        yield f"{name} is {list(widths)}, {n_bytes} bytes; {codec} has {most} for {dim} numbers"


def _token_faults(folder: Path, manifest: Manifest) -> Iterator[str]:
    require_columns(folder / TOKENS_FILE, dict.fromkeys(("token_id", "start", "end"), "int32"))
    tokens, n_prefix = read_tokens(folder, manifest), manifest.prefix_tokens
    if bool((tokens.ids < 0).any()):
        yield f"{TOKENS_FILE}: a token id is negative"
    outside = (tokens.start == NO_OFFSET) & (tokens.end == NO_OFFSET)
    if not bool(outside[:n_prefix].all()) or bool(outside[n_prefix:].any()):
        yield f"{TOKENS_FILE}: the tokens without offsets are not the {n_prefix} of the prefix"
    start, end = tokens.start[n_prefix:], tokens.end[n_prefix:]
    if bool((start < 0).any()) or bool((end < start).any()):
        yield f"{TOKENS_FILE}: a document token has a negative offset or ends before it starts"
    if bool((start.diff() < 0).any()) or bool((end.diff() < 0).any()):
        yield f"{TOKENS_FILE}: character offsets go backwards"
