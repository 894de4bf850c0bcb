"""Lossless payload and every cluster recalled must equal the model's own dense attention, for every architecture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ragkv import ArchiveCache
from tests.archives import EVERYTHING, QUESTIONS, archive_of
from tests.dense import dense_answer, dense_logits, stock_copy
from tests.tiny import TINY_MODELS, WINDOW


class Case:
    """One architecture: its archive, and the stock model as reference."""

    def __init__(self, name: str, folder: Path) -> None:
        self.archive = archive_of(folder / name, model=name)
        self.model = self.archive.model.model
        self.stock = stock_copy(self.model)
        self.context = self.archive.tokens.ids.tolist()

    def question(self, text: str) -> list[int]:
        row = self.archive.questions([text])
        return row["input_ids"][0].tolist()

    def cache(self) -> ArchiveCache:
        return ArchiveCache(self.archive, budget=EVERYTHING)


@pytest.fixture(scope="module", params=TINY_MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("archives"))


def test_document_is_longer_than_the_window(case: Case) -> None:
    assert len(case.context) > 3 * WINDOW


@torch.no_grad()
def test_logits_equal_dense_attention(case: Case) -> None:
    ids = case.question(QUESTIONS[2])
    logits = case.model(**case.archive.questions([QUESTIONS[2]]), cache=case.cache()).logits[0]
    torch.testing.assert_close(logits, dense_logits(case.stock, case.context + ids, len(ids)), atol=1e-4, rtol=0)


def test_twenty_greedy_tokens_equal_dense(case: Case) -> None:
    inputs = case.archive.questions([QUESTIONS[1]])
    out = case.model.generate(**inputs, cache=case.cache(), max_new_tokens=20, min_new_tokens=20, do_sample=False)
    answer = out[0, inputs["input_ids"].shape[1] :].tolist()
    assert answer == dense_answer(case.stock, case.context + case.question(QUESTIONS[1]), 20)


@torch.no_grad()
def test_left_padded_batch_equals_each_question_alone(case: Case) -> None:
    inputs = case.archive.questions(QUESTIONS)
    logits = case.model(**inputs, cache=case.cache()).logits
    answers = case.model.generate(**inputs, cache=case.cache(), max_new_tokens=20, min_new_tokens=20, do_sample=False)[
        :, inputs["input_ids"].shape[1] :
    ]
    for row, text in enumerate(QUESTIONS):
        ids = case.question(text)
        alone = dense_logits(case.stock, case.context + ids, len(ids))
        torch.testing.assert_close(logits[row, -len(ids) :], alone, atol=1e-4, rtol=0)
        assert answers[row].tolist() == dense_answer(case.stock, case.context + ids, 20)


def test_chunked_question_equals_dense(case: Case) -> None:
    inputs = case.archive.questions([QUESTIONS[2]])
    out = case.model.generate(
        **inputs,
        cache=case.cache(),
        max_new_tokens=20,
        min_new_tokens=20,
        do_sample=False,
        prefill_chunk_size=5,
    )
    answer = out[0, inputs["input_ids"].shape[1] :].tolist()
    assert answer == dense_answer(case.stock, case.context + case.question(QUESTIONS[2]), 20)
