"""Reading files that nobody vouches for: regular ones only, bounded, and system trouble told apart from damage."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import torch

from ragkv.errors import ArchiveCorruptError, ArchiveNotFoundError, ArchiveReadError, ConfigError, RagkvError

ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""What the system says of a file that is not there, or of links that lead nowhere. Anything else says nothing."""

Stamp = tuple[int, int, int]
"""Which file stands in a place: inode, time of change in ns and length."""

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/")


@dataclass(frozen=True)
class FileEntry:
    """Length and checksum of a file, as the manifest records them."""

    bytes: int
    sha256: str


def local_path(path: str | Path) -> Path:
    """`path` as a path of this machine.

    Raises
    ------
    ConfigError
        If it is a URL, which would otherwise become a local folder called ``s3:`` or the like. One slash is enough for
        one, because a `Path` has made one of two.
    """
    url = _URL.match(str(path))
    if url is not None:
        given = str(path) if "://" in str(path) else str(path).replace(":/", "://", 1)
        raise ConfigError(
            f"URLs are not supported yet, and {given!r} is one; give a path on this machine (an absolute one, if a "
            f"folder of it is called '{url['scheme']}:')"
        )
    return Path(path)


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
        raise _no_memory(what) from error
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
        if _is_no_memory(error):
            raise _no_memory(what) from error
        raise ArchiveCorruptError(f"{what} cannot be read ({one_line(error)})") from error


def one_line(error: Exception) -> str:
    """The text of an error without line breaks, which Arrow and torch make."""
    return " ".join(str(error).split())


def _is_no_memory(error: Exception) -> bool:
    """Whether torch found no memory: on the host it says so in words only."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _no_memory(what: str) -> ArchiveReadError:
    return ArchiveReadError(f"{what} cannot be read: no memory left; close archives, or give the process more")


def _cure(number: int) -> str:
    if number in (errno.EMFILE, errno.ENFILE):
        return "; close archives, or raise the limit of open files (ulimit -n)"
    if number == errno.ENOMEM:
        return "; close archives, or give the process more memory"
    return ""


def open_regular(path: Path) -> int:
    """A descriptor of a regular file; a pipe, a device or a folder in its place is refused and never waited for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENODEV):  # sockets, and devices without a driver
            raise ArchiveCorruptError(f"{path.name}: not a regular file") from error
        raise
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
        return handle.read(length + 1)  # a reader sets aside what is asked for, however short the file is


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
    """What tells the regular file at `path` from one put in its place; None if there is none.

    Raises
    ------
    OSError
        If the system refused to say: that does not mean that there is none.
    """
    found = _looked_at(path)
    if found is None or not stat.S_ISREG(found.st_mode):
        return None
    return (found.st_ino, found.st_mtime_ns, found.st_size)


def is_there(path: Path) -> bool:
    """Whether anything stands at `path`, of any kind; a link counts as what it points to.

    Raises
    ------
    OSError
        If the system refused to say. `Path.exists` takes some of what it says for "not there".
    """
    return _looked_at(path) is not None


def _looked_at(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise
