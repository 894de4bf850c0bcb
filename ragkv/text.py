"""Text as it comes from people: files of it, where its sentences end, and scripts that have no spaces."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ragkv.errors import ConfigError

UNSPACED = re.compile("[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
"""A character of a script that is written without spaces between words: kana, Chinese characters."""

# Also the ellipsis, the Arabic question mark, the full stop of Urdu and that of Devanagari.
STOPS = r".!?\u2026\u061f\u06d4\u0964"
WIDE_STOPS = r"\u3002\uff01\uff1f"
_CLOSERS = r"\"'\u201d\u2019\u00bb)\]"
_WIDE_CLOSERS = r"\u300d\u300f\u201d\u2019\uff09\u300b\u3011"
# A full stop ends a sentence before white space, one of Chinese or Japanese anywhere; closing quotes belong to it.
_BORDER = re.compile(rf"[{STOPS}]+[{_CLOSERS}]*(?=\s|\Z)|[{WIDE_STOPS}]+[{_WIDE_CLOSERS}]*|\n")
_ENDS_SENTENCE = re.compile(rf"[{STOPS}{WIDE_STOPS}][{_CLOSERS}{_WIDE_CLOSERS}]*\Z")
_CLOSER = re.compile(f"[{_CLOSERS}{_WIDE_CLOSERS}]")
_QUOTES = "\"'\u201d\u2019\u00bb"
# The full stop after an initial, a title or the like ends nothing. Nor does that of a list item's number.
_ABBREVIATION = re.compile(
    r"(?:(?<![^\W_])[^\W\d_]|\b(?:Mrs?|Ms|Dr|Prof|St|Sr|Jr|Lt|Col|Gen|Capt|Rev|Hon|Mt|Nos?|Vol|Figs?|Eq|Sec|Ch|pp|cf|vs"
    r"|al|approx|ca|Inc|Ltd|Co|Corp|Jan|Feb|Aug|Sept?|Oct|Nov|Dec))\Z"
)
_LIST_NUMBER = re.compile(r"\s*\d{1,3}")
# How far back an abbreviation, and how far back the beginning of a line, is looked for.
_ABBREVIATION_CHARS = 12
_LINE_CHARS = 400
# Lines at least this long that go on in lower case were wrapped by a text editor; shorter ones are lists and headings.
_WRAPPED_LINE = 40
_WORD_START = re.compile(r"\S")


def read_text(path: str | Path) -> str:
    """A document file as text; a byte order mark at its beginning is no part of it.

    Raises
    ------
    ConfigError
        If the file cannot be read or is not UTF-8.
    """
    try:
        return Path(path).read_bytes().decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{str(path)!r} is not UTF-8 text (byte {error.start}); convert it first") from error
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}") from error


def read_questions(path: str | Path) -> tuple[str, ...]:
    """Questions from a text file, one a line; empty lines are skipped.

    Raises
    ------
    ConfigError
        As `read_text`, or if there are none.
    """
    lines = tuple(line.strip() for line in read_text(path).splitlines() if line.strip())
    if not lines:
        raise ConfigError(f"{str(path)!r} holds no questions; write one a line")
    return lines


def sentences(text: str, start: int = 0, end: int | None = None, *, certain: bool = False) -> Iterator[tuple[int, int]]:
    """(start, end) characters of the sentences in ``text[start:end]``, without the white space around them.

    To read by, a line is a sentence too unless an editor wrapped it. With `certain` only what ends for sure counts, so
    that something may be put between: lines do not end a sentence, nor does a stop before a small letter, an ellipsis,
    or a quotation that who said it may follow.
    """
    begin = start
    for border in _borders(text, start, len(text) if end is None else end, certain=certain):
        found = trimmed(text, begin, border)
        begin = border
        if found[0] < found[1]:
            yield found


def trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """The span without the white space at its ends; an empty one where there is nothing else."""
    word = _WORD_START.search(text, start, end)
    if word is None:
        return end, end
    while text[end - 1].isspace():
        end -= 1
    return word.start(), end


def ends_sentence(text: str) -> bool:
    """Whether the last thing in `text` is the end of a sentence, quotes and brackets after it included."""
    return _ENDS_SENTENCE.search(text, max(0, len(text) - 8)) is not None


def _borders(text: str, start: int, end: int, *, certain: bool) -> Iterator[int]:
    """Where sentences end, `end` included."""
    begin = start
    for match in _BORDER.finditer(text, start, end):
        if not (certain and _is_doubtful(text, match)) and not _is_inside(text, match, begin):
            yield match.end()
            begin = match.end()
    yield end


def _is_doubtful(text: str, match: re.Match[str]) -> bool:
    mark, word = match[0], _WORD_START.search(text, match.end())
    following = "" if word is None else word[0]
    is_ellipsis = ".." in mark or "\u2026" in mark
    is_quotation = not mark.startswith(".") and _CLOSER.search(mark) is not None
    return mark == "\n" or is_ellipsis or is_quotation or following.islower() or _CLOSER.match(following) is not None


def _is_inside(text: str, match: re.Match[str], begin: int) -> bool:
    """Whether a reader would read on over this border; `begin` is where the last one was."""
    place, mark = match.start(), match[0]
    limit = max(place - _LINE_CHARS, 0)
    line_start = max(text.rfind("\n", limit, place) + 1, limit)
    following = text[match.end() : match.end() + _ABBREVIATION_CHARS].lstrip(" \t\r")[:1]
    if mark == "\n":
        line = text[line_start:place].rstrip()
        return len(line) >= _WRAPPED_LINE and following.islower() and not _BORDER.search(line, len(line) - 1)
    if mark == ".":
        before = text[max(line_start, place - _ABBREVIATION_CHARS) : place]
        return bool(_ABBREVIATION.search(before) or _LIST_NUMBER.fullmatch(text, max(line_start, begin), place))
    # A question in quotes, after which the sentence goes on.
    return mark[-1] in _QUOTES and following.islower()
