"""What was measured, a line for each row and the settings beside them, so that a stopped run goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from ragkv.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    class Row(DataclassInstance, Protocol):
        """A dataclass of plain values that can be made from them again."""

        @classmethod
        def from_dict(cls, values: dict[str, Any]) -> Self: ...


R = TypeVar("R", bound="Row")

SETTINGS_FILE, RESULTS_FILE = "settings.json", "results.jsonl"


def check_folder(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuse a folder that cannot hold results of these settings; nothing is written.

    Raises
    ------
    ConfigError
        If the folder holds results of other settings, or something else, or cannot be read.
    """
    path = folder / SETTINGS_FILE
    try:
        kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        inside = {found.name for found in folder.iterdir()} if folder.exists() else set()
    except OSError as error:
        raise ConfigError(f"cannot keep results in {str(folder)!r}: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} is damaged; choose another --out") from error
    if path.exists() and kept != json.loads(json.dumps(settings)):
        raise ConfigError(f"{str(folder)!r} holds results of other settings; choose another --out")
    if not path.exists() and inside - {_part(path).name}:
        raise ConfigError(f"{str(folder)!r} is not empty and holds no {SETTINGS_FILE}; choose another --out")


def claim_folder(folder: Path, settings: Mapping[str, Any]) -> None:
    """Make `folder` the one of these settings; one that is already stays as it is.

    Raises
    ------
    ConfigError
        As `check_folder`, or if it cannot be written.
    """
    check_folder(folder, settings)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / SETTINGS_FILE).exists():
            write_whole(folder / SETTINGS_FILE, json.dumps(settings, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot keep results in {str(folder)!r}: {error}") from error


def write_whole(path: Path, text: str) -> None:
    """Write a file under another name first: a crash must not leave half of it under its own."""
    _part(path).write_text(text, encoding="utf-8")
    _part(path).replace(path)


def _part(path: Path) -> Path:
    return path.with_suffix(".part")


class JsonLines(Generic[R]):
    """Rows as JSON lines; a last line that was cut short by a crash does not count."""

    def __init__(self, path: Path, row: type[R]) -> None:
        self.path, self._row = path, row

    def read(self) -> list[R]:
        """All whole rows.

        Raises
        ------
        ConfigError
            If a whole line is not what `add` wrote.
        """
        try:
            return [self._row.from_dict(json.loads(line)) for line in self._whole_lines()]
        except (ValueError, TypeError, LookupError) as error:
            raise ConfigError(f"{str(self.path)!r} is damaged; delete it to measure again") from error

    def add(self, row: R) -> None:
        """Append one line, whole."""
        whole = b"".join(self._whole_lines())
        if self.path.exists() and self.path.stat().st_size > len(whole):
            self.path.write_bytes(whole)
        with self.path.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(asdict(row)) + "\n")
            handle.flush()

    def _whole_lines(self) -> list[bytes]:
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        return [line for line in lines if line.endswith(b"\n")]


class ResultsFolder(JsonLines[R]):
    """The rows of one run in a folder of their own; reopened, it knows what is done.

    Raises
    ------
    ConfigError
        As `claim_folder`.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], row: type[R]) -> None:
        claim_folder(folder, settings)
        super().__init__(folder / RESULTS_FILE, row)
