"""The figures of a report, as SVG text: curves and grouped bars with a legend. Needs the ``plot`` extra.

Colours are apart for colour-blind readers and dark enough for text on white; marker and line style tell series apart
too.
"""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ragkv.errors import ConfigError, MissingExtraError
from ragkv.page import clean_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis as MatplotlibAxis
    from matplotlib.figure import Figure

_Point = tuple[float, float, float, str]
"""x, y, standard error of y, and label (empty for none)."""

# Okabe and Ito's palette, the light colours darkened until text in them is readable on white.
_COLOURS = ("#0072b2", "#b34700", "#007a5a", "#9c4f86", "#7a5c00", "#3a3a3a", "#1b7f8c")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)))
_HATCHES = ("", "//", "..", "xx", "\\\\")
_INK, _GRID = "#1f2430", "#e5e7eb"
_FONT_SIZE = 10.5
# Characters in a line.
_AXIS_WIDTH, _LABEL_WIDTH, _NAME_WIDTH = 60, 32, 24
_MAX_BARS_WITH_VALUES = 12
# A sweep of at most so many costs, each so many times the one before, has a tick at each.
_MAX_TICKS, _TICK_RATIO = 8, 1.25
# Labels of points nearer than this to each other would overlap.
_NEAR_PIXELS = 40


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

    def points(self) -> list[_Point]:
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
    """Lines with error bars; points with a label are ringed.

    Raises
    ------
    ConfigError
        If there is nothing to draw or lengths differ.
    MissingExtraError
        If matplotlib is not installed.
    """
    figure, axes = _new_figure()
    drawn = _drawable(series)
    handles = [_draw_points(axes, points, index) for index, (_, points) in enumerate(drawn)]
    axes.set_xlabel(_wrapped(x.label, _AXIS_WIDTH))
    axes.set_ylabel(_wrapped(y.label, _LABEL_WIDTH))
    _scale(axes.xaxis, x, [point[0] for _, points in drawn for point in points])
    _scale(axes.yaxis, y, [point[1] for _, points in drawn for point in points])
    sweep = sorted({point[0] for point in drawn[0][1]})
    if x.log and 1 < len(sweep) <= _MAX_TICKS and sweep[0] > 0 and all(b / a > _TICK_RATIO for a, b in pairwise(sweep)):
        axes.xaxis.set_ticks(sweep, [_tick(value) for value in sweep])
    for index, (_, points) in enumerate(drawn):
        _label_points(axes, points, _COLOURS[index % len(_COLOURS)])
    _legend(figure, [line.name for line, _ in drawn], handles)
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
    width, handles = 0.8 / len(bars), []
    for index, bar in enumerate(bars):
        heights = [height if math.isfinite(height) else 0.0 for height in bar.heights]
        drawn = axes.bar(
            [group + (index - (len(bars) - 1) / 2) * width for group in range(len(groups))],
            heights,
            width * 0.92,
            yerr=_bar_errors(bar),
            color=_COLOURS[index % len(_COLOURS)],
            edgecolor="white",
            hatch=_HATCHES[index % len(_HATCHES)],
            error_kw={"capsize": 3, "ecolor": _INK},
        )
        handles.append(drawn)
        if len(groups) * len(bars) <= _MAX_BARS_WITH_VALUES:
            texts = [_tick(height) if math.isfinite(height) else "" for height in bar.heights]
            axes.bar_label(drawn, texts, padding=2, fontsize=_FONT_SIZE - 1.5, color=_INK)
    axes.set_xticks(range(len(groups)), [_wrapped(group, 14) for group in groups])
    axes.tick_params(axis="x", length=0)
    axes.yaxis.set_major_formatter(lambda value, _: _tick(value))
    axes.set_ylabel(_wrapped(y.label, _LABEL_WIDTH))
    axes.margins(y=0.12)
    _legend(figure, [bar.name for bar in bars], handles)
    return _svg(figure)


def _bar_errors(bar: Bars) -> list[float] | None:
    if bar.errors is None:
        return None
    if len(bar.errors) != len(bar.heights):
        raise ConfigError(f"figure: bars {bar.name!r} have {len(bar.heights)} heights and {len(bar.errors)} errors")
    pairs = zip(bar.heights, bar.errors, strict=True)
    return [error if math.isfinite(height) else math.nan for height, error in pairs]


def _drawable(series: Sequence[Series]) -> list[tuple[Series, list[_Point]]]:
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
    axes.tick_params(labelsize=_FONT_SIZE - 0.5)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_fontsize(_FONT_SIZE)
    return figure, axes


def _draw_points(axes: Axes, points: list[_Point], index: int) -> Any:
    x, y, errors, _ = zip(*points, strict=True)
    return axes.errorbar(
        x,
        y,
        yerr=errors if any(errors) else None,
        color=_COLOURS[index % len(_COLOURS)],
        marker=_MARKERS[index % len(_MARKERS)],
        linestyle=_DASHES[index % len(_DASHES)],
        linewidth=2,
        markersize=6,
        elinewidth=1.2,
        capsize=3,
        zorder=3,
    )


def _label_points(axes: Axes, points: list[_Point], colour: str) -> None:
    """Ring the points that have a label, and write it above them; neighbours in one place share a text."""
    groups: list[tuple[tuple[float, float], list[str]]] = []
    for x, y, _, label in points:
        if not label:
            continue
        axes.plot([x], [y], "o", markersize=13, markerfacecolor="none", markeredgecolor=colour, zorder=4)
        if groups and math.dist(_pixel(axes, groups[-1][0]), _pixel(axes, (x, y))) < _NEAR_PIXELS:
            groups[-1][1].append(label)
        else:
            groups.append(((x, y), [label]))
    for place, labels in groups:
        is_left = axes.transAxes.inverted().transform(_pixel(axes, place))[0] < 0.7
        axes.annotate(
            _wrapped(", ".join(labels), _LABEL_WIDTH),
            xy=place,
            xytext=(4 if is_left else -4, 9),
            textcoords="offset points",
            ha="left" if is_left else "right",
            va="bottom",
            color=colour,
            fontsize=_FONT_SIZE - 0.5,
            zorder=5,
        )


def _pixel(axes: Axes, place: tuple[float, float]) -> tuple[float, float]:
    across, up = axes.transData.transform(place)
    return float(across), float(up)


def _legend(figure: Figure, names: Sequence[str], handles: Sequence[Any]) -> None:
    if len(names) > 1:
        texts = [_wrapped(name, _NAME_WIDTH) for name in names]
        figure.legend(handles, texts, loc="outside upper left", ncols=3, frameon=False, fontsize=_FONT_SIZE - 0.5)


def _scale(axis: MatplotlibAxis, wanted: Axis, values: list[float]) -> None:
    """A scale with plain numbers; on a log one at 1, 2 and 5 times powers of ten, or fewer or more as it is long."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, SymmetricalLogLocator

    positive = [value for value in values if value > 0]
    if wanted.log and positive:
        set_scale = axis.axes.set_xscale if axis is axis.axes.xaxis else axis.axes.set_yscale
        ratio = max(positive) / min(positive)
        if min(values) <= 0:
            set_scale("symlog", linthresh=min(positive))
            axis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=min(positive)))
        else:
            set_scale("log")
            by_log = LogLocator(subs=(1.0, 2.0, 5.0) if ratio < 300 else (1.0,))
            axis.set_major_locator(MaxNLocator(6) if ratio < 5 else by_log)
        axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: _tick(value))


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


def _wrapped(text: str, width: int) -> str:
    """The text in lines, taken literally: between two dollar signs matplotlib would read a formula."""
    return textwrap.fill(" ".join(clean_line(text).split()), width).replace("$", r"\$")
