"""Whether the passages that a way of finding them names hold the gold answer: a row a question, and their summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from pipelines.measure.cases import Case, PoolDocument
from pipelines.measure.looks import Found, Looked
from ragkv.evaluation.metrics import METRICS
from ragkv.evaluation.stats import standard_error

ANSWERED = 0.5
"""F1 from which an answer counts as right."""


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


def _share(values: Sequence[float]) -> Share:
    return Share(fmean(values), standard_error(values, ddof=0))
