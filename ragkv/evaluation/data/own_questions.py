"""Questions that calibration makes from a document when the user has none: how sentences go on, and planted facts.

Both have a known answer and need no knowledge of what the document says. A planted fact stands in the document once
and cannot be guessed; a continuation is ordinary text of the document, which a model partly guesses.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ragkv.errors import ConfigError
from ragkv.text import UNSPACED, ends_sentence, sentences, trimmed

# A planted fact is about 60 characters: this keeps the document mostly its own text.
_CHARS_PER_PLANT = 400
# Longer than this, text with a full stop at its end is not a sentence (a log, a table); shorter text without one may
# be a heading or the line before a list, and stays whole.
_LONGEST_SENTENCE = 2_000
_LONGEST_OTHER = 300

_OPENING_WORDS = 8
_SENTENCE_WORDS = range(18, 61)
_OPENING_CHARS = 12
_SENTENCE_CHARS = range(25, 151)

_BLANK_LINE = re.compile(r"\n\s*\n")
_LINE_END = re.compile(r"\n\s*")
_SPACES = re.compile(r"\s+")

_ONSETS = ("b", "br", "d", "dr", "f", "g", "gr", "k", "kl", "l", "m", "n", "p", "pl", "r", "s", "st", "t", "tr", "v")
_VOWELS = ("a", "e", "i", "o", "u")
_CODAS = ("l", "m", "n", "r", "s", "t", "x", "lk", "nd", "rv")
_MAX_DRAWS = 10_000


@dataclass(frozen=True)
class Continuation:
    """A sentence that begins at character ``start`` of the document: its opening is asked, ``answer`` is the rest."""

    question: str
    answer: str
    start: int


@dataclass(frozen=True)
class LookUp:
    """An invented fact that stands once in the document, at character ``start``, and the question for its digits."""

    question: str
    answer: str
    fact: str
    start: int


@dataclass(frozen=True)
class OwnQuestions:
    """``document`` with the facts in it, and both kinds of questions in the order of the document."""

    document: str
    continuations: tuple[Continuation, ...]
    look_ups: tuple[LookUp, ...]


@dataclass(frozen=True)
class _Border:
    """A place where a fact fits: after character ``end``, set apart by ``gap`` like its neighbours are."""

    end: int
    gap: str


def make_questions(document: str, *, n_continuations: int = 12, n_look_ups: int = 12, seed: int = 0) -> OwnQuestions:
    """Make questions with known answers from `document`, at even distances over it; the same for the same seed.

    Facts stand between sentences; where text has none, between its lines, or its words. A short document gets fewer
    facts (one for each 400 characters, at least one), and one with few sentences fewer continuations.

    Raises
    ------
    ConfigError
        If the document is empty or a number is negative.
    """
    if not document.strip():
        raise ConfigError("the document is empty: no questions can be made from it; give some text")
    if min(n_continuations, n_look_ups) < 0:
        raise ConfigError(
            f"{n_continuations} continuations and {n_look_ups} look-ups are asked; give 0 or more of each"
        )
    pieces = list(_pieces(document))
    borders = _pick_borders(document, pieces, n_look_ups)
    planted, look_ups = _plant(document, borders, random.Random(seed))
    continuations = tuple(_continuations(document, pieces, n_continuations, borders, look_ups))
    return OwnQuestions(planted, continuations, look_ups)


def quotation_questions(text: str, n_questions: int = 24) -> tuple[str, ...]:
    """Questions that ask how a sentence of `text` goes on: look-ups that need no knowledge of what it says.

    Raises
    ------
    ConfigError
        If the text has too few long sentences.
    """
    made = make_questions(text, n_continuations=n_questions, n_look_ups=0).continuations
    if len(made) < n_questions:
        raise ConfigError(
            f"the text has {len(made)} sentences of {_SENTENCE_WORDS.start} to {_SENTENCE_WORDS.stop - 1} words that "
            f"begin like no other and {n_questions} are wanted; give --questions"
        )
    return tuple(each.question for each in made)


def _pieces(text: str) -> Iterator[tuple[int, int]]:
    """(start, end) of sentences and what else stays whole, without the white space between them."""
    for start, end in _split(text, 0, len(text), _BLANK_LINE):
        for sentence in sentences(text, start, end, certain=True):
            yield from _split_long(text, *sentence, (_LINE_END, _SPACES))


def _split_long(text: str, start: int, end: int, ways: tuple[re.Pattern[str], ...]) -> Iterator[tuple[int, int]]:
    """The piece itself, or its parts where it is too long to be a sentence."""
    limit = _LONGEST_SENTENCE if ends_sentence(text[max(start, end - 8) : end]) else _LONGEST_OTHER
    if end - start <= limit or not ways:
        yield start, end
        return
    for part in _split(text, start, end, ways[0]):
        yield from _split_long(text, *part, ways[1:])


def _split(text: str, start: int, end: int, separator: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    """Pieces between matches of `separator` in text[start:end], the empty ones left out and the rest trimmed."""
    cuts = [(match.start(), match.end()) for match in separator.finditer(text, start, end)]
    for before, after in [*cuts, (end, end)]:
        piece = trimmed(text, start, before)
        start = after
        if piece[0] < piece[1]:
            yield piece


def _pick_borders(text: str, pieces: list[tuple[int, int]], wanted: int) -> list[_Border]:
    """Distinct borders nearest to even distances over the text, fewer where it is short."""
    ends = [end for _, end in pieces]
    gaps = [text[end:start] for end, (start, _) in zip(ends, pieces[1:], strict=False)]
    last = text[ends[-1] :] or ("" if UNSPACED.search(text, ends[-1] - 4) else " ")
    borders = [_Border(end=end, gap=gap) for end, gap in zip(ends, [*gaps, last], strict=True)]
    count = min(wanted, max(1, len(text) // _CHARS_PER_PLANT), len(borders))
    chosen: set[int] = set()
    nearest = 0
    for plant in range(count):
        target = (2 * plant + 1) * len(text) // (2 * count)
        while nearest + 1 < len(ends) and abs(ends[nearest + 1] - target) <= abs(ends[nearest] - target):
            nearest += 1
        chosen.add(nearest)
    return [borders[index] for index in sorted(chosen)]


def _plant(text: str, borders: list[_Border], rng: random.Random) -> tuple[str, tuple[LookUp, ...]]:
    """The text with one invented fact at each border, and the look-ups with their places in the new text."""
    names = [f"{first} {second}" for first, second in _pairs(text, rng, len(borders))]
    codes = _fresh(text, len(borders), lambda: f"{rng.randrange(100_000, 1_000_000)}")
    parts: list[str] = []
    look_ups: list[LookUp] = []
    begin = length = 0
    for border, name, code in zip(borders, names, codes, strict=True):
        fact = f"The archive code of {name} is {code}."
        before = text[begin : border.end] + border.gap
        look_ups.append(
            LookUp(question=f"What is the archive code of {name}?", answer=code, fact=fact, start=length + len(before))
        )
        parts += [before, fact]
        length += len(before) + len(fact)
        begin = border.end
    return "".join([*parts, text[begin:]]), tuple(look_ups)


def _pairs(text: str, rng: random.Random, count: int) -> list[tuple[str, str]]:
    words = _fresh(text, 2 * count, lambda: _word(rng))
    return list(zip(words[::2], words[1::2], strict=True))


def _word(rng: random.Random) -> str:
    return "".join(rng.choice(letters) for letters in (_ONSETS, _VOWELS, _CODAS) * 2).capitalize()


def _fresh(text: str, count: int, draw: Callable[[], str]) -> list[str]:
    """`count` different draws that stand nowhere in the text, in whatever case."""
    folded = text.casefold()
    found: list[str] = []
    for _ in range(_MAX_DRAWS):
        if len(found) == count:
            break
        word = draw()
        if word not in found and word.casefold() not in folded:
            found.append(word)
    if len(found) < count:
        raise ConfigError(f"no {count} invented words or codes were found that the document lacks; give questions")
    return found


def _continuations(
    text: str, pieces: list[tuple[int, int]], count: int, borders: list[_Border], look_ups: tuple[LookUp, ...]
) -> Iterator[Continuation]:
    """Sentences at even distances whose opening stands in the text once, placed in the text with the facts."""
    plain = " ".join(text.split())
    candidates = []
    for start, end in pieces:
        sentence = " ".join(text[start:end].split())
        cut = _opening_length(sentence)
        if cut and plain.count(sentence[:cut]) == 1:
            candidates.append((start, sentence[:cut], sentence[cut:].strip()))
    count = min(count, len(candidates))
    for index in range(count):
        start, opening, rest = candidates[(2 * index + 1) * len(candidates) // (2 * count)]
        shift = sum(
            len(border.gap) + len(look_up.fact)
            for border, look_up in zip(borders, look_ups, strict=True)
            if border.end <= start
        )
        question = f'How does the sentence go on that begins "{opening}"?'
        yield Continuation(question=question, answer=rest, start=start + shift)


def _opening_length(sentence: str) -> int:
    """Characters of the opening that is asked; 0 where the text is no sentence or its length is unusual."""
    if not ends_sentence(sentence) or not sentence[0].isalpha() or sentence[0].islower():
        return 0
    if 2 * len(UNSPACED.findall(sentence)) > len(sentence):
        return _OPENING_CHARS if len(sentence) in _SENTENCE_CHARS else 0
    words = sentence.split(" ")
    return len(" ".join(words[:_OPENING_WORDS])) if len(words) in _SENTENCE_WORDS else 0
