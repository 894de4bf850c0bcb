"""Numbers at the ends of their range: float16 near its largest and below its normal numbers, huge counts and lists."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

import ragkv.build.builder
from ragkv import Archive, LoadedModel, PromptLayout, Recipe, attach
from ragkv.archive.codec import fit_basis
from ragkv.archive.manifest import read_manifest
from ragkv.archive.payload import rounded
from ragkv.archive.prototypes import read_centroids, write_centroids
from ragkv.archive.verify import verify_archive
from ragkv.build.builder import BuildRequest, write_archive
from ragkv.errors import ArchiveCorruptError, ArchiveFormatError, ConfigError, NonFiniteError
from ragkv.model.prefill import LARGEST_NUMBER, captured_layers
from tests.archives import archive_of
from tests.forge import edit_manifest, reseal
from tests.tiny import TEXT, tiny_model, tiny_tokenizer

RECIPES = {
    codec: Recipe(tokens_per_cluster=4, sink_tokens=4, window_tokens=4, key_codec=codec, value_codec=codec)
    for codec in ("lossless", "int3")
}


@lru_cache(maxsize=1)
def half() -> LoadedModel:
    return LoadedModel(model=attach(tiny_model("llama").half()), tokenizer=tiny_tokenizer(), name="half")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def written(
    folder: Path, change: Callable[[torch.Tensor], torch.Tensor], codec: str, monkeypatch: pytest.MonkeyPatch
) -> Archive:
    """An archive in float16 whose keys and values are normal numbers after `change`, and queries of unit variance."""
    request = BuildRequest.of(half(), TEXT[:400], recipe=RECIPES[codec], layout=PromptLayout.plain())
    tensor = change(normal(1, 2, len(request.prompt_ids), 16)).to(torch.float16)
    cache, moment = DynamicCache(), torch.eye(16).expand(2, -1, -1)
    for index in range(3):
        cache.update(tensor, tensor, index)
    monkeypatch.setattr(ragkv.build.builder, "query_moments", lambda *_: dict.fromkeys(range(3), moment))
    write_archive(request, cache, folder)
    return Archive.open(folder, request.model)


def test_rounding_goes_no_further_than_the_largest_number() -> None:
    numbers = torch.tensor([70_000.0, -70_000.0, 1.0, torch.nan])
    assert rounded(numbers, torch.float16).tolist()[:3] == [65_504.0, -65_504.0, 1.0]
    assert bool(rounded(numbers, torch.float16).isnan()[3])


@pytest.mark.parametrize("codec", RECIPES)
def test_keys_near_the_end_of_float16_give_a_sound_archive_of_finite_numbers(
    tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is decoded is off by a share of a step, which is enough to leave float16."""
    archive = written(tmp_path / "a", lambda tensor: tensor.sign() * 65_504, codec, monkeypatch)
    assert verify_archive(archive.path) == []
    for layer in archive.layers:
        for each in (layer, archive.whole_layer(layer.index)):
            assert bool(torch.isfinite(each.keys).all() & torch.isfinite(each.values).all())
        assert layer.clusters is not None
        for prototypes in (layer.clusters.centroids(), layer.clusters.mean_values()):
            assert bool(torch.isfinite(prototypes).all())


@pytest.mark.parametrize("codec", RECIPES)
def test_keys_below_the_normal_numbers_of_float16_give_a_sound_archive(
    tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rounding is a share of the least normal number, not of themselves."""
    archive = written(tmp_path / "a", lambda tensor: tensor * 1e-6, codec, monkeypatch)
    assert verify_archive(archive.path) == []
    for layer in archive.layers:
        whole = archive.whole_layer(layer.index)
        assert bool((whole.keys.abs() < 1e-4).all() & (whole.values.abs() < 1e-4).all())


def test_small_residuals_get_the_widths_of_large_ones() -> None:
    residuals = normal(2, 100, 16) * torch.logspace(-2, 0, 16)
    assert fit_basis(residuals * 2.0**-80, 4).widths == fit_basis(residuals, 4).widths


def test_residuals_too_small_to_divide_by_are_left_out() -> None:
    assert not fit_basis(normal(1, 50, 8) * 1e-36, 4).rows.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_whose_squares_are_too_large_are_refused(dtype: torch.dtype) -> None:
    cache = DynamicCache()
    keys = torch.ones(1, 2, 5, 8, dtype=dtype)
    keys[0, 1, 3, 0] = -2 * LARGEST_NUMBER
    cache.update(keys, torch.ones_like(keys), 0)
    with pytest.raises(
        NonFiniteError, match=r"key in layer 0, kv_head 1, position 3 is -1.*archives take numbers up to"
    ):
        captured_layers(cache)


@pytest.mark.parametrize("at", [8, 49, 57, 65, 73 + 4 * 2 * 8])
def test_a_centroid_file_that_claims_more_than_it_has_is_refused_before_memory_is_taken(at: int) -> None:
    """Centroids, columns, bytes of a centroid, numbers of the quantiser, bytes in all: six of four bytes, 8 columns."""
    raw = bytearray(write_centroids(torch.zeros(6, 4, dtype=torch.uint8)))
    assert torch.equal(read_centroids(bytes(raw), (6, 4)), torch.zeros(6, 4, dtype=torch.uint8))
    raw[at : at + 8] = (1 << 38).to_bytes(8, "little")
    with pytest.raises(ArchiveCorruptError, match=r"centroids\.faiss: not a FAISS shard of 6 centroids of 4 bytes"):
        read_centroids(bytes(raw), (6, 4))


@pytest.mark.parametrize("name", ["prototypes.parquet", "transforms.parquet", "tokens.parquet", "rows.parquet"])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, name: str) -> None:
    """Arrow explains itself over several lines."""
    archive = archive_of(tmp_path / "a")
    path = archive.path / name
    raw = bytearray(path.read_bytes())
    raw[4:40] = b"\xff" * 36
    path.write_bytes(raw)
    own = archive.path / "transforms.parquet"
    reseal(archive.path, transforms=hashlib.sha256(own.read_bytes()).hexdigest())
    with pytest.raises(ArchiveCorruptError, match=name.replace(".", r"\.")) as raised:
        Archive.open(archive.path, archive.model)
    assert "\n" not in str(raised.value)


def test_a_version_that_is_no_whole_number_is_refused(tmp_path: Path) -> None:
    path = archive_of(tmp_path / "a", document="A short text.").path
    edit_manifest(path, lambda body: body.update(version=3.0))
    with pytest.raises(ArchiveFormatError, match=r"format version 3\.0, this release reads 3"):
        read_manifest(path)


def test_counts_beyond_what_torch_compares_recall_everything(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "a")
    largest = dataclasses.replace(archive.manifest.recipe.recall, budget=(1 << 63) - 1)
    for question in (True, False):
        limit = largest.limit(0, question=question)
        assert bool((torch.tensor([archive.n_tokens]) < limit.tokens).all())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kmeans_iterations = 9223372036854775808", r"recipe: kmeans_iterations is too large; give at most 2\^63 - 1"),
        (f"kmeans_iterations = 0x{'f' * 5000}", "recipe: kmeans_iterations is too large"),
        (f"kmeans_iterations = {'9' * 5000}", "is not valid TOML"),
        (f"kmeans_iterations = {'[' * 5000}", "is not valid TOML"),
        (f'[layer_codecs.{"9" * 5000}]\nkey_codec = "int8"', "recipe: layer_codecs has '999"),
        (
            '[layer_codecs]\n0.key_codec = "int8"\n00.key_codec = "int2"',
            "recipe: layer_codecs names a layer twice: 0, 00",
        ),
    ],
)
def test_a_recipe_of_huge_numbers_is_one_clear_sentence(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "huge.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=said) as raised:
        Recipe.from_toml(path)
    assert "\n" not in str(raised.value)
