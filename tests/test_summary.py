"""What a run says, by hand: differences to dense, quantiles, ratios, perplexity, and who is on the frontier."""

from __future__ import annotations

import math

import pytest

from ragkv.evaluation.compare import Outcome
from ragkv.evaluation.frontier import Frontier, judge_frontier
from ragkv.evaluation.run import Measured
from ragkv.evaluation.summary import SubjectSummary, summarise
from ragkv.ledger.fit import LOOK_BACK_TOKENS


def outcome(
    item: int,
    *,
    score: float = 1.0,
    kl: tuple[float, ...] = (0.0, 0.0),
    agrees: tuple[float, ...] | None = None,
    same: bool = True,
    ttft: float = 1.0,
    steps: tuple[float, ...] = (0.5,),
    read: float | None = 100.0,
    distance: int | None = None,
    metric: str = "contains",
) -> Outcome:
    return Outcome(
        item=item,
        question=f"question {item}",
        text="text",
        scores={metric: score},
        kl=kl,
        agrees=tuple(1.0 for _ in kl) if agrees is None else agrees,
        same_answer=same,
        ttft_s=ttft,
        step_s=steps,
        bytes_read=read,
        answer_distance=distance,
    )


def measured(
    subject: str,
    *outcomes: Outcome,
    document: str = "a",
    nll: tuple[float, ...] = (),
    resident: int = 1000,
    disk: int = 1000,
    group: str = "kv75",
) -> Measured:
    return Measured(
        document=document,
        group=group,
        subject=subject,
        tokens=4000,
        resident_bytes=resident,
        disk_bytes=disk,
        prefill_s=9.0,
        outcomes=outcomes,
        nll=nll,
    )


def summary(lines: list[Measured], subject: str = "ragkv", imitations: tuple[str, ...] = ()) -> SubjectSummary:
    (group,) = summarise(lines, imitations=imitations)
    return next(each for each in group.subjects if each.subject == subject)


def test_the_difference_to_dense_is_paired_by_item_and_its_error_by_document() -> None:
    lines = [
        measured("dense", outcome(0, score=1.0), outcome(1, score=0.0)),
        measured("dense", outcome(0, score=1.0), outcome(1, score=1.0), document="b"),
        measured("ragkv", outcome(0, score=0.0), outcome(1, score=0.0)),
        measured("ragkv", outcome(0, score=1.0), outcome(1, score=1.0), document="b"),
    ]
    answers = summary(lines).answers
    assert answers is not None
    score = answers.scores["contains"]
    assert score.mean.value == 0.5
    assert score.difference.value == -0.25
    # Differences -1, 0 | 0, 0: deviations from the mean add up to -0.5 and 0.5 by document; sqrt(0.5 * 2) / 4.
    assert score.difference.standard_error == pytest.approx(0.25)
    assert score.fails == 0.5


def test_an_order_of_items_that_differs_is_still_paired_by_item() -> None:
    lines = [
        measured("dense", outcome(0, score=1.0), outcome(1, score=0.0)),
        measured("ragkv", outcome(1, score=0.0), outcome(0, score=1.0)),
    ]
    answers = summary(lines).answers
    assert answers is not None
    assert answers.scores["contains"].difference.value == 0.0
    assert answers.scores["contains"].difference.standard_error is None, "one document says nothing about documents"


@pytest.mark.parametrize(("metric", "fails"), [("contains", 1.0), ("em", 1.0), ("f1", 0.5), ("entity_share", 0.5)])
def test_part_marks_are_no_failure_where_a_metric_gives_them(metric: str, fails: float) -> None:
    lines = [measured("dense", outcome(0, score=0.0, metric=metric), outcome(1, score=0.5, metric=metric))]
    answers = summary(lines, "dense").answers
    assert answers is not None
    assert answers.scores[metric].fails == fails


def test_kl_is_over_positions_and_its_error_over_questions() -> None:
    own = [outcome(0, kl=(1.0, 3.0), agrees=(1.0, 0.0)), outcome(1, kl=(2.0, 6.0), same=False)]
    lines = [measured("dense", outcome(0), outcome(1)), measured("ragkv", *own)]
    answers = summary(lines).answers
    assert answers is not None
    kl = answers.kl
    assert (kl.mean, kl.median, kl.n_positions, kl.n_questions) == (3.0, 2.5, 4, 2)
    assert kl.p90 == pytest.approx(5.1)  # 0.9 of the way along 1, 2, 3, 6: 3 + 0.7 * 3
    assert kl.p99 == pytest.approx(5.91)
    # Sums 4 and 8 are 2 off from 2 * 3 each: sqrt(2**2 + 2**2) / 4.
    assert kl.standard_error == pytest.approx(math.sqrt(8) / 4)
    assert kl.top1 == 0.75
    assert answers.same_answer.value == 0.5


def test_the_first_token_of_dense_includes_the_prefill() -> None:
    own = [outcome(0, ttft=0.5, steps=(0.2, 0.2)), outcome(1, ttft=0.5, steps=(0.4,))]
    base = [outcome(0, ttft=1.0, steps=(0.1, 0.1)), outcome(1, ttft=1.0, steps=(0.1,))]
    mine = summary([measured("dense", *base), measured("ragkv", *own)])
    assert mine.ttft is not None
    assert mine.tpot is not None
    assert mine.ttft.seconds.median == 0.5
    assert mine.ttft.median_over_dense == pytest.approx(0.05)
    assert mine.tpot.seconds.median == pytest.approx(0.2)
    assert mine.tpot.median_over_dense == pytest.approx(2.0)
    assert mine.tpot.seconds.p99 == pytest.approx(0.396)
    assert mine.tokens_per_second == pytest.approx(3 / 0.8)


def test_imitations_have_bytes_and_no_times() -> None:
    lines = [measured("dense", outcome(0)), measured("peer", outcome(0, read=25.0), resident=500, disk=250)]
    peer = summary(lines, "peer", imitations=("peer",))
    assert (peer.ttft, peer.tpot, peer.tokens_per_second) == (None, None, None)
    sizes = peer.bytes
    assert (sizes.read_over_dense, sizes.resident_over_dense, sizes.disk_over_dense) == (0.25, 0.5, 0.25)


def test_answers_of_one_token_read_nothing_that_could_be_compared() -> None:
    lines = [measured("dense", outcome(0), outcome(1)), measured("ragkv", outcome(0, read=None), outcome(1, read=40.0))]
    assert summary(lines).bytes.read == 40.0
    assert summary(lines).bytes.read_over_dense == 0.4


def test_questions_that_look_back_are_told_apart_by_the_distance_of_the_answer() -> None:
    distances = (LOOK_BACK_TOKENS, LOOK_BACK_TOKENS + 1, 3000)
    base = [outcome(index, distance=distance) for index, distance in enumerate(distances)]
    own = [outcome(index, kl=(index + 1.0,), distance=distance) for index, distance in enumerate(distances)]
    mine = summary([measured("dense", *base), measured("ragkv", *own)])
    assert mine.looking_back is not None
    assert mine.near is not None
    assert (mine.looking_back.kl.n_questions, mine.looking_back.kl.mean) == (2, 2.5)
    assert (mine.near.kl.n_questions, mine.near.kl.mean) == (1, 1.0)


def test_without_places_nothing_is_said_about_looking_back() -> None:
    mine = summary([measured("dense", outcome(0)), measured("ragkv", outcome(0))])
    assert (mine.looking_back, mine.near) == (None, None)


def test_perplexity_and_its_tail() -> None:
    base = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0)
    own = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0, 4.0)
    lines = [measured("dense", nll=base, group="long"), measured("ragkv", nll=own, group="long")]
    mine = summary(lines)
    assert mine.answers is None
    found = mine.perplexity
    assert found is not None
    assert found.value == pytest.approx(math.exp(13 / 8))
    assert found.ratio == pytest.approx(math.exp(3 / 8))
    assert found.tail == pytest.approx(math.exp(3.5))
    assert found.tail_ratio == pytest.approx(math.exp(1.5))


def test_short_and_long_documents_are_groups_of_their_own() -> None:
    lines = [
        measured(subject, nll=(nats, nats), group=group, document=group)
        for group, nats in (("short", 1.0), ("long", 2.0))
        for subject in ("dense", "ragkv")
    ]
    short, long = summarise(lines)
    assert (short.group, long.group) == ("short", "long")
    assert short.subjects[1].perplexity is not None
    assert long.subjects[1].perplexity is not None
    assert short.subjects[1].perplexity.value == pytest.approx(math.e)
    assert long.subjects[1].perplexity.value == pytest.approx(math.e**2)


def against(rival_kl: tuple[float, ...], rival_read: float) -> Frontier:
    """ragkv has KL 0.4 at three questions and reads 100 bytes."""
    lines = [
        measured("dense", *(outcome(index, read=900.0) for index in range(3))),
        measured("ragkv", *(outcome(index, kl=(0.4,)) for index in range(3))),
        measured("rival", *(outcome(index, kl=(kl,), read=rival_read) for index, kl in enumerate(rival_kl))),
    ]
    return judge_frontier(lines, "kv75", "kl", "read", subjects=["ragkv"], rivals=["rival"])


def test_a_cheaper_and_clearly_better_rival_pushes_ragkv_off_the_frontier() -> None:
    found = against((0.2, 0.1, 0.3), 50.0)
    (place,) = found.places
    assert not place.on_frontier
    (beaten,) = place.beaten
    assert (beaten.by, beaten.cost_ratio) == ("rival", 0.5)
    assert beaten.gain == pytest.approx(0.2)
    # Gains 0.2, 0.3, 0.1: sqrt(0.1**2 + 0.1**2) / 3.
    assert beaten.standard_error == pytest.approx(math.sqrt(0.02) / 3)
    assert "ragkv is beaten by rival, which costs 0.50x as much" in found.words


@pytest.mark.parametrize(
    ("rival_kl", "rival_read"),
    [
        pytest.param((0.2, 0.1, 0.3), 101.0, id="better but dearer"),
        pytest.param((0.5, 0.5, 0.6), 50.0, id="cheaper but worse"),
        pytest.param((0.0, 0.6, 0.5), 50.0, id="better by less than one standard error"),
    ],
)
def test_ragkv_stays_on_the_frontier(rival_kl: tuple[float, ...], rival_read: float) -> None:
    found = against(rival_kl, rival_read)
    assert found.places[0].on_frontier
    assert "ragkv on the frontier" in found.words


def test_a_higher_score_is_better() -> None:
    lines = [
        measured("dense", outcome(0), outcome(1)),
        measured("ragkv", outcome(0, score=0.0), outcome(1, score=0.0), disk=700),
        measured("rival", outcome(0, score=1.0), outcome(1, score=1.0), disk=600),
    ]
    found = judge_frontier(lines, "kv75", "contains", "disk", subjects=["ragkv"], rivals=["rival"])
    assert [beaten.gain for beaten in found.places[0].beaten] == [1.0]
    assert found.to_dict()["places"][0]["on_frontier"] is False


def test_with_no_rival_there_is_no_frontier_to_be_on() -> None:
    lines = [measured("dense", outcome(0)), measured("ragkv", outcome(0))]
    assert (
        "nothing else was measured" in judge_frontier(lines, "kv75", "kl", "read", subjects=["ragkv"], rivals=[]).words
    )
