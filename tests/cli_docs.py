"""`docs/cli.md` is what the commands' own help says; rewrite it with `python -m tests.cli_docs`."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from ragkv.cli.app import app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
COMMANDS = ("ledger", "fit", "build", "ask", "inspect", "verify", "bench", "calibrate", "eval", "catalog")
CATALOG_COMMANDS = ("create", "add", "list", "remove", "gc")
_INTRODUCTION = """\
# Command line

This page is generated from the commands' own help (`python -m tests.cli_docs`). Errors are one sentence on stderr with
exit code 2; `ragkv verify` exits with 1 when it finds a fault. With `--json` a command prints one JSON object on stdout
and nothing else there. Where several documents are worked on, one that fails does not stop the others: it is listed at
the end. Paths are of this machine: URLs are refused. Characters that the terminal's encoding lacks are shown as `?`; in
JSON they are escaped.
"""


def render() -> str:
    """The page: the help of `ragkv`, of each command, and of the commands of a catalog."""
    parts = [_INTRODUCTION]
    pages = ((), *((name,) for name in COMMANDS), *(("catalog", name) for name in CATALOG_COMMANDS))
    for command in pages:
        shown = CliRunner().invoke(app, [*command, "--help"], prog_name="ragkv", env={"COLUMNS": "100"})
        title = " ".join(("ragkv", *command))
        text = "\n".join(line.rstrip() for line in shown.stdout.strip().splitlines())
        parts.append(f"## {title}\n\n```\n{text}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
