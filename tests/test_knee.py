"""The knee of a sweep: which point the rule takes, and what it says when there is no knee."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.errors import ConfigError
from ragkv.evaluation.calibrate.knee import Knee, find_knee

BUDGETS = (64.0, 128.0, 256.0, 512.0, 1024.0)


def knee_of(
    costs: Sequence[float], losses: Sequence[float], errors: Sequence[float] | None = None, *, tolerance: float = 0.02
) -> Knee:
    """The knee of mean losses, each with a given standard error of its difference to a best point without any."""
    rows = zip(losses, errors or [0.0] * len(losses), strict=True)
    return find_knee(costs, [[loss - error, loss + error] for loss, error in rows], tolerance=tolerance)


def test_cheapest_point_within_one_standard_error_of_the_best_is_chosen():
    # The best is 0.10, and differences to it have standard error 0.03: 0.13 is still in, 0.14 is not.
    knee = knee_of(BUDGETS, (1.0, 0.14, 0.13, 0.11, 0.10), (0.03, 0.03, 0.03, 0.03, 0.0), tolerance=0.0)
    assert (knee.chosen, knee.best, knee.flat) == (2, 4, True)
    assert knee.margins == pytest.approx((0.03, 0.03, 0.03, 0.03, 0.0))
    assert "one standard error of the paired difference to the best point" in knee.rule
    assert "knee is at cost 256" in knee.verdict


def test_tolerance_of_the_loss_range_decides_where_errors_are_smaller():
    knee = knee_of(BUDGETS, (1.0, 0.5, 0.119, 0.11, 0.1), (0.001,) * 4 + (0.0,), tolerance=0.02)
    assert knee.margins[0] == pytest.approx(0.018)
    assert knee.chosen == 3


def test_a_curve_that_still_falls_is_not_flat():
    knee = knee_of(BUDGETS, (1.0, 0.8, 0.6, 0.4, 0.2), (0.01,) * 4 + (0.0,))
    assert (knee.chosen, knee.flat) == (4, False)
    assert "did not reach the knee" in knee.verdict


def test_best_point_before_the_end_means_the_curve_is_flat():
    knee = knee_of(BUDGETS, (1.0, 0.5, 0.1, 0.3, 0.2))
    assert (knee.chosen, knee.best, knee.flat) == (2, 2, True)
    assert "not monotone" in knee.verdict


def test_the_cheapest_of_equal_points_is_best():
    knee = knee_of(BUDGETS, (1.0, 0.2, 0.2, 0.2, 0.2))
    assert (knee.chosen, knee.best) == (1, 1)


def test_equal_losses_choose_the_cheapest_of_them():
    knee = knee_of(BUDGETS, (0.3,) * 5)
    assert (knee.chosen, knee.flat) == (0, True)
    assert "may lie below the sweep" in knee.verdict


def test_one_point_is_chosen_but_shows_no_knee():
    knee = knee_of((256.0,), (0.1,))
    assert (knee.chosen, knee.best, knee.flat) == (0, 0, False)
    assert "one point" in knee.verdict


def test_paired_errors_see_what_separate_errors_do_not():
    # Questions differ by 10, points by a steady 0.5: paired differences have no spread at all.
    easy_and_hard = [0.0, 10.0, 20.0, 30.0]
    rows = [[value + shift for value in easy_and_hard] for shift in (1.0, 0.5, 0.0)]
    paired = find_knee((1.0, 2.0, 4.0), rows)
    assert (paired.chosen, paired.flat) == (2, False)
    spread = math.sqrt(sum((value - 15.0) ** 2 for value in easy_and_hard) / 3) / 2
    assert spread > 16.0 - 15.0, "errors of the means alone would call all points equal"


def test_paired_margin_is_the_standard_error_of_the_difference():
    # Differences to the best: 1, 3: mean 2, standard deviation sqrt(2), standard error 1.
    knee = find_knee((1.0, 2.0), [[1.0, 3.0], [0.0, 0.0]], tolerance=0.0)
    assert knee.margins == pytest.approx((1.0, 0.0))
    assert "paired difference" in knee.rule


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), min_size=1, max_size=9), st.floats(0, 1))
def test_chosen_is_within_its_margin_and_every_cheaper_point_is_not(rows: list[tuple[float, float]], share: float):
    knee = find_knee([2.0**index for index in range(len(rows))], rows, tolerance=share)
    losses = [(first + second) / 2 for first, second in rows]
    excess = [loss - min(losses) for loss in losses]
    assert excess[knee.chosen] <= knee.margins[knee.chosen]
    assert all(excess[index] > knee.margins[index] for index in range(knee.chosen))
    assert knee.chosen <= knee.best


@pytest.mark.parametrize(
    ("costs", "losses", "tolerance"),
    [
        ((), (), 0.0),
        ((1.0, 2.0), (0.1,), 0.0),
        ((1.0, 2.0), (0.1, math.nan), 0.0),
        ((1.0, math.inf), (0.1, 0.2), 0.0),
        ((2.0, 1.0), (0.1, 0.2), 0.0),
        ((1.0, 1.0), (0.1, 0.2), 0.0),
        ((0.0, 1.0), (0.1, 0.2), 0.0),
        ((1.0, 2.0), (0.1, 0.2), 1.5),
    ],
)
def test_points_that_cannot_be_judged_are_refused(costs, losses, tolerance):
    with pytest.raises(ConfigError, match=r"^knee: "):
        knee_of(costs, losses, tolerance=tolerance)


@pytest.mark.parametrize("rows", [[], [[1.0, 2.0], [1.0]], [[1.0], [2.0]], [[1.0, math.nan], [1.0, 2.0]]])
def test_paired_rows_that_cannot_be_judged_are_refused(rows):
    with pytest.raises(ConfigError, match=r"^knee: "):
        find_knee([1.0, 2.0][: len(rows)], rows)
