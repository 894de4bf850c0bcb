"""Opening archives: one descriptor each, no archived row read, and nothing served of a file that changed in place."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ragkv import Archive, PromptLayout
from ragkv.answer.ask import ask
from ragkv.archive.transforms import Transforms, read_transforms, transforms_bytes
from ragkv.archive.verify import verify_archive
from ragkv.build.builder import BuildRequest, fit_transforms, write_archive
from ragkv.catalog.catalog import Catalog
from ragkv.errors import ArchiveCorruptError
from tests.archives import CODED, DOCUMENT, archive_of, loaded
from tests.forge import damage_group
from tests.tiny import TEXT

FDS = Path("/proc/self/fd")
QUESTION = "Who kept the book?"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small coded archive; do not change it."""
    return archive_of(tmp_path_factory.mktemp("built") / "a", document=TEXT, recipe=CODED).path


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return shutil.copytree(built, tmp_path / "a")


def answer(archive: Archive) -> str:
    return ask(archive, QUESTION, max_new_tokens=2).text


# --- descriptors


def test_an_open_archive_keeps_one_descriptor(built: Path) -> None:
    before = len(list(FDS.iterdir()))
    archive = Archive.open(built, loaded("llama"))
    assert len(list(FDS.iterdir())) == before + 1
    answer(archive)
    assert len(list(FDS.iterdir())) == before + 1
    del archive
    assert len(list(FDS.iterdir())) == before


IN_A_SMALL_PROCESS = """
import resource, sys
from ragkv import Archive
from ragkv.errors import ArchiveReadError
from tests.archives import loaded

model, n_most = loaded("llama"), int(sys.argv[2])
Archive.open(sys.argv[1], model)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
held = []
try:
    for _ in range(n_most):
        held.append(Archive.open(sys.argv[1], model))
    print(len(held), "open")
except ArchiveReadError as error:
    assert len(held) > 64
    print(error)
"""


def in_a_small_process(folder: Path, n_archives: int) -> str:
    """What a process with at most 256 descriptors says when it opens so many archives."""
    command = [sys.executable, "-c", IN_A_SMALL_PROCESS, str(folder), str(n_archives)]
    root = str(Path(__file__).resolve().parent.parent)
    env = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=root, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_sixty_four_archives_are_open_at_once_under_a_low_limit(built: Path) -> None:
    assert in_a_small_process(built, 64) == "64 open"


def test_running_out_of_descriptors_names_the_limit(built: Path) -> None:
    told = in_a_small_process(built, 1000)
    assert "Too many open files" in told
    assert "ulimit -n" in told
    assert "\n" not in told


# --- archived rows are not read


def test_damage_among_the_archived_rows_is_found_by_the_recall_that_touches_it(folder: Path) -> None:
    group = damage_group(folder, 1)
    archive = Archive.open(folder, loaded("llama"))
    archive.whole_layer(0)
    with pytest.raises(ArchiveCorruptError, match=f"row group {group} has another SHA-256"):
        archive.whole_layer(1)
    with pytest.raises(ArchiveCorruptError, match=f"row group {group} has another SHA-256"):
        answer(archive)
    assert verify_archive(folder) == [f"rows.parquet: the SHA-256 of row group {group} is not that of its footer"]


# --- the rows file changed in place


def test_a_file_cut_short_under_an_open_archive_is_refused(folder: Path) -> None:
    archive = Archive.open(folder, loaded("llama"))
    answer(archive)
    os.truncate(folder / "rows.parquet", 100)
    with pytest.raises(ArchiveCorruptError, match="changed in place"):
        answer(archive)


def test_a_file_overwritten_under_an_open_archive_is_refused(folder: Path, tmp_path: Path) -> None:
    other = archive_of(tmp_path / "other", document=DOCUMENT, recipe=CODED).path
    archive = Archive.open(folder, loaded("llama"))
    shutil.copyfile(other / "rows.parquet", folder / "rows.parquet")
    with pytest.raises(ArchiveCorruptError, match="changed in place"):
        answer(archive)


def test_an_archive_that_was_replaced_or_deleted_goes_on_answering(folder: Path) -> None:
    archive = Archive.open(folder, loaded("llama"))
    before = answer(archive)
    archive_of(folder, document=DOCUMENT, recipe=CODED)
    assert answer(archive) == before
    shutil.rmtree(folder)
    assert answer(archive) == before


# --- shared transforms


def test_an_archive_of_a_catalog_shares_transforms_and_opens_by_its_path(tmp_path: Path) -> None:
    catalog = Catalog.create(tmp_path / "c", loaded("llama"), layout=PromptLayout.plain(), recipe=CODED)
    entries = [catalog.add(text) for text in (TEXT, DOCUMENT)]
    [shared] = (tmp_path / "c" / "transforms").glob("*.parquet")
    for entry in entries:
        assert not (entry.path / "transforms.parquet").exists()
        archive = Archive.open(entry.path, loaded("llama"))
        assert archive.manifest.transforms == shared.stem
        assert answer(archive) == answer(catalog.archive(entry.id))
        assert verify_archive(entry.path) == []


def test_an_archive_taken_out_of_its_catalog_says_what_it_lacks(tmp_path: Path) -> None:
    catalog = Catalog.create(tmp_path / "c", loaded("llama"), layout=PromptLayout.plain(), recipe=CODED)
    away = shutil.copytree(catalog.add(TEXT).path, tmp_path / "away" / "documents" / "a")
    with pytest.raises(ArchiveCorruptError, match="keep an archive in its catalog, or build it alone"):
        Archive.open(away, loaded("llama"))


def fitted(text: str, *, other: str = "") -> tuple[BuildRequest, Transforms]:
    """A request for `text`, and transforms fitted on `other`, or on the text itself."""
    asked = [
        BuildRequest.of(loaded("llama"), each, recipe=CODED, layout=PromptLayout.plain())
        for each in (text, other or text)
    ]
    layers = fit_transforms(asked[1:], [asked[1].prefill()])
    return asked[0], read_transforms(transforms_bytes(layers))


def test_a_document_that_fits_its_catalog_badly_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    request, transforms = fitted(DOCUMENT, other="the same word again " * 60)
    with caplog.at_level(logging.WARNING):
        result = write_archive(request, request.prefill(), tmp_path / "a", transforms=transforms)
    assert result.misfit > 1.5
    assert f"lose {result.misfit:.1f} times" in caplog.text


@pytest.mark.parametrize("document", [TEXT, DOCUMENT], ids=["short", "long"])
def test_a_document_that_transforms_were_fitted_on_fits(
    document: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    request, transforms = fitted(document)
    with caplog.at_level(logging.WARNING):
        result = write_archive(request, request.prefill(), tmp_path / "a", transforms=transforms)
    assert 0.5 < result.misfit < 1.5
    assert "badly" not in caplog.text
