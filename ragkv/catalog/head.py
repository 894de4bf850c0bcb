"""The head of a catalog, ``catalog.json``: what every archive in it has in common, written once and never changed.

The format is written up in ``indexes/FORMAT.md``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragkv.archive.files import is_there, local_path, read_bounded, stamp_of, system_errors
from ragkv.archive.manifest import FORMAT_VERSION, MANIFEST_FILE, checked_fingerprint, checked_layout
from ragkv.archive.publish import LOCK_FILE, publishing_in, sweep_under_lock, write_whole
from ragkv.archive.sealed import LONGEST, sealed_text, text, unsealed
from ragkv.errors import ArchiveCorruptError, ArchiveFormatError, ArchiveNotFoundError, ConfigError
from ragkv.model.fingerprint import Fingerprint, json_sha256
from ragkv.model.prompt import PromptLayout
from ragkv.recipe import Recipe

CATALOG_FORMAT = "ragkv-catalog"
CATALOG_VERSION = 2
CATALOG_FILE = "catalog.json"
_ID = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class CatalogHead:
    """Model, prompt layout and recipe of every document in a catalog; round-trips to JSON.

    What is recalled by default (``recipe.recall``) is the catalog's, and no part of what a document is.
    """

    created_by: str
    model_name: str
    fingerprint: Fingerprint
    layout: PromptLayout
    recipe: Recipe

    def document_id(self, prefix_ids: Sequence[int], document_ids: Sequence[int]) -> str:
        """What a document is in catalogs with this head, hashed: the same on every machine, and no name in it.

        The version of the archive format counts, so that a release that writes another one builds beside the old
        archives instead of finding them up to date.
        """
        return json_sha256(
            {
                "version": FORMAT_VERSION,
                "prefix_ids": list(prefix_ids),
                "document_ids": list(document_ids),
                "model": self.fingerprint.to_dict(),
                "layout": self.layout.to_dict(),
                "recipe": self.recipe.identity(),
            }
        )

    def to_json(self) -> str:
        return sealed_text(self._body())

    def _body(self) -> dict[str, Any]:
        return {
            "format": CATALOG_FORMAT,
            "version": CATALOG_VERSION,
            "created_by": self.created_by,
            "model": {"name": self.model_name, **self.fingerprint.to_dict()},
            "layout": self.layout.to_dict(),
            "recipe": self.recipe.identity(),
            "policy": self.recipe.recall.to_dict(),
        }

    @classmethod
    def from_json(cls, raw: str) -> CatalogHead:
        """Parse and check a catalog's head.

        Raises
        ------
        ArchiveFormatError
            If it is another format or version, or a field is missing or of the wrong kind.
        ArchiveCorruptError
            If it was cut short or its own checksum does not hold.
        """
        body = unsealed(raw, file=CATALOG_FILE, kind=CATALOG_FORMAT, version=CATALOG_VERSION)
        try:
            model = dict(body["model"])
            head = cls(
                created_by=text("created_by", body["created_by"]),
                model_name=text("model.name", model.pop("name")),
                fingerprint=checked_fingerprint(model),
                layout=checked_layout(body["layout"]),
                recipe=Recipe.from_dict({**body["recipe"], "recall": body["policy"]}),
            )
            if json.loads(json.dumps(head._body())) != body:
                raise ValueError(f"there are fields that format version {CATALOG_VERSION} does not have")
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise ArchiveFormatError(f"{CATALOG_FILE}: field missing or of the wrong kind ({error})") from error
        return head


def is_document_id(name: str) -> bool:
    """Whether `name` has the form of a document id: 64 lower-case hexadecimal digits. Nothing else becomes a path."""
    return _ID.fullmatch(name) is not None


def read_head(folder: str | Path) -> CatalogHead:
    """Read the head of the catalog in `folder`.

    Raises
    ------
    ArchiveNotFoundError
        If the folder holds no catalog.
    ArchiveFormatError, ArchiveCorruptError
        If its head is of another version, or was altered.
    """
    folder = local_path(folder)
    try:
        with system_errors(f"{str(folder)!r}: {CATALOG_FILE}"):
            return CatalogHead.from_json(read_bounded(folder / CATALOG_FILE, LONGEST).decode("utf-8"))
    except ArchiveNotFoundError as error:
        why = f"it has no {CATALOG_FILE}" if folder.is_dir() else "there is no such folder"
        if (folder / MANIFEST_FILE).is_file():
            why = "it is a single archive"
        raise ArchiveNotFoundError(
            f"no catalog in {str(folder)!r}: {why}; make one with 'ragkv catalog add'"
        ) from error


def has_head(folder: str | Path) -> bool:
    """Whether a catalog stands in `folder`.

    Raises
    ------
    ConfigError
        If something else stands there, so that no catalog can be made in this place.
    """
    folder = local_path(folder)
    with system_errors(f"{str(folder)!r}: {CATALOG_FILE}"):
        if stamp_of(folder / CATALOG_FILE) is not None:
            return True
        is_free = not is_there(folder) or (folder.is_dir() and all(map(_is_leftover, folder.iterdir())))
    if not is_free:
        raise ConfigError(f"{str(folder)!r} exists and is not a catalog; choose another place")
    return False


def write_head(folder: str | Path, head: CatalogHead) -> None:
    """Make a catalog in `folder`, unless there is one: whoever comes first makes it, and a half-made one is never seen.

    Raises
    ------
    ConfigError
        If the folder cannot be written, or something other than a catalog stands there.
    """
    folder, raw = local_path(folder), head.to_json()
    if CatalogHead.from_json(raw) != head:
        raise ArchiveCorruptError(f"{CATALOG_FILE} does not read back as it was written")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with publishing_in(folder):
            sweep_under_lock(folder, only=CATALOG_FILE)
            if not has_head(folder):
                write_whole(folder / CATALOG_FILE, raw.encode())
    except OSError as error:
        raise ConfigError(f"cannot make a catalog in {str(folder)!r}: {error.strerror}") from error


def _is_leftover(path: Path) -> bool:
    """The lock of the folder, or a head that was being written when its process died."""
    return path.name == LOCK_FILE or (path.name.startswith(f".{CATALOG_FILE}.") and path.suffix == ".tmp")


def check_same(where: str, ours: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Refuse to go on with other settings than a catalog's, naming the first that differs."""
    for name, value in ours.items():
        if asked.get(name) != value:
            raise ConfigError(
                f"{where} has {name} {value!r}, and {asked.get(name)!r} was asked for; leave it out or make another "
                "catalog"
            )
