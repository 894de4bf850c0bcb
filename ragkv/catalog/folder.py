"""The documents of a catalog on disk, and the marks of removed ones: list, mark, take the mark away, clear up.

No model is needed here. Every step that changes which documents there are is taken under the lock of the folder
``documents``, the one under which archives are put in place; archives themselves never change.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ragkv.archive.manifest import MANIFEST_FILE, Manifest, read_manifest
from ragkv.archive.publish import fsync_folder, publishing_in
from ragkv.catalog.head import CATALOG_FILE, CatalogHead, is_document_id
from ragkv.errors import ArchiveCorruptError, ArchiveFormatError, ArchiveNotFoundError, ConfigError
from ragkv.recall.archive import check_files

log = logging.getLogger(__name__)

MIN_ID = 6
"""Characters of an id that are enough to name a document, if no other begins with them."""

_TEMPORARY_S = 24 * 3600.0
"""A temporary folder in which nothing changed for so many seconds belongs to a build that died."""

Stamp = tuple[int, int, int]
"""Which archive stands in a place: inode, time of change in ns and length of its manifest."""


@dataclass(frozen=True)
class CatalogEntry:
    """One document of a catalog: ``tokens`` of the document alone, ``bytes`` of its files without the manifest.

    ``built`` is true where the call that gave this entry built the archive, false where it was there already.
    """

    id: str
    name: str
    tokens: int
    bytes: int
    built: bool
    path: Path


@dataclass(frozen=True)
class GcResult:
    """What was deleted: ids of removed documents, the number of temporary folders, and the bytes of both."""

    documents: tuple[str, ...]
    temporary: int
    bytes: int


class CatalogFolder:
    """The folders ``documents`` and ``removed`` of a catalog; any number of processes may use them at once."""

    def __init__(self, path: Path, head: CatalogHead) -> None:
        self.path = path
        self.head = head
        self._documents = path / "documents"
        self._removed = path / "removed"
        self._seen: dict[str, tuple[Stamp, CatalogEntry]] = {}  # archives never change, so each is read once

    def document(self, document_id: str) -> Path:
        """Where the archive of a document is or will be.

        Raises
        ------
        ConfigError
            If `document_id` is not a document id; so no name can lead out of the catalog.
        """
        if not is_document_id(document_id):
            raise ConfigError(f"document id is {document_id!r}; give 64 lower-case hexadecimal digits")
        return self._documents / document_id

    def __contains__(self, document_id: str) -> bool:
        # The mark first: clearing up moves the document away before it takes the mark away.
        return is_document_id(document_id) and not self._mark(document_id).exists() and bool(self.stamp(document_id))

    def stamp(self, document_id: str) -> Stamp | None:
        """What tells the archive that stands there now from one that is put in its place; None where there is none."""
        try:
            found = (self.document(document_id) / MANIFEST_FILE).stat()
        except OSError:
            return None
        return (found.st_ino, found.st_mtime_ns, found.st_size) if stat.S_ISREG(found.st_mode) else None

    def entries(self) -> list[CatalogEntry]:
        """Every document that is not marked, by name and then id; what cannot be read is logged and left out."""
        marked = set(_names(self._removed))
        found = (self._entry(name) for name in _names(self._documents) if is_document_id(name) and name not in marked)
        return sorted((entry for entry in found if entry is not None), key=lambda entry: (entry.name, entry.id))

    def _entry(self, document_id: str) -> CatalogEntry | None:
        path, stamp = self.document(document_id), self.stamp(document_id)
        known = self._seen.get(document_id)
        if known is not None and known[0] == stamp:
            return known[1]
        try:
            manifest = read_manifest(path)
            self._check_common(manifest)
        except (ArchiveNotFoundError, ArchiveFormatError, ArchiveCorruptError) as error:
            if path.exists():  # else it was cleared away between the two looks
                log.warning("catalog %s: document %s is left out: %s", self.path, document_id, error)
            return None
        entry = _entry_of(document_id, path, manifest)
        if stamp is not None:
            self._seen[document_id] = (stamp, entry)
        return entry

    def _check_common(self, manifest: Manifest) -> None:
        ours = (self.head.fingerprint, self.head.layout, self.head.recipe)
        if (manifest.fingerprint, manifest.layout, manifest.recipe) != ours:
            raise ArchiveCorruptError("its model, layout or recipe is not the catalog's; it does not belong here")

    def is_whole(self, document_id: str, *, checksums: bool = False) -> bool:
        """Whether a sound archive of this catalog stands there: manifest and lengths of files, or also checksums."""
        path = self.document(document_id)
        try:
            manifest = read_manifest(path)
            self._check_common(manifest)
            if checksums:
                check_files(path, manifest)
            return all((path / name).stat().st_size == entry.bytes for name, entry in manifest.files.items())
        except (OSError, ArchiveFormatError, ArchiveCorruptError):  # ArchiveNotFoundError is an OSError
            return False

    def revive(self, document_id: str, stamp: Stamp | None) -> CatalogEntry | None:
        """The entry of a whole document with the mark of a removed one taken away; None where it must be built.

        `stamp` is that of the archive that the caller saw. A removed document is checked byte by byte, so that to
        remove and add again mends a damaged one.
        """
        mark = self._mark(document_id)
        if stamp is None or not self.is_whole(document_id, checksums=mark.exists()):
            return None
        with self._locked():
            if self.stamp(document_id) != stamp:
                return None
            if mark.exists():  # else there is nothing to change, and the catalog may be on a medium that is read only
                mark.unlink(missing_ok=True)
            return self._entry(document_id)

    def make_room(self, document_id: str) -> None:
        """Clear away what stands in a document's place and is no archive: one that lost its manifest, a file, a link.

        Nobody can read it, and a new archive could not be put there.
        """
        path = self.document(document_id)
        if self.stamp(document_id) is not None or not os.path.lexists(path):
            return
        with self._locked():
            rubble = os.path.lexists(path) and self.stamp(document_id) is None
            aside = _put_aside(path) if rubble else None
        if aside is not None:
            _delete(aside)

    def remove(self, document_id: str) -> None:
        """Mark a document as removed.

        Raises
        ------
        ArchiveNotFoundError
            If there is no such document, or it is removed already.
        """
        path, mark = self.document(document_id), self._mark(document_id)
        with self._locked():
            if mark.exists() or not os.path.lexists(path):
                raise self.not_found(document_id)
            self._removed.mkdir(exist_ok=True)
            mark.touch()
            fsync_folder(self._removed)

    def not_found(self, document_id: str) -> ArchiveNotFoundError:
        """The error for a document that is not there."""
        why = "was removed from" if self._mark(document_id).exists() else "is not in"
        return ArchiveNotFoundError(
            f"document {document_id[:12]}... {why} the catalog {str(self.path)!r}; add it again"
        )

    def gc(self, grace_s: float, *, dry_run: bool) -> GcResult:
        """Delete documents that were removed at least `grace_s` seconds ago, and what dead builds left behind.

        With `dry_run` nothing is deleted, and what would be is told.
        """
        if not grace_s >= 0 or math.isinf(grace_s):
            raise ConfigError(f"the grace period is {grace_s} s; give a number of seconds from 0")
        with self._locked():
            now = time.time()
            stale = [found for found in self._temporary() if now - _last_change(found) >= _TEMPORARY_S]
            marks = [self._removed / name for name in _names(self._removed) if is_document_id(name)]
            due = [mark for mark in marks if now - _last_change(mark) >= grace_s]
            doomed = {mark.name: self.document(mark.name) for mark in due if os.path.lexists(self.document(mark.name))}
            n_bytes = sum(map(_size, (*doomed.values(), *stale)))
            result = GcResult(documents=tuple(sorted(doomed)), temporary=len(stale), bytes=n_bytes)
            if dry_run:
                return result
            stale += [_put_aside(path) for path in doomed.values()]
            for mark in due:
                mark.unlink(missing_ok=True)
        for path in stale:  # without the lock: nobody else names these any more
            _delete(path)
        return result

    def _temporary(self) -> list[Path]:
        heads = [self.path / name for name in _names(self.path) if name.startswith(f".{CATALOG_FILE}.")]
        builds = [self._documents / name for name in _names(self._documents) if name.startswith(".")]
        return [path for path in (*heads, *builds) if path.suffix in (".tmp", ".old")]

    def _mark(self, document_id: str) -> Path:
        return self._removed / self.document(document_id).name

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self._documents.mkdir(exist_ok=True)
            with publishing_in(self._documents):
                yield
        except ArchiveNotFoundError:
            raise
        except OSError as error:
            raise ConfigError(f"cannot change the catalog {str(self.path)!r}: {error.strerror}") from error


def find_entry(entries: list[CatalogEntry], word: str) -> CatalogEntry:
    """The one document that `word` names: an id, the start of one (`MIN_ID` characters or more), or a whole name.

    Raises
    ------
    ArchiveNotFoundError
        If there is none.
    ConfigError
        If there are several; they are named.
    """
    start = word.lower() if len(word) >= MIN_ID else None
    exact = [entry for entry in entries if entry.id == start]
    found = exact or [
        entry for entry in entries if (word and entry.name == word) or (start and entry.id.startswith(start))
    ]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"{word!r} is {len(found)} documents: {_listed(found)}; give the start of one id")
    held = f"it holds {_listed(entries)}" if entries else "it is empty"
    raise ArchiveNotFoundError(
        f"no document {word!r} in the catalog: {held}; give a name or at least {MIN_ID} characters of an id"
    )


def with_match(entries: list[CatalogEntry], match: str) -> list[CatalogEntry]:
    """The documents with `match` in their name, in any case, or at the start of their id."""
    wanted = match.casefold()
    return [entry for entry in entries if wanted in entry.name.casefold() or entry.id.startswith(wanted)]


def _listed(entries: list[CatalogEntry]) -> str:
    shown = [f"{entry.id[:12]} ({entry.name})" if entry.name else entry.id[:12] for entry in entries[:5]]
    return ", ".join(shown) + (", ..." if len(entries) > len(shown) else "")


def _entry_of(document_id: str, path: Path, manifest: Manifest) -> CatalogEntry:
    return CatalogEntry(
        id=document_id,
        name=manifest.document_name,
        tokens=manifest.document_tokens,
        bytes=sum(entry.bytes for entry in manifest.files.values()),
        built=False,
        path=path,
    )


def as_built(entry: CatalogEntry, built: bool) -> CatalogEntry:
    """The same entry, saying whether its archive was built just now."""
    return dataclasses.replace(entry, built=built)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(found.name for found in folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{str(folder)!r} of a catalog cannot be read: {error.strerror}") from error


def _put_aside(path: Path) -> Path:
    """Rename a document out of the way: from then on nobody finds half of it."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.old")
    path.rename(aside)
    return aside


def _delete(path: Path) -> None:
    """Delete a folder and what is in it, a file, or a link but not what it points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _last_change(path: Path) -> float:
    """Newest time of change at or below `path`, in seconds; what vanishes meanwhile is in use and so is new."""
    try:
        return max(found.lstat().st_mtime for found in _below(path))
    except OSError:
        return math.inf


def _size(path: Path) -> int:
    total = 0
    for found in _below(path):
        with suppress(OSError):
            total += 0 if found.is_dir() and not found.is_symlink() else found.lstat().st_size
    return total


def _below(path: Path) -> Iterator[Path]:
    """`path` and everything in it, as far as it can be read; links are not followed."""
    yield path
    if path.is_symlink():
        return
    for folder, folders, files in os.walk(path):
        yield from (Path(folder, name) for name in (*folders, *files))
