"""`verify_archive` on small tables and counts: transforms, tokens and manifests that cannot be those of an archive."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from ragkv import Archive
from ragkv.archive.manifest import OWN_TRANSFORMS, read_manifest
from ragkv.archive.publish import hash_file
from ragkv.archive.verify import verify_archive
from ragkv.errors import ArchiveCorruptError
from tests.archives import CODED, SMALL, archive_of, loaded
from tests.forge import (
    edit_manifest,
    edit_table,
    reseal,
)
from tests.tiny import TEXT


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


# --- transforms


@pytest.mark.parametrize(
    ("column", "itemsize"),
    [("key_mean", 4), ("value_mean", 4), ("key_axes", 2), ("key_prototypes", 2), ("key_rows", 2), ("value_rows", 2)],
)
def test_a_number_of_the_transforms_that_is_not_finite_is_reported(column: str, itemsize: int, coded: Path) -> None:
    ones = b"\xff" * itemsize  # a NaN
    edit_table(coded, OWN_TRANSFORMS, column, lambda raw: raw.__setitem__(1, ones + raw[1][itemsize:]))
    assert verify_archive(coded) == [f"transforms.parquet: a number of {column} is NaN or infinite, or too large"]


def test_transforms_out_of_order_are_reported(coded: Path) -> None:
    edit_table(coded, OWN_TRANSFORMS, "kv_head", lambda numbers: numbers.reverse())
    assert verify_archive(coded) == ["transforms.parquet: its rows are not one for each layer and KV head in order"]


def test_transforms_of_other_layers_are_reported(coded: Path) -> None:
    edit_table(coded, OWN_TRANSFORMS, "layer", lambda numbers: numbers.__setitem__(slice(2, 4), [7, 7]))
    assert verify_archive(coded) == ["the transforms of layer 1 are missing"]


def test_transforms_of_a_lossless_archive_are_not_those_of_a_coded_one(coded: Path, built: Path) -> None:
    shutil.copy(built / OWN_TRANSFORMS, coded / OWN_TRANSFORMS)
    reseal(coded, transforms=read_manifest(built).transforms)
    assert verify_archive(coded) == ["the transforms of layer 0 do not go with the codec 'int4' of the recipe"]


def test_transforms_under_another_checksum_are_reported(coded: Path) -> None:
    edit_manifest(coded, lambda body: body.__setitem__("transforms", "0" * 64))
    [fault] = verify_archive(coded)
    assert fault.startswith("manifest.json: ")


@pytest.mark.parametrize(
    ("counts", "fault"),
    [([5, 5], "the widths of key_rows are "), ([2, 4], "differ between the KV heads"), ([-2, -2], "differ between")],
)
def test_wrong_widths_are_reported(counts: list[int], fault: str, coded: Path) -> None:
    edit_table(coded, OWN_TRANSFORMS, "key_rows_4", lambda numbers: numbers.__setitem__(slice(2, 4), counts))
    assert any(fault in line for line in verify_archive(coded))


@pytest.mark.parametrize(("key", "value"), [("key_codec", "int3"), ("value_codec", "int2"), ("key_prototype_bits", 3)])
def test_codes_wider_than_the_recipe_says_are_reported(key: str, value: object, coded: Path) -> None:
    edit_manifest(coded, lambda body: body["recipe"].__setitem__(key, value))
    [fault] = verify_archive(coded)
    assert fault.startswith("the transforms of layer 0 code 16 numbers in ")


# --- counts and tables


@pytest.mark.parametrize("column", ["start", "end", "token_id"])
def test_wrong_offsets_and_ids_are_reported(column: str, folder: Path) -> None:
    edit_table(folder, "tokens.parquet", column, lambda numbers: numbers.__setitem__(-2, -5))
    faults = verify_archive(folder)
    assert faults
    assert all(fault.startswith("tokens.parquet: ") for fault in faults)


def test_another_prefix_length_is_reported(tmp_path: Path) -> None:
    """Where the sink tokens reach into the document, so that nothing else depends on it."""
    folder = archive_of(tmp_path / "a", document=TEXT, recipe=dataclasses.replace(SMALL, sink_tokens=40)).path
    manifest = read_manifest(folder)
    reseal(folder, prefix_tokens=manifest.prefix_tokens - 1, document_tokens=manifest.document_tokens + 1)
    assert any("not the 20 of the prefix" in fault for fault in verify_archive(folder))


@pytest.mark.parametrize(
    ("field", "value", "fault"),
    [
        ("archived_tokens", 1, "archived_tokens are 21 and 1, tokens and recipe give 21"),
        ("head_tokens", 22, "archived_tokens are 22 and"),
        ("document_tokens", 1000, "tokens and recipe give"),
        ("clusters_asked", 3, "has more clusters than tokens, or than asked"),
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
    before = read_manifest(folder)
    for name in before.files:
        whole = (folder / name).read_bytes()
        end = whole[-8:]  # how long the footer of a Parquet file is
        (folder / name).write_bytes(np.random.default_rng(0).bytes(len(whole) - 8) + end)
        own = hash_file(folder / name).sha256 if name == OWN_TRANSFORMS else before.transforms
        reseal(folder, transforms=own)
        if name != "centroids.faiss":  # of which every byte behind its head is some code
            assert len(verify_archive(folder)) == 1
        with pytest.raises(ArchiveCorruptError):
            Archive.open(folder, loaded("llama"))
        (folder / name).write_bytes(whole)
    reseal(folder, transforms=before.transforms)
    assert verify_archive(folder) == []


def test_a_file_of_another_kind_of_table_is_reported_and_refused(folder: Path) -> None:
    shutil.copy(folder / "tokens.parquet", folder / "prototypes.parquet")
    reseal(folder)
    assert verify_archive(folder) == ["prototypes.parquet: its columns are not those of the format"]
    with pytest.raises(ArchiveCorruptError):
        Archive.open(folder, loaded("llama"))


@pytest.mark.parametrize("options", [{"compression": "zstd", "use_dictionary": False}, {"compression": "none"}])
def test_a_compressed_table_is_reported(options: dict[str, object], folder: Path) -> None:
    table = pq.read_table(folder / "tokens.parquet")
    pq.write_table(table, folder / "tokens.parquet", **options)
    reseal(folder)
    assert verify_archive(folder) == ["tokens.parquet: column 'token_id' is not plain and uncompressed"]


@pytest.mark.parametrize(
    ("place", "key", "value", "told"),
    [("policy", "dense_layers", [9], "recall: "), ("recipe", "layer_codecs", {"9": {"key_codec": "int8"}}, "recipe: ")],
)
def test_a_recipe_for_layers_that_are_not_there_is_reported(
    place: str, key: str, value: object, told: str, folder: Path
) -> None:
    edit_manifest(folder, lambda body: body[place].__setitem__(key, value))
    assert verify_archive(folder) == [f"manifest.json: {told}there is no layer 9; the model has layers 0 to 2"]
