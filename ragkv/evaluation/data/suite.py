"""What a suite is made of, and what its loader is asked for: documents of a length, each with several questions.

A model gets ``layout.prefix + EvalDocument.text + layout.question`` with `Item.question` in its slot, nothing else; in
the plain layout::

    Read the document, then answer the question about it.

    {text}

    Question: {question}
    Short answer:

What `text` and `question` are is written at the loader of each suite. Lengths are in whatever `count_tokens` counts;
no document is longer than asked for.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ragkv.errors import ConfigError
from ragkv.text import read_text

BREAK = "\n\n"
"""What stands between paragraphs of a document."""

T = TypeVar("T")


@dataclass(frozen=True)
class Item:
    """A question; ``spans`` are (start, end) characters of gold answers in the document, where known."""

    question: str
    answers: tuple[str, ...]
    spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class EvalDocument:
    """A document and what is asked of it."""

    name: str
    text: str
    items: tuple[Item, ...]


@dataclass(frozen=True)
class Suite:
    """``metric`` is a key of `ragkv.evaluation.metrics.METRICS`; ``max_new_tokens`` leaves room for a wordy answer."""

    name: str
    metric: str
    documents: tuple[EvalDocument, ...]
    description: str
    max_new_tokens: int


def read_data(path: Path, expected: str, parse: Callable[[str], T], *, suite: str) -> T:
    """A data file, parsed; whatever is wrong with it becomes one sentence that names it.

    Raises
    ------
    ConfigError
        If there is no such file, it cannot be read, or `parse` finds it to be no file as `expected`.
    """
    if not path.is_file():
        raise ConfigError(f"suite {suite!r} needs {str(path)!r} ({expected}) and there is no such file")
    text = read_text(path)
    try:
        return parse(text)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{str(path)!r} is not {expected}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Request:
    """What a loader is asked for, and what loaders share."""

    name: str
    folder: Path
    n_documents: int
    items_per_document: int
    document_length: int
    count_tokens: Callable[[str], int]
    rng: random.Random

    def read(self, file: str, expected: str, parse: Callable[[str], T]) -> T:
        """A file of the folder, parsed."""
        return read_data(self.folder / file, expected, parse, suite=self.name)

    def choose(self, found: Sequence[T], what: str) -> list[T]:
        """`n_documents` of `found`, in their own order."""
        if len(found) < self.n_documents:
            raise ConfigError(f"suite {self.name!r} has {len(found)} {what} and {self.n_documents} are asked for")
        return [found[index] for index in sorted(self.rng.sample(range(len(found)), self.n_documents))]

    def fitting(self, build: Callable[[int], str], most: int, what: str) -> int:
        """The most parts, at least 1, with which ``build(n_parts)`` is not longer than asked for."""

        def length(n_parts: int) -> int:
            return self.count_tokens(build(n_parts))

        limit = 1
        while limit < most and length(limit) <= self.document_length:
            limit *= 2
        fits = bisect_right(range(1, min(limit, most) + 1), self.document_length, key=length)
        if fits == 0:
            raise ConfigError(
                f"suite {self.name!r}: {what} alone has length {length(1)} and documents of {self.document_length} "
                "are asked for; ask for longer ones"
            )
        return fits


def first_of(paragraphs: Sequence[str]) -> Callable[[int], str]:
    """The text of the first so many paragraphs."""
    return lambda n_paragraphs: BREAK.join(paragraphs[:n_paragraphs])


def evenly(items: Sequence[T], n: int, where: str) -> tuple[T, ...]:
    """`n` of `items` at even distances; `where` names what has too few."""
    if len(items) < n:
        raise ConfigError(f"{where} has {len(items)} questions to choose from and {n} are asked for; ask for fewer")
    return tuple(items[(2 * index + 1) * len(items) // (2 * n)] for index in range(n))
