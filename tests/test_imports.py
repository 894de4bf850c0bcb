"""Data flows one way, files stay short, and heavy imports stay where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "ragkv"
OFFLINE = {"build", "kmeans", "prefill"}
ONLINE = {"archive", "attention", "cache", "recall", "trace"}
MAX_LINES = 400


def imports_of(path: Path) -> set[str]:
    """Modules of ragkv that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ragkv"):
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    return found


def modules() -> dict[str, set[str]]:
    return {path.stem: imports_of(path) for path in PACKAGE.glob("*.py") if path.stem != "__init__"}


def test_the_online_side_does_not_import_the_offline_side() -> None:
    graph = modules()
    for name in ONLINE:
        assert not graph[name] & OFFLINE, f"{name} imports {graph[name] & OFFLINE}"


def test_imports_have_no_cycle() -> None:
    graph = modules()
    state: dict[str, str] = {}

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert state.get(name) != "open", " -> ".join((*trail, name))
        if name in state or name not in graph:
            return
        state[name] = "open"
        for other in graph[name]:
            visit(other, (*trail, name))
        state[name] = "done"

    for name in graph:
        visit(name, ())


def test_the_command_line_is_imported_by_nothing_below_it() -> None:
    assert not any("cli" in others for others in modules().values())


def test_importing_ragkv_loads_nothing_heavy() -> None:
    code = "import sys, ragkv; print(sorted({'torch', 'transformers', 'faiss', 'matplotlib'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == "[]"


def test_files_stay_short() -> None:
    folders = [PACKAGE, PACKAGE / "cli", PACKAGE.parent / "tests", PACKAGE.parent / "pipelines"]
    long = [str(p) for folder in folders for p in folder.glob("*.py") if len(p.read_text().splitlines()) > MAX_LINES]
    assert not long
