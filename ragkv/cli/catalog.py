"""``ragkv catalog``: many archives in one folder, of one model and prompt."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragkv.cli.common import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    LayoutOption,
    choose_layout,
    fault_of,
    load,
    local,
    progress,
    read_documents,
    source_name,
)
from ragkv.cli.output import err, format_bytes, out, print_json
from ragkv.errors import ConfigError, RagkvError
from ragkv.recipe import Recipe

if TYPE_CHECKING:
    from ragkv.catalog.catalog import Catalog, CatalogEntry

ID_SHOWN = 12
"""Characters of an id in tables; the start of an id names a document as well as the whole."""

Folder = Annotated[
    Path, typer.Argument(callback=local, metavar="CATALOG", help="Folder of the catalog.", show_default=False)
]

catalog = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@catalog.callback()
def describe() -> None:
    """Keep many archives in one folder, all of one model and one prompt, so that a question can use several at once.

    Documents go in and out while others read: an archive appears whole, a removed one goes on answering whoever has it
    open. The same text is archived once, whoever adds it.

    \b
    Examples:
      ragkv catalog add library reports/*.txt --model demo
      ragkv catalog list library
    """


@catalog.command()
def add(
    folder: Folder,
    files: Annotated[
        list[Path], typer.Argument(callback=local, help="UTF-8 text files, one document each.", show_default=False)
    ],
    *,
    model: Annotated[
        str | None,
        typer.Option(
            help="'demo', a hub id, a local folder or a .gguf file. [default: the one the catalog was made with]"
        ),
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(callback=local, help="TOML file that says how a new catalog's archives are built.")
    ] = None,
    layout: LayoutOption = "auto",
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="Take the names from other documents; one that has no other is removed.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Add documents to a catalog; makes the catalog if there is none, which needs --model.

    A document's name is the path as it is given here: a/r.txt and b/r.txt are two documents. A text that is in the
    catalog already is not built again and has this name, too, so an interrupted run can simply be repeated; one that
    was removed comes back without being built. Recipe and layout are the catalog's: given again, they must be the same.
    A file that cannot be read or archived does not stop the others: it is listed at the end, with exit code 2.

    \b
    Examples:
      ragkv catalog add library reports/*.txt --model demo
      ragkv catalog add library reports/march.txt --replace
    """
    settings = Recipe.from_toml(recipe) if recipe else None
    documents, faults = read_documents(files)
    into = _open_to_add(folder, model, settings, layout=layout, dtype=dtype, device=device)
    rows: list[dict[str, Any]] = []
    for path, text in documents:
        try:
            rows.append(_add_one(into, path, text))
        except RagkvError as error:
            faults.append(fault_of(path, error))
        else:
            if not as_json and not replace:
                _show_added(rows[-1])
    if replace:  # once all are in, because a text may have moved from one of the files to another
        for row in rows:
            row["replaced"] = _replace(into, row["id"], row["name"])
            if not as_json:
                _show_added(row)
    if as_json:
        print_json({"catalog": str(folder), "documents": rows, "failed": faults})
    _end(faults, "file")


@catalog.command()
def create(
    folder: Folder,
    *,
    model: Annotated[str, typer.Option(help="'demo', a hub id, a local folder or a .gguf file.")],
    texts: Annotated[
        list[Path] | None,
        typer.Option(
            callback=local,
            metavar="FILE",
            help="Text that the catalog's codes are fitted on; give it again for more. [default: the first document]",
        ),
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(callback=local, help="TOML file that says how the catalog's archives are built.")
    ] = None,
    layout: LayoutOption = "auto",
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a catalog, and fit what its documents are coded in on texts like them.

    All archives of a catalog share these transforms. Without --texts they are fitted on the first document that is
    added; some thousand tokens of several documents suit the others better. The texts are not added. What a catalog is
    fitted on stays: on one that has documents, or was fitted before, --texts changes nothing.

    \b
    Examples:
      ragkv catalog create library --model demo --texts march.txt --texts april.txt
      ragkv catalog create library --model Qwen/Qwen3-8B --recipe small.toml
    """
    settings = Recipe.from_toml(recipe) if recipe else None
    documents, faults = read_documents(texts) if texts else ([], [])
    if faults:  # what is fitted once should not depend on what can be read today
        raise ConfigError(faults[0]["error"])
    made = _open_to_add(folder, model, settings, layout=layout, dtype=dtype, device=device)
    if documents:
        with progress("texts") as report:
            made.fit_transforms([text for _, text in documents], on_progress=report)
    if as_json:
        print_json({"catalog": str(folder), "model": made.model_name, "fitted": made.has_transforms})
        return
    fitted = "fitted" if made.has_transforms else "fitted on the first document that is added"
    out.print(f"{folder}: of {made.model_name}, {fitted}", markup=False, soft_wrap=True)


@catalog.command("list")
def list_documents(
    folder: Folder,
    match: Annotated[str, typer.Argument(help="Part of a name, or start of an id.", show_default=False)] = "",
    *,
    as_json: JsonOption = False,
) -> None:
    """List the documents of a catalog, by name. No model is loaded.

    Checksums are not checked here; that is ragkv verify, on CATALOG/documents/ID.

    \b
    Examples:
      ragkv catalog list library
      ragkv catalog list library report --json
    """
    from ragkv.catalog.catalog import Catalog

    found = Catalog.open(folder)
    entries = found.entries(match)
    totals = {"tokens": sum(entry.tokens for entry in entries), "bytes": sum(entry.bytes for entry in entries)}
    if as_json:
        rows = [{**_row(entry), "path": str(entry.path)} for entry in entries]
        print_json({"catalog": str(folder), "model": found.model_name, "documents": rows, **totals})
        return
    if entries:
        _show_table(entries)
    out.print(
        f"{len(entries):,} document{'' if len(entries) == 1 else 's'}, {totals['tokens']:,} tokens, "
        f"{format_bytes(totals['bytes'])}",
        markup=False,
        soft_wrap=True,
    )


@catalog.command()
def remove(
    folder: Folder,
    documents: Annotated[
        list[str],
        typer.Argument(metavar="DOCUMENT...", help="Names, ids, or starts of ids (6 characters).", show_default=False),
    ],
    *,
    as_json: JsonOption = False,
) -> None:
    """Take documents out of a catalog. No model is loaded.

    The files stay, so that whoever reads them is not disturbed, until ragkv catalog gc deletes them; up to then,
    adding the same text brings the document back at once. Of a text that has several names only the name that is given
    goes, and the text stays under the others. A document that fails does not stop the others.

    \b
    Examples:
      ragkv catalog remove library march.txt
      ragkv catalog remove library 3fa9c1 77b0e2
    """
    from ragkv.catalog.catalog import Catalog

    found = Catalog.open(folder)
    rows, faults = [], []
    for word in documents:
        try:
            rows.append({"document": word, **_remove(found, word)})
        except RagkvError as error:
            faults.append({"document": word, "error": " ".join(str(error).split())})
    if as_json:
        print_json({"catalog": str(folder), "removed": rows, "failed": faults})
    else:
        for row in rows:
            stays = f"; the text stays as {', '.join(map(_on_one_line, row['kept_as']))}" if row["kept_as"] else ""
            out.print(f"{row['id'][:ID_SHOWN]}: removed{stays}", markup=False, soft_wrap=True)
    _end(faults, "document")


@catalog.command()
def gc(
    folder: Folder,
    *,
    grace: Annotated[float, typer.Option(help="Seconds since the removal, for readers that are just opening it.")] = (
        3600.0
    ),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted, and delete nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete the files of documents that were removed, and what builds that died left behind.

    An archive that somebody has open goes on answering. No model is loaded.

    \b
    Examples:
      ragkv catalog gc library --dry-run
      ragkv catalog gc library --grace 60
    """
    from ragkv.catalog.catalog import Catalog

    done = Catalog.open(folder).gc(grace, dry_run=dry_run)
    if as_json:
        print_json(
            {
                "catalog": str(folder),
                "dry_run": dry_run,
                "documents": list(done.documents),
                "temporary": done.temporary,
                "bytes": done.bytes,
            }
        )
        return
    for document_id in done.documents:
        out.print(f"{document_id[:ID_SHOWN]}: {'would be ' if dry_run else ''}deleted", markup=False, soft_wrap=True)
    out.print(
        f"{len(done.documents):,} documents and {done.temporary:,} temporary folders, {format_bytes(done.bytes)} "
        f"{'would be ' if dry_run else ''}freed",
        markup=False,
        soft_wrap=True,
    )


def _remove(found: Catalog, word: str) -> dict[str, Any]:
    """Remove the document that a word means, or of several names the one that it is."""
    from ragkv.catalog.entries import name_meant
    from ragkv.catalog.head import is_document_id

    if is_document_id(word):  # which also names a document that is too damaged to be listed
        found.remove(word)
        return {"id": word, "kept_as": []}
    entry = found.entry(word)
    name = name_meant(entry, word)
    found.remove(entry.id, name=name)
    return {"id": entry.id, "kept_as": [] if name is None else [other for other in entry.names if other != name]}


def _open_to_add(
    folder: Path, model: str | None, recipe: Recipe | None, *, layout: str, dtype: str | None, device: str | None
) -> Catalog:
    """Open or make the catalog; what is not said is as in the catalog that is there."""
    from ragkv.catalog.catalog import Catalog
    from ragkv.catalog.head import has_head, read_head

    if has_head(folder):
        head = read_head(folder)
        model, dtype = model or head.model_name, dtype or head.fingerprint.dtype
    if model is None:
        raise ConfigError(f"there is no catalog in {str(folder)!r} yet; give --model to make one")
    loaded = load(model, dtype, device)
    chosen = None if layout == "auto" else choose_layout(layout, loaded)
    return Catalog.create(folder, loaded, layout=chosen, recipe=recipe)


def _add_one(into: Catalog, path: Path, text: str) -> dict[str, Any]:
    """Add one file under its path as it was given."""
    name = source_name(path)
    with progress(path.name) as report:
        entry = into.add(text, name=name, on_progress=report)
    return {"file": str(path), **_row(entry), "name": name, "built": entry.built, "replaced": []}


def _replace(into: Catalog, document_id: str, name: str) -> list[str]:
    """Take `name` from every other document; the ids of those that had it. One that has other names keeps them."""
    others = [old.id for old in into.entries() if name in old.names and old.id != document_id]
    for other in others:
        into.remove(other, name=name)
    return others


def _row(entry: CatalogEntry) -> dict[str, Any]:
    return {"id": entry.id, "name": entry.name, "tokens": entry.tokens, "bytes": entry.bytes}


def _show_added(row: dict[str, Any]) -> None:
    state = "built" if row["built"] else "already there"
    instead = f", instead of {', '.join(old[:ID_SHOWN] for old in row['replaced'])}" if row["replaced"] else ""
    out.print(
        f"{row['id'][:ID_SHOWN]}  {_on_one_line(row['name'])}: {row['tokens']:,} tokens, {format_bytes(row['bytes'])}, "
        f"{state}{instead}",
        markup=False,
        soft_wrap=True,
    )


def _show_table(entries: list[CatalogEntry]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("id", no_wrap=True)
    table.add_column("name", overflow="fold")
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    for entry in entries:
        table.add_row(
            entry.id[:ID_SHOWN], Text(_on_one_line(entry.name)), f"{entry.tokens:,}", format_bytes(entry.bytes)
        )
    out.print(table)


def _on_one_line(name: str) -> str:
    """A name without what would break the line or reach the terminal as a command: a file name may hold anything."""
    return "".join(
        repr(char)[1:-1] if unicodedata.category(char) in ("Cc", "Zl", "Zp", "Cs") else char for char in name
    )


def _end(faults: list[dict[str, str]], subject: str) -> None:
    """Say what failed, on stderr, and end with exit code 2 if anything did."""
    for fault in faults:
        err.print(
            f"error: {_on_one_line(fault[subject])}: {_on_one_line(fault['error'])}", markup=False, soft_wrap=True
        )
    if faults:
        raise typer.Exit(2)
