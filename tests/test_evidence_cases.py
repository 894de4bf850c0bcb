"""Evidence over hard texts, every architecture and odd compositions; what cannot be counted is refused."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest

from ragkv import ArchiveCache
from ragkv.answer.ask import ask
from ragkv.answer.evidence import AttentionMass
from ragkv.answer.page import AnswerPage, render_answer
from ragkv.answer.passages import DocumentEvidence, Passage, merge_passages
from ragkv.errors import ConfigError
from ragkv.recall.composition import Composition
from ragkv.recall.prefilled import prefill_document
from ragkv.recall.recompute import recompute
from ragkv.recipe import RecallPolicy
from tests.archives import DOCUMENT, EVERYTHING, QUESTIONS, SMALL, archive_of
from tests.tiny import TINY_MODELS

FAMILY = "\N{MAN}\N{ZERO WIDTH JOINER}\N{WOMAN}\N{ZERO WIDTH JOINER}\N{GIRL}"
FACES = f"The crew \N{GRINNING FACE} sang {FAMILY} songs of \u043c\u043e\u0440\u0435 and \u6d77. " * 8
HARD_TEXTS = {
    "characters of several tokens": FACES,
    "line breaks of Windows": "A line.\r\nAnother line.\r\n" * 20,
    "null characters": "A \x00 null. " * 20,
    "accents by themselves": "A cafe\u0301 in the harbour. " * 15,
    "right to left": "\u202e\u05e9\u05dc\u05d5\u05dd. The ship left. " * 12,
    "special tokens": "<|eos|> and <|bos|> are words here. " * 10,
    "white space": "\n \t\n" * 40,
    "markup": "</script></style></title><style>*{display:none}</style><!-- " * 6,
    "one character": "x",
}


def check(documents: tuple[DocumentEvidence, ...]) -> None:
    """What holds for evidence, whatever it is about."""
    for document in documents:
        starts = [start for start, _, _ in document.spans]
        assert starts == sorted(starts)
        assert all(0 <= start <= end <= len(document.text) and weight >= 0 for start, end, weight in document.spans)
        covered = {place for start, end, _ in document.spans for place in range(start, end)}
        assert covered == set(range(len(document.text)))
        assert sum(weight for _, _, weight in document.spans) == pytest.approx(document.share)
        for passage in document.passages:
            assert passage.text == document.text[passage.start : passage.end]
            assert 0 < passage.weight <= document.share * (1 + 1e-9)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_evidence_of_a_mixed_composition_is_whole_on_every_architecture(name: str, tmp_path: Path) -> None:
    """Of archives, the same one twice and a text prefilled; some layers whole, or all, or none."""
    first = archive_of(tmp_path / "a", model=name, document=DOCUMENT[:500])
    second = archive_of(tmp_path / "b", model=name, document=FACES)
    prefilled = prefill_document(first.model, "The tide rose. " * 5, layout=first.layout, name="tide")
    composition = Composition([first, second, first, prefilled])
    n_layers = len(first.layers)
    for dense in ((), (0, n_layers - 1), tuple(range(n_layers))):
        policy = RecallPolicy(budget=8, dense_layers=dense)
        found = ask(composition, QUESTIONS[1], policy=policy, max_new_tokens=12, evidence=True).evidence
        check(found)
        assert [document.text for document in found] == [DOCUMENT[:500], FACES, DOCUMENT[:500], prefilled.text]
        expected = 0 if name == "mistral_window" else 1  # all its layers have a window, which are not counted
        assert sum(document.share for document in found) == pytest.approx(expected)


@pytest.mark.parametrize("kind", HARD_TEXTS)
def test_spans_and_passages_are_of_the_text_itself(kind: str, tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "archive", document=HARD_TEXTS[kind])
    prefilled = prefill_document(archive.model, HARD_TEXTS[kind], layout=archive.layout)
    found = ask(Composition([archive, prefilled]), QUESTIONS[1], max_new_tokens=4, evidence=True).evidence
    check(found)
    assert [document.text for document in found] == [HARD_TEXTS[kind]] * 2


def test_evidence_after_recomputing_and_at_the_same_positions_is_whole(tmp_path: Path) -> None:
    recipe = dataclasses.replace(SMALL, sink_tokens=60)
    archives = [
        archive_of(tmp_path / str(place), model="gemma3", document=text, recipe=recipe)
        for place, text in enumerate((DOCUMENT[:500], FACES))
    ]
    composed = [
        recompute(Composition([archives[0], archives[1], archives[0], archives[1]]), 6),
        Composition([*archives, archives[0]], positions="reused"),
    ]
    for composition in composed:
        found = ask(composition, QUESTIONS[1], max_new_tokens=4, evidence=True).evidence
        check(found)
        assert sum(document.share for document in found) == pytest.approx(1)


@pytest.mark.parametrize("budget", [8, EVERYTHING])
def test_a_batch_of_questions_is_refused(budget: int, tmp_path: Path) -> None:
    """It was counted as if the last question were the only one."""
    composition = Composition.of(archive_of(tmp_path / "archive", document=DOCUMENT[:500]))
    cache = ArchiveCache(composition, budget=budget, observer=AttentionMass(composition))
    with pytest.raises(ConfigError, match="one question at a time"):
        composition.model.model.generate(
            **composition.questions(QUESTIONS[:2]), cache=cache, max_new_tokens=3, do_sample=False
        )


def test_other_documents_than_those_of_the_cache_are_refused(tmp_path: Path) -> None:
    archives = [archive_of(tmp_path / str(place), document=DOCUMENT[: 500 + place]) for place in range(2)]
    one, both, turned = Composition(archives[:1]), Composition(archives), Composition(archives[::-1])
    for observed, asked in ((one, both), (both, one), (both, turned)):
        cache = ArchiveCache(asked, observer=AttentionMass(observed))
        with pytest.raises(ConfigError, match="give both the same composition"):
            asked.model.model.generate(**asked.questions(["Who?"]), cache=cache, max_new_tokens=2, do_sample=False)


def test_an_equal_composition_will_do(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "archive", document=DOCUMENT[:500])
    mass = AttentionMass(Composition.of(archive))
    cache = ArchiveCache(archive, observer=mass)
    archive.model.model.generate(**archive.questions(["Who?"]), cache=cache, max_new_tokens=2, do_sample=False)
    assert mass.evidence()[0].share == pytest.approx(1)


@pytest.mark.parametrize("length", [0, 1, 200_000])
@pytest.mark.parametrize("pattern", ["The tide rose. ", "x", "\n", ".", "1. ", '"? ', "\u6d77\u3002", "a\u0301\u0302"])
def test_passages_of_any_text_are_its_own(pattern: str, length: int) -> None:
    text = (pattern * (length // len(pattern) + 1))[:length]
    spans = [(start, min(start + 3, length), 1.0 + start % 7) for start in range(0, length, 3)]
    for passage in merge_passages(text, spans):
        assert passage.text == text[passage.start : passage.end]
        assert 0 < len(passage.text) <= 480


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf, -1.0, 0.0])
def test_weights_that_are_no_shares_leave_no_trace_in_markup(weight: float) -> None:
    passage = Passage(0, 12, weight, "Hello there.")
    document = DocumentEvidence("x", "Hello there. Bye.", weight, ((0, 5, weight), (6, 17, 0.5)), (passage,))
    page = AnswerPage("Who?", "They.", "model", (document,), (), (), "ragkv")
    values = re.findall(r'(?:style|width|height|[xy])="([^"]*)"', render_answer(page))
    assert not [value for value in values if "nan" in value or "inf" in value]


def test_a_page_of_many_documents_links_to_what_is_there() -> None:
    text = "The ferry left at seven. Agnes Moore wrote it down. " * 12
    spans = tuple((start, start + 4, 1 / 40 / (len(text) // 4)) for start in range(0, len(text), 4))
    documents = tuple(
        DocumentEvidence(f"document {place}", text, 1 / 40, spans, merge_passages(text, spans)) for place in range(40)
    )
    html = render_answer(AnswerPage("Who?", "They.", "model", documents, (), (), "ragkv"))
    ids = re.findall(r' id="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', html)) <= set(ids)
