"""Scores: hand-computed values of each rule."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.errors import ConfigError, MissingExtraError
from ragkv.evaluation.metrics import (
    METRICS,
    contains,
    entity_share,
    first_line,
)

UUID = "d1ff29be-4e2a-4208-a182-0cea716be3d4"


def exact_match(prediction: str, answers: tuple[str, ...]) -> float:
    return METRICS["squad"](prediction, answers)["em"]


def f1(prediction: str, answers: tuple[str, ...]) -> float:
    return METRICS["squad"](prediction, answers)["f1"]


def exact_match_chinese(prediction: str, answers: tuple[str, ...]) -> float:
    return METRICS["squad_zh"](prediction, answers)["em"]


def f1_chinese(prediction: str, answers: tuple[str, ...]) -> float:
    return METRICS["squad_zh"](prediction, answers)["f1"]


@pytest.mark.parametrize(
    ("prediction", "gold"),
    [("The Cat.", "cat"), ("an  apple", "Apple"), ("don't", "dont"), ("1,000", "1000"), ("the", "a")],
)
def test_squad_ignores_case_articles_punctuation_and_spaces(prediction: str, gold: str) -> None:
    assert exact_match(prediction, (gold,)) == f1(prediction, (gold,)) == 1


@pytest.mark.parametrize(
    ("prediction", "gold", "expected"),
    [
        ("it is 308 points", ("308",), 2 / 5),  # precision 1/4, recall 1
        ("Denver Broncos won", ("Denver Broncos",), 4 / 5),  # precision 2/3, recall 1
        ("a b b", ("b b c",), 4 / 5),  # the article goes: precision 1, recall 2/3
        ("", ("cat",), 0),
        ("dog", ("cat",), 0),
        ("dog", ("cat", "black dog", "dog"), 1),  # the best gold answer counts
    ],
)
def test_f1_is_that_of_the_words(prediction: str, gold: tuple[str, ...], expected: float) -> None:
    assert f1(prediction, gold) == pytest.approx(expected)


def test_exact_match_wants_the_whole_answer() -> None:
    assert exact_match("308 points", ("308",)) == 0


def test_chinese_tokens_are_characters_and_runs_of_latin_or_digits() -> None:
    assert f1_chinese("黑豹队", ("黑豹",)) == pytest.approx(4 / 5)  # precision 2/3, recall 1
    assert f1_chinese("308分", ("308",)) == pytest.approx(2 / 3)  # two tokens, one of them right


def test_chinese_punctuation_and_spaces_do_not_matter() -> None:
    assert exact_match_chinese("《卡万·肖特》。", ("卡万 肖特",)) == 1
    assert exact_match("黑豹。", ("黑豹",)) == 0  # the English rule knows ASCII punctuation only


def test_contains_wants_whole_words_in_any_case() -> None:
    assert contains(f"The value is `{UUID.upper()}`.", (UUID,)) == 1
    assert contains(UUID[:-1], (UUID,)) == 0
    assert contains("It is in the bathroom", ("bath",)) == 0


def test_entity_share_counts_names_in_their_own_case() -> None:
    assert entity_share("Strike's crew reach Venus and strike.", ("Strike", "Venus", "Gorman", "Mars")) == 0.5
    assert entity_share("they strike", ("Strike",)) == 0


def test_first_line_skips_empty_lines_and_drops_the_rest() -> None:
    assert first_line("\n  308 \nBecause the text says so.") == "308"
    assert first_line(" \n") == ""


def test_registered_metrics_name_their_scores() -> None:
    names = {name: set(metric("308\nas the text says", ("308",))) for name, metric in METRICS.items()}
    assert names == {
        "squad": {"em", "f1"},
        "squad_zh": {"em", "f1"},
        "contains": {"contains"},
        "entity_share": {"entity_share"},
    }


def test_an_explanation_below_the_answer_does_not_count_against_it() -> None:
    assert METRICS["squad"]("308\nas the text says", ("308",)) == {"em": 1, "f1": 1}


@settings(max_examples=40, deadline=None)
@given(prediction=st.text(max_size=30), gold=st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=3))
def test_scores_lie_between_0_and_1(prediction: str, gold: list[str]) -> None:
    for metric in METRICS.values():
        assert all(0 <= score <= 1 for score in metric(prediction, tuple(gold)).values())


@pytest.mark.parametrize("name", METRICS)
def test_no_gold_answer_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match="no gold answers"):
        METRICS[name]("308", ())


def test_without_torchmetrics_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchmetrics.functional.text", None)
    with pytest.raises(MissingExtraError, match=r"ragkv\[eval\]"):
        exact_match("308", ("308",))
