"""The text that ``ragkv bench`` uses when none is given: the Python reference that ships with every Python.

It is long, real, offline, and the same for everybody with the same Python version.
"""

from __future__ import annotations

import re
from pathlib import Path
from pydoc_data.topics import topics

from ragkv.errors import ConfigError

QUESTIONS = (
    "Which exception does a failing assert statement raise?",
    "Which built-in variable does the simple form of the assert statement check?",
    "Which command line option makes the built-in variable __debug__ False?",
    "Which keyword is used to suspend the execution of a coroutine on an awaitable object?",
    "Which exception is raised when a name that is not bound is evaluated?",
    "What may a coroutine function definition use that is a syntax error elsewhere?",
    "Which two methods does the async for statement rely on?",
    "Which method is called unconditionally to implement attribute accesses for instances of a class?",
    "Which method is called when an attribute deletion is attempted?",
    "Which function may a module define to customize access to its attributes?",
    "Which class variable reserves space for declared variables and prevents the creation of __dict__?",
    "Which method is called to get the attribute of the owner class?",
    "Which operator is intended to be used for matrix multiplication?",
    "Which exception does a zero right argument of the division operator raise?",
    "With what sign does the modulo operator always yield a result?",
    "Which special method can an object use to customize its truth value?",
    "What does the operator not yield if its argument is false?",
    "Which statement terminates the nearest enclosing loop?",
    "Which name does an ellipsis literal give access to?",
    "What do code objects not contain a reference to?",
    "In what order are the items of an assignment target list assigned?",
    "What is the expression on the right of a starred target called or turned into?",
    "Which binary operation yields the bitwise exclusive or of its arguments?",
    "How many times is the target of an augmented assignment evaluated?",
)
_LONGEST_TOPIC = 30_000
_OPENING_WORDS = 8
_SENTENCE_WORDS = range(18, 61)


def default_text() -> str:
    """Reference topics in alphabetical order, the very long ones left out: about 310,000 characters."""
    return "\n\n".join(topics[name] for name in sorted(topics) if len(topics[name]) < _LONGEST_TOPIC)


def quotation_questions(text: str, n_questions: int = 12) -> tuple[str, ...]:
    """Questions that ask how a sentence of `text` goes on: look-ups that need no knowledge of what it says.

    The sentences are taken at even distances; none where the text has too few long ones.
    """
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
    sentences = (sentence for paragraph in paragraphs for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", paragraph))
    long = [
        sentence
        for sentence in sentences
        if len(sentence.split()) in _SENTENCE_WORDS and re.match(r"[A-Z][a-z].*[.!?]$", sentence)
    ]
    if len(long) < n_questions:
        return ()
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
