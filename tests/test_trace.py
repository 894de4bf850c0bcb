"""What recall reports about itself: figures that equal its steps, and nothing computed unless asked for."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

import ragkv.recall.attention
import ragkv.recall.trace
from ragkv import Archive, ArchiveCache, LoadedModel, PromptLayout, attach, build_archive
from ragkv.answer.ask import ask
from ragkv.recall.attention import Choice
from ragkv.recall.trace import LayerRecall, RecallTrace
from ragkv.recipe import QUESTION_SHARE
from tests.archives import CODED, DOCUMENT, EVERYTHING, QUESTIONS, SMALL, archive_of
from tests.decoding import of_layer
from tests.tiny import tiny_config, tiny_model, tiny_tokenizer

BUDGET = 30
N_NEW = 5


@pytest.fixture(scope="module", params=["llama", "gemma2", "gpt_oss"])
def archive(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Archive:
    return archive_of(tmp_path_factory.mktemp("trace") / "archive", model=request.param, document=DOCUMENT[:1500])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Archive:
    return archive_of(tmp_path_factory.mktemp("trace") / "llama", document=DOCUMENT[:1500])


def traced(archive: Archive, budget: int = BUDGET, *, keep_steps: bool = True) -> RecallTrace:
    trace = RecallTrace(keep_steps=keep_steps)
    archive.model.model.generate(
        **archive.questions([QUESTIONS[1]]),
        cache=ArchiveCache(archive, budget=budget, observer=trace),
        max_new_tokens=N_NEW,
        min_new_tokens=N_NEW,
        do_sample=False,
    )
    return trace


def entries(trace: RecallTrace) -> list[LayerRecall]:
    return [entry for step in trace.steps for entry in step]


def sizes_of(archive: Archive, layer: int) -> torch.Tensor:
    table = archive.layers[layer].clusters
    assert table is not None
    return table.sizes.long()


def row_bytes_of(archive: Archive, layer: int) -> int:
    stored = of_layer(pq.read_table(archive.path / "rows.parquet"), layer).to_pylist()
    (width,) = {len(row["key_value"]) / len(row["positions"]) for row in stored if row["cluster"] >= 0}
    return int(width)


# Figures


def test_one_step_for_the_question_and_one_per_further_token(archive: Archive) -> None:
    trace = traced(archive)
    recalling = [layer.index for layer in archive.layers if layer.clusters is not None]
    assert trace.n_steps == len(trace.steps) == N_NEW  # the last token is not fed back
    assert [[entry.layer for entry in step] for step in trace.steps] == [recalling] * N_NEW
    n_question = archive.questions([QUESTIONS[1]])["input_ids"].shape[1]
    assert [step[0].tokens.shape for step in trace.steps] == [(2, n_question)] + [(2, 1)] * (N_NEW - 1)


def test_a_model_with_one_recalling_layer_has_as_many_steps(tmp_path: Path) -> None:
    config = tiny_config("gemma2")
    config.num_hidden_layers, config.layer_types = 2, config.layer_types[:2]
    model = type(tiny_model("gemma2"))(config).eval()
    subject = LoadedModel(model=attach(model), tokenizer=tiny_tokenizer(), name="one")
    build_archive(subject, DOCUMENT[:900], tmp_path / "archive", recipe=SMALL, layout=PromptLayout.plain())
    assert traced(Archive.open(tmp_path / "archive", subject)).n_steps == N_NEW


def test_blocks_of_rows_belong_to_one_step(llama: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = traced(llama)
    monkeypatch.setattr(ragkv.recall.attention, "_BLOCK_FLOATS", 1)
    cut = traced(llama)
    assert cut.n_steps == whole.n_steps == N_NEW
    assert len(cut.steps[0]) > len(whole.steps[0])
    assert cut.bytes == whole.bytes
    assert cut.recalled_tokens == pytest.approx(whole.recalled_tokens)
    assert cut.unrecalled_mass == pytest.approx(whole.unrecalled_mass, abs=1e-5)


def test_the_figures_are_those_of_the_steps(archive: Archive) -> None:
    trace = traced(archive)
    tokens = torch.cat([entry.tokens.reshape(-1) for entry in entries(trace)]).double()
    mass = torch.cat([entry.unrecalled_mass.reshape(-1) for entry in entries(trace)]).double()
    assert trace.recalled_tokens == pytest.approx(float(tokens.mean()))
    assert trace.unrecalled_mass == pytest.approx(float(mass.mean()), rel=1e-5)
    assert trace.bytes == sum(entry.bytes for entry in entries(trace))
    assert trace.largest_fetch == max(entry.bytes for entry in entries(trace))


def test_bytes_are_those_of_the_keys_and_values_recalled(archive: Archive) -> None:
    for entry in entries(traced(archive)):
        assert entry.bytes == int(entry.tokens.sum()) * 2 * 16 * 4  # key and value of head_dim 16 in float32


def test_bytes_of_coded_rows_are_those_of_their_codes_and_scales(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "archive", document=DOCUMENT[:900], recipe=CODED)
    for entry in entries(traced(archive)):
        assert entry.bytes <= int(entry.tokens.sum()) * (1 + 16 * 4 // 8 + 1 + 16 * 3 // 8)  # int4 keys, int3 values
        assert entry.bytes == int(entry.tokens.sum()) * row_bytes_of(archive, entry.layer)


def test_figures_without_steps_are_the_same(archive: Archive) -> None:
    whole, running = traced(archive), traced(archive, keep_steps=False)
    assert running.steps == []
    for name in ("n_steps", "bytes", "largest_fetch", "recalled_tokens", "unrecalled_mass"):
        assert getattr(running, name) == getattr(whole, name)


def test_a_trace_that_saw_nothing_reports_zero() -> None:
    trace = RecallTrace()
    assert (trace.n_steps, trace.bytes, trace.recalled_tokens, trace.unrecalled_mass) == (0, 0, 0.0, 0.0)


def test_ask_reports_the_figures_of_its_trace(archive: Archive) -> None:
    answer = ask(archive, QUESTIONS[1], budget=BUDGET, max_new_tokens=1)
    trace = RecallTrace()
    with torch.no_grad():
        cache = ArchiveCache(archive, budget=BUDGET, observer=trace)
        archive.model.model(**archive.questions([QUESTIONS[1]]), cache=cache)
    assert answer.recalled_tokens == trace.recalled_tokens
    assert answer.unrecalled_mass == pytest.approx(trace.unrecalled_mass, rel=1e-5)
    assert answer.kv_bytes.resident == archive.resident_bytes + cache.local_bytes + trace.largest_fetch


# What was recalled


@pytest.mark.parametrize("budget", [1, 30, 200])
def test_the_budget_is_reached_and_passed_by_less_than_one_cluster(archive: Archive, budget: int) -> None:
    for entry in entries(traced(archive, budget)):
        largest = int(sizes_of(archive, entry.layer).max())
        wanted = int(budget * QUESTION_SHARE) if entry.tokens.shape[1] > 1 else budget
        assert bool((entry.tokens >= wanted).all())
        assert bool((entry.tokens < wanted + largest).all())


def test_ids_are_clusters_of_the_head_and_their_sizes_add_up(archive: Archive) -> None:
    for entry in entries(traced(archive)):
        sizes = sizes_of(archive, entry.layer)
        assert entry.clusters == sizes.shape[1] == max(archive.manifest.layers[entry.layer].clusters)
        for head, n_clusters in enumerate(archive.manifest.layers[entry.layer].clusters):
            for row, hits in enumerate(entry.clusters_hit[head].tolist()):
                ids = [hit for hit in hits if hit >= 0]
                assert len(ids) == len(set(ids))
                assert all(0 <= hit < n_clusters for hit in ids)
                assert int(sizes[head, ids].sum()) == int(entry.tokens[head, row])


def test_everything_recalled_leaves_no_mass_to_estimates(archive: Archive) -> None:
    trace = traced(archive, EVERYTHING)
    assert trace.unrecalled_mass == 0.0
    assert trace.recalled_tokens == archive.manifest.archived_tokens


def test_more_budget_leaves_less_mass_to_estimates(archive: Archive) -> None:
    def mass(budget: int) -> float:
        trace = RecallTrace()
        with torch.no_grad():
            cache = ArchiveCache(archive, budget=budget, observer=trace)
            archive.model.model(**archive.questions([QUESTIONS[1]]), cache=cache)
        first = trace.steps[0][0]  # deeper layers see other queries
        return float(first.unrecalled_mass.mean())

    one, some, many = mass(1), mass(40), mass(200)
    assert 1 >= one > some > many > 0


# Cost and log


def test_nothing_is_computed_for_a_cache_without_observer(llama: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Choice) -> torch.Tensor:
        raise AssertionError("computed although nobody asked")

    monkeypatch.setattr(Choice, "hit_ids", fail)
    with torch.no_grad():
        llama.model.model(**llama.questions([QUESTIONS[0]]), cache=ArchiveCache(llama))
    traced(llama, keep_steps=False)  # running figures need no ids either


def test_debug_logging_names_the_four_values_of_each_step(llama: Archive, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "ragkv.recall.attention"):
        trace = traced(llama)
    lines = [record.getMessage() for record in caplog.records if record.name == "ragkv.recall.attention"]
    expected = [(number, entry) for number, step in enumerate(trace.steps, 1) for entry in step]
    assert len(lines) == len(expected) == N_NEW * 3
    pattern = r"step (\d+) layer (\d+): clusters (\d+), hit (\[.*\]), tokens recalled (\[.*\]), KV bytes (\d+)"
    for line, (number, entry) in zip(lines, expected, strict=True):
        found = re.fullmatch(pattern, line)
        assert found is not None
        assert [int(found[i]) for i in (1, 2, 3, 6)] == [number, entry.layer, entry.clusters, entry.bytes]
        assert found[4] == str(entry.clusters_hit.tolist())
        assert found[5] == str(entry.tokens.tolist())


def test_nothing_is_logged_above_debug(llama: Archive, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ragkv"):
        traced(llama)
    assert [record for record in caplog.records if record.name.startswith("ragkv")] == []
