"""Whether an archive suits a workload: five questions, each with its figure and rule, and a plain verdict.

A verdict is built from the answers alone: one firm no and ragkv does not fit; any doubt and it is to be piloted first;
five firm yeses and it fits. Nothing is measured here: the figures come from a ledger, from a request log or from the
user's own description.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from ragkv.errors import ConfigError
from ragkv.ledger.ledger import KV_SHARE_WORTH, LedgerRow

Grade = Literal["yes", "no", "unknown"]
Verdict = Literal["fits", "pilot first", "does not fit"]

LONG_TOKENS = 16_384
"""Contexts up to here are short: half of them beyond it is often (the project's range of 16k to 32k, lower end)."""
VERY_LONG_TOKENS = 32_768
"""A tenth of the contexts beyond here is often, too (the same range, upper end)."""
P90_OVER_MEDIAN = 2
"""Assumed where only the median is known; a judgement, and said so in the evidence."""
LOOK_BACK_TOKENS = 512
"""Text further back than this many tokens is earlier text: "the last few hundred tokens" made a number."""
LOOK_BACK_OFTEN = 0.25
"""Share of answers that refer back from which it is often; a judgement, not a measurement."""
LOOK_BACK_SELDOM = 0.10
"""Share up to which it is seldom, so that a sliding window would do; a judgement, not a measurement."""
ROOMY_CARD = 0.5
"""Weights and KV below this share of the card leave room enough, whatever their own ratio; a judgement."""
BUILD_OVER_PREFILL = 0.25
"""Clustering and writing over the prefill, rounded up: 0.22 at 8,192 tokens in the README's benchmark."""
QUESTIONS_WORTH = 2.0
"""Questions per document that repay a build: the second one costs no prefill."""
TUNING_DAYS = 5
"""Days to calibrate, pilot a layer, compare and widen: one working week; a judgement."""
MIN_REQUESTS = 30
"""A log below this says too little for a yes: its 90th percentile rests on fewer than four requests; a judgement."""

BOTTLENECKS = ("memory", "latency", "unknown")
QUESTIONS = {
    "contexts": "Are contexts often beyond 16k-32k tokens?",
    "look_back": "Do answers often refer back to earlier text?",
    "memory": "Is memory the bottleneck rather than latency?",
    "tuning": "Is there room to tune, and an evaluation to catch a loss?",
    "reuse": "Is a document asked more than once?",
}
_OBJECTIONS = {
    "contexts": "contexts are too short",
    "look_back": "answers seldom refer back to earlier text",
    "memory": "memory is not what limits you",
    "tuning": "a loss of quality could be neither tuned away nor caught",
    "reuse": "a document is not asked often enough to repay its build",
}
_PLAIN = "the plain KV cache"
_PREFIX = "prefix caching for documents that come again, exact and as quick"
_QUANTISED = "an 8-bit quantised cache where memory is short"
_SHORTER = "a shorter context, or retrieval of the few passages that matter"
_INSTEAD = {
    "contexts": (_PLAIN,),
    "look_back": (_SHORTER,),
    "memory": (_PLAIN, _PREFIX),
    "tuning": (_PLAIN, _PREFIX, _QUANTISED),
    "reuse": (_PLAIN, _QUANTISED),
}
_POINTLESS = {"memory": _QUANTISED, "reuse": _PREFIX}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is known of a workload; None where it is not known. A described one has no `n_requests`.

    Parameters
    ----------
    context_median, context_p90, context_p99
        Tokens of context per request; percentiles of a log are nearest-rank, so each is a length that occurred.
    n_requests, share_beyond_16k, share_beyond_32k
        Requests of the log, and shares of them with more than `LONG_TOKENS` and `VERY_LONG_TOKENS`.
    questions_per_document, share_asked_once
        Mean requests per document (total cost follows the mean), and the share of documents with a single request.
    look_back_share, n_look_back
        Share of answers that draw on text more than `LOOK_BACK_TOKENS` back, and how many requests tell.
    fresh_ttft_p90_s, fresh_ttft_limit_s
        Seconds to the first token on documents never seen before: measured in the log, and allowed at most.
    bottleneck
        The user's word, one of `BOTTLENECKS`.
    tuning_days, has_evaluation
        Days there are to tune, and whether there is an offline evaluation.

    Raises
    ------
    ConfigError
        If a value is out of its range.
    """

    context_median: int
    context_p90: int | None = None
    context_p99: int | None = None
    n_requests: int | None = None
    share_beyond_16k: float | None = None
    share_beyond_32k: float | None = None
    questions_per_document: float | None = None
    share_asked_once: float | None = None
    look_back_share: float | None = None
    n_look_back: int | None = None
    fresh_ttft_p90_s: float | None = None
    fresh_ttft_limit_s: float | None = None
    bottleneck: str = "unknown"
    tuning_days: float | None = None
    has_evaluation: bool | None = None

    def __post_init__(self) -> None:
        _check("context tokens", self.context_median, low=1)
        _check("context p90", self.context_p90, low=self.context_median, why=", the median")
        _check("questions per document", self.questions_per_document, low=1)
        _check("look-back share", self.look_back_share, low=0, high=1)
        _check("limit of the first token in seconds", self.fresh_ttft_limit_s, low=0)
        _check("tuning days", self.tuning_days, low=0)
        if self.bottleneck not in BOTTLENECKS:
            raise ConfigError(f"bottleneck is {self.bottleneck!r}; give one of {', '.join(BOTTLENECKS)}")

    @property
    def lengths(self) -> tuple[int, ...]:
        """Context lengths to account for: the median and, where known, the 90th percentile."""
        return tuple(length for length in (self.context_median, self.context_p90) if length is not None)


@dataclass(frozen=True, kw_only=True)
class FitAnswer:
    """One question answered; `borderline` marks a yes or no that a closer look could turn.

    ``key`` is a key of `QUESTIONS`, ``evidence`` the figure, ``rule`` the thresholds it was held against and
    ``find_out`` what to do where the answer is unknown or borderline, else None.
    """

    key: str
    answer: Grade
    evidence: str
    rule: str
    borderline: bool = False
    find_out: str | None = None

    @property
    def question(self) -> str:
        """The question in words."""
        return QUESTIONS[self.key]

    @property
    def is_firm(self) -> bool:
        """Whether the answer is a yes or no beyond doubt."""
        return self.answer != "unknown" and not self.borderline


@dataclass(frozen=True)
class Fit:
    """The verdict, the sentence why, and what to use instead of ragkv (empty unless it does not fit)."""

    answers: tuple[FitAnswer, ...]
    verdict: Verdict
    why: str
    instead: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values for JSON."""
        answers = [{"question": answer.question, **asdict(answer)} for answer in self.answers]
        return {"verdict": self.verdict, "why": self.why, "instead": list(self.instead), "answers": answers}


def judge(workload: Workload, rows: Sequence[LedgerRow]) -> Fit:
    """Answer the questions and give the verdict.

    Parameters
    ----------
    workload
        From `ragkv.ledger.request_log.read_log`, or described.
    rows
        The ledger at `workload.lengths` and the batch that is served; empty when there is no model to account for.

    Raises
    ------
    ConfigError
        If there are rows, but none for one of the lengths.
    """
    by_length = {row.n_tokens: row for row in rows}
    missing = [length for length in workload.lengths if length not in by_length]
    if rows and missing:
        raise ConfigError(f"the ledger has no row for {missing[0]} tokens; build it at the lengths of the workload")
    reuse = _reuse(workload)
    answers = (
        _contexts(workload),
        _look_back(workload),
        _memory(workload, [by_length[length] for length in workload.lengths] if rows else [], reuse),
        _tuning(workload),
        reuse,
    )
    objections = [answer.key for answer in answers if answer.is_firm and answer.answer == "no"]
    doubts = [answer.key.replace("_", "-") for answer in answers if not answer.is_firm]
    if workload.n_requests is not None and workload.n_requests < MIN_REQUESTS:
        doubts.append(f"what a log of {workload.n_requests} (under {MIN_REQUESTS}) tells")
    if objections:
        why = f"{_listed([_OBJECTIONS[key] for key in objections])}."
        return Fit(answers, "does not fit", why[0].upper() + why[1:], _instead(objections))
    if doubts:
        doubtful = f"{_listed(doubts)} {'is' if len(doubts) == 1 else 'are'} in doubt"
        remedy = "settle that, or archive one document and compare with dense attention (ragkv bench --text)"
        return Fit(answers, "pilot first", f"Nothing speaks firmly against it, but {doubtful}: {remedy}.", ())
    why = "Contexts are long, referred back to and asked again, memory runs short, and a loss would be caught."
    return Fit(answers, "fits", why, ())


def _instead(objections: Sequence[str]) -> tuple[str, ...]:
    """What to use instead, each once, without what another objection makes pointless."""
    pointless = {_POINTLESS[key] for key in objections if key in _POINTLESS}
    wanted = dict.fromkeys(other for key in objections for other in _INSTEAD[key])
    return tuple(other for other in wanted if other not in pointless)


def _contexts(workload: Workload) -> FitAnswer:
    median, p90 = workload.context_median, workload.context_p90
    upper = P90_OVER_MEDIAN * median if p90 is None else p90
    evidence = f"median {median:,}, p90 "
    evidence += f"{upper:,} tokens" if p90 is not None else f"unknown, taken as twice that ({upper:,} tokens)"
    if workload.n_requests is not None:
        evidence += f", p99 {workload.context_p99:,}; {workload.share_beyond_16k:.0%} beyond {LONG_TOKENS:,}, "
        evidence += f"{workload.share_beyond_32k:.0%} beyond {VERY_LONG_TOKENS:,} ({workload.n_requests:,} requests)"
    firm = median > LONG_TOKENS or (p90 is not None and upper > VERY_LONG_TOKENS)
    borderline = not firm and upper > LONG_TOKENS
    return FitAnswer(
        key="contexts",
        answer="yes" if firm or borderline else "no",
        borderline=borderline,
        evidence=evidence,
        rule=f"yes: median over {LONG_TOKENS:,} or p90 over {VERY_LONG_TOKENS:,}; no: p90 at most {LONG_TOKENS:,}",
        find_out="log the context length of a week's requests; archive the long ones only" if borderline else None,
    )


def _look_back(workload: Workload) -> FitAnswer:
    share = workload.look_back_share
    evidence = "not known" if share is None else f"{share:.0%} of answers refer back"
    if share is not None and workload.n_look_back is not None:
        evidence += f" ({workload.n_look_back:,} of {workload.n_requests or workload.n_look_back:,} requests tell)"
    return _scaled(
        FitAnswer(
            key="look_back",
            answer="unknown",
            evidence=evidence,
            rule=f"yes: {LOOK_BACK_OFTEN:.0%} or more draw on text over {LOOK_BACK_TOKENS} tokens back; "
            f"no: {LOOK_BACK_SELDOM:.0%} or fewer",
            find_out="for fifty answers, note where in the text they come from, as cited_position in a log",
        ),
        share,
        low=LOOK_BACK_SELDOM,
        high=LOOK_BACK_OFTEN,
    )


def _reuse(workload: Workload) -> FitAnswer:
    mean, once = workload.questions_per_document, workload.share_asked_once
    evidence = "not known" if mean is None else f"{mean:.1f} questions per document"
    if once is not None:
        evidence += f", {once:.0%} of documents asked once"
    return _scaled(
        FitAnswer(
            key="reuse",
            answer="unknown",
            evidence=evidence,
            rule=f"yes: {QUESTIONS_WORTH:g} or more; no: {1 + BUILD_OVER_PREFILL:g} or fewer, what one prefill and a "
            f"build of about {BUILD_OVER_PREFILL:g} prefills cost",
            find_out="count the requests per document, as document in a log",
        ),
        mean,
        low=1 + BUILD_OVER_PREFILL,
        high=QUESTIONS_WORTH,
    )


def _tuning(workload: Workload) -> FitAnswer:
    days, evaluation = workload.tuning_days, workload.has_evaluation
    told = {None: "evaluation not known", True: "an offline evaluation", False: "no offline evaluation"}[evaluation]
    answer = FitAnswer(
        key="tuning",
        answer="unknown",
        evidence=("days not known" if days is None else f"{days:g} days to tune") + f", {told}",
        rule=f"yes: {TUNING_DAYS} days or more and an offline evaluation; no: less than a day, or no evaluation",
        find_out="collect fifty questions with known answers, and plan a week to calibrate and compare",
    )
    if evaluation is False or (days is not None and days < 1):
        return replace(answer, answer="no", find_out=None)
    if days is None or evaluation is None:
        return answer
    short = days < TUNING_DAYS
    return replace(
        answer,
        answer="yes",
        borderline=short,
        find_out="find a week, or pilot a single layer in the days there are" if short else None,
    )


def _memory(workload: Workload, rows: Sequence[LedgerRow], reuse: FitAnswer) -> FitAnswer:
    """The ledger first, then the user's word, then a limit on the first token of documents never seen before."""
    answer = _with_word(_by_ledger(rows), workload.bottleneck)
    limit, measured = workload.fresh_ttft_limit_s, workload.fresh_ttft_p90_s
    if limit is not None:
        evidence = f"{answer.evidence}; first token due in {limit:g} s on fresh documents"
        late = True
        if measured is not None:
            expected = (1 + BUILD_OVER_PREFILL) * measured
            late = expected > limit
            evidence += f", p90 of theirs {measured:.3g} s, about {expected:.3g} s with a build"
        answer = replace(answer, evidence=evidence)
        if late and reuse.answer != "yes":
            answer = replace(answer, answer="no", borderline=False)
        elif late and answer.answer == "yes":
            answer = replace(answer, borderline=True)
    return replace(answer, find_out=None) if answer.is_firm else answer


def _by_ledger(rows: Sequence[LedgerRow]) -> FitAnswer:
    answer = FitAnswer(
        key="memory",
        answer="unknown",
        evidence="no model to account for",
        rule=f"yes: KV over {KV_SHARE_WORTH:.1%} of total memory at the median context, or only an archive fits the "
        "card; no: neither, even at p90; no: a first-token limit on fresh documents that a build would break",
        find_out="name the model and the card, and measure peak memory at the batch you serve",
    )
    if not rows:
        return answer
    over, last = [_is_tight(row) for row in rows], rows[-1]
    answer = replace(answer, evidence="; ".join(_share_text(row) for row in dict.fromkeys(rows)))
    if not any(over):
        return answer if None in over else replace(answer, answer="no")
    doubt = over[0] is not True
    if last.archive_fits is False:
        doubt, answer = True, replace(answer, evidence=f"{answer.evidence}; not even the archive fits the card")
    if last.gpu_memory is not None and last.weights is not None:
        used = (last.kv.logical + last.weights) / last.gpu_memory
        if used < ROOMY_CARD:
            doubt, answer = True, replace(answer, evidence=f"{answer.evidence}; both take only {used:.0%} of the card")
    return replace(answer, answer="yes", borderline=doubt)


def _is_tight(row: LedgerRow) -> bool | None:
    """Whether KV weighs enough; without weights, over a third of the card settles it, and less settles nothing."""
    if row.worth_it is not None:
        return row.worth_it or bool(row.fits is False and row.archive_fits)
    return True if row.gpu_share is not None and row.gpu_share > KV_SHARE_WORTH else None


def _share_text(row: LedgerRow) -> str:
    shares = [f"{row.kv_share:.0%} of total memory"] if row.kv_share is not None else []
    shares += [f"{row.gpu_share:.0%} of the card"] if row.gpu_share is not None else []
    at = f"at {row.n_tokens:,} tokens"
    return f"KV is {' and '.join(shares)} {at}" if shares else f"KV share unknown {at}: no weights, no card"


def _with_word(answer: FitAnswer, word: str) -> FitAnswer:
    """A word settles what figures leave open, and puts figures that say otherwise in doubt."""
    if word == "unknown":
        return answer
    said: Grade = "yes" if word == "memory" else "no"
    evidence = f"{answer.evidence}; you say {word}"
    if answer.answer == "unknown":
        return replace(answer, answer=said, evidence=evidence)
    return replace(answer, borderline=answer.borderline or answer.answer != said, evidence=evidence)


def _scaled(answer: FitAnswer, value: float | None, *, low: float, high: float) -> FitAnswer:
    """Yes from `high` on, no up to `low`, a borderline yes between them; `answer` as it is where nothing is known."""
    if value is None:
        return answer
    borderline = low < value < high
    return replace(
        answer,
        answer="no" if value <= low else "yes",
        borderline=borderline,
        find_out=answer.find_out if borderline else None,
    )


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _check(name: str, value: float | None, *, low: float, high: float = math.inf, why: str = "") -> None:
    if value is None or (math.isfinite(value) and low <= value <= high):
        return
    allowed = f"from {low} to {high}" if math.isfinite(high) else f"of at least {low}"
    raise ConfigError(f"{name} is {value!r}; give a number {allowed}{why}")
