"""The bAbI tasks 1 and 2: read the stories, and follow who and what is where, so questions can be asked at the end.

The files ask in mid-story ("Where is the milk?") and later facts can change the answer. A document holds all facts of
a story, so only what is true after the last one can be asked of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ragkv.evaluation.data.squality import EXPECTED, FILE, parse_squality
from ragkv.evaluation.data.suite import EvalDocument, Item, Request, Suite

BABI_INTRODUCTION = "A story follows. Between its sentences stand short facts about people who move and carry things."
PERSON_QUESTION = "Where is {subject}?"
THING_QUESTION = "Where is the {subject}?"

_SENTENCE_ENDS = (".", "!", "?", '"', "\u201d")
_MOVE = re.compile(r"(\w+) (?:went back|went|moved|journeyed|travelled) to the (\w+)\.")
_TAKE = re.compile(r"(\w+) (?:got|grabbed|took|picked up) the (\w+)(?: there)?\.")
_DROP = re.compile(r"(\w+) (?:dropped|discarded|left|put down) the (\w+)(?: there)?\.")
_QUESTION = re.compile(r"Where is (?:the )?(\w+)\?")
_LINE = re.compile(r"(\d+) (.+)")
_SEPARATOR = re.compile(r"[\t|]")  # both are in use between question, answer and supporting lines


@dataclass(frozen=True)
class Place:
    """Where a person or thing is; `fact` is the index of the fact that names the place."""

    name: str
    fact: int


@dataclass(frozen=True)
class StoryQuestion:
    """A question of the file: where `subject` is after the first `n_facts` facts, by the file's own answer."""

    subject: str
    answer: str
    n_facts: int


@dataclass(frozen=True)
class BabiStory:
    facts: tuple[str, ...]
    asked: tuple[StoryQuestion, ...]


@dataclass(frozen=True)
class World:
    """Known places after some facts; people and things whose place no fact tells are left out."""

    people: dict[str, Place]
    things: dict[str, Place]

    def find(self, subject: str) -> Place | None:
        return self.people.get(subject) or self.things.get(subject)


def simulate(facts: Sequence[str]) -> World:
    """Follow the facts: people move, what they hold moves with them, what they put down stays.

    Raises
    ------
    ValueError
        If a fact is none of moving, taking and dropping.
    """
    people: dict[str, Place] = {}
    lying: dict[str, Place] = {}
    holders: dict[str, str] = {}
    for index, fact in enumerate(facts):
        if moved := _MOVE.fullmatch(fact):
            people[moved[1]] = Place(moved[2], index)
        elif taken := _TAKE.fullmatch(fact):
            holders[taken[2]] = taken[1]
            lying.pop(taken[2], None)
        elif dropped := _DROP.fullmatch(fact):
            holders.pop(dropped[2], None)
            lying.pop(dropped[2], None)
            if dropped[1] in people:
                lying[dropped[2]] = people[dropped[1]]
        else:
            raise ValueError(f"{fact!r} is not a fact of bAbI task 1 or 2")
    held = {thing: people[who] for thing, who in holders.items() if who in people}
    return World(people=people, things=lying | held)


def parse_stories(text: str) -> tuple[BabiStory, ...]:
    """Stories of a bAbI file: numbered lines, a story begins at 1; a question line has its answer after a tab or bar.

    Raises
    ------
    ValueError
        If a line has another form, or an answer is not what the facts before it say; the message gives the line.
    """
    stories: list[BabiStory] = []
    facts: list[str] = []
    asked: list[StoryQuestion] = []
    for number, line in enumerate(text.splitlines(), 1):
        numbered = _LINE.fullmatch(line)
        if numbered is None:
            raise ValueError(f"line {number} is {line[:60]!r}")
        if numbered[1] == "1" and facts:
            stories.append(BabiStory(tuple(facts), tuple(asked)))
            facts, asked = [], []
        if "?" in numbered[2]:
            asked.append(_question(numbered[2], facts, number))
        else:
            facts.append(numbered[2].strip())
    return (*stories, BabiStory(tuple(facts), tuple(asked)))


def weave(introduction: str, paragraphs: Sequence[str], facts: Sequence[str]) -> tuple[str, tuple[int, ...]]:
    """Introduction and paragraphs, the facts at even distances as last sentences; and the start of each fact in it."""
    text, starts = introduction, []
    homes = [(2 * fact + 1) * len(paragraphs) // (2 * len(facts)) for fact in range(len(facts))]
    for index, paragraph in enumerate(paragraphs):
        text += f"\n\n{paragraph}"
        for home, fact in zip(homes, facts, strict=True):
            if home == index:
                starts.append(len(text) + 1)
                text += f" {fact}"
    return text, tuple(starts)


def _question(text: str, facts: Sequence[str], number: int) -> StoryQuestion:
    question, answer, *_ = *_SEPARATOR.split(text), ""
    subject = _QUESTION.fullmatch(question.strip())
    if subject is None:
        raise ValueError(f"line {number} is {text[:60]!r}")
    place = simulate(facts).find(subject[1])
    if place is None or place.name != answer.strip():
        raise ValueError(f"line {number} answers {answer!r} and the facts say {place.name if place else 'nothing'!r}")
    return StoryQuestion(subject[1], answer.strip(), len(facts))


def load_babi(request: Request) -> Suite:
    """Text: `BABI_INTRODUCTION`, then paragraphs of SQuALITY stories; facts of one bAbI story end some of them.

    All facts of the story are there, in order and evenly spread. Questions: `PERSON_QUESTION` (task 1) or
    `THING_QUESTION` (task 2, which takes the fact where the thing is and the fact where its holder went), first the
    last one of the file, then the same about others whose place is known at the end. Facts are from
    ``babi_qa1.txt`` or ``babi_qa2.txt``, stories from ``squality_dev10.jsonl``, as many as are needed, in an order
    by chance; headings, and paragraphs that name anybody or anything of the facts, are left out.
    """
    task = request.name.removeprefix("babi-")
    stories = request.read(f"babi_{task}.txt", "numbered bAbI lines of task 1 or 2", parse_stories)
    fillers = [story.paragraphs for story in request.read(FILE, EXPECTED, parse_squality)]
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


def _babi_document(request: Request, name: str, story: BabiStory, filler: Sequence[str]) -> EvalDocument:
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
