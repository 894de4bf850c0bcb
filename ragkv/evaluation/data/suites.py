"""Evaluation suites: files of public data sets on disk become long documents, each with several questions.

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

import json
import random
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ragkv.errors import ConfigError
from ragkv.evaluation.data.babi import BabiStory, Place, parse_stories, simulate, weave
from ragkv.evaluation.data.squality import key_entities, parse_squality
from ragkv.text import read_text

KV_INTRODUCTION = "The JSON object below holds {n_pairs} keys, one on each line with its value."
KV_QUESTION = 'What is the value of the key "{key}"?'
BABI_INTRODUCTION = "A story follows. Between its sentences stand short facts about people who move and carry things."
PERSON_QUESTION = "Where is {subject}?"
THING_QUESTION = "Where is the {subject}?"
SUMMARY_QUESTION = "What happens in this story? Summarise it in a few sentences and name the people and places."

_BREAK = "\n\n"
_SENTENCE_ENDS = (".", "!", "?", '"', "\u201d")
_SQUALITY_FILE = "squality_dev10.jsonl"
_SQUALITY = "SQuALITY records, one a line with 'document' and 'questions'"
T = TypeVar("T")


@dataclass(frozen=True)
class Item:
    """A question; ``spans`` are (start, end) characters of gold answers in the document, where known."""

    question: str
    answers: tuple[str, ...]
    spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class EvalDocument:
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


@dataclass(frozen=True)
class _Request:
    name: str
    folder: Path
    n_documents: int
    items_per_document: int
    document_length: int
    count_tokens: Callable[[str], int]
    rng: random.Random

    def read(self, file: str, expected: str, parse: Callable[[str], T]) -> T:
        """A file of the folder, parsed; whatever is wrong with it becomes one sentence that names it."""
        path = self.folder / file
        if not path.is_file():
            raise ConfigError(f"suite {self.name!r} needs {str(path)!r} ({expected}) and there is no such file")
        text = read_text(path)
        try:
            return parse(text)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{str(path)!r} is not {expected}: {type(error).__name__}: {error}") from error

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


def load_suite(
    name: str,
    folder: str | Path,
    *,
    n_documents: int,
    items_per_document: int,
    document_length: int,
    count_tokens: Callable[[str], int] = len,
    seed: int = 0,
) -> Suite:
    """Documents and questions of one of `SUITES`, the same for the same arguments.

    Parameters
    ----------
    folder
        Holds the data files; each loader names the one or two that it reads.
    items_per_document
        Questions for each document; ``squality-entities`` always asks one.
    document_length
        The most that a document may have, in units of `count_tokens`; characters by default.

    Raises
    ------
    ConfigError
        If the suite is unknown, a file is missing or has another shape, documents cannot be so short, or there are
        fewer documents or questions than asked for.
    """
    if name not in _LOADERS:
        raise ConfigError(f"there is no suite {name!r}; take one of {', '.join(SUITES)}")
    for label, value in (
        ("n_documents", n_documents),
        ("items_per_document", items_per_document),
        ("document_length", document_length),
    ):
        if value < 1:
            raise ConfigError(f"{label} is {value}; give at least 1")
    request = _Request(
        name=name,
        folder=Path(folder),
        n_documents=n_documents,
        items_per_document=items_per_document,
        document_length=document_length,
        count_tokens=count_tokens,
        rng=random.Random(seed),
    )
    return _LOADERS[name](request)


def _xquad(request: _Request) -> Suite:
    """Text: consecutive paragraphs of ``xquad.{language}.json``, a blank line between them. Question: the file's own.

    Documents share no paragraph. The last one of the file is used only if it is at least half as long as asked for.
    """
    language = request.name.removeprefix("xquad-")
    paragraphs = request.read(f"xquad.{language}.json", "a file in SQuAD format", _squad_paragraphs)
    chosen = request.choose(_consecutive(request, paragraphs), f"documents of length {request.document_length}")
    return Suite(
        name=request.name,
        metric="squad" if language == "en" else "squad_zh",
        documents=tuple(_xquad_document(request, first, paragraphs[first:end]) for first, end in chosen),
        description="Consecutive XQuAD paragraphs; short answers are read off the text; scored by exact match and F1.",
        max_new_tokens=32,
    )


def _squad_paragraphs(text: str) -> list[EvalDocument]:
    """Paragraphs of a SQuAD file as small documents."""
    paragraphs = [paragraph for article in json.loads(text)["data"] for paragraph in article["paragraphs"]]
    return [
        EvalDocument(str(index), paragraph["context"], tuple(map(_squad_item, paragraph["qas"])))
        for index, paragraph in enumerate(paragraphs)
        if _checked_answers(paragraph)
    ]


def _squad_item(asked: dict[str, Any]) -> Item:
    answers = asked["answers"]
    return Item(
        question=asked["question"],
        answers=tuple(answer["text"] for answer in answers),
        spans=tuple((a["answer_start"], a["answer_start"] + len(a["text"])) for a in answers),
    )


def _checked_answers(paragraph: dict[str, Any]) -> bool:
    for asked in paragraph["qas"]:
        if not asked["answers"]:
            raise ValueError(f"the question {asked['question']!r} has no answer")
        for answer in asked["answers"]:
            if not paragraph["context"].startswith(answer["text"], answer["answer_start"]):
                raise ValueError(f"the answer {answer['text']!r} is not at {answer['answer_start']} of its paragraph")
    return bool(paragraph["qas"])


def _consecutive(request: _Request, paragraphs: Sequence[EvalDocument]) -> list[tuple[int, int]]:
    """(first, end) of the runs of paragraphs that fill a document, one run after another."""
    runs, first = [], 0
    texts = [paragraph.text for paragraph in paragraphs]
    while first < len(texts):
        rest = texts[first:]
        end = first + request.fitting(_first_of(rest), len(rest), f"paragraph {first}")
        runs.append((first, end))
        first = end
    if runs and 2 * request.count_tokens(_BREAK.join(texts[runs[-1][0] :])) < request.document_length:
        runs.pop()
    return runs


def _xquad_document(request: _Request, first: int, paragraphs: Sequence[EvalDocument]) -> EvalDocument:
    name = f"{request.name}-{first:03d}-{first + len(paragraphs) - 1:03d}"
    by_paragraph: list[list[Item]] = []
    start = 0
    for paragraph in paragraphs:
        items = request.rng.sample(paragraph.items, len(paragraph.items))
        by_paragraph.append([_shifted(item, start) for item in items])
        start += len(paragraph.text) + len(_BREAK)
    asked = _in_turn(by_paragraph, request.items_per_document, f"document {name!r}")
    return EvalDocument(name, _BREAK.join(paragraph.text for paragraph in paragraphs), asked)


def _shifted(item: Item, by: int) -> Item:
    return replace(item, spans=tuple((start + by, end + by) for start, end in item.spans))


def _kv75(request: _Request) -> Suite:
    """Text: `KV_INTRODUCTION`, then all pairs of a record of ``kv75_100.jsonl`` as JSON. Question: `KV_QUESTION`.

    The record's own key is asked first, then others at even distances.
    """
    records = request.read("kv75_100.jsonl", "key-value records, one a line with 'ordered_kv_records'", _kv_records)
    chosen = request.choose(list(enumerate(records, 1)), "records")
    return Suite(
        name=request.name,
        metric="contains",
        documents=tuple(_kv_document(request, number, *record) for number, record in chosen),
        description="75 UUID keys with UUID values; the value of a key is looked up; scored by whether it is given.",
        max_new_tokens=96,
    )


def _kv_records(text: str) -> list[tuple[str, dict[str, str]]]:
    """(key to ask, all pairs) of each record."""
    records = []
    for number, line in enumerate(text.rstrip().split("\n"), 1):
        record = json.loads(line)
        key, pairs = record["key"], {str(key): str(value) for key, value in record["ordered_kv_records"]}
        if pairs.get(key) != record["value"]:
            raise ValueError(f"the pair to look up on line {number} is not among the others")
        records.append((key, pairs))
    return records


def _kv_document(request: _Request, number: int, key: str, pairs: dict[str, str]) -> EvalDocument:
    lines = ",\n ".join(f'"{name}": "{value}"' for name, value in pairs.items())
    text = f"{KV_INTRODUCTION.format(n_pairs=len(pairs))}\n{{{lines}}}"
    name = f"{request.name}-{number:03d}"
    request.fitting(lambda n: text, 1, f"document {name!r}")
    others = [other for other in pairs if other != key]
    asked = (key, *_evenly(others, request.items_per_document - 1, f"document {name!r}"))
    items = []
    for one in asked:
        start = text.index(f'"{one}": "') + len(f'"{one}": "')
        items.append(Item(KV_QUESTION.format(key=one), (pairs[one],), ((start, start + len(pairs[one])),)))
    return EvalDocument(name, text, tuple(items))


def _babi(request: _Request) -> Suite:
    """Text: `BABI_INTRODUCTION`, then paragraphs of SQuALITY stories; facts of one bAbI story end some of them.

    All facts of the story are there, in order and evenly spread. Questions: `PERSON_QUESTION` (task 1) or
    `THING_QUESTION` (task 2, which takes the fact where the thing is and the fact where its holder went), first the
    last one of the file, then the same about others whose place is known at the end. Facts are from
    ``babi_qa1.txt`` or ``babi_qa2.txt``, stories from ``squality_dev10.jsonl``, as many as are needed, in an order
    by chance; headings, and paragraphs that name anybody or anything of the facts, are left out.
    """
    task = request.name.removeprefix("babi-")
    stories = request.read(f"babi_{task}.txt", "numbered bAbI lines of task 1 or 2", parse_stories)
    fillers = [story.paragraphs for story in request.read(_SQUALITY_FILE, _SQUALITY, parse_squality)]
    request.rng.shuffle(fillers)
    usable = [
        (number, story)
        for number, story in enumerate(stories, 1)
        if len(_end_places(story, task)) >= request.items_per_document
    ]
    chosen = request.choose(usable, f"stories with {request.items_per_document} questions at their end")
    documents = []
    for turn, (number, story) in enumerate(chosen):
        start = turn % len(fillers)
        filler = [paragraph for paragraphs in fillers[start:] + fillers[:start] for paragraph in paragraphs]
        documents.append(_babi_document(request, f"{request.name}-{number:03d}", story, filler))
    hops = "one fact" if task == "qa1" else "two facts"
    return Suite(
        name=request.name,
        metric="contains",
        documents=tuple(documents),
        description=f"bAbI facts hidden in a long story; an answer needs {hops}; scored by whether the place is named.",
        max_new_tokens=24,
    )


def _end_places(story: BabiStory, task: str) -> dict[str, Place]:
    """Known places of people (task 1) or things (task 2) after all facts; the one the file asks last comes first."""
    world = simulate(story.facts)
    places = world.people if task == "qa1" else world.things
    last = [asked.subject for asked in story.asked[-1:] if asked.subject in places]
    return {subject: places[subject] for subject in (*last, *places)}


def _babi_document(request: _Request, name: str, story: BabiStory, filler: Sequence[str]) -> EvalDocument:
    task = request.name.removeprefix("babi-")
    world = simulate(story.facts)
    named = re.compile(rf"\b(?:{'|'.join(map(re.escape, (*world.people, *world.things)))})\b")
    free = [one for one in filler if one.endswith(_SENTENCE_ENDS) and not named.search(one)]
    n_paragraphs = request.fitting(
        lambda n: weave(BABI_INTRODUCTION, free[:n], story.facts)[0], len(free), f"one paragraph of {name!r}"
    )
    text, starts = weave(BABI_INTRODUCTION, free[:n_paragraphs], story.facts)
    question = PERSON_QUESTION if task == "qa1" else THING_QUESTION
    items = []
    for subject, place in list(_end_places(story, task).items())[: request.items_per_document]:
        start = starts[place.fact] + story.facts[place.fact].rindex(place.name)
        items.append(Item(question.format(subject=subject), (place.name,), ((start, start + len(place.name)),)))
    return EvalDocument(name, text, tuple(items))


def _squality_entities(request: _Request) -> Suite:
    """Text: the beginning of a story of ``squality_dev10.jsonl``, whole paragraphs. Question: `SUMMARY_QUESTION`."""
    stories = request.read(_SQUALITY_FILE, _SQUALITY, parse_squality)
    documents = []
    for number, story in request.choose(list(enumerate(stories, 1)), "stories"):
        name, first = f"{request.name}-{number:02d}", _first_of(story.paragraphs)
        text = first(request.fitting(first, len(story.paragraphs), f"a paragraph of {name!r}"))
        names = key_entities(story.summaries, text)
        if not names:
            raise ConfigError(
                f"{name!r} names nobody of its summaries in a length of {request.document_length}; ask for more"
            )
        documents.append(EvalDocument(name, text, (Item(SUMMARY_QUESTION, names),)))
    return Suite(
        name=request.name,
        metric="entity_share",
        documents=tuple(documents),
        description="The beginning of a long story is summarised; scored by the share of key names in the summary.",
        max_new_tokens=192,
    )


def _first_of(paragraphs: Sequence[str]) -> Callable[[int], str]:
    return lambda n_paragraphs: _BREAK.join(paragraphs[:n_paragraphs])


def _in_turn(by_paragraph: Sequence[Sequence[Item]], n: int, where: str) -> tuple[Item, ...]:
    """One question of each paragraph, then a second of each, until `n`; the last round at even distances."""
    rounds = [
        [items[turn] for items in by_paragraph if len(items) > turn] for turn in range(max(map(len, by_paragraph)))
    ]
    asked: list[Item] = []
    for one_round in rounds:
        asked += one_round if len(one_round) <= n - len(asked) else _evenly(one_round, n - len(asked), where)
    return _evenly(sorted(asked, key=lambda item: item.spans), n, where)


def _evenly(items: Sequence[T], n: int, where: str) -> tuple[T, ...]:
    if len(items) < n:
        raise ConfigError(f"{where} has {len(items)} questions to choose from and {n} are asked for; ask for fewer")
    return tuple(items[(2 * index + 1) * len(items) // (2 * n)] for index in range(n))


_LOADERS: dict[str, Callable[[_Request], Suite]] = {
    "xquad-en": _xquad,
    "xquad-zh": _xquad,
    "kv75": _kv75,
    "babi-qa1": _babi,
    "babi-qa2": _babi,
    "squality-entities": _squality_entities,
}
SUITES: tuple[str, ...] = tuple(_LOADERS)
