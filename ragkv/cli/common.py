"""What the commands share: loading a model, choosing a layout, progress on stderr."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ragkv.cli.output import err
from ragkv.errors import ConfigError, RagkvError

if TYPE_CHECKING:
    from ragkv.model.load import LoadedModel
    from ragkv.model.prompt import PromptLayout

Report = Callable[[str, int, int], None]

Given = TypeVar("Given")


def local(given: Given) -> Given:
    """The callback of every option and argument that takes paths: refuses URLs before anything is done."""
    from ragkv.archive.files import local_path

    for path in given if isinstance(given, list | tuple) else [given]:
        if isinstance(path, str | Path):
            local_path(path)
    return given


DtypeOption = Annotated[str | None, typer.Option(help="bf16, fp16 or fp32. [default: the checkpoint's own]")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ... [default: cuda if there is one]")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else there.")]
LayoutOption = Annotated[
    str,
    typer.Option(
        callback=local,
        help="Prompt around the document: auto, plain, chat, or a TOML file with 'prompt' (holding {document} and "
        "{question}) and an optional list 'stop'.",
    ),
]


def load(name: str, dtype: str | None, device: str | None) -> LoadedModel:
    """Load a model, saying on stderr what takes long."""
    from ragkv.model.load import load_model

    with err.status(f"loading {name}") as status:
        return load_model(name, dtype=dtype, device=device, progress=status.update)


def choose_layout(choice: str, model: LoadedModel) -> PromptLayout:
    """The layout that an option names."""
    from ragkv.model.prompt import PromptLayout

    if choice == "auto":
        return model.layout
    if choice == "plain":
        return PromptLayout.plain()
    if choice == "chat":
        return PromptLayout.chat(model.tokenizer)
    return read_layout(Path(choice))


def read_layout(path: Path) -> PromptLayout:
    """A layout from a TOML file with the key ``prompt`` and an optional list ``stop``."""
    from ragkv.model.prompt import PromptLayout

    local(path)
    if path.suffix != ".toml":
        raise ConfigError(f"layout is {str(path)!r}; give auto, plain, chat or a .toml file")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"layout file {str(path)!r} cannot be read: {error}") from error
    prompt, stop = values.pop("prompt", None), values.pop("stop", [])
    if values or not isinstance(prompt, str) or not isinstance(stop, list) or not all(isinstance(s, str) for s in stop):
        raise ConfigError(f"layout file {str(path)!r} must hold 'prompt', a text, and may hold 'stop', a list of texts")
    return PromptLayout.from_prompt(prompt, stop=tuple(stop))


def source_name(path: Path) -> str:
    """A path as it was given, as the name of its document: bytes of it that are not UTF-8 are written out."""
    return str(path).encode("utf-8", "backslashreplace").decode()


def read_documents(files: Sequence[Path]) -> tuple[list[tuple[Path, str]], list[dict[str, str]]]:
    """Read every document before a model is loaded, so that a wrong name costs nothing.

    Returns those that can be read, and of the others the file and the error.

    Raises
    ------
    ConfigError
        If none can be read.
    """
    from ragkv.text import read_text

    documents, faults = [], []
    for path in dict.fromkeys(files):
        try:
            documents.append((path, read_text(path)))
        except ConfigError as error:
            faults.append(fault_of(path, error))
    if not documents:
        raise ConfigError("; ".join(fault["error"] for fault in faults))
    return documents, faults


def fault_of(path: Path, error: RagkvError) -> dict[str, str]:
    """What is told of a file that failed."""
    return {"file": str(path), "error": " ".join(str(error).split())}


@contextmanager
def progress(title: str = "") -> Iterator[Report]:
    """Bars on stderr, one per stage: call the yielded function with (stage, done, total)."""
    bars = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
    )
    tasks: dict[str, TaskID] = {}

    def report(stage: str, done: int, total: int) -> None:
        label = f"{title} {stage}".strip()
        if label not in tasks:
            tasks[label] = bars.add_task(label, total=total)
        bars.update(tasks[label], completed=done, total=total)

    with bars:
        yield report
