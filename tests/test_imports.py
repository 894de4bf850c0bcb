"""Data flows one way, files stay short, and heavy imports stay where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "ragkv"
OFFLINE = {"build", "kmeans", "layer_writer", "prefill", "probes"}
ONLINE = {"archive", "attention", "cache", "layers", "payload", "policy", "recall", "trace"}
MAX_LINES = 400


def imports_of(path: Path) -> set[str]:
    """Modules of ragkv that a file imports, anywhere in it; those of a folder as ``folder.module``."""
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


def test_the_online_side_does_not_import_the_offline_side() -> None:
    graph = modules()
    assert graph.keys() >= ONLINE | OFFLINE
    for name in ONLINE:
        assert not graph[name] & OFFLINE, f"{name} imports {graph[name] & OFFLINE}"


def test_no_way_leads_from_the_online_side_to_the_offline_side() -> None:
    graph, reached, left = modules(), set[str](), list(ONLINE)
    while left:
        name = left.pop()
        if name not in reached:
            reached.add(name)
            left += graph[name]
    assert not reached & OFFLINE
    assert "codec" in reached


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


@pytest.mark.parametrize(("folder", "importers"), [("cli", ("cli",)), ("evaluation", ("cli", "evaluation"))])
def test_a_folder_is_imported_by_nothing_below_it(folder: str, importers: tuple[str, ...]) -> None:
    for name, others in modules().items():
        if name.split(".")[0] not in importers:
            assert not [other for other in others if other.split(".")[0] == folder], name


def test_importing_ragkv_loads_nothing_heavy() -> None:
    code = "import sys, ragkv; print(sorted({'torch', 'transformers', 'faiss', 'matplotlib'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == "[]"


def test_files_stay_short() -> None:
    folders = [PACKAGE, PACKAGE.parent / "tests", PACKAGE.parent / "pipelines"]
    long = [str(p) for folder in folders for p in folder.rglob("*.py") if len(p.read_text().splitlines()) > MAX_LINES]
    assert not long
