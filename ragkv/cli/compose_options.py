"""The options of commands that put several archives together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.cli.common import Report
from ragkv.errors import ConfigError

if TYPE_CHECKING:
    from ragkv.compose import Composition
    from ragkv.models import LoadedModel
    from ragkv.placed import Weighting

ArchiveOption = Annotated[
    list[Path] | None,
    typer.Option(help="Folder of the archive, as 'ragkv build' printed it; repeat it to ask several at once."),
]
CatalogOption = Annotated[
    Path | None,
    typer.Option(help="Ask documents of this catalog, as 'ragkv catalog add' made it, instead of archives."),
]
DocumentOption = Annotated[
    list[str] | None,
    typer.Option(help="Name of a document in the catalog, or the beginning of its id; repeat for more. [default: all]"),
]
PositionsOption = Annotated[
    str,
    typer.Option(
        help="consecutive: archives stand one after another. reused: all begin behind the prefix, so that together "
        "they may be longer than the model's context."
    ),
]
TemperatureOption = Annotated[
    float, typer.Option(help="Divides the logits of the documents' tokens: below 1 sharpens. [APE, arXiv 2502.05431]")
]
ScaleOption = Annotated[
    float, typer.Option(help="Power that the documents' attention mass is raised to: below 1 lessens it.")
]
RecomputeOption = Annotated[
    int, typer.Option(help="Compute the first tokens of all archives but the first again; 0 for none.")
]


def archive_folders(archives: list[Path] | None, catalog: Path | None, documents: list[str] | None) -> list[Path]:
    """The folders to open, from the options that name archives or documents of a catalog."""
    if (archives is None) == (catalog is None):
        raise ConfigError("give --archive with a folder of 'ragkv build', or --catalog with one of 'ragkv catalog add'")
    if archives is not None:
        if documents:
            raise ConfigError("--document names documents of a catalog; give --catalog, or leave it out")
        return archives
    from ragkv.catalog import Catalog

    opened = Catalog.open(catalog or Path())
    entries = [opened.entry(word) for word in documents] if documents else opened.entries()
    if not entries:
        raise ConfigError(f"catalog {str(catalog)!r} holds no documents; add some with 'ragkv catalog add'")
    return [entry.path for entry in entries]


def compose(
    paths: Sequence[Path],
    model: LoadedModel,
    *,
    positions: str,
    weighting: Weighting,
    recompute: int,
    bar: Report,
) -> Composition:
    """Open archives, each folder once, and put them together in the order given."""
    from ragkv.archive import Archive
    from ragkv.compose import Composition
    from ragkv.fingerprint import fingerprint
    from ragkv.repair import recompute as recompute_heads

    if recompute < 0:
        raise ConfigError(f"--recompute is {recompute}; give a number of tokens, or 0 for none")
    known = fingerprint(model.model, model.tokenizer, model.model.dtype) if len(set(paths)) > 1 else None
    opened = {path: Archive.open(path, model, known=known) for path in dict.fromkeys(paths)}
    composition = Composition([opened[path] for path in paths], positions=positions, weighting=weighting)
    if recompute and len(paths) > 1:
        composition = recompute_heads(
            composition, recompute, on_progress=lambda done, total: bar("recomputing", done, total)
        )
    return composition
