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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ragkv.archive.files import Stamp, read_bounded, stamp_of, system_errors
from ragkv.archive.manifest import MANIFEST_FILE, Manifest, read_manifest
from ragkv.archive.publish import delete, fsync_folder, leftovers, publishing_in, recover, sweep_under_lock, write_whole
from ragkv.archive.verify import is_sound
from ragkv.catalog.head import CatalogHead, is_document_id
from ragkv.catalog.transforms import SharedTransforms
from ragkv.errors import (
    ArchiveCorruptError,
    ArchiveFormatError,
    ArchiveNotFoundError,
    ArchiveReadError,
    ConfigError,
)

log = logging.getLogger(__name__)

MIN_ID = 6
"""Characters of an id that are enough to name a document, if no other begins with them."""

_LONGEST_NAME = 1 << 16  # bytes


@dataclass(frozen=True)
class CatalogEntry:
    """One document of a catalog: ``tokens`` of the document alone, ``bytes`` of its files without the manifest.

    ``names`` are all that its text was added by, ``name`` the first of them in order. ``built`` is true where the call
    that gave this entry built the archive, false where it was there already.
    """

    id: str
    name: str
    tokens: int
    bytes: int
    built: bool
    path: Path
    names: tuple[str, ...] = ()


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
        self._seen: dict[
            str, tuple[Stamp | None, CatalogEntry | None]
        ] = {}  # archives never change, so each is read once

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
        if not is_document_id(document_id) or self._mark(document_id).exists():
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
        marked, named = set(_names(self._removed)), set(_names(self._names_of))
        found = []
        for name in _names(self._documents):
            if is_document_id(name) and name not in marked:
                found.append(self._entry(name, has_names=name in named))
        return sorted((entry for entry in found if entry is not None), key=lambda entry: (entry.name, entry.id))

    def _entry(self, document_id: str, *, has_names: bool = True) -> CatalogEntry | None:
        path = self.document(document_id)
        try:
            stamp = self.stamp(document_id)
            seen, entry = self._seen.get(document_id, (None, None))
            if entry is None or seen != stamp:
                manifest = read_manifest(path)
                self._check_common(manifest)
                entry = _entry_of(document_id, path, manifest)
                if stamp is not None:
                    self._seen[document_id] = (stamp, entry)
            names = self.names(document_id) if has_names else ()
        except (ArchiveNotFoundError, ArchiveFormatError, ArchiveCorruptError, ArchiveReadError) as error:
            if os.path.lexists(path):  # else it was cleared away between the two looks
                log.warning("catalog %s: document %s is left out: %s", self.path, document_id, error)
            return None
        return dataclasses.replace(entry, name=names[0], names=names) if names else entry

    def names(self, document_id: str) -> tuple[str, ...]:
        """All names that a document was given, if it has more than that in its manifest, or another."""
        folder = self._names_of / self.document(document_id).name
        with system_errors(f"names of the document {document_id[:12]}..."):
            whole = [name for name in _names(folder) if not name.startswith(".")]  # a dot marks one half written
            texts = [read_bounded(folder / name, _LONGEST_NAME).decode("utf-8") for name in whole]
        return tuple(sorted(texts))

    def named(self, entry: CatalogEntry) -> CatalogEntry:
        """The same entry with the names that its document has now."""
        return self._entry(entry.id) or entry

    def add_name(self, document_id: str, name: str) -> None:
        """Keep that a document is called `name`, too."""
        entry = self._entry(document_id)
        if entry is None or name in entry.names or not name:
            return
        with self._locked():
            held = sorted(set(entry.names) - {""})
            self._write_names(document_id, [*held, name])

    def drop_name(self, document_id: str, name: str) -> bool:
        """Take a name from a document that has others; whether it has."""
        with self._locked():
            entry = self._entry(document_id)
            names = set() if entry is None else set(entry.names)
            if name not in names or len(names) < 2:
                return False
            self._write_names(document_id, sorted(names - {name}))
            return True

    def _write_names(self, document_id: str, names: list[str]) -> None:
        """Write names in this order, those that it has first: a process that dies in between loses none of them."""
        folder = self._names_of / self.document(document_id).name
        folder.mkdir(parents=True, exist_ok=True)
        files = {hashlib.sha256(name.encode()).hexdigest(): name for name in names}
        for file, name in files.items():
            if not (folder / file).exists():
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
        """
        mark = self._mark(document_id)
        if stamp is None or not self.is_whole(document_id, transforms, checksums=mark.exists()):
            return None
        with self._locked():
            if self.stamp(document_id) != stamp:
                return None
            sweep_under_lock(self._documents, only=document_id)
            if mark.exists():  # else there is nothing to change, and the catalog may be on a medium that is read only
                mark.unlink(missing_ok=True)
            return self._entry(document_id)

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
    """The one document that `word` names: an id, a whole name, the start of an id, or the last part of a path.

    The start of an id has `MIN_ID` characters or more.

    Raises
    ------
    ArchiveNotFoundError
        If there is none.
    ConfigError
        If there are several; they are named.
    """
    start = word.lower() if len(word) >= MIN_ID else None
    exact = [entry for entry in entries if entry.id == start]
    found = exact or [entry for entry in entries if word and word in entry.names]
    found = found or [entry for entry in entries if start and entry.id.startswith(start)]
    found = found or [entry for entry in entries if word and word in map(_base, entry.names)]
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
    return [
        entry
        for entry in entries
        if any(wanted in name.casefold() for name in entry.names) or entry.id.startswith(wanted)
    ]


def _base(name: str) -> str:
    """The last part of a name that is a path."""
    return name.replace("\\", "/").rpartition("/")[2]


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
        names=(manifest.document_name,),
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
    """Rename a document out of the way: from then on nobody finds half of it.

    It gets the name of what a dead build left, so that whoever clears up deletes it, and nobody puts it back.
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
