"""Recall of each layer against dense attention for the same queries, on cases worked out by hand and by invariants."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

import ragkv.evaluation.layers as layer_probe
import ragkv.recall.attention
from ragkv import Archive, Recipe
from ragkv.errors import ConfigError
from ragkv.evaluation.layers import (
    CallRecall,
    LayerFidelity,
    LayerProbe,
    ProbedDocument,
    RowFidelity,
    probe_layers,
)
from ragkv.model.attention import AttentionCall
from ragkv.model.prefill import prefill_cache
from ragkv.recipe import RecallPolicy
from tests.archives import CODED, DOCUMENT, EVERYTHING, QUESTIONS, SMALL, archive_of

MODELS = ("llama", "gemma3", "gpt_oss", "gemma2")
N_NEW = 4
ZERO = 1e-9

Subject = tuple[Archive, DynamicCache]


def subject_of(folder: Path, *, model: str = "llama", recipe: Recipe = SMALL) -> Subject:
    archive = archive_of(folder, model=model, document=DOCUMENT[:1500], recipe=recipe)
    return archive, prefill_cache(archive.model.model, archive.tokens.ids.tolist())


@pytest.fixture(scope="module", params=MODELS)
def lossless(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return subject_of(tmp_path_factory.mktemp("probe") / "lossless", model=request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return subject_of(tmp_path_factory.mktemp("probe") / "llama")


@pytest.fixture(scope="module", params=["llama", "gpt_oss"])
def coded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return subject_of(tmp_path_factory.mktemp("probe") / "coded", model=request.param, recipe=CODED)


@pytest.fixture(scope="module")
def coded_llama(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return subject_of(tmp_path_factory.mktemp("probe") / "coded", recipe=CODED)


def probed(subject: Subject, budget: int, *, max_new_tokens: int = N_NEW) -> tuple[LayerFidelity, ...]:
    archive, dense = subject
    policy = RecallPolicy(budget=budget)
    return probe_layers(archive, dense, QUESTIONS[1:], policy=policy, max_new_tokens=max_new_tokens)


def both(layers: tuple[LayerFidelity, ...]) -> Iterator[RowFidelity]:
    """The figures of answer rows and of question rows."""
    for layer in layers:
        yield from (layer, layer.question)


# By hand


@pytest.mark.parametrize("sink", [0, 4])
def test_one_row_by_hand(sink: int) -> None:
    """Attention 1, 2, 3, 4 to the document and 6 to the local token; the 4 is recalled, 2 and 3 are one prototype."""

    def column(*numbers: float) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float32).view(1, -1, 1)

    keys = column(1, 2, 3, 4).log()
    document = ProbedDocument(
        keys=keys,
        values=column(0, 1, 0, 0),
        decoded_keys=keys,
        decoded_values=column(0, 3, 0, 0),
        cluster=torch.tensor([[2, 0, 0, 1]]),  # the first token is exact
        centroids=column(2.5, 4).log(),
        means=column(0.5, 0),
        bias=torch.tensor([[2.0, 1.0]]).log(),
        n_archived=3,
    )
    call = AttentionCall(
        torch.ones(1, 1, 1, 1),
        torch.tensor([0, 6]).log().nan_to_num(neginf=0).view(1, 1, 2, 1),
        torch.zeros(1, 1, 2, 1),
        mask=torch.tensor([False, True]).view(1, 1, 1, 2),
        scaling=1.0,
        sinks=torch.tensor([sink]).log() if sink else None,
    )
    probe = LayerProbe(document)
    recalled = CallRecall(torch.tensor([[[False, True, True]]]), torch.tensor([[1]]), torch.tensor([[0.25]]))
    probe.compare(call, torch.full((1, 1, 1, 1), 3 / (16 + sink)), recalled)
    found = probe.fidelity(7)
    assert found.layer == 7
    assert found.attention_recall == pytest.approx((1 + 4 + 6) / 16)
    assert found.archived_recall == pytest.approx(4 / 9)
    assert found.output_error == pytest.approx(0.25, rel=1e-5)  # 3 was returned in place of 2
    assert found.codes_error == pytest.approx(4, rel=1e-5)  # 6 in place of 2
    assert found.clusters_error == pytest.approx((0.5 / 2) ** 2, rel=1e-5)  # 5 * 0.5 in place of 2
    assert (found.recalled_tokens, found.unrecalled_mass, found.n_rows) == (1, 0.25, 1)
    assert found.question.n_rows == 0
    assert math.isnan(found.question.attention_recall)


# Everything and little


def test_everything_recalled_without_loss_is_dense_attention(lossless: Subject) -> None:
    for figures in both(probed(lossless, EVERYTHING)):
        assert figures.attention_recall == pytest.approx(1, abs=1e-6)
        assert figures.archived_recall == pytest.approx(1, abs=1e-6)
        assert figures.recalled_tokens == lossless[0].manifest.archived_tokens
        assert figures.unrecalled_mass == 0
        assert max(figures.output_error, figures.codes_error, figures.clusters_error) < ZERO


def test_little_recalled_misses_attention_and_changes_the_output(lossless: Subject) -> None:
    for figures in both(probed(lossless, 1)):
        assert 0 < figures.archived_recall < figures.attention_recall < 1
        assert figures.output_error > 1e-4
        assert figures.unrecalled_mass > 0
        assert figures.codes_error < ZERO


def test_only_global_layers_are_measured_and_the_dense_cache_stays(lossless: Subject) -> None:
    archive, dense = lossless
    layers = probed(lossless, 30)
    assert [layer.layer for layer in layers] == [layer.index for layer in archive.layers if layer.window is None]
    assert dense.get_seq_length() == archive.n_tokens


def test_rows_are_counted_apart(llama: Subject) -> None:
    n_question = sum(llama[0].questions([question])["input_ids"].shape[1] for question in QUESTIONS[1:])
    for layer in probed(llama, 30):
        assert layer.question.n_rows == n_question
        assert layer.n_rows == len(QUESTIONS[1:]) * (N_NEW - 1)  # the last token is not fed back
        assert layer.question.recalled_tokens > layer.recalled_tokens


def test_more_budget_recalls_more_attention(llama: Subject) -> None:
    by_budget = [probed(llama, budget) for budget in (1, 20, 80, 200)]
    first = [layers[0].archived_recall for layers in by_budget]  # deeper layers see other queries
    everywhere = [sum(layer.archived_recall for layer in layers) for layers in by_budget]
    errors = [layers[0].output_error for layers in by_budget]
    assert first == sorted(first)
    assert everywhere == sorted(everywhere)
    assert errors == sorted(errors, reverse=True)


# Causes


@pytest.mark.parametrize("budget", [1, 30])
def test_without_codes_clusters_are_the_whole_error(lossless: Subject, budget: int) -> None:
    for figures in both(probed(lossless, budget)):
        assert figures.clusters_error == pytest.approx(figures.output_error, rel=1e-3)


def test_with_everything_recalled_codes_are_the_whole_error(coded: Subject) -> None:
    for figures in both(probed(coded, EVERYTHING)):
        assert figures.clusters_error < ZERO
        assert figures.codes_error > 1e-5
        assert figures.output_error == pytest.approx(figures.codes_error, rel=1e-3)


def test_clusters_only_is_what_a_lossless_archive_does(llama: Subject, tmp_path: Path) -> None:
    """Exact tokens take part in the choice of clusters, so those of the coded archive must be lossless, too."""
    coded = subject_of(tmp_path / "coded", recipe=dataclasses.replace(CODED, exact_codec="lossless"))
    ours, twin = probed(coded, 30)[0], probed(llama, 30)[0]  # in the first layer all queries are the same
    for one, other in zip(both((ours,)), both((twin,)), strict=True):
        assert one.clusters_error == pytest.approx(other.output_error, rel=1e-3)
        assert one.attention_recall == pytest.approx(other.attention_recall, rel=1e-5)


def test_the_error_of_codes_does_not_depend_on_what_is_recalled(coded_llama: Subject) -> None:
    little, more = probed(coded_llama, 1)[0], probed(coded_llama, 100)[0]
    assert little.codes_error == pytest.approx(more.codes_error, rel=1e-6)
    assert little.clusters_error > more.clusters_error


def test_a_layer_that_the_policy_keeps_dense_recalls_everything(coded_llama: Subject) -> None:
    archive, dense = coded_llama
    policy = RecallPolicy(budget=1, dense_layers=(1,))
    layers = probe_layers(archive, dense, QUESTIONS[1:2], policy=policy, max_new_tokens=N_NEW)
    assert layers[1].attention_recall == pytest.approx(1, abs=1e-6)
    assert layers[1].recalled_tokens == archive.manifest.archived_tokens
    assert layers[1].output_error == pytest.approx(layers[1].codes_error, rel=1e-3)
    assert layers[0].attention_recall < 1 > layers[2].attention_recall


# Edges


def test_blocks_of_rows_change_nothing(coded_llama: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = probed(coded_llama, 30)
    monkeypatch.setattr(ragkv.recall.attention, "_BLOCK_FLOATS", 1)
    monkeypatch.setattr(layer_probe, "_BLOCK_FLOATS", 20_000)
    for one, other in zip(both(probed(coded_llama, 30)), both(whole), strict=True):
        for field in dataclasses.fields(RowFidelity):
            assert getattr(one, field.name) == pytest.approx(getattr(other, field.name), rel=1e-4), field.name


def test_a_document_that_is_not_archived_misses_nothing(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "short", document="Agnes Moore kept the book.", recipe=SMALL)
    dense = prefill_cache(archive.model.model, archive.tokens.ids.tolist())
    for layer in probe_layers(archive, dense, QUESTIONS[:1], max_new_tokens=3):
        assert (layer.archived_recall, layer.recalled_tokens) == (1, 0)
        assert layer.attention_recall == pytest.approx(1)
        assert layer.output_error < ZERO


def test_answers_of_one_token_have_question_rows_only(llama: Subject) -> None:
    for layer in probed(llama, 30, max_new_tokens=1):
        assert layer.n_rows == 0
        assert math.isnan(layer.attention_recall)
        assert math.isnan(layer.archived_recall)
        assert layer.question.attention_recall > 0


def test_progress_counts_questions(llama: Subject) -> None:
    seen: list[tuple[int, int]] = []
    probe_layers(*llama, QUESTIONS[:2], max_new_tokens=1, on_progress=lambda done, n: seen.append((done, n)))
    assert seen == [(1, 2), (2, 2)]


def test_another_dense_cache_is_refused(llama: Subject) -> None:
    archive, _ = llama
    other = prefill_cache(archive.model.model, archive.tokens.ids.tolist()[:-1])
    with pytest.raises(ConfigError, match=rf"holds {archive.n_tokens - 1} tokens and the archive {archive.n_tokens}"):
        probe_layers(archive, other, QUESTIONS)


def test_no_questions_are_refused(llama: Subject) -> None:
    with pytest.raises(ConfigError, match="at least one question"):
        probe_layers(*llama, [])
