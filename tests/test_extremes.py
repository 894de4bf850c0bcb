"""Numbers at the ends of their range: float16 near its largest and below its normal numbers, huge counts and lists."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from ragkv import Recipe
from ragkv.archive.codec import fit_basis
from ragkv.archive.manifest import read_manifest
from ragkv.archive.payload import rounded
from ragkv.archive.prototypes import read_centroids, write_centroids
from ragkv.archive.verify_layer import Spans, layer_faults
from ragkv.build.layer import Span, write_layer
from ragkv.errors import ArchiveCorruptError, ArchiveFormatError, ConfigError, NonFiniteError
from ragkv.model.prefill import LARGEST_NUMBER, CapturedLayer, captured_layers
from ragkv.recall.layers import ArchivedLayer, load_layer, whole_layer
from tests.archives import archive_of
from tests.forge import edit_manifest, reseal

RECIPES = {codec: Recipe(tokens_per_cluster=4, key_codec=codec, value_codec=codec) for codec in ("lossless", "int3")}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def written(folder: Path, tensor: torch.Tensor, codec: str) -> tuple[ArchivedLayer, list[str]]:
    """A layer with `tensor` (n_kv_heads, n_tokens, dim) for keys and values as it is loaded, and its faults."""
    (folder / "layers").mkdir()
    span, n_tokens = Span(head=2, tail=tensor.shape[1] - 3, end=tensor.shape[1]), tensor.shape[1]
    captured = CapturedLayer(keys=tensor, values=tensor, first_position=0)
    entry, _ = write_layer(
        folder, 0, captured, window=None, span=span, recipe=RECIPES[codec], query_moment=torch.eye(8).expand(2, -1, -1)
    )
    faults = list(layer_faults(folder, entry, Spans(2, n_tokens - 3, n_tokens), tensor.dtype))
    return load_layer(folder, entry, tensor.dtype, device=torch.device("cpu"), dtype=tensor.dtype), faults


def test_rounding_goes_no_further_than_the_largest_number() -> None:
    numbers = torch.tensor([70_000.0, -70_000.0, 1.0, torch.nan])
    assert rounded(numbers, torch.float16).tolist()[:3] == [65_504.0, -65_504.0, 1.0]
    assert bool(rounded(numbers, torch.float16).isnan()[3])


@pytest.mark.parametrize("codec", RECIPES)
def test_keys_near_the_end_of_float16_give_a_sound_archive_of_finite_numbers(tmp_path: Path, codec: str) -> None:
    """A centroid is off by half a step of its range, which is enough to leave float16."""
    tensor = normal(2, 60, 8).sign().mul(65_504).to(torch.float16)
    layer, faults = written(tmp_path, tensor, codec)
    assert faults == []
    for each in (layer, whole_layer(layer)):
        assert bool(torch.isfinite(each.keys).all() & torch.isfinite(each.values).all())


@pytest.mark.parametrize("codec", RECIPES)
def test_keys_below_the_normal_numbers_of_float16_give_a_sound_archive(tmp_path: Path, codec: str) -> None:
    """Their rounding is a share of the least normal number, not of themselves."""
    _, faults = written(tmp_path, normal(2, 60, 8).mul(1e-6).to(torch.float16), codec)
    assert faults == []


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


@pytest.mark.parametrize("at", [65, 73 + 8 * 4])
def test_a_centroid_file_that_claims_more_than_it_has_is_refused_before_memory_is_taken(
    tmp_path: Path, at: int
) -> None:
    path = tmp_path / "c.faiss"
    write_centroids(path, normal(6, 4))
    raw = bytearray(path.read_bytes())
    raw[at : at + 8] = (1 << 38).to_bytes(8, "little")
    path.write_bytes(raw)
    with pytest.raises(ArchiveCorruptError, match=r"c\.faiss: not a FAISS index that can be read"):
        read_centroids(path, (6, 4))


def test_a_layer_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    """Arrow explains itself over several lines."""
    archive = archive_of(tmp_path / "a")
    entry = read_manifest(archive.path).layers[0]
    path = archive.path / entry.exact_file
    raw = bytearray(path.read_bytes())
    raw[4:40] = b"\xff" * 36
    path.write_bytes(raw)
    reseal(archive.path)
    with pytest.raises(ArchiveCorruptError, match="layer 0 cannot be read") as raised:
        load_layer(archive.path, entry, torch.float32, device=torch.device("cpu"), dtype=torch.float32)
    assert "\n" not in str(raised.value)


def test_a_version_that_is_no_whole_number_is_refused(tmp_path: Path) -> None:
    path = archive_of(tmp_path / "a", document="A short text.").path
    edit_manifest(path, lambda body: body.update(version=2.0))
    with pytest.raises(ArchiveFormatError, match=r"format version 2\.0, this release reads 2"):
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
        ("seed = 9223372036854775808", r"recipe: seed is too large; give at most 2\^63 - 1"),
        (f"seed = 0x{'f' * 5000}", "recipe: seed is too large"),
        (f"seed = {'9' * 5000}", "is not valid TOML"),
        (f"seed = {'[' * 5000}", "is not valid TOML"),
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
