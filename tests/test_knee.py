"""The knee of a sweep: which point the rule takes, its second opinion, and what it says when there is no knee."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.errors import ConfigError
from ragkv.evaluation.calibrate.knee import find_knee, find_paired_knee

BUDGETS = (64.0, 128.0, 256.0, 512.0, 1024.0)


def test_cheapest_point_within_one_standard_error_of_the_best_is_chosen():
    # The best is 0.10 with standard error 0.03: 0.13 is still in, 0.14 is not.
    knee = find_knee(BUDGETS, (1.0, 0.14, 0.13, 0.11, 0.10), (0.5, 0.5, 0.5, 0.5, 0.03), tolerance=0.0)
    assert (knee.chosen, knee.best, knee.flat) == (2, 4, True)
    assert knee.margins == (0.03,) * 5
    assert "one standard error of the best point" in knee.rule
    assert "knee is at cost 256" in knee.verdict


def test_tolerance_of_the_loss_range_decides_where_errors_are_smaller():
    knee = find_knee(BUDGETS, (1.0, 0.5, 0.119, 0.11, 0.1), (0.001,) * 5, tolerance=0.02)
    assert knee.margins[0] == pytest.approx(0.018)
    assert knee.chosen == 3


def test_a_curve_that_still_falls_is_not_flat():
    knee = find_knee(BUDGETS, (1.0, 0.8, 0.6, 0.4, 0.2), (0.01,) * 5)
    assert (knee.chosen, knee.flat) == (4, False)
    assert "did not reach the knee" in knee.verdict


def test_best_point_before_the_end_means_the_curve_is_flat():
    knee = find_knee(BUDGETS, (1.0, 0.5, 0.1, 0.3, 0.2))
    assert (knee.chosen, knee.best, knee.flat) == (2, 2, True)
    assert "not monotone" in knee.verdict


def test_the_cheapest_of_equal_points_is_best():
    knee = find_knee(BUDGETS, (1.0, 0.2, 0.2, 0.2, 0.2))
    assert (knee.chosen, knee.best) == (1, 1)


def test_equal_losses_choose_the_cheapest_and_have_no_second_opinion():
    knee = find_knee(BUDGETS, (0.3,) * 5)
    assert (knee.chosen, knee.second_opinion, knee.flat) == (0, None, True)
    assert "may lie below the sweep" in knee.verdict


def test_one_point_is_chosen_but_shows_no_knee():
    knee = find_knee((256.0,), (0.1,), (0.01,))
    assert (knee.chosen, knee.best, knee.second_opinion, knee.flat) == (0, 0, None, False)
    assert "one point" in knee.verdict


def test_second_opinion_is_the_largest_distance_over_log_cost():
    # log2 of the costs, scaled: 0, 1/4, 1/2, 3/4, 1; scaled drops 0, 0.5, 0.9, 0.95, 1: distances 0, .25, .4, .2, 0.
    assert find_knee(BUDGETS, (1.0, 0.5, 0.1, 0.05, 0.0)).second_opinion == 2


def test_a_curve_above_its_chord_has_no_second_opinion():
    assert find_knee(BUDGETS, (1.0, 0.95, 0.9, 0.8, 0.0)).second_opinion is None


def test_paired_errors_see_what_separate_errors_do_not():
    # Questions differ by 10, points by a steady 0.5: paired differences have no spread at all.
    easy_and_hard = [0.0, 10.0, 20.0, 30.0]
    rows = [[value + shift for value in easy_and_hard] for shift in (1.0, 0.5, 0.0)]
    paired = find_paired_knee((1.0, 2.0, 4.0), rows)
    assert (paired.chosen, paired.flat) == (2, False)
    spread = math.sqrt(sum((value - 15.0) ** 2 for value in easy_and_hard) / 3) / 2
    separate = find_knee((1.0, 2.0, 4.0), (16.0, 15.5, 15.0), (spread,) * 3)
    assert separate.chosen == 0


def test_paired_margin_is_the_standard_error_of_the_difference():
    # Differences to the best: 1, 3: mean 2, standard deviation sqrt(2), standard error 1.
    knee = find_paired_knee((1.0, 2.0), [[1.0, 3.0], [0.0, 0.0]], tolerance=0.0)
    assert knee.margins == pytest.approx((1.0, 0.0))
    assert "paired difference" in knee.rule


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9), st.floats(0, 10), st.floats(0, 1))
def test_chosen_is_within_its_margin_and_every_cheaper_point_is_not(losses: list[float], error: float, share: float):
    costs = [2.0**index for index in range(len(losses))]
    knee = find_knee(costs, losses, [error] * len(losses), tolerance=share)
    excess = [loss - min(losses) for loss in losses]
    assert excess[knee.chosen] <= knee.margins[knee.chosen]
    assert all(excess[index] > knee.margins[index] for index in range(knee.chosen))
    assert knee.chosen <= knee.best


@pytest.mark.parametrize(
    ("costs", "losses", "errors", "tolerance"),
    [
        ((), (), None, 0.0),
        ((1.0, 2.0), (0.1,), None, 0.0),
        ((1.0, 2.0), (0.1, math.nan), None, 0.0),
        ((1.0, math.inf), (0.1, 0.2), None, 0.0),
        ((1.0, 2.0), (0.1, 0.2), (0.1, math.nan), 0.0),
        ((1.0, 2.0), (0.1, 0.2), (0.1,), 0.0),
        ((1.0, 2.0), (0.1, 0.2), (0.1, -0.1), 0.0),
        ((2.0, 1.0), (0.1, 0.2), None, 0.0),
        ((1.0, 1.0), (0.1, 0.2), None, 0.0),
        ((0.0, 1.0), (0.1, 0.2), None, 0.0),
        ((1.0, 2.0), (0.1, 0.2), None, 1.5),
    ],
)
def test_points_that_cannot_be_judged_are_refused(costs, losses, errors, tolerance):
    with pytest.raises(ConfigError, match=r"^knee: "):
        find_knee(costs, losses, errors, tolerance=tolerance)


@pytest.mark.parametrize("rows", [[], [[1.0, 2.0], [1.0]], [[1.0], [2.0]], [[1.0, math.nan], [1.0, 2.0]]])
def test_paired_rows_that_cannot_be_judged_are_refused(rows):
    with pytest.raises(ConfigError, match=r"^knee: "):
        find_paired_knee([1.0, 2.0][: len(rows)], rows)
