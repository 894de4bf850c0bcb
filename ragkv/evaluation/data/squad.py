"""Files in SQuAD format: articles of paragraphs with questions whose answers stand in them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ragkv.evaluation.data.suite import BREAK, EvalDocument, Item, Request, Suite, evenly, first_of


@dataclass(frozen=True)
class Paragraph:
    """A paragraph as the file has it: its text, and what is asked of it by the ids of the file, empty without one."""

    text: str
    asked: tuple[tuple[str, Item], ...]

    @property
    def items(self) -> tuple[Item, ...]:
        return tuple(item for _, item in self.asked)


def parse_squad(text: str) -> list[list[Paragraph]]:
    """Articles as lists of paragraphs, those without a question included.

    Raises
    ------
    KeyError, TypeError, ValueError, AttributeError
        If it is no text in SQuAD format, or a question has no answer, or one that is not where the file says.
    """
    return [
        [
            Paragraph(paragraph["context"], tuple(_asked(paragraph["context"], each) for each in paragraph["qas"]))
            for paragraph in article["paragraphs"]
        ]
        for article in json.loads(text)["data"]
    ]


def _asked(context: str, asked: dict[str, Any]) -> tuple[str, Item]:
    answers = tuple(answer["text"] for answer in asked["answers"])
    starts = [answer["answer_start"] for answer in asked["answers"]]
    spans = tuple((start, start + len(answer)) for start, answer in zip(starts, answers, strict=True))
    if not answers or any(context[start:end] != answer for (start, end), answer in zip(spans, answers, strict=True)):
        raise ValueError(f"the answers to {asked['question']!r} are not where the file says in their paragraph")
    return str(asked.get("id", "")), Item(asked["question"], answers, spans)


def shifted(item: Item, by: int) -> Item:
    """The same item with its spans `by` characters further on."""
    return replace(item, spans=tuple((start + by, end + by) for start, end in item.spans))


def load_xquad(request: Request) -> Suite:
    """Text: consecutive paragraphs of ``xquad.{language}.json``, a blank line between them. Question: the file's own.

    Documents share no paragraph. The last one of the file is used only if it is at least half as long as asked for.
    """
    language = request.name.removeprefix("xquad-")
    articles = request.read(f"xquad.{language}.json", "a file in SQuAD format", parse_squad)
    paragraphs = [paragraph for article in articles for paragraph in article if paragraph.asked]
    chosen = request.choose(_consecutive(request, paragraphs), f"documents of length {request.document_length}")
    return Suite(
        name=request.name,
        metric="squad" if language == "en" else "squad_zh",
        documents=tuple(_xquad_document(request, first, paragraphs[first:end]) for first, end in chosen),
        description="Consecutive XQuAD paragraphs; short answers are read off the text; scored by exact match and F1.",
        max_new_tokens=32,
    )


def _consecutive(request: Request, paragraphs: Sequence[Paragraph]) -> list[tuple[int, int]]:
    """(first, end) of the runs of paragraphs that fill a document, one run after another."""
    runs, first = [], 0
    texts = [paragraph.text for paragraph in paragraphs]
    while first < len(texts):
        rest = texts[first:]
        end = first + request.fitting(first_of(rest), len(rest), f"paragraph {first}")
        runs.append((first, end))
        first = end
    if runs and 2 * request.count_tokens(BREAK.join(texts[runs[-1][0] :])) < request.document_length:
        runs.pop()
    return runs


def _xquad_document(request: Request, first: int, paragraphs: Sequence[Paragraph]) -> EvalDocument:
    name = f"{request.name}-{first:03d}-{first + len(paragraphs) - 1:03d}"
    by_paragraph: list[list[Item]] = []
    start = 0
    for paragraph in paragraphs:
        items = request.rng.sample(paragraph.items, len(paragraph.items))
        by_paragraph.append([shifted(item, start) for item in items])
        start += len(paragraph.text) + len(BREAK)
    asked = _in_turn(by_paragraph, request.items_per_document, f"document {name!r}")
    return EvalDocument(name, BREAK.join(paragraph.text for paragraph in paragraphs), asked)


def _in_turn(by_paragraph: Sequence[Sequence[Item]], n: int, where: str) -> tuple[Item, ...]:
    """One question of each paragraph, then a second of each, until `n`; the last round at even distances."""
    rounds = [
        [items[turn] for items in by_paragraph if len(items) > turn] for turn in range(max(map(len, by_paragraph)))
    ]
    asked: list[Item] = []
    for one_round in rounds:
        asked += one_round if len(one_round) <= n - len(asked) else evenly(one_round, n - len(asked), where)
    return evenly(sorted(asked, key=lambda item: item.spans), n, where)
