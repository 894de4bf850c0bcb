"""Documents of every size and kind, and what the clustering of their keys must keep true."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from transformers import AutoModelForCausalLM, PreTrainedModel

from ragkv import Archive, ArchiveCache, LoadedModel, PromptLayout, Recipe, attach, build_archive
from ragkv.archive.codec import Widths
from ragkv.archive.manifest import MANIFEST_FILE
from ragkv.build.cluster import assign, cluster_keys
from ragkv.build.groups import group_sums
from ragkv.errors import ConfigError, NonFiniteError
from ragkv.model.prefill import captured_layers, prefill_cache
from tests.archives import CODED, DOCUMENT, EVERYTHING, SMALL, archive_of, loaded
from tests.decoding import stored_tokens
from tests.dense import dense_logits, stock_copy
from tests.tiny import tiny_config, tiny_model, tiny_tokenizer

PLAIN = PromptLayout.plain()
NO_PREFIX = PromptLayout(prefix="", question="\n{question}")
LOSSLESS = Recipe(key_codec="lossless", value_codec="lossless")
EXACT = Recipe(exact_codec="lossless")


def subject(model: PreTrainedModel, name: str = "own") -> LoadedModel:
    return LoadedModel(model=attach(model), tokenizer=tiny_tokenizer(), name=name)


def assert_every_token_is_stored_once(archive: Archive) -> None:
    for entry in archive.manifest.layers:
        rows = stored_tokens(archive, entry.index)
        assert entry.window is None
        for head in range(entry.n_kv_heads):
            assert sorted(rows.position[rows.kv_head == head].tolist()) == list(range(archive.n_tokens))


def assert_equals_dense(archive: Archive) -> None:
    inputs = archive.questions(["Who kept the book?"])
    ids = inputs["input_ids"][0].tolist()
    model = archive.model.model
    with torch.no_grad():
        logits = model(**inputs, cache=ArchiveCache(archive, budget=EVERYTHING)).logits[0]
    expected = dense_logits(stock_copy(model), archive.tokens.ids.tolist() + ids, len(ids))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


# Sizes


def test_an_empty_document_is_refused_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="empty"):
        build_archive(loaded("llama"), "", tmp_path / "archive", layout=PLAIN)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("layout", [PLAIN, NO_PREFIX], ids=["prefix", "no prefix"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("document", ["\n", "a", " the", "The keeper wrote the time of every ship."])
def test_a_document_shorter_than_the_window_is_exact(
    document: str, name: str, layout: PromptLayout, tmp_path: Path
) -> None:
    build_archive(loaded(name), document, tmp_path / "archive", recipe=EXACT, layout=layout)
    archive = Archive.open(tmp_path / "archive", loaded(name))
    assert archive.manifest.archived_tokens == 0
    assert archive.manifest.clusters_asked == 0
    assert all(entry.clusters == () for entry in archive.manifest.layers)
    assert_equals_dense(archive)


@pytest.mark.parametrize("tokens_per_cluster", [1, 2, 100_000])
def test_three_archived_tokens_make_one_to_three_clusters(tokens_per_cluster: int, tmp_path: Path) -> None:
    document = "The ferry left the harbour at seven."
    n_document = len(tiny_tokenizer()(document, add_special_tokens=False)["input_ids"])
    recipe = replace(LOSSLESS, tokens_per_cluster=tokens_per_cluster, window_tokens=n_document - 3, sink_tokens=0)
    archive = archive_of(tmp_path / "archive", document=document, recipe=recipe)
    assert archive.manifest.archived_tokens == 3
    clusters = {1: 3, 2: 2, 100_000: 1}[tokens_per_cluster]
    assert {entry.clusters for entry in archive.manifest.layers} == {(clusters, clusters)}
    assert_every_token_is_stored_once(archive)
    assert_equals_dense(archive)


def test_sinks_beyond_the_document_leave_nothing_to_cluster(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "archive", document=DOCUMENT[:300], recipe=replace(EXACT, sink_tokens=10_000))
    assert archive.manifest.archived_tokens == 0
    assert_equals_dense(archive)


def test_a_document_longer_than_the_context_is_refused_before_the_prefill(tmp_path: Path) -> None:
    calls: list[str] = []
    with pytest.raises(ConfigError) as raised:
        build_archive(
            loaded("llama"),
            "the " * 4096,
            tmp_path / "archive",
            layout=PLAIN,
            on_progress=lambda *a: calls.append(a[0]),
        )
    assert "4096" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert calls == []
    assert list(tmp_path.iterdir()) == []


# Duplicates


@pytest.fixture(scope="module")
def repeated(tmp_path_factory: pytest.TempPathFactory) -> Archive:
    """Two thousand times the same word, through a model whose KV head 1 gives every token the same key."""
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.data[16:] = 0
    folder = tmp_path_factory.mktemp("repeated") / "archive"
    build_archive(subject(model), "the " * 2000, folder, recipe=replace(LOSSLESS, segment_tokens=500), layout=PLAIN)
    return Archive.open(folder, subject(model))


def test_there_are_never_more_clusters_than_distinct_keys(repeated: Archive) -> None:
    for entry in repeated.manifest.layers:
        rows = stored_tokens(repeated, entry.index)
        for head, n_clusters in enumerate(entry.clusters):
            keys = rows.keys[(rows.kv_head == head) & (rows.cluster >= 0)]
            n_segments = 4
            assert 1 <= n_clusters <= len(keys.unique(dim=0)) * n_segments
    assert {entry.clusters[1] for entry in repeated.manifest.layers} == {4}  # one distinct key: one per segment


def test_the_manifest_records_the_clusters_asked_and_built(repeated: Archive) -> None:
    archived = repeated.manifest.archived_tokens
    assert repeated.manifest.clusters_asked == sum(
        -(-length // LOSSLESS.tokens_per_cluster) for length in segment_lengths(archived, 4)
    )
    for entry in repeated.manifest.layers:
        labels = stored_tokens(repeated, entry.index)
        heads = [labels.cluster[(labels.kv_head == head) & (labels.cluster >= 0)] for head in range(entry.n_kv_heads)]
        assert entry.clusters == tuple(len(own.unique()) for own in heads)
    assert '"clusters_asked"' in (repeated.path / MANIFEST_FILE).read_text(encoding="utf-8")


def segment_lengths(n_tokens: int, n_segments: int) -> list[int]:
    cuts = [round(i * n_tokens / n_segments) for i in range(n_segments + 1)]
    return [stop - start for start, stop in pairwise(cuts)]


def test_repeated_words_are_stored_once_each_and_answer_as_dense(repeated: Archive) -> None:
    assert_every_token_is_stored_once(repeated)
    assert_equals_dense(repeated)


# Numbers that cannot be stored


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_weight_is_named_by_layer_head_and_token(bad: float, tmp_path: Path) -> None:
    model = tiny_model("llama")
    ids = tiny_tokenizer()(PLAIN.prefix + "The ferry", add_special_tokens=False)["input_ids"]
    once = ids.index(next(token for token in ids if ids.count(token) == 1 and ids.index(token) > 3))
    model.get_input_embeddings().weight.data[ids[once]] = bad
    with pytest.raises(NonFiniteError, match=rf"layer 0, kv_head 0, position {once} ") as raised:
        build_archive(subject(model), "The ferry", tmp_path / "archive", layout=PLAIN)
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_bad_value_of_one_head_is_named(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    model.model.layers[2].self_attn.v_proj.bias.data[16:] = float("nan")
    with pytest.raises(NonFiniteError, match=r"value in layer 2, kv_head 1, position 0 is nan"):
        build_archive(subject(model), DOCUMENT[:200], tmp_path / "archive", layout=PLAIN)


def test_a_key_that_overflows_float16_is_an_error_and_no_archive(tmp_path: Path) -> None:
    model = tiny_model("qwen2").half()
    model.model.layers[1].self_attn.k_proj.weight.data[16:] *= 2.0**14
    with pytest.raises(NonFiniteError, match=r"key in layer 1, kv_head 1, .*float16.*wider dtype"):
        build_archive(subject(model), DOCUMENT[:200], tmp_path / "archive", layout=PLAIN)
    assert list(tmp_path.iterdir()) == []


# Clustering


def keys_like(n_heads: int, n_tokens: int, dim: int, seed: int = 0) -> torch.Tensor:
    """Keys in loose groups, as attention keys are."""
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(n_heads, 24, dim, generator=draw) * 3
    which = torch.randint(24, (n_heads, n_tokens), generator=draw)
    spread = torch.randn(n_heads, n_tokens, dim, generator=draw)
    return centres.gather(1, which.unsqueeze(-1).expand(-1, -1, dim)) + spread


def inertia(points: torch.Tensor, labels: torch.Tensor) -> float:
    """Squared distance to the mean of the own cluster, summed."""
    total = 0.0
    for label in labels.unique():
        members = points[labels == label].double()
        total += float((members - members.mean(0)).square().sum())
    return total


def test_labels_are_the_same_on_every_build() -> None:
    keys = keys_like(3, 700, 16)
    first, second = cluster_keys(keys, Recipe()), cluster_keys(keys.clone(), Recipe())
    assert torch.equal(first.labels, second.labels)


def test_inertia_is_that_of_scikit_learn_from_the_same_start() -> None:
    keys = keys_like(2, 800, 16)
    n_clusters = 50  # 800 / 16
    labels = cluster_keys(keys, Recipe(tokens_per_cluster=16, kmeans_iterations=8)).labels
    start = [i * 800 // n_clusters + 800 // (2 * n_clusters) for i in range(n_clusters)]
    for head in range(2):
        points = keys[head].double().numpy()
        reference = KMeans(n_clusters, init=points[start], n_init=1, max_iter=8, tol=0, algorithm="lloyd").fit(points)
        assert inertia(keys[head], labels[head]) == pytest.approx(float(reference.inertia_), rel=0.01)


@pytest.mark.parametrize("tokens_per_cluster", [1, 3, 10_000])
@pytest.mark.parametrize("segment_tokens", [1, 64, 8192])
def test_labels_are_compact_and_segments_share_no_cluster(tokens_per_cluster: int, segment_tokens: int) -> None:
    recipe = Recipe(tokens_per_cluster=tokens_per_cluster, segment_tokens=segment_tokens)
    clusters = cluster_keys(keys_like(2, 150, 8), recipe)
    n_segments = -(-150 // segment_tokens)
    lengths = segment_lengths(150, n_segments)
    assert clusters.asked == sum(-(-length // tokens_per_cluster) for length in lengths)
    for labels, n_clusters in zip(clusters.labels, clusters.n_clusters.tolist(), strict=True):
        assert labels.unique().tolist() == list(range(n_clusters))
        parts = [set(part.tolist()) for part in labels.split(lengths)]
        assert sum(len(part) for part in parts) == n_clusters


def test_each_point_gets_its_nearest_centroid() -> None:
    points, centroids = keys_like(2, 90, 8), keys_like(2, 7, 8, seed=1)
    expected = torch.stack([torch.cdist(p, c).argmin(1) for p, c in zip(points, centroids, strict=True)])
    assert torch.equal(assign(points, centroids), expected)


def test_group_sums_by_hand() -> None:
    points = torch.tensor([[[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]]])
    assert group_sums(points, torch.tensor([[2, 0, 2]]), 4).tolist() == [[[2, 20], [0, 0], [5, 50], [0, 0]]]


@pytest.mark.parametrize("segment_tokens", [7, 300])
def test_several_segments_keep_every_token_once(segment_tokens: int, tmp_path: Path) -> None:
    recipe = replace(LOSSLESS, tokens_per_cluster=4, window_tokens=16, segment_tokens=segment_tokens)
    archive = archive_of(tmp_path / "archive", document=DOCUMENT[:1500], recipe=recipe)
    assert_every_token_is_stored_once(archive)
    assert_equals_dense(archive)


@pytest.mark.parametrize("recipe", [SMALL, CODED], ids=["lossless", "coded"])
def test_two_builds_give_the_same_bytes(recipe: Recipe, tmp_path: Path) -> None:
    built = [archive_of(tmp_path / name, document=DOCUMENT[:1500], recipe=recipe) for name in ("a", "b")]
    assert built[0].manifest.files == built[1].manifest.files


# Sizes and dtypes of what is stored


def test_payload_bytes_scale_with_the_kv_heads(tmp_path: Path) -> None:
    archives = []
    for n_kv_heads in (2, 4):
        config = tiny_config("llama")
        config.num_key_value_heads = n_kv_heads
        model = subject(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())
        folder = tmp_path / str(n_kv_heads)
        build_archive(model, DOCUMENT[:1500], folder, recipe=SMALL, layout=PLAIN)
        archives.append(Archive.open(folder, model))
    two, four = archives
    assert four.dense_bytes == 2 * two.dense_bytes == 3 * two.n_tokens * 4 * 16 * 2 * 4
    assert four.disk_bytes == pytest.approx(2 * two.disk_bytes, rel=0.05)
    assert four.resident_bytes == pytest.approx(2 * two.resident_bytes, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keys_and_values_keep_their_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    model = subject(tiny_model("llama").to(dtype))
    build_archive(model, DOCUMENT[:900], tmp_path / "archive", recipe=SMALL, layout=PLAIN)
    archive = Archive.open(tmp_path / "archive", model)
    assert archive.manifest.fingerprint.dtype == str(dtype).removeprefix("torch.")
    captured = captured_layers(prefill_cache(model.model, archive.tokens.ids.tolist()))
    for layer, entry in zip(captured, archive.manifest.layers, strict=True):
        rows = stored_tokens(archive, entry.index)
        for name in ("keys", "values"):
            found, expected = getattr(rows, name), getattr(layer, name)[rows.kv_head, rows.position]
            assert found.dtype == dtype
            assert np.array_equal(bits(found), bits(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lossless_exact_tokens_keep_their_bits_under_any_codec(dtype: torch.dtype, tmp_path: Path) -> None:
    model = subject(tiny_model("llama").to(dtype))
    recipe = replace(CODED, exact_codec="lossless")
    build_archive(model, DOCUMENT[:900], tmp_path / "archive", recipe=recipe, layout=PLAIN)
    archive = Archive.open(tmp_path / "archive", model)
    captured = captured_layers(prefill_cache(model.model, archive.tokens.ids.tolist()))
    for layer, opened in zip(captured, archive.layers, strict=True):
        n_exact = len(opened.exact_positions)
        assert n_exact >= CODED.window_tokens
        for name in ("keys", "values"):
            found, expected = getattr(opened, name)[:, -n_exact:], getattr(layer, name)[:, opened.exact_positions]
            assert np.array_equal(bits(found), bits(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_coded_exact_tokens_are_off_by_half_a_step_at_most(dtype: torch.dtype, tmp_path: Path) -> None:
    """A byte for each number: the largest of a key or value is 127 steps."""
    model = subject(tiny_model("llama").to(dtype))
    build_archive(model, DOCUMENT[:900], tmp_path / "archive", recipe=CODED, layout=PLAIN)
    archive = Archive.open(tmp_path / "archive", model)
    captured = captured_layers(prefill_cache(model.model, archive.tokens.ids.tolist()))
    for layer, opened in zip(captured, archive.layers, strict=True):
        for name in ("keys", "values"):
            found, expected = getattr(opened, name).float(), getattr(layer, name)[:, opened.exact_positions].float()
            step = expected.abs().amax(-1, keepdim=True) / 127
            rounding = torch.finfo(dtype).eps * expected.abs()
            assert bool(((found - expected).abs() <= step / 2 * 1.001 + rounding).all())


def test_each_layer_is_stored_in_the_codec_that_the_recipe_gives_it(tmp_path: Path) -> None:
    own = {"0": {"key_codec": "lossless", "value_codec": "lossless"}, "2": {"value_codec": "int8"}}
    archive = archive_of(tmp_path / "a", document=DOCUMENT[:1500], recipe=replace(CODED, layer_codecs=own))
    assert archive.transforms is not None
    first, second, third = (archive.transforms.layers[index] for index in range(3))
    assert (first.key_rows, first.value_rows) == (None, None)
    for basis, bits_per_number in ((second.key_rows, 4), (second.value_rows, 3), (third.key_rows, 4)):
        assert basis is not None
        assert 0 < basis.widths.n_bytes <= 16 * bits_per_number // 8
    assert third.value_rows is not None
    assert third.value_rows.widths == Widths(16, 0, 0)


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_another_dtype_of_the_same_checkpoint_casts_values_with_a_warning(
    stored: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    narrow = subject(tiny_model("llama").to(stored))
    build_archive(narrow, DOCUMENT[:900], tmp_path / "archive", recipe=SMALL, layout=PLAIN)
    same = Archive.open(tmp_path / "archive", narrow)
    with caplog.at_level(logging.WARNING, "ragkv"):
        wide = Archive.open(tmp_path / "archive", subject(tiny_model("llama").to(stored).float()))
    assert [record.message for record in caplog.records if "values are cast" in record.message]
    for layer, original in zip(wide.layers, same.layers, strict=True):
        assert layer.keys.dtype == torch.float32
        assert torch.equal(layer.keys, original.keys.float())
        assert torch.equal(layer.values, original.values.float())
    assert_equals_dense_roughly(wide)


def assert_equals_dense_roughly(archive: Archive) -> None:
    """Keys were computed in half precision: near the float32 answer, while bits read as another dtype are far off."""
    inputs = archive.questions(["Who kept the book?"])
    ids, model = inputs["input_ids"][0].tolist(), archive.model.model
    with torch.no_grad():
        logits = model(**inputs, cache=ArchiveCache(archive, budget=EVERYTHING)).logits[0]
    expected = dense_logits(stock_copy(model), archive.tokens.ids.tolist() + ids, len(ids))
    assert float((logits - expected).norm() / expected.norm()) < 0.2
