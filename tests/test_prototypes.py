"""Coded prototypes: how near they come to their means, what is coded against them, and that they stay codes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from ragkv import Archive, ask
from ragkv.archive.codec import Basis
from ragkv.model.attention import AttentionCall
from ragkv.model.prefill import captured_layers, prefill_cache
from ragkv.recall.attention import BlockRecall, recall_attention
from ragkv.recall.layers import ArchivedLayer, ClusterTable
from ragkv.recall.placed import PlacedLayer, alone
from ragkv.recipe import Limit, Recipe
from tests.archives import CODED, DOCUMENT, QUESTIONS, SMALL, archive_of
from tests.decoding import decoded, of_layer

TEXT = DOCUMENT[:1100]
RECIPES = {"lossless": SMALL, "coded": CODED}


@pytest.fixture(scope="module", params=RECIPES)
def archive(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Archive:
    folder = tmp_path_factory.mktemp("prototypes") / "archive"
    return archive_of(folder, document=TEXT, recipe=RECIPES[request.param])


def with_bits(folder: Path, bits: int, *, base: Recipe = SMALL) -> Archive:
    recipe = dataclasses.replace(base, key_prototype_bits=bits, value_prototype_bits=bits)
    return archive_of(folder / str(bits), document=TEXT, recipe=recipe)


def table_of(archive: Archive, index: int) -> ClusterTable:
    table = archive.layers[index].clusters
    assert table is not None
    return table


def stored_positions(archive: Archive, index: int, head: int) -> dict[int, list[int]]:
    """Positions of the tokens of each cluster, and of the exact ones as cluster -1."""
    rows = of_layer(pq.read_table(archive.path / "rows.parquet"), index).to_pylist()
    return {row["cluster"]: row["positions"] for row in rows if row["kv_head"] == head}


def captured(archive: Archive) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of every layer as the model computes them."""
    cache = prefill_cache(archive.model.model, archive.tokens.ids.tolist())
    return [(layer.keys, layer.values) for layer in captured_layers(cache)]


# Errors of prototypes


def assert_within_half_a_step(means: np.ndarray, codes: torch.Tensor, basis: Basis, head: int) -> None:
    """Each coefficient is off by at most half a step, or by what lies beyond the last level of its width."""
    wanted = means @ np.linalg.pinv(basis.rows[head].double().numpy())
    half = basis.widths.per_coefficient(128, 8, 2).numpy()
    off = np.abs(basis.numbers(codes).double().numpy() - wanted)
    assert (off <= np.maximum(0.5, np.abs(wanted) - half + 0.5) * 1.001 + 1e-3).all()


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_a_mean_value_is_the_mean_of_its_values_to_half_a_step(bits: int, tmp_path: Path) -> None:
    archive = with_bits(tmp_path, bits)
    for layer in archive.layers:
        table, stored = table_of(archive, layer.index), decoded(archive, layer.index)
        basis = table.transforms.value_prototypes
        assert 2 * bits - 1 <= basis.widths.n_bytes <= 2 * bits  # of 16 numbers
        for head, clusters in enumerate(stored.clusters):
            means = np.stack([values.mean(0) for _, values in clusters]) - table.transforms.value_mean[head].numpy()
            assert_within_half_a_step(means, table.prototypes.value_codes[head, : len(clusters)], basis, head)


def test_a_centroid_is_the_mean_of_its_keys_to_half_a_step(tmp_path: Path) -> None:
    archive = with_bits(tmp_path, 8)
    for layer in archive.layers:
        table, stored = table_of(archive, layer.index), decoded(archive, layer.index)
        basis = table.transforms.key_prototypes
        assert (basis.widths.eight, basis.widths.four) == (16, 0)  # all are kept: so the metric plays no part
        for head, clusters in enumerate(stored.clusters):
            means = np.stack([keys.mean(0) for keys, _ in clusters]) - table.transforms.key_mean[head].numpy()
            assert_within_half_a_step(means, table.prototypes.key_codes[head, : len(clusters)], basis, head)


def test_more_bits_bring_prototypes_nearer_to_their_means(tmp_path: Path) -> None:
    errors = []
    for bits in (1, 2, 4, 8):
        stored = decoded(with_bits(tmp_path, bits), 1)
        off = [
            ((pair[0].mean(0) - key) ** 2).sum() + ((pair[1].mean(0) - value) ** 2).sum()
            for head, clusters in enumerate(stored.clusters)
            for pair, key, value in zip(clusters, stored.centroids[head], stored.means[head], strict=True)
        ]
        errors.append(np.mean(off))
    assert errors == sorted(errors, reverse=True)
    assert errors[3] < 0.01 * errors[0]


def test_prototypes_are_read_as_they_are_stored(archive: Archive) -> None:
    for layer in archive.layers:
        table, stored = table_of(archive, layer.index), decoded(archive, layer.index)
        for head, n_clusters in enumerate(archive.manifest.layers[layer.index].clusters):
            keys, values = (each[head, :n_clusters].double() for each in (table.centroids(), table.mean_values()))
            torch.testing.assert_close(keys, torch.from_numpy(stored.centroids[head]), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(values, torch.from_numpy(stored.means[head]), atol=1e-5, rtol=1e-5)


def test_the_estimate_of_a_cluster_less_its_correction_never_exceeds_its_true_mass(tmp_path: Path) -> None:
    """By the convexity of exp, but for the error of the coded centroid."""
    archive = archive_of(tmp_path / "archive", document=TEXT)
    draw = np.random.default_rng(0)
    for layer in archive.layers:
        stored = decoded(archive, layer.index)
        queries = draw.normal(scale=3.0, size=(20, stored.centroids[0].shape[-1]))
        for head, clusters in enumerate(stored.clusters):
            for (keys, _), centroid in zip(clusters, stored.centroids[head], strict=True):
                off = queries @ (centroid - keys.mean(0))
                estimated = queries @ centroid + np.log(len(keys))
                true = np.logaddexp.reduce(queries @ keys.T, axis=1)
                assert (estimated <= true + off + 1e-5).all()


# What is coded against them


def errors_of_tokens(archive: Archive, index: int) -> tuple[float, float]:
    """Mean squared error of the decoded archived tokens, keys and values, and of their prototypes."""
    stored, (keys, values) = decoded(archive, index), captured(archive)[index]
    tokens, prototypes = [], []
    for head, clusters in enumerate(stored.clusters):
        at = stored_positions(archive, index, head)
        for label, pair in enumerate(clusters):
            for found, dense, prototype in zip(pair, (keys, values), (stored.centroids, stored.means), strict=True):
                own = dense[head, at[label]].double().numpy()
                tokens.append(((found - own) ** 2).sum())
                prototypes.append(((prototype[head][label] - own.mean(0)) ** 2).sum() * len(own))
    return float(np.sum(tokens)), float(np.sum(prototypes))


def test_tokens_are_coded_against_coded_prototypes_so_that_their_errors_do_not_count(tmp_path: Path) -> None:
    base = dataclasses.replace(CODED, key_codec="int8", value_codec="int8")
    coarse, fine = (errors_of_tokens(with_bits(tmp_path, bits, base=base), 1) for bits in (2, 8))
    assert coarse[1] > 100 * fine[1], "the prototypes must differ"
    assert coarse[0] < 0.01 * coarse[1]
    assert coarse[0] < 2 * fine[0]


def attended(archive: Archive, layer: ArchivedLayer) -> tuple[torch.Tensor, float]:
    """Attention of one query over a layer with some of it recalled, and the share of each head that is archived."""
    heads, dim = layer.keys.shape[0], layer.keys.shape[2]
    query = torch.randn(1, heads, 1, dim, generator=torch.Generator().manual_seed(0))
    local = torch.zeros(1, heads, 1, dim)
    call = AttentionCall(query, local, local, mask=None, scaling=0.2, softcap=None, sinks=None)
    shares = Shares()
    out = recall_attention(call, alone(layer), Limit(tokens=40), shares)
    coded = table_of(archive, layer.index).payload.value_basis is not None
    return out[0, :, 0], shares.on_archived if coded else shares.on_prototypes


class Shares:
    """Keeps the weights of archived tokens, those of prototypes and of recalled tokens: (n_kv_heads,)."""

    def on_recall(self, layer: PlacedLayer, recall: BlockRecall, *, begins: bool) -> None:
        (share,) = recall.shares
        assert share.near is not None
        self.on_prototypes = share.held[:, 0, 0, : layer.n_clusters].sum(-1)
        self.on_archived = self.on_prototypes + share.near[:, 0, 0].sum(-1)


def test_recalled_values_count_on_the_mean_value_of_their_cluster_where_they_are_coded(archive: Archive) -> None:
    """All mean values moved by one: the output moves by what falls on codes, and on prototypes alone otherwise."""
    layer, table = archive.layers[0], table_of(archive, 0)
    transforms = dataclasses.replace(table.transforms, value_mean=table.transforms.value_mean + 1)
    moved = dataclasses.replace(layer, clusters=dataclasses.replace(table, transforms=transforms))
    before, share = attended(archive, layer)
    after, _ = attended(archive, moved)
    assert float(share.min()) > 0.01
    torch.testing.assert_close(after - before, share.unsqueeze(-1).expand_as(before), atol=1e-5, rtol=0)


# Whole layers


def test_a_whole_layer_holds_every_token_at_its_position(archive: Archive) -> None:
    for layer in archive.layers:
        whole, stored = archive.whole_layer(layer.index), decoded(archive, layer.index)
        assert whole.clusters is None
        assert whole.exact_positions.sort().values.tolist() == list(range(archive.n_tokens))
        place = whole.exact_positions.argsort()
        for head, clusters in enumerate(stored.clusters):
            at = stored_positions(archive, layer.index, head)
            for label, pair in [*enumerate(clusters), (-1, stored.exact[head])]:
                for found, expected in zip((whole.keys, whole.values), pair, strict=True):
                    own = found[head, place[at[label]]].double()
                    torch.testing.assert_close(own, torch.from_numpy(expected), atol=1e-5, rtol=1e-5)


def test_a_whole_lossless_layer_is_the_cache_of_the_model_bit_for_bit(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "archive", document=TEXT)
    for layer, (keys, values) in zip(archive.layers, captured(archive), strict=True):
        whole = archive.whole_layer(layer.index)
        order = whole.exact_positions.argsort()
        assert torch.equal(whole.keys[:, order], keys)
        assert torch.equal(whole.values[:, order], values)


@pytest.mark.parametrize("model", ["llama", "gemma2"])
def test_exact_tokens_of_a_byte_a_number_are_off_by_half_a_step_at_most(model: str, tmp_path: Path) -> None:
    """A step is a 127th of the largest number of the token; windows of sliding layers are exact tokens, too."""
    archive = archive_of(tmp_path / "archive", model=model, document=TEXT, recipe=CODED)
    cache = captured_layers(prefill_cache(archive.model.model, archive.tokens.ids.tolist()))
    for layer, dense in zip(archive.layers, cache, strict=True):
        at = layer.exact_positions - dense.first_position
        for found, wanted in ((layer.keys, dense.keys[:, at]), (layer.values, dense.values[:, at])):
            half = wanted.abs().amax(-1, keepdim=True) / 127 / 2
            assert bool(((found - wanted).abs() <= half * 1.0001).all())
            assert not torch.equal(found, wanted)


# What is held


def tensors_of(held: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """Every tensor that is reached from an object through its attributes, also those it made later, once each."""
    if id(held) in seen:
        return
    seen.add(id(held))
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, dict | tuple | list):
        for each in held.values() if isinstance(held, dict) else held:
            yield from tensors_of(each, seen)
    elif type(held).__module__.startswith("ragkv."):
        yield from tensors_of(vars(held), seen)


def test_prototypes_are_held_as_codes_and_nothing_of_their_number_as_floats(archive: Archive) -> None:
    """Also after an answer: 16 numbers at 4 and at 2 bits, a size, an address and ten measures of spread."""
    ask(archive, QUESTIONS[0], max_new_tokens=3)
    for layer in archive.layers:
        table = table_of(archive, layer.index)
        own = [t for t in tensors_of(table, {id(table.rows)}) if t.ndim > 1 and t.shape[1] == table.n_clusters]
        assert {tensor.dtype for tensor in own} <= {torch.uint8, torch.int32}
        assert sum(tensor.nbytes for tensor in own) == table.resident_bytes
        places = table.sizes.numel()
        assert table.resident_bytes <= places * (16 * 4 // 8 + 16 * 2 // 8 + 1 + 4 + 10)
        assert places > 100


def test_resident_bytes_are_those_of_all_that_is_held(archive: Archive) -> None:
    """But for the mapped rows, and tables of a few bytes about them."""
    held = sum(t.nbytes for t in tensors_of(archive.layers, {id(table_of(archive, 0).rows)}))
    middles = sum(
        each.nbytes for layer in archive.layers for t in [table_of(archive, layer.index)] for each in middles_of(t)
    )
    whole = sum(t.nbytes for t in tensors_of(archive._whole, set()))
    assert archive.resident_bytes - archive._rows.resident_bytes == held + whole - middles


def middles_of(table: ClusterTable) -> list[torch.Tensor]:
    transforms = table.transforms
    bases = [transforms.key_prototypes, transforms.value_prototypes, transforms.key_rows, transforms.value_rows]
    return [vars(basis)["middles"] for basis in bases if basis is not None and "middles" in vars(basis)]


def test_two_builds_of_one_document_are_the_same_bytes(archive: Archive, tmp_path: Path) -> None:
    again = archive_of(tmp_path / "again", document=TEXT, recipe=archive.manifest.recipe)
    names = sorted(path.name for path in archive.path.iterdir())
    assert names == sorted(path.name for path in again.path.iterdir())
    assert all((archive.path / name).read_bytes() == (again.path / name).read_bytes() for name in names)
