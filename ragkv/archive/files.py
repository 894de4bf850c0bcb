"""Reading files that nobody vouches for: regular ones only, bounded, and system trouble told apart from damage."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from ragkv.errors import ArchiveCorruptError, ArchiveNotFoundError, ArchiveReadError, RagkvError

ABSENT = (errno.ENOENT, errno.ENOTDIR)
"""What the system says of a file that is not there. Anything else says nothing about whether it is."""

Stamp = tuple[int, int, int]
"""Which file stands in a place: inode, time of change in ns and length."""


@dataclass(frozen=True)
class FileEntry:
    """Length and checksum of a file, as the manifest records them."""

    bytes: int
    sha256: str


@contextmanager
def system_errors(what: str) -> Iterator[None]:
    """Turn what the system and the readers of files raise into errors of ragkv, `what` being what was read.

    Raises
    ------
    ArchiveNotFoundError
        If the file is not there.
    ArchiveReadError
        If the system refused: too many open files, no memory, an I/O error, a permission.
    ArchiveCorruptError
        If a reader could not make sense of the bytes.
    """
    try:
        yield
    except RagkvError:
        raise
    except (MemoryError, pa.ArrowMemoryError) as error:
        raise ArchiveReadError(
            f"{what} cannot be read: no memory left; close archives, or give the process more"
        ) from (error)
    except OSError as error:
        if error.errno in ABSENT:
            raise ArchiveNotFoundError(f"{what} is not there") from error
        if error.errno is None:  # Arrow's own, about the bytes
            raise ArchiveCorruptError(f"{what} cannot be read ({one_line(error)})") from error
        raise ArchiveReadError(f"{what} cannot be read: {error.strerror}{_cure(error.errno)}") from error
    except UnicodeDecodeError as error:
        raise ArchiveCorruptError(f"{what} is not UTF-8 text") from error
    except (
        pa.ArrowException,
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise ArchiveCorruptError(f"{what} cannot be read ({one_line(error)})") from error


def one_line(error: Exception) -> str:
    """The text of an error without line breaks, which Arrow and torch make."""
    return " ".join(str(error).split())


def _cure(number: int) -> str:
    if number in (errno.EMFILE, errno.ENFILE):
        return "; close archives, or raise the limit of open files (ulimit -n)"
    if number == errno.ENOMEM:
        return "; close archives, or give the process more memory"
    return ""


def open_regular(path: Path) -> int:
    """A descriptor of a regular file; a pipe, a device or a folder in its place is refused and never waited for."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise ArchiveCorruptError(f"{path.name}: not a regular file")


def read_bounded(path: Path, limit: int) -> bytes:
    """The bytes of a regular file of at most `limit` bytes; nothing is read of a longer one."""
    with open(open_regular(path), "rb") as handle:
        length = os.fstat(handle.fileno()).st_size
        if length > limit:
            raise ArchiveCorruptError(f"{path.name}: {length} bytes, at most {limit} are allowed")
        return handle.read(limit + 1)[: limit + 1]


def read_checked(folder: Path, name: str, expected: FileEntry) -> bytes:
    """The bytes of a file whose length and SHA-256 are those expected.

    What is returned is what was checked: the file is read once.
    """
    with system_errors(f"{str(folder / name)!r}"):
        raw = read_bounded(folder / name, expected.bytes)
    digest = hashlib.sha256(raw).hexdigest()
    if len(raw) != expected.bytes or digest != expected.sha256:
        raise ArchiveCorruptError(
            f"{name}: {len(raw)} bytes and SHA-256 {digest[:12]}..., the manifest says {expected.bytes} and "
            f"{expected.sha256[:12]}..."
        )
    return raw


def stamp_of(path: Path) -> Stamp | None:
    """What tells the file at `path` from one put in its place; None if there is none.

    Raises
    ------
    OSError
        If the system refused to say: that does not mean that there is none.
    """
    try:
        found = path.stat()
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise
    return (found.st_ino, found.st_mtime_ns, found.st_size)
