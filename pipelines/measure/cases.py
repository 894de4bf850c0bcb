"""Questions with several documents before them, one of which holds the answer.

The documents are a small pool, each of its own article of a file in SQuAD format, so that a few archives serve all
cases; or, which is harder to tell apart, all documents of a question are paragraphs of one article. Everything is
drawn from seeded generators: the same file, numbers and seed give the same cases, and a longer list of questions
begins with the shorter one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ragkv.errors import ConfigError
from ragkv.evaluation.data.squad import Paragraph, parse_squad, shifted
from ragkv.evaluation.data.suite import BREAK, Item
from ragkv.evaluation.plan import context_limit
from ragkv.model.load import LoadedModel
from ragkv.model.prompt import question_ids, tokenize_prompt
from ragkv.model.shape import model_shape
from ragkv.recipe import check_whole
from ragkv.text import read_text

FILE = "xquad.en.json"
QUESTIONS_TOGETHER = 2
"""Questions that are asked of the same documents in the same order, so that one joint prefill serves them."""


@dataclass(frozen=True)
class PoolQuestion:
    """A question by the id of its file; ``place`` is that of its document in the pool."""

    id: str
    place: int
    item: Item


@dataclass(frozen=True)
class PoolDocument:
    """Consecutive paragraphs of one article, blank lines between them, and what may be asked of them, shuffled.

    ``paragraphs`` are (start, end) characters of each in ``text``.
    """

    name: str
    text: str
    asked: tuple[PoolQuestion, ...]
    paragraphs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Case:
    """A question behind documents, which are places in the pool; that of the answer is among them."""

    documents: tuple[int, ...]
    asked: PoolQuestion

    @property
    def size(self) -> int:
        return len(self.documents)

    @property
    def key(self) -> tuple[int, str]:
        return self.size, self.asked.id


@dataclass(frozen=True)
class TooLong:
    """A case beyond the context of ``limit`` tokens: prefix, question and answer with all documents ``joined``, and
    with the ``longest`` document only.
    """

    size: int
    joined: int
    longest: int
    limit: int

    @property
    def joined_words(self) -> str:
        whose = f"{self.size} documents with a question and its answer"
        return f"{whose} have {self.joined:,} tokens and the model's context is {self.limit:,}"

    @property
    def longest_words(self) -> str:
        whose = f"the longest of {self.size} documents with a question and its answer"
        return f"{whose} has {self.longest:,} tokens and the model's context is {self.limit:,}"


def read_pool(
    folder: Path, *, n_documents: int, n_paragraphs: int, seed: int = 0, skip_articles: int = 0
) -> tuple[PoolDocument, ...]:
    """Documents of `n_paragraphs` consecutive paragraphs, each of another article of ``xquad.en.json``.

    The first `skip_articles` of the file are left out.

    Raises
    ------
    ConfigError
        If folder or file cannot be read, the file is not in SQuAD format, or it has too few articles of that length.
    """
    articles = _long_articles(folder, n_articles=n_documents, n_paragraphs=n_paragraphs, skip=skip_articles)
    draw = random.Random(seed)
    pool: list[PoolDocument] = []
    for number, article in draw.sample(articles, n_documents):
        first = draw.randrange(len(article) - n_paragraphs + 1)
        chosen = article[first : first + n_paragraphs]
        pool.append(_document(f"article-{number:03d}-{first:02d}", len(pool), chosen, draw))
    return tuple(pool)


def read_siblings(
    folder: Path, *, n_articles: int, n_paragraphs: int, seed: int = 0, skip_articles: int = 0
) -> tuple[PoolDocument, ...]:
    """Documents of one paragraph each: `n_paragraphs` consecutive ones of every article, article by article.

    Raises
    ------
    ConfigError
        As `read_pool`.
    """
    articles = _long_articles(folder, n_articles=n_articles, n_paragraphs=n_paragraphs, skip=skip_articles)
    draw = random.Random(seed)
    siblings: list[PoolDocument] = []
    for number, article in draw.sample(articles, n_articles):
        first = draw.randrange(len(article) - n_paragraphs + 1)
        for which in range(first, first + n_paragraphs):
            name = f"paragraph-{number:03d}-{which:02d}"
            siblings.append(_document(name, len(siblings), article[which : which + 1], draw))
    return tuple(siblings)


def draw_cases(pool: Sequence[PoolDocument], *, size: int, n_questions: int, seed: int = 0) -> list[Case]:
    """Questions of the pool's documents in turn, each with `size` documents in an order by chance.

    `QUESTIONS_TOGETHER` in a row, each of another document, have the same documents before them.

    Raises
    ------
    ConfigError
        If the pool has fewer documents than a case, or a document fewer questions than its turns.
    """
    if not QUESTIONS_TOGETHER <= size <= len(pool):
        raise ConfigError(f"{size} documents are asked for; give {QUESTIONS_TOGETHER} to {len(pool)}, the pool's size")
    cases = []
    for number in range(n_questions):
        turn, place = divmod(number, len(pool))
        if turn >= len(pool[place].asked):
            raise ConfigError(
                f"document {pool[place].name!r} has {len(pool[place].asked)} questions and {n_questions} in all are "
                "asked for; ask for fewer, or for a larger pool"
            )
        cases.append(Case(_documents(len(pool), number, size=size, seed=seed), pool[place].asked[turn]))
    return cases


def draw_sibling_cases(siblings: Sequence[PoolDocument], *, size: int, n_questions: int, seed: int = 0) -> list[Case]:
    """Questions of the articles in turn, each with all `size` paragraphs of its article in an order by chance.

    `QUESTIONS_TOGETHER` in a row are of one article and have its paragraphs in one order; they are drawn among all
    that may be asked of these paragraphs.

    Parameters
    ----------
    siblings
        From `read_siblings` with `size` paragraphs of every article.

    Raises
    ------
    ConfigError
        If an article has fewer questions than its turns.
    """
    articles = [range(first, first + size) for first in range(0, len(siblings), size)]
    asked = []
    for places in articles:
        own = [each for place in places for each in siblings[place].asked]
        asked.append(random.Random(f"{seed} {places.start}").sample(own, len(own)))
    cases = []
    for number in range(n_questions):
        block, partner = divmod(number, QUESTIONS_TOGETHER)
        turn, article = divmod(block, len(articles))
        question = turn * QUESTIONS_TOGETHER + partner
        if question >= len(asked[article]):
            raise ConfigError(
                f"the article of {siblings[articles[article].start].name!r} has {len(asked[article])} questions and "
                f"{n_questions} in all are asked for; ask for fewer, or for more articles"
            )
        order = random.Random(f"{seed} {size} {block}").sample(articles[article], size)
        cases.append(Case(tuple(order), asked[article][question]))
    return cases


def cases_beyond(
    model: LoadedModel, pool: Sequence[PoolDocument], cases: Sequence[Case], most_new: int
) -> list[TooLong]:
    """The cases whose documents, joined, leave no room in the model's context for an answer of `most_new` tokens."""
    limit = context_limit(model_shape(model.model.config))
    if limit is None:
        return []
    prompts = [tokenize_prompt(model.tokenizer, model.layout, document.text) for document in pool]
    found = []
    for case in cases:
        asked = question_ids(model.tokenizer, model.layout, case.asked.item.question)
        others = len(prompts[0].prefix_ids) + len(asked) + most_new
        lengths = [len(prompts[place].document_ids) for place in case.documents]
        if others + sum(lengths) > limit:
            found.append(TooLong(case.size, others + sum(lengths), others + max(lengths), limit))
    return found


def _documents(n_pool: int, number: int, *, size: int, seed: int) -> tuple[int, ...]:
    """Places of the documents of question `number`: those that answer it and its partners, and others by chance."""
    block = number // QUESTIONS_TOGETHER
    draw = random.Random(f"{seed} {size} {block}")
    golds = [(block * QUESTIONS_TOGETHER + partner) % n_pool for partner in range(QUESTIONS_TOGETHER)]
    others = [place for place in range(n_pool) if place not in golds]
    chosen = [*golds, *draw.sample(others, size - len(golds))]
    return tuple(draw.sample(chosen, size))


def _long_articles(folder: Path, *, n_articles: int, n_paragraphs: int, skip: int) -> list[tuple[int, list[Paragraph]]]:
    """Articles of enough paragraphs with their numbers in the file; refuses a file that has fewer than `n_articles`."""
    check_whole("skip-articles", skip, 0)
    if not folder.is_dir():
        raise ConfigError(f"the data folder {str(folder)!r} does not exist")
    path = folder / FILE
    try:
        articles = parse_squad(read_text(path))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{str(path)!r} is not a file in SQuAD format: {type(error).__name__}: {error}") from error
    if any(not id_ for article in articles for paragraph in article for id_, _ in paragraph.asked):
        raise ConfigError(f"{str(path)!r} has a question without an id, by which results are kept; give each its own")
    long_enough = [each for each in list(enumerate(articles))[skip:] if len(each[1]) >= n_paragraphs]
    if len(long_enough) < n_articles:
        after = f" after the first {skip}" if skip else ""
        raise ConfigError(
            f"{str(path)!r} has {len(long_enough)} articles of at least {n_paragraphs} paragraphs{after} and a pool of "
            f"{n_articles} documents needs one each; ask for a smaller pool or fewer paragraphs"
        )
    return long_enough


def _document(name: str, place: int, paragraphs: Sequence[Paragraph], draw: random.Random) -> PoolDocument:
    """The paragraphs in one text, gold spans moved to where they stand in it."""
    asked, extents, start = [], [], 0
    for paragraph in paragraphs:
        for id_, item in paragraph.asked:
            asked.append(PoolQuestion(id_, place, shifted(item, start)))
        extents.append((start, start + len(paragraph.text)))
        start = extents[-1][1] + len(BREAK)
    text = BREAK.join(paragraph.text for paragraph in paragraphs)
    return PoolDocument(name, text, tuple(draw.sample(asked, len(asked))), tuple(extents))
