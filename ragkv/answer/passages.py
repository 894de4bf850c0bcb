"""From attention per token to passages that a person can read.

Weights come per token and are spiky: a name, a full stop, the line break after it. A reader wants sentences. Nothing
here knows of models: characters and numbers in, dataclasses out.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from ragkv.text import sentences, trimmed

Span = tuple[int, int, float]

# A unit longer than this many targets (a table, text without punctuation) is cut into pieces of about one target.
_LONG = 2
# A sentence at the edge of a passage stays only if it is at least this dense, next to the rest of the passage.
_EDGE_DENSITY = 0.25
_WORD_START = re.compile(r"\S")


@dataclass(frozen=True)
class Passage:
    """A readable stretch of a source document.

    ``start`` and ``end`` are character offsets into the document's text; ``weight`` is the share (0..1) of all
    recalled document attention of the answer that fell on it.
    """

    start: int
    end: int
    weight: float
    text: str


@dataclass(frozen=True)
class DocumentEvidence:
    """What an answer looked at in one document.

    ``share`` is the part (0..1) of the attention on all documents that this one received, ``spans`` the (start, end,
    weight) of its tokens in order, whose weights sum to ``share``; ``passages`` come best first.
    """

    name: str
    text: str
    share: float
    spans: tuple[Span, ...]
    passages: tuple[Passage, ...]

    def to_dict(self) -> dict[str, Any]:
        """Name, share and passages as plain values; not the text and its spans."""
        return {"document": self.name, "share": self.share, "passages": [asdict(each) for each in self.passages]}


def merge_passages(
    text: str, spans: Sequence[Span], *, n_passages: int = 3, target_chars: int = 240
) -> tuple[Passage, ...]:
    """Choose the passages of `text` that received most attention: whole sentences, apart from each other, best first.

    The rule: among all runs of neighbouring sentences that fit into `target_chars`, take the one with the most weight,
    drop sentences at its edges that carry little of it, and go on with what is left. A sentence longer than the target
    counts as the weight of `target_chars` of it, so that length alone wins nothing. Tokens without a letter or digit
    do not count in the choice, because punctuation and line breaks collect attention without meaning
    ("attention sinks", Xiao et al. 2023), unless nothing else has weight; the weight of a passage counts every token.

    Parameters
    ----------
    spans
        (start, end, weight) of tokens in order of ``start``; there may be gaps and tokens of one character.
        A token across a border counts for the sentence it begins in.

    Returns
    -------
    Passages by weight, heaviest first, ties by position; none where no weight is. Their weights sum to at most that of
    `spans`.
    """
    if n_passages < 1 or target_chars < 1 or not spans:
        return ()
    units = list(_units(text, spans, target_chars))
    if not units:
        return ()
    meaningful = [weight if _has_word(text[start:end]) else 0.0 for start, end, weight in spans]
    if not any(weight > 0 for weight in meaningful):
        meaningful = [weight for _, _, weight in spans]
    places = _places(text, spans)
    scored = _Scored(
        units,
        [bisect_left(places, start) for start, _ in units],
        [bisect_left(places, end) for _, end in units],
        _running(meaningful),
        target_chars,
    )
    total = _running([weight for _, _, weight in spans])
    found = []
    for first, last in scored.best_runs(n_passages):
        start, end = units[first][0], units[last][1]
        weight = total[scored.after_span[last]] - total[scored.first_span[first]]
        found.append(Passage(start, end, max(weight, 0.0), text[start:end]))
    return tuple(sorted(found, key=lambda passage: (-passage.weight, passage.start)))


def sentence_runs(text: str, *, target_chars: int = 240) -> tuple[tuple[int, int], ...]:
    """All that `merge_passages` chooses among, without weights: from each sentence the longest run that fits.

    (start, end) characters in order of ``start``; a sentence longer than `target_chars` is a run by itself. For other
    ways of choosing passages, which should have the same choice.
    """
    units = list(_units(text, (), target_chars)) if target_chars > 0 else []
    scored = _Scored(units, [], [], [], target_chars)
    return tuple((units[first][0], units[last][1]) for first, last in scored.runs([True] * len(units)))


@dataclass(frozen=True)
class _Scored:
    """Units (stretches of text) and the running sums that score any run of them in constant time.

    Tokens ``first_span[i]`` up to, not including, ``after_span[i]`` begin in unit i; ``running`` has the summed weights
    of the tokens before each.
    """

    units: list[tuple[int, int]]
    first_span: list[int]
    after_span: list[int]
    running: list[float]
    target: int

    def mass(self, first: int, last: int) -> float:
        return self.running[self.after_span[last]] - self.running[self.first_span[first]]

    def length(self, first: int, last: int) -> int:
        return self.units[last][1] - self.units[first][0]

    def density(self, first: int, last: int) -> float:
        return self.mass(first, last) / self.length(first, last)

    def best_runs(self, n_runs: int) -> Iterator[tuple[int, int]]:
        """The runs chosen, as first and last unit; each round takes the best of what earlier rounds left free."""
        free = [True] * len(self.units)
        for _ in range(n_runs):
            best, best_score = None, 0.0
            for first, last in self.runs(free):
                score = self.mass(first, last) * min(1.0, self.target / self.length(first, last))
                if score > best_score * (1 + 1e-9):  # else a rounding error would decide a tie, not the position
                    best, best_score = (first, last), score
            if best is None:
                return
            first, last = self._trim(*best)
            free[first : last + 1] = [False] * (last + 1 - first)
            yield first, last

    def runs(self, free: list[bool]) -> Iterator[tuple[int, int]]:
        """For each free unit the longest run from there that fits; a unit too long by itself is a run."""
        last = 0
        for first, is_free in enumerate(free):
            last = max(last, first)
            if is_free:
                while last + 1 < len(free) and free[last + 1] and self.length(first, last + 1) <= self.target:
                    last += 1
                yield first, last

    def _trim(self, first: int, last: int) -> tuple[int, int]:
        while first < last and self.density(first, first) < _EDGE_DENSITY * self.density(first + 1, last):
            first += 1
        while first < last and self.density(last, last) < _EDGE_DENSITY * self.density(first, last - 1):
            last -= 1
        return first, last


def _units(text: str, spans: Sequence[Span], target: int) -> Iterator[tuple[int, int]]:
    """Sentences without the white space around them, the long ones in pieces."""
    starts = [span[0] for span in spans]
    for start, end in sentences(text):
        if end - start > _LONG * target:
            yield from _pieces(text, start, end, starts, target)
        else:
            yield start, end


def _pieces(text: str, start: int, end: int, borders: list[int], target: int) -> Iterator[tuple[int, int]]:
    """Cut at line breaks, else at white space, else between tokens; anywhere only if there is nothing else."""
    while end - start > target * 5 // 4:
        cut = _cut(text, start, end, borders, target)
        first, last = trimmed(text, start, cut)
        if last > first:
            yield first, last
        start = trimmed(text, cut, end)[0]
    if end > start:
        yield start, end


def _cut(text: str, start: int, end: int, borders: list[int], target: int) -> int:
    least, most = start + target // 2 + 1, start + target
    line = text.rfind("\n", least, most)
    if line >= 0:
        return line
    for place in range(most, least - 1, -1):
        if text[place].isspace():
            return place
    for place in (*range(least - 1, start, -1), *range(most + 1, min(start + _LONG * target, end))):
        if text[place].isspace():
            return place
    index = bisect_right(borders, most) - 1
    if index >= 0 and borders[index] > start:
        return borders[index]
    index += 1
    return borders[index] if index < len(borders) and borders[index] < min(start + _LONG * target, end) else most


def _places(text: str, spans: Sequence[Span]) -> list[int]:
    """Where each token's first character that is no white space stands, never going back.

    Tokens often begin with the space before their word; that space belongs to no sentence.
    """
    words = (_WORD_START.search(text, start, end) for start, end, _ in spans)
    return list(accumulate((word.start() if word else span[0] for word, span in zip(words, spans, strict=True)), max))


def _running(weights: Sequence[float]) -> list[float]:
    return list(accumulate(weights, initial=0.0))


def _has_word(text: str) -> bool:
    return any(character.isalnum() for character in text)


def spans_within(spans: Sequence[Span], start: int, end: int) -> list[Span]:
    """The tokens of `spans`, sorted, that reach into [start, end)."""
    low = bisect_left(spans, start, key=_start)
    while low > 0 and spans[low - 1][1] > start:
        low -= 1
    return [span for span in spans[low : bisect_left(spans, end, key=_start)] if span[1] > start]


def _start(span: Span) -> int:
    return span[0]
