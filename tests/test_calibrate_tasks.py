"""What calibration asks: archives by their tokens, files of questions, and questions of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ragkv import PromptLayout
from ragkv.errors import ArchiveCorruptError, ConfigError, ModelMismatchError
from ragkv.evaluation.calibrate.tasks import archived_tokens, find_sources, make_tasks, plan_questions, read_asked
from ragkv.model.prompt import tokenize_prompt
from tests.archives import DOCUMENT, archive_of, loaded

LAYOUT = PromptLayout.plain()


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Archives of one model, and one of another."""
    folder = tmp_path_factory.mktemp("shelf")
    archive_of(folder / "harbour")
    archive_of(folder / "ferry", document=DOCUMENT[:900])
    archive_of(folder / "other", model="qwen2", document=DOCUMENT[:900])
    return folder


def test_archived_tokens_are_those_that_were_prefilled(shelf: Path):
    (source,) = find_sources([shelf / "harbour"])
    assert archived_tokens(source) == tokenize_prompt(loaded("llama").tokenizer, LAYOUT, DOCUMENT)


def test_altered_tokens_are_refused(tmp_path: Path):
    archive_of(tmp_path / "ferry", document=DOCUMENT[:900])
    (source,) = find_sources([tmp_path / "ferry"])
    path = tmp_path / "ferry" / "tokens.parquet"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(ArchiveCorruptError, match="SHA-256"):
        archived_tokens(source)


def test_archives_of_different_models_are_refused_by_both_names(shelf: Path):
    with pytest.raises(ModelMismatchError, match=r"'ferry' and 'other'.*tiny-llama.*tiny-qwen2"):
        find_sources([shelf / "ferry", shelf / "other"])


def test_an_archive_given_twice_is_refused(shelf: Path):
    with pytest.raises(ConfigError, match="twice"):
        find_sources([shelf / "ferry", shelf / "." / "ferry"])


def test_questions_of_a_file_go_to_the_archive_they_name(shelf: Path, tmp_path: Path):
    lines = [{"question": "Who?", "answers": ["Agnes Moore"], "document": "ferry"}, {"question": "When?"}]
    path = tmp_path / "asked.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    sources = find_sources([shelf / "harbour", shelf / "ferry"])
    plan = plan_questions(sources, read_asked(path))
    assert [item.question for item in plan.items["harbour"]] == ["When?"]
    assert [item.question for item in plan.items["ferry"]] == ["Who?", "When?"]
    assert plan.metric == "squad"


@pytest.mark.parametrize(
    ("answers", "task_name", "metric"),
    [
        (["two"], "auto", "contains"),
        (["two cranes"], "auto", "squad"),
        (["two"], "qa", "squad"),
        (["two cranes"], "lookup", "contains"),
        (["\u6d77\u6e2f"], "auto", "squad_zh"),
        ([], "auto", None),
    ],
)
def test_the_metric_follows_task_and_answers(
    shelf: Path, tmp_path: Path, answers: list[str], task_name: str, metric: str | None
):
    path = tmp_path / "asked.jsonl"
    path.write_text((json.dumps({"question": "How many?", "answers": answers}) + "\n") * 2)
    assert plan_questions(find_sources([shelf / "ferry"]), read_asked(path), task=task_name).metric == metric


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("\n \n", "holds no questions"),
        ('{"question": "a"}\n{"question"\n', "line 2: not valid JSON"),
        ('{"question": "a"}\n\n{"query": "b"}\n', "line 3: 'query' is not known"),
        ('{"question": " "}', "line 1: question is ' '"),
        ('{"question": "a", "answers": "b"}', "line 1: answers is 'b'"),
        ('{"question": "a", "document": 3}', "line 1: document is 3"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, words: str):
    (tmp_path / "asked").write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_asked(tmp_path / "asked")


def test_gold_answers_that_the_task_needs_must_be_there(shelf: Path, tmp_path: Path):
    sources = find_sources([shelf / "ferry"])
    (tmp_path / "asked").write_text("Who?\nWhen?\n")
    with pytest.raises(ConfigError, match="task qa needs gold answers"):
        plan_questions(sources, read_asked(tmp_path / "asked"), task="qa")
    with pytest.raises(ConfigError, match="--questions"):
        plan_questions(sources, None, task="qa")


def test_a_question_about_an_archive_that_is_not_given_is_refused(shelf: Path, tmp_path: Path):
    (tmp_path / "asked").write_text('{"question": "a"}\n{"question": "b", "document": "harbor"}\n')
    with pytest.raises(ConfigError, match=r"line 2 .*'harbor'"):
        plan_questions(find_sources([shelf / "harbour"]), read_asked(tmp_path / "asked"))


def test_fewer_questions_are_taken_at_even_distances(shelf: Path, tmp_path: Path):
    (tmp_path / "asked").write_text("\n".join(f"Question {number}?" for number in range(9)))
    plan = plan_questions(find_sources([shelf / "ferry"]), read_asked(tmp_path / "asked"), n_questions=3)
    assert [item.question for item in plan.items["ferry"]] == ["Question 0?", "Question 3?", "Question 6?"]


def test_own_questions_plant_facts_that_stand_in_the_prefilled_document(shelf: Path):
    sources = find_sources([shelf / "harbour"])
    (made,) = make_tasks(loaded("llama"), sources, plan_questions(sources, None, n_questions=4))
    assert made.tokens is not None
    assert made.questions is not None
    text = loaded("llama").tokenizer.decode(made.tokens.document_ids)
    golden = [item.answers[0] for item in made.questions.items if item.answers]
    assert len(golden) == 2
    assert all(code in text and code not in DOCUMENT for code in golden)
    assert made.questions.metric == "contains"
