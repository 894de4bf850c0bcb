"""One HTML file that shows what was measured: verdict, tables, inline figures and the settings they came from.

The file needs nothing else: no network, scripts or fonts. It is the same, byte for byte, for the same report.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from ragkv.errors import ConfigError
from ragkv.page import clean_line, render_page, write_page
from ragkv.page import escape_line as _text

Cell = str | int | float | bool | None

_MISSING = "\N{EN DASH}"
_MARK = ' class="mark"'
_MAX_DECIMALS = 6
_DROPPED_TAGS = {"metadata", "style", "script", "title"}
_LOCAL_REFERENCE = re.compile(r"(?<=url\(#)[^)]+")

_STYLE = """
.lead { font-size: 1.1rem; }
nav ul { padding-left: 1.2rem; }
figure { margin: 1.25rem 0; }
figcaption { color: var(--soft); font-size: 0.9rem; padding-top: 0.4rem; }
.box { overflow-x: auto; margin: 1rem 0; }
figure .box { margin: 0; background: #fff; border: 1px solid var(--line); border-radius: 0.4rem; padding: 0.5rem; }
figure svg { display: block; width: 100%; min-width: 25rem; height: auto; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
.mark { background: var(--mark); }
.mark th, .mark td { font-weight: 700; }
.tag { border: 1px solid currentColor; border-radius: 1rem; padding: 0 0.5rem; font-size: 0.8rem; white-space: nowrap; }
footer { margin-top: 3rem; border-top: 1px solid var(--line); font-size: 0.9rem; }
dl { display: grid; grid-template-columns: minmax(6rem, auto) 1fr; gap: 0.25rem 1rem; }
dt { color: var(--soft); }
dd { margin: 0; }
@media print { .box { overflow: visible; } }
"""


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
    names = [(f"section-{index}", section.heading) for index, section in enumerate(report.sections, 1)]
    links = [*names, *([("settings", "Settings and environment")] if report.settings else [])]
    contents = "\n".join(f'<li><a href="#{name}">{_text(heading)}</a></li>' for name, heading in links)
    sections = "\n".join(_section(name, section) for (name, _), section in zip(names, report.sections, strict=True))
    body = f"""<header>
<h1>{_text(report.title)}</h1>
<p class="lead">{_text(report.lead)}</p>
</header>
<nav aria-label="Contents">
<ul>
{contents}
</ul>
</nav>
<main>
{sections}
</main>
{_footer(report.settings)}"""
    return render_page(title=report.title, style=_STYLE, body=body)


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


def _is_number(value: Cell) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _section(name: str, section: Section) -> str:
    blocks = "\n".join(_block(block, f"{name}-{index}") for index, block in enumerate(section.blocks, 1))
    heading = f'<h2 id="{name}-heading">{_text(section.heading)}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-heading">\n{heading}\n{blocks}\n</section>'


def _block(block: str | Table | Picture, name: str) -> str:
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Picture):
        return _figure(block, name)
    return f"<p>{_text(block)}</p>"


def _table(table: Table) -> str:
    columns = [[row[index] for row in table.rows] for index in range(len(table.columns))]
    texts = [format_column(column) for column in columns]
    kinds = [_kind(column) for column in columns]
    head = "".join(f'<th scope="col"{kind}>{_text(name)}</th>' for name, kind in zip(table.columns, kinds, strict=True))
    body = []
    for row in range(len(table.rows)):
        marked = row == table.highlight
        tag = f' <span class="tag">{_text(table.highlight_label)}</span>' if marked else ""
        cells = [f"<td{kind}>{_text(text[row])}</td>" for text, kind in zip(texts[1:], kinds[1:], strict=True)]
        first = f'<th scope="row"{kinds[0]}>{_text(texts[0][row])}{tag}</th>'
        body.append(f"<tr{_MARK if marked else ''}>{first}{''.join(cells)}</tr>")
    rows = "\n".join(body)
    return (
        f'<div class="box" role="region" aria-label="{_text(table.caption)}" tabindex="0">\n<table>\n'
        f"<caption>{_text(table.caption)}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n"
        "</table>\n</div>"
    )


def _kind(column: Sequence[Cell]) -> str:
    numeric = any(_is_number(value) for value in column)
    return ' class="n"' if numeric and all(value is None or _is_number(value) for value in column) else ""


def _figure(picture: Picture, name: str) -> str:
    return (
        f'<figure>\n<div class="box" role="group" aria-label="{_text(picture.caption)}" tabindex="0">\n'
        f"{_inline_svg(picture, name)}\n</div>\n<figcaption>{_text(picture.caption)}</figcaption>\n</figure>"
    )


def _inline_svg(picture: Picture, name: str) -> str:
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
    return ElementTree.tostring(root, encoding="unicode", short_empty_elements=False).strip()


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _renamed(key: str, value: str, name: str) -> str:
    if key == "id":
        return f"{name}-{value}"
    if key == "href":
        return f"#{name}-{value.removeprefix('#')}"
    return _LOCAL_REFERENCE.sub(lambda match: f"{name}-{match[0]}", value)


def _footer(settings: Mapping[str, Cell]) -> str:
    if not settings:
        return ""
    items = "\n".join(
        f"<dt>{_text(key)}</dt><dd>{_text(format_column([value])[0])}</dd>" for key, value in settings.items()
    )
    return f'<footer>\n<h2 id="settings">Settings and environment</h2>\n<dl>\n{items}\n</dl>\n</footer>\n'
