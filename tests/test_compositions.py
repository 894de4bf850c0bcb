"""Composition measured: cases are drawn as they should, rows say what they claim, and a stopped run goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.composition import HEADINGS, main, row_of
from pipelines.measure.cases import FILE, Case, PoolQuestion, draw_cases, read_pool
from pipelines.measure.compositions import (
    CompositionOptions,
    compose_variant,
    measure_compositions,
    measure_together,
    sizes_beyond,
)
from pipelines.measure.rows import ALL, JOINT, RECALL, Row, summarise_compositions
from ragkv import Archive, LoadedModel, PromptLayout, attach, build_archive
from ragkv.answer.ask import ask
from ragkv.catalog.catalog import Catalog
from ragkv.errors import ConfigError
from ragkv.evaluation.data.suite import Item
from ragkv.evaluation.metrics import METRICS
from ragkv.evaluation.results import RESULTS_FILE, JsonLines
from ragkv.model.prompt import question_ids
from ragkv.recall.composition import REUSED, Composition
from tests.archives import DOCUMENT, SMALL, archive_of, loaded
from tests.squad import article
from tests.tiny import tiny_model, tiny_tokenizer

TOWNS = ("Arden", "Borrow", "Calder", "Dunmore", "Elswick")
SIZES = (2, 3)
CONTEXT = 600
"""Room for two documents of `options_of` with a question and its answer (511 tokens), and not for three (731)."""
FAR = ("reused", "alone")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    squad = {"version": "1", "data": [article(number, town) for number, town in enumerate(TOWNS)]}
    (folder / FILE).write_text(json.dumps(squad), encoding="utf-8")
    return folder


def options_of(data: Path, **changes: object) -> CompositionOptions:
    small = CompositionOptions(
        data=data, sizes=SIZES, questions=4, pool=4, paragraphs=2, recompute=(4,), max_new_tokens=4, recipe=SMALL
    )
    return replace(small, **changes)


def measure(options: CompositionOptions, out: Path, *, model: LoadedModel | None = None, **others: object) -> list[Row]:
    model = model or loaded("llama")
    return measure_compositions(model, options, out, settings=options.settings(model="tiny", dtype=None), **others)


def near_sighted(limit: int = CONTEXT) -> LoadedModel:
    """The same weights as all have here, with a context of so many tokens."""
    model = attach(tiny_model("llama"))
    model.config.max_position_embeddings = limit
    return LoadedModel(model=model, tokenizer=tiny_tokenizer(), name="tiny-llama")


@pytest.fixture(scope="module")
def rows(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    return measure(options_of(data), tmp_path_factory.mktemp("measured") / "results")


# Cases


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_document_that_answers_is_among_different_documents_and_holds_the_answer(data: Path, size: int) -> None:
    pool = read_pool(data, n_documents=4, n_paragraphs=2)
    cases = draw_cases(pool, size=size, n_questions=8)
    for case in cases:
        assert len(set(case.documents)) == case.size == size
        assert case.asked.place in case.documents
        assert case.asked.item.answers[0] in pool[case.asked.place].text
    assert len({case.asked.id for case in cases}) == 8
    assert len({case.documents.index(case.asked.place) for case in cases}) > 1, "the place of the answer is drawn"


def test_questions_are_spread_evenly_and_are_the_same_for_every_size(data: Path) -> None:
    pool = read_pool(data, n_documents=4, n_paragraphs=2)
    by_size = [[case.asked for case in draw_cases(pool, size=size, n_questions=8)] for size in (2, 3, 4)]
    assert [asked.place for asked in by_size[0]] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert by_size[0] == by_size[1] == by_size[2]


def test_the_same_seed_draws_the_same_and_another_one_does_not(data: Path) -> None:
    def drawn(pool_seed: int, seed: int) -> tuple[object, object]:
        pool = read_pool(data, n_documents=4, n_paragraphs=2, seed=pool_seed)
        return pool, [case.documents for case in draw_cases(pool, size=3, n_questions=8, seed=seed)]

    assert drawn(0, 0) == drawn(0, 0)
    assert drawn(0, 0)[1] != drawn(0, 1)[1]
    assert drawn(0, 0)[0] != drawn(1, 0)[0]


def test_more_questions_begin_with_the_fewer(data: Path) -> None:
    pool = read_pool(data, n_documents=3, n_paragraphs=3)
    assert draw_cases(pool, size=2, n_questions=9)[:5] == draw_cases(pool, size=2, n_questions=5)


def test_a_document_is_consecutive_paragraphs_of_one_article(data: Path) -> None:
    pool = read_pool(data, n_documents=5, n_paragraphs=2)
    articles = [[paragraph["context"] for paragraph in article(n, town)["paragraphs"]] for n, town in enumerate(TOWNS)]
    runs = [{"\n\n".join(own[first : first + 2]) for first in (0, 1)} for own in articles]
    found = [number for document in pool for number, own in enumerate(runs) if document.text in own]
    assert sorted(found) == [0, 1, 2, 3, 4]


# Rows


def test_one_lossless_document_with_everything_recalled_is_the_joint_prefill(data: Path, tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "a", document=DOCUMENT)
    case = Case((0,), PoolQuestion("q", 0, Item("Who kept the book?", ("Agnes Moore",))))
    joint, composed = measure_together([archive], [(case, (JOINT, ALL))], options_of(data, max_new_tokens=6))
    assert composed.kl < 1e-6
    assert composed.top1 == 1.0
    assert (composed.answer, composed.n_positions) == (joint.answer, joint.n_positions)
    assert (joint.kl, joint.top1) == (0.0, 1.0)


def test_a_joint_prefill_counts_its_documents_and_a_composition_only_what_it_computes(
    data: Path, rows: list[Row]
) -> None:
    options = options_of(data)
    pool = read_pool(data, n_documents=4, n_paragraphs=2)
    (case, *_) = draw_cases(pool, size=3, n_questions=1)
    model = loaded("llama")
    n_question = len(question_ids(model.tokenizer, model.layout, case.asked.item.question))
    found = {row.variant: row for row in rows if (row.size, row.question) == (3, case.asked.id)}
    assert set(found) == set(options.chosen_variants)
    assert found[JOINT].prefilled_tokens == found[JOINT].context_tokens + n_question
    assert found[RECALL].prefilled_tokens == n_question
    assert found["recompute-4"].prefilled_tokens == n_question + 2 * 4
    assert found["reused"].context_tokens == found[JOINT].context_tokens > found["alone"].context_tokens


def test_documents_that_never_saw_each_other_are_far_from_a_joint_prefill(rows: list[Row]) -> None:
    assert all(row.kl > 1e-3 for row in rows if row.variant == ALL)
    assert all(row.kl == 0 for row in rows if row.variant == JOINT)


def test_every_variant_has_its_own_composition(data: Path, tmp_path: Path) -> None:
    layout, model = PromptLayout.plain(), loaded("llama")
    archives = []
    for place, text in enumerate((DOCUMENT[:500], DOCUMENT[500:900])):
        recipe = replace(SMALL, sink_tokens=80)
        archives.append(
            Archive.open(build_archive(model, text, tmp_path / str(place), recipe=recipe, layout=layout).path, model)
        )
    case = Case((1, 0), PoolQuestion("q", 0, Item("Who?", ("Agnes",))))

    def composed(name: str) -> Composition:
        return compose_variant(name, case, archives, options_of(data, temperature=0.5, scale=0.7))[0]

    assert composed(RECALL).documents == (archives[1], archives[0])
    assert composed("alone").documents == (archives[0],)
    assert composed("reused").positions == "reused"
    assert (composed("weighted").weighting.temperature, composed("weighted").weighting.scale) == (0.5, 0.7)
    assert composed("recompute-4").recomputed.count == 4


# Going on


def test_a_stopped_run_goes_on_and_measures_nothing_twice(data: Path, tmp_path: Path, rows: list[Row]) -> None:
    options, lines = options_of(data), tmp_path / "results" / RESULTS_FILE

    def stop(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("questions", 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(options, tmp_path / "results", on_progress=stop)
    first = lines.read_bytes()
    assert first.count(b"\n") == 2 * len(options.chosen_variants)
    lines.write_bytes(first + b'{"size": 2, "quest')
    found = measure(options, tmp_path / "results")
    assert lines.read_bytes().startswith(first)
    assert lines.read_bytes().count(b"\n") == len(found) == len(rows)
    assert [replace(row, ttft_s=0) for row in found] == [replace(row, ttft_s=0) for row in rows]
    whole = lines.read_bytes()
    assert measure(options, tmp_path / "results") == found
    assert lines.read_bytes() == whole


def test_a_later_run_may_ask_for_more_and_measures_only_that(data: Path, tmp_path: Path) -> None:
    small = options_of(data, sizes=(2,), questions=2, variants=(RECALL,))
    stages: list[str] = []
    measure(small, tmp_path / "results")
    before = JsonLines(tmp_path / "results" / RESULTS_FILE, Row).read()
    found = measure(
        replace(small, variants=(RECALL, ALL)), tmp_path / "results", on_progress=lambda *each: stages.append(each[0])
    )
    assert [row.variant for row in before] == [JOINT, RECALL] * 2
    assert [row.variant for row in found] == [JOINT, ALL, RECALL] * 2
    assert len(JsonLines(tmp_path / "results" / RESULTS_FILE, Row).read()) == 6
    assert "joint prefill" in stages
    with pytest.raises(ConfigError, match="other settings"):
        measure(replace(small, seed=1), tmp_path / "results")


def test_a_damaged_line_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text('{"size": 2}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="damaged"):
        JsonLines(tmp_path / "rows", Row).read()


# Beyond the model's context


def test_beyond_the_context_a_row_is_the_variants_own_answer_and_has_no_reference(data: Path, tmp_path: Path) -> None:
    model, options = near_sighted(), options_of(data, sizes=(3,), variants=FAR)
    found = measure(options, tmp_path / "results", model=model)
    assert [row.variant for row in found] == [*FAR] * 4
    assert {(row.kl, row.top1, row.n_positions) for row in found} == {(None, None, 0)}
    assert '"kl": null, "top1": null, "n_positions": 0' in (tmp_path / "results" / RESULTS_FILE).read_text("utf-8")
    pool = read_pool(data, n_documents=4, n_paragraphs=2)
    catalog = Catalog.open(tmp_path / "results" / "archives", model)
    for case, reused, alone in zip(draw_cases(pool, size=3, n_questions=4), found[::2], found[1::2], strict=True):
        archives = [catalog.archive(catalog.entry(pool[place].name).id) for place in case.documents]
        gold = archives[case.documents.index(case.asked.place)]
        for own, source in ((reused, Composition(archives, positions=REUSED)), (alone, gold)):
            assert own.answer == ask(source, case.asked.item.question, max_new_tokens=4).text
            assert (own.f1, own.document) == (METRICS["squad"](own.answer, case.asked.item.answers)["f1"], gold.name)
        assert reused.context_tokens > CONTEXT > alone.context_tokens


def test_sizes_within_and_beyond_the_context_are_measured_in_one_run(
    data: Path, tmp_path: Path, rows: list[Row]
) -> None:
    stages: list[tuple[str, int, int]] = []
    options = options_of(data, variants=FAR)
    found = measure(options, tmp_path / "r", model=near_sighted(), on_progress=lambda *each: stages.append(each))
    assert [row.variant for row in found] == [JOINT, *FAR] * 4 + [*FAR] * 4
    known = {row.key: replace(row, ttft_s=0) for row in rows}
    for row in found:
        blind = {} if row.size == 2 else {"kl": None, "top1": None, "n_positions": 0}
        assert replace(row, ttft_s=0) == replace(known[row.key], **blind), "only the reference depends on the context"
    assert max(total for stage, _, total in stages if stage == "joint prefill") < CONTEXT


@pytest.mark.parametrize("variants", [(), (RECALL, "reused"), (JOINT, "reused", "alone")], ids=str)
def test_beyond_the_context_other_variants_are_refused(data: Path, tmp_path: Path, variants: tuple[str, ...]) -> None:
    sentence = (
        "^3 documents .* context is 600, beyond which only the variants reused and alone can be measured: ask for"
    )
    with pytest.raises(ConfigError, match=sentence):
        measure(options_of(data, variants=variants), tmp_path / "results", model=near_sighted())
    assert not (tmp_path / "results").exists()


def test_a_document_that_is_too_long_by_itself_is_refused(data: Path, tmp_path: Path) -> None:
    options = options_of(data, variants=FAR)
    with pytest.raises(ConfigError, match=r"^the longest of 2 documents with .* has 285 tokens .* context is 284;"):
        measure(options, tmp_path / "results", model=near_sighted(284))
    assert not (tmp_path / "results").exists()
    pool = read_pool(data, n_documents=4, n_paragraphs=2)
    assert sizes_beyond(near_sighted(285), pool, draw_cases(pool, size=2, n_questions=4), options) == {2}


def test_beyond_the_context_a_stopped_run_goes_on(data: Path, tmp_path: Path) -> None:
    model, options = near_sighted(), options_of(data, sizes=(3,), variants=FAR)
    lines = tmp_path / "results" / RESULTS_FILE

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "questions":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(options, tmp_path / "results", model=model, on_progress=stop)
    first = lines.read_bytes()
    found = measure(options, tmp_path / "results", model=model)
    assert (first.count(b"\n"), len(found)) == (2 * 2, 4 * 2)
    assert lines.read_bytes().startswith(first)
    assert JsonLines(lines, Row).read() == found


def test_rows_without_a_reference_are_measured_again_where_there_is_one(data: Path, tmp_path: Path) -> None:
    options = options_of(data, sizes=(3,), questions=2, variants=FAR)
    measure(options, tmp_path / "results", model=near_sighted())
    found = measure(options, tmp_path / "results")
    assert [row.variant for row in found] == [JOINT, *FAR] * 2
    assert all(row.kl is not None and row.n_positions > 0 for row in found)
    assert measure(options, tmp_path / "results") == found


def test_without_a_reference_cells_are_empty_and_no_mean_leaves_questions_out() -> None:
    near, far = row("reused", "a", "x", f1=0.5, kl=1.0), row("reused", "b", "y", f1=0.7)
    far = replace(far, kl=None, top1=None, n_positions=0)
    for rows in ([far], [near, far]):
        (summary,) = summarise_compositions(rows)
        assert (summary.kl, summary.top1, summary.f1_over_recall) == (None, None, None)
        cells = dict(zip(HEADINGS, row_of(summary, errors=True), strict=True))
        assert [heading for heading, cell in cells.items() if not cell] == ["KL", "top-1", "- recall"]
        assert summary.f1.n_items == len(rows)


# Summary


def row(variant: str, question: str, document: str, f1: float, kl: float = 0.0) -> Row:
    return Row(2, question, document, variant, kl, 0.5, 3, f1, 0.0, "text", 10, 100, 0.25)


def test_the_summary_is_the_mean_by_hand_and_pairs_with_recall() -> None:
    rows = [
        row(RECALL, "a", "x", f1=0.2, kl=1.0),
        row(RECALL, "b", "y", f1=0.6, kl=3.0),
        row("reused", "b", "y", f1=0.7),
        row("reused", "a", "x", f1=0.5),
    ]
    recall, reused = summarise_compositions(rows)
    assert (recall.size, recall.variant, recall.f1_over_recall) == (2, RECALL, None)
    assert recall.kl.value == pytest.approx(2.0)
    assert recall.kl.standard_error == pytest.approx(1.0)  # sd of 1 and 3 is sqrt 2, over sqrt 2
    assert recall.f1.value == pytest.approx(0.4)
    assert reused.f1_over_recall.value == pytest.approx((0.3 + 0.1) / 2)
    assert reused.f1_over_recall.standard_error == pytest.approx(0.1)
    assert (reused.f1.n_items, reused.ttft_s, reused.prefilled_tokens) == (2, 0.25, 10)


# The command


def call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_the_command_prints_a_table_and_writes_rows_a_header_and_markdown(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    words = ["--model", tmp_path / "model", "--data", data, "--out", tmp_path / "results", "--documents", 2]
    words += ["--questions", 2, "--pool", 2, "--paragraphs", 1, "--max-new-tokens", 2]
    code, printed, said = call(capsys, *words, "--markdown", tmp_path / "table.md")
    assert code == 0, said
    assert "recompute-16" in printed
    table = (tmp_path / "table.md").read_text(encoding="utf-8").splitlines()
    assert table[0] == f"| {' | '.join(HEADINGS)} |"
    assert [line.split(" | ")[1] for line in table[2:]] == list(CompositionOptions(data).chosen_variants)
    header = json.loads((tmp_path / "results" / "header.json").read_text(encoding="utf-8"))
    assert header["model"] == str(tmp_path / "model")
    assert header["environment"]["torch_threads"] > 0
    assert len((tmp_path / "results" / RESULTS_FILE).read_bytes().splitlines()) == 2 * 8


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--data", "nowhere"], "the data folder 'nowhere' does not exist"),
        (["--documents", "1"], "documents is 1; give numbers from 2"),
        (["--documents", "5", "--pool", "4"], "documents is 5; give numbers from 2 to the size of the pool, 4"),
        (["--variants", "best"], "there is no variant 'best'; take of joint, plain, all, recall"),
        (["--temperature", "0"], "temperature is 0.0; give a number above 0"),
        (["--questions", "0"], "questions is 0"),
        (["--documents", "2", "2"], "documents has something twice: 2, 2"),
    ],
    ids=str,
)
def test_wrong_options_are_one_sentence_before_any_model_is_loaded(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: Sequence[str], sentence: str
) -> None:
    code, _, said = call(capsys, "--model", "nothing", "--data", data, "--out", tmp_path / "out", *words)
    assert (code, said.count("\n")) == (2, 1)
    assert said.startswith(f"error: {sentence}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["not JSON", "[]", '{"data": [{}]}', '{"data": 3}'])
def test_a_file_that_is_not_squad_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="not a file in SQuAD format"):
        read_pool(tmp_path, n_documents=2, n_paragraphs=1)


def test_what_the_file_or_the_context_cannot_hold_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_pool(tmp_path, n_documents=2, n_paragraphs=1)
    with pytest.raises(ConfigError, match="has 5 articles of at least 3 paragraphs"):
        read_pool(data, n_documents=6, n_paragraphs=3)
    with pytest.raises(ConfigError, match="ask for fewer"):
        draw_cases(read_pool(data, n_documents=2, n_paragraphs=1), size=2, n_questions=5)
    with pytest.raises(ConfigError, match=r"context is 4,096"):
        measure(options_of(data, max_new_tokens=4000), tmp_path / "results")
    assert not (tmp_path / "results").exists()
