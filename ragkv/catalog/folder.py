"""The documents of a catalog on disk, and the marks of removed ones: list, mark, take the mark away, clear up.

No model is needed here. Every step that changes which documents there are, or what they are called, is taken under the
lock of the folder ``documents``, the one under which archives are put in place; archives themselves never change.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ragkv.archive.files import Stamp, is_there, read_bounded, stamp_of, system_errors
from ragkv.archive.manifest import MANIFEST_FILE, Manifest, read_manifest
from ragkv.archive.publish import (
    delete,
    fsync_folder,
    interrupted,
    leftovers,
    publishing_in,
    recover,
    sweep_under_lock,
    write_whole,
)
from ragkv.archive.verify import is_sound
from ragkv.catalog.entries import CatalogEntry, entry_of
from ragkv.catalog.head import CatalogHead, is_document_id
from ragkv.catalog.transforms import SharedTransforms
from ragkv.errors import (
    ArchiveCorruptError,
    ArchiveFormatError,
    ArchiveNotFoundError,
    ArchiveReadError,
    ConfigError,
    RagkvError,
)

log = logging.getLogger(__name__)

_LONGEST_NAME = 1 << 16  # bytes


@dataclass(frozen=True)
class GcResult:
    """What was deleted: ids of removed documents, the number of leftovers of dead builds, and the bytes of both."""

    documents: tuple[str, ...]
    temporary: int
    bytes: int


class CatalogFolder:
    """The folders ``documents``, ``names`` and ``removed`` of a catalog, for any number of processes at once."""

    def __init__(self, path: Path, head: CatalogHead) -> None:
        self.path = path
        self.head = head
        self._documents = path / "documents"
        self._removed = path / "removed"
        self._names_of = path / "names"
        # Archives never change, so each is read once.
        self._seen: dict[str, tuple[Stamp | None, CatalogEntry | None]] = {}

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
        if not is_document_id(document_id) or self._is_marked(document_id):
            return False
        return self.stamp(document_id) is not None or recover(self.document(document_id))

    def stamp(self, document_id: str) -> Stamp | None:
        """What tells the archive that stands there now from one that is put in its place; None where there is none.

        Raises
        ------
        ArchiveReadError
            If the system did not say: that does not mean that there is none.
        """
        path = self.document(document_id)
        with system_errors(f"document {document_id[:12]}... of the catalog {str(self.path)!r}"):
            return stamp_of(path / MANIFEST_FILE)

    def entries(self) -> list[CatalogEntry]:
        """Every document that is not marked, by name and then id; what cannot be read is logged and left out."""
        for name in interrupted(_names(self._documents)):
            recover(self._documents / name)
        marked, named = set(_names(self._removed)), set(_names(self._names_of))
        found = []
        for name in _names(self._documents):
            if is_document_id(name) and name not in marked:
                found.append(self._entry(name, has_names=name in named))
        return sorted((entry for entry in found if entry is not None), key=lambda entry: (entry.name, entry.id))

    def _entry(self, document_id: str, *, has_names: bool = True) -> CatalogEntry | None:
        try:
            return self._read_entry(document_id, has_names=has_names)
        except (ArchiveNotFoundError, ArchiveFormatError, ArchiveCorruptError, ArchiveReadError) as error:
            if os.path.lexists(self.document(document_id)):  # else it was cleared away between the two looks
                log.warning("catalog %s: document %s is left out: %s", self.path, document_id, error)
            return None

    def _read_entry(self, document_id: str, *, has_names: bool = True) -> CatalogEntry:
        path, stamp = self.document(document_id), self.stamp(document_id)
        seen, entry = self._seen.get(document_id, (None, None))
        if entry is None or seen != stamp:
            manifest = read_manifest(path)
            self._check_common(manifest)
            entry = entry_of(document_id, path, manifest)
            if stamp is not None:
                self._seen[document_id] = (stamp, entry)
        names = self.names(document_id) if has_names else ()
        return dataclasses.replace(entry, name=names[0], names=names) if names else entry

    def names(self, document_id: str) -> tuple[str, ...]:
        """All names that a document was given, if it has more than that in its manifest, or another.

        A damaged one is logged and left out.
        """
        folder, texts = self._names_of / self.document(document_id).name, []
        for file in _names(folder):
            if is_document_id(file):  # else it is one that is being written
                try:
                    with system_errors(f"a name of the document {document_id[:12]}..."):
                        texts.append(read_bounded(folder / file, _LONGEST_NAME).decode("utf-8"))
                except (ArchiveNotFoundError, ArchiveCorruptError) as error:
                    log.warning("catalog %s: %s", self.path, error)
        return tuple(sorted(texts))

    def named(self, entry: CatalogEntry) -> CatalogEntry:
        """The same entry with the names that its document has now."""
        return self._entry(entry.id) or entry

    def add_name(self, document_id: str, name: str) -> None:
        """Keep that a document is called `name`, too; what UTF-8 cannot hold is replaced, as in a manifest.

        Raises
        ------
        ConfigError
            If the name is longer than any that is read.
        """
        name = name.encode("utf-8", "replace").decode()
        if len(name.encode()) > _LONGEST_NAME:
            raise ConfigError(f"the name {name[:20]!r}... is too long; give at most {_LONGEST_NAME} bytes")
        entry = self._entry(document_id)
        if entry is None or name in entry.names or not name:
            return
        with self._locked():
            self._write_names(document_id, [each for each in (*entry.names, name) if each])

    def drop_name(self, document_id: str, name: str) -> bool:
        """Take a name from a document that has others; whether it has."""
        with self._locked():
            entry = self._entry(document_id)
            names = () if entry is None else entry.names
            if name not in names or len(names) < 2:
                return False
            self._write_names(document_id, [each for each in names if each != name])
            return True

    def _write_names(self, document_id: str, names: Sequence[str]) -> None:
        """Write the names that a document has in future, in this order: those that it has come first.

        So whoever dies half-way loses none of them.
        """
        folder = self._names_of / self.document(document_id).name
        folder.mkdir(parents=True, exist_ok=True)
        files = {hashlib.sha256(name.encode()).hexdigest(): name for name in names}
        for file, name in files.items():
            if not is_there(folder / file):
                write_whole(folder / file, name.encode())
        for file in _names(folder):
            if file not in files:
                (folder / file).unlink(missing_ok=True)

    def _check_common(self, manifest: Manifest) -> None:
        ours = (self.head.fingerprint, self.head.layout, self.head.recipe.identity())
        if (manifest.fingerprint, manifest.layout, manifest.recipe.identity()) != ours:
            raise ArchiveCorruptError("its model, layout or recipe is not the catalog's; it does not belong here")

    def is_whole(self, document_id: str, transforms: SharedTransforms, *, checksums: bool = False) -> bool:
        """Whether a sound archive of this catalog stands there: manifest and lengths of files, or also checksums.

        Raises
        ------
        ArchiveReadError
            If the system did not let it be read just now.
        """
        path = self.document(document_id)
        try:
            manifest = read_manifest(path)
            self._check_common(manifest)
            if manifest.transforms is not None:
                transforms.of(manifest.transforms)
            if checksums:
                return is_sound(path, manifest, transforms=transforms.of)
            with system_errors(f"document {document_id[:12]}..."):
                return all((path / name).stat().st_size == entry.bytes for name, entry in manifest.files.items())
        except (ArchiveNotFoundError, ArchiveFormatError, ArchiveCorruptError):
            return False

    def revive(self, document_id: str, stamp: Stamp | None, transforms: SharedTransforms) -> CatalogEntry | None:
        """The entry of a whole document with the mark of a removed one taken away; None where it must be built.

        `stamp` is that of the archive that the caller saw. A removed document is checked byte by byte, so that to
        remove and add again mends a damaged one.

        Raises
        ------
        ArchiveReadError
            If the system did not let it be read just now.
        """
        marked = self._is_marked(document_id)
        if stamp is None or not self.is_whole(document_id, transforms, checksums=marked):
            return None
        with self._locked():
            if self.stamp(document_id) != stamp:
                return None
            sweep_under_lock(self._documents, only=document_id)
            if self._is_marked(document_id):  # else nothing changes, and the catalog may be on a read-only medium
                self._mark(document_id).unlink(missing_ok=True)
            return self._read_entry(document_id)

    def remove(self, document_id: str) -> None:
        """Mark a document as removed.

        Raises
        ------
        ArchiveNotFoundError
            If there is no such document, or it is removed already.
        """
        path, mark = self.document(document_id), self._mark(document_id)
        if not os.path.lexists(path):
            recover(path)
        with self._locked():
            if self._is_marked(document_id) or not os.path.lexists(path):
                raise self.not_found(document_id)
            self._removed.mkdir(exist_ok=True)
            mark.touch()
            fsync_folder(self._removed)

    def not_found(self, document_id: str) -> ArchiveNotFoundError:
        """The error for a document that is not there."""
        why = "was removed from" if self._is_marked(document_id) else "is not in"
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
            left = []
            for target, *rest in leftovers(self._documents):
                if not os.path.lexists(target) and stamp_of(rest[1] / MANIFEST_FILE) is not None and not dry_run:
                    rest[1].rename(target)  # a build died while it was replacing this archive
                left += [path for path in rest if os.path.lexists(path)]
            marks = [self._removed / name for name in _names(self._removed) if is_document_id(name)]
            due = [mark for mark in marks if now - _last_change(mark) >= grace_s]
            doomed = {mark.name: self.document(mark.name) for mark in due if os.path.lexists(self.document(mark.name))}
            n_bytes = sum(map(_size, (*doomed.values(), *left)))
            result = GcResult(documents=tuple(sorted(doomed)), temporary=len(left), bytes=n_bytes)
            if dry_run:
                return result
            left += [_put_aside(path) for path in doomed.values()]
            for mark in due:
                delete(self._names_of / mark.name)
                mark.unlink(missing_ok=True)
        for path in left:  # without the lock: nobody else names these any more
            delete(path)
        return result

    def _mark(self, document_id: str) -> Path:
        return self._removed / self.document(document_id).name

    def _is_marked(self, document_id: str) -> bool:
        with system_errors(f"document {document_id[:12]}... of the catalog {str(self.path)!r}"):
            return is_there(self._mark(document_id))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self._documents.mkdir(exist_ok=True)
            with publishing_in(self._documents):
                yield
        except RagkvError:
            raise
        except OSError as error:
            raise ConfigError(f"cannot change the catalog {str(self.path)!r}: {error.strerror}") from error


def _names(folder: Path) -> list[str]:
    try:
        return sorted(found.name for found in folder.iterdir())
    except FileNotFoundError:
        return []
    except NotADirectoryError as error:
        raise ConfigError(f"{str(folder)!r} of a catalog cannot be read: {error.strerror}") from error
    except OSError as error:
        raise ArchiveReadError(f"{str(folder)!r} of a catalog cannot be read: {error.strerror}") from error


def _put_aside(path: Path) -> Path:
    """Rename a document out of the way: from then on nobody finds half of it.

    The name is one that is cleared away where this process dies, not one of an archive that is put back.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    path.rename(aside)
    return aside


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
