"""`verify_archive`: nothing to say of a sound archive, one line for every fault, and no exception for damage."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ragkv import Archive, LoadedModel, PromptLayout, RagkvError, Recipe, attach, build_archive
from ragkv.archive import rows
from ragkv.archive.manifest import read_manifest
from ragkv.archive.prototypes import write_centroids
from ragkv.archive.rows import Rows
from ragkv.archive.verify import verify_archive
from ragkv.errors import ArchiveCorruptError, ArchiveNotFoundError
from tests.archives import CODED, SMALL, archive_of, loaded
from tests.forge import edit_exact, edit_manifest, edit_rows, edit_table, entry_of, first_pair, only_layer_one, reseal
from tests.tiny import TEXT, TINY_MODELS, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small archive of the tiny Llama; do not change it."""
    return archive_of(tmp_path_factory.mktemp("built") / "a", document=TEXT).path


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    """A copy of the lossless archive to damage."""
    return shutil.copytree(built, tmp_path / "a")


def files_of(folder: Path) -> list[Path]:
    return [found for found in sorted(folder.rglob("*")) if found.is_file()]


def one_of_each(folder: Path) -> list[Path]:
    """Manifest, token table and the five files of one layer."""
    return [found for found in files_of(folder) if not found.name.startswith(("000.", "002."))]


# --- sound archives


@pytest.mark.parametrize("recipe", [SMALL, CODED], ids=["lossless", "coded"])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_architecture_is_archived_soundly(name: str, recipe: Recipe, tmp_path: Path) -> None:
    assert verify_archive(archive_of(tmp_path / "a", model=name, document=TEXT, recipe=recipe).path) == []


@pytest.mark.parametrize(
    "codecs", [("int8", "int2"), ("int2", "int8"), ("int3", "int4"), ("lossless", "int2"), ("int8", "lossless")]
)
def test_every_codec_is_archived_soundly(codecs: tuple[str, str], tmp_path: Path) -> None:
    recipe = dataclasses.replace(SMALL, key_codec=codecs[0], value_codec=codecs[1])
    assert verify_archive(archive_of(tmp_path / "a", recipe=recipe).path) == []


def test_layers_with_codecs_of_their_own_are_sound(tmp_path: Path) -> None:
    own = {"0": {"key_codec": "lossless", "value_codec": "lossless"}, "2": {"value_codec": "int8"}}
    recipe = dataclasses.replace(CODED, layer_codecs=own)
    assert verify_archive(archive_of(tmp_path / "a", document=TEXT, recipe=recipe).path) == []


@pytest.mark.parametrize("recipe", [SMALL, CODED], ids=["lossless", "coded"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_archived_soundly(dtype: torch.dtype, recipe: Recipe, tmp_path: Path) -> None:
    model = LoadedModel(model=attach(tiny_model("gemma2").to(dtype)), tokenizer=tiny_tokenizer(), name="half")
    build_archive(model, TEXT, tmp_path / "a", recipe=recipe, layout=PromptLayout.plain())
    assert verify_archive(tmp_path / "a") == []


def test_document_without_clusters_is_sound(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "a", document="Short.")
    assert not archive.manifest.archived_tokens
    assert verify_archive(archive.path) == []


def test_many_row_groups_are_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "ROW_GROUP_ROWS", 16)
    assert verify_archive(archive_of(tmp_path / "a", document=TEXT).path) == []


@pytest.mark.parametrize("recipe", [SMALL, CODED], ids=["lossless", "coded"])
@pytest.mark.parametrize("tokens_per_cluster", [1, 1000])
def test_extreme_cluster_counts_are_sound(tokens_per_cluster: int, recipe: Recipe, tmp_path: Path) -> None:
    recipe = dataclasses.replace(recipe, tokens_per_cluster=tokens_per_cluster)
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


def swap(column: str, first: int, second: int) -> Callable[[Rows], None]:
    def change(rows: Rows) -> None:
        numbers = getattr(rows, column)
        numbers[[first, second]] = numbers[[second, first]]

    return change


def assign(column: str, value: int, row: int = 0) -> Callable[[Rows], None]:
    return lambda rows: getattr(rows, column).__setitem__(row, value)


def write_float(value: float, place: int = 0, row: int = 0) -> Callable[[Rows], None]:
    """Set number `place` of a lossless float32 row: keys are numbers 0 to 15, values 16 to 31."""
    return lambda rows: rows.payload[row].view(torch.float32).__setitem__(place, value)


def test_rewriting_without_a_change_stays_sound(folder: Path) -> None:
    edit_rows(folder, 1, lambda _rows: None)
    edit_exact(folder, 1, lambda _rows: None)
    assert verify_archive(folder) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (swap("payload", 0, -1), "the centroid is not the mean"),
        (swap("cluster", 0, 100), "not in order of cluster and then of position"),
        (assign("position", 25, row=3), "kv_head 0 does not hold every position"),
        (assign("cluster", 999), "beyond the clusters"),
        (assign("cluster", -1), "beyond the clusters"),
        (assign("kv_head", 1), "not in order of KV head"),
        (write_float(9.0), "the centroid is not the mean"),
        (write_float(9.0, place=16), "value_spread is not that of its rows"),
        (write_float(float("nan"), place=16), "a value is NaN"),
        (write_float(float("inf")), "a key is NaN or infinite"),
    ],
)
def test_a_wrong_archived_row_is_reported(change: Callable[[Rows], None], fault: str, folder: Path) -> None:
    edit_rows(folder, 1, change)
    assert any(fault in line for line in only_layer_one(folder))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (write_float(float("-inf")), "a key or value is NaN or infinite"),
        (write_float(float("nan"), place=31), "a key or value is NaN or infinite"),
        (assign("cluster", 0), "an exact row has a cluster"),
        (assign("position", 30), "positions are not those that the counts give"),
        (assign("kv_head", 1), "not in order of KV head"),
    ],
)
def test_a_wrong_exact_row_is_reported(change: Callable[[Rows], None], fault: str, folder: Path) -> None:
    edit_exact(folder, 1, change)
    [line] = only_layer_one(folder)
    assert fault in line


def test_archived_rows_in_place_of_exact_ones_are_reported(folder: Path) -> None:
    entry = entry_of(folder)
    shutil.copy(folder / entry.rows_file, folder / entry.exact_file)
    reseal(folder)
    n_rows = entry.n_kv_heads * entry.exact_tokens
    assert any(f"rows, the counts give {n_rows}" in fault for fault in only_layer_one(folder))


def test_two_positions_swapped_inside_a_cluster_are_reported(folder: Path) -> None:
    at = first_pair(folder)
    edit_rows(folder, 1, swap("position", at, at + 1))
    assert verify_archive(folder) == ["layers/001.rows.parquet: rows are not in order of cluster and then of position"]


def test_a_row_group_that_cuts_a_cluster_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "ROW_GROUP_ROWS", 1)
    n = read_manifest(folder).archived_tokens
    edit_rows(folder, 1, lambda _rows: None, cuts=[[1] * n, [1] * n])
    assert any("ends inside a cluster" in fault for fault in verify_archive(folder))


def test_a_row_group_of_two_heads_is_reported(folder: Path) -> None:
    n = read_manifest(folder).archived_tokens
    edit_rows(folder, 1, lambda _rows: None, cuts=[[2 * n]])
    assert verify_archive(folder) == ["layers/001.rows.parquet: row group 0 holds more than one KV head"]


def test_a_wrong_size_is_reported(folder: Path) -> None:
    def move_one(sizes: list[int]) -> None:
        sizes[0] += 1
        sizes[1] -= 1

    edit_table(folder, entry_of(folder).prototypes_file, "size", move_one)
    faults = verify_archive(folder)
    assert len(faults) == 2
    assert "kv_head 0, cluster 0 has size" in faults[0]


def test_prototypes_out_of_order_are_reported(folder: Path) -> None:
    edit_table(folder, entry_of(folder).prototypes_file, "cluster", lambda numbers: numbers.reverse())
    assert any("not in order of KV head and cluster" in fault for fault in verify_archive(folder))


def test_a_wrong_spread_of_lossless_values_is_reported(folder: Path) -> None:
    path = entry_of(folder).prototypes_file
    edit_table(folder, path, "value_spread", lambda numbers: numbers.__setitem__(0, numbers[0] * 1.01))
    assert verify_archive(folder) == [f"{path}: kv_head 0, cluster 0: value_spread is not that of its rows"]


def move_centroids(folder: Path, which: slice, steps: int) -> None:
    """Move the first number of some centroids by so many steps of its byte; the bytes are the last of the file."""
    entry = entry_of(folder)
    path = folder / entry.centroids_file
    raw = np.frombuffer(path.read_bytes(), dtype=np.uint8).copy()
    codes = raw[-sum(entry.clusters) * entry.key_dim :].reshape(-1, entry.key_dim)
    first = codes[which, 0].astype(int)
    codes[which, 0] = np.where(first < 128, first + steps, first - steps)
    path.write_bytes(raw.tobytes())
    reseal(folder)


def test_a_wrong_centroid_is_reported(folder: Path) -> None:
    move_centroids(folder, slice(-1, None), 3)
    entry = entry_of(folder)
    assert verify_archive(folder) == [
        f"{entry.centroids_file}: kv_head 1, cluster {entry.clusters[1] - 1}: the centroid is not the mean of its rows"
    ]


def test_another_mean_key_is_reported(folder: Path) -> None:
    def move(raw: list[bytes]) -> None:
        raw[1] = (np.frombuffer(raw[1], "<f4") + np.float32(0.5)).tobytes()

    edit_table(folder, entry_of(folder).bases_file, "key_mean", move)
    assert any("kv_head 1, cluster 0: the centroid is not the mean" in fault for fault in only_layer_one(folder))


def test_a_centroid_shard_of_another_shape_is_reported(folder: Path) -> None:
    entry = entry_of(folder)
    write_centroids(folder / entry.centroids_file, torch.zeros(3, entry.key_dim))
    reseal(folder)
    [fault] = verify_archive(folder)
    assert "holds 3 x 16 centroids" in fault


@pytest.mark.parametrize("column", ["start", "end", "token_id"])
def test_wrong_offsets_and_ids_are_reported(column: str, folder: Path) -> None:
    edit_table(folder, "tokens.parquet", column, lambda numbers: numbers.__setitem__(-2, -5))
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
    shutil.copy(folder / "tokens.parquet", folder / "layers" / "000.exact.parquet")
    reseal(folder)
    [fault] = verify_archive(folder)
    assert fault.startswith("layer 0: cannot be read (000.exact.parquet has columns [('token_id', 'int32')")
    with pytest.raises(ArchiveCorruptError):
        Archive.open(folder, loaded("llama"))
