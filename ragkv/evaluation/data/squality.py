"""SQuALITY: long stories whose paragraphs are filler or text to summarise, with reference summaries of the plot."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ragkv.errors import ConfigError
from ragkv.evaluation.data.suite import EvalDocument, Item, Request, Suite, first_of

FILE = "squality_dev10.jsonl"
EXPECTED = "SQuALITY records, one a line with 'document' and 'questions'"
SUMMARY_QUESTION = "What happens in this story? Summarise it in a few sentences and name the people and places."

_NAME = re.compile(r"(?<=[a-z,;] )[A-Z][a-z]{2,}\b")  # after a lower-case letter: not the first word of a sentence


@dataclass(frozen=True)
class SqualityStory:
    """``paragraphs`` have single spaces; ``summaries`` answer the first question, which asks for the plot."""

    paragraphs: tuple[str, ...]
    summaries: tuple[str, ...]


def parse_squality(text: str) -> tuple[SqualityStory, ...]:
    """Stories of a SQuALITY file, one JSON record a line; a KeyError, TypeError or ValueError if it is none."""
    records = [json.loads(line) for line in text.split("\n") if line.strip()]
    if not records:
        raise ValueError("the file is empty")
    return tuple(
        SqualityStory(
            paragraphs=_paragraphs(record["document"]),
            summaries=tuple(response["response_text"] for response in record["questions"][0]["responses"]),
        )
        for record in records
    )


def key_entities(summaries: Sequence[str], text: str) -> tuple[str, ...]:
    """Names in at least two of the summaries that stand in `text` too, in order of how often they stand there.

    A name is a single capitalised word that is not the first of a sentence and is in `text` more often so than in
    lower case: this keeps a captain called Strike, and drops a captain called Captain.
    """
    seen = Counter(name for summary in summaries for name in set(_NAME.findall(summary)))
    words = Counter(re.findall(r"\w+", text))
    names = [name for name, n_summaries in seen.items() if n_summaries > 1 and words[name] > words[name.lower()]]
    return tuple(sorted(names, key=lambda name: (-words[name], name)))


def _paragraphs(text: str) -> tuple[str, ...]:
    joined = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
    return tuple(paragraph for paragraph in joined if paragraph)


def load_squality_entities(request: Request) -> Suite:
    """Text: the beginning of a story of ``squality_dev10.jsonl``, whole paragraphs. Question: `SUMMARY_QUESTION`."""
    stories = request.read(FILE, EXPECTED, parse_squality)
    documents = []
    for number, story in request.choose(list(enumerate(stories, 1)), "stories"):
        name, first = f"{request.name}-{number:02d}", first_of(story.paragraphs)
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
