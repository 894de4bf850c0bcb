"""What the measuring jobs share as commands: how they end, and how they write a table."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from ragkv.cli.app import EXIT_ERROR, EXIT_INTERRUPTED
from ragkv.errors import ConfigError, RagkvError


def resumable(run: Callable[[], None]) -> int:
    """Exit code of a job: an error becomes one line on stderr and 2, an interrupt 130 and word that it goes on."""
    try:
        run()
    except RagkvError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("stopped; the same command goes on with what is missing", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def write_table(path: Path, text: str) -> None:
    """Write a markdown table, or say in one sentence why not."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error.strerror}") from error
