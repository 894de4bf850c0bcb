"""How commands write: tables and JSON to stdout, progress and notes to stderr."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

# The two follow sys.stdout and sys.stderr as they are when something is written.
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def print_json(obj: dict[str, Any]) -> None:
    """Write `obj` as one JSON object to stdout.

    Raises
    ------
    ValueError
        If a number is NaN or infinite, which JSON does not have.
    """
    print(json.dumps(obj, indent=2, allow_nan=False))


def print_note(text: str) -> None:
    """Write one line to stderr: something to know that is neither a result nor an error."""
    err.print(f"note: {text}", markup=False, soft_wrap=True)


def format_bytes(n_bytes: int) -> str:
    """`n_bytes` with a binary unit and one decimal: ``524288`` is ``512.0 KiB``."""
    value = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        # Compared as it will be shown, so that nothing reads 1024.0 of a unit.
        if round(value, 1) < 1024:
            return f"{n_bytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
