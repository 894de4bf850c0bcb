"""The page of the house and the recipes for contributors say what the code and the tests hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_imports import FLOORS, NEVER, PACKAGE, SIDEWAYS

ROOT = PACKAGE.parent
HOUSE = ROOT / "docs" / "house.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
HOOKS = ROOT / ".pre-commit-config.yaml"


def part(title: str) -> str:
    """The part of the page under a heading."""
    return HOUSE.read_text(encoding="utf-8").split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def rows(title: str) -> list[list[str]]:
    """Cells of the table under a heading, without its head."""
    lines = [line for line in part(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def names(cell: str) -> set[str]:
    return {name.rstrip("/") for name in re.findall(r"`([\w/]+)`", cell)}


def test_every_room_stands_on_the_page_and_nothing_else() -> None:
    there = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    there -= {"__init__", "__pycache__", "py"}
    told = {name for room, _ in rows("Rooms") for name in names(room)}
    assert told == there
    assert {name for floor in FLOORS for name in floor} == there - {"templates"} | {"pipelines"}


def test_the_floors_are_drawn_as_they_are_held() -> None:
    known = {name for floor in FLOORS for name in floor}
    drawing = part("Floors").split("```")[1]
    drawn = []
    for line in drawing.splitlines():
        words = re.split(r" {3,}", line.strip())
        found = tuple(word for each in words for word in each.split(" -> ") if word in known)
        drawn += [found] if found else []
    assert [set(floor) for floor in drawn] == [set(floor) for floor in reversed(FLOORS)]
    assert set(re.findall(r"(\w+) -> (\w+)", drawing)) == SIDEWAYS


def test_what_is_never_reached_is_said() -> None:
    assert {names(room).pop(): names(never) for room, never, _ in rows("Floors")} == {
        room: set(never) for room, never in NEVER.items()
    }


@pytest.mark.parametrize("page", [HOUSE, CONTRIBUTING], ids=["house", "contributing"])
def test_files_that_the_pages_name_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    paths = re.findall(r"(?:ragkv|tests|docs|indexes)/[\w/]+\.(?:py|md)", text)
    paths += [str((page.parent / link).resolve()) for link in re.findall(r"\]\(([^):#]+)", text)]
    paths += [
        f"ragkv/{stage}.py"
        for stage in re.findall(r"\b((?:model|build|archive|recall|answer)/\w+) ", part("What flows"))
    ]
    assert len(paths) > 3
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_the_recipes_name_what_the_code_holds() -> None:
    text = CONTRIBUTING.read_text(encoding="utf-8")
    assert re.findall(r"^## Add an? (\w+)$", text, re.M) == ["architecture", "codec", "suite", "peer"]
    code = "\n".join(
        path.read_text(encoding="utf-8") for folder in (PACKAGE, ROOT / "tests") for path in folder.rglob("*.py")
    )
    for name in re.findall(r"`(_?[A-Z][A-Z_]{3,})`", text):
        assert re.search(rf"^{name}\b", code, re.M), name


def test_the_hooks_run_what_make_lint_runs() -> None:
    hooks = HOOKS.read_text(encoding="utf-8")
    assert re.findall(r"repo: (.*)", hooks) == ["local"]
    run = re.findall(r"entry: \.venv/bin/(\w+(?: \w+)?)", hooks)
    assert run == ["ruff check", "ruff format", "mypy"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(f"$(BIN)/{command}" in makefile for command in run)
