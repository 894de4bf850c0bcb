"""Whether a subject is on the frontier of quality against cost: no rival is both as cheap and clearly better.

Subjects answered the same questions, so "clearly" is more than one standard error of the paired difference, the
answers to one document (of KL: the positions of one question) taken as one cluster; with a single document each
question is its own cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from statistics import fmean
from typing import Any

from ragkv.evaluation.run import Measured
from ragkv.evaluation.stats import clustered_error, mean_score
from ragkv.evaluation.summary import of_subject, pairs

COSTS: Mapping[str, str] = {
    "read": "bytes read per answer token",
    "resident": "resident bytes",
    "disk": "bytes on disk",
}
"""Names of the costs and what they are."""

KL = "kl"
"""The quality that is better when lower; any other is the name of a score."""


@dataclass(frozen=True)
class Beaten:
    """A rival that is no dearer (``cost_ratio`` is its cost over ours) and better by ``gain``, with its error."""

    by: str
    cost_ratio: float
    gain: float
    standard_error: float


@dataclass(frozen=True)
class Place:
    """Where a subject stands: on the frontier if nobody beats it."""

    subject: str
    cost: float
    beaten: tuple[Beaten, ...]

    @property
    def on_frontier(self) -> bool:
        return not self.beaten


@dataclass(frozen=True)
class Frontier:
    """The places of ragkv's subjects in one group, for one quality against one cost."""

    group: str
    quality: str
    cost: str
    places: tuple[Place, ...]
    rivals: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        places = [{**asdict(place), "on_frontier": place.on_frontier} for place in self.places]
        return {**asdict(self), "places": places}

    @property
    def words(self) -> str:
        """The verdict for a reader."""
        quality = "KL" if self.quality == KL else f"Score ({self.quality})"
        what = f"{quality} against {COSTS[self.cost]}"
        if not self.rivals:
            return f"{what}: nothing else was measured, so there is no frontier to be on."
        good = [place.subject for place in self.places if place.on_frontier]
        text = f"{what}: {', '.join(good)} on the frontier." if good else f"{what}: ragkv is not on the frontier."
        for place in self.places:
            if place.beaten:
                best = max(place.beaten, key=lambda one: one.gain)
                others = f" ({len(place.beaten) - 1} more beat it too)" if len(place.beaten) > 1 else ""
                text += (
                    f" {place.subject} is beaten by {best.by}, which costs {best.cost_ratio:.2f}x as much and is "
                    f"better by {best.gain:.3g} (s.e. {best.standard_error:.2g}){others}."
                )
        return text


def judge_frontier(
    measured: Sequence[Measured], group: str, quality: str, cost: str, *, subjects: Sequence[str], rivals: Sequence[str]
) -> Frontier:
    """Compare each of `subjects` with each of `rivals`; those without answers or without the cost are left out."""
    mine = [each for each in measured if each.group == group]
    costs = {name: mean_cost(of_subject(mine, name), cost) for name in (*subjects, *rivals)}
    known = {name: value for name, value in costs.items() if value is not None}
    kept = tuple(name for name in rivals if name in known)
    places = tuple(
        Place(name, known[name], tuple(_beaten(mine, name, kept, quality, known))) for name in subjects if name in known
    )
    return Frontier(group=group, quality=quality, cost=cost, places=places, rivals=kept)


def mean_cost(measured: Sequence[Measured], cost: str) -> float | None:
    """Bytes of one subject: read per answer token, over questions; resident and on disk, over documents."""
    if cost == "read":
        read = [outcome.bytes_read for each in measured for outcome in each.outcomes if outcome.bytes_read is not None]
        return fmean(read) if read else None
    sizes = [each.resident_bytes if cost == "resident" else each.disk_bytes for each in measured]
    return fmean(sizes) if sizes else None


def _beaten(
    measured: Sequence[Measured], name: str, rivals: Sequence[str], quality: str, costs: Mapping[str, float]
) -> list[Beaten]:
    found = []
    for rival in rivals:
        if costs[rival] > costs[name]:
            continue
        gain, error = _gain(of_subject(measured, rival), of_subject(measured, name), quality)
        if gain > error:
            found.append(Beaten(rival, costs[rival] / costs[name], gain, error))
    return found


def _gain(rival: Sequence[Measured], mine: Sequence[Measured], quality: str) -> tuple[float, float]:
    """By how much the rival is better, and the standard error of that; (0, 0) without a common question."""
    asked = pairs(rival, mine)
    if not asked:
        return 0.0, 0.0
    if quality == KL:
        # A run that was resumed on another machine can have a dense answer of another length.
        off = [[own - other for other, own in zip(pair.mine.kl, pair.other.kl, strict=False)] for pair in asked]
        return fmean(chain.from_iterable(off)), clustered_error(off)
    gains = [pair.mine.scores[quality] - pair.other.scores[quality] for pair in asked]
    documents = [pair.document for pair in asked]
    if len(set(documents)) == 1:
        documents = [str(number) for number in range(len(asked))]
    mean = mean_score(gains, documents)
    return mean.value, mean.standard_error or 0.0
