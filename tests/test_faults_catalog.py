"""What the system refuses, damage, and deaths half-way: the rest of a catalog goes on, and nothing is lost."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ragkv.archive.snapshot
import ragkv.catalog.catalog
from pipelines.fault.mend import edit_sealed
from ragkv import Archive, ask
from ragkv.archive.inspect import describe_archive
from ragkv.archive.verify import verify_archive
from ragkv.catalog.catalog import Catalog
from ragkv.errors import ArchiveCorruptError, ArchiveFormatError, ArchiveNotFoundError, ArchiveReadError, ConfigError
from tests.archives import loaded
from tests.catalogs import TEXTS as CATALOG_TEXTS
from tests.catalogs import fill

_MODEL = "llama"


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalog of three documents; do not change it."""
    return fill(tmp_path_factory.mktemp("catalog") / "catalog")


@pytest.fixture
def catalog(filled: Path, tmp_path: Path) -> Path:
    shutil.copytree(filled, tmp_path / "catalog")
    return tmp_path / "catalog"


def test_one_hostile_manifest_does_not_take_the_catalog_down(catalog: Path) -> None:
    poisoned = min((catalog / "documents").glob("*/manifest.json"))
    deep: dict[str, Any] = {}
    for _ in range(700):
        deep = {"a": deep}
    edit_sealed(poisoned, lambda body: body["model"].update(rope_parameters=deep))
    held = Catalog.open(catalog, loaded(_MODEL))
    assert len(held.entries()) == 2
    for entry in held.entries():
        assert held.entry(entry.id[:12]).id == entry.id
        assert ask(held.archive(entry.id), "Who?", max_new_tokens=1, budget=8).token_ids
    with pytest.raises((ArchiveCorruptError, ArchiveFormatError)):
        held.archive(poisoned.parent.name)


# --- trouble that passes


def _refuse_open(monkeypatch: pytest.MonkeyPatch, number: int, under: Path) -> None:
    real = os.open

    def opened(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).startswith(str(under)) and not str(path).endswith(".lock"):
            raise OSError(number, os.strerror(number))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", opened)


def _refuse_stat(monkeypatch: pytest.MonkeyPatch, number: int, under: Path) -> None:
    real = Path.stat

    def stat(self: Path, *args: Any, **kwargs: Any) -> os.stat_result:
        if str(self).startswith(str(under)) and self.name == "manifest.json":
            raise OSError(number, os.strerror(number))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "stat", stat)


def _refuse_read(monkeypatch: pytest.MonkeyPatch, number: int, under: Path) -> None:
    class Reader(io.FileIO):
        def readinto(self, _buffer: Any, /) -> int:
            raise OSError(number, os.strerror(number))

        def readall(self) -> bytes:
            raise OSError(number, os.strerror(number))

    def opened(file: Any, mode: str) -> Any:
        return io.BufferedReader(Reader(file, "r"))

    monkeypatch.setattr(ragkv.archive.files, "open", opened, raising=False)


@pytest.fixture(params=["EIO", "EMFILE", "ENOMEM", "EACCES"])
def number(request: pytest.FixtureRequest) -> int:
    return getattr(errno, request.param)


@pytest.mark.parametrize("refuse", [_refuse_open, _refuse_stat, _refuse_read])
def test_what_the_system_refuses_is_no_damage(
    catalog: Path, number: int, refuse: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Catalog.open(catalog, loaded(_MODEL))
    entry = held.entries()[0]
    text = next(text for text in CATALOG_TEXTS if held.document_id(text) == entry.id)
    before = {found: found.read_bytes() for found in catalog.rglob("*") if found.is_file()}

    def build_none(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(ragkv.catalog.catalog, "write_archive", build_none)
    with monkeypatch.context() as patch:
        refuse(patch, number, entry.path)
        for use in (
            lambda: Archive.open(entry.path, loaded(_MODEL)),
            lambda: verify_archive(entry.path),
            lambda: describe_archive(entry.path),
            lambda: held.archive(entry.id),
            lambda: held.add(text),
        ):
            with pytest.raises(ArchiveReadError):
                use()
    assert {found: found.read_bytes() for found in catalog.rglob("*") if found.is_file()} == before
    assert len(Catalog.open(catalog).entries()) == 3


def test_a_build_that_fails_deletes_nothing(catalog: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Catalog.open(catalog, loaded(_MODEL))
    entry = held.entries()[0]
    text = next(text for text in CATALOG_TEXTS if held.document_id(text) == entry.id)
    (entry.path / "tokens.parquet").write_bytes(b"")  # damaged, so that it is built again

    def full(*_args: Any, **_kwargs: Any) -> None:
        raise ConfigError("No space left on device")

    monkeypatch.setattr(ragkv.catalog.catalog, "write_archive", full)
    with pytest.raises(ConfigError, match="No space"):
        held.add(text)
    assert entry.path.exists()
    assert len(Catalog.open(catalog).entries()) == 3


# --- what dies half-way in a catalog


def test_a_removed_document_stays_removed_when_clearing_up_dies(catalog: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ragkv.catalog.folder

    held = Catalog.open(catalog, loaded(_MODEL))
    gone = held.entries()[0].id
    held.remove(gone)

    def die(path: Path) -> None:
        if path.suffix == ".tmp":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ragkv.catalog.folder, "delete", die)
        with pytest.raises(KeyboardInterrupt):
            held.gc(0)
    held = Catalog.open(catalog, loaded(_MODEL))
    held.add(CATALOG_TEXTS[0] + " More.")
    assert gone not in held
    with pytest.raises(ArchiveNotFoundError):
        held.archive(gone)


def test_a_name_half_written_is_no_name(catalog: Path) -> None:
    held = Catalog.open(catalog, loaded(_MODEL))
    entry = held.entries()[0]
    text = next(text for text in CATALOG_TEXTS if held.document_id(text) == entry.id)
    held.add(text, name="another.txt")
    names = catalog / "names" / entry.id
    (names / f".{'0' * 64}.0123456789ab.tmp").write_bytes(b"\xff")
    assert set(Catalog.open(catalog).entry(entry.id).names) == {entry.name, "another.txt"}
    assert json.loads((entry.path / "manifest.json").read_text())["document"]["name"] == entry.name
