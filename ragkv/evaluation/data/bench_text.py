"""The text that ``ragkv bench`` uses when none is given: the Python reference that ships with every Python.

It is long, real, offline, and the same for everybody with the same Python version.
"""

from __future__ import annotations

import re
from pathlib import Path
from pydoc_data.topics import topics

from ragkv.errors import ConfigError

_LONGEST_TOPIC = 30_000
_OPENING_WORDS = 8
_SENTENCE_WORDS = range(18, 61)


def default_text() -> str:
    """Reference topics in alphabetical order, the very long ones left out: about 310,000 characters."""
    return "\n\n".join(topics[name] for name in sorted(topics) if len(topics[name]) < _LONGEST_TOPIC)


def quotation_questions(text: str, n_questions: int = 24) -> tuple[str, ...]:
    """Questions that ask how a sentence of `text` goes on: look-ups that need no knowledge of what it says.

    The sentences are taken at even distances.

    Raises
    ------
    ConfigError
        If the text has too few long sentences.
    """
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
    sentences = (sentence for paragraph in paragraphs for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", paragraph))
    long = [
        sentence
        for sentence in sentences
        if len(sentence.split()) in _SENTENCE_WORDS and re.match(r"[A-Z][a-z].*[.!?]$", sentence)
    ]
    if len(long) < n_questions:
        raise ConfigError(
            f"the text has {len(long)} sentences of {_SENTENCE_WORDS.start} to {_SENTENCE_WORDS.stop - 1} words and "
            f"{n_questions} are wanted; give --questions"
        )
    picked = (long[(2 * index + 1) * len(long) // (2 * n_questions)] for index in range(n_questions))
    openings = (" ".join(sentence.split()[:_OPENING_WORDS]) for sentence in picked)
    return tuple(f'How does the sentence go on that begins "{opening}"?' for opening in openings)


def read_text(path: str | Path) -> str:
    """A document file as text.

    Raises
    ------
    ConfigError
        If the file cannot be read or is not UTF-8.
    """
    try:
        return Path(path).read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{str(path)!r} is not UTF-8 text (byte {error.start}); convert it first") from error
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}") from error


def read_questions(path: str | Path) -> tuple[str, ...]:
    """Questions from a text file, one a line; empty lines are skipped."""
    lines = tuple(line.strip() for line in read_text(path).splitlines() if line.strip())
    if not lines:
        raise ConfigError(f"{str(path)!r} holds no questions; write one a line")
    return lines
