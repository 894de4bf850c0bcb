"""``ragkv verify``: check archives without their model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragkv.cli.common import local
from ragkv.cli.output import print_json
from ragkv.errors import ArchiveNotFoundError

EXIT_FAULTS = 1


def verify(
    folders: Annotated[
        list[Path], typer.Argument(callback=local, metavar="DIR", help="Folders of archives.", show_default=False)
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Check archives: checksums of all files, then every promise of the format. No model is loaded.

    Prints one line per fault, or one line that the archive is sound. The exit code is 1 if there are faults, and 2 if
    a folder holds no archive.

    \b
    Examples:
      ragkv verify report.kv
      ragkv verify archives/*
    """
    from ragkv.archive.verify import verify_archive

    faults: dict[Path, list[str]] = {}
    missing: ArchiveNotFoundError | None = None
    for folder in folders:
        try:
            faults[folder] = verify_archive(folder)
        except ArchiveNotFoundError as error:  # the others are checked all the same
            missing, faults[folder] = missing or error, [str(error)]
            continue
        if not as_json:
            for line in faults[folder] or ["sound"]:
                print(f"{folder}: {line}")
    if as_json:
        archives = [{"path": str(folder), "sound": not found, "faults": found} for folder, found in faults.items()]
        print_json({"sound": not any(faults.values()), "archives": archives})
    if missing is not None:
        raise missing
    if any(faults.values()):
        raise typer.Exit(EXIT_FAULTS)
