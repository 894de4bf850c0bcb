"""Documents composed behind one prefix equal dense attention over the same keys, moved to where they stand."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ragkv import Archive, ArchiveCache, PromptLayout, build_archive
from ragkv.errors import ConfigError, ModelMismatchError
from ragkv.model.rope import turn_back
from ragkv.model.shape import model_shape
from ragkv.recall.composition import CONSECUTIVE, REUSED, Composition
from ragkv.recall.prefilled import prefill_document
from ragkv.recipe import RecallPolicy
from tests.archives import CODED, DOCUMENT, EVERYTHING, QUESTIONS, SMALL, archive_of
from tests.dense import stock_copy
from tests.tiny import TEXT, TINY_MODELS

TEXTS = (DOCUMENT[:900], "Agnes Moore kept the lighthouse.", DOCUMENT[900:1900])
"""Two documents with clusters, and one so short that every token of it is exact."""


class Case:
    """One architecture: its archives, and the caches that they were built from."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.archives = self.built("lossless", SMALL)
        self.model = self.archives[0].model.model
        self.stock = stock_copy(self.model)
        self.caches = [full_cache(self.stock, archive.tokens.ids) for archive in self.archives]

    def built(self, name: str, recipe: object) -> list[Archive]:
        return [
            archive_of(self.folder / f"{name}{place}", model=self.name, document=text, recipe=recipe)
            for place, text in enumerate(TEXTS)
        ]

    @torch.no_grad()
    def logits(self, composition: Composition, policy: RecallPolicy | None = None) -> torch.Tensor:
        policy = policy or RecallPolicy(budget=EVERYTHING)
        inputs = composition.questions([QUESTIONS[2]])
        return self.model(**inputs, cache=ArchiveCache(composition, policy=policy)).logits[0]

    @torch.no_grad()
    def moved_logits(self, order: list[int], *, reused: bool = False) -> torch.Tensor:
        """Logits of the stock model over the documents' own keys, moved one behind the other."""
        prefix, end = self.archives[0].prefix_tokens, 0
        cache = Cache(layer_class_to_replicate=DynamicLayer)
        longest = 0
        for place, number in enumerate(order):
            own = self.caches[number]
            n_own = own.get_seq_length() - prefix
            for index, layer in enumerate(own.layers):
                keys = moved(self.stock, layer.keys, 0 if reused else end, index)
                kept = slice(0 if place == 0 else prefix, None)
                cache.update(keys[:, :, kept], layer.values[:, :, kept], index)
            end, longest = end + n_own, max(longest, n_own)
        inputs = self.archives[0].questions([QUESTIONS[2]])
        n_question = inputs["input_ids"].shape[1]
        positions = torch.arange(n_question)[None] + prefix + (longest if reused else end)
        return self.stock(inputs["input_ids"], position_ids=positions, cache=cache).logits[0]


@torch.no_grad()
def full_cache(model: PreTrainedModel, ids: torch.Tensor) -> Cache:
    """Every key and value of a prefill, also those that a sliding layer forgets."""
    cache = Cache(layer_class_to_replicate=DynamicLayer)
    model(ids[None], cache=cache)
    return cache


def moved(model: PreTrainedModel, keys: torch.Tensor, distance: int, index: int) -> torch.Tensor:
    """Keys (1, n_kv_heads, n, key_dim) that were computed at p as they would be at p + `distance`."""
    decoder, config = model.get_decoder(), model.config
    kinds = [config.layer_types[index]] if config.model_type == "gemma3_text" else []
    cosine, sine = decoder.rotary_emb(keys, torch.tensor([[distance]]), *kinds)
    length = (cosine.square() + sine.square()).sqrt()  # some encodings scale what they turn
    apply = sys.modules[type(decoder).__module__].apply_rotary_pos_emb
    return apply(keys, keys, cosine / length, sine / length)[0]


@pytest.fixture(scope="module", params=TINY_MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("archives"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("llama", tmp_path_factory.mktemp("llama"))


# Exactness


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [0, 0], [1], [1, 0, 1, 2]], ids=str)
def test_everything_recalled_equals_dense_attention_over_the_moved_keys(case: Case, order: list[int]) -> None:
    composition = Composition([case.archives[number] for number in order])
    torch.testing.assert_close(case.logits(composition), case.moved_logits(order), atol=1e-4, rtol=0)


def test_documents_at_the_same_positions_equal_dense_attention_over_unmoved_keys(case: Case) -> None:
    if model_shape(case.model.config).sliding_layers:
        return  # the stock mask of a window counts keys, not positions: there is no reference to compare with
    composition = Composition([case.archives[number] for number in (2, 0, 1)], positions=REUSED)
    torch.testing.assert_close(case.logits(composition), case.moved_logits([2, 0, 1], reused=True), atol=1e-4, rtol=0)


def test_codes_of_several_documents_equal_dense_attention_over_what_they_decode_to(case: Case) -> None:
    composition = Composition(case.built("coded", CODED))
    decoded = RecallPolicy(dense_layers=tuple(range(len(composition.shape.layers))))
    torch.testing.assert_close(case.logits(composition), case.logits(composition, decoded), atol=1e-4, rtol=0)


def test_one_document_composed_is_that_document(case: Case) -> None:
    archive, policy = case.archives[2], RecallPolicy(budget=20)
    with torch.no_grad():
        own = case.model(**archive.questions([QUESTIONS[2]]), cache=ArchiveCache(archive, policy=policy)).logits[0]
    assert torch.equal(case.logits(Composition([archive]), policy), own)


def test_a_turned_query_meets_a_key_as_if_the_key_had_been_moved(case: Case) -> None:
    dim = model_shape(case.model.config).layers[1].head_dim
    draw = torch.Generator().manual_seed(0)
    query, keys = torch.randn(dim, generator=draw), torch.randn(1, 1, 5, dim, generator=draw)
    expected = moved(case.stock, keys, 137, 1)[0, 0] @ query
    turned = query @ turn_back(case.model, 137, layer=1, key_dim=dim)
    torch.testing.assert_close(keys[0, 0] @ turned, expected, atol=2e-5, rtol=1e-5)


def test_a_document_prefilled_for_the_request_stands_in_for_its_archive(case: Case) -> None:
    archive = case.archives[2]
    prefilled = prefill_document(archive.model, TEXTS[2], layout=archive.layout, name="text")
    mixed = Composition([case.archives[0], prefilled, case.archives[1]])
    torch.testing.assert_close(case.logits(mixed), case.moved_logits([0, 2, 1]), atol=1e-4, rtol=0)


# What composing is


def test_two_copies_of_one_document_stand_at_different_positions(llama: Case) -> None:
    once, twice = Composition([llama.archives[0]]), Composition([llama.archives[0]] * 2)
    own = llama.archives[0].n_tokens - once.prefix_tokens
    assert twice.shifts == (0, own)
    assert twice.n_tokens == once.n_tokens + own
    assert not torch.allclose(llama.logits(once), llama.logits(twice), atol=1e-2)
    layer = twice.layer(1)
    assert layer.parts[0].turn is None
    assert layer.parts[1].turn is not None


def test_prefix_is_attended_once(llama: Case) -> None:
    layer = Composition(llama.archives).layer(0)
    n_prefix = llama.archives[0].prefix_tokens
    biases = [part.exact_bias for part in layer.parts]
    assert [0 if bias is None else int((bias == -torch.inf).sum()) for bias in biases] == [0, n_prefix, n_prefix]


def test_budget_is_shared_by_the_documents(llama: Case) -> None:
    """Together they recall what one alone would, and one that is asked about gets more than an even share."""
    trace = Tokens()
    composition = Composition([llama.archives[0], llama.archives[2]])
    with torch.no_grad():
        inputs = composition.questions([QUESTIONS[2]])
        llama.model(**inputs, cache=ArchiveCache(composition, budget=30, observer=trace))
    largest = composition.layer(0).largest
    for tokens in trace.together:
        assert bool(((tokens >= 45) & (tokens < 45 + largest)).all())
    assert any(not torch.equal(first, second) for first, second in trace.apart)


class Tokens:
    """Counts what each document was recalled, and all of them together."""

    def __init__(self) -> None:
        self.together: list[torch.Tensor] = []
        self.apart: list[tuple[torch.Tensor, torch.Tensor]] = []

    def on_recall(self, layer: object, recall: object, *, begins: bool) -> None:
        own = [share.choice.tokens for share in recall.shares if share.choice is not None]
        assert torch.equal(torch.stack(own).sum(0), recall.choice.tokens)
        self.together.append(recall.choice.tokens)
        if len(own) == 2:
            self.apart.append((own[0], own[1]))


def test_composing_copies_nothing_of_the_documents(llama: Case) -> None:
    composition = Composition(llama.archives)
    for index in range(len(composition.shape.layers)):
        for part, archive in zip(composition.layer(index).parts, llama.archives, strict=True):
            assert part.layer is archive.layers[index]


def test_bytes_count_a_document_once_and_the_dense_cache_of_the_joined_text(llama: Case) -> None:
    first, second = llama.archives[0], llama.archives[2]
    composition = Composition([first, second, first])
    assert composition.resident_bytes == first.resident_bytes + second.resident_bytes
    assert composition.disk_bytes == first.disk_bytes + second.disk_bytes
    per_token = first.dense_bytes // first.n_tokens
    assert composition.n_context == 2 * first.n_tokens + second.n_tokens - 2 * first.prefix_tokens
    assert composition.dense_bytes == composition.n_context * per_token


def test_token_ids_are_prefix_and_documents(llama: Case) -> None:
    p = llama.archives[0].prefix_tokens
    ids = [archive.tokens.ids.tolist() for archive in llama.archives]
    assert Composition(llama.archives).token_ids.tolist() == ids[0] + ids[1][p:] + ids[2][p:]


# Refusals


def test_no_documents_are_refused() -> None:
    with pytest.raises(ConfigError, match="no documents"):
        Composition([])


def test_unknown_positions_are_refused(llama: Case) -> None:
    with pytest.raises(ConfigError, match="consecutive, reused"):
        Composition(llama.archives, positions="sideways")


def test_documents_of_another_model_object_are_refused(llama: Case, tmp_path: Path) -> None:
    other = archive_of(tmp_path / "other", model="qwen2", document=TEXT)
    with pytest.raises(ModelMismatchError, match="another model object"):
        Composition([llama.archives[0], other])


def test_documents_behind_another_prefix_are_refused(llama: Case, tmp_path: Path) -> None:
    layout = replace(PromptLayout.plain(), prefix="Read.\n")
    model = llama.archives[0].model
    build_archive(model, TEXT, tmp_path / "other", recipe=SMALL, layout=layout)
    with pytest.raises(ConfigError, match="another layout"):
        Composition([llama.archives[0], Archive.open(tmp_path / "other", model)])


def test_more_than_the_context_is_refused_unless_positions_are_reused(llama: Case) -> None:
    many = [llama.archives[0]] * 20
    assert sum(archive.n_tokens for archive in many) > 4096
    with pytest.raises(ConfigError, match="context holds 4,096"):
        Composition(many)
    assert Composition(many, positions=REUSED).n_tokens == llama.archives[0].n_tokens
    assert CONSECUTIVE == "consecutive"
