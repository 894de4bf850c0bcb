"""JSON files that carry a checksum of themselves: the manifest of an archive and the head of a catalog."""

from __future__ import annotations

import json
from typing import Any

from ragkv.errors import ArchiveCorruptError, ArchiveFormatError
from ragkv.model.fingerprint import json_sha256

LONGEST = 1 << 24
"""Bytes of the longest sealed file that is read."""

_MOST = 1 << 63


def sealed_text(body: dict[str, Any]) -> str:
    """The text of a file with this body."""
    return json.dumps({**body, "sha256": json_sha256(body)}, indent=1, ensure_ascii=False) + "\n"


def unsealed(text: str, *, file: str, kind: str, version: int) -> dict[str, Any]:
    """The body of a sealed text, checked as far as its checksum, kind and version.

    Raises
    ------
    ArchiveFormatError
        If it is of another kind or version.
    ArchiveCorruptError
        If it was cut short, is not JSON, or its own checksum does not hold.
    """
    if not text.endswith("}\n"):
        raise ArchiveCorruptError(f"{file}: does not end in a closing brace and a newline; it was cut short")
    try:
        body = json.loads(text)
        if not isinstance(body, dict) or body.get("format") != kind:
            raise ArchiveFormatError(f"{file}: not a {kind} file")
        found = body.get("version")
        if type(found) is not int or found != version:
            raise ArchiveFormatError(
                f"{file}: format version {found!r}, this release reads {version}; build it again from the documents"
            )
        if body.pop("sha256", None) != json_sha256(body):
            raise ArchiveCorruptError(f"{file}: its own checksum does not hold; it was altered")
    except (ValueError, RecursionError) as error:
        raise ArchiveCorruptError(f"{file}: not valid JSON ({error}); it was cut short or altered") from error
    return body


def whole(name: str, value: object) -> int:
    """`value` if it is a whole number from 0 to 2^63 - 1, and written as one: 1.0 and true are not."""
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(f"{name} is {value!r}, not a whole number from 0 to 2^63 - 1")
    return value


def text(name: str, value: object) -> str:
    """`value` if it is text that UTF-8 can hold."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}, not text")
    value.encode()
    return value


def flag(name: str, value: object) -> bool:
    """`value` if it is true or false."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, not true or false")
    return value


def sha256(name: str, value: object) -> str:
    """`value` if it is a SHA-256 in lower-case hexadecimal digits."""
    digest = text(name, value)
    if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise ValueError(f"{name} is {digest!r}, not 64 lower-case hexadecimal digits")
    return digest
