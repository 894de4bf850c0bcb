"""`verify_archive`: nothing to say of a sound archive, one line for every fault, and no exception for damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from ragkv import Archive, LoadedModel, PromptLayout, RagkvError, Recipe, attach, build_archive, rows
from ragkv.errors import ArchiveCorruptError, ArchiveNotFoundError
from ragkv.faiss_io import read_centroids, write_centroids
from ragkv.manifest import LayerEntry, read_manifest
from ragkv.rows import Rows
from ragkv.verify import verify_archive
from tests.archives import SMALL, archive_of, loaded
from tests.forge import edit_manifest, edit_rows, reseal
from tests.tiny import TEXT, TINY_MODELS, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small archive of the tiny Llama; do not change it."""
    return archive_of(tmp_path_factory.mktemp("built") / "a", document=TEXT).path


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return shutil.copytree(built, tmp_path / "a")


def files_of(folder: Path) -> list[Path]:
    return [found for found in sorted(folder.rglob("*")) if found.is_file()]


def one_of_each(folder: Path) -> list[Path]:
    """Manifest, token table and the three files of one layer."""
    return [found for found in files_of(folder) if not found.name.startswith(("000.", "002."))]


def entry_of(folder: Path) -> LayerEntry:
    return read_manifest(folder).layers[1]


# --- sound archives


@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_architecture_is_archived_soundly(name: str, tmp_path: Path) -> None:
    assert verify_archive(archive_of(tmp_path / "a", model=name, document=TEXT).path) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_archived_soundly(dtype: torch.dtype, tmp_path: Path) -> None:
    model = LoadedModel(model=attach(tiny_model("gemma2").to(dtype)), tokenizer=tiny_tokenizer(), name="half")
    build_archive(model, TEXT, tmp_path / "a", recipe=SMALL, layout=PromptLayout.plain())
    assert verify_archive(tmp_path / "a") == []


def test_document_without_clusters_is_sound(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "a", document="Short.")
    assert not archive.manifest.archived_tokens
    assert verify_archive(archive.path) == []


def test_many_row_groups_are_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "ROW_GROUP_ROWS", 16)
    assert verify_archive(archive_of(tmp_path / "a", document=TEXT).path) == []


@pytest.mark.parametrize("tokens_per_cluster", [1, 1000])
def test_extreme_cluster_counts_are_sound(tokens_per_cluster: int, tmp_path: Path) -> None:
    recipe = Recipe(tokens_per_cluster=tokens_per_cluster, window_tokens=16, sink_tokens=4)
    assert verify_archive(archive_of(tmp_path / "a", document=TEXT, recipe=recipe).path) == []


def test_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ArchiveNotFoundError, match="no such folder"):
        verify_archive(tmp_path / "nothing")


# --- damage that checksums show


def assert_refused(folder: Path, model: LoadedModel, damaged: Path) -> None:
    with pytest.raises(RagkvError):
        Archive.open(folder, model)
    faults = verify_archive(folder)
    assert len(faults) == 1
    assert damaged.relative_to(folder).as_posix() in faults[0]


def test_a_flipped_bit_anywhere_is_refused_and_reported(folder: Path) -> None:
    for damaged in one_of_each(folder):
        whole = damaged.read_bytes()
        for at in {*range(0, len(whole), max(1, len(whole) // 8)), len(whole) - 1}:
            damaged.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            assert_refused(folder, loaded("llama"), damaged)
        damaged.write_bytes(whole)
    assert verify_archive(folder) == []


def test_a_file_cut_short_is_refused_and_reported(folder: Path) -> None:
    for damaged in one_of_each(folder):
        whole = damaged.read_bytes()
        for length in (0, len(whole) // 8, len(whole) // 2, len(whole) - 1):
            damaged.write_bytes(whole[:length])
            assert_refused(folder, loaded("llama"), damaged)
        damaged.write_bytes(whole)


def test_a_missing_file_is_refused_and_reported(folder: Path) -> None:
    for damaged in files_of(folder):
        if damaged.name == "manifest.json":
            continue
        whole = damaged.read_bytes()
        damaged.unlink()
        assert_refused(folder, loaded("llama"), damaged)
        damaged.write_bytes(whole)


def test_an_extra_file_is_reported(folder: Path) -> None:
    (folder / "layers" / "notes.txt").write_text("hello")
    assert verify_archive(folder) == ["layers/notes.txt: not in the manifest"]


def test_a_fault_in_one_layer_does_not_hide_that_of_another(folder: Path) -> None:
    for name in ("layers/000.rows.parquet", "layers/002.centroids.faiss"):
        (folder / name).write_bytes(b"")
    assert [fault.split(":")[0] for fault in verify_archive(folder)] == [
        "layers/000.rows.parquet",
        "layers/002.centroids.faiss",
    ]


# --- damage under checksums that hold


def swap(column: str, first: int, second: int) -> Callable[[Rows, Rows], None]:
    def change(_exact: Rows, archived: Rows) -> None:
        numbers = getattr(archived, column)
        numbers[[first, second]] = numbers[[second, first]]

    return change


def assign(where: str, column: str, value: float, row: int = 0) -> Callable[[Rows, Rows], None]:
    def change(exact: Rows, archived: Rows) -> None:
        getattr(exact if where == "exact" else archived, column)[row] = value

    return change


def test_rewriting_without_a_change_stays_sound(folder: Path) -> None:
    edit_rows(folder, 1, lambda _exact, _archived: None)
    assert verify_archive(folder) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (swap("keys", 0, -1), "the centroid is not the mean"),
        (swap("cluster", 0, 100), "not in order of cluster and then of position"),
        (assign("archived", "position", 25, row=3), "kv_head 0 does not hold every position"),
        (assign("archived", "cluster", 999), "beyond the clusters"),
        (assign("archived", "cluster", -1), "beyond the clusters"),
        (assign("archived", "kv_head", 1), "not in order of KV head"),
        (assign("archived", "keys", 9.0), "the centroid is not the mean"),
        (assign("archived", "values", 9.0), "the mean value is not the mean"),
        (assign("archived", "values", float("nan")), "a value is NaN"),
        (assign("archived", "keys", float("inf")), "a key is NaN or infinite"),
        (assign("exact", "keys", float("-inf")), "a key is NaN or infinite"),
        (assign("exact", "cluster", 0), "an exact row has a cluster"),
        (assign("exact", "position", 30), "positions of the exact rows"),
        (assign("exact", "kv_head", 1), "exact rows are not in order"),
    ],
)
def test_a_wrong_row_is_reported(change: Callable[[Rows, Rows], None], fault: str, folder: Path) -> None:
    edit_rows(folder, 1, change)
    faults = verify_archive(folder)
    assert any("layers/001." in line for line in faults)
    assert not any("layers/000." in line or "layers/002." in line for line in faults)
    assert any(fault in line for line in faults)


def first_pair(folder: Path) -> int:
    """Index of the first archived row of a layer that is in one cluster with the row after it."""
    sizes = pq.read_table(folder / entry_of(folder).prototypes_file)["size"].to_pylist()
    place = next(cluster for cluster, size in enumerate(sizes) if size > 1)
    return sum(sizes[:place])


def test_two_positions_swapped_inside_a_cluster_are_reported(folder: Path) -> None:
    at = first_pair(folder)
    edit_rows(folder, 1, swap("position", at, at + 1))
    assert verify_archive(folder) == ["layers/001.rows.parquet: rows are not in order of cluster and then of position"]


def test_a_row_group_that_cuts_a_cluster_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "ROW_GROUP_ROWS", 1)
    n = read_manifest(folder).archived_tokens
    edit_rows(folder, 1, lambda _exact, _archived: None, cuts=[[1] * n, [1] * n])
    assert any("ends inside a cluster" in fault for fault in verify_archive(folder))


def test_a_row_group_of_two_heads_is_reported(folder: Path) -> None:
    n = read_manifest(folder).archived_tokens
    edit_rows(folder, 1, lambda _exact, _archived: None, cuts=[[2 * n]])
    assert verify_archive(folder) == ["layers/001.rows.parquet: row group 1 holds more than one KV head"]


def change_prototypes(folder: Path, column: str, change: Callable[[list], None]) -> None:
    path = folder / entry_of(folder).prototypes_file
    table = pq.read_table(path)
    numbers = table[column].to_pylist()
    change(numbers)
    place = table.schema.get_field_index(column)
    field = table.schema.field(column)
    pq.write_table(table.set_column(place, field, pa.array(numbers, field.type)), path)
    reseal(folder)


def test_a_wrong_size_is_reported(folder: Path) -> None:
    def move_one(sizes: list[int]) -> None:
        sizes[0] += 1
        sizes[1] -= 1

    change_prototypes(folder, "size", move_one)
    faults = verify_archive(folder)
    assert len(faults) == 2
    assert "kv_head 0, cluster 0 has size" in faults[0]


def test_prototypes_out_of_order_are_reported(folder: Path) -> None:
    change_prototypes(folder, "cluster", lambda numbers: numbers.reverse())
    assert any("not in order of KV head and cluster" in fault for fault in verify_archive(folder))


def test_a_wrong_mean_value_is_reported(folder: Path) -> None:
    change_prototypes(folder, "mean_value", lambda numbers: numbers.__setitem__(0, numbers[1]))
    assert verify_archive(folder) == [
        "layers/001.prototypes.parquet: kv_head 0, cluster 0: the mean value is not the mean of its rows"
    ]


def test_a_wrong_centroid_is_reported(folder: Path) -> None:
    entry = entry_of(folder)
    path = folder / entry.centroids_file
    centroids = read_centroids(path, (sum(entry.clusters), entry.key_dim), torch.float32).clone()
    centroids[-1] *= 1.01
    write_centroids(path, centroids)
    reseal(folder)
    assert verify_archive(folder) == [
        f"{entry.centroids_file}: kv_head 1, cluster {entry.clusters[1] - 1}: the centroid is not the mean of its rows"
    ]


def test_a_centroid_shard_of_another_shape_is_reported(folder: Path) -> None:
    entry = entry_of(folder)
    write_centroids(folder / entry.centroids_file, torch.zeros(3, entry.key_dim))
    reseal(folder)
    [fault] = verify_archive(folder)
    assert "holds 3 x 16 centroids" in fault


@pytest.mark.parametrize("column", ["start", "end", "token_id"])
def test_wrong_offsets_and_ids_are_reported(column: str, folder: Path) -> None:
    path = folder / "tokens.parquet"
    table = pq.read_table(path)
    numbers = table[column].to_numpy().copy()
    numbers[-2] = -5
    place, field = table.schema.get_field_index(column), table.schema.field(column)
    pq.write_table(table.set_column(place, field, pa.array(numbers)), path)
    reseal(folder)
    faults = verify_archive(folder)
    assert faults
    assert all(fault.startswith("tokens.parquet: ") for fault in faults)


def test_another_prefix_length_is_reported(folder: Path) -> None:
    manifest = read_manifest(folder)
    reseal(folder, prefix_tokens=manifest.prefix_tokens - 1, document_tokens=manifest.document_tokens + 1)
    faults = verify_archive(folder)
    assert any("not the 20 of the prefix" in fault for fault in faults)
    assert any("head_tokens is 21, tokens and recipe give 20" in fault for fault in faults)


@pytest.mark.parametrize(
    ("field", "value", "fault"),
    [
        ("archived_tokens", 1, "archived_tokens is 1"),
        ("head_tokens", 22, "head_tokens is 22"),
        ("document_tokens", 10**15, "tokens and recipe give"),
        ("clusters_asked", 3, "clusters, allowed are 1 to 3"),
    ],
)
def test_counts_that_disagree_are_reported(field: str, value: int, fault: str, folder: Path) -> None:
    reseal(folder, **{field: value})
    assert any(fault in line for line in verify_archive(folder))


@pytest.mark.parametrize(
    ("field", "value"),
    [("window", 24), ("exact_tokens", 5), ("key_dim", 8), ("value_dim", 10**12), ("index", 7), ("n_kv_heads", 2**40)],
)
def test_a_wrong_layer_entry_is_reported(field: str, value: int, folder: Path) -> None:
    edit_manifest(folder, lambda body: body["layers"][1].__setitem__(field, value))
    assert verify_archive(folder)


def test_garbage_under_a_checksum_that_holds_is_reported_and_refused(folder: Path) -> None:
    for name in list(read_manifest(folder).files):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(np.random.default_rng(0).bytes(len(whole)))
        reseal(folder)
        assert len(verify_archive(folder)) == 1
        if name != "tokens.parquet":
            with pytest.raises(ArchiveCorruptError):
                Archive.open(folder, loaded("llama"))
        (folder / name).write_bytes(whole)
    reseal(folder)
    assert verify_archive(folder) == []


def test_a_file_of_another_kind_of_table_is_reported(folder: Path) -> None:
    shutil.copy(folder / "tokens.parquet", folder / "layers" / "000.rows.parquet")
    reseal(folder)
    [fault] = verify_archive(folder)
    assert fault.startswith("layer 0: cannot be read (000.rows.parquet has columns [('token_id', 'int32')")
    with pytest.raises(ArchiveCorruptError):
        Archive.open(folder, loaded("llama"))
