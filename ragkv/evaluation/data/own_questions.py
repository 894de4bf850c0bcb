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

N_CONTINUATIONS = 12
N_LOOK_UPS = 12

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
# Closing quotes and brackets: Latin, then full-width.
_CLOSERS = "\"'\u201d\u2019\u00bb)\\]\u300d\u300f\uff09\u300b\u3011"
_WIDE_STOPS = "\u3002\uff01\uff1f"  # full stop, exclamation and question mark of Chinese and Japanese
_STOPS = "!?\u061f\u0964"
# A quotation that ends in other than a full stop may be followed by who said it, so no sentence ends for sure there.
_SENTENCE_END = re.compile(
    rf"(?:(?<!\.)\.[{_CLOSERS}]*|[{_STOPS}]+)(?P<gap>\s+)(?=\S)|[{_WIDE_STOPS}]+(?P<wide_gap>\s*)(?=[^\s{_CLOSERS}])"
)
_ENDS_SENTENCE = re.compile(rf"[.{_STOPS}{_WIDE_STOPS}\u2026][{_CLOSERS}]*$")
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\"'\u201c\u2018])(?:[^\W\d_]|(?:[^\W\d_]\.)+[^\W\d_]|Mrs?|Ms|Dr|Prof|St|Sr|Jr|Lt|Col|Gen|Capt|Rev|Hon|Mt|"
    r"Nos?|Vol|Figs?|Eq|Sec|Ch|pp?|cf|vs|al|approx|ca|Inc|Ltd|Co|Corp|Jan|Feb|Aug|Sept?|Oct|Nov|Dec)\.$"
)
# Scripts that are written without spaces between words: kana, Chinese characters.
_UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")

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
    """``document`` with the facts in it, and both kinds of questions in the order of the document.

    ``description`` says in a few sentences what the questions are, for a report.
    """

    document: str
    continuations: tuple[Continuation, ...]
    look_ups: tuple[LookUp, ...]
    description: str


@dataclass(frozen=True)
class _Border:
    """A place where a fact fits: after character ``end``, set apart by ``gap`` like its neighbours are."""

    end: int
    gap: str


def make_questions(
    document: str, *, n_continuations: int = N_CONTINUATIONS, n_look_ups: int = N_LOOK_UPS, seed: int = 0
) -> OwnQuestions:
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
    spans = list(_pieces(document))
    borders = _pick_borders(document, spans, n_look_ups)
    planted, look_ups = _plant(document, borders, random.Random(seed))
    continuations = tuple(_continuations(document, spans, n_continuations, borders, look_ups))
    return OwnQuestions(
        document=planted,
        continuations=continuations,
        look_ups=look_ups,
        description=_describe(len(continuations), len(look_ups), seed),
    )


def _describe(n_continuations: int, n_look_ups: int, seed: int) -> str:
    return (
        f"No questions were given, so {n_continuations + n_look_ups} were made from the document: "
        f"{n_continuations} ask how one of its own sentences goes on, and {n_look_ups} ask for the six digits of an "
        f"invented fact that was planted in the document for this purpose (seed {seed}); both are spread evenly over "
        "it. They show whether text can be found again, not whether it is understood: questions of your own are the "
        "better guide."
    )


def _pieces(text: str) -> Iterator[tuple[int, int]]:
    """(start, end) of sentences and what else stays whole, without the white space between them."""
    for start, end in _split(text, 0, len(text), _BLANK_LINE):
        for sentence in _sentences(text, start, end):
            yield from _split_long(text, *sentence, (_LINE_END, _SPACES))


def _split_long(text: str, start: int, end: int, ways: tuple[re.Pattern[str], ...]) -> Iterator[tuple[int, int]]:
    """The span itself, or its parts where it is too long to be a sentence."""
    limit = _LONGEST_SENTENCE if _ENDS_SENTENCE.search(text, max(start, end - 8), end) else _LONGEST_OTHER
    if end - start <= limit or not ways:
        yield start, end
        return
    for part in _split(text, start, end, ways[0]):
        yield from _split_long(text, *part, ways[1:])


def _split(text: str, start: int, end: int, separator: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    """Spans between matches of `separator` in text[start:end], the empty ones left out and the rest stripped."""
    cuts = [(match.start(), match.end()) for match in separator.finditer(text, start, end)]
    for left, right in zip([start, *(after for _, after in cuts)], [*(before for before, _ in cuts), end], strict=True):
        part = text[left:right]
        if part.strip():
            yield left + len(part) - len(part.lstrip()), right - len(part) + len(part.rstrip())


def _sentences(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    begin = start
    for match in _SENTENCE_END.finditer(text, start, end):
        wide = match["wide_gap"] is not None
        border = match.start("wide_gap" if wide else "gap")
        if not wide and (text[match.end()].islower() or _is_no_end(text, begin, border)):
            continue
        yield begin, border
        begin = match.end()
    if begin < end:
        yield begin, end


def _is_no_end(text: str, begin: int, border: int) -> bool:
    """Whether the full stop before `border` belongs to an abbreviation or to the number of a list item."""
    only_number = not any(character.isalpha() for character in text[begin:border])
    return only_number or _ABBREVIATION.search(text, max(0, border - 16), border) is not None


def _pick_borders(text: str, spans: list[tuple[int, int]], wanted: int) -> list[_Border]:
    """Distinct borders nearest to even distances over the text, fewer where it is short."""
    ends = [end for _, end in spans]
    gaps = [text[end:start] for end, (start, _) in zip(ends, spans[1:], strict=False)]
    last = text[ends[-1] :] or ("" if _UNSPACED.search(text, ends[-1] - 4) else " ")
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
    text: str, spans: list[tuple[int, int]], count: int, borders: list[_Border], look_ups: tuple[LookUp, ...]
) -> Iterator[Continuation]:
    """Sentences at even distances whose opening stands in the text once, placed in the text with the facts."""
    plain = " ".join(text.split())
    candidates = []
    for start, end in spans:
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
    if not _ENDS_SENTENCE.search(sentence) or not sentence[0].isalpha() or sentence[0].islower():
        return 0
    if 2 * len(_UNSPACED.findall(sentence)) > len(sentence):
        return _OPENING_CHARS if len(sentence) in _SENTENCE_CHARS else 0
    words = sentence.split(" ")
    return len(" ".join(words[:_OPENING_WORDS])) if len(words) in _SENTENCE_WORDS else 0
