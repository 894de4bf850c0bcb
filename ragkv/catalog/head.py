"""The head of a catalog, ``catalog.json``: what every archive in it has in common, written once and never changed.

The format is written up in ``indexes/FORMAT.md``.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragkv.archive.manifest import FORMAT_VERSION, MANIFEST_FILE
from ragkv.archive.publish import fsync_folder, publishing_in
from ragkv.errors import ArchiveCorruptError, ArchiveFormatError, ArchiveNotFoundError, ConfigError
from ragkv.model.fingerprint import Fingerprint, json_sha256
from ragkv.model.prompt import PromptLayout
from ragkv.model.shape import DTYPE_NAMES
from ragkv.recipe import Recipe

CATALOG_FORMAT = "ragkv-catalog"
CATALOG_VERSION = 1
CATALOG_FILE = "catalog.json"
_ID = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class CatalogHead:
    """Model, prompt layout and recipe of every document in a catalog; round-trips to JSON."""

    created_by: str
    model_name: str
    fingerprint: Fingerprint
    layout: PromptLayout
    recipe: Recipe

    def document_id(self, prefix_ids: Sequence[int], document_ids: Sequence[int]) -> str:
        """What decides the content of an archive, hashed: the same on every machine, and no name in it.

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
                "recipe": self.recipe.to_dict(),
            }
        )

    def to_json(self) -> str:
        body = self._body()
        return json.dumps({**body, "sha256": json_sha256(body)}, indent=1, ensure_ascii=False) + "\n"

    def _body(self) -> dict[str, Any]:
        return {
            "format": CATALOG_FORMAT,
            "version": CATALOG_VERSION,
            "created_by": self.created_by,
            "model": {"name": self.model_name, **self.fingerprint.to_dict()},
            "layout": self.layout.to_dict(),
            "recipe": self.recipe.to_dict(),
        }

    @classmethod
    def from_json(cls, text: str) -> CatalogHead:
        """Parse and check a catalog's head.

        Raises
        ------
        ArchiveFormatError
            If it is another format or version, or a field is missing or of the wrong kind.
        ArchiveCorruptError
            If it was cut short or its own checksum does not hold.
        """
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ArchiveCorruptError(
                f"{CATALOG_FILE}: not valid JSON ({error}); it was cut short or altered"
            ) from error
        if not isinstance(body, dict) or body.get("format") != CATALOG_FORMAT:
            raise ArchiveFormatError(f"{CATALOG_FILE}: not the head of a {CATALOG_FORMAT}")
        if type(body.get("version")) is not int or body["version"] != CATALOG_VERSION:
            raise ArchiveFormatError(
                f"{CATALOG_FILE}: format version {body.get('version')!r}, this release reads {CATALOG_VERSION}; "
                "make the catalog again"
            )
        if body.pop("sha256", None) != json_sha256(body):
            raise ArchiveCorruptError(f"{CATALOG_FILE}: its own checksum does not hold; it was altered")
        try:
            return cls._from_body(body)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ArchiveFormatError(f"{CATALOG_FILE}: field missing or of the wrong kind ({error})") from error

    @classmethod
    def _from_body(cls, body: dict[str, Any]) -> CatalogHead:
        model = dict(body["model"])
        head = cls(
            created_by=body["created_by"],
            model_name=model.pop("name"),
            fingerprint=Fingerprint(**model),
            layout=PromptLayout.from_dict(body["layout"]),
            recipe=Recipe.from_dict(body["recipe"]),
        )
        texts = {"created_by": head.created_by, "model.name": head.model_name, "layout.prefix": head.layout.prefix}
        texts |= {f"model.{name}": value for name, value in model.items() if name != "rope_parameters"}
        texts |= {f"layout.stop[{place}]": text for place, text in enumerate(head.layout.stop)}
        for name, value in texts.items():
            if not isinstance(value, str):
                raise TypeError(f"{name} is {value!r}, not text")
        if not isinstance(head.fingerprint.rope_parameters, dict):
            raise TypeError(f"model.rope_parameters is {head.fingerprint.rope_parameters!r}, not an object")
        if head.fingerprint.dtype not in DTYPE_NAMES:
            raise ValueError(f"model.dtype is {head.fingerprint.dtype!r}; allowed are {', '.join(DTYPE_NAMES)}")
        if json.loads(json.dumps(head._body())) != body:
            raise ValueError(f"there are fields that format version {CATALOG_VERSION} does not have")
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
    folder = Path(folder)
    try:
        text = (folder / CATALOG_FILE).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ArchiveCorruptError(f"{CATALOG_FILE}: not UTF-8 text") from error
    except OSError as error:
        why = "there is no such folder"
        if folder.is_dir():
            why = f"its {CATALOG_FILE} cannot be read ({error.strerror})"
        if (folder / MANIFEST_FILE).is_file():
            why = "it is a single archive"
        raise ArchiveNotFoundError(
            f"no catalog in {str(folder)!r}: {why}; make one with 'ragkv catalog add'"
        ) from error
    return CatalogHead.from_json(text)


def has_head(folder: str | Path) -> bool:
    """Whether a catalog stands in `folder`.

    Raises
    ------
    ConfigError
        If something else stands there, so that no catalog can be made in this place.
    """
    folder = Path(folder)
    if (folder / CATALOG_FILE).is_file():
        return True
    if folder.exists() and (not folder.is_dir() or any(not _is_leftover(found) for found in folder.iterdir())):
        raise ConfigError(f"{str(folder)!r} exists and is not a catalog; choose another place")
    return False


def write_head(folder: str | Path, head: CatalogHead) -> None:
    """Make a catalog in `folder`, unless there is one: whoever comes first makes it, and a half-made one is never seen.

    Raises
    ------
    ConfigError
        If the folder cannot be written, or something other than a catalog stands there.
    """
    folder, text = Path(folder), head.to_json()
    if CatalogHead.from_json(text) != head:
        raise ArchiveCorruptError(f"{CATALOG_FILE} does not read back as it was written")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with publishing_in(folder):
            if has_head(folder):
                return
            descriptor, name = tempfile.mkstemp(prefix=f".{CATALOG_FILE}.", suffix=".tmp", dir=folder)
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
                    handle.write(text)
                    handle.flush()
                    os.fsync(handle.fileno())
                Path(name).chmod(0o644)
                Path(name).rename(folder / CATALOG_FILE)
            finally:
                Path(name).unlink(missing_ok=True)
            fsync_folder(folder)
    except OSError as error:
        raise ConfigError(f"cannot make a catalog in {str(folder)!r}: {error.strerror}") from error


def _is_leftover(path: Path) -> bool:
    """A head that was being written when its process died."""
    return path.name.startswith(f".{CATALOG_FILE}.") and path.suffix == ".tmp"
