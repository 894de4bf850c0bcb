"""The HTML report: self-contained, safe with any text, readable without colour or mouse, the same bytes each time."""

from __future__ import annotations

import math
import re
import sys
import warnings
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ragkv.errors import ConfigError, MissingExtraError
from ragkv.evaluation.report.figures import Axis, Bars, Series, draw_bars, draw_curves
from ragkv.evaluation.report.page import Picture, Report, Section, Table, format_column, render_report, write_report

EVIL = "<script>alert('x')</script>\" & $5 to $6 \x00\x1b\udc80 onload="
BUDGET, KL = Axis("budget (tokens)", log=True), Axis("KL (nats)", log=True)


class Page(HTMLParser):
    """Tags with their attributes in order, and the text of the page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def curves(name: str = "8 per cluster") -> str:
    lines = [
        Series(name, (64, 128, 256), (0.5, 0.1, 0.05), (0.1, 0.02, 0.01), ("", "the knee", "default")),
        Series("int4", (64, 128, 256), (0.6, 0.2, 0.0)),
    ]
    return draw_curves(lines, x=BUDGET, y=KL)


def sample(text: str = "plain words") -> Report:
    table = Table(text, ("budget", text), ((64, 0.5), (256, 0.0123)), highlight=1)
    blocks = (text, table, Picture(curves(text), text, text))
    return Report(text, text, (Section("Sweep", blocks), Section(text, blocks)), {"model": text, "seed": 0})


def test_page_declares_what_a_reader_needs():
    page = Page(render_report(sample()))
    assert page.open == []
    assert page.all("html") == [{"lang": "en"}]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    assert "prefers-color-scheme: dark" in page.text


def test_headings_are_in_order_and_the_contents_lead_to_them():
    page = Page(render_report(sample()))
    assert [tag for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)] == ["h1", "h2", "h2", "h2"]
    targets = [link["href"] for link in page.all("a")]
    ids = {attributes.get("id") for _, attributes in page.tags}
    assert targets == ["#section-1", "#section-2", "#settings"]
    assert all(str(target)[1:] in ids for target in targets)


def test_nothing_is_loaded_and_nothing_runs():
    page = Page(render_report(sample()))
    assert not {"script", "link", "img", "iframe", "object", "image"} & {tag for tag, _ in page.tags}
    for _, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes)
        assert all((attributes.get(name) or "#").startswith("#") for name in ("src", "href", "xlink:href"))
    assert "url(" not in re.sub(r"url\(#", "", render_report(sample()))


def test_any_text_is_shown_and_none_of_it_is_markup(tmp_path: Path):
    html = render_report(sample(EVIL))
    page = Page(html)
    assert not page.all("script")
    assert page.text.count("<script>alert('x')</script>\" & $5 to $6") >= 8
    assert not re.search("[\x00-\x09\x0b-\x1f\ud800-\udfff]", html)
    write_report(sample(EVIL), tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == html


def test_ids_are_unique_in_the_page_and_references_meet_them():
    html = render_report(sample())
    page = Page(html)
    ids = Counter(attributes["id"] for _, attributes in page.tags if "id" in attributes)
    assert ids.most_common(1)[0][1] == 1
    used = {a["href"] for _, a in page.tags if (a.get("href") or "").startswith("#")}
    used |= {f"#{name}" for name in re.findall(r"url\(#([^)]+)\)", html)}
    assert {str(name)[1:] for name in used} <= set(ids)


def test_every_figure_has_words_and_can_be_reached_with_the_keyboard():
    page = Page(render_report(sample("what is seen")))
    assert [svg["aria-label"] for svg in page.all("svg")] == ["what is seen"] * 2
    assert all(svg["role"] == "img" for svg in page.all("svg"))
    assert len(page.all("figcaption")) == 2
    assert [box["tabindex"] for box in page.all("div") if box["class"] == "box"] == ["0"] * 4


def test_the_same_report_has_the_same_bytes_and_no_date():
    assert render_report(sample()) == render_report(sample())
    assert not re.search(r"20\d\d-\d\d-\d\d", render_report(sample()))


def test_the_highlighted_row_says_so_in_words():
    html = render_report(Report("t", "l", (Section("s", (Table("c", ("a", "b"), ((1, 2), (3, 4)), 1, "the knee"),)),)))
    assert re.findall(r'<tr class="mark">.*</tr>', html) == [
        '<tr class="mark"><th scope="row" class="n">3 <span class="tag">the knee</span></th><td class="n">4</td></tr>'
    ]


def test_only_columns_of_numbers_are_right_aligned():
    html = render_report(
        Report("t", "l", (Section("s", (Table("c", ("a", "b", "d"), (("x", None, 1), ("y", 2, "n"))),)),))
    )
    assert re.findall(r'<th scope="col"[^>]*>', html) == [
        '<th scope="col">',
        '<th scope="col" class="n">',
        '<th scope="col">',
    ]


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ((64, 1234567, None), ["64", "1,234,567", "\u2013"]),
        ((0.5, 0.0123, 1.0), ["0.500", "0.012", "1.000"]),
        ((0.95, 0.9612), ["0.950", "0.961"]),
        ((1234.5, 2000), ["1,234", "2,000"]),
        ((12.34, 3), ["12.3", "3.0"]),
        ((1e-9, 0.5), ["1.00e-09", "5.00e-01"]),
        ((0.0, 0.0), ["0.00", "0.00"]),
        ((math.nan, math.inf, 1), ["not a number", "infinite", "1"]),
        ((True, False, "text"), ["yes", "no", "text"]),
        ((), []),
    ],
)
def test_numbers_of_a_column_have_the_same_decimals(values, shown):
    assert format_column(values) == shown


def test_a_table_with_a_ragged_row_or_no_such_highlight_is_refused():
    with pytest.raises(ConfigError, match="row 1 has 1 cells; give 2"):
        Table("t", ("a", "b"), ((1, 2), (3,)))
    with pytest.raises(ConfigError, match="no row 2"):
        Table("t", ("a",), ((1,), (2,)), highlight=2)


def test_a_report_that_cannot_be_written_says_so(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report(sample(), tmp_path / "missing" / "report.html")


def texts(svg: str) -> list[str]:
    return [
        "".join(node.itertext()).strip()
        for node in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    ]


def test_curves_carry_names_labels_units_and_budgets_as_text():
    shown = texts(curves())
    for wanted in ("8 per cluster", "int4", "the knee", "default", "budget (tokens)", "KL (nats)", "64", "128", "256"):
        assert wanted in shown


def test_zero_on_a_log_axis_is_drawn():
    assert "0" in texts(draw_curves([Series("a", (0, 64, 128), (0.5, 0.1, 0.0))], x=BUDGET, y=KL))


def test_points_that_are_not_finite_are_left_out_and_a_figure_without_points_is_refused():
    draw_curves([Series("a", (1, 2), (math.nan, 1.0)), Series("b", (1,), (math.inf,))], x=BUDGET, y=KL)
    with pytest.raises(ConfigError, match="none of 1 series"):
        draw_curves([Series("a", (1,), (math.nan,))], x=BUDGET, y=KL)


def test_series_of_different_lengths_are_refused():
    with pytest.raises(ConfigError, match="'a'"):
        draw_curves([Series("a", (1, 2), (1.0,))], x=BUDGET, y=KL)


def test_bars_carry_groups_names_and_values():
    bars = [Bars("dense", (0.98, 0.6), (0.02, 0.05)), Bars("archive", (0.97, math.nan))]
    shown = texts(draw_bars(["kv75", EVIL], bars, y=Axis("score (share right)")))
    assert {"kv75", "dense", "archive", "0.98", "0.97", "0.6", "score (share right)"} <= set(shown)


def test_bars_of_another_number_than_groups_are_refused():
    with pytest.raises(ConfigError, match="each of 2 groups"):
        draw_bars(["a", "b"], [Bars("dense", (1.0,))], y=Axis("score"))


def test_bars_on_a_log_axis_are_refused():
    with pytest.raises(ConfigError, match="start at 0"):
        draw_bars(["a"], [Bars("dense", (1.0,))], y=Axis("score", log=True))


def test_drawing_leaves_the_settings_of_matplotlib_alone():
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    curves()
    assert dict(mpl.rcParams) == before


def test_names_in_other_scripts_are_drawn_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        named = [Series("\u6d77\u6e2f", (1,), (2,)), Series("\u0628\u062d\u0631", (1,), (3,), None, ("\u5cf0",))]
        assert {"\u6d77\u6e2f", "\u0628\u062d\u0631", "\u5cf0"} <= set(texts(draw_curves(named, x=BUDGET, y=KL)))


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"ragkv\[plot\]"):
        curves()
