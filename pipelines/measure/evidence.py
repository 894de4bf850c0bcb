"""Ask questions of several documents and judge what each method looked at; a stopped run goes on.

Two settings: documents of other articles than the one that holds the answer, and paragraphs of one article. Both use
the same archives, folder and methods.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

from pipelines.measure.cases import (
    FILE,
    QUESTIONS_TOGETHER,
    Case,
    PoolDocument,
    draw_cases,
    draw_sibling_cases,
    read_pool,
    read_siblings,
)
from pipelines.measure.compositions import ARCHIVES, HEADER_FILE, archive_pool, check_context
from pipelines.measure.hits import EvidenceRow, judge
from pipelines.measure.looks import (
    DENSE,
    EMBEDDING,
    EMBEDDING_PACKAGES,
    LEXICAL,
    METHODS,
    RECALL,
    EmbeddingSearch,
    Looked,
    best_passages,
    embedding_is_installed,
    join_texts,
    load_minilm,
    look_by_words,
    split_evidence,
)
from ragkv.answer.ask import ask
from ragkv.answer.passages import DocumentEvidence
from ragkv.errors import ConfigError
from ragkv.evaluation.bench import environment
from ragkv.evaluation.results import ResultsFolder
from ragkv.evaluation.timing import Progress
from ragkv.model.load import LoadedModel
from ragkv.model.prompt import document_sha256
from ragkv.recall.composition import Composition
from ragkv.recall.prefilled import prefill_document
from ragkv.recipe import Recipe, check_whole
from ragkv.text import read_text
from ragkv.version import __version__

ARTICLES, PARAGRAPHS = "articles", "paragraphs"
"""The settings: each document of its own article, or all documents paragraphs of one."""

Look = Callable[[str], Looked]
Split = Callable[[Sequence[DocumentEvidence]], tuple[DocumentEvidence, ...]]


@dataclass(frozen=True)
class EvidenceOptions:
    """What is measured.

    Every question has `documents` before it: with `hard` paragraphs of one article, else `paragraphs` of each of as
    many articles. `pool` is the number of articles that all questions share, none of them among the first
    `skip_articles` of the file. `methods` are of `METHODS`; empty means all that can be run.

    Raises
    ------
    ConfigError
        If a name is unknown or given twice, or a number is out of range.
    """

    data: Path
    documents: int = 4
    questions: int = 48
    pool: int = 24
    paragraphs: int = 4
    skip_articles: int = 12
    hard: bool = False
    methods: tuple[str, ...] = ()
    max_new_tokens: int = 16
    recipe: Recipe = field(default_factory=Recipe)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("questions", "pool", "paragraphs", "max_new_tokens"):
            check_whole(name.replace("_", "-"), getattr(self, name), 1)
        for name in ("skip_articles", "seed"):
            check_whole(name.replace("_", "-"), getattr(self, name), 0)
        check_whole("documents", self.documents, QUESTIONS_TOGETHER)
        if not self.hard and self.documents > self.pool:
            raise ConfigError(f"documents is {self.documents}; give a number up to the size of the pool, {self.pool}")
        for name in self.methods:
            if name not in METHODS:
                raise ConfigError(f"there is no method {name!r}; take of {', '.join(METHODS)}")
        if len(set(self.methods)) < len(self.methods):
            raise ConfigError(f"methods has something twice: {', '.join(self.methods)}")

    @property
    def setting(self) -> str:
        return PARAGRAPHS if self.hard else ARTICLES

    @property
    def chosen_methods(self) -> tuple[str, ...]:
        """In their usual order; the embedding only where its packages are, unless it is asked for by name."""
        if self.methods:
            return tuple(name for name in METHODS if name in self.methods)
        return tuple(name for name in METHODS if name != EMBEDDING or embedding_is_installed())

    def settings(self, *, model: str, dtype: str | None) -> dict[str, Any]:
        """What a row depends on besides its key, of which a later run may ask for more."""
        names = ("pool", "paragraphs", "skip_articles", "max_new_tokens", "seed")
        return {
            "ragkv": __version__,
            "model": model,
            "dtype": dtype,
            "data_sha256": document_sha256(read_text(self.data / FILE)),
            "recipe": self.recipe.to_dict(),
            **{name: getattr(self, name) for name in names},
        }

    def draw(self) -> tuple[tuple[PoolDocument, ...], list[Case]]:
        """The documents, and the questions with the documents before them."""
        if self.hard:
            siblings = read_siblings(
                self.data,
                n_articles=self.pool,
                n_paragraphs=self.documents,
                seed=self.seed,
                skip_articles=self.skip_articles,
            )
            cases = draw_sibling_cases(siblings, size=self.documents, n_questions=self.questions, seed=self.seed)
            return siblings, cases
        pool = read_pool(
            self.data,
            n_documents=self.pool,
            n_paragraphs=self.paragraphs,
            seed=self.seed,
            skip_articles=self.skip_articles,
        )
        return pool, draw_cases(pool, size=self.documents, n_questions=self.questions, seed=self.seed)


def measure_evidence(
    model: LoadedModel,
    options: EvidenceOptions,
    out: Path,
    *,
    settings: dict[str, Any],
    on_progress: Progress | None = None,
) -> list[EvidenceRow]:
    """Measure what the folder `out` does not hold yet; returns the rows that `options` ask for, old and new.

    Parameters
    ----------
    settings
        From `EvidenceOptions.settings`.
    on_progress
        Called with a stage, what is done of it and how much that is.

    Raises
    ------
    ConfigError
        If `out` holds other results, the data cannot be used, or the documents do not fit into the model's context.
    MissingExtraError
        If the embedding was asked for by name and is not installed.
    """
    pool, cases = options.draw()
    check_context(model, pool, cases, options.max_new_tokens)
    methods = options.chosen_methods
    embedding = EmbeddingSearch(load_minilm()) if EMBEDDING in methods else None
    rows = ResultsFolder(out, settings, EvidenceRow)
    _write_header(model, options, out)
    wanted = [
        (case, [(options.setting, case.size, case.asked.id, method) for method in methods], number)
        for number, case in enumerate(cases, start=1)
    ]
    done = {row.key for row in rows.read()}
    make = _Methods(model, pool, out / ARCHIVES, options, embedding=embedding, on_progress=on_progress)
    for places, together in groupby(wanted, key=lambda each: each[0].documents):
        looks = make.behind(places)
        for case, keys, number in together:
            for key in keys:
                if key not in done:
                    looked = looks[key[-1]](case.asked.item.question)
                    documents = [pool[place] for place in places]
                    rows.add(judge(looked, setting=key[0], method=key[-1], case=case, documents=documents))
            if on_progress is not None:
                on_progress("questions", number, len(cases))
    found = {row.key: row for row in rows.read()}
    return [found[key] for _, keys, _ in wanted for key in keys]


class _Methods:
    """Makes what methods need, once and only when something is asked: archives, and a joint prefill of documents."""

    def __init__(
        self,
        model: LoadedModel,
        pool: Sequence[PoolDocument],
        folder: Path,
        options: EvidenceOptions,
        *,
        embedding: EmbeddingSearch | None,
        on_progress: Progress | None,
    ) -> None:
        self._model, self._pool, self._options = model, pool, options
        self._embedding, self._on_progress = embedding, on_progress
        self._archives = cache(
            partial(archive_pool, model, pool, folder, recipe=options.recipe, on_progress=on_progress)
        )

    def behind(self, places: Sequence[int]) -> dict[str, Look]:
        """Every method for questions behind the documents at `places`."""
        documents = [self._pool[place] for place in places]
        joint = cache(partial(self._joint, documents))

        def recall(question: str) -> Looked:
            archives = self._archives()
            return self._attended(Composition([archives[place] for place in places]), question, tuple)

        looks: dict[str, Look] = {
            RECALL: recall,
            DENSE: lambda question: self._attended(*joint()[:1], question, joint()[1]),
            LEXICAL: partial(look_by_words, documents=documents),
        }
        if self._embedding is not None:
            looks[EMBEDDING] = partial(self._embedding.look, documents=documents)
        return looks

    def _joint(self, documents: Sequence[PoolDocument]) -> tuple[Composition, Split]:
        """The documents prefilled in one text, every token of which is attended exactly."""
        text, extents = join_texts([document.text for document in documents])
        report = None if self._on_progress is None else partial(self._on_progress, "joint prefill")
        prefilled = prefill_document(self._model, text, on_progress=report)
        return Composition([prefilled]), lambda found: split_evidence(found[0], documents, extents)

    def _attended(self, composition: Composition, question: str, split: Split) -> Looked:
        """Passages by the attention of the answer, documents by that of its first token: of reading the question."""
        answer = ask(composition, question, evidence=True, max_new_tokens=self._options.max_new_tokens)
        read = ask(composition, question, evidence=True, max_new_tokens=1)
        evidence = split(answer.evidence)
        return Looked(
            passages=best_passages(evidence),
            scores=tuple(each.share for each in split(read.evidence)),
            shares=tuple(each.share for each in evidence),
            answer=answer.text,
        )


def _write_header(model: LoadedModel, options: EvidenceOptions, out: Path) -> None:
    packages = {name: version(name) for name in EMBEDDING_PACKAGES} if EMBEDDING in options.chosen_methods else {}
    header = {"model": model.name, "seed": options.seed, "environment": {**environment(), **packages}}
    (out / HEADER_FILE).write_text(json.dumps(header, indent=1) + "\n", encoding="utf-8")
