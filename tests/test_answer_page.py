"""The answer page and a report in a real browser: they fit a phone, work by keyboard, load nothing, show something."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from ragkv.answer.page import render_answer
from ragkv.answer.passages import DocumentEvidence, merge_passages
from ragkv.evaluation.report.figures import Axis, Series, draw_curves
from ragkv.evaluation.report.page import Picture, Report, Section, Table, write_report
from ragkv.page import write_page
from tests.answer_sample import sample_page, token_spans
from tests.browser import NAMES, Browser, find_chromium

TAB, ENTER = ("Tab", 9), ("Enter", 13)
OPEN_ALL = "document.querySelectorAll('details').forEach(part => part.open = true)"
FOCUS = """(() => { const at = document.activeElement, box = at.getBoundingClientRect(), look = getComputedStyle(at);
  return JSON.stringify([at.getAttribute('href') || at.tagName, look.outlineStyle, box.width > 0 && box.left >= 0,
    box.top >= 0 && box.bottom <= innerHeight]); })()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    binary = find_chromium()
    if binary is None:
        pytest.skip(f"no browser: install Debian's chromium, one of {', '.join(NAMES)}, or set RAGKV_CHROMIUM")
    with Browser(binary, tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "answer.html"
    write_page(render_answer(sample_page()), path)
    return path


@pytest.fixture(scope="module")
def hard_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words without end, names without spaces, 100,000 characters, right to left, and eighty layers."""
    texts = {
        "a" * 300: "Z" * 2000,
        "long.txt": "The gauge was read twice a day. " * 3125,
        "\u05d0": "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd. " * 40,
    }
    documents = []
    for name, text in texts.items():
        pairs = token_spans(text)
        spans = tuple((start, end, 1 / len(texts) / len(pairs)) for start, end in pairs)
        documents.append(DocumentEvidence(name, text, 1 / len(texts), spans, merge_passages(text, spans)))
    page = sample_page()
    layers = tuple(replace(page.layers[0], layer=layer) for layer in range(80))
    figures = (("l" * 80, "9" * 80), *page.figures)
    path = tmp_path_factory.mktemp("hard") / "answer.html"
    write_page(
        render_answer(
            replace(
                page, question="q" * 500, answer="w" * 900, documents=tuple(documents), layers=layers, figures=figures
            )
        ),
        path,
    )
    return path


@pytest.fixture(scope="module")
def report_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with a wide table, a figure with labels, and words without end."""
    x, names = (64, 128, 256), ("w" * 60, "int4", "int3", "int2")
    curves = [Series(name, x, (0.5, 0.1, 0.05), (0.1, 0.02, 0.01), ("", "knee", "")) for name in names]
    picture = Picture(draw_curves(curves, x=Axis("budget", log=True), y=Axis("KL", log=True)), "a figure", "w" * 300)
    table = Table("a table", [f"column {number}" for number in range(20)], [[*range(20)], [*range(20)]], highlight=1)
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(
        Report("A report", "w" * 300, [Section("s" * 80, ["words", table, picture])], {"key": "v" * 200}), path
    )
    return path


@pytest.mark.parametrize("width", [320, 375, 1200])
@pytest.mark.parametrize("which", ["page_file", "hard_file", "report_file"])
def test_nothing_scrolls_sideways(browser: Browser, request: pytest.FixtureRequest, which: str, width: int) -> None:
    browser.open(request.getfixturevalue(which), width=width)
    browser.ask(OPEN_ALL)
    assert browser.ask("document.documentElement.scrollWidth") == width


def test_tab_reaches_the_skip_link_first_and_then_every_passage(browser: Browser, page_file: Path) -> None:
    browser.open(page_file, width=375)
    wanted = json.loads(str(browser.ask("JSON.stringify([...document.querySelectorAll('.passage')].map(p => p.id))")))
    reached = []
    while len(reached) < 100:
        browser.press(*TAB)
        target, outline, in_width, in_height = json.loads(str(browser.ask(FOCUS)))
        if target == "BODY":
            break
        assert outline == "solid", f"no focus is seen on {target}"
        assert in_width, f"{target} is out of the window"
        assert in_height, f"{target} is out of the window"
        reached.append(target)
    assert reached[0] == "#sources"
    assert len(wanted) == 7
    assert {f"#{name}" for name in wanted} | {f"#t{name[1:]}" for name in wanted} <= set(reached)
    assert reached.count("SUMMARY") == 4


def test_enter_on_a_link_into_the_whole_text_unfolds_it(browser: Browser, page_file: Path) -> None:
    browser.open(page_file, width=375)
    browser.ask("document.querySelector('a[href=\"#t1\"]').focus()")
    browser.call(
        "Input.dispatchKeyEvent", type="keyDown", key=ENTER[0], code=ENTER[0], windowsVirtualKeyCode=ENTER[1], text="\r"
    )
    shown = "(() => { const box = document.getElementById('t1').getBoundingClientRect(); return box.top; })()"
    assert browser.ask("document.getElementById('t1').closest('details').open") is True
    assert 40 <= float(str(browser.ask(shown))) <= 800, "hidden by the summary that stays on top, or out of sight"


def test_the_page_loads_nothing_and_reports_no_error(
    browser: Browser, page_file: Path, hard_file: Path, report_file: Path
) -> None:
    for path in (page_file, hard_file, report_file):
        browser.open(path, width=1200)
        browser.ask(OPEN_ALL)
        methods = [event["method"] for event in browser.events]
        assert "Log.entryAdded" not in methods
        assert "Runtime.exceptionThrown" not in methods
        assert "Runtime.consoleAPICalled" not in methods
        requests = [event["params"] for event in browser.events if event["method"] == "Network.requestWillBeSent"]
        assert {request["request"]["url"] for request in requests} == {path.as_uri()}


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [375, 1200])
def test_the_page_follows_the_colour_scheme_and_shows_something(
    browser: Browser, page_file: Path, width: int, dark: bool
) -> None:
    browser.open(page_file, width=width, dark=dark)
    image = Image.open(io.BytesIO(browser.screenshot())).convert("RGB")
    assert image.width == width
    assert image.getpixel((2, 2)) == ((20, 23, 29) if dark else (255, 255, 255))
    share = sum(count for count, colour in image.getcolors(1 << 24) if colour != image.getpixel((2, 2))) / (
        image.width * image.height
    )
    assert 0.05 < share < 0.6


CONTRAST = """(() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const light = rgb => { const [r, g, b] = rgb.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92
    : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = node => { for (; node; node = node.parentElement) { const [r, g, b, a = 1] =
    parse(getComputedStyle(node).backgroundColor); if (a > 0) return [r, g, b]; } return [255, 255, 255]; };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), low = [];
  while (texts.nextNode()) { const node = texts.currentNode.parentElement; if (!texts.currentNode.data.trim()) continue;
    const look = getComputedStyle(node), ink = node.tagName === 'text' ? look.fill : look.color;
    const pair = [light(parse(ink).slice(0, 3)), light(ground(node))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (ratio < 4.5) low.push(node.tagName + '.' + node.className + ' ' + ratio.toFixed(2)); }
  return JSON.stringify(low); })()"""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("which", ["page_file", "report_file"])
def test_every_text_has_the_contrast_that_small_print_needs(
    browser: Browser, request: pytest.FixtureRequest, which: str, dark: bool
) -> None:
    browser.open(request.getfixturevalue(which), width=375, dark=dark)
    browser.ask(OPEN_ALL)
    assert browser.ask(CONTRAST) == "[]"
