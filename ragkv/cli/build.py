"""``ragkv build``: one archive per document."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragkv.cli.common import DeviceOption, DtypeOption, JsonOption, LayoutOption, choose_layout, load, local, progress
from ragkv.cli.output import err, format_bytes, out, print_json
from ragkv.errors import ConfigError, RagkvError
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
        int | None, typer.Option(help="Mean tokens per cluster; overrides the recipe. [default: 8]")
    ] = None,
    layout: LayoutOption = "auto",
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    force: Annotated[bool, typer.Option("--force", help="Build again what is up to date already.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Prefill each document once and archive its keys and values.

    An archive appears whole or not at all; one that is up to date (same text, model, recipe and layout) is left as it
    is, so an interrupted run can simply be repeated. A document that fails does not stop the others.

    \b
    Examples:
      ragkv build report.txt --model demo --out indexes
      ragkv build docs/*.md --model Qwen/Qwen3-8B --tokens-per-cluster 16
    """
    settings = Recipe.from_toml(recipe) if recipe else Recipe()
    if tokens_per_cluster is not None:
        settings = Recipe.from_dict({**settings.to_dict(), "tokens_per_cluster": tokens_per_cluster})
    documents = _read_documents(files, out_dir)
    loaded = load(model, dtype, device)
    chosen = choose_layout(layout, loaded)
    rows, faults = [], []
    for path, text in documents:
        try:
            rows.append(_build_one(loaded, path, text, out_dir / path.stem, settings, chosen, force=force))
        except RagkvError as error:
            faults.append({"file": str(path), "error": " ".join(str(error).split())})
    if as_json:
        print_json({"archives": rows, "failed": faults})
    else:
        for row in rows:
            _show(row)
    for fault in faults:
        err.print(f"error: {fault['file']}: {fault['error']}", markup=False, soft_wrap=True)
    if faults:
        raise typer.Exit(2)


def _read_documents(files: list[Path], out_dir: Path) -> list[tuple[Path, str]]:
    """Read every document before the model is loaded, so that a wrong name costs nothing."""
    from ragkv.text import read_text

    names: dict[str, Path] = {}
    for path in files:
        if path.stem in names:
            raise ConfigError(
                f"{str(names[path.stem])!r} and {str(path)!r} would both become {str(out_dir / path.stem)!r}; "
                "build them into different folders"
            )
        names[path.stem] = path
    return [(path, read_text(path)) for path in files]


def _build_one(
    loaded: LoadedModel, path: Path, text: str, target: Path, recipe: Recipe, layout: PromptLayout, *, force: bool
) -> dict[str, Any]:
    from ragkv.build.builder import build_archive, is_current

    row: dict[str, Any] = {"file": str(path), "archive": str(target)}
    if not force and is_current(loaded, text, target, recipe=recipe, layout=layout):
        return {**row, "built": False}
    with progress(path.name) as report:
        result = build_archive(
            loaded, text, target, recipe=recipe, layout=layout, document_name=path.name, on_progress=report
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
    if not row["built"]:
        out.print(f"{row['archive']}: up to date", markup=False, soft_wrap=True)
        return
    out.print(
        f"{row['archive']}: {row['tokens']:,} tokens, {row['clusters']:,} clusters per KV head, "
        f"{format_bytes(row['bytes'])}; prefill {row['prefill_s']:.1f} s, "
        f"clustering and writing {row['build_s']:.1f} s",
        markup=False,
        soft_wrap=True,
    )
