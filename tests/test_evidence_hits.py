"""Evidence judged: what counts as a hit, where passages stand, and what words and embeddings score."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from pipelines.measure.cases import (
    FILE,
    Case,
    PoolDocument,
    PoolQuestion,
    draw_sibling_cases,
    read_pool,
    read_siblings,
)
from pipelines.measure.hits import EvidenceRow, holds, judge, rank_of, summarise_evidence
from pipelines.measure.looks import (
    EmbeddingSearch,
    Found,
    Looked,
    best_passages,
    join_texts,
    look_by_words,
    split_evidence,
)
from ragkv.answer.ask import ask
from ragkv.answer.passages import DocumentEvidence, merge_passages, sentence_runs
from ragkv.errors import ConfigError
from ragkv.evaluation.data.suite import Item
from ragkv.model.prompt import PromptLayout
from ragkv.recall.composition import Composition
from ragkv.recall.prefilled import prefill_document
from tests.archives import DOCUMENT, EVERYTHING, QUESTIONS, archive_of, loaded
from tests.squad import TOWNS, TRADES, write_squad


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_squad(tmp_path_factory.mktemp("data"))


def document_of(*paragraphs: str, name: str = "d") -> PoolDocument:
    text, extents = join_texts(paragraphs)
    return PoolDocument(name, text, (), tuple(extents))


# Questions and gold answers


def test_gold_answers_stand_where_the_file_says_also_in_later_paragraphs(data: Path) -> None:
    for document in read_pool(data, n_documents=3, n_paragraphs=3):
        assert [document.text[start:end].split()[0] for start, end in document.paragraphs] == ["The"] * 3
        for asked in document.asked:
            ((start, end),) = asked.item.spans
            assert document.text[start:end] == asked.item.answers[0]
            first, _ = next(each for each in document.paragraphs if each[0] <= start < each[1])
            assert start == document.text.index(asked.item.answers[0], first), "the first of two places is gold"


def test_an_answer_that_is_not_at_its_place_is_refused(data: Path, tmp_path: Path) -> None:
    squad = json.loads((data / FILE).read_text(encoding="utf-8"))
    squad["data"][0]["paragraphs"][0]["qas"][0]["answers"][0]["answer_start"] += 1
    (tmp_path / FILE).write_text(json.dumps(squad), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"not a file in SQuAD format.*not where the file says"):
        read_pool(tmp_path, n_documents=2, n_paragraphs=1)


def test_skipped_articles_are_never_drawn(data: Path) -> None:
    for seed in range(5):
        pool = read_pool(data, n_documents=2, n_paragraphs=2, seed=seed, skip_articles=2)
        assert {name for name in TOWNS for document in pool if name in document.text} == {"Calder", "Dunmore"}
    with pytest.raises(ConfigError, match="has 1 articles of at least 2 paragraphs after the first 3"):
        read_pool(data, n_documents=2, n_paragraphs=2, skip_articles=3)


def test_siblings_are_the_paragraphs_of_one_article_in_an_order_by_chance(data: Path) -> None:
    siblings = read_siblings(data, n_articles=4, n_paragraphs=3)
    cases = draw_sibling_cases(siblings, size=3, n_questions=16)
    assert len({case.asked.id for case in cases}) == 16
    for case in cases:
        texts = [siblings[place].text for place in case.documents]
        assert len({next(town for town in TOWNS if town in text) for text in texts}) == 1
        assert {trade for text in texts for trade in TRADES if trade in text} == set(TRADES)
        assert case.asked in siblings[case.asked.place].asked
        assert case.asked.place in case.documents
    assert [case.documents for case in cases[::2]] == [case.documents for case in cases[1::2]]
    assert len({case.documents.index(case.asked.place) for case in cases}) == 3
    assert cases[:5] == draw_sibling_cases(siblings, size=3, n_questions=5)
    with pytest.raises(ConfigError, match="has 6 questions and 25 in all"):
        draw_sibling_cases(siblings, size=3, n_questions=25)


# Hits


@pytest.mark.parametrize(
    ("passage", "held"),
    [
        ((1, 10, 20), True),
        ((1, 12, 15), True),
        ((1, 13, 20), False),  # the answer begins before it
        ((1, 10, 14), False),  # and ends after it
        ((0, 10, 20), False),  # another document
        ((1, 40, 60), True),  # the second gold answer
    ],
)
def test_a_passage_holds_an_answer_that_begins_and_ends_in_it(passage: tuple[int, int, int], held: bool) -> None:
    assert holds(Found(*passage, weight=1.0), gold=1, spans=[(12, 15), (50, 52)]) is held


def looked_at(*passages: Found, scores: Sequence[float] = (0.5, 0.5), shares: Sequence[float] = ()) -> EvidenceRow:
    """Judged for a question whose answer is characters 5 to 8 of the second document."""
    case = Case((7, 3), PoolQuestion("q", 3, Item("?", ("yes",), ((5, 8),))))
    documents = [document_of("one", name="a"), document_of("two", name="b")]
    looked = Looked(passages, tuple(scores), tuple(shares))
    return judge(looked, setting="articles", method="any", case=case, documents=documents)


def test_hits_are_judged_by_hand() -> None:
    miss, hit, other = Found(1, 10, 20, 0.3), Found(1, 0, 9, 0.2), Found(0, 0, 9, 0.4)
    row = looked_at(other, miss, hit, scores=(0.7, 0.2), shares=(0.4, 0.6))
    assert (row.hit, row.first, row.right, row.largest, row.rank) == (True, False, False, True, 2)
    assert (row.document, row.passages[2]) == ("b", ("b", 0, 9, 0.2))
    row = looked_at(hit, other)
    assert (row.hit, row.first, row.right, row.largest) == (True, True, True, None)
    row = looked_at(miss, other, shares=(0.6, 0.4))
    assert (row.hit, row.first, row.right, row.largest) == (False, False, True, False)
    row = looked_at()
    assert (row.hit, row.first, row.right) == (False, False, False)


def test_equal_scores_rank_in_their_order() -> None:
    assert [rank_of(place, (0.2, 0.5, 0.2, 0.1)) for place in range(4)] == [2, 1, 3, 4]


def test_the_best_three_passages_of_all_documents_count() -> None:
    text = "Aa bb. " * 4
    spans = [[(0, 2, 0.1), (7, 9, 0.3)], [(0, 2, 0.05), (14, 16, 0.4), (21, 23, 0.15)]]
    evidence = [
        DocumentEvidence("d", text, 0.0, tuple(own), merge_passages(text, own, target_chars=6)) for own in spans
    ]
    best = best_passages(evidence)
    assert [(each.place, each.start) for each in best] == [(1, 14), (0, 7), (1, 21)]
    assert [each.weight for each in best] == pytest.approx([0.4, 0.3, 0.15])


# Joined texts


def test_tokens_of_a_joined_text_go_back_to_their_documents() -> None:
    documents = [document_of("Ab cd."), document_of("Ef."), document_of("Gh ij.")]
    text, extents = join_texts([document.text for document in documents])
    assert text == "Ab cd.\n\nEf.\n\nGh ij."
    assert extents == [(0, 6), (8, 11), (13, 19)]
    # "Ab", " cd", ".\n\n" across the border, "Ef", ".", "\n\n" of no document, "G", "h ij."
    joined = ((0, 2, 1.0), (2, 5, 2.0), (5, 8, 4.0), (8, 10, 8.0), (10, 11, 16.0), (11, 13, 32.0), (13, 14, 64.0))
    whole = DocumentEvidence("", text, 1.0, (*joined, (14, 19, 128.0)), ())
    first, second, third = split_evidence(whole, documents, extents)
    assert first.spans == ((0, 2, 1.0), (2, 5, 2.0), (5, 6, 4.0))
    assert second.spans == ((0, 2, 8.0), (2, 3, 16.0))
    assert third.spans == ((0, 1, 64.0), (1, 6, 128.0))
    assert [each.share for each in (first, second, third)] == [7.0, 24.0, 192.0]
    assert [passage.text for each in (first, second, third) for passage in each.passages] == ["Ab cd.", "Ef.", "Gh ij."]


def test_dense_evidence_of_one_document_is_that_of_its_archive_with_everything_recalled(tmp_path: Path) -> None:
    text = DOCUMENT[:700]
    archive = archive_of(tmp_path / "a", document=text)
    exact = ask(archive, QUESTIONS[1], budget=EVERYTHING, evidence=True, max_new_tokens=4)
    prefilled = prefill_document(loaded("llama"), text, layout=PromptLayout.plain())
    dense = ask(Composition([prefilled]), QUESTIONS[1], evidence=True, max_new_tokens=4)
    (own,) = split_evidence(dense.evidence[0], [document_of(text)], [(0, len(text))])
    assert dense.text == exact.text
    assert own.share == pytest.approx(1.0)
    for found, wanted in zip(best_passages([own]), best_passages(exact.evidence), strict=True):
        assert (found.start, found.end) == (wanted.start, wanted.end)
        assert found.weight == pytest.approx(wanted.weight, abs=1e-4)


# Words and embeddings


def test_words_are_weighted_by_the_paragraphs_that_have_them() -> None:
    documents = [
        document_of("Salt came by ship. Salt was dear.", "The river froze."),
        document_of("The ship sank.", "Nobody was hurt."),
    ]
    looked = look_by_words("Was the SALT on the ship?", documents)
    # salt is in one of four paragraphs; was, the and ship are in two
    idf = {n: math.log(1 + (4.5 - n) / (n + 0.5)) for n in (1, 2)}
    assert looked.scores == pytest.approx((idf[1] + 2 * idf[2], 2 * idf[2]))
    first = 2 * idf[1] + 2 * idf[2] + idf[2]  # salt twice, ship, was; the
    second = 2 * idf[2] + idf[2]  # the, ship; was
    assert looked.shares == pytest.approx((first / (first + second), second / (first + second)))
    best = looked.passages[0]
    assert (best.place, best.start) == (0, 0)
    assert best.weight == pytest.approx((2 * idf[1] + 3 * idf[2]) / (first + second))


def test_a_question_without_a_word_of_the_documents_finds_nothing() -> None:
    looked = look_by_words("Quoi?", [document_of("Salt."), document_of("Wool.")])
    assert (looked.passages, looked.scores, looked.shares) == ((), (0, 0), (0, 0))


def test_sentence_runs_are_the_longest_that_fit() -> None:
    text = "One is here. Two is here. Three is long, longer than most of the others are. Four."
    cuts = [text[start:end] for start, end in sentence_runs(text, target_chars=30)]
    assert cuts == ["One is here. Two is here.", "Two is here.", text[26:76], "Four."]
    assert sentence_runs("", target_chars=30) == ()


def test_the_embedding_takes_the_nearest_runs_apart_and_ranks_by_the_best_paragraph() -> None:
    def encode(texts: Sequence[str]) -> torch.Tensor:
        """Counts of three words, as vectors of length 1."""
        counts = torch.tensor(
            [[1e-3 + text.lower().count(word) for word in ("salt", "wool", "slate")] for text in texts]
        )
        return counts / counts.norm(dim=1, keepdim=True)

    filler = "It was a long and windy day by the sea, and nothing else was heard of that could be told here. " * 2
    documents = [
        document_of(f"Wool. {filler} Salt of the earth. {filler}", name="mixed"),
        document_of("Wool and more wool.", name="wool"),
        document_of("Slate.", "All is salt.", name="salt"),
    ]
    calls: list[int] = []
    search = EmbeddingSearch(lambda texts: (calls.append(len(texts)), encode(texts))[1])
    looked = search.look("salt", documents)
    spans = [(each.place, each.start, each.end) for each in looked.passages]
    assert spans[0][0] == 0
    assert "Salt" in documents[0].text[spans[0][1] : spans[0][2]]
    assert any(place == 2 for place, _, _ in spans)
    of_first = sorted(each[1:] for each in spans if each[0] == 0)
    assert all(left[1] <= right[0] for left, right in pairwise(of_first))
    assert rank_of(2, looked.scores) == 1
    assert looked.shares == ()
    before = len(calls)
    search.look("wool", documents)
    assert calls[before:] == [1], "vectors of documents are computed once"


# Summary


def test_the_summary_is_by_hand() -> None:
    hit = looked_at(Found(1, 0, 9, 0.2), scores=(0.1, 0.9), shares=(0.1, 0.9))
    missed = looked_at(Found(0, 0, 9, 0.2), scores=(0.9, 0.1), shares=(0.1, 0.9))
    (found,) = summarise_evidence([hit, missed, missed, missed])
    assert (found.n, found.hit.value, found.first.value, found.right.value) == (4, 0.25, 0.25, 0.25)
    assert found.hit.standard_error == pytest.approx(math.sqrt(0.25 * 0.75 / 4))
    assert (found.largest.value, found.largest.standard_error) == (1.0, 0.0)
    assert found.ranked_first.value == 0.25
    assert found.mrr.value == pytest.approx((1 + 3 * 0.5) / 4)
    assert found.mrr.standard_error == pytest.approx(math.sqrt(0.25 * 0.75) * 0.5 / 2)
    assert (found.hit_if_answered, found.n_answered) == (None, 0)
    (without,) = summarise_evidence([replace(hit, largest=None)])
    assert without.largest is None


def test_hits_of_answered_questions_are_counted_apart() -> None:
    hit = replace(looked_at(Found(1, 0, 9, 0.2), scores=(0.1, 0.9), shares=(0.1, 0.9)), answer="a bag of salt")
    missed = replace(looked_at(Found(0, 0, 9, 0.2), scores=(0.9, 0.1), shares=(0.1, 0.9)), answer="salt")
    wrong = replace(missed, answer="wool")
    (found,) = summarise_evidence([hit, missed, wrong], {hit.question: ("a bag of salt",)})
    assert found.n_answered == 2  # "salt" has an F1 of 0.5: articles do not count
    assert found.hit_if_answered.value == 0.5
