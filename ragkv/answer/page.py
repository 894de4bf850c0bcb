"""The page behind one answer: what was asked and answered, the passages it looked at, and what it cost.

It is one HTML file without scripts, the same bytes for the same input. All texts are data: nothing of a question,
answer or document can become markup. The markup is in `ragkv/templates/answer.html`; here is what it shows.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ragkv.answer.passages import DocumentEvidence, Passage, spans_within
from ragkv.page import render
from ragkv.recall.trace import LayerMeans

_LEVELS = ("", "one", "two", "three")
# Shading of a passage, as a share of the heaviest passage; underline of a token, of the heaviest token in a passage.
_PASSAGE_LEVELS = (0.0, 1 / 3, 2 / 3)
_TOKEN_LEVELS = (1 / 12, 1 / 5, 1 / 2)
# A document's second and later passages are not shown below this share of the heaviest one's attention.
_LEAST_SHOWN = 1 / 20
# Characters of the text around a passage, and how few of them may be left when they are cut at a line.
_CONTEXT = 160
_CONTEXT_LEAST = 30
# From here on letters stand for syllables or words, and a text has no spaces to find words by.
_FIRST_CJK = "\u2e80"
_STRIP_BINS = 96
_STRIP_HEIGHT = 40
_NO_NUMBER = "\N{EN DASH}"
_ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"


@dataclass(frozen=True)
class AnswerPage:
    """What the page shows. ``figures`` are labels and values as they are to be read, of the ledger and the clock;
    ``created_by`` is the program and its version, as in "ragkv 1.2.0".
    """

    question: str
    answer: str
    model: str
    documents: tuple[DocumentEvidence, ...]
    figures: tuple[tuple[str, str], ...]
    layers: tuple[LayerMeans, ...]
    created_by: str


@dataclass(frozen=True)
class _Ranked:
    """A passage with its place among all passages of the page: 1 has most attention."""

    rank: int
    passage: Passage
    level: str


@dataclass(frozen=True)
class _Source:
    """A document as the page shows it; ``passages`` by rank, ``peak`` the heaviest token in any passage of the page."""

    name: str
    document: DocumentEvidence
    passages: tuple[_Ranked, ...]
    n_ranked: int
    peak: float


def render_answer(page: AnswerPage) -> str:
    """The page as HTML text, which every encoding of Unicode can hold."""
    sources = _sources(page.documents)
    return render(
        "answer.html",
        title=_title(page.question),
        skip_to="sources" if any(source.passages for source in sources) else "answer",
        n_documents=_amount(len(page.documents), "document"),
        question=page.question.strip(),
        answer=page.answer.strip(),
        model=page.model,
        any_attention=any(source.document.share > 0 for source in sources),
        sources=[_shown(source) for source in sources],
        figures=page.figures,
        layers=[(row.layer, _tokens(row.recalled_tokens), format_share(row.unrecalled_mass)) for row in page.layers],
        created_by=page.created_by,
    )


def format_share(share: float) -> str:
    """A share as a percentage with as much precision as a reader can use: "31%", "0.4%", "<0.1%"."""
    if not math.isfinite(share):
        return _NO_NUMBER
    if share >= 0.095 or share <= 0:
        return f"{max(share, 0.0):.0%}"
    return f"{share:.1%}" if share >= 0.001 else "<0.1%"


def _tokens(number: float) -> str:
    if not math.isfinite(number):
        return _NO_NUMBER
    return f"{number:,.0f}" if number >= 10 or number == int(number) else f"{number:,.1f}"


def _title(question: str) -> str:
    line = " ".join(question.split())
    return (line if len(line) <= 80 else f"{line[:79].rstrip()}{_ELLIPSIS}") or "An answer and its sources"


def _amount(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _sources(documents: Sequence[DocumentEvidence]) -> list[_Source]:
    """Documents by share, their passages by their rank in all of them; ties stay as they come."""
    ordered = sorted(documents, key=lambda document: -document.share)
    top = max((passage.weight for document in documents for passage in document.passages), default=0.0)
    passages = [
        (index, passage)
        for index, document in enumerate(ordered)
        for place, passage in enumerate(document.passages)
        if passage.weight > 0 and (place == 0 or passage.weight >= _LEAST_SHOWN * top)
    ]
    passages.sort(key=lambda item: -item[1].weight)
    ranked: list[list[_Ranked]] = [[] for _ in ordered]
    for rank, (index, passage) in enumerate(passages, 1):
        level = _LEVELS[max(_level(passage.weight, top, _PASSAGE_LEVELS), 1)]
        ranked[index].append(_Ranked(rank, passage, level))
    peak = max((_peak(ordered[index], passage) for index, passage in passages), default=0.0)
    return [
        _Source(f"d{number}", document, tuple(ranked[number - 1]), len(passages), peak)
        for number, document in enumerate(ordered, 1)
    ]


def _peak(document: DocumentEvidence, passage: Passage) -> float:
    """The heaviest token with a letter or digit, so that no line break makes all words look faint."""
    found = spans_within(document.spans, passage.start, passage.end)
    return max((weight for start, end, weight in found if _has_word(document.text[start:end])), default=0.0)


def _level(value: float, top: float, limits: Sequence[float]) -> int:
    return sum(value > 0 and value >= limit * top for limit in limits)


def _shown(source: _Source) -> dict[str, Any]:
    """A document as the template wants it."""
    document, text = source.document, source.document.text
    share = min(max(document.share, 0.0), 1.0) if math.isfinite(document.share) else 0.0
    note = "" if source.passages else "No passage of this document stands out."
    return {
        "id": source.name,
        "name": document.name.strip() or "(document without a name)",
        "share": format_share(document.share),
        "width": f"{share:.1%}",
        "strip": _strip(document, source.passages) if document.share > 0 else None,
        "note": "This document received no recalled attention." if document.share <= 0 else note,
        "passages": [_shown_passage(source, ranked) for ranked in source.passages],
        "n_characters": _amount(len(text), "character"),
        "whole": _whole_text(source) if text.strip() else [],
    }


def _shown_passage(source: _Source, ranked: _Ranked) -> dict[str, Any]:
    text, passage, rank = source.document.text, ranked.passage, ranked.rank
    before, after = _context_start(text, passage.start), _context_end(text, passage.end)
    place = f"{passage.start / max(len(text), 1):.0%}"
    return {
        "rank": rank,
        "level": ranked.level,
        "share": format_share(passage.weight),
        "place": "at the beginning" if place == "0%" else f"{place} into the text",
        "before": (f"{_ELLIPSIS} " if before > 0 else "") + text[before : passage.start].lstrip(),
        "pieces": _heat(source, passage),
        "after": text[passage.end : after].rstrip() + (f" {_ELLIPSIS}" if after < len(text) else ""),
        "neighbours": [
            (word, other)
            for word, other in (("Next", rank + 1), ("Previous", rank - 1))
            if 1 <= other <= source.n_ranked
        ],
    }


def _strip(document: DocumentEvidence, passages: Sequence[_Ranked]) -> dict[str, Any] | None:
    """Bars of where along the text the attention fell; those that lie in one of `passages` are shaded."""
    n_chars = max(len(document.text), 1)
    n_bins = min(_STRIP_BINS, n_chars)
    bins = [0.0] * n_bins
    for start, end, weight in document.spans:
        middle = min(max((start + end) // 2, 0), n_chars - 1)
        bins[middle * n_bins // n_chars] += max(weight, 0.0) if math.isfinite(weight) else 0.0
    top = max(bins)
    if top <= 0:
        return None
    shaded = {
        index
        for passage in (ranked.passage for ranked in passages)
        for index in range(passage.start * n_bins // n_chars, max(passage.end - 1, 0) * n_bins // n_chars + 1)
    }
    bars = [
        {
            "shaded": index in shaded,
            "x": f"{index + 0.1:.1f}",
            "y": f"{_STRIP_HEIGHT * (1 - value / top):.2f}",
            "height": f"{_STRIP_HEIGHT * value / top:.2f}",
        }
        for index, value in enumerate(bins)
        if value > 0
    ]
    return {"n_bins": n_bins, "height": _STRIP_HEIGHT, "peak": f"{(bins.index(top) + 0.5) / n_bins:.0%}", "bars": bars}


def _context_start(text: str, start: int) -> int:
    """Where the context before a passage begins: with a line if enough is left of it, else with a word."""
    place = max(start - _CONTEXT, 0)
    line = text.find("\n", place, start)
    if place > 0 and line >= 0 and len(text[line:start].strip()) >= _CONTEXT_LEAST:
        return line + 1
    while 0 < place < start and not text[place - 1].isspace():
        place += 1
    return place if place < start else max(start - _CONTEXT, 0)


def _context_end(text: str, end: int) -> int:
    """Where it ends after the passage, by the same rule."""
    place = min(end + _CONTEXT, len(text))
    line = text.rfind("\n", end, place)
    if place < len(text) and line >= 0 and len(text[end:line].strip()) >= _CONTEXT_LEAST:
        return line
    while end < place < len(text) and not text[place].isspace():
        place -= 1
    return place if place > end else min(end + _CONTEXT, len(text))


def _whole_text(source: _Source) -> list[dict[str, Any]]:
    """The text in stretches, those of passages with their rank."""
    text, done = source.document.text, 0
    stretches: list[dict[str, Any]] = []
    for ranked in sorted(source.passages, key=lambda ranked: (ranked.passage.start, ranked.rank)):
        passage = ranked.passage
        stretches.append({"rank": None, "pieces": [("", text[done : max(passage.start, done)])]})
        stretches.append({"rank": ranked.rank, "level": ranked.level, "pieces": _heat(source, passage, done)})
        done = max(done, passage.end)
    return [*stretches, {"rank": None, "pieces": [("", text[done:])]}]


def _heat(source: _Source, passage: Passage, done: int = 0) -> list[tuple[str, str]]:
    """A passage from ``done`` on as (level, text), its words underlined by their attention."""
    start = max(passage.start, done)
    text = source.document.text[start : passage.end]
    levels = [0] * len(text)
    for low, high, weight in spans_within(source.document.spans, start, passage.end):
        level = _level(weight, source.peak, _TOKEN_LEVELS)
        for place in range(max(low - start, 0), min(high - start, len(text))):
            levels[place] = max(levels[place], level)
    place = 0
    pieces: list[tuple[str, str]] = []
    for level, run in groupby(_by_word(text, levels)):
        length = len(list(run))
        pieces.append((_LEVELS[level], text[place : place + length]))
        place += length
    return pieces


def _by_word(text: str, levels: Sequence[int]) -> Iterator[int]:
    """One level for each word, the highest of its tokens; none for what is between words."""
    place = 0
    for kind, run in groupby(text, key=_kind):
        length = len(list(run))
        part = levels[place : place + length]
        if kind == "word":
            yield from [max(part)] * length
        else:
            yield from part if kind == "letters" else [0] * length
        place += length


def _kind(character: str) -> str:
    # Marks belong to the letter before them: a border between the two would pull them apart.
    if character >= _FIRST_CJK and unicodedata.category(character) in ("Lo", "Nl"):
        return "letters"
    return "word" if character.isalnum() or unicodedata.category(character)[0] == "M" else ""


def _has_word(text: str) -> bool:
    return any(character.isalnum() for character in text)
