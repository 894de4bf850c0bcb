"""Passages are readable and honest about their weight; the page shows them and keeps every text a text."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.answer.page import AnswerPage, render_answer
from ragkv.answer.passages import DocumentEvidence, Passage, Span, merge_passages
from ragkv.errors import ConfigError
from ragkv.page import write_page
from ragkv.recall.trace import LayerMeans
from tests.answer_sample import QUESTION, sample_page, token_spans

EVIL = (
    "<script>alert(1)</script> \" ' & </details></mark> \x00\x1b \udc80 "
    "\u05e9\u05dc\u05d5\u05dd \u202e \U0001f469\u200d\U0001f4bb onload="
)


class Page(HTMLParser):
    """Tags with their attributes in order, and the text of the page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def weighted(text: str, **weights: float) -> tuple[Span, ...]:
    """A span per word with its leading space, and one per punctuation mark; `weights` name the words that have any."""
    return tuple((start, end, weights.get(text[start:end].strip(), 0.0)) for start, end in token_spans(text))


def texts(passages: tuple[Passage, ...]) -> list[str]:
    return [passage.text for passage in passages]


def page_of(text: str, *, weight: float = 1.0) -> AnswerPage:
    spans = tuple((start, end, weight / len(token_spans(text))) for start, end in token_spans(text))
    document = DocumentEvidence(text, text, weight, spans, merge_passages(text, spans))
    return AnswerPage(text, text, text, (document,), ((text, text),), (LayerMeans(0, 3.0, 0.5),), text)


# Passages


def test_no_spans_and_no_weight_give_no_passage():
    assert merge_passages("Some words.", ()) == ()
    assert merge_passages("Some words.", weighted("Some words.")) == ()
    assert merge_passages("", ((0, 0, 1.0),)) == ()


def test_a_passage_is_the_sentence_that_holds_the_weight():
    text = "The cat slept. The dog barked at noon! The fish swam."
    (passage,) = merge_passages(text, weighted(text, dog=0.5), target_chars=30)
    assert passage == Passage(15, 38, 0.5, "The dog barked at noon!")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("It fell. It rose by 3.5 points. It fell.", "It rose by 3.5 points."),
        ("It fell. We met J. Rose there. It fell.", "We met J. Rose there."),
        ("It fell. Then Dr. Smith rose again. It fell.", "Then Dr. Smith rose again."),
        ("It fell.\n2. It rose high.\nIt fell.", "2. It rose high."),
        ('It fell. "Who rose?" he asked. It fell.', '"Who rose?" he asked.'),
        ("A list:\nrose\nlily", "rose"),
        (
            "\u5929\u6c14\u597d\u3002\u6211\u4eec rose \u516c\u56ed\uff01\u597d\u3002",
            "\u6211\u4eec rose \u516c\u56ed\uff01",
        ),
        ("It fell\u061f It rose\u061f It fell.", "It rose\u061f"),
    ],
)
def test_sentences_end_where_a_reader_would_end_them(text: str, sentence: str):
    spans = weighted(text, rose=1.0, Rose=1.0)
    assert texts(merge_passages(text, spans, n_passages=1, target_chars=len(sentence))) == [sentence]


def test_a_line_that_an_editor_wrapped_is_one_sentence():
    text = "Old text.\nThe harbour master wrote it down in the book\nthat lies on the desk of the office.\nMore text."
    (passage,) = merge_passages(text, weighted(text, desk=1.0), target_chars=100)
    assert passage.text == "The harbour master wrote it down in the book\nthat lies on the desk of the office."


def test_neighbours_join_where_both_carry_weight_and_fit():
    text = "One stone. Two stars. Six birds. Ten boats."
    spans = weighted(text, stars=0.4, birds=0.3)
    assert texts(merge_passages(text, spans, target_chars=24)) == ["Two stars. Six birds."]
    assert texts(merge_passages(text, spans, target_chars=12)) == ["Two stars.", "Six birds."]


def test_a_neighbour_with_little_weight_stays_out():
    text = "One stone. Two stars. Six birds."
    best, second = merge_passages(text, weighted(text, stars=0.5, birds=0.05))
    assert (best.text, best.weight) == ("Two stars.", 0.5)
    assert second.text == "Six birds."


def test_a_long_passage_does_not_win_by_length_alone():
    long = " ".join(["word"] * 36) + "."  # 180 characters, each word 0.01
    text = f"Short and dense. {long}"
    spans = weighted(text, dense=0.3, word=0.01)
    assert texts(merge_passages(text, spans, n_passages=1, target_chars=100)) == ["Short and dense."]


def test_marks_and_line_breaks_do_not_choose_a_passage_but_count_in_its_weight():
    text = "Nothing here.\nThe pump failed.\nNothing there."
    spans = [
        (s, e, 0.4 if text[s:e] in ".\n" else 0.1 if text[s:e].strip() == "pump" else 0.0) for s, e in token_spans(text)
    ]
    (passage,) = merge_passages(text, spans)
    assert passage.text == "The pump failed."
    assert passage.weight == pytest.approx(0.5)


def test_marks_choose_when_nothing_else_has_weight():
    text = "Nothing here. Wow!"
    assert texts(merge_passages(text, ((17, 18, 1.0),))) == ["Wow!"]


def test_best_comes_first_and_ties_go_by_position():
    text = "Red one.\n" + "x " * 150 + "\nBlue one.\n" + "x " * 150 + "\nGrey one."
    spans = weighted(text, Red=0.2, Blue=0.6, Grey=0.2)
    assert texts(merge_passages(text, spans)) == ["Blue one.", "Red one.", "Grey one."]


def test_text_without_punctuation_is_cut_between_words():
    text = " ".join(f"word{index}" for index in range(400))
    (passage,) = merge_passages(text, ((900, 907, 1.0),), n_passages=1, target_chars=80)
    assert len(passage.text) <= 100
    assert passage.start <= 900 < passage.end
    assert set(passage.text.split()) <= set(text.split())


def test_text_without_spaces_is_cut_between_tokens():
    text = "\u6f22" * 900
    spans = tuple((start, start + 3, 1.0 if start == 450 else 0.0) for start in range(0, 900, 3))
    (passage,) = merge_passages(text, spans, target_chars=80)
    assert passage.start % 3 == 0
    assert passage.end % 3 == 0
    assert passage.start <= 450 < passage.end <= passage.start + 100


@given(
    st.text(alphabet="ab .!?\n\u3002\u05d0\U0001f600", max_size=120),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.floats(0, 1)), max_size=60),
    st.integers(1, 4),
    st.integers(1, 30),
)
def test_passages_lie_in_the_text_apart_and_never_exceed_the_weight(text, steps, n_passages, target):
    spans, place = [], 0
    for gap, length, weight in steps:
        place = min(place + gap, len(text))
        spans.append((place, min(place + length, len(text)), weight))
        place = spans[-1][1]
    found = merge_passages(text, spans, n_passages=n_passages, target_chars=target)
    assert found == merge_passages(text, spans, n_passages=n_passages, target_chars=target)
    assert len(found) <= n_passages
    assert sum(passage.weight for passage in found) <= sum(weight for _, _, weight in spans) + 1e-9
    assert [passage.weight for passage in found] == sorted((passage.weight for passage in found), reverse=True)
    in_order = sorted(found, key=lambda passage: passage.start)
    assert all(one.end <= two.start for one, two in pairwise(in_order))
    for passage in found:
        assert passage.text == text[passage.start : passage.end] == passage.text.strip()
        assert 0 < len(passage.text) <= 2 * target


def test_twenty_thousand_tokens_take_a_moment():
    text = "The gauge was read twice a day by hand. " * 2000
    spans = [(start, end, 1e-5 * (1 + start % 97)) for start, end in token_spans(text)][:20_000]
    assert len(spans) == 20_000
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        merge_passages(text, spans)
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.2


# Page


def test_the_page_is_whole_and_in_order():
    html = render_answer(sample_page())
    page = Page(html)
    assert page.open == []
    assert page.all("html") == [{"lang": "en"}]
    assert page.all("title")
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {str(link["href"])[1:] for link in page.all("a")} <= set(ids)
    assert html == render_answer(sample_page())


def test_the_page_needs_nothing_but_itself():
    html = render_answer(sample_page())
    page = Page(html)
    assert not {"script", "link", "img", "iframe", "base", "object"} & {tag for tag, _ in page.tags}
    assert all(str(link["href"]).startswith("#") for link in page.all("a"))
    assert "url(" not in html
    assert "@import" not in html
    assert "http://" not in html
    assert "https://" not in html


def test_the_page_says_what_was_measured():
    sample = sample_page()
    page = Page(render_answer(sample))
    for text in (sample.question, sample.answer, sample.model, sample.created_by, *sum(sample.figures, ())):
        assert text in page.text
    for document in sample.documents:
        assert document.name in page.text
        assert f"{len(document.text):,} characters" in page.text
    best = max((passage for document in sample.documents for passage in document.passages), key=lambda p: p.weight)
    assert f"{best.weight:.0%} of the attention" in page.text
    last = sample.layers[-1]
    assert f"27{last.recalled_tokens:,.0f}{last.unrecalled_mass:.1%}" in page.text


def test_ranks_run_over_all_documents_and_every_shaded_stretch_carries_one():
    page = Page(render_answer(sample_page()))
    ranks = sorted(str(part["id"]) for part in page.all("section") if part.get("class") == "passage")
    assert ranks == [f"p{rank}" for rank in range(1, len(ranks) + 1)]
    marked = [str(mark["id"]) for mark in page.all("mark") if "id" in mark]
    assert sorted(marked) == [f"t{rank[1:]}" for rank in ranks]
    assert {mark["class"] for mark in page.all("mark")} == {"one", "two", "three"}


def test_whole_texts_are_whole():
    for document in sample_page().documents:
        html = render_answer(replace(sample_page(), documents=(document,)))
        shown = Page(html[html.index("<details>") : html.index("</details>")] + "</details>").text
        assert re.sub(r"\d", "", document.text) in re.sub(r"\d", "", shown)


def test_words_are_underlined_whole():
    text = "The impeller broke."
    document = DocumentEvidence("d", text, 1.0, ((4, 7, 0.0), (7, 12, 1.0)), (Passage(0, 19, 1.0, text),))
    assert '<u class="three">impeller</u>' in render_answer(replace(sample_page(), documents=(document,)))


def test_no_text_becomes_markup_or_stops_the_file(tmp_path: Path):
    clean, evil = Page(render_answer(page_of("plain words"))), Page(render_answer(page_of(EVIL)))
    strange = {tag for tag, _ in evil.tags} - {tag for tag, _ in clean.tags}
    assert strange <= {"u"}
    assert evil.open == []
    assert not {name for _, attributes in evil.tags for name in attributes} & {"onload", "onclick", "src"}
    write_page(render_answer(page_of(EVIL)), tmp_path / "evil.html")
    written = (tmp_path / "evil.html").read_text(encoding="utf-8")
    assert "\x00" not in written
    assert "\U0001f469\u200d\U0001f4bb" in written


def test_half_a_surrogate_pair_never_stops_the_file(tmp_path: Path):
    write_page("half \ud800 a pair", tmp_path / "half.html")
    assert (tmp_path / "half.html").read_text(encoding="utf-8") == "half ? a pair"


def test_a_file_that_cannot_be_written_is_a_clear_error(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"report '.*' cannot be written"):
        write_page("", tmp_path / "missing" / "page.html")


def test_without_documents_the_page_says_so():
    page = Page(render_answer(replace(sample_page(), documents=())))
    assert "There were no documents" in page.text
    assert page.all("mark") == []
    assert {"class": "skip", "href": "#answer"} in page.all("a")


def test_documents_without_attention_are_listed_and_said_to_have_none():
    page = Page(render_answer(page_of("Some words.", weight=0.0)))
    assert "None of the documents received recalled attention" in page.text
    assert "Whole text (11 characters)" in page.text
    mixed = replace(
        sample_page(), documents=(*sample_page().documents, DocumentEvidence("x", "Some words.", 0.0, (), ()))
    )
    assert "This document received no recalled attention." in Page(render_answer(mixed)).text


def test_a_document_shows_its_best_passage_however_faint():
    faint = DocumentEvidence("faint", "Soft.", 0.001, ((0, 4, 0.001),), (Passage(0, 5, 0.001, "Soft."),))
    page = Page(render_answer(replace(sample_page(), documents=(*sample_page().documents, faint))))
    assert "0.1% of the attention" in page.text
    assert "Soft." in page.text.split("Whole text (5 characters)")[0]


def test_later_passages_far_below_the_best_are_left_out():
    text = "Loud words. Faint words."
    passages = (Passage(0, 11, 0.9, text[:11]), Passage(12, 24, 0.04, text[12:]))
    document = DocumentEvidence("d", text, 0.94, ((0, 4, 0.9), (12, 17, 0.04)), passages)
    page = Page(render_answer(replace(sample_page(), documents=(document,))))
    assert [mark.get("id") for mark in page.all("mark")] == [None, "t1"]


def test_empty_texts_and_numbers_that_are_none_do_not_stop_the_page():
    bare = DocumentEvidence("", "", 0.0, (), ())
    rows = (LayerMeans(3, float("nan"), float("nan")), LayerMeans(4, 0.0, 0.0))
    page = Page(render_answer(AnswerPage("", " \n", "", (bare,), (), rows, "")))
    assert "The model gave no answer." in page.text
    assert "This document is empty." in page.text
    assert "nan" not in page.text.lower()


def test_without_layers_nothing_is_said_of_them():
    page = Page(render_answer(replace(sample_page(), layers=())))
    assert "Recall by layer" not in page.text
    assert QUESTION in page.text
