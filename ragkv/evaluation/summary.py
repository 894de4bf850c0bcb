"""What a run says of each subject: scores, fidelity, times and bytes, beside dense attention of the same run.

Everything is worked out from a list of `Measured` alone. A difference to dense is taken question by question, since
hard questions are hard for all. Times come from the forced pass, in which every subject reads the same tokens, in one
process on one machine: quote their ratios to dense, not the seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from statistics import fmean
from typing import Any

from ragkv.evaluation.compare import Outcome
from ragkv.evaluation.run import Measured
from ragkv.evaluation.stats import MeanScore, Quantiles, clustered_error, mean_score
from ragkv.evaluation.subjects import DENSE
from ragkv.evaluation.timing import Times
from ragkv.ledger.fit import LOOK_BACK_TOKENS

_GRADED = ("f1", "entity_share")
_TAIL_SHARE = 4


@dataclass(frozen=True)
class Score:
    """One metric over items; ``difference`` is the subject minus dense, paired by item.

    ``fails`` is the share of items that the subject fails: a score of 0 where a metric gives part marks (F1, shares),
    and below 1 elsewhere.
    """

    mean: MeanScore
    difference: MeanScore
    fails: float


@dataclass(frozen=True)
class KlSummary:
    """KL(dense || subject) in nats over answer positions, and the share with the same most likely token.

    Standard errors take the positions of one question as one cluster; None for a single question.
    """

    mean: float
    standard_error: float | None
    median: float
    p90: float
    p99: float
    top1: float
    top1_standard_error: float | None
    n_positions: int
    n_questions: int


@dataclass(frozen=True)
class Answers:
    """Answers of one subject to some of the questions; ``same_answer`` is the share whose text is that of dense."""

    scores: dict[str, Score]
    same_answer: MeanScore
    kl: KlSummary

    @property
    def main_score(self) -> Score:
        """The score to quote: the last of the metric, which is F1 where it has one."""
        return list(self.scores.values())[-1]


@dataclass(frozen=True)
class Speed:
    """Times in seconds and each quantile over the same quantile of dense."""

    seconds: Times
    median_over_dense: float
    p90_over_dense: float
    p99_over_dense: float


@dataclass(frozen=True)
class ByteSummary:
    """Bytes over all layers, mean over documents; ``read`` is per answer token, None where no answer has two tokens."""

    read: float | None
    resident: float
    disk: float
    read_over_dense: float | None
    resident_over_dense: float
    disk_over_dense: float


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of the forced continuation, and of its last quarter (``tail``).

    ``difference`` is the mean of the subject's negative log-likelihood minus that of dense in nats, with a standard
    error over documents; ``ratio`` is its exponential, the subject's perplexity over that of dense.
    """

    value: float
    ratio: float
    difference: MeanScore
    tail: float
    tail_ratio: float
    tail_difference: MeanScore


@dataclass(frozen=True)
class SubjectSummary:
    """One subject in one group. What was not asked or means nothing is None.

    ``looking_back`` has the questions whose answer lies more than `LOOK_BACK_TOKENS` before the end of the document,
    ``near`` the others; both None where the suite does not say where answers are. ``ttft`` of dense includes the
    prefill of the document, which an archive is there to spare. ``tokens_per_second`` is of tokens after the first.
    """

    subject: str
    answers: Answers | None
    looking_back: Answers | None
    near: Answers | None
    ttft: Speed | None
    tpot: Speed | None
    tokens_per_second: float | None
    bytes: ByteSummary
    perplexity: Perplexity | None


@dataclass(frozen=True)
class GroupSummary:
    """One suite, or the short or long documents of the perplexity suite; dense is the first of ``subjects``."""

    group: str
    n_documents: int
    fewest_tokens: int
    most_tokens: int
    subjects: tuple[SubjectSummary, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Pair:
    """One question, answered by a subject and by dense (or by any other subject)."""

    document: str
    mine: Outcome
    other: Outcome


def summarise(measured: Sequence[Measured], *, imitations: Collection[str] = ()) -> tuple[GroupSummary, ...]:
    """Summarise every group, in the order in which groups and subjects first come.

    Parameters
    ----------
    imitations
        Subjects that imitate another system: their bytes are worked out, but their times say nothing and are left out.
    """
    return tuple(
        _group(name, [each for each in measured if each.group == name], imitations)
        for name in dict.fromkeys(each.group for each in measured)
    )


def pairs(mine: Sequence[Measured], other: Sequence[Measured]) -> list[Pair]:
    """The questions that both have answered."""
    known = {(each.document, outcome.item): outcome for each in other for outcome in each.outcomes}
    return [
        Pair(each.document, outcome, known[each.document, outcome.item])
        for each in mine
        for outcome in each.outcomes
        if (each.document, outcome.item) in known
    ]


def of_subject(measured: Iterable[Measured], subject: str) -> list[Measured]:
    return [each for each in measured if each.subject == subject]


def _group(name: str, measured: Sequence[Measured], imitations: Collection[str]) -> GroupSummary:
    dense = of_subject(measured, DENSE)
    names = dict.fromkeys((DENSE, *(each.subject for each in measured)))
    subjects = [_subject(of_subject(measured, subject), dense, timed=subject not in imitations) for subject in names]
    tokens = [each.tokens for each in dense]
    return GroupSummary(
        group=name,
        n_documents=len({each.document for each in dense}),
        fewest_tokens=min(tokens),
        most_tokens=max(tokens),
        subjects=tuple(subjects),
    )


def _subject(mine: Sequence[Measured], dense: Sequence[Measured], *, timed: bool) -> SubjectSummary:
    asked = pairs(mine, dense)
    placed = [pair for pair in asked if pair.mine.answer_distance is not None]
    far = [pair for pair in placed if (pair.mine.answer_distance or 0) > LOOK_BACK_TOKENS]
    near = [pair for pair in placed if (pair.mine.answer_distance or 0) <= LOOK_BACK_TOKENS]
    steps = [second for each in mine for outcome in each.outcomes for second in outcome.step_s]
    return SubjectSummary(
        subject=mine[0].subject,
        answers=_answers(asked) if asked else None,
        looking_back=_answers(far) if far else None,
        near=_answers(near) if near else None,
        ttft=_speed(_first_token_seconds(mine), _first_token_seconds(dense)) if timed else None,
        tpot=_speed(steps, [s for each in dense for outcome in each.outcomes for s in outcome.step_s])
        if timed
        else None,
        tokens_per_second=len(steps) / math.fsum(steps) if timed and steps else None,
        bytes=_bytes(mine, dense),
        perplexity=_perplexity(mine, dense),
    )


def _answers(asked: Sequence[Pair]) -> Answers:
    documents = [pair.document for pair in asked]
    scores = {}
    for name in asked[0].mine.scores:
        values = [pair.mine.scores[name] for pair in asked]
        off = [pair.mine.scores[name] - pair.other.scores[name] for pair in asked]
        failed = [value == 0 if name in _GRADED else value < 1 for value in values]
        scores[name] = Score(mean_score(values, documents), mean_score(off, documents), sum(failed) / len(failed))
    return Answers(
        scores=scores,
        same_answer=mean_score([float(pair.mine.same_answer) for pair in asked], documents),
        kl=_kl([pair.mine for pair in asked]),
    )


def _kl(outcomes: Sequence[Outcome]) -> KlSummary:
    kl, agrees = [outcome.kl for outcome in outcomes], [outcome.agrees for outcome in outcomes]
    positions = [*chain.from_iterable(kl)]
    several = len(outcomes) > 1
    return KlSummary(
        mean=fmean(positions),
        standard_error=clustered_error(kl) if several else None,
        **asdict(Quantiles.of(positions)),
        top1=fmean(chain.from_iterable(agrees)),
        top1_standard_error=clustered_error(agrees) if several else None,
        n_positions=len(positions),
        n_questions=len(outcomes),
    )


def _first_token_seconds(measured: Sequence[Measured]) -> list[float]:
    """Seconds to the first token of each answer; dense has nothing kept and must read the document first."""
    return [
        outcome.ttft_s + (each.prefill_s if each.subject == DENSE else 0.0)
        for each in measured
        for outcome in each.outcomes
    ]


def _speed(mine: list[float], dense: list[float]) -> Speed | None:
    if not mine or not dense:
        return None
    seconds, base = Times.of(mine), Times.of(dense)
    return Speed(
        seconds=seconds,
        median_over_dense=seconds.median / base.median,
        p90_over_dense=seconds.p90 / base.p90,
        p99_over_dense=seconds.p99 / base.p99,
    )


def _bytes(mine: Sequence[Measured], dense: Sequence[Measured]) -> ByteSummary:
    documents = {each.document for each in mine}
    base = [each for each in dense if each.document in documents]
    read = [(pair.mine.bytes_read, pair.other.bytes_read) for pair in pairs(mine, base)]
    both = [(one, other) for one, other in read if one is not None and other is not None]

    def over_dense(size: Callable[[Measured], int]) -> float:
        return sum(map(size, mine)) / sum(map(size, base))

    return ByteSummary(
        read=fmean(one for one, _ in both) if both else None,
        resident=fmean(each.resident_bytes for each in mine),
        disk=fmean(each.disk_bytes for each in mine),
        read_over_dense=math.fsum(one for one, _ in both) / math.fsum(other for _, other in both) if both else None,
        resident_over_dense=over_dense(lambda each: each.resident_bytes),
        disk_over_dense=over_dense(lambda each: each.disk_bytes),
    )


def _perplexity(mine: Sequence[Measured], dense: Sequence[Measured]) -> Perplexity | None:
    known = {each.document: each.nll for each in dense}
    documents = [(each.document, each.nll, known[each.document]) for each in mine if each.nll]
    if not documents:
        return None
    tails = [(name, _tail(nll), _tail(base)) for name, nll, base in documents]
    (value, difference), (tail, tail_difference) = (_nats(rows) for rows in (documents, tails))
    return Perplexity(
        value=math.exp(value),
        ratio=math.exp(difference.value),
        difference=difference,
        tail=math.exp(tail),
        tail_ratio=math.exp(tail_difference.value),
        tail_difference=tail_difference,
    )


def _tail(nll: tuple[float, ...]) -> tuple[float, ...]:
    return nll[-max(1, len(nll) // _TAIL_SHARE) :]


def _nats(rows: Sequence[tuple[str, tuple[float, ...], tuple[float, ...]]]) -> tuple[float, MeanScore]:
    """Mean over all tokens, and the mean of the token by token difference to dense."""
    names = [name for name, nll, _ in rows for _ in nll]
    off = [one - other for _, nll, base in rows for one, other in zip(nll, base, strict=True)]
    return fmean(token for _, nll, _ in rows for token in nll), mean_score(off, names)
