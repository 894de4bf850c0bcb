"""Rows that say what one variant of a composition made of one question, and their summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from ragkv.evaluation.stats import MeanScore, mean_score
from ragkv.recall.composition import REUSED

JOINT, PLAIN, ALL, RECALL, WEIGHTED, ALONE = "joint", "plain", "all", "recall", "weighted", "alone"
VARIANTS = {
    JOINT: "all documents read in one piece with the question: the reference",
    PLAIN: "the texts in one prompt, as plain LlamaIndex puts them, and read for each question",
    ALL: "composed, every token attended: what composing alone costs, codes included",
    RECALL: "composed, recall by the recipe: the default",
    REUSED: "as recall, all documents at the same positions",
    WEIGHTED: "as recall, attention to documents weighted by temperature and scale",
    ALONE: "only the document that holds the answer: the bound of a perfect retriever",
}
RECOMPUTE = "recompute-"
BEYOND = (REUSED, ALONE)
"""Variants that can be measured where the documents are longer, joined, than the model's context."""


@dataclass(frozen=True)
class Row:
    """One variant on one question behind `size` documents; `document` is the one that holds the answer.

    ``kl`` (nats) and ``top1`` are means over the ``n_positions`` of the reference's answer; ``f1`` and ``em`` are of
    the variant's own greedy ``answer``. ``prefilled_tokens`` went through the model before the first answer token, in
    ``ttft_s`` seconds with the archives open; ``context_tokens`` are prefix and documents. Beyond the model's context
    there is no reference: ``kl`` and ``top1`` are None then, and ``n_positions`` is 0.
    """

    size: int
    question: str
    document: str
    variant: str
    kl: float | None
    top1: float | None
    n_positions: int
    f1: float
    em: float
    answer: str
    prefilled_tokens: int
    context_tokens: int
    ttft_s: float

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Row:
        return cls(**values)

    @property
    def key(self) -> tuple[int, str, str]:
        return self.size, self.question, self.variant


@dataclass(frozen=True)
class VariantSummary:
    """Means over the questions of one size, each counting once; errors take those of one document as one cluster.

    ``kl`` and ``top1`` are None where a row has none, as beyond the model's context: no mean leaves questions out.
    ``f1_over_recall`` is F1 minus that of `RECALL`, paired by question; None for that variant itself or without it.
    ``ttft_s`` is a median, None for `ALL`, which holds its documents decoded between questions.
    """

    size: int
    variant: str
    kl: MeanScore | None
    top1: MeanScore | None
    f1: MeanScore
    em: MeanScore
    f1_over_recall: MeanScore | None
    prefilled_tokens: float
    context_tokens: float
    ttft_s: float | None


def summarise_compositions(rows: Sequence[Row]) -> tuple[VariantSummary, ...]:
    """A summary for each size and variant, in the order in which they first come."""
    known = {row.key: row for row in rows}
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.size):
        groups.setdefault((row.size, row.variant), []).append(row)
    return tuple(_summary(own, known) for own in groups.values())


def _summary(own: Sequence[Row], known: Mapping[tuple[int, str, str], Row]) -> VariantSummary:
    size, variant = own[0].size, own[0].variant
    documents = [row.document for row in own]
    pairs = [(row, known.get((size, row.question, RECALL))) for row in own if variant != RECALL]
    off = [(row.f1 - other.f1, row.document) for row, other in pairs if other is not None]
    return VariantSummary(
        size=size,
        variant=variant,
        kl=_mean_of_all([row.kl for row in own], documents),
        top1=_mean_of_all([row.top1 for row in own], documents),
        f1=mean_score([row.f1 for row in own], documents),
        em=mean_score([row.em for row in own], documents),
        f1_over_recall=mean_score(*zip(*off, strict=True)) if off else None,
        prefilled_tokens=fmean(row.prefilled_tokens for row in own),
        context_tokens=fmean(row.context_tokens for row in own),
        ttft_s=None if variant == ALL else median(row.ttft_s for row in own),
    )


def _mean_of_all(scores: Sequence[float | None], documents: Sequence[str]) -> MeanScore | None:
    known = [score for score in scores if score is not None]
    return mean_score(known, documents) if len(known) == len(scores) else None
