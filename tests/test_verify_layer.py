"""`verify_archive` on coded layers: residuals, transforms and widths that cannot be those of the keys and values."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from ragkv.archive.manifest import read_manifest
from ragkv.archive.rows import Rows, read_rows
from ragkv.archive.verify import verify_archive
from tests.archives import CODED, archive_of
from tests.forge import edit_manifest, edit_rows, edit_table, entry_of, first_pair, only_layer_one, reseal
from tests.tiny import TEXT


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small lossless archive; do not change it."""
    return archive_of(tmp_path_factory.mktemp("built") / "a", document=TEXT).path


@pytest.fixture(scope="module")
def built_coded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same document with int4 keys and int3 values; do not change it."""
    return archive_of(tmp_path_factory.mktemp("coded") / "a", document=TEXT, recipe=CODED).path


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    """A copy of the lossless archive to damage."""
    return shutil.copytree(built, tmp_path / "a")


@pytest.fixture
def coded(built_coded: Path, tmp_path: Path) -> Path:
    """A copy of the coded archive to damage."""
    return shutil.copytree(built_coded, tmp_path / "a")


def test_rewriting_coded_rows_without_a_change_stays_sound(coded: Path) -> None:
    edit_rows(coded, 1, lambda _rows: None)
    assert verify_archive(coded) == []


def test_coded_keys_of_another_cluster_are_reported(coded: Path) -> None:
    """Residuals that all point one way cannot be those of keys to their mean."""
    n_bytes, at = 1 + coded_bytes(entry_of(coded).key_widths), first_pair(coded)

    def same_residual(rows: Rows) -> None:
        size = int((rows.cluster[: rows.cluster.diff().lt(0).nonzero()[0, 0] + 1] == rows.cluster[at]).sum())
        rows.payload[at : at + size, 1:n_bytes] = 0xFF  # the highest level of every coefficient
        rows.payload[at : at + size, 0] = 200

    edit_rows(coded, 1, same_residual)
    cluster = int(read_rows(coded / entry_of(coded).rows_file).cluster[at])
    assert only_layer_one(coded) == [
        f"layers/001.rows.parquet: kv_head 0, cluster {cluster}: the keys are not about their centroid"
    ]


def test_coded_values_that_all_point_one_way_are_reported(coded: Path) -> None:
    n = read_manifest(coded).archived_tokens
    n_bytes = 1 + coded_bytes(entry_of(coded).key_widths)  # of the key

    def same_residual(rows: Rows) -> None:
        rows.payload[:n, n_bytes:] = 0xFF

    edit_rows(coded, 1, same_residual)
    assert only_layer_one(coded) == ["layers/001.rows.parquet: kv_head 0: the values are not about value_mean"]


def coded_bytes(widths: tuple[int, ...]) -> int:
    return widths[0] + widths[1] // 2 + widths[2] // 4


@pytest.mark.parametrize(
    ("column", "itemsize"), [("key_mean", 4), ("key_rows", 2), ("value_rows", 2), ("value_mean", 4)]
)
def test_a_number_of_a_basis_that_is_not_finite_is_reported(column: str, itemsize: int, coded: Path) -> None:
    ones = b"\xff" * itemsize  # a NaN
    edit_table(coded, entry_of(coded).bases_file, column, lambda raw: raw.__setitem__(1, ones + raw[1][itemsize:]))
    assert f"layers/001.bases.parquet: a number of {column} is NaN or infinite" in only_layer_one(coded)


def test_bases_out_of_order_are_reported(coded: Path) -> None:
    edit_table(coded, entry_of(coded).bases_file, "kv_head", lambda numbers: numbers.reverse())
    assert only_layer_one(coded) == ["layers/001.bases.parquet: rows are not one for each KV head in order"]


def test_bases_of_a_lossless_layer_are_not_those_of_a_coded_one(coded: Path, built: Path) -> None:
    shutil.copy(built / entry_of(built).bases_file, coded / entry_of(coded).bases_file)
    reseal(coded)
    [fault] = verify_archive(coded)
    assert fault.startswith("layer 1: cannot be read (001.bases.parquet has columns ")


@pytest.mark.parametrize(
    ("widths", "fault"),
    [
        ([], "is [], the recipe's codec is int4"),
        ([16, 4, 0], "more than the 16 numbers of a token"),
        ([5, 3, 0], "the second must be even and the third a multiple of 4"),
        ([4, 0, 6], "the second must be even and the third a multiple of 4"),
        ([8, 4, 0], "10 bytes; int4 has 8 for 16 numbers"),
    ],
)
def test_wrong_widths_are_reported(widths: list[int], fault: str, coded: Path) -> None:
    edit_manifest(coded, lambda body: body["layers"][1].__setitem__("key_widths", widths))
    assert any(fault in line for line in verify_archive(coded))


def test_widths_in_a_lossless_layer_are_reported(folder: Path) -> None:
    edit_manifest(folder, lambda body: body["layers"][1].__setitem__("value_widths", [0, 8, 8]))
    assert "manifest.json: layer 1: value_widths is [0, 8, 8], the recipe's codec is lossless" in verify_archive(folder)


def test_a_recipe_for_layers_that_are_not_there_is_reported(folder: Path) -> None:
    edit_manifest(folder, lambda body: body["recipe"]["asked"]["recall"].__setitem__("dense_layers", [9]))
    assert verify_archive(folder) == ["manifest.json: recall: there is no layer 9; the model has layers 0 to 2"]


@pytest.mark.parametrize("column", ["logit_variance", "value_spread"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_spread_that_cannot_be_is_reported(column: str, value: float, coded: Path) -> None:
    edit_table(coded, entry_of(coded).prototypes_file, column, lambda numbers: numbers.__setitem__(0, value))
    assert verify_archive(coded) == [f"layers/001.prototypes.parquet: a {column} is negative, NaN or infinite"]


def test_coded_centroids_that_are_not_about_the_mean_key_are_reported(coded: Path) -> None:
    entry = entry_of(coded)
    path, head = coded / entry.centroids_file, entry.clusters[1]
    raw = np.frombuffer(path.read_bytes(), dtype=np.uint8).copy()
    codes = raw[-sum(entry.clusters) * entry.key_dim :].reshape(-1, entry.key_dim)
    codes[-head:] = np.minimum(codes[-head:], 250) + 5
    path.write_bytes(raw.tobytes())
    reseal(coded)
    assert only_layer_one(coded) == [
        f"{entry.centroids_file}: kv_head 1: the centroids are not about the mean of all keys"
    ]
