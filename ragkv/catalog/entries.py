"""What a catalog says of a document, and which document a word means."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from ragkv.archive.manifest import Manifest
from ragkv.errors import ArchiveNotFoundError, ConfigError

MIN_ID = 6
"""Characters of an id that are enough to name a document, if no other begins with them."""


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


def entry_of(document_id: str, path: Path, manifest: Manifest) -> CatalogEntry:
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


def name_meant(entry: CatalogEntry, word: str) -> str | None:
    """The name of a document that `word` is, whole or as its last part; None where it is the start of its id.

    Raises
    ------
    ConfigError
        If it is the last part of several of them.
    """
    found = [name for name in entry.names if name == word] or [name for name in entry.names if _base(name) == word]
    if len(found) > 1:
        raise ConfigError(f"{word!r} is {len(found)} names of one text: {', '.join(found)}; give one of them whole")
    return found[0] if found else None


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
