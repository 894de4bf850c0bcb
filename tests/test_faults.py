"""Faults made on purpose, in small numbers, and those that were found before: each kind with its right behaviour."""

from __future__ import annotations

import hashlib
import io
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ragkv.archive.snapshot
import ragkv.catalog.catalog
from pipelines import faults
from pipelines.fault.kill import leftovers_below
from pipelines.fault.mend import edit_sealed
from pipelines.fault.replace import put_in_place
from pipelines.fault.sample import TEXTS, digest_of
from ragkv import Archive, PromptLayout, ask, build_archive
from ragkv.archive.inspect import describe_archive
from ragkv.archive.verify import verify_archive
from ragkv.errors import ArchiveCorruptError, ArchiveReadError
from tests.archives import DOCUMENT, SMALL, archive_of, loaded

ROOT = Path(__file__).resolve().parent.parent
_MODEL = "llama"


def build(path: Path, text: str = TEXTS[0]) -> None:
    build_archive(loaded(_MODEL), text, path, recipe=SMALL, layout=PromptLayout.plain())


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two archives of texts with the same number of tokens; do not change them."""
    folder = tmp_path_factory.mktemp("two")
    for place in range(2):
        build(folder / str(place), TEXTS[place])
    return [folder / "0", folder / "1"]


@pytest.fixture
def archive(two: list[Path], tmp_path: Path) -> Path:
    shutil.copytree(two[0], tmp_path / "archive")
    return tmp_path / "archive"


# --- the commands


@pytest.mark.parametrize(
    "arguments",
    [["replace", "--opens", "20"], ["kill", "--steps", "6"], ["tamper", "--archives", "30"]],
    ids=lambda arguments: arguments[0],
)
def test_a_command_ends_without_a_fault(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert faults.main(arguments) == 0, capsys.readouterr().out
    assert capsys.readouterr().out.startswith(f"{arguments[0]}: ")


def test_a_fault_is_told_by_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "run_replace", lambda opens: faults.Counter(opens=opens, mixed=1))
    assert faults.main(["replace", "--opens", "1"]) == 1


BUILDER = """
import sys
from pathlib import Path
from pipelines.fault.replace import put_in_place
two, place, begun = [Path(word) for word in sys.argv[1:3]], Path(sys.argv[3]), Path(sys.argv[4])
for turn in range(1000000):
    put_in_place(two[turn % 2], place)
    begun.touch()
"""


def test_killed_builders_leave_an_archive_and_the_next_build_clears_up(two: list[Path], tmp_path: Path) -> None:
    model, place = loaded(_MODEL), tmp_path / "out" / "archive"
    known = {digest_of(Archive.open(each, model)) for each in two}
    begun = [tmp_path / f"begun-{turn}" for turn in range(3)]
    start = [sys.executable, "-c", BUILDER, *map(str, two), str(place)]
    builders = [subprocess.Popen([*start, str(each)], cwd=ROOT) for each in begun]
    try:
        while not all(each.exists() for each in begun) and all(builder.poll() is None for builder in builders):
            time.sleep(0.01)
        for builder in builders:
            time.sleep(0.031)
            assert builder.poll() is None
            builder.send_signal(signal.SIGKILL)
            builder.wait()
            assert digest_of(Archive.open(place, model)) in known
    finally:
        for builder in builders:
            builder.kill()
            builder.wait()
    assert verify_archive(place) == []
    put_in_place(two[0], place)
    assert leftovers_below(place.parent) == []
    assert digest_of(Archive.open(place, model)) == digest_of(Archive.open(two[0], model))


# --- what is checked is what is loaded


def test_an_archive_replaced_between_two_reads_is_opened_wholly(
    two: list[Path], archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, real, turns = loaded(_MODEL), ragkv.archive.snapshot.read_prototypes, []

    def read(*args: Any, **kwargs: Any) -> Any:  # what another process may do at this moment
        if not turns:
            turns.append(1)
            put_in_place(two[1], archive)
        return real(*args, **kwargs)

    monkeypatch.setattr(ragkv.archive.snapshot, "read_prototypes", read)
    assert digest_of(Archive.open(archive, model)) in {digest_of(Archive.open(each, model)) for each in two}


# --- descriptors and memory


def test_an_open_archive_holds_one_descriptor_at_most_and_running_out_is_said(archive: Path) -> None:
    model, before = loaded(_MODEL), len(os.listdir("/proc/self/fd"))
    held = [Archive.open(archive, model) for _ in range(5)]
    assert len(os.listdir("/proc/self/fd")) - before <= 5
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, hard))
    try:
        with pytest.raises(ArchiveReadError, match="open files"):
            held.extend(Archive.open(archive, model) for _ in range(20))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert verify_archive(archive) == []


# --- files that nobody vouches for


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [_fifo, _device, _folder])
@pytest.mark.parametrize("name", ["manifest.json", "tokens.parquet", "rows.parquet", "centroids.faiss"])
def test_what_is_no_regular_file_is_never_waited_for(archive: Path, name: str, make: Callable[[Path], None]) -> None:
    (archive / name).unlink()
    make(archive / name)
    assert verify_archive(archive) == [f"{name}: not a regular file"]
    for use in (lambda: Archive.open(archive, loaded(_MODEL)), lambda: describe_archive(archive)):
        with pytest.raises(ArchiveCorruptError, match="not a regular file"):
            use()


def test_a_file_that_is_no_parquet_under_checksums_that_hold_is_corrupt(archive: Path) -> None:
    (archive / "tokens.parquet").write_text("hello")
    entry = {"bytes": 5, "sha256": hashlib.sha256(b"hello").hexdigest()}
    edit_sealed(archive / "manifest.json", lambda body: body["files"].update({"tokens.parquet": entry}))
    with pytest.raises(ArchiveCorruptError, match=r"tokens\.parquet: its footer does not fit"):
        Archive.open(archive, loaded(_MODEL))


def test_reading_a_small_file_sets_little_memory_aside(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, real = [], io.BufferedReader.read

    class Reader(io.BufferedReader):
        def read(self, size: int | None = -1, /) -> bytes:
            asked.append(size)
            return real(self, size)

    def opened(file: Any, mode: str) -> Any:
        return Reader(io.FileIO(file, "r"))

    monkeypatch.setattr(ragkv.archive.files, "open", opened, raising=False)
    raw = ragkv.archive.files.read_bounded(archive / "manifest.json", 1 << 31)
    assert asked == [len(raw) + 1]


def test_tokens_that_the_model_does_not_have_are_refused(archive: Path) -> None:
    import pyarrow as pa

    from pipelines.fault.mend import mend, read_groups, row_groups, write_rows

    groups = row_groups(archive)
    (table,) = read_groups(archive / "tokens.parquet")
    for odd in (-1, 2**31 - 1):
        ids = table.column("token_id").to_pylist()
        ids[20] = odd
        field = table.schema.field("token_id")
        write_rows(archive / "tokens.parquet", [table.set_column(0, field, pa.array(ids, field.type))])
        mend(archive, groups)
        with pytest.raises(ArchiveCorruptError, match="token id"):
            Archive.open(archive, loaded(_MODEL))


def test_lossless_numbers_that_are_nan_are_refused_when_recall_touches_them(archive: Path) -> None:
    from pipelines.fault.mend import mend, row_groups

    groups = row_groups(archive)
    raw = bytearray((archive / "rows.parquet").read_bytes())
    last = groups[1][1]
    raw[last - 64 : last] = b"\xff" * 64
    (archive / "rows.parquet").write_bytes(raw)
    mend(archive, groups)
    opened = Archive.open(archive, loaded(_MODEL))
    with pytest.raises(ArchiveCorruptError, match="NaN or infinite"):
        opened.whole_layer(0)


def test_positions_that_are_no_partition_are_refused(archive: Path) -> None:
    import pyarrow as pa

    from pipelines.fault.mend import mend, read_groups, write_rows

    tables = read_groups(archive / "rows.parquet")
    lists = tables[1].column("positions").to_pylist()
    field = tables[1].schema.field("positions")
    for odd in ([*lists[0], 30], [lists[1][0], *lists[0][1:]]):
        changed = pa.array([odd, *lists[1:]], field.type)
        groups = write_rows(archive / "rows.parquet", [tables[0], tables[1].set_column(3, field, changed), *tables[2:]])
        mend(archive, groups)
        opened = Archive.open(archive, loaded(_MODEL))
        with pytest.raises(ArchiveCorruptError, match="every archived position once"):
            opened.positions(0)


# --- an open archive


def test_rows_that_change_under_an_open_archive_are_caught_at_the_next_request(tmp_path: Path) -> None:
    opened = archive_of(tmp_path / "archive", document=DOCUMENT)
    build_archive(loaded(_MODEL), DOCUMENT[::-1], tmp_path / "other", recipe=SMALL, layout=PromptLayout.plain())
    assert ask(opened, "Who?", max_new_tokens=2, budget=64).token_ids
    shutil.copyfile(tmp_path / "other" / "rows.parquet", tmp_path / "archive" / "rows.parquet")
    with pytest.raises(ArchiveCorruptError, match="changed in place"):
        ask(opened, "Who?", max_new_tokens=2, budget=64)


def test_rows_that_are_cut_under_an_open_archive_are_caught_at_the_next_request(archive: Path) -> None:
    opened = Archive.open(archive, loaded(_MODEL))
    os.truncate(archive / "rows.parquet", 0)
    with pytest.raises(ArchiveCorruptError, match="changed in place"):
        ask(opened, "Who?", max_new_tokens=2, budget=64)
