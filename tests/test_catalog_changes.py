"""Documents of a catalog come and go and are damaged, and whoever reads sees whole ones or none."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock

from ragkv import Archive
from ragkv.answer.ask import ask
from ragkv.archive.verify import verify_archive
from ragkv.catalog import folder as folder_module
from ragkv.catalog.catalog import Catalog
from ragkv.errors import (
    ArchiveCorruptError,
    ArchiveNotFoundError,
    ConfigError,
)
from tests.archives import SMALL, archive_of, loaded
from tests.catalogs import PLAIN, TEXTS, age, documents, fill, make
from tests.forge import listing
from tests.tiny import TEXT

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalog of three documents; do not change it."""
    return fill(tmp_path_factory.mktemp("filled") / "c")


@pytest.fixture
def catalog(filled: Path, tmp_path: Path) -> Catalog:
    """A copy of it."""
    return make(shutil.copytree(filled, tmp_path / "c"))


# --- remove and clear up


def test_a_removed_document_is_not_listed_and_whoever_has_it_open_goes_on(catalog: Catalog) -> None:
    entry = catalog.entries()[0]
    archive = catalog.archive(entry.id)
    before = ask(archive, "Who kept the book?", max_new_tokens=6).text
    catalog.remove(entry.id)
    assert entry.id not in catalog
    assert entry.id not in [each.id for each in catalog.entries()]
    for call in (catalog.archive, catalog.remove):
        with pytest.raises(ArchiveNotFoundError, match="was removed from the catalog"):
            call(entry.id)
    assert catalog.gc(0).documents == (entry.id,)
    assert not entry.path.exists()
    assert ask(archive, "Who kept the book?", max_new_tokens=6).text == before
    with pytest.raises(ArchiveNotFoundError, match="is not in the catalog"):
        catalog.archive(entry.id)


def test_an_open_archive_needs_none_of_its_files(catalog: Catalog) -> None:
    entry = catalog.entries()[0]
    archive = catalog.archive(entry.id)
    catalog.remove(entry.id)
    catalog.gc(0)
    assert archive.tokens.ids.shape == (archive.n_tokens,)
    assert archive.whole_layer(0).keys.shape[1] == archive.n_tokens


def test_nothing_is_deleted_within_the_grace_period(catalog: Catalog) -> None:
    entry = catalog.entries()[0]
    catalog.remove(entry.id)
    age(catalog.path / "removed" / entry.id, 3500)
    before = listing(catalog.path)
    assert catalog.gc().documents == ()
    assert listing(catalog.path) == before


def test_after_the_grace_period_document_and_mark_are_deleted(catalog: Catalog) -> None:
    entry = catalog.entries()[0]
    size = sum(found.stat().st_size for found in entry.path.rglob("*") if found.is_file())
    catalog.remove(entry.id)
    age(catalog.path / "removed" / entry.id, 3700)
    assert catalog.gc(dry_run=True) == replace(catalog.gc(dry_run=True), documents=(entry.id,), bytes=size)
    assert entry.path.exists()
    assert catalog.gc().bytes == size
    assert entry.id not in documents(catalog)
    assert list((catalog.path / "removed").iterdir()) == []
    assert len(documents(catalog)) == 2


def test_adding_a_removed_document_does_not_build_it_again(catalog: Catalog) -> None:
    entry = catalog.entries()[0]
    before = listing(entry.path)
    catalog.remove(entry.id)
    assert catalog.add(TEXTS[0]) == entry
    assert catalog.entries()[0] == entry
    assert listing(entry.path) == before
    assert catalog.gc(0).documents == ()


def test_a_document_that_was_cleared_away_is_built_again(catalog: Catalog) -> None:
    entry = catalog.entries()[0]
    catalog.remove(entry.id)
    catalog.gc(0)
    assert catalog.add(TEXTS[0], name=entry.name) == replace(entry, built=True)
    assert verify_archive(entry.path) == []


def test_what_dead_builds_left_goes_and_what_a_living_one_is_writing_stays(catalog: Catalog) -> None:
    folder = catalog.path / "documents"
    living = FileLock(folder / ".a.00000000000a.lock")
    for token in ("00000000000a", "00000000000b"):
        (folder / f".a.{token}.tmp").mkdir()
        (folder / f".a.{token}.tmp" / "rows.parquet").write_bytes(b"12345")
        (folder / f".a.{token}.lock").touch()
    with living:
        result = catalog.gc()
        assert (result.documents, result.temporary, result.bytes) == ((), 2, 5)
        left = [name for name in documents(catalog) if name.startswith(".")]
        assert left == [".a.00000000000a.lock", ".a.00000000000a.tmp"]
    assert catalog.gc().temporary == 2
    assert len(documents(catalog)) == 3


def test_an_archive_that_was_being_replaced_when_the_build_died_is_listed_and_opens(catalog: Catalog) -> None:
    before = catalog.entries()
    entry = before[0]
    entry.path.rename(entry.path.with_name(f".{entry.id}.0123456789ab.old"))
    assert catalog.entries() == before
    assert catalog.archive(entry.id).name == entry.name
    assert len(documents(catalog)) == 3


def test_a_document_that_was_being_deleted_does_not_come_back(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mark goes before its files do: a process that dies between the two has deleted it."""
    entry = catalog.entries()[0]
    catalog.remove(entry.id)
    monkeypatch.setattr("ragkv.catalog.folder.delete", lambda _: None)
    catalog.gc(0)
    monkeypatch.undo()
    assert len(documents(catalog)) == 3
    assert entry.id not in catalog
    assert entry.id not in [each.id for each in catalog.entries()]
    catalog.gc(0)
    assert len(documents(catalog)) == 2


@pytest.mark.parametrize("grace", [-1, float("nan"), float("inf")])
def test_a_grace_period_that_is_no_time_is_refused(catalog: Catalog, grace: float) -> None:
    with pytest.raises(ConfigError, match="the grace period is"):
        catalog.gc(grace)


# --- damage


def test_a_damaged_document_is_logged_and_left_out(catalog: Catalog, caplog: pytest.LogCaptureFixture) -> None:
    damaged, foreign, sound = catalog.entries()
    (damaged.path / "manifest.json").write_text("{", encoding="utf-8")
    shutil.rmtree(foreign.path)
    archive_of(foreign.path, document=TEXT, recipe=replace(SMALL, window_tokens=17))
    assert Catalog.open(catalog.path).entries() == [sound]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert damaged.id in caplog.text
    assert "does not belong here" in caplog.text


def test_an_archive_under_the_id_of_another_is_refused(catalog: Catalog) -> None:
    first, second, _ = catalog.entries()
    shutil.rmtree(first.path)
    shutil.copytree(second.path, first.path)
    with pytest.raises(ArchiveCorruptError, match="is not the document that its id says"):
        catalog.archive(first.id)


def test_an_archive_of_another_layout_is_refused(catalog: Catalog) -> None:
    entry = catalog.entries()[0]
    shutil.rmtree(entry.path)
    archive_of(entry.path, document=TEXT)
    other = Catalog.create(
        catalog.path.parent / "other", loaded("llama"), layout=replace(PLAIN, stop=("!",)), recipe=SMALL
    )
    shutil.copytree(entry.path, other.path / "documents" / entry.id)
    with pytest.raises(ArchiveCorruptError, match="another prompt layout than the catalog"):
        other.archive(entry.id)


def test_adding_mends_a_document_that_lost_a_part_of_a_file(catalog: Catalog) -> None:
    entry = catalog.entries()[0]
    rows = entry.path / "rows.parquet"
    rows.write_bytes(rows.read_bytes()[:-1])
    assert catalog.add(TEXTS[0], name=entry.name) == replace(entry, built=True)
    assert verify_archive(entry.path) == []


def test_to_remove_and_add_again_mends_a_changed_byte(catalog: Catalog) -> None:
    entry = catalog.entries()[0]
    rows = entry.path / "rows.parquet"
    raw = bytearray(rows.read_bytes())
    raw[100] ^= 1
    rows.write_bytes(raw)
    with pytest.raises(ArchiveCorruptError):
        catalog.archive(entry.id)
    catalog.remove(entry.id)
    assert catalog.add(TEXTS[0], name=entry.name).built
    assert catalog.archive(entry.id).n_tokens > 0
    assert verify_archive(entry.path) == []


# --- many at once


def test_threads_that_ask_at_once_get_the_same_archive(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    real, start = Archive.open.__func__, threading.Barrier(8)

    def slow_open(cls: type[Archive], path: Path, *args: object, **options: object) -> Archive:
        opened.append(path)
        time.sleep(0.05)
        return real(cls, path, *args, **options)

    monkeypatch.setattr(Archive, "open", classmethod(slow_open))
    document_id = catalog.entries()[0].id

    def get(_: int) -> Archive:
        start.wait()
        return catalog.archive(document_id)

    with ThreadPoolExecutor(8) as pool:
        archives = list(pool.map(get, range(8)))
    assert len(set(map(id, archives))) == 1
    assert len(opened) == 1


def test_the_archive_not_asked_for_longest_is_let_go(filled: Path) -> None:
    catalog = make(filled, max_open=2)
    first, second, third = (entry.id for entry in catalog.entries())
    one, two = catalog.archive(first), catalog.archive(second)
    assert catalog.archive(first) is one
    catalog.archive(third)
    assert catalog.archive(first) is one
    assert catalog.archive(second) is not two


def test_an_archive_that_another_process_built_meanwhile_stays(tmp_path: Path) -> None:
    catalog, other = make(tmp_path / "c"), make(tmp_path / "c")
    seen: list[dict[str, tuple[int, str]]] = []

    def build_another(stage: str, done: int, _total: int) -> None:
        if (stage, done) == ("cluster", 2):
            seen.append(listing(other.add(TEXT, name="theirs").path))

    entry = catalog.add(TEXT, name="ours", on_progress=build_another)
    assert (entry.names, entry.built) == (("ours", "theirs"), False)
    assert listing(entry.path) == seen[0]
    assert documents(catalog) == [entry.id]


ADDER = """
import json, sys, torch
from pathlib import Path
from tests.catalogs import TEXTS, make
torch.set_num_threads(1)
folder = Path(sys.argv[1])
(folder / f"ready-{sys.argv[2]}").touch()
while len(list(folder.glob("ready-*"))) < 2:
    pass
catalog = make(folder / "c")
print(json.dumps([catalog.add(text, name=sys.argv[2]).built for text in TEXTS]))
"""


def test_two_processes_that_make_one_catalog_end_with_each_document_once(tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", ADDER, str(tmp_path), name] for name in "12"]
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    adders = [subprocess.Popen(command, **options) for command in commands]
    ends = [(*adder.communicate(timeout=100), adder.returncode) for adder in adders]
    assert [end[-1] for end in ends] == [0, 0], ends
    catalog = Catalog.open(tmp_path / "c")
    assert documents(catalog) == sorted(make(tmp_path / "c").document_id(text) for text in TEXTS)
    assert [verify_archive(entry.path) for entry in catalog.entries()] == [[], [], []]
    assert sum(sum(json.loads(shown)) for shown, _, _ in ends) == 3


def test_a_reader_sees_whole_documents_or_none_while_a_writer_adds_removes_and_clears_up(tmp_path: Path) -> None:
    writer = make(tmp_path / "c")
    ids = [writer.add(text).id for text in TEXTS[:2]]
    stop, seen, faults = threading.Event(), [0, 0], list[BaseException]()

    def read() -> None:
        while not stop.is_set():
            catalog = Catalog.open(writer.path, loaded("llama"))
            for document_id in ids:
                try:
                    seen[0] += catalog.archive(document_id).tokens.ids.shape[0] > 0
                except ArchiveNotFoundError:
                    seen[1] += 1
                except BaseException as error:
                    faults.append(error)
            catalog.entries()

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for turn in range(12):
        writer.remove(ids[turn % 2])
        writer.gc(0)
        time.sleep(0.01)
        assert writer.add(TEXTS[turn % 2]).built
    stop.set()
    for reader in readers:
        reader.join()
    assert faults == []
    assert seen[0] > 0
    assert [verify_archive(entry.path) for entry in writer.entries()] == [[], []]
    assert len(documents(writer)) == 2


# --- names


def test_a_name_that_is_being_written_is_no_name_and_hides_no_document(catalog: Catalog) -> None:
    entry = catalog.add(TEXTS[0], name="again.txt")
    folder = catalog.path / "names" / entry.id
    (folder / f".{'0' * 64}.0123456789ab.tmp").write_bytes("half of \u6d77".encode()[:-1])
    assert catalog.entry(entry.id).names == ("Barge.txt", "again.txt")


def test_a_name_that_vanishes_while_it_is_read_hides_no_document(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = catalog.add(TEXTS[0], name="again.txt")
    listed = folder_module._names
    gone = "0" * 64
    monkeypatch.setattr(
        folder_module, "_names", lambda path: [*listed(path), *([gone] if path.parent.name == "names" else [])]
    )
    assert catalog.entry(entry.id).names == ("Barge.txt", "again.txt")


def test_a_name_too_long_to_be_read_again_is_refused(catalog: Catalog) -> None:
    with pytest.raises(ConfigError, match="is too long; give at most 65536 bytes"):
        catalog.add(TEXTS[0], name="x" * 70_000)
    assert [entry.name for entry in catalog.entries()] == ["Barge.txt", "cutter.txt", "dinghy.txt"]
