"""Suites from forged files of the same shape: what a document says, what is asked of it, and what is refused."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest

from ragkv.errors import ConfigError
from ragkv.evaluation.data.babi import BABI_INTRODUCTION, Place, parse_stories, simulate, weave
from ragkv.evaluation.data.squality import key_entities
from ragkv.evaluation.data.suite import Suite
from ragkv.evaluation.data.suites import SUITES, load_suite
from ragkv.evaluation.metrics import METRICS

QA1 = """1 Mary moved to the bathroom.
2 John went to the hallway.
3 Where is Mary? |bathroom|1
4 Mary travelled to the office.
5 Where is John? |hallway|2
"""
QA2 = """1 Mary got the milk there.
2 John moved to the bedroom.
3 Mary travelled to the hallway.
4 Where is the milk? \thallway\t1 3
5 John picked up the football there.
6 John went back to the office.
7 John put down the football there.
8 John journeyed to the garden.
9 Where is the football? \toffice\t7 6
1 Sandra grabbed the apple.
2 Sandra went to the kitchen.
3 Where is the apple? \tkitchen\t1 2
"""
PLOT = ["The crew of Strike flies to Venus.", "At last Strike lands on Venus, says Captain Cob."]


def squad(n_paragraphs: int, answer: str) -> str:
    """Paragraph i has i % 3 + 1 questions; the answer to each is `answer` and the number of the paragraph."""
    paragraphs = []
    for index in range(n_paragraphs):
        text = f"Here is {answer}{index:02d} in a paragraph of its own."
        asked = [
            {
                "question": f"What {turn} is in {index}?",
                "answers": [{"text": f"{answer}{index:02d}", "answer_start": 8}],
            }
            for turn in range(index % 3 + 1)
        ]
        paragraphs.append({"context": text, "qas": asked})
    return json.dumps({"data": [{"paragraphs": paragraphs[::2]}, {"paragraphs": paragraphs[1::2]}]})


def kv_record(index: int) -> str:
    pairs = [[str(uuid.UUID(int=index * 1000 + n)), str(uuid.UUID(int=10**9 + index * 1000 + n))] for n in range(75)]
    return json.dumps({"ordered_kv_records": pairs, "key": pairs[40][0], "value": pairs[40][1]})


def squality_record(index: int) -> str:
    paragraphs = [f"Paragraph {n} of story {index}: Strike looked\n at Venus again." for n in range(30)]
    document = "\n \n ".join(["A TITLE", "Here Mary bought milk.", *paragraphs])
    responses = [{"response_text": text} for text in PLOT]
    return json.dumps({"document": document, "questions": [{"question_text": "Plot?", "responses": responses}]})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {
        "xquad.en.json": squad(40, "thing"),
        "xquad.zh.json": squad(40, "东西"),
        "kv75_100.jsonl": "\n".join(kv_record(index) for index in range(4)) + "\n",
        "babi_qa1.txt": QA1,
        "babi_qa2.txt": QA2,
        "squality_dev10.jsonl": "\n".join(squality_record(index) for index in range(2)),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def load(name: str, folder: Path, length: int = 0, *, documents: int = 1, items: int = 1, seed: int = 0) -> Suite:
    usual = 7000 if name == "kv75" else 700
    return load_suite(
        name, folder, n_documents=documents, items_per_document=items, document_length=length or usual, seed=seed
    )


@pytest.mark.parametrize("name", SUITES)
def test_documents_keep_to_the_length_and_spans_hold_the_answers(name: str, folder: Path) -> None:
    suite = load(name, folder)
    assert suite.metric in METRICS
    for document in suite.documents:
        assert len(document.text) <= (7000 if name == "kv75" else 700)
        assert document.items
        for item in document.items:
            assert all(document.text[start:end] in item.answers for start, end in item.spans)
            assert all(answer in document.text for answer in item.answers)


@pytest.mark.parametrize("name", SUITES)
def test_the_same_arguments_give_the_same_suite(name: str, folder: Path) -> None:
    assert load(name, folder, seed=3) == load(name, folder, seed=3)


def test_another_seed_asks_something_else(folder: Path) -> None:
    assert load("xquad-en", folder, items=9) != load("xquad-en", folder, items=9, seed=1)


def test_length_is_in_the_unit_of_the_counter(folder: Path) -> None:
    suite = load_suite(
        "xquad-en",
        folder,
        n_documents=1,
        items_per_document=1,
        document_length=40,
        count_tokens=lambda text: len(text.split()),
    )
    assert len(suite.documents[0].text.split()) == 36  # paragraphs of nine words; a fifth one would make 45


def test_xquad_documents_share_no_paragraph_and_are_full(folder: Path) -> None:
    documents = load("xquad-en", folder, 350, documents=5).documents
    paragraphs = [paragraph for document in documents for paragraph in document.text.split("\n\n")]
    assert len(set(paragraphs)) == len(paragraphs) == 5 * 8  # 42 characters and a blank line each: eight make 350


def test_what_is_left_of_xquad_is_no_document_if_it_is_short(folder: Path) -> None:
    load("xquad-en", folder, 526, documents=3)  # twelve paragraphs in each, four are left
    with pytest.raises(ConfigError, match="has 3 documents of length 526"):
        load("xquad-en", folder, 526, documents=4)


def test_xquad_questions_are_spread_over_the_paragraphs(folder: Path) -> None:
    document = load("xquad-en", folder, 526, items=4).documents[0]
    starts = [item.spans[0][0] for item in document.items]
    assert [start // 44 for start in starts] == [1, 4, 7, 10]  # of twelve paragraphs, none next to another


def test_every_paragraph_is_asked_once_before_any_is_asked_twice(folder: Path) -> None:
    document = load("xquad-en", folder, 350, items=8).documents[0]
    assert len({item.answers for item in document.items}) == 8


def test_kv75_asks_the_records_own_key_first_and_others_all_over_the_text(folder: Path) -> None:
    document = load("kv75", folder, items=4).documents[0]
    lines = document.text.splitlines()
    asked = [next(n for n, line in enumerate(lines) if item.answers[0] in line) for item in document.items]
    assert asked == [41, 13, 38, 63]  # line 1 has key 0; the others are at a sixth, a half and five sixths
    assert json.loads(document.text.split("\n", 1)[1])[document.items[0].question.split('"')[1]] == lines[41][42:78]


def test_simulated_things_follow_their_holder_and_stay_where_they_are_put() -> None:
    facts = ["John got the milk.", "John went to the hall.", "John left the milk there.", "John moved to the attic."]
    assert simulate(facts[:1]).find("milk") is None
    assert simulate(facts[:2]).find("milk") == Place("hall", 1)
    assert simulate(facts).things == {"milk": Place("hall", 1)}
    assert simulate(facts).people == {"John": Place("attic", 3)}


def test_the_simulator_gives_every_answer_of_the_file() -> None:
    stories = parse_stories(QA1) + parse_stories(QA2)
    asked = [(story, one) for story in stories for one in story.asked]
    found = [simulate(story.facts[: one.n_facts]).find(one.subject) for story, one in asked]
    assert [place and place.name for place in found] == [one.answer for _, one in asked]
    assert len(found) == 5


def test_babi_asks_what_is_true_at_the_end_the_files_last_question_first(folder: Path) -> None:
    asked = load("babi-qa1", folder, items=2).documents[0].items
    assert [(item.question, item.answers) for item in asked] == [
        ("Where is John?", ("hallway",)),
        ("Where is Mary?", ("office",)),  # the file's own mid-story answer, bathroom, is no longer true
    ]
    asked = load("babi-qa2", folder, items=2).documents[0].items
    assert [(item.question, item.answers) for item in asked] == [
        ("Where is the football?", ("office",)),
        ("Where is the milk?", ("hallway",)),
    ]


def test_babi_facts_stand_in_order_in_a_story_that_names_nobody_of_them(folder: Path) -> None:
    text = load("babi-qa2", folder, 1500, items=2).documents[0].text
    facts = [line.split(" ", 1)[1] for line in QA2.splitlines()[:8] if "?" not in line]
    places = [text.index(fact) for fact in facts]
    assert places == sorted(places)
    assert text.startswith(BABI_INTRODUCTION)
    assert "A TITLE" not in text
    assert "bought milk" not in text
    assert "Sandra" not in text  # the other story's


def test_facts_are_woven_in_at_even_distances() -> None:
    text, starts = weave("Intro.", ["A.", "B.", "C.", "D."], ["One.", "Two."])
    assert text == "Intro.\n\nA.\n\nB. One.\n\nC.\n\nD. Two."
    assert [text[start : start + 4] for start in starts] == ["One.", "Two."]


def test_more_facts_than_paragraphs_keep_their_order() -> None:
    assert weave("I.", ["A.", "B."], ["1.", "2.", "3."])[0] == "I.\n\nA. 1.\n\nB. 2. 3."


def test_a_story_too_short_is_continued_by_the_next(folder: Path) -> None:
    text = load("babi-qa1", folder, 2500).documents[0].text
    assert "story 0" in text
    assert "story 1" in text


def test_key_entities_are_names_of_two_summaries_that_stand_in_the_text() -> None:
    text = "Strike will strike Venus. Strike and the captain went on. Captain!"
    summaries = [*PLOT, "It is said that Captain Cob met Nobody.", "The ship of Nobody lands."]
    assert key_entities(summaries, text) == ("Strike", "Venus")


def test_squality_asks_one_summary_a_document(folder: Path) -> None:
    document = load("squality-entities", folder, items=5).documents[0]
    assert [item.answers for item in document.items] == [("Strike", "Venus")]
    assert "Strike looked at Venus" in document.text  # line breaks within a paragraph are spaces


def test_an_unknown_suite_is_told_the_known_ones(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no suite 'squad'; take one of xquad-en, xquad-zh, kv75"):
        load("squad", folder)


@pytest.mark.parametrize("name", SUITES)
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"suite '{name}' needs .*\.(json|jsonl|txt)'.* no such file"):
        load(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "file", "text"),
    [
        ("xquad-en", "xquad.en.json", "[]"),
        ("xquad-en", "xquad.en.json", "{"),
        ("xquad-en", "xquad.en.json", squad(3, "thing").replace('"answer_start": 8', '"answer_start": 9')),
        ("kv75", "kv75_100.jsonl", '{"key": "a"}'),
        ("kv75", "kv75_100.jsonl", '{"ordered_kv_records": [["a", "b"]], "key": "a", "value": "c"}'),
        ("babi-qa1", "babi_qa1.txt", "Mary went home."),
        ("babi-qa1", "babi_qa1.txt", "1 Mary went home.\n2 Where is Mary?\thome\t1"),
        ("babi-qa1", "babi_qa1.txt", QA1.replace("|bathroom|", "|garden|")),
        ("squality-entities", "squality_dev10.jsonl", ""),
        ("squality-entities", "squality_dev10.jsonl", '{"document": "A.", "questions": []}'),
    ],
)
def test_a_file_of_another_shape_is_named_with_what_is_expected(name: str, file: str, text: str, folder: Path) -> None:
    (folder / file).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"{file}' is not (a file in|numbered|key-value|SQuALITY)"):
        load(name, folder)


@pytest.mark.parametrize("name", SUITES)
def test_a_length_that_holds_nothing_is_refused(name: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"ask for (longer|more)"):
        load(name, folder, 5)


@pytest.mark.parametrize("name", SUITES)
def test_more_documents_than_there_are_is_refused(name: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match="99 are asked for"):
        load(name, folder, documents=99)


@pytest.mark.parametrize("name", [name for name in SUITES if name != "squality-entities"])
def test_more_questions_than_there_are_is_refused(name: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match="asked for"):
        load(name, folder, items=200)


def test_counts_below_one_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="n_documents is 0; give at least 1"):
        load("kv75", folder, documents=0)
