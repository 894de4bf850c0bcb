"""Every cluster recalled must equal dense attention, for every architecture: the model's own where the payload is
lossless, dense attention over the decoded keys and values where it is coded."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path

import pytest
import torch

from ragkv import Archive, ArchiveCache
from ragkv.recipe import RecallPolicy
from tests.archives import CODED, DOCUMENT, EVERYTHING, QUESTIONS, SMALL, archive_of
from tests.dense import dense_answer, dense_logits, stock_copy
from tests.tiny import TINY_MODELS, WINDOW

N_NEW = 20
INT8 = replace(SMALL, key_codec="int8", value_codec="int8")
TEXT = DOCUMENT[:1600]
INT8_DISTANCE = 0.04
"""How far the logits of int8 keys and values may be from dense ones, as a share of their length; measured: 0.02."""


class Case:
    """One architecture: its archives, and the stock model as reference."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.archive = archive_of(folder / name, model=name, document=TEXT)
        self.model = self.archive.model.model
        self.stock = stock_copy(self.model)
        self.context = self.archive.tokens.ids.tolist()
        self._dense_answers: dict[str, list[int]] = {}

    @cached_property
    def int8(self) -> Archive:
        return archive_of(self.folder / f"{self.name}-int8", model=self.name, document=TEXT, recipe=INT8)

    @cached_property
    def coded(self) -> Archive:
        return archive_of(self.folder / f"{self.name}-coded", model=self.name, document=TEXT, recipe=CODED)

    def question(self, text: str) -> list[int]:
        row = self.archive.questions([text])
        return row["input_ids"][0].tolist()

    def dense_answer(self, text: str) -> list[int]:
        if text not in self._dense_answers:
            self._dense_answers[text] = dense_answer(self.stock, self.context + self.question(text), N_NEW)
        return self._dense_answers[text]

    @torch.no_grad()
    def dense_logits(self, text: str) -> torch.Tensor:
        ids = self.question(text)
        return dense_logits(self.stock, self.context + ids, len(ids))

    def cache(self) -> ArchiveCache:
        return ArchiveCache(self.archive, budget=EVERYTHING)

    @torch.no_grad()
    def logits(self, cache: ArchiveCache, text: str = QUESTIONS[2]) -> torch.Tensor:
        return self.model(**self.archive.questions([text]), cache=cache).logits[0]


@pytest.fixture(scope="module", params=TINY_MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("archives"))


def test_document_is_longer_than_the_window(case: Case) -> None:
    assert len(case.context) > 3 * WINDOW


def test_logits_equal_dense_attention(case: Case) -> None:
    torch.testing.assert_close(case.logits(case.cache()), case.dense_logits(QUESTIONS[2]), atol=1e-4, rtol=0)


@torch.no_grad()
def test_left_padded_batch_equals_each_question_alone(case: Case) -> None:
    inputs = case.archive.questions(QUESTIONS)
    logits = case.model(**inputs, cache=case.cache()).logits
    options = {"max_new_tokens": N_NEW, "min_new_tokens": N_NEW, "do_sample": False}
    answers = case.model.generate(**inputs, cache=case.cache(), **options)[:, inputs["input_ids"].shape[1] :]
    for row, text in enumerate(QUESTIONS):
        n_question = len(case.question(text))
        torch.testing.assert_close(logits[row, -n_question:], case.dense_logits(text), atol=1e-4, rtol=0)
        assert answers[row].tolist() == case.dense_answer(text)


@pytest.mark.parametrize("chunk", [None, 5])
def test_twenty_greedy_tokens_equal_dense(case: Case, chunk: int | None) -> None:
    inputs = case.archive.questions([QUESTIONS[2]])
    options = {"max_new_tokens": N_NEW, "min_new_tokens": N_NEW, "do_sample": False, "prefill_chunk_size": chunk}
    out = case.model.generate(**inputs, cache=case.cache(), **options)
    assert out[0, inputs["input_ids"].shape[1] :].tolist() == case.dense_answer(QUESTIONS[2])


# Coded payloads


@pytest.mark.parametrize("payload", ["int8", "coded"])
def test_recalled_codes_equal_dense_attention_over_what_they_decode_to(case: Case, payload: str) -> None:
    archive: Archive = getattr(case, payload)
    every_layer = RecallPolicy(dense_layers=tuple(range(len(archive.layers))))
    recalled = case.logits(ArchiveCache(archive, budget=EVERYTHING))
    decoded = case.logits(ArchiveCache(archive, policy=every_layer))
    torch.testing.assert_close(recalled, decoded, atol=1e-4, rtol=0)


def test_eight_bits_stay_near_dense_attention(case: Case) -> None:
    """The median token, since a mixture of experts may send one token to another expert altogether."""
    found = torch.cat([case.logits(ArchiveCache(case.int8, budget=EVERYTHING), text) for text in QUESTIONS])
    expected = torch.cat([case.dense_logits(text) for text in QUESTIONS])
    distance = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(distance.median()) < INT8_DISTANCE
    assert float((found.argmax(-1) == expected.argmax(-1)).float().mean()) > 0.9
