"""One HTML file that shows what was measured: verdict, tables, inline figures and the settings they came from.

The file needs nothing else: no network, scripts or fonts. It is the same, byte for byte, for the same report.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from markupsafe import Markup

from ragkv.errors import ConfigError
from ragkv.page import clean_line, render, write_page

Cell = str | int | float | bool | None

_MISSING = "\N{EN DASH}"
_MAX_DECIMALS = 6
_DROPPED_TAGS = {"metadata", "style", "script", "title"}
_LOCAL_REFERENCE = re.compile(r"(?<=url\(#)[^)]+")


@dataclass(frozen=True)
class Table:
    """``rows`` under ``columns``; the first column names the rows.

    Columns of numbers are aligned and formatted as `format_column` says. Row ``highlight`` stands out and carries
    ``highlight_label``, so that colour is not the only cue.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    highlight: int | None = None
    highlight_label: str = "chosen"

    def __post_init__(self) -> None:
        wrong = [index for index, row in enumerate(self.rows) if len(row) != len(self.columns)]
        if wrong:
            raise ConfigError(
                f"table {self.caption!r}: row {wrong[0]} has {len(self.rows[wrong[0]])} cells; give {len(self.columns)}"
            )
        if self.highlight is not None and not 0 <= self.highlight < len(self.rows):
            raise ConfigError(f"table {self.caption!r}: no row {self.highlight} to highlight in {len(self.rows)} rows")


@dataclass(frozen=True)
class Picture:
    """An SVG of `ragkv.evaluation.report.figures`; ``description`` tells in words what a reader sees in it."""

    svg: str
    caption: str
    description: str


@dataclass(frozen=True)
class Section:
    """A heading and what follows it, in reading order; a string is a paragraph."""

    heading: str
    blocks: Sequence[str | Table | Picture]


@dataclass(frozen=True)
class Report:
    """``lead`` is the verdict in words; ``settings`` are names and values of what produced the figures."""

    title: str
    lead: str
    sections: Sequence[Section]
    settings: Mapping[str, Cell] = field(default_factory=dict)


def write_report(report: Report, path: str | Path) -> None:
    """Write the report as one HTML file.

    Raises
    ------
    ConfigError
        If the file cannot be written.
    """
    write_page(render_report(report), path)


def render_report(report: Report) -> str:
    """The report as HTML text."""
    sections = [
        (f"section-{number}", section.heading, [_block(block) for block in section.blocks])
        for number, section in enumerate(report.sections, 1)
    ]
    settings = [(name, format_column([value])[0]) for name, value in report.settings.items()]
    return render(
        "report.html",
        title=report.title,
        lead=report.lead,
        sections=sections,
        settings=settings,
        inline_svg=inline_svg,
    )


def format_column(values: Sequence[Cell]) -> list[str]:
    """A column as text: one number of decimals for all its numbers, so that they can be compared down the column.

    Whole numbers have thousands separators. With a fraction among them, there are as many decimals (at most six) as
    give the smallest non-zero number two digits that count, and the largest three; numbers too small for that are
    written in scientific notation. None is an en dash.
    """
    numbers = [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
    if all(isinstance(value, int) for value in numbers):
        pattern = ",d"
    else:
        sizes = [math.floor(math.log10(abs(value))) for value in numbers if value]
        decimals = max(1 - min(sizes, default=0), 2 - max(sizes, default=0), 0)
        pattern = f",.{decimals}f" if decimals <= _MAX_DECIMALS else ".2e"
    return [_cell(value, pattern) for value in values]


def _cell(value: Cell, pattern: str) -> str:
    if value is None:
        return _MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "infinite" if value > 0 else "-infinite"
    return format(value, pattern)


def _block(block: str | Table | Picture) -> dict[str, Any]:
    """A block as the template wants it."""
    if isinstance(block, str):
        return {"kind": "text", "text": block}
    if isinstance(block, Picture):
        return {"kind": "picture", "picture": block}
    columns = [[row[index] for row in block.rows] for index in range(len(block.columns))]
    return {
        "kind": "table",
        "table": block,
        "rows": list(zip(*map(format_column, columns), strict=True)),
        "numeric": [_is_numeric(column) for column in columns],
    }


def _is_numeric(column: Sequence[Cell]) -> bool:
    numbers = [isinstance(value, int | float) and not isinstance(value, bool) for value in column]
    return any(numbers) and all(value is None or number for value, number in zip(column, numbers, strict=True))


def inline_svg(picture: Picture, name: str) -> Markup:
    """The SVG as it may stand in HTML: no namespaces or prologue, ids unique in the page, and a description."""
    root = ElementTree.fromstring(picture.svg)
    for parent in list(root.iter()):
        parent.tag = _local(parent.tag)
        attributes = {_local(key): value for key, value in parent.attrib.items()}
        parent.attrib.clear()
        parent.attrib.update({key: _renamed(key, value, name) for key, value in attributes.items()})
        for child in list(parent):
            if _local(child.tag) in _DROPPED_TAGS:
                parent.remove(child)
    for size in ("width", "height"):
        root.attrib.pop(size, None)
    root.attrib.update({"role": "img", "aria-label": clean_line(picture.description)})
    return Markup(ElementTree.tostring(root, encoding="unicode", short_empty_elements=False).strip())


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _renamed(key: str, value: str, name: str) -> str:
    if key == "id":
        return f"{name}-{value}"
    if key == "href":
        return f"#{name}-{value.removeprefix('#')}"
    return _LOCAL_REFERENCE.sub(lambda match: f"{name}-{match[0]}", value)
