"""What the system refuses just now is its own error: nothing is taken for damaged, built again or deleted."""

from __future__ import annotations

import builtins
import errno
import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ragkv import Archive
from ragkv.archive.inspect import describe_archive
from ragkv.archive.verify import is_sound, verify_archive
from ragkv.build.builder import is_current
from ragkv.catalog.catalog import Catalog
from ragkv.errors import ArchiveReadError
from tests.archives import SMALL, loaded
from tests.catalogs import PLAIN, TEXTS, fill
from tests.forge import hashes

NUMBERS = (errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.ESTALE)
FILES = ("manifest.json", "tokens.parquet", "rows.parquet", "prototypes.parquet", "centroids.faiss")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("filled") / "c")


@pytest.fixture
def catalog(filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Catalog:
    """A copy of a catalog of three documents, in which nothing is built."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a document was prefilled or built")

    monkeypatch.setattr("ragkv.build.builder.prefill_cache", never)
    return Catalog.open(shutil.copytree(filled, tmp_path / "c"), loaded("llama"))


def refuse(monkeypatch: pytest.MonkeyPatch, call: str, part: str, number: int) -> None:
    """Let one system call fail for paths that end in `part`."""
    fault = OSError(number, os.strerror(number))

    def on(path: object) -> bool:
        return isinstance(path, str | os.PathLike) and os.fspath(path).endswith(part)

    def checked(real: Callable[..., Any]) -> Callable[..., Any]:
        def instead(path: object, *words: object, **named: object) -> Any:
            if on(path):
                raise fault
            return real(path, *words, **named)

        return instead

    if call == "read":  # of a descriptor that was opened before
        real_open = builtins.open

        class Broken:
            def __init__(self, handle: Any) -> None:
                self.handle = handle

            def __enter__(self) -> Broken:
                return self

            def __exit__(self, *_: object) -> None:
                self.handle.close()

            def fileno(self) -> int:
                return self.handle.fileno()

            def read(self, *_: object) -> bytes:
                raise fault

        def open_descriptor(file: Any, *words: Any, **named: Any) -> Any:
            handle = real_open(file, *words, **named)
            is_it = isinstance(file, int) and os.readlink(f"/proc/self/fd/{file}").endswith(part)
            return Broken(handle) if is_it else handle

        monkeypatch.setattr(builtins, "open", open_descriptor)
    else:
        monkeypatch.setattr(os, call, checked(getattr(os, call)))


@pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.get)
@pytest.mark.parametrize(
    ("call", "name"),
    [
        *(("open", name) for name in FILES),
        *(("read", name) for name in FILES if name != "rows.parquet"),
        ("stat", "manifest.json"),
    ],
)
def test_a_refusal_is_an_error_of_its_own_and_changes_nothing(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, call: str, name: str, number: int
) -> None:
    entry = catalog.entry("Barge.txt")
    text = next(text for text in TEXTS if catalog.document_id(text) == entry.id)
    before, model = hashes(catalog.path), loaded("llama")
    refuse(monkeypatch, call, f"{entry.id}/{name}", number)
    with pytest.raises(ArchiveReadError, match=os.strerror(number)):
        Archive.open(entry.path, model)
    for use in (
        lambda: verify_archive(entry.path),
        lambda: describe_archive(entry.path),
        lambda: catalog.archive(entry.id),
        lambda: is_current(model, text, entry.path, recipe=SMALL, layout=PLAIN),
    ):
        with pytest.raises(ArchiveReadError):
            use()
    if name == "manifest.json":  # else its checksums are not looked at
        with pytest.raises(ArchiveReadError):
            catalog.add(text)
    others = [each for each in catalog.entries() if each.id != entry.id]
    assert len(others) == 2
    assert catalog.archive(others[0].id).n_tokens > 0
    monkeypatch.undo()
    assert hashes(catalog.path) == before
    assert catalog.archive(entry.id).n_tokens > 0


@pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.get)
@pytest.mark.parametrize("part", ["catalog.json", "/documents", "/transforms", "/removed"])
def test_a_refusal_of_what_a_catalog_shares_changes_nothing(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, part: str, number: int
) -> None:
    entry = catalog.entry("Barge.txt")
    catalog.remove(entry.id)
    before, opened = hashes(catalog.path), Catalog.open(catalog.path, loaded("llama"))
    for call in ("open", "listdir", "scandir"):
        refuse(monkeypatch, call, part, number)
    if part == "catalog.json":
        with pytest.raises(ArchiveReadError):
            Catalog.open(catalog.path, loaded("llama"))
        with pytest.raises(ArchiveReadError):
            Catalog.create(catalog.path, loaded("llama"))
    elif part != "/transforms":
        with pytest.raises(ArchiveReadError):
            opened.entries()
    else:
        with pytest.raises(ArchiveReadError):
            opened.archive(opened.entry("cutter.txt").id)
    monkeypatch.undo()
    assert hashes(catalog.path) == before
    assert len(Catalog.open(catalog.path).entries()) == 2


def test_a_mark_that_cannot_be_looked_at_is_neither_there_nor_absent(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken for absent, a removed document would answer; taken for there, one that was not removed would not."""
    entry = catalog.entry("Barge.txt")
    refuse(monkeypatch, "stat", f"removed/{entry.id}", errno.EIO)
    for use in (lambda: entry.id in catalog, lambda: catalog.archive(entry.id), lambda: catalog.add(TEXTS[0])):
        with pytest.raises(ArchiveReadError, match="Input/output error"):
            use()


@pytest.mark.parametrize("fault", [OSError(errno.ENOMEM, "Cannot allocate memory"), MemoryError()])
def test_no_memory_for_the_rows_is_no_damage(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    entry = catalog.entry("Barge.txt")

    def full(*_: object, **__: object) -> None:
        raise fault

    monkeypatch.setattr(mmap, "mmap", full)
    with pytest.raises(ArchiveReadError, match="memory"):
        catalog.archive(entry.id)
    monkeypatch.undo()
    assert catalog.archive(entry.id).n_tokens > 0


def test_a_file_that_went_away_is_damage_and_not_a_refusal(catalog: Catalog) -> None:
    entry = catalog.entry("Barge.txt")
    manifest = catalog.archive(entry.id).manifest
    assert is_sound(entry.path, manifest)
    (entry.path / "tokens.parquet").unlink()
    (fault,) = verify_archive(entry.path)
    assert "tokens.parquet" in fault
    assert not is_sound(entry.path, manifest)
