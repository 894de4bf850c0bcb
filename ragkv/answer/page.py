"""The page behind one answer: what was asked and answered, the passages it looked at, and what it cost.

It is one HTML file without scripts, the same bytes for the same input. All texts are data: nothing of a question,
answer or document can become markup.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from ragkv.answer.figures import format_share, layer_section, strip_figure
from ragkv.answer.passages import DocumentEvidence, Passage, spans_within
from ragkv.answer.style import STYLE
from ragkv.page import escape_text, render_page
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
_LONG_QUESTION = 140
# From here on letters stand for syllables or words, and a text has no spaces to find words by.
_FIRST_CJK = "\u2e80"


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
    long = ' class="long"' if len(page.question) > _LONG_QUESTION else ""
    target = "sources" if any(source.passages for source in sources) else "answer"
    answer = page.answer.strip()
    shown = f'<div class="answer">{escape_text(answer)}</div>' if answer else "<p>The model gave no answer.</p>"
    body = f"""<a class="skip" href="#{target}">Skip to the {target}</a>
<header>
<p class="eyebrow">Question to {_amount(len(page.documents), "document")}</p>
<h1{long}>{escape_text(page.question.strip()) or "(no question)"}</h1>
</header>
<main>
<section id="answer" aria-labelledby="answer-heading">
<h2 id="answer-heading">Answer</h2>
{shown}
<p class="note">Written by {escape_text(page.model)}.</p>
</section>
<section id="sources" aria-labelledby="sources-heading">
<h2 id="sources-heading">Where the answer looked</h2>
{_overview(sources)}
{"".join(_source(source) for source in sources)}</section>
{_figures(page.figures)}{layer_section(page.layers)}</main>
<footer>
<p>Made by {escape_text(page.created_by)}. This file stands alone: it loads nothing and runs no script.</p>
</footer>
"""
    return render_page(title=_title(page.question), style=STYLE, body=body)


def _title(question: str) -> str:
    line = " ".join(question.split())
    return (line if len(line) <= 80 else f"{line[:79].rstrip()}\N{HORIZONTAL ELLIPSIS}") or "An answer and its sources"


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


def _overview(sources: Sequence[_Source]) -> str:
    if not sources:
        return "<p>There were no documents: the answer is the model's own.</p>"
    if not any(source.document.share > 0 for source in sources):
        return (
            "<p>None of the documents received recalled attention, so no passage is shaded. Their texts are below.</p>"
        )
    items = "\n".join(_overview_item(source) for source in sources)
    return f"""<p class="note">Percentages are shares of the recalled attention that fell on documents while the answer
was written. Passage 1 received most. The stronger its shade, the more attention a passage received; the thicker the
line under a word, the more that word received. Bars show where in a document attention fell, on a scale of its own.
Attention tells where the model looked, not that it was right.</p>
<ol class="sources">
{items}
</ol>
"""


def _overview_item(source: _Source) -> str:
    share = min(max(source.document.share, 0.0), 1.0) if math.isfinite(source.document.share) else 0.0
    chips = " ".join(
        f'<a class="chip" href="#p{ranked.rank}" aria-label="Passage {ranked.rank}, '
        f'{format_share(ranked.passage.weight)}">{ranked.rank}</a>'
        for ranked in source.passages
    )
    line = f'\n<p class="chips"><span>{_noun(source)}</span> {chips}</p>' if chips else ""
    return (
        f'<li><a href="#{source.name}"><bdi>{_name(source.document)}</bdi></a> '
        f'<span class="pct">{format_share(source.document.share)}</span>\n'
        f'<div class="bar" aria-hidden="true"><span style="width:{share:.1%}"></span></div>{line}</li>'
    )


def _noun(source: _Source) -> str:
    return "Passage" if len(source.passages) == 1 else "Passages"


def _name(document: DocumentEvidence) -> str:
    return escape_text(document.name.strip()) or "(document without a name)"


def _source(source: _Source) -> str:
    document = source.document
    empty = "" if source.passages else '<p class="note">No passage of this document stands out.</p>\n'
    if document.share <= 0:
        empty = '<p class="note">This document received no recalled attention.</p>\n'
    passages = "".join(_passage(source, ranked) for ranked in source.passages)
    strip = strip_figure(document, [ranked.passage for ranked in source.passages]) if document.share > 0 else ""
    return f"""<article class="source" id="{source.name}" aria-labelledby="{source.name}-heading">
<header>
<h3 id="{source.name}-heading">{_name(document)}</h3>
<span class="pct">{format_share(document.share)} of the attention</span>
</header>
{strip}{empty}{passages}<details>
<summary>Whole text ({_amount(len(document.text), "character")})</summary>
<div class="text">{_whole_text(source)}</div>
</details>
</article>
"""


def _passage(source: _Source, ranked: _Ranked) -> str:
    text, passage, rank = source.document.text, ranked.passage, ranked.rank
    before, after = _context_start(text, passage.start), _context_end(text, passage.end)
    head = ("\N{HORIZONTAL ELLIPSIS} " if before > 0 else "") + escape_text(text[before : passage.start].lstrip())
    tail = escape_text(text[passage.end : after].rstrip()) + (" \N{HORIZONTAL ELLIPSIS}" if after < len(text) else "")
    shaded = f'<mark class="{ranked.level}">{_heat(source, passage)}</mark>'
    around = [
        f'<a href="#p{other}">{word}: <span class="hidden">passage </span>{other}</a>'
        for word, other in (("Next", rank + 1), ("Previous", rank - 1))
        if 1 <= other <= source.n_ranked
    ]
    links = "\n".join([*around, f'<a href="#t{rank}">In the whole text</a>'])
    return f"""<section class="passage" id="p{rank}" aria-labelledby="p{rank}-heading">
<h4 id="p{rank}-heading"><span class="chip"><span class="hidden">Passage </span>{rank}</span>
<span>{format_share(passage.weight)} of the attention</span> <span class="where">{_place(passage, text)}</span></h4>
<blockquote class="text"><span class="context">{head}</span>{shaded}<span class="context">{tail}</span></blockquote>
<p class="links">
{links}
</p>
</section>
"""


def _place(passage: Passage, text: str) -> str:
    place = f"{passage.start / max(len(text), 1):.0%}"
    return "at the beginning" if place == "0%" else f"{place} into the text"


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


def _whole_text(source: _Source) -> str:
    text, done, parts = source.document.text, 0, []
    for ranked in sorted(source.passages, key=lambda ranked: (ranked.passage.start, ranked.rank)):
        passage, rank = ranked.passage, ranked.rank
        parts.append(escape_text(text[done : max(passage.start, done)]))
        sign = f'<sup><a href="#p{rank}" aria-label="Passage {rank}">{rank}</a></sup>'
        parts.append(f'<mark id="t{rank}" class="{ranked.level}">{sign}{_heat(source, passage, done)}</mark>')
        done = max(done, passage.end)
    parts.append(escape_text(text[done:]))
    return "".join(parts) if text.strip() else "<em>This document is empty.</em>"


def _heat(source: _Source, passage: Passage, done: int = 0) -> str:
    """A passage from ``done`` on, its words underlined by their attention."""
    start = max(passage.start, done)
    text = source.document.text[start : passage.end]
    levels = [0] * len(text)
    for low, high, weight in spans_within(source.document.spans, start, passage.end):
        level = _level(weight, source.peak, _TOKEN_LEVELS)
        for place in range(max(low - start, 0), min(high - start, len(text))):
            levels[place] = max(levels[place], level)
    place, parts = 0, []
    for level, run in groupby(_by_word(text, levels)):
        length = len(list(run))
        piece = escape_text(text[place : place + length])
        parts.append(f'<u class="{_LEVELS[level]}">{piece}</u>' if level else piece)
        place += length
    return "".join(parts)


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


def _figures(figures: Sequence[tuple[str, str]]) -> str:
    if not figures:
        return ""
    items = "\n".join(f"<div><dt>{escape_text(k)}</dt><dd>{escape_text(v)}</dd></div>" for k, v in figures)
    return f"""<section aria-labelledby="figures-heading">
<h2 id="figures-heading">What it cost</h2>
<dl class="figures">
{items}
</dl>
</section>
"""
