"""Make an archive appear whole or not at all: write beside it, hash, check, manifest last, rename."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ragkv.archive.manifest import MANIFEST_FILE, FileEntry, Manifest
from ragkv.errors import ArchiveCorruptError, ConfigError, RagkvError

_BLOCK = 1 << 20


@contextmanager
def staging(path: Path, keep: Callable[[Path], bool] | None = None) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` when the block ends, and is removed if it raises.

    An archive at `path` is replaced, unless `keep(path)` says that it stays: then the new one is dropped. `keep` is
    called under the lock of `publishing_in`. Any other file or folder at `path` is left alone and refused.
    """
    path = path.resolve()  # a link to an archive stays, and what it points to is replaced
    check_place(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    except OSError as error:
        raise ConfigError(f"cannot write to {str(path.parent)!r}: {error.strerror}") from error
    try:
        folder.chmod(0o755)
        yield folder
        _replace(folder, path, keep)
    except RagkvError:
        raise
    except OSError as error:  # most often: the disk is full
        why = " ".join((error.strerror or str(error)).split())
        raise ConfigError(f"cannot write the archive {str(path)!r}: {why}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_place(path: Path) -> None:
    """Refuse a place where something other than an archive or an empty folder stands."""
    if path.exists():
        with publishing_in(path.parent):  # else a builder could swap archives between two of these looks
            _check_place(path)


def _check_place(path: Path) -> None:
    if path.exists() and not (path / MANIFEST_FILE).is_file() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{str(path)!r} exists and is not an archive; choose another place")


@contextmanager
def publishing_in(parent: Path) -> Iterator[None]:
    """Hold the lock under which archives in the folder `parent` are put in place: one builder at a time.

    The lock is on the folder itself, so no file is left behind, and it ends with the process.
    """
    descriptor = os.open(parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks: as safe as two renames are
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def seal(folder: Path, manifest: Manifest) -> Manifest:
    """Flush and hash every file of `folder`, then write the manifest; returns it with the checksums filled in."""
    files = {}
    for found in sorted(folder.rglob("*")):
        if found.is_file():
            with found.open("rb+") as handle:
                os.fsync(handle.fileno())
            files[found.relative_to(folder).as_posix()] = hash_file(found)
    manifest = dataclasses.replace(manifest, files=files)
    text = manifest.to_json()
    if Manifest.from_json(text) != manifest:
        raise ArchiveCorruptError(f"{MANIFEST_FILE} does not read back as it was written")
    with (folder / MANIFEST_FILE).open("w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    for directory in (folder / "layers", folder):
        fsync_folder(directory)
    return manifest


def hash_file(path: Path) -> FileEntry:
    """SHA-256 and length of a file, read in blocks."""
    hasher, n_bytes = hashlib.sha256(), 0
    with path.open("rb") as handle:
        while block := handle.read(_BLOCK):
            hasher.update(block)
            n_bytes += len(block)
    return FileEntry(sha256=hasher.hexdigest(), bytes=n_bytes)


def _replace(folder: Path, path: Path, keep: Callable[[Path], bool] | None) -> None:
    """Rename `folder` to `path`; a folder in the way is kept, or moved aside first and removed afterwards."""
    aside = folder.with_suffix(".old")
    with publishing_in(path.parent):
        _check_place(path)  # again: the build took its time
        if keep is not None and (path / MANIFEST_FILE).is_file() and keep(path):
            return
        try:
            if path.exists():
                path.rename(aside)
            folder.rename(path)
        except OSError as error:
            if aside.exists() and not path.exists():
                aside.rename(path)
            raise ConfigError(f"cannot publish the archive at {str(path)!r}: {error.strerror}") from error
        fsync_folder(path.parent)
    shutil.rmtree(aside, ignore_errors=True)


def fsync_folder(folder: Path) -> None:
    """Flush the names in a folder to the device."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
