"""Make an archive appear whole or not at all: write beside it, hash, manifest last, rename; clear up after the dead.

A build works in ``.NAME.TOKEN.tmp`` beside its target and holds the lock ``.NAME.TOKEN.lock`` for as long as it lives.
An archive that is replaced is renamed to ``.NAME.TOKEN.old`` just before. Locks end with their process: so whoever
comes next can tell what a dead build left, deletes it, and puts an archive back that was on its way out when the build
died.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from ragkv.archive.files import FileEntry, is_there, stamp_of, system_errors
from ragkv.archive.manifest import MANIFEST_FILE, Manifest
from ragkv.archive.rows import ROWS_FILE, rows_entry
from ragkv.errors import ArchiveCorruptError, ConfigError, RagkvError

LOCK_FILE = ".ragkv.lock"
_BUILDING, _ASIDE, _ALIVE = ".tmp", ".old", ".lock"
_LEFT = re.compile(r"\.(?P<name>.+)\.(?P<token>[0-9a-f]{12})\.(?:tmp|old|lock)")
_BLOCK = 1 << 20
_PATIENCE = 0.005  # seconds between two tries to get a lock, which is held for a few renames


@contextmanager
def staging(path: Path, keep: Callable[[Path], bool] | None = None, *, rubble: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` when the block ends, and is removed if it raises.

    An archive at `path` is replaced, unless `keep(path)` says that it stays: then the new one is dropped. `keep` is
    called under the lock of `publishing_in`. Any other file or folder at `path` is left alone and refused, unless it is
    known to be `rubble`: then it is replaced, too. What dead builds left in the same folder is cleared away first.
    """
    if not rubble:
        path = path.resolve()  # a link to an archive stays, and what it points to is replaced
    token = f".{path.name}.{secrets.token_hex(6)}"
    folder, aside, alive = (path.parent / f"{token}{suffix}" for suffix in (_BUILDING, _ASIDE, _ALIVE))
    with _writing(path), ExitStack() as stack:
        path.parent.mkdir(parents=True, exist_ok=True)
        with publishing_in(path.parent):
            sweep_under_lock(path.parent)
            if not rubble:
                _check_place(path)
            stack.callback(_drop, folder, alive)
            stack.enter_context(_holding(alive))
            folder.mkdir()
        yield folder
        _replace(folder, path, aside, keep, rubble=rubble)


def check_place(path: Path) -> None:
    """Refuse a place where something other than an archive or an empty folder stands."""
    if is_there(path):
        # A builder could swap archives between two of these looks, and has made the lock before.
        held = publishing_in(path.parent) if is_there(path.parent / LOCK_FILE) else nullcontext()
        with held:
            _check_place(path)


@contextmanager
def publishing_in(parent: Path) -> Iterator[None]:
    """Hold the lock under which archives in the folder `parent` are put in place: one at a time.

    It is the lock of a file in the folder, which stays there, and it ends with the process. Where a file system has no
    locks, or may not be written, it holds nothing: that is as safe as two renames are.
    """
    with _holding(parent / LOCK_FILE):
        yield


def recover(path: Path) -> bool:
    """Put back the archive at `path` if a build died between taking it away and putting its own there.

    Returns whether an archive stands there now.
    """
    path = path.resolve()
    with system_errors(f"{str(path)!r}"):
        # Whoever publishes makes the lock first: where there is none, nothing was ever replaced, and none is left here.
        if is_there(path.parent / LOCK_FILE):
            with suppress(OSError), publishing_in(path.parent):
                if not _is_archive(path):
                    sweep_under_lock(path.parent, only=path.name)
        return _is_archive(path)


def interrupted(names: Collection[str]) -> list[str]:
    """Of the names in a folder those of archives that are on their way out while none is in their place.

    Most often they are being replaced at this moment, else their build died: `recover` tells.
    """
    matches = [_LEFT.fullmatch(name) for name in names if name.endswith(_ASIDE)]
    return sorted({match["name"] for match in matches if match is not None} - set(names))


def sweep(folder: Path) -> None:
    """Clear away what dead builds left in `folder`, and put back what they were replacing."""
    with publishing_in(folder):
        sweep_under_lock(folder)


def seal(folder: Path, manifest: Manifest) -> Manifest:
    """Flush and hash every file of `folder`, then write the manifest; returns it with the checksums filled in."""
    files = {}
    for found in sorted(folder.iterdir()):
        with found.open("rb+") as handle:
            os.fsync(handle.fileno())
        files[found.name] = rows_entry(found) if found.name == ROWS_FILE else hash_file(found)
    manifest = replace(manifest, files=files)
    text = manifest.to_json()
    if Manifest.from_json(text) != manifest:
        raise ArchiveCorruptError(f"{MANIFEST_FILE} does not read back as it was written")
    write_whole(folder / MANIFEST_FILE, text.encode())
    fsync_folder(folder)
    return manifest


def write_whole(path: Path, raw: bytes) -> None:
    """Write a file that is there whole or not at all, flushed to the device; one that stood there is replaced."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(6)}{_BUILDING}")
    try:
        with beside.open("wb") as handle:
            handle.write(raw)
            handle.flush()
            os.fsync(handle.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    fsync_folder(path.parent)


def hash_file(path: Path) -> FileEntry:
    """SHA-256 and length of a file, read in blocks."""
    hasher, n_bytes = hashlib.sha256(), 0
    with path.open("rb") as handle:
        while block := handle.read(_BLOCK):
            hasher.update(block)
            n_bytes += len(block)
    return FileEntry(bytes=n_bytes, sha256=hasher.hexdigest())


def fsync_folder(folder: Path) -> None:
    """Flush the names in a folder to the device, where the system lets a folder be opened."""
    with suppress(PermissionError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Say in one sentence what the system refused: most often, that the disk is full."""
    try:
        yield
    except RagkvError:
        raise
    except OSError as error:
        said = " ".join((error.strerror or str(error)).split())
        raise ConfigError(f"cannot write the archive {str(path)!r}: {said}") from error


@contextmanager
def _holding(file: Path) -> Iterator[None]:
    lock = FileLock(file, mode=0o666)
    try:
        lock.acquire(poll_interval=_PATIENCE)
    except (OSError, NotImplementedError):
        yield
        return
    try:
        yield
    finally:
        lock.release()


def _check_place(path: Path) -> None:
    if is_there(path) and not _is_archive(path) and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{str(path)!r} exists and is not an archive; choose another place")


def _is_archive(path: Path) -> bool:
    return stamp_of(path / MANIFEST_FILE) is not None


def _replace(folder: Path, path: Path, aside: Path, keep: Callable[[Path], bool] | None, *, rubble: bool) -> None:
    """Rename `folder` to `path`; an archive in the way is kept, or moved aside first and removed afterwards."""
    with publishing_in(path.parent):
        if not rubble:
            _check_place(path)  # again: the build took its time
        stands = _is_archive(path)
        if keep is not None and stands and keep(path):
            return
        try:
            if os.path.lexists(path):
                path.rename(aside)
            folder.rename(path)
        except OSError:
            if os.path.lexists(aside) and not os.path.lexists(path):
                aside.rename(path)
            raise
        fsync_folder(path.parent)
    delete(aside)


def _drop(folder: Path, alive: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        alive.unlink(missing_ok=True)


def leftovers(parent: Path, *, only: str | None = None) -> list[tuple[Path, Path, Path, Path]]:
    """What dead builds left in `parent`: target, folder that was built, archive put aside, and lock, of each.

    Call it under the lock of `publishing_in`, so that no build begins or ends meanwhile.
    """
    tokens: dict[str, str] = {}
    for entry in os.listdir(parent):  # not as paths: there may be many archives
        match = _LEFT.fullmatch(entry) if entry.startswith(".") else None
        if match is not None and only in (None, match["name"]):
            tokens[match["token"]] = match["name"]
    found = []
    for token, name in sorted(tokens.items()):
        folder, aside, alive = (parent / f".{name}.{token}{suffix}" for suffix in (_BUILDING, _ASIDE, _ALIVE))
        if not _is_alive(alive):
            found.append((parent / name, folder, aside, alive))
    return found


def sweep_under_lock(parent: Path, *, only: str | None = None) -> None:
    """As `sweep`, by who holds the lock of `publishing_in` already; `only` after builds of this name."""
    for target, folder, aside, alive in leftovers(parent, only=only):
        if _is_archive(aside) and not os.path.lexists(target):
            aside.rename(target)
        for left in (folder, aside, alive):
            delete(left)


def delete(path: Path) -> None:
    """Delete a folder and what is in it, a file, or a link but not what it points to, if it is there.

    Of an archive the manifest goes first: whoever dies half-way leaves no part of one that looks whole.
    """
    if path.is_dir() and not path.is_symlink():
        with suppress(OSError):
            (path / MANIFEST_FILE).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _is_alive(alive: Path) -> bool:
    """Whether the build that holds this lock lives."""
    if stamp_of(alive) is None:
        return False
    lock = FileLock(alive)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return True
    except (OSError, NotImplementedError):  # a file system without locks tells nothing: leave it
        return True
    lock.release()
    return False
