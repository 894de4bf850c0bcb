"""The knee of a quality-against-cost curve: the cheapest point that is as good as the best one, by a stated rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ragkv.errors import ConfigError
from ragkv.evaluation.stats import paired_error

DEFAULT_TOLERANCE = 0.02

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Knee:
    """Where a curve of loss against cost stops paying, as indices into the points that were given.

    ``chosen`` is the answer of the rule that ``rule`` states in words, ``best`` the point of lowest loss (the cheapest
    of equals). ``flat`` is whether the curve is seen to have flattened: a point cheaper than the dearest one is as good
    as the best. ``margins`` holds, for each point, by how much its loss may
    exceed the lowest one. ``verdict`` is one paragraph for a reader.
    """

    chosen: int
    best: int
    flat: bool
    margins: tuple[float, ...]
    rule: str
    verdict: str


def find_knee(
    costs: Sequence[float], losses_by_question: Sequence[Sequence[float]], *, tolerance: float = DEFAULT_TOLERANCE
) -> Knee:
    """The cheapest point whose loss is within max(one standard error, `tolerance` of the loss range) of the lowest.

    This is the one-standard-error rule (Breiman, Friedman, Olshen and Stone, Classification and Regression Trees,
    1984, section 3.4.3). The loss of a point is its mean over questions. Hard questions are hard at every point, so
    the standard error is that of the mean paired difference between a point and the best one: usually much smaller
    than that of a mean. The tolerance keeps differences that are measured very precisely, but are too small to matter,
    from moving the choice.

    Parameters
    ----------
    costs
        (n_points,) strictly increasing and positive; any unit.
    losses_by_question
        (n_points, n_questions), at least two questions; lower is better, any unit.
    tolerance
        Share of the range of the mean losses (highest minus lowest), from 0 to 1.

    Raises
    ------
    ConfigError
        If there are no points, the lengths differ, there are fewer than two questions, a value is not finite, or the
        costs do not increase.
    """
    lengths = {len(row) for row in losses_by_question}
    if len(lengths) != 1 or min(lengths) < 2:
        raise ConfigError(
            f"knee: points were measured on {sorted(lengths)} questions; give the same two or more for each"
        )
    cost, by_question = _finite("costs", costs), _finite("losses", losses_by_question)
    loss = by_question.mean(axis=1)
    _check(cost, loss, tolerance)
    best = int(loss.argmin())
    errors = np.array([paired_error(row, by_question[best]) for row in by_question])
    margins = np.maximum(errors, tolerance * np.ptp(loss))
    chosen = int((loss - loss[best] <= margins).argmax())
    return Knee(
        chosen=chosen,
        best=best,
        flat=chosen < len(cost) - 1,
        margins=tuple(margins.tolist()),
        rule=(
            "The cheapest point whose loss exceeds the lowest one by no more than one standard error of the paired "
            f"difference to the best point or {tolerance:.0%} of the loss range, whichever is more "
            "(one-standard-error rule, Breiman et al. 1984)."
        ),
        verdict=_verdict(cost, loss, chosen=chosen, best=best, margin=float(margins[chosen])),
    )


def _finite(name: str, values: Sequence[float] | Sequence[Sequence[float]]) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    if not np.isfinite(array).all():
        raise ConfigError(f"knee: the {name} hold {array[~np.isfinite(array)][0]}; give finite numbers")
    return array


def _check(cost: Floats, loss: Floats, tolerance: float) -> None:
    if len(cost) == 0 or cost.shape != loss.shape:
        raise ConfigError(f"knee: {len(cost)} costs and {len(loss)} losses; give one of each for one point or more")
    if cost[0] <= 0 or (np.diff(cost) <= 0).any():
        raise ConfigError(
            f"knee: the costs are {cost.tolist()}; they must be positive and increase from point to point"
        )
    if not 0 <= tolerance <= 1:
        raise ConfigError(f"knee: the tolerance is {tolerance}; give a share from 0 to 1")


def _verdict(cost: Floats, loss: Floats, *, chosen: int, best: int, margin: float) -> str:
    last = len(cost) - 1
    at = f"cost {cost[chosen]:g} (loss {loss[chosen]:.3g})"
    if last == 0:
        return f"Only {at} was measured; one point shows no knee."
    if chosen == last:
        return f"More budget still helps at {at}, the dearest point; the sweep did not reach the knee."
    if chosen == 0 and (loss[1:] <= loss[0] + margin).all():
        return f"No point is clearly better than the cheapest, {at}; the knee may lie below the sweep."
    end = f"{cost[last]:g}" if best == last else f"{cost[best]:g}, the best point"
    text = (
        f"The knee is at {at}: going on to {end} gains {loss[chosen] - loss[best]:.2g}, within the margin {margin:.2g}."
    )
    if (loss[chosen + 1 :] > loss[chosen] + margin).any():
        text += " A dearer point is clearly worse, so the curve is noisy or not monotone; look at it."
    return text
