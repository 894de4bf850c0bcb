"""Footers of Parquet files are read here, as pyarrow reads them, and no footer ends the process."""

from __future__ import annotations

import hashlib
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ragkv.archive.files import system_errors
from ragkv.archive.parquet import LEVELS_CODE, PLAIN_CODE, read_row_groups
from ragkv.archive.verify import verify_archive
from ragkv.errors import ArchiveCorruptError
from tests.archives import CODED, DOCUMENT, archive_of
from tests.forge import reseal

ROOT = Path(__file__).resolve().parent.parent
FILES = ("rows.parquet", "tokens.parquet", "prototypes.parquet", "transforms.parquet")
CODES = {"PLAIN": PLAIN_CODE, "RLE": LEVELS_CODE, "DELTA_BINARY_PACKED": 5}
CODEC = b"\x15\x00\x16"
"""A field of a column, the codec (none), and the head of the next: its number of values."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive; do not change it."""
    return archive_of(tmp_path_factory.mktemp("built") / "a", document=DOCUMENT, recipe=CODED).path


def footer(path: Path) -> bytes:
    raw = path.read_bytes()
    return raw[-8 - int.from_bytes(raw[-8:-4], "little") : -8]


@pytest.mark.parametrize("name", FILES)
def test_row_groups_are_what_pyarrow_says(built: Path, name: str) -> None:
    metadata, groups = pq.read_metadata(built / name), read_row_groups(footer(built / name))
    assert len(groups) == metadata.num_row_groups > 0
    for place, group in enumerate(groups):
        assert group.rows == metadata.row_group(place).num_rows
        for index, column in enumerate(group.columns):
            chunk = metadata.row_group(place).column(index)
            assert column.is_uncompressed == (chunk.compression == "UNCOMPRESSED")
            assert column.encodings == {CODES[encoding] for encoding in chunk.encodings}
            assert column.values == chunk.num_values
            assert (column.bytes, column.uncompressed_bytes) == (
                chunk.total_compressed_size,
                chunk.total_uncompressed_size,
            )
            assert column.first_page == chunk.data_page_offset


def test_compressed_columns_and_dictionaries_are_told(tmp_path: Path) -> None:
    table = pa.table({"a": pa.array(range(1000), pa.int32())})
    pq.write_table(table, tmp_path / "c", compression="zstd", use_dictionary=False)
    (group,) = read_row_groups(footer(tmp_path / "c"))
    assert not group.columns[0].is_uncompressed
    pq.write_table(table, tmp_path / "d", compression="none", use_dictionary=True)
    (group,) = read_row_groups(footer(tmp_path / "d"))
    assert not group.columns[0].is_uncompressed


def test_an_unknown_codec_is_a_fault_and_not_the_end_of_the_process(built: Path, tmp_path: Path) -> None:
    """In a process of its own: pyarrow would end it."""
    for name in FILES:
        folder = shutil.copytree(built, tmp_path / name)
        raw, own = (folder / name).read_bytes(), footer(folder / name)
        (folder / name).write_bytes(raw.replace(own, own.replace(CODEC, b"\x15\x10\x16", 1)))
        reseal(folder, transforms=hashlib.sha256((folder / "transforms.parquet").read_bytes()).hexdigest())
    code = (
        "import sys; from ragkv.archive.verify import verify_archive; [print(*verify_archive(f)) for f in sys.argv[1:]]"
    )
    command = [sys.executable, "-c", code, *(str(tmp_path / name) for name in FILES)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    assert [line.split(":")[0] for line in ended.stdout.splitlines()] == list(FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_footer_of_other_bytes_is_read_or_refused(built: Path, name: str) -> None:
    draw, own = random.Random(0), footer(built / name)
    refused = 0
    for turn in range(400):
        raw = bytearray(own)
        if turn % 4:
            raw[draw.randrange(len(raw))] = draw.randrange(256)
        else:
            raw = raw[: draw.randrange(len(raw))]
        try:
            with system_errors(name):
                read_row_groups(bytes(raw))
        except ArchiveCorruptError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "index out of range"),
        (b"\x00", "4"),
        (b"\x1c" * 5000 + b"\x00" * 5000, "nested too deeply"),
        (b"\x19" * 5000, "."),
        (b"\x19\xfc\xff\xff\xff\xff\x07", "longer than the footer"),
        (b"\x18\xff\xff\xff\xff\x07", "cut short"),
        (b"\x15" + b"\xff" * 11 + b"\x01\x00", "too long"),
        (b"\x05\x02\x00", "not in order"),
        (b"\x1d\x00", "kind 13"),
    ],
)
def test_hostile_footers_are_one_error(raw: bytes, said: str) -> None:
    with pytest.raises(ArchiveCorruptError, match=said), system_errors("a table"):
        read_row_groups(raw)


def test_a_sound_archive_stays_sound(built: Path) -> None:
    assert verify_archive(built) == []
