"""Questions made from a document: planted facts never split a sentence, continuations are true, both are repeatable."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.errors import ConfigError
from ragkv.evaluation.data.own_questions import OwnQuestions, make_questions, quotation_questions

NUMBERS = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
PLAIN = [f"Keeper {chr(97 + i // 5)}{chr(97 + i % 5)} wrote {NUMBERS} in the green book." for i in range(25)]
PROSE = "\n\n".join(" ".join(PLAIN[i : i + 5]) for i in range(0, 25, 5))
HAN_STOP = "\u3002"
HAN = "".join(chr(0x4E00 + i) + "\u6d77" * (30 + i) + HAN_STOP for i in range(40))


def without_facts(made: OwnQuestions) -> str:
    text = made.document
    for look_up in made.look_ups:
        text = text.replace(look_up.fact, "\x00")
    return text


def before_and_after(made: OwnQuestions) -> list[tuple[str, str]]:
    return [(made.document[: q.start], made.document[q.start + len(q.fact) :]) for q in made.look_ups]


def test_each_fact_stands_once_where_it_says_and_holds_its_answer():
    made = make_questions(PROSE, n_look_ups=5)
    assert len(made.look_ups) == 5
    for look_up in made.look_ups:
        assert made.document.count(look_up.fact) == 1
        assert made.document[look_up.start :].startswith(look_up.fact)
        assert look_up.fact.endswith(f" is {look_up.answer}.")
        assert len(look_up.answer) == 6
        assert look_up.answer.isdigit()


def test_invented_words_and_codes_are_new_to_the_document_and_different():
    made = make_questions(PROSE, n_look_ups=5)
    names = [look_up.question.removeprefix("What is the archive code of ").rstrip("?") for look_up in made.look_ups]
    words = [word for name in names for word in name.split(" ")]
    assert len(set(words)) == 10
    assert len({look_up.answer for look_up in made.look_ups}) == 5
    for word in (*words, *(look_up.answer for look_up in made.look_ups)):
        assert word.casefold() not in PROSE.casefold()


def test_words_that_the_document_holds_are_drawn_again():
    first = make_questions(PROSE, n_look_ups=1).look_ups[0]
    word = first.question.split(" ")[-2]
    again = make_questions(f"{PROSE} {word.lower()} {first.answer}", n_look_ups=1).look_ups[0]
    assert word not in again.fact
    assert first.answer != again.answer


def test_the_same_seed_makes_the_same_questions_and_another_seed_others():
    assert make_questions(PROSE, seed=3) == make_questions(PROSE, seed=3)
    assert make_questions(PROSE, seed=3).look_ups != make_questions(PROSE, seed=4).look_ups


def test_facts_stand_at_even_distances():
    made = make_questions(PROSE, n_look_ups=5)
    places = [look_up.start / len(made.document) for look_up in made.look_ups]
    assert places == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9], abs=0.05)


def test_no_sentence_is_split():
    made = make_questions(PROSE, n_look_ups=6)
    assert all(sentence in made.document for sentence in PLAIN)
    for before, after in before_and_after(made):
        assert before.rstrip().endswith(".")
        assert after.lstrip().startswith("Keeper") or not after


@pytest.mark.parametrize(
    "sentence",
    [
        "Then Mr. Weber met Dr. J. Ito of the U.S. Navy in St. Ives at noon.",
        "The cranes, e.g. Okafor's, cost 12.5 pounds each.",
        '"Come here!" Agnes said to the keeper.',
        "She waited ... Nobody came to the harbour.",
        "1. The first item of the list is a ferry.",
        "Is it so? said nobody but the ferryman.",
        "The book (see Fig. 3) is kept\nin the museum.",
        "\u4ed6\u8bf4\u201c\u597d\u3002\u201d\u5c31\u8d70\u4e86\u3002",
    ],
)
def test_full_stops_inside_a_sentence_are_no_place_for_a_fact(sentence: str):
    document = " ".join([sentence] * 60)
    made = make_questions(document, n_look_ups=8)
    assert len(made.look_ups) >= 1
    assert made.document.count(sentence) == 60


def test_a_fact_between_paragraphs_is_a_paragraph_of_its_own():
    document = "\n\n".join("word " * 40 + "end." for _ in range(10))
    for before, after in before_and_after(make_questions(document, n_look_ups=4)):
        assert before.endswith("end.\n\n")
        assert after.startswith("\n\nword")


def test_chinese_facts_stand_after_a_full_stop_with_no_space():
    made = make_questions(HAN, n_look_ups=4)
    assert len(made.look_ups) == 4
    assert all(before.endswith(HAN_STOP) and not after.startswith(" ") for before, after in before_and_after(made))
    assert without_facts(made).replace("\x00", "") == HAN


def test_chinese_continuations_are_asked_by_characters():
    made = make_questions(HAN, n_continuations=3)
    first = made.continuations[0]
    opening = first.question.split('"')[1]
    assert len(opening) == 12
    assert made.document[first.start :].startswith(opening + first.answer)


@pytest.mark.parametrize(
    ("document", "gap"), [("value = 1\n" * 200, "\n"), ("word " * 400, " "), ("key: 1\n  sub: 2\n" * 100, "\n")]
)
def test_text_without_sentences_gets_facts_between_lines_or_words(document: str, gap: str):
    made = make_questions(document, n_look_ups=4)
    assert len(made.look_ups) >= 3
    for before, after in before_and_after(made):
        assert before[-1].isspace()
        assert before.rstrip(" ").endswith(gap) or gap == " "
        assert after[0].isspace()


@pytest.mark.parametrize("document", ["a", "One sentence.", "\u6d77", "x" * 1000, "  lone  \n"])
def test_a_very_short_document_gets_one_fact_and_no_continuation(document: str):
    made = make_questions(document)
    assert (len(made.look_ups), len(made.continuations)) == (1, 0)
    assert made.document.startswith(document.rstrip())


@pytest.mark.parametrize("document", ["", " \n\t "])
def test_an_empty_document_is_refused(document: str):
    with pytest.raises(ConfigError, match="empty"):
        make_questions(document)


def test_a_negative_number_is_refused():
    with pytest.raises(ConfigError, match="-1 look-ups"):
        make_questions(PROSE, n_look_ups=-1)


def test_none_of_a_kind_may_be_asked_for():
    made = make_questions(PROSE, n_continuations=0, n_look_ups=0)
    assert (made.document, made.continuations, made.look_ups) == (PROSE, (), ())


def test_a_continuation_is_the_rest_of_the_sentence_that_stands_there():
    made = make_questions(PROSE, n_continuations=4)
    assert len(made.continuations) == 4
    for asked in made.continuations:
        opening = asked.question.split('"')[1]
        assert f"{opening} {asked.answer}" in PLAIN
        assert made.document[asked.start :].startswith(f"{opening} {asked.answer}")


def test_continuations_are_the_quotation_questions_of_the_benchmark():
    asked = tuple(question.question for question in make_questions(PROSE, n_continuations=6).continuations)
    assert asked == quotation_questions(PROSE, 6)


def test_an_opening_that_stands_twice_is_not_asked():
    made = make_questions(f"{PLAIN[0]} {PLAIN[1]} {PLAIN[0]}")
    assert [question.question.split('"')[1][:9] for question in made.continuations] == ["Keeper ab"]


@given(st.text(alphabet="aB1.!?\u3002\u6d77 \n\"'", min_size=1, max_size=1500), st.integers(0, 6))
def test_taking_the_facts_out_leaves_the_text_of_the_document(document: str, wanted: int):
    if not document.strip():
        return
    made = make_questions(document, n_look_ups=wanted)
    assert "".join(without_facts(made).replace("\x00", "").split()) == "".join(document.split())
    assert all(made.document[q.start : q.start + len(q.fact)] == q.fact for q in made.look_ups)
