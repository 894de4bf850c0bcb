"""The options that several commands share: what is recalled, and how archives are put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.cli.common import Report, local
from ragkv.errors import ConfigError, ModelMismatchError
from ragkv.recipe import RecallPolicy, Recipe

if TYPE_CHECKING:
    from ragkv.model.load import LoadedModel
    from ragkv.recall.archive import Archive
    from ragkv.recall.composition import Composition
    from ragkv.recall.placed import Weighting

BudgetOption = Annotated[
    int | None,
    typer.Option(help="Archived tokens recalled per KV head and answer token. [default: the recipe's, or 256]"),
]
TopMOption = Annotated[int | None, typer.Option(help="Clusters recalled, instead of a budget of tokens.")]
MassOption = Annotated[
    float | None,
    typer.Option(help="Recall until this share (0 to 1) of the attention is exact, within the recipe's floor and cap."),
]
PilotOption = Annotated[
    list[int] | None,
    typer.Option(help="Recall in this layer only and keep all others dense; repeat for more layers."),
]


def choose_policy(
    default: RecallPolicy,
    n_layers: int,
    *,
    recipe: Path | None,
    budget: int | None,
    top_m: int | None,
    mass: float | None,
    pilot: list[int] | None,
) -> RecallPolicy:
    """`default`, or the policy of a recipe file, with what the command line says in its place."""
    given = [name for name, value in (("--budget", budget), ("--top-m", top_m), ("--mass", mass)) if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are given; choose one")
    policy = Recipe.from_toml(recipe).recall if recipe else default
    if budget is not None:
        policy = policy.with_budget(budget)
    elif given:
        policy = dataclasses.replace(policy, top_m=top_m, mass=mass, layer_budgets={})
    if pilot:
        dataclasses.replace(policy, dense_layers=tuple(pilot)).check_layers(n_layers)
        policy = dataclasses.replace(
            policy, dense_layers=tuple(layer for layer in range(n_layers) if layer not in pilot)
        )
    policy.check_layers(n_layers)
    return policy


ArchiveOption = Annotated[
    list[Path] | None,
    typer.Option(
        callback=local, help="Folder of the archive, as 'ragkv build' printed it; repeat it to ask several at once."
    ),
]
CatalogOption = Annotated[
    Path | None,
    typer.Option(
        callback=local, help="Ask documents of this catalog, as 'ragkv catalog add' made it, instead of archives."
    ),
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
    int,
    typer.Option(
        help="Compute so many first tokens of all archives but the first again; 0 for none. Needs archives whose "
        "recipe has sink_tokens of prefix and these."
    ),
]


def archive_folders(archives: list[Path] | None, catalog: Path | None, documents: list[str] | None) -> list[Path]:
    """The folders to open, from the options that name archives or documents of a catalog."""
    from ragkv.catalog.catalog import Catalog
    from ragkv.catalog.head import CATALOG_FILE

    if archives is not None and catalog is not None:
        raise ConfigError("give --archive or --catalog, not both")
    if archives is None and catalog is None:
        raise ConfigError("give --archive with a folder of 'ragkv build', or --catalog with one of 'ragkv catalog add'")
    if archives is not None:
        if documents:
            raise ConfigError("--document names documents of a catalog; give --catalog, or leave it out")
        for folder in archives:
            if (folder / CATALOG_FILE).is_file():
                raise ConfigError(f"--archive is {str(folder)!r}, a catalog; give it as --catalog")
        return archives

    opened = Catalog.open(catalog or Path())
    entries = [opened.entry(word) for word in documents] if documents else opened.entries()
    if not entries:
        raise ConfigError(f"catalog {str(catalog)!r} holds no documents; add some with 'ragkv catalog add'")
    return [entry.path for entry in entries]


def check_compose_options(*, positions: str, recompute: int) -> None:
    """Refuse what no composition can do, before anything is loaded."""
    from ragkv.recall.composition import CONSECUTIVE, POSITIONS

    if positions not in POSITIONS:
        raise ConfigError(f"--positions is {positions!r}; give one of {', '.join(POSITIONS)}")
    if recompute < 0:
        raise ConfigError(f"--recompute is {recompute}; give a number of tokens, or 0 for none")
    if recompute and positions != CONSECUTIVE:
        raise ConfigError(f"--recompute needs --positions {CONSECUTIVE}, and {positions!r} was given; leave one out")


def compose(
    paths: Sequence[Path],
    model: LoadedModel,
    *,
    catalog: Path | None,
    positions: str,
    weighting: Weighting,
    recompute: int,
    bar: Report,
) -> Composition:
    """Open archives, or the documents of a catalog, each folder once, and put them together in the order given."""
    from ragkv.catalog.catalog import Catalog
    from ragkv.recall.composition import Composition
    from ragkv.recall.recompute import recompute as recompute_heads

    folders = tuple(dict.fromkeys(paths))
    if catalog is None:
        opened = _open_archives(folders, model)
    else:
        into = Catalog.open(catalog, model)
        opened = {path: into.archive(path.name) for path in folders}
    composition = Composition([opened[path] for path in paths], positions=positions, weighting=weighting)
    if recompute and len(paths) > 1:
        composition = recompute_heads(
            composition, recompute, on_progress=lambda done, total: bar("recomputing", done, total)
        )
    return composition


def _open_archives(folders: Sequence[Path], model: LoadedModel) -> dict[Path, Archive]:
    from ragkv.recall.archive import Archive

    if len(folders) == 1:
        return {folder: Archive.open(folder, model) for folder in folders}
    opened = {}
    for folder in folders:
        try:
            opened[folder] = Archive.open(folder, model)
        except ModelMismatchError as error:  # which of them, is what to know
            raise ModelMismatchError(f"{str(folder)!r}: {error}") from error
    return opened
