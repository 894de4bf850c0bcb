"""Notebooks as they are committed: no outputs, no paths of a machine, and run by the tests. Pytest executes them."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# A path from the root of a file system: behind a quote, bracket, space or equals sign, as in "/home/me" or (C:\me).
ABSOLUTE_PATH = re.compile(r"""(?:^|["'`\s(=\[])(?:/[A-Za-z][\w.-]*/|~/|[A-Za-z]:[\\/])""", re.MULTILINE)


def read(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values


def test_there_is_a_notebook_about_calibration() -> None:
    assert "calibration.ipynb" in [path.name for path in NOTEBOOKS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_what_running_it_leaves(path: Path) -> None:
    notebook = read(path)
    for cell in notebook["cells"]:
        assert cell["metadata"] == {}, cell["id"]
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], cell["id"]
            assert cell["execution_count"] is None, cell["id"]
    assert notebook["metadata"] == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_names_no_path_of_a_machine(path: Path) -> None:
    for cell in read(path)["cells"]:
        found = ABSOLUTE_PATH.search("".join(cell["source"]))
        assert found is None, f"{cell['id']}: {found}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_imports_what_there_is(path: Path) -> None:
    """Found here in a moment, where running the notebook takes minutes."""
    code = "\n".join("".join(cell["source"]) for cell in read(path)["cells"] if cell["cell_type"] == "code")
    taken = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    for node in taken:
        if node.module and node.module.split(".")[0] == "ragkv":
            module = import_module(node.module)
            assert not [each.name for each in node.names if not hasattr(module, each.name)], node.module


@pytest.mark.parametrize("text", ['open("/home/me/x")', "see /tmp/x", "(C:\\data)", "~/data", "/srv/data"])
def test_a_path_of_a_machine_is_seen(text: str) -> None:
    assert ABSOLUTE_PATH.search(text)


@pytest.mark.parametrize("text", ["folder / name", "a/b/c.txt", "keys/values", "https://example.org/a", "1/2 and 3/4"])
def test_other_slashes_are_no_path_of_a_machine(text: str) -> None:
    assert ABSOLUTE_PATH.search(text) is None


def test_the_tests_run_the_notebooks() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    assert "notebooks" in settings["testpaths"]
    assert "--nbmake" in settings["addopts"].split()
