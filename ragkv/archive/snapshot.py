"""All files of one archive read as one: whatever happens to its path meanwhile, what is returned belongs together.

Every file is bound to the manifest by a checksum (of the rows file that of its footer, which holds those of its row
groups), so parts of two archives never pass for one. An archive that is replaced while it is read is read again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ragkv.archive.codec import Basis
from ragkv.archive.files import FileEntry, local_path, read_bounded, read_checked, stamp_of, system_errors
from ragkv.archive.manifest import MANIFEST_FILE, LayerEntry, Manifest, read_manifest
from ragkv.archive.parquet import binary_rows, flat_lists, integers
from ragkv.archive.payload import decode_exact, exact_bytes, fits
from ragkv.archive.prototypes import CENTROIDS_FILE, PROTOTYPES_FILE, Prototypes, read_prototypes
from ragkv.archive.publish import publishing_in, recover
from ragkv.archive.rows import EXACT, ROWS_FILE, RowsFile
from ragkv.archive.tokens import TOKENS_FILE, TokenTable, read_tokens
from ragkv.archive.transforms import TRANSFORMS_FILE, LayerTransforms, Transforms, read_transforms
from ragkv.errors import ArchiveCorruptError, ArchiveFormatError, ArchiveNotFoundError, ConfigError
from ragkv.recipe import CODEC_BITS

SHARED_TRANSFORMS = "transforms"
"""Folder of a catalog that holds its transforms, each under its SHA-256."""

_ATTEMPTS = 8  # then the archive is read while nobody may replace it
_LARGEST_TRANSFORMS = 1 << 31


@dataclass(frozen=True)
class ExactTokens:
    """Exact tokens of a layer: ``keys`` and ``values`` (n_kv_heads, n, dim) at ``positions`` (n,) int64."""

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True)
class Snapshot:
    """One archive, wholly: ``prototypes`` and ``groups`` (row groups [first, last)) by layer that has clusters."""

    path: Path
    manifest: Manifest
    tokens: TokenTable
    rows: RowsFile
    exact: dict[int, ExactTokens]
    transforms: Transforms | None
    prototypes: dict[int, Prototypes]
    groups: dict[int, tuple[int, int]]


def read_snapshot(
    path: str | Path,
    *,
    transforms: Callable[[str], Transforms] | None = None,
    accept: Callable[[Manifest], None] | None = None,
) -> Snapshot:
    """Read the archive in the folder `path`; of its archived rows only the footer.

    Parameters
    ----------
    transforms
        Gives the transforms of a SHA-256, where the archive does not carry its own. By default they are looked for in
        the catalog that the archive stands in.
    accept
        Called with the manifest before anything else is read; refuses it by raising.

    Raises
    ------
    ArchiveNotFoundError, ArchiveFormatError, ArchiveCorruptError, ArchiveReadError
        If there is none, of another version, damaged, or cannot be read now.
    """
    path = local_path(path)
    for attempt in range(_ATTEMPTS + 1):
        with publishing_in(path.resolve().parent) if attempt == _ATTEMPTS else nullcontext():
            stamp = _stamp(path)
            if stamp is None and attempt < _ATTEMPTS and recover(path):
                continue
            try:
                return _read(path, transforms, accept)
            except (ArchiveNotFoundError, ArchiveFormatError, ArchiveCorruptError):
                if attempt == _ATTEMPTS or _stamp(path) == stamp:
                    raise
    raise AssertionError("unreachable")


def _stamp(path: Path) -> tuple[int, int, int] | None:
    with system_errors(f"{str(path)!r}: {MANIFEST_FILE}"):
        return stamp_of(path / MANIFEST_FILE)


def _read(
    path: Path, transforms: Callable[[str], Transforms] | None, accept: Callable[[Manifest], None] | None
) -> Snapshot:
    manifest = read_manifest(path)
    if accept is not None:
        accept(manifest)
    with system_errors(f"archive {str(path)!r}"):
        check_counts(manifest)
        files = manifest.files
        tokens = read_tokens(read_checked(path, TOKENS_FILE, files[TOKENS_FILE]), manifest.n_tokens)
        rows = RowsFile(path / ROWS_FILE, files[ROWS_FILE])
        exact, n_groups = _read_exact(rows, manifest)
        shared, prototypes = None, dict[int, Prototypes]()
        if manifest.transforms is not None:
            shared = _transforms(path, manifest, manifest.transforms, transforms)
            key_bytes, value_bytes, n_axes = _check_transforms(manifest, shared)
            prototypes = read_prototypes(
                read_checked(path, PROTOTYPES_FILE, files[PROTOTYPES_FILE]),
                read_checked(path, CENTROIDS_FILE, files[CENTROIDS_FILE]),
                manifest.layers,
                key_bytes=key_bytes,
                value_bytes=value_bytes,
                n_axes=n_axes,
            )
        return Snapshot(
            path, manifest, tokens, rows, exact, shared, prototypes, _layer_groups(rows, manifest, n_groups)
        )


def check_counts(manifest: Manifest) -> None:
    """Refuse counts that do not follow from the numbers of tokens and the recipe."""
    recipe, end = manifest.recipe, manifest.n_tokens
    head = min(end, max(manifest.prefix_tokens, recipe.sink_tokens))
    archived = max(0, end - recipe.window_tokens - head)
    if manifest.document_tokens < 1 or not manifest.layers:
        raise ArchiveCorruptError(f"{MANIFEST_FILE}: it counts no document tokens or no layers")
    if (manifest.head_tokens, manifest.archived_tokens) != (head, archived):
        raise ArchiveCorruptError(
            f"{MANIFEST_FILE}: head_tokens and archived_tokens are {manifest.head_tokens} and "
            f"{manifest.archived_tokens}, tokens and recipe give {head} and {archived}"
        )
    for entry in manifest.layers:
        wanted = _count_exact(manifest, entry)
        clustered = entry.window is None and archived > 0
        if entry.exact_tokens != wanted or bool(entry.clusters) != clustered:
            raise ArchiveCorruptError(
                f"{MANIFEST_FILE}: layer {entry.index} has {entry.exact_tokens} exact tokens and clusters "
                f"{list(entry.clusters)[:3]}, against its window and the counts"
            )
        if entry.clusters and not max(entry.clusters) <= min(archived, manifest.clusters_asked):
            raise ArchiveCorruptError(
                f"{MANIFEST_FILE}: layer {entry.index} has more clusters than tokens, or than asked"
            )
    try:
        recipe.check_layers(len(manifest.layers))
    except ConfigError as error:
        raise ArchiveCorruptError(f"{MANIFEST_FILE}: {error}") from error


def _count_exact(manifest: Manifest, entry: LayerEntry) -> int:
    """How many `exact_positions` there are: counted, since nobody knows yet whether there are as many tokens."""
    if entry.window is not None:
        return min(manifest.n_tokens, max(0, entry.window - 1))
    return manifest.n_tokens - manifest.archived_tokens


def exact_positions(manifest: Manifest, entry: LayerEntry) -> torch.Tensor:
    """The positions (n_exact,) int64 of the tokens of a layer that are always attended exactly."""
    end = manifest.n_tokens
    if entry.window is not None:
        return torch.arange(max(0, end - max(0, entry.window - 1)), end)
    tail = manifest.head_tokens + manifest.archived_tokens
    return torch.cat([torch.arange(manifest.head_tokens), torch.arange(tail, end)])


def _read_exact(rows: RowsFile, manifest: Manifest) -> tuple[dict[int, ExactTokens], int]:
    """The exact tokens of every layer, and how many row groups they take."""
    entries = [entry for entry in manifest.layers if entry.exact_tokens]
    n_wanted = sum(entry.n_kv_heads for entry in entries)
    ends = np.cumsum(rows.groups.rows)
    n_groups = int(np.searchsorted(ends, n_wanted)) + 1 if n_wanted else 0
    if n_wanted and (n_groups > len(ends) or ends[n_groups - 1] != n_wanted):
        raise ArchiveCorruptError(
            f"{ROWS_FILE}: its first row groups are not the exact tokens of every layer and KV head"
        )
    empty = {entry.index: _exact(entry, manifest, torch.empty(0, dtype=torch.int64), []) for entry in manifest.layers}
    if not n_wanted:
        return empty, 0
    wanted = [(entry.index, head) for entry in entries for head in range(entry.n_kv_heads)]
    table = rows.columns(list(range(n_groups)), ["layer", "kv_head", "cluster", "positions", "key_value"])
    found = list(zip(integers(table, "layer").tolist(), integers(table, "kv_head").tolist(), strict=True))
    if found != wanted or bool((integers(table, "cluster") != EXACT).any()):
        raise ArchiveCorruptError(f"{ROWS_FILE}: its first rows are not the exact tokens of every layer and KV head")
    flat = flat_lists(table.column("positions"))
    raw, at, row = binary_rows(table.column("key_value")), 0, 0
    for entry in entries:
        positions = exact_positions(manifest, entry)
        n_all = entry.n_kv_heads * len(positions)
        if not torch.equal(flat[at : at + n_all], positions.repeat(entry.n_kv_heads)):
            raise ArchiveCorruptError(
                f"{ROWS_FILE}: layer {entry.index} has exact tokens at other positions than it should"
            )
        empty[entry.index] = _exact(entry, manifest, positions, raw[row : row + entry.n_kv_heads])
        at, row = at + n_all, row + entry.n_kv_heads
    return empty, n_groups


def _exact(entry: LayerEntry, manifest: Manifest, positions: torch.Tensor, raw: list[memoryview]) -> ExactTokens:
    codecs, dtype = manifest.recipe.exact_codecs(entry.index), getattr(torch, manifest.fingerprint.dtype)
    key_bytes, value_bytes = (
        exact_bytes(dim, codec, dtype) for dim, codec in zip((entry.key_dim, entry.value_dim), codecs, strict=True)
    )
    if any(len(own) != len(positions) * (key_bytes + value_bytes) for own in raw):
        raise ArchiveCorruptError(
            f"{ROWS_FILE}: layer {entry.index} has exact tokens of another length than its recipe's"
        )
    joined = torch.frombuffer(bytearray(b"".join(raw)), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    both = joined.view(entry.n_kv_heads, len(positions), key_bytes + value_bytes)
    keys = decode_exact(both[..., :key_bytes], codecs[0], dtype)
    values = decode_exact(both[..., key_bytes:], codecs[1], dtype)
    if not fits(keys) or not fits(values):
        raise ArchiveCorruptError(
            f"{ROWS_FILE}: an exact token of layer {entry.index} is NaN or infinite, or too large"
        )
    return ExactTokens(keys, values, positions)


def _layer_groups(rows: RowsFile, manifest: Manifest, first: int) -> dict[int, tuple[int, int]]:
    """Row groups of each layer with clusters, which follow one another from `first` on."""
    found, ends = {}, np.cumsum(rows.groups.rows)
    at = int(ends[first - 1]) if first else 0
    for entry in manifest.layers:
        if entry.clusters:
            at += sum(entry.clusters)
            last = int(np.searchsorted(ends, at)) + 1
            if last > len(ends) or ends[last - 1] != at:
                raise ArchiveCorruptError(f"{ROWS_FILE}: its row groups are not those of layer {entry.index}")
            found[entry.index] = (first, last)
            first = last
    if first != len(ends):
        raise ArchiveCorruptError(f"{ROWS_FILE}: it holds {len(ends) - first} row groups too many")
    return found


def _transforms(path: Path, manifest: Manifest, sha256: str, given: Callable[[str], Transforms] | None) -> Transforms:
    own = manifest.files.get(TRANSFORMS_FILE)
    if own is not None:
        return read_transforms(read_checked(path, TRANSFORMS_FILE, own))
    if given is not None:
        return given(sha256)
    return read_shared(path.resolve().parent.parent, sha256).without_moments()  # which only a build needs


def read_shared(catalog: Path, sha256: str) -> Transforms:
    """The transforms of a catalog that have this SHA-256.

    Raises
    ------
    ArchiveCorruptError
        If they are not there, or are others.
    """
    file = catalog / SHARED_TRANSFORMS / f"{sha256}.parquet"
    try:
        with system_errors(f"transforms {str(file)!r}"):
            raw = read_bounded(file, _LARGEST_TRANSFORMS)
            return read_transforms(read_checked(file.parent, file.name, FileEntry(len(raw), sha256)))
    except ArchiveNotFoundError as error:
        raise ArchiveCorruptError(
            f"the transforms {sha256[:12]}... that the archive was coded with are not in {str(file.parent)!r}; keep an "
            "archive in its catalog, or build it alone"
        ) from error


def _check_transforms(manifest: Manifest, transforms: Transforms) -> tuple[int, int, int]:
    """Compare transforms with the manifest; bytes of a coded centroid and mean value, and the number of axes."""
    own = [(entry, transforms.layers.get(entry.index)) for entry in manifest.layers if entry.clusters]
    sizes = {_check_layer(manifest, entry, layer) for entry, layer in own}
    if len(sizes) != 1:
        raise ArchiveCorruptError("the layers of the transforms code prototypes in different numbers of bytes")
    return sizes.pop()


def _check_layer(manifest: Manifest, entry: LayerEntry, layer: LayerTransforms | None) -> tuple[int, int, int]:
    where = f"the transforms of layer {entry.index}"
    if layer is None:
        raise ArchiveCorruptError(f"{where} are missing")
    shapes = [tuple(each.shape[i] for i in (0, -1)) for each in (layer.key_mean, layer.value_mean, layer.key_axes)]
    heads = entry.n_kv_heads
    if shapes != [(heads, entry.key_dim), (heads, entry.value_dim), (heads, entry.key_dim)]:
        raise ArchiveCorruptError(f"{where} are of other shapes than the manifest says")
    recipe, dims = manifest.recipe, (entry.key_dim, entry.value_dim)
    for codec, basis, dim in zip(recipe.codecs(entry.index), (layer.key_rows, layer.value_rows), dims, strict=True):
        if (basis is not None) != (codec in CODEC_BITS):
            raise ArchiveCorruptError(f"{where} do not go with the codec {codec!r} of the recipe")
        if basis is not None:
            _check_width(where, basis, dim, CODEC_BITS[codec])
    _check_width(where, layer.key_prototypes, entry.key_dim, recipe.key_prototype_bits)
    _check_width(where, layer.value_prototypes, entry.value_dim, recipe.value_prototype_bits)
    return layer.key_prototypes.widths.n_bytes, layer.value_prototypes.widths.n_bytes, layer.key_axes.shape[1]


def _check_width(where: str, basis: Basis, dim: int, bits: float) -> None:
    n_bytes, most = basis.widths.n_bytes, math.ceil(dim * bits / 8)
    if n_bytes > most:
        raise ArchiveCorruptError(f"{where} code {dim} numbers in {n_bytes} bytes; {bits} bits a number are {most}")
