"""``ragkv build``: one archive per document."""

from __future__ import annotations

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
from ragkv.errors import (
    ArchiveCorruptError,
    ArchiveFormatError,
    ArchiveNotFoundError,
    ConfigError,
    RagkvError,
)
from ragkv.recipe import Recipe

if TYPE_CHECKING:
    from ragkv.model.load import LoadedModel
    from ragkv.model.prompt import PromptLayout

DEFAULT_OUT = Path("indexes")


def build(
    files: Annotated[list[Path], typer.Argument(callback=local, help="UTF-8 text files, one archive each.")],
    *,
    model: Annotated[str, typer.Option(help="'demo', a hub id, a local folder or a .gguf file.")],
    out_dir: Annotated[
        Path, typer.Option("--out", callback=local, help="Folder of the archives; each is named after its file.")
    ] = (DEFAULT_OUT),
    recipe: Annotated[
        Path | None, typer.Option(callback=local, help="TOML file that says how archives are built.")
    ] = None,
    tokens_per_cluster: Annotated[
        int | None, typer.Option(help="Mean tokens per cluster; overrides the recipe. [default: 4]")
    ] = None,
    layout: LayoutOption = "auto",
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    force: Annotated[
        bool, typer.Option("--force", help="Build even what is up to date, and replace other documents' archives.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Prefill each document once and archive its keys and values.

    An archive appears whole or not at all; one that is up to date (same text, model, recipe and layout) is left as it
    is, so an interrupted run can simply be repeated. The archive of another file of the same name is never replaced
    without --force. A document that fails does not stop the others: they are built, and what failed is listed at the
    end, with exit code 2.

    \b
    Examples:
      ragkv build report.txt --model demo --out indexes
      ragkv build docs/*.md --model Qwen/Qwen3-8B --tokens-per-cluster 16
      ragkv build 2024/report.txt --model demo --out indexes/2024
    """
    settings = Recipe.from_toml(recipe) if recipe else Recipe()
    if tokens_per_cluster is not None:
        settings = Recipe.from_dict({**settings.to_dict(), "tokens_per_cluster": tokens_per_cluster})
    _check_targets(files, out_dir)
    documents, faults = read_documents(files)
    loaded = load(model, dtype, device)
    chosen = choose_layout(layout, loaded)
    rows = []
    for path, text in documents:
        try:
            rows.append(_build_one(loaded, path, text, out_dir / path.stem, settings, chosen, force=force))
        except RagkvError as error:
            faults.append(fault_of(path, error))
    if as_json:
        print_json({"archives": rows, "failed": faults})
    else:
        for row in rows:
            _show(row)
    for fault in faults:
        err.print(f"error: {fault['file']}: {fault['error']}", markup=False, soft_wrap=True)
    if faults:
        raise typer.Exit(2)


def _check_targets(files: list[Path], out_dir: Path) -> None:
    """Refuse files whose archives would have one place, before any of them is read."""
    targets: dict[str, list[Path]] = {}
    for path in dict.fromkeys(files):
        targets.setdefault(path.stem, []).append(path)
    clashes = [
        f"{' and '.join(repr(str(path)) for path in paths)} would {'both' if len(paths) == 2 else 'all'} become "
        f"{str(out_dir / stem)!r}"
        for stem, paths in targets.items()
        if len(paths) > 1
    ]
    if clashes:
        raise ConfigError(f"{'; '.join(clashes)}; build them into different folders")


def _check_source(target: Path, name: str) -> None:
    """Refuse to replace the archive of another document; a damaged one, or one of an old version, names none."""
    from ragkv.archive.manifest import read_manifest

    try:
        other = read_manifest(target).document_name
    except (ArchiveNotFoundError, ArchiveFormatError, ArchiveCorruptError):
        return
    if other != name:
        raise ConfigError(
            f"{str(target)!r} is the archive of {other or '(a document without a name)'!r}, and {name!r} would replace "
            "it; give another folder as --out, or --force to replace it"
        )


def _build_one(
    loaded: LoadedModel, path: Path, text: str, target: Path, recipe: Recipe, layout: PromptLayout, *, force: bool
) -> dict[str, Any]:
    from ragkv.build.builder import build_archive, is_current, keep_policy

    row: dict[str, Any] = {"file": str(path), "archive": str(target)}
    name = source_name(path)
    if not force:
        if is_current(loaded, text, target, recipe=recipe, layout=layout):
            keep_policy(target, recipe)
            return {**row, "built": False}
        _check_source(target, name)
    with progress(path.name) as report:
        result = build_archive(
            loaded, text, target, recipe=recipe, layout=layout, document_name=name, on_progress=report
        )
    manifest = result.manifest
    return {
        **row,
        "built": True,
        "tokens": manifest.n_tokens,
        "clusters": manifest.clusters_asked,
        "bytes": sum(entry.bytes for entry in manifest.files.values()),
        "prefill_s": result.prefill_s,
        "build_s": result.build_s,
        "prefix_seam_differs": manifest.prefix_seam_differs,
        "question_seam_differs": manifest.question_seam_differs,
    }


def _show(row: dict[str, Any]) -> None:
    archive = source_name(Path(row["archive"]))
    if not row["built"]:
        out.print(f"{archive}: up to date", markup=False, soft_wrap=True)
        return
    out.print(
        f"{archive}: {row['tokens']:,} tokens, {row['clusters']:,} clusters per KV head, "
        f"{format_bytes(row['bytes'])}; prefill {row['prefill_s']:.1f} s, "
        f"clustering and writing {row['build_s']:.1f} s",
        markup=False,
        soft_wrap=True,
    )
