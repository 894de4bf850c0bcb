"""Means, errors and quantiles: hand-computed values, and errors that know what belongs together."""

from __future__ import annotations

import math
from dataclasses import astuple

import pytest

from ragkv.errors import ConfigError
from ragkv.evaluation.stats import Quantiles, clustered_error, mean_score, paired_error, standard_error


def test_one_item_a_document_gives_the_ordinary_standard_error() -> None:
    mean = mean_score([0.0, 1.0, 1.0, 0.0], ["a", "b", "c", "d"])
    assert mean.value == 0.5
    assert mean.standard_error == pytest.approx(math.sqrt((4 * 0.25) / 3 / 4))


def test_items_that_repeat_within_a_document_add_no_certainty() -> None:
    once = mean_score([0.0, 1.0, 1.0], ["a", "b", "c"])
    thrice = mean_score([0.0] * 3 + [1.0] * 6, ["a"] * 3 + ["b"] * 3 + ["c"] * 3)
    assert thrice.standard_error == pytest.approx(once.standard_error)
    assert (thrice.n_items, thrice.n_documents) == (9, 3)


def test_one_document_has_no_standard_error() -> None:
    assert mean_score([0.0, 1.0], ["a", "a"]).standard_error is None


@pytest.mark.parametrize(("scores", "documents"), [([], []), ([1.0], ["a", "b"])])
def test_scores_and_documents_must_pair_up(scores: list[float], documents: list[str]) -> None:
    with pytest.raises(ConfigError, match="one name a score"):
        mean_score(scores, documents)


def test_the_standard_error_of_a_mean_by_hand() -> None:
    assert standard_error([1.0, 3.0]) == pytest.approx(1.0)  # standard deviation sqrt 2, over sqrt 2
    assert standard_error([1.0]) == 0.0
    assert standard_error([1.0, 0.0, 0.0, 0.0], ddof=0) == pytest.approx(math.sqrt(0.25 * 0.75 / 4))  # of a share


def test_a_steady_difference_has_no_error() -> None:
    assert paired_error([1.0, 10.0, 100.0], [0.5, 9.5, 99.5]) == 0.0


def test_values_of_one_cluster_count_as_one() -> None:
    assert clustered_error([[1.0], [3.0]]) == pytest.approx(math.sqrt(2) / 2)
    assert clustered_error([[1.0] * 5, [3.0] * 5]) == pytest.approx(math.sqrt(2) / 2)


def test_quantiles_lie_between_the_nearest_two() -> None:
    assert astuple(Quantiles.of([4.0, 1.0, 3.0, 2.0])) == pytest.approx((2.5, 3.7, 3.97))
