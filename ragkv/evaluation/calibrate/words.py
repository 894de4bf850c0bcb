"""A calibration in words: what was chosen, against the base recipe, and whether more budget still helps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from ragkv.evaluation.calibrate.rule import MIN_LAYERS, Point
from ragkv.evaluation.calibrate.search import Calibration
from ragkv.evaluation.report.page import Cell
from ragkv.recipe import Recipe


@dataclass(frozen=True)
class About:
    """What was calibrated, for a reader: ``archives`` maps names to tokens, ``questions`` says what was asked.

    ``base`` is what the report calls the base recipe, in one word; ``settings`` stand at the end of it.
    """

    model: str
    archives: Mapping[str, int]
    questions: str
    metric: str | None
    base: str
    settings: Mapping[str, Cell]


def verdict(calibration: Calibration, about: About) -> str:
    """What was chosen, against the base recipe, and whether more budget still helps."""
    final, base = calibration.final, calibration.base
    if calibration.base_is_better:
        found = calibration.found
        against = (
            f"It is the {about.base} recipe itself: what the rule found ({describe(found.recipe)}) loses more, "
            f"{found.loss:.3g} (standard error of the difference {found.error_to(base):.2g})."
        )
    elif final.recipe == base.recipe:
        against = f"It is the {about.base} recipe itself."
    else:
        against = f"The {about.base} recipe ({describe(base.recipe)}): {_figures(base)}. {_compared(final, base)}"
    return (
        f"Chosen: {describe(final.recipe)}: {_figures(final)}. {against} {more_budget(calibration)} "
        f"{layer_verdict(calibration)}"
    )


def describe(recipe: Recipe) -> str:
    """A recipe in a few words."""
    same = recipe.key_codec == recipe.value_codec
    codec = recipe.key_codec if same else f"{recipe.key_codec} keys and {recipe.value_codec} values"
    recall, by_layer = recipe.recall, ", with budgets by layer" if recipe.recall.layer_budgets else ""
    how = f"a budget of {recall.budget} tokens{by_layer}"
    if recall.top_m is not None:
        how = f"the best {recall.top_m} clusters"
    elif recall.mass is not None:
        how = f"{recall.mass:.0%} of the attention, {recall.floor} to {recall.cap} tokens"
    return f"{recipe.tokens_per_cluster} tokens per cluster, {codec}, {how}"


def _figures(point: Point) -> str:
    return (
        f"KL {point.loss:.3g}, same answer as dense {fmean(point.same):.0%}, reads {point.read:.1%} of the dense cache "
        f"per answer token, resident {point.resident:.1%}, on disk {point.disk:.1%}"
    )


def _compared(final: Point, base: Point) -> str:
    gain, error = base.loss - final.loss, base.error_to(final)
    if abs(gain) <= error:
        return f"The two lose alike: the difference of {abs(gain):.2g} is within one standard error, {error:.2g}."
    return f"The chosen one loses {'less' if gain > 0 else 'more'}, by {abs(gain):.2g} (standard error {error:.2g})."


def more_budget(calibration: Calibration) -> str:
    curve, knee = calibration.choice.curve, calibration.choice.budget_knee
    chosen, best = curve[knee.chosen], curve[knee.best]
    if len(curve) == 1:
        return "Only one budget was tried, so there is no knee."
    if not knee.flat:
        return f"More budget still helps at {chosen.budget}, the largest tried: there is no knee within the sweep."
    below = " The knee may lie below the budgets that were tried." if knee.chosen == 0 else ""
    if knee.best == knee.chosen:
        return f"The knee is at a budget of {chosen.budget}: no larger one is better.{below}"
    return (
        f"The knee is at a budget of {chosen.budget}: going on to {best.budget} gains {chosen.loss - best.loss:.2g}, "
        f"within the margin of {knee.margins[knee.chosen]:.2g}.{below}"
    )


def layer_verdict(calibration: Calibration) -> str:
    check = calibration.layer_check
    if check is None:
        return f"Budgets by layer were not tried: fewer than {MIN_LAYERS} layers recall."
    decision = "were kept" if check.kept else "were not kept"
    change = "lower" if check.gain >= 0 else "higher"
    return (
        f"Budgets by layer {decision}: they make the loss {change} by {abs(check.gain):.2g} "
        f"(from {check.even.loss:.3g} to {check.by_layer.loss:.3g}), with a standard error of {check.error:.2g}."
    )
