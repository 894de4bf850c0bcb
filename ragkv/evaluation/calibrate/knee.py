"""The knee of a quality-against-cost curve: the cheapest point that is as good as the best one, by a stated rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ragkv.errors import ConfigError

DEFAULT_TOLERANCE = 0.02

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Knee:
    """Where a curve of loss against cost stops paying, as indices into the points that were given.

    ``chosen`` is the answer of the rule that ``rule`` states in words, ``best`` the point of lowest loss (the cheapest
    of equals). ``second_opinion`` is the point farthest below the straight line between the ends of the curve, over
    log cost; None where there is no such point. ``flat`` is whether the curve is seen to have flattened: a point
    cheaper than the dearest one is as good as the best. ``margins`` holds, for each point, by how much its loss may
    exceed the lowest one. ``verdict`` is one paragraph for a reader.
    """

    chosen: int
    best: int
    second_opinion: int | None
    flat: bool
    margins: tuple[float, ...]
    rule: str
    verdict: str


def find_knee(
    costs: Sequence[float],
    losses: Sequence[float],
    standard_errors: Sequence[float] | None = None,
    *,
    tolerance: float = DEFAULT_TOLERANCE,
) -> Knee:
    """The cheapest point whose loss is within max(one standard error, `tolerance` of the loss range) of the lowest.

    This is the one-standard-error rule (Breiman, Friedman, Olshen and Stone, Classification and Regression Trees,
    1984, section 3.4.3): the standard error is that of the point of lowest loss. The tolerance keeps differences that
    are measured very precisely, but are too small to matter, from moving the choice.

    The second opinion is the maximum-distance point of Kneedle (Satopaa, Albrecht, Irwin and Raghavan, 2011), without
    its smoothing and its sensitivity threshold, which need more points than a sweep has.

    Parameters
    ----------
    costs
        (n_points,) strictly increasing and positive; any unit.
    losses
        (n_points,) lower is better; any unit.
    standard_errors
        (n_points,) of the losses, in their unit; taken as 0 when None.
    tolerance
        Share of the loss range (highest minus lowest), from 0 to 1.

    Raises
    ------
    ConfigError
        If there are no points, the lengths differ, a value is not finite or an error is negative, or the costs do
        not increase.
    """
    cost, loss = _finite("costs", costs), _finite("losses", losses)
    _check(cost, loss, tolerance)
    errors = np.zeros_like(loss) if standard_errors is None else _finite("standard errors", standard_errors)
    if errors.shape != loss.shape:
        raise ConfigError(f"knee: {len(loss)} losses and {len(errors)} standard errors; give one for each")
    if (errors < 0).any():
        raise ConfigError(f"knee: a standard error is {errors.min()}; it cannot be below 0")
    allowed = np.full_like(loss, errors[loss.argmin()])
    return _decide(cost, loss, allowed, tolerance=tolerance, noise="one standard error of the best point")


def find_paired_knee(
    costs: Sequence[float], losses_by_question: Sequence[Sequence[float]], *, tolerance: float = DEFAULT_TOLERANCE
) -> Knee:
    """`find_knee` where every point was measured on the same questions.

    The loss of a point is its mean over questions. Hard questions are hard at every point, so the standard error is
    that of the mean paired difference between a point and the best one: usually much smaller than that of a mean.

    Parameters
    ----------
    costs
        (n_points,) strictly increasing and positive.
    losses_by_question
        (n_points, n_questions), at least two questions.
    tolerance
        Share of the range of the mean losses, from 0 to 1.

    Raises
    ------
    ConfigError
        As `find_knee`, or if the rows differ in length or hold fewer than two questions.
    """
    lengths = {len(row) for row in losses_by_question}
    if len(lengths) != 1 or min(lengths) < 2:
        raise ConfigError(
            f"knee: points were measured on {sorted(lengths)} questions; give the same two or more for each"
        )
    cost, by_question = _finite("costs", costs), _finite("losses", losses_by_question)
    loss = by_question.mean(axis=1)
    _check(cost, loss, tolerance)
    difference = by_question - by_question[loss.argmin()]  # (n_points, n_questions)
    allowed = difference.std(axis=1, ddof=1) / np.sqrt(by_question.shape[1])
    noise = "one standard error of the paired difference to the best point"
    return _decide(cost, loss, allowed, tolerance=tolerance, noise=noise)


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


def _decide(cost: Floats, loss: Floats, noise_margin: Floats, *, tolerance: float, noise: str) -> Knee:
    best = int(loss.argmin())
    margins = np.maximum(noise_margin, tolerance * np.ptp(loss))
    excess = loss - loss[best]
    chosen = int((excess <= margins).argmax())
    flat = chosen < len(cost) - 1
    return Knee(
        chosen=chosen,
        best=best,
        second_opinion=_farthest_below_chord(cost, loss),
        flat=flat,
        margins=tuple(margins.tolist()),
        rule=(
            f"The cheapest point whose loss exceeds the lowest one by no more than {noise} or {tolerance:.0%} of the "
            "loss range, whichever is more (one-standard-error rule, Breiman et al. 1984)."
        ),
        verdict=_verdict(cost, loss, chosen=chosen, best=best, margin=float(margins[chosen])),
    )


def _farthest_below_chord(cost: Floats, loss: Floats) -> int | None:
    """Index of the largest drop below the line from (cheapest, highest loss) to (dearest, lowest loss)."""
    # The kneed library finds the same point, but needs SciPy, which ragkv does not.
    span = np.ptp(loss)
    if len(cost) < 3 or span == 0:
        return None
    along = np.log(cost / cost[0]) / np.log(cost[-1] / cost[0])
    below = (loss.max() - loss) / span - along  # both axes scaled to 0..1
    farthest = int(below.argmax())
    return farthest if below[farthest] > 0 else None


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
