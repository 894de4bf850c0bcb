"""`verify_archive`: nothing to say of a sound archive, one line for every fault, and no exception for damage."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ragkv import Archive, LoadedModel, PromptLayout, RagkvError, Recipe, attach, build_archive
from ragkv.archive import rows
from ragkv.archive.prototypes import write_centroids
from ragkv.archive.verify import verify_archive
from ragkv.errors import ArchiveCorruptError, ArchiveNotFoundError
from tests.archives import CODED, SMALL, archive_of, loaded
from tests.forge import (
    Row,
    damage_group,
    edit_exact,
    edit_rows,
    edit_table,
    only_that_layer,
    read_row_list,
    reseal,
    write_row_list,
)
from tests.tiny import TEXT, TINY_MODELS, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small archive of the tiny Llama; do not change it."""
    return archive_of(tmp_path_factory.mktemp("built") / "a", document=TEXT).path


@pytest.fixture(scope="module")
def built_coded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same document with int4 keys and int3 values; do not change it."""
    return archive_of(tmp_path_factory.mktemp("coded") / "a", document=TEXT, recipe=CODED).path


@pytest.fixture
def coded(built_coded: Path, tmp_path: Path) -> Path:
    """A copy of the coded archive to damage."""
    return shutil.copytree(built_coded, tmp_path / "a")


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    """A copy of the lossless archive to damage."""
    return shutil.copytree(built, tmp_path / "a")


def files_of(folder: Path) -> list[Path]:
    return [found for found in sorted(folder.rglob("*")) if found.is_file()]


# --- sound archives


@pytest.mark.parametrize("recipe", [SMALL, CODED], ids=["lossless", "coded"])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_architecture_is_archived_soundly(name: str, recipe: Recipe, tmp_path: Path) -> None:
    assert verify_archive(archive_of(tmp_path / "a", model=name, document=TEXT, recipe=recipe).path) == []


@pytest.mark.parametrize(
    "codecs",
    [
        ("int8", "int2"),
        ("int2", "int8"),
        ("int3", "int4"),
        ("lossless", "int2"),
        ("int8", "lossless"),
        ("int2.5", "int2.5"),
    ],
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
    monkeypatch.setattr(rows, "GROUP_TOKENS", 16)
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


def recall_all(archive: Archive) -> None:
    """Touch every archived row, as recall does."""
    for index in range(len(archive.layers)):
        archive.whole_layer(index)


def assert_refused(folder: Path, model: LoadedModel, damaged: Path) -> None:
    with pytest.raises(RagkvError):
        recall_all(Archive.open(folder, model))
    faults = verify_archive(folder)
    assert len(faults) == 1
    assert damaged.relative_to(folder).as_posix() in faults[0]


def test_a_flipped_bit_anywhere_is_refused_and_reported(folder: Path) -> None:
    for damaged in files_of(folder):
        whole = damaged.read_bytes()
        for at in {*range(0, len(whole), max(1, len(whole) // 8)), len(whole) - 1}:
            damaged.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            assert_refused(folder, loaded("llama"), damaged)
        damaged.write_bytes(whole)
    assert verify_archive(folder) == []


def test_a_file_cut_short_is_refused_and_reported(folder: Path) -> None:
    for damaged in files_of(folder):
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
    (folder / "notes.txt").write_text("hello")
    assert verify_archive(folder) == ["notes.txt: not in the manifest"]


def test_a_fault_in_one_layer_does_not_hide_that_of_another(folder: Path) -> None:
    edit_rows(folder, swap_tokens)
    groups = [damage_group(folder, layer) for layer in (0, 2)]
    assert verify_archive(folder) == [
        *(f"rows.parquet: the SHA-256 of row group {group} is not that of its footer" for group in groups),
        "rows.parquet: layer 1: the positions of a cluster are not in order",
    ]


# --- damage under checksums that hold

Change = Callable[[list[Row]], object]


def assign(column: str, value: int, row: int = 0) -> Change:
    return lambda rows: setattr(rows[row], column, value)


def move(position: int) -> Change:
    return lambda rows: rows[0].positions.__setitem__(0, position)


def write_float(value: float, place: int = 0) -> Change:
    """Set number `place` of a lossless float32 token: keys are numbers 0 to 15, values 16 to 31."""
    return lambda rows: rows[0].payload[0].view(torch.float32).__setitem__(place, value)


def swap_tokens(rows: list[Row]) -> None:
    """Name the first two tokens of a cluster in the wrong order."""
    row = next(row for row in rows if len(row.positions) > 1)
    row.positions[:2] = row.positions[:2].flip(0)


def drop_token(rows: list[Row]) -> None:
    row = next(row for row in rows if len(row.positions) > 1)
    row.positions, row.payload = row.positions[1:], row.payload[1:]


def cut_bytes(rows: list[Row]) -> None:
    rows[0].payload = rows[0].payload[:, 1:]


@pytest.mark.parametrize("kind", ["folder", "coded"])
def test_rewriting_without_a_change_stays_sound(kind: str, request: pytest.FixtureRequest) -> None:
    copy: Path = request.getfixturevalue(kind)
    edit_rows(copy, lambda _rows: None)
    edit_exact(copy, lambda _rows: None)
    assert verify_archive(copy) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (assign("cluster", 999), "its rows are not its clusters in order"),
        (assign("kv_head", 1), "its rows are not its clusters in order"),
        (lambda rows: rows.reverse() or assign("cluster", 0)(rows), "its rows are not its clusters in order"),
        (move(25), "kv_head 0 does not hold every position"),
        (move(5000), "kv_head 0 does not hold every position"),
        (swap_tokens, "the positions of a cluster are not in order"),
        (drop_token, "another number of positions than its size"),
        (cut_bytes, "another number of bytes than its size"),
        (write_float(float("nan"), place=16), "a value is NaN"),
        (write_float(float("inf")), "a key is NaN or infinite"),
    ],
)
def test_a_wrong_cluster_is_reported(change: Change, fault: str, folder: Path) -> None:
    edit_rows(folder, change)
    assert any(fault in line for line in only_that_layer(folder))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (write_float(float("-inf")), "an exact token of layer 1 is NaN or infinite"),
        (write_float(float("nan"), place=31), "an exact token of layer 1 is NaN or infinite"),
        (cut_bytes, "layer 1 has exact tokens of another length"),
        (move(30), "layer 1 has exact tokens at other positions"),
        (assign("cluster", 0), "its first rows are not the exact tokens"),
        (assign("kv_head", 1), "its first rows are not the exact tokens"),
    ],
)
def test_wrong_exact_tokens_are_reported_and_refused(change: Change, fault: str, folder: Path) -> None:
    edit_exact(folder, change)
    [line] = verify_archive(folder)
    assert fault in line
    with pytest.raises(ArchiveCorruptError, match=fault):
        Archive.open(folder, loaded("llama"))


def test_an_infinite_scale_of_an_exact_token_is_reported(coded: Path) -> None:
    infinite = torch.tensor([torch.inf]).view(torch.uint8)
    edit_exact(coded, lambda rows: rows[0].payload[0, :4].copy_(infinite))
    assert verify_archive(coded) == ["rows.parquet: an exact token of layer 1 is NaN or infinite, or too large"]


def test_a_row_group_of_two_heads_is_reported_and_refused(folder: Path) -> None:
    exact, *groups = read_row_list(folder)
    write_row_list(folder, [exact, groups[0] + groups[1], *groups[2:]])
    assert verify_archive(folder) == ["rows.parquet: layer 0: row group 1 holds more than one KV head"]
    with pytest.raises(ArchiveCorruptError):
        Archive.open(folder, loaded("llama"))


@pytest.mark.parametrize("first", [0, 2])
def test_a_row_group_of_two_kinds_of_rows_is_reported(first: int, folder: Path) -> None:
    groups = read_row_list(folder)
    write_row_list(folder, [*groups[:first], groups[first] + groups[first + 1], *groups[first + 2 :]])
    [fault] = verify_archive(folder)
    assert fault.startswith("rows.parquet: its ")


def test_tokens_in_several_pages_are_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recall looks for them in one."""
    monkeypatch.setitem(rows._OPTIONS, "max_rows_per_page", 20)
    edit_rows(folder, lambda _rows: None)
    assert any("rows.parquet: " in fault and "row group" in fault for fault in verify_archive(folder))


def test_bytes_between_row_groups_and_footer_are_reported(folder: Path) -> None:
    raw = (folder / "rows.parquet").read_bytes()
    footer = len(raw) - 8 - int.from_bytes(raw[-8:-4], "little")
    (folder / "rows.parquet").write_bytes(raw[:footer] + bytes(4) + raw[footer:])
    reseal(folder)
    assert verify_archive(folder) == ["rows.parquet: there is something between its row groups and its footer"]


def test_wrong_sizes_are_reported(folder: Path) -> None:
    def shift(sizes: list[int]) -> None:
        sizes[0] += 1
        sizes[1] -= 1 if sizes[1] > 1 else -1

    edit_table(folder, "prototypes.parquet", "size", shift)
    [fault] = verify_archive(folder)
    assert fault.startswith("rows.parquet: layer 0: ")
    assert "size" in fault


def test_a_size_of_nothing_is_reported(folder: Path) -> None:
    edit_table(folder, "prototypes.parquet", "size", lambda sizes: sizes.__setitem__(3, 0))
    assert verify_archive(folder) == ["prototypes.parquet: a cluster has size 0"]


@pytest.mark.parametrize("column", ["layer", "kv_head"])
def test_prototypes_out_of_order_are_reported(column: str, folder: Path) -> None:
    edit_table(folder, "prototypes.parquet", column, lambda numbers: numbers.reverse())
    assert verify_archive(folder) == ["prototypes.parquet: its rows are not the clusters that the manifest counts"]


def test_a_centroid_shard_of_another_shape_is_reported(folder: Path) -> None:
    (folder / "centroids.faiss").write_bytes(write_centroids(torch.zeros(3, 8, dtype=torch.uint8)))
    reseal(folder)
    [fault] = verify_archive(folder)
    assert fault.startswith("centroids.faiss: not a FAISS shard of ")
