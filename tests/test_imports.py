"""The house: rooms import in one direction, files stay short, and heavy imports stay where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "ragkv"
MAX_LINES = 400
MAX_FILES = 14
"""Files of a room; about ten is the aim."""

FLOORS = (
    ("errors", "version"),
    ("model", "recipe", "text", "page"),
    ("ledger", "archive"),
    ("build", "recall"),
    ("catalog", "answer"),
    ("llamaindex", "evaluation"),
    ("cli",),
    ("pipelines",),
)
"""Rooms from the ground up: a room imports from floors below its own, and from its own floor what `SIDEWAYS` allows."""

SIDEWAYS = {("model", "text"), ("ledger", "model")}

NEVER = {
    "archive": ("build", "recall", "ledger"),
    "answer": ("build", "catalog"),
    "ledger": ("archive",),
    "model": ("recipe", "archive"),
    "recall": ("build", "catalog"),
}
"""What a room must not reach, not even through others."""


def imports_of(path: Path) -> set[str]:
    """Modules of ragkv that a file imports, anywhere in it, as ``room.module``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    known = {name_of(module) for module in PACKAGE.rglob("*.py")}
    return {name.removeprefix("ragkv.") for name in found if name.startswith("ragkv.")} & known


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def modules() -> dict[str, set[str]]:
    return {name_of(path): imports_of(path) for path in PACKAGE.rglob("*.py") if path.stem != "__init__"}


def room(module: str) -> str:
    return module.split(".", maxsplit=1)[0]


def floor(name: str) -> int:
    return next(level for level, rooms in enumerate(FLOORS) if name in rooms)


def test_rooms_import_from_below() -> None:
    for name, others in modules().items():
        for other in others:
            ours, theirs = room(name), room(other)
            below = floor(theirs) < floor(ours)
            assert ours == theirs or below or (ours, theirs) in SIDEWAYS, f"{name} imports {other}"


@pytest.mark.parametrize(("start", "never"), NEVER.items())
def test_no_way_leads_where_it_must_not(start: str, never: tuple[str, ...]) -> None:
    graph, reached = modules(), set[str]()
    left = [name for name in graph if room(name) == start]
    assert left
    while left:
        name = left.pop()
        if name not in reached:
            reached.add(name)
            left += graph[name]
    assert not {name for name in reached if room(name) in never}


def test_imports_have_no_cycle() -> None:
    graph = modules()
    state: dict[str, str] = {}

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert state.get(name) != "open", " -> ".join((*trail, name))
        if name in state:
            return
        state[name] = "open"
        for other in graph[name]:
            visit(other, (*trail, name))
        state[name] = "done"

    for name in graph:
        visit(name, ())


def test_nothing_in_the_library_imports_a_pipeline() -> None:
    for path in PACKAGE.rglob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        taken = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        taken += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        assert not [name for name in taken if name.split(".")[0] == "pipelines"], path


def test_every_room_says_its_role_in_one_line() -> None:
    for path in PACKAGE.rglob("__init__.py"):
        said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert said, path
        assert said.splitlines()[0].endswith("."), path


def test_importing_ragkv_loads_nothing_heavy() -> None:
    code = "import sys, ragkv; print(sorted({'torch', 'transformers', 'faiss', 'matplotlib'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == "[]"


def test_files_and_rooms_stay_small() -> None:
    folders = [PACKAGE, PACKAGE.parent / "tests", PACKAGE.parent / "pipelines"]
    long = [str(p) for folder in folders for p in folder.rglob("*.py") if len(p.read_text().splitlines()) > MAX_LINES]
    assert not long
    rooms = [path.parent for path in PACKAGE.rglob("__init__.py")]
    assert not [str(each) for each in rooms if len([*each.glob("*.py")]) - 1 > MAX_FILES]
