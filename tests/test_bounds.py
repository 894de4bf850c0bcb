"""What little files claim takes little memory, and memory that runs out is not called damage."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from ragkv import Archive
from ragkv.archive import rows as rows_module
from ragkv.archive.files import system_errors
from ragkv.archive.manifest import LayerEntry, Manifest, read_manifest
from ragkv.archive.rows import ROWS_FILE, RowsWriter, rows_entry
from ragkv.archive.transforms import Transforms
from ragkv.archive.verify import verify_archive
from ragkv.errors import ArchiveCorruptError, ArchiveReadError, ConfigError
from tests.archives import CODED, DOCUMENT, SMALL, archive_of, loaded
from tests.catalogs import make
from tests.tiny import TEXT

FEW = ("tokens.parquet", ROWS_FILE)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small archive; do not change it."""
    return archive_of(tmp_path_factory.mktemp("built") / "a", document=TEXT).path


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return shutil.copytree(built, tmp_path / "a")


def put(folder: Path, manifest: Manifest) -> None:
    """Put a manifest whose own checksum holds in place."""
    (folder / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")


def without_clusters(manifest: Manifest, **changes: object) -> Manifest:
    files = {name: manifest.files[name] for name in FEW}
    return dataclasses.replace(manifest, transforms=None, files=files, **changes)


def test_two_thousand_million_tokens_in_a_manifest_are_compared_with_the_file_first(folder: Path) -> None:
    manifest = read_manifest(folder)
    n_document = (1 << 31) - 2 - manifest.prefix_tokens
    n = n_document + manifest.prefix_tokens
    layers = tuple(dataclasses.replace(layer, exact_tokens=n, clusters=()) for layer in manifest.layers)
    recipe = dataclasses.replace(manifest.recipe, window_tokens=1 << 31)
    claimed = without_clusters(manifest, recipe=recipe, document_tokens=n_document, archived_tokens=0, layers=layers)
    put(folder, claimed)
    assert verify_archive(folder) == [f"tokens.parquet: {manifest.n_tokens} tokens, the manifest says {n}"]


def test_heads_in_a_manifest_are_counted_and_not_listed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty-five thousand heads in each of four thousand layers."""
    layers = tuple(LayerEntry(index, 24, 1 << 16, 16, 16, 23, ()) for index in range(1 << 12))
    put(folder, without_clusters(read_manifest(folder), layers=layers))
    monkeypatch.setattr(rows_module.RowsFile, "columns", None)  # nothing is decoded either
    assert verify_archive(folder) == [
        "rows.parquet: its first row groups are not the exact tokens of every layer and KV head"
    ]


def rewrite_rows(folder: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    """Write the rows file again with its first row group changed, under checksums that hold."""
    path = folder / ROWS_FILE
    with pq.ParquetFile(path) as file:
        tables = [file.read_row_group(place) for place in range(file.num_row_groups)]
    with RowsWriter(path) as writer:
        for table in [change(tables[0]), *tables[1:]]:
            writer._write(table)
    manifest = read_manifest(folder)
    put(folder, dataclasses.replace(manifest, files={**manifest.files, ROWS_FILE: rows_entry(path)}))


def refused(folder: Path) -> None:
    fault = "rows.parquet: row group 0 is not laid out as the format says"
    assert verify_archive(folder) == [fault]
    with pytest.raises(ArchiveCorruptError, match=fault):
        Archive.open(folder, loaded("llama"))


def test_rewriting_rows_without_a_change_stays_sound(folder: Path) -> None:
    rewrite_rows(folder, lambda table: table)
    assert verify_archive(folder) == []


@pytest.mark.parametrize("column", ["layer", "cluster", "positions.list.element", "key_value"])
def test_a_compressed_column_is_refused(column: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("layer", "kv_head", "cluster", "positions.list.element", "key_value")
    compression = {name: "zstd" if name == column else "none" for name in names}
    monkeypatch.setitem(rows_module._OPTIONS, "compression", compression)
    rewrite_rows(folder, lambda table: table)
    refused(folder)


def test_more_positions_than_bytes_of_tokens_are_refused(folder: Path) -> None:
    """Equal numbers take nearly nothing on disk."""
    n_positions = 1 << 22

    def grow(table: pa.Table) -> pa.Table:
        kind = table.schema.field("positions").type
        offsets = pa.array([0, *[n_positions] * len(table)], pa.int32())
        flat = pa.array(torch.zeros(n_positions, dtype=torch.int32).numpy())
        lists = pa.ListArray.from_arrays(offsets, flat, type=kind)
        return table.set_column(3, table.schema.field("positions"), lists)

    rewrite_rows(folder, grow)
    refused(folder)


def test_tokens_that_fill_more_than_a_page_are_refused_when_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "_PAGE_BYTES", 4 + 10 * 128)
    with RowsWriter(tmp_path / "fits.parquet") as writer:
        writer.add_exact(0, torch.arange(10), torch.zeros(1, 10, 128, dtype=torch.uint8))
    with RowsWriter(tmp_path / "more.parquet") as writer, pytest.raises(ConfigError, match=r"layer 0, kv_head 0 stand"):
        writer.add_exact(0, torch.arange(11), torch.zeros(1, 11, 128, dtype=torch.uint8))


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
    ids=["python", "device", "host"],
)
def test_memory_that_runs_out_is_no_damage(error: Exception) -> None:
    with pytest.raises(ArchiveReadError, match="'a' cannot be read: no memory left"), system_errors("'a'"):
        raise error


def test_an_archive_opened_by_its_path_holds_no_moments_of_queries(tmp_path: Path) -> None:
    catalog = make(tmp_path / "c")
    entry = catalog.add(DOCUMENT, name="a")
    shared, alone = catalog.archive(entry.id).transforms, Archive.open(entry.path, loaded("llama")).transforms
    assert shared is not None
    assert alone is not None
    assert [layer.query_moment for layer in alone.layers.values()] == [None] * 3
    moments = sum(layer.query_moment.nbytes for layer in shared.layers.values() if layer.query_moment is not None)
    assert shared.resident_bytes == alone.resident_bytes + moments > alone.resident_bytes


@pytest.mark.parametrize("recipe", [SMALL, CODED], ids=["lossless", "coded"])
def test_bytes_of_transforms_are_those_of_their_tensors(recipe: object, tmp_path: Path) -> None:
    found: Transforms | None = archive_of(tmp_path / "a", document=TEXT, recipe=recipe).transforms
    assert found is not None
    assert found.resident_bytes == sum(map(tensor_bytes, found.layers.values()))


def tensor_bytes(value: object) -> int:
    """Bytes of all tensors in a dataclass."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if not dataclasses.is_dataclass(value):
        return 0
    return sum(tensor_bytes(getattr(value, field.name)) for field in dataclasses.fields(value))
