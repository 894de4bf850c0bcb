"""The figures of a report, as SVG text: curves, frontiers and grouped bars. Needs the ``plot`` extra.

Colours are apart for colour-blind readers and dark enough for text on white; marker and line style tell series apart
too. Names stand at the lines and points themselves.
"""

from __future__ import annotations

import io
import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ragkv.errors import ConfigError, MissingExtraError
from ragkv.evaluation.report.labels import COLOURS, FONT_SIZE, LABEL_WIDTH, Point, label_points, name_lines, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis as MatplotlibAxis
    from matplotlib.figure import Figure

_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DASHES = ("solid", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)))
_HATCHES = ("", "//", "..", "xx", "\\\\")
_INK, _GRID = "#1f2430", "#e5e7eb"
_AXIS_WIDTH = 60  # characters in a line
_MAX_TICKS = 8
_MAX_BARS_WITH_VALUES = 12
# As a fraction of an axis: ticks closer than this would overlap.
_TICK_GAP = 0.08


@dataclass(frozen=True)
class Axis:
    """``label`` names the quantity and its unit. On a log axis values of 0 or less get a linear stretch."""

    label: str
    log: bool = False


@dataclass(frozen=True)
class Series:
    """Points of one name; those that are not finite are left out.

    ``errors`` are standard errors of y. ``labels`` hold one text for each point, empty for none: "knee", "default".
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    errors: Sequence[float] | None = None
    labels: Sequence[str] | None = None

    def points(self) -> list[tuple[float, float, float, str]]:
        """(x, y, error, label) of the points that can be drawn."""
        errors = [0.0] * len(self.x) if self.errors is None else self.errors
        labels = [""] * len(self.x) if self.labels is None else self.labels
        if not len(self.x) == len(self.y) == len(errors) == len(labels):
            raise ConfigError(f"figure: series {self.name!r} has x, y, errors or labels of different lengths")
        return [
            point for point in zip(self.x, self.y, errors, labels, strict=True) if all(map(math.isfinite, point[:3]))
        ]


@dataclass(frozen=True)
class Bars:
    """One bar of this name in each group; ``errors`` are standard errors of the heights."""

    name: str
    heights: Sequence[float]
    errors: Sequence[float] | None = None


def draw_curves(series: Sequence[Series], *, x: Axis, y: Axis) -> str:
    """Lines with error bars, each named at its right end; points with a label are ringed.

    Raises
    ------
    ConfigError
        If there is nothing to draw or lengths differ.
    MissingExtraError
        If matplotlib is not installed.
    """
    figure, axes = _new_figure()
    ends = []
    for index, (line, points) in enumerate(_drawable(series)):
        _draw_points(axes, points, index, line_style=_DASHES[index % len(_DASHES)])
        _ring(axes, points, index)
        ends.append((line.name, points[-1][1], COLOURS[index % len(COLOURS)]))
    drawn = [points for _, points in _drawable(series)]
    _scale(axes, x, y, drawn, x_at_points=True)
    if len(ends) > 1:
        name_lines(axes, ends)
    label_points(figure, axes, drawn, [[point[:2] for point in points] for points in drawn])
    return _svg(figure)


def draw_frontier(
    series: Sequence[Series], *, x: Axis, y: Axis, better: Literal["lower", "higher"] | None = "lower"
) -> str:
    """Points with labels, and the line of those that no other point beats on cost (x, lower is better) and y.

    A series without labels is named at its points. `better` says which y is better; None draws no line.

    Raises
    ------
    ConfigError, MissingExtraError
        As `draw_curves`.
    """
    figure, axes = _new_figure()
    drawn, steps = [], []
    for index, (group, points) in enumerate(_drawable(series)):
        _draw_points(axes, points, index, line_style="none")
        drawn.append([(*point[:3], point[3] or group.name) for point in points])
    if better is not None:
        front = _frontier([point[:2] for points in drawn for point in points], sign=1 if better == "lower" else -1)
        corners = [(right[0], left[1]) for left, right in itertools.pairwise(front)]
        steps = [place for pair in zip(front, corners, strict=False) for place in pair] + front[-1:]
        axes.plot(*zip(*steps, strict=True), color="#6b7280", linewidth=1.2, zorder=1)
    _scale(axes, x, y, drawn, x_at_points=False)
    axes.margins(0.12)
    label_points(figure, axes, drawn, [steps])
    return _svg(figure)


def draw_bars(groups: Sequence[str], bars: Sequence[Bars], *, y: Axis) -> str:
    """Bars side by side in each group, with values on them where there is room; heights that are not finite have none.

    Raises
    ------
    ConfigError, MissingExtraError
        As `draw_curves`.
    """
    if not groups or not bars or any(len(bar.heights) != len(groups) for bar in bars):
        raise ConfigError(f"figure: bars need one height for each of {len(groups)} groups, at least one")
    if y.log:
        raise ConfigError("figure: bars start at 0, which a log axis does not have; draw curves or a linear axis")
    figure, axes = _new_figure()
    width = 0.8 / len(bars)
    for index, bar in enumerate(bars):
        heights = [height if math.isfinite(height) else 0.0 for height in bar.heights]
        drawn = axes.bar(
            [group + (index - (len(bars) - 1) / 2) * width for group in range(len(groups))],
            heights,
            width * 0.92,
            yerr=_bar_errors(bar),
            label=wrapped(bar.name, LABEL_WIDTH),
            color=COLOURS[index % len(COLOURS)],
            edgecolor="white",
            hatch=_HATCHES[index % len(_HATCHES)],
            error_kw={"capsize": 3, "ecolor": _INK},
        )
        if len(groups) * len(bars) <= _MAX_BARS_WITH_VALUES:
            texts = [_tick(height) if math.isfinite(height) else "" for height in bar.heights]
            axes.bar_label(drawn, texts, padding=2, fontsize=FONT_SIZE - 1.5, color=_INK)
    axes.set_xticks(range(len(groups)), [wrapped(group, 14) for group in groups])
    axes.tick_params(axis="x", length=0)
    axes.yaxis.set_major_formatter(lambda value, _: _tick(value))
    axes.set_ylabel(wrapped(y.label, LABEL_WIDTH))
    axes.margins(y=0.12)
    if len(bars) > 1:
        figure.legend(loc="outside upper left", ncols=min(len(bars), 3), frameon=False, fontsize=FONT_SIZE)
    return _svg(figure)


def _bar_errors(bar: Bars) -> list[float] | None:
    if bar.errors is None:
        return None
    if len(bar.errors) != len(bar.heights):
        raise ConfigError(f"figure: bars {bar.name!r} have {len(bar.heights)} heights and {len(bar.errors)} errors")
    pairs = zip(bar.heights, bar.errors, strict=True)
    return [error if math.isfinite(height) else math.nan for height, error in pairs]


def _drawable(series: Sequence[Series]) -> list[tuple[Series, list[Point]]]:
    found = [(line, points) for line in series if (points := line.points())]
    if not found:
        raise ConfigError(f"figure: none of {len(series)} series has a finite point; give at least one")
    return found


def _new_figure() -> tuple[Figure, Axes]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("reports with figures need matplotlib: pip install 'ragkv[plot]'") from error
    figure = Figure(figsize=(6.4, 3.9), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=FONT_SIZE - 0.5)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_fontsize(FONT_SIZE)
    return figure, axes


def _draw_points(axes: Axes, points: list[Point], index: int, *, line_style: object) -> None:
    x, y, errors, _ = zip(*points, strict=True)
    axes.errorbar(
        x,
        y,
        yerr=errors if any(errors) else None,
        color=COLOURS[index % len(COLOURS)],
        marker=_MARKERS[index % len(_MARKERS)],
        linestyle=line_style,
        linewidth=2,
        markersize=6,
        elinewidth=1.2,
        capsize=3,
        zorder=3,
    )


def _ring(axes: Axes, points: list[Point], index: int) -> None:
    for x, y, _, label in points:
        if label:
            colour = COLOURS[index % len(COLOURS)]
            axes.plot([x], [y], "o", markersize=13, markerfacecolor="none", markeredgecolor=colour, zorder=4)


def _frontier(points: list[tuple[float, float]], *, sign: int) -> list[tuple[float, float]]:
    """Points that no cheaper or equally cheap one equals or beats, cheapest first; `sign` 1 where lower y is better."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (point[0], sign * point[1])):
        if not front or sign * y < sign * front[-1][1]:
            front.append((x, y))
    return front


def _scale(axes: Axes, x: Axis, y: Axis, drawn: list[list[Point]], *, x_at_points: bool) -> None:
    """Scales, axis labels and ticks as plain numbers."""
    axes.set_xlabel(wrapped(x.label, _AXIS_WIDTH))
    axes.set_ylabel(wrapped(y.label, LABEL_WIDTH))
    places = [(point[0], point[1]) for points in drawn for point in points]
    for axis, wanted, values in (
        (axes.xaxis, x, [place[0] for place in places]),
        (axes.yaxis, y, [place[1] for place in places]),
    ):
        if wanted.log:
            _log_axis(axis, values, at_points=x_at_points and axis is axes.xaxis)
        else:
            axis.set_major_formatter(lambda value, _: _tick(value))


def _log_axis(axis: MatplotlibAxis, values: list[float], *, at_points: bool) -> None:
    positive = sorted({value for value in values if value > 0})
    set_scale = axis.axes.set_xscale if axis is axis.axes.xaxis else axis.axes.set_yscale
    if not positive:
        axis.set_major_formatter(lambda value, _: _tick(value))
        return
    low, high = positive[0], positive[-1]
    zero = [] if min(values) > 0 else [0.0]
    if zero:
        set_scale("symlog", linthresh=low)
    else:
        set_scale("log")
    ticks = positive if at_points else _round_ticks(low, high)
    span = math.log(ticks[-1] / ticks[0]) or 1.0
    kept: list[float] = []
    for tick in reversed(ticks):
        if not kept or math.log(kept[-1] / tick) >= _TICK_GAP * span:
            kept.append(tick)
    axis.set_ticks([*zero, *reversed(kept)], [_tick(tick) for tick in [*zero, *reversed(kept)]])
    axis.set_ticks([], minor=True)


def _round_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 times powers of ten from just below `low` to just above `high`; only the powers if those are many."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    for steps in ((1, 2, 5), (1,)):
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        first = max(index for index, tick in enumerate(ticks) if tick <= low * (1 + 1e-9))
        last = min(index for index, tick in enumerate(ticks) if tick >= high * (1 - 1e-9))
        if last - first < _MAX_TICKS:
            break
    return ticks[first : last + 1]


def _tick(value: float) -> str:
    """A number of three digits that count, without an exponent where it reads well."""
    if value and not 1e-4 <= abs(value) < 1e7:
        return f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _svg(figure: Figure) -> str:
    """The figure as SVG: text as text, taken literally, and ids that depend on nothing but the content."""
    from matplotlib import rc_context

    out = io.StringIO()
    # matplotlib reads these from its settings alone; the context puts them back.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "ragkv"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()
