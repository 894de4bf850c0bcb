"""Recomputed first tokens take the place of the archived ones, and weighting moves attention to the documents."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ragkv.recall.cache
from ragkv import Archive, ArchiveCache
from ragkv.errors import ConfigError
from ragkv.recall.attention import recall_attention
from ragkv.recall.composition import REUSED, Composition
from ragkv.recall.placed import Weighting
from ragkv.recall.prefilled import prefill_document
from ragkv.recall.recompute import recompute
from tests.archives import DOCUMENT, EVERYTHING, QUESTIONS, SMALL, archive_of
from tests.dense import dense_logits, stock_copy

TEXTS = (DOCUMENT[:700], DOCUMENT[700:1500])
WHOLE_HEAD = replace(SMALL, sink_tokens=80)
COUNT = 20
MODELS = ("llama", "gemma3", "gpt_oss", "glm")


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Archive]:
    folder = tmp_path_factory.mktemp("pair")
    return [
        archive_of(folder / str(place), model=request.param, document=text, recipe=WHOLE_HEAD)
        for place, text in enumerate(TEXTS)
    ]


@torch.no_grad()
def logits(composition: Composition, budget: int = EVERYTHING) -> torch.Tensor:
    inputs = composition.questions([QUESTIONS[2]])
    return composition.model.model(**inputs, cache=ArchiveCache(composition, budget=budget)).logits[0]


def test_a_document_recomputed_whole_is_a_joint_prefill(pair: list[Archive]) -> None:
    """The second document is so short that all of it is computed again: nothing is left of its own prefill."""
    model = pair[0].model
    short = prefill_document(model, "Agnes Moore kept the book.", layout=pair[0].layout)
    composition = Composition([prefill_document(model, TEXTS[0], layout=pair[0].layout), short])
    whole = recompute(composition, short.n_tokens - short.prefix_tokens)
    question = composition.questions([QUESTIONS[2]])["input_ids"][0].tolist()
    ids = composition.token_ids.tolist() + question
    expected = dense_logits(stock_copy(model.model), ids, len(question))
    torch.testing.assert_close(logits(whole), expected, atol=1e-4, rtol=0)
    assert not torch.allclose(logits(composition), expected, atol=1e-2)


def test_recomputed_tokens_take_the_place_of_archived_ones(pair: list[Archive]) -> None:
    composition = Composition(pair)
    repaired = recompute(composition, COUNT)
    assert repaired.recomputed is not None
    for layer in repaired.recomputed.layers:
        assert torch.equal(layer.exact_positions, torch.arange(pair[0].n_tokens, pair[0].n_tokens + COUNT))
    document, again = repaired.layer(composition.first_full_layer).parts[1:]
    left_out = document.exact_bias == -torch.inf
    assert document.layer.exact_positions[left_out].tolist() == list(range(pair[1].prefix_tokens + COUNT))
    assert again.turn is None
    assert again.n_held == COUNT


def test_more_than_an_archive_holds_exactly_is_refused(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "archive", document=TEXTS[0])
    with pytest.raises(ConfigError, match="sink_tokens = "):
        recompute(Composition([archive, archive]), COUNT)


def test_reused_positions_are_refused(pair: list[Archive]) -> None:
    with pytest.raises(ConfigError, match="one after another"):
        recompute(Composition(pair, positions=REUSED), COUNT)


@pytest.mark.parametrize("count", [0, -1, 1.5])
def test_a_count_that_is_no_whole_number_is_refused(pair: list[Archive], count: int) -> None:
    with pytest.raises(ConfigError, match="whole number of at least 1"):
        recompute(Composition(pair), count)


# Weighting


def test_no_weighting_is_attention_as_it_is(pair: list[Archive]) -> None:
    assert torch.equal(logits(Composition(pair, weighting=Weighting(1.0, 1.0)), 40), logits(Composition(pair), 40))


@pytest.mark.parametrize("weighting", [Weighting(0.8, 1.0), Weighting(1.0, 0.7), Weighting(0.9, 0.9)])
def test_weighting_is_that_of_the_paper(tmp_path: Path, weighting: Weighting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Softmax of the logits l, those of documents divided by T and shifted by (S - 1) log sum exp(l / T)."""
    archive = archive_of(tmp_path / "archive", document=TEXTS[0])
    composition = Composition([archive], weighting=weighting)
    checked = []

    def spy(call: object, layer: object, limit: object, observer: object = None) -> torch.Tensor:
        out = recall_attention(call, layer, limit, observer)
        whole = archive.whole_layer(layer.index)
        keys, values, p = whole.keys.double(), whole.values.double(), archive.prefix_tokens
        of_document = whole.exact_positions >= p
        query = call.query[0].double().view(keys.shape[0], -1, call.query.shape[2], keys.shape[2])
        own = query @ keys.unsqueeze(1).transpose(2, 3) * call.scaling
        own = torch.where(of_document, own / weighting.temperature, own)
        total = own.masked_fill(~of_document, -torch.inf).logsumexp(-1, keepdim=True)
        own = torch.where(of_document, own + total * (weighting.scale - 1), own)
        local = query @ call.key[0].double().unsqueeze(1).transpose(2, 3) * call.scaling
        local = local.masked_fill(~call.mask[0], -torch.inf) if call.mask is not None else local
        weights = torch.cat([own, local], dim=-1).softmax(-1)
        expected = weights @ torch.cat([values, call.value[0].double()], dim=1).unsqueeze(1)
        torch.testing.assert_close(out[0].double(), expected.flatten(0, 1), atol=1e-4, rtol=1e-4)
        checked.append(layer.index)
        return out

    monkeypatch.setattr(ragkv.recall.cache, "recall_attention", spy)
    logits(composition)
    assert checked == [0, 1, 2]


def test_a_small_scale_takes_attention_from_documents_and_a_low_temperature_sharpens(pair: list[Archive]) -> None:
    plain = logits(Composition(pair))
    for weighting in (Weighting(temperature=0.5), Weighting(scale=0.5)):
        assert not torch.allclose(logits(Composition(pair, weighting=weighting)), plain, atol=1e-3)


@pytest.mark.parametrize(
    ("temperature", "scale"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 1e-9), (float("nan"), 1.0), (1.0, float("inf"))]
)
def test_weights_that_are_no_positive_numbers_are_refused(temperature: float, scale: float) -> None:
    with pytest.raises(ConfigError, match="give a number from"):
        Weighting(temperature, scale)
