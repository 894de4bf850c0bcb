"""Where the texts of a figure stand: names at the ends of lines, labels beside points, none over another."""

from __future__ import annotations

import itertools
import math
import textwrap
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

Point = tuple[float, float, float, str]
"""x, y, standard error of y, and label (empty for none)."""

# Okabe and Ito's palette, the light colours darkened until text in them is readable on white.
COLOURS = ("#0072b2", "#b34700", "#007a5a", "#9c4f86", "#7a5c00", "#3a3a3a", "#1b7f8c")
FONT_SIZE = 10.5
LABEL_WIDTH = 32  # characters in a line
_NAME_WIDTH = 17
# As a fraction of an axis: names closer than this would overlap.
_LABEL_GAP = 0.065


def name_lines(axes: Axes, ends: list[tuple[str, float, str]]) -> None:
    """Write each line's name beside its right end, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    to_axes = axes.transData + axes.transAxes.inverted()
    x = axes.get_xlim()[1]
    wanted = sorted((float(to_axes.transform((x, y))[1]), name, colour) for name, y, colour in ends)
    texts = [wrapped(name, _NAME_WIDTH) for _, name, _ in wanted]
    heights = [_LABEL_GAP * (text.count("\n") + 1) for text in texts]
    places: list[float] = []
    for index, (place, _, _) in enumerate(wanted):
        gap = (heights[index] + heights[index - 1]) / 2
        places.append(max(place, places[-1] + gap if places else place))
    over = max(0.0, places[-1] - 1.0) if low < high else 0.0
    for place, text, (_, _, colour) in zip(places, texts, wanted, strict=True):
        axes.annotate(
            text,
            xy=(1.0, place - over),
            xycoords="axes fraction",
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            fontsize=FONT_SIZE,
            fontweight="bold",
        )


def label_points(figure: Figure, axes: Axes, drawn: list[list[Point]], lines: list[list[tuple[float, float]]]) -> None:
    """Write labels beside their points, each on the first side where it covers neither text, point nor line."""
    from matplotlib.transforms import Bbox as Box

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the reader's fonts draw the text, not matplotlib's
        figure.draw_without_rendering()  # the layout fixes where points are
    per_point = figure.dpi / 72
    frame = axes.get_window_extent()
    marks = [(x, y, 5 * per_point) for points in drawn for x, y in (_pixel(axes, *point[:2]) for point in points)]
    marks += [(x, y, per_point) for line in lines for x, y in _along([_pixel(axes, *place) for place in line])]
    taken = [Box.from_extents(x - size, y - size, x + size, y + size) for x, y, size in marks]
    for index, points in enumerate(drawn):
        for x, y, _, label in points:
            if not label:
                continue
            text = _words(label)
            text = text if len(text) <= LABEL_WIDTH else text[: LABEL_WIDTH - 1] + "\N{HORIZONTAL ELLIPSIS}"
            size = (0.6 * FONT_SIZE * len(text) * per_point, 1.2 * FONT_SIZE * per_point)
            corners = [(side, _corner(_pixel(axes, x, y), side, size, 9 * per_point)) for side in _SIDES]
            boxes = [(side, Box.from_bounds(*corner, *size)) for side, corner in corners]
            side, box = min(
                boxes, key=lambda place: place[1].count_overlaps(taken) + 100 * _sticks_out(place[1], frame)
            )
            taken.append(box)
            _write(axes, text, (x, y), side=side, colour=COLOURS[index % len(COLOURS)])


def _write(axes: Axes, text: str, at: tuple[float, float], *, side: tuple[int, int], colour: str) -> None:
    axes.annotate(
        wrapped(text, LABEL_WIDTH),
        xy=at,
        xytext=(9 * side[0], 9 * side[1]),
        textcoords="offset points",
        ha=("right", "center", "left")[side[0] + 1],
        va=("top", "center", "bottom")[side[1] + 1],
        color=colour,
        fontsize=FONT_SIZE - 0.5,
        zorder=5,
    ).set_in_layout(False)


def _sticks_out(box: Bbox, frame: Bbox) -> bool:
    return box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0 or box.y1 > frame.y1


def _along(pixels: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Places a few pixels apart on the line through `pixels`."""
    found = []
    for (x0, y0), (x1, y1) in itertools.pairwise(pixels):
        steps = max(1, round(math.hypot(x1 - x0, y1 - y0) / 6))
        found += [(x0 + (x1 - x0) * step / steps, y0 + (y1 - y0) * step / steps) for step in range(steps)]
    return found


_SIDES = ((0, 1), (1, 1), (1, 0), (-1, 1), (1, -1), (0, -1), (-1, -1), (-1, 0))


def _pixel(axes: Axes, x: float, y: float) -> tuple[float, float]:
    across, up = axes.transData.transform((x, y))
    return float(across), float(up)


def _corner(
    centre: tuple[float, float], side: tuple[int, int], size: tuple[float, float], gap: float
) -> tuple[float, float]:
    """Lower left corner of a box of `size` that stands at `side` of `centre`."""
    x, y = (middle + gap * way - extent * (1 - way) / 2 for middle, way, extent in zip(centre, side, size, strict=True))
    return x, y


def _words(text: str) -> str:
    """The text on one line, without characters that XML refuses."""
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())


def wrapped(text: str, width: int) -> str:
    """The text in lines, taken literally: between two dollar signs matplotlib would read a formula."""
    return textwrap.fill(_words(text), width).replace("$", r"\$")
