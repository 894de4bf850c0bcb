"""``ragkv inspect``: what an archive holds, without its model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ragkv.cli.common import local
from ragkv.cli.output import format_bytes, out, print_json, print_note


def inspect(
    folder: Annotated[
        Path, typer.Argument(callback=local, metavar="DIR", help="Folder of one archive.", show_default=False)
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, sizes in bytes.")] = False,
) -> None:
    """Show what an archive holds: document, model, recipe, clusters of each layer, and bytes. No model is loaded.

    Checksums are not checked here; that is ragkv verify.

    \b
    Examples:
      ragkv inspect report.kv
      ragkv inspect report.kv --json
    """
    from ragkv.archive.inspect import describe_archive

    archive = describe_archive(folder)
    if as_json:
        print_json(archive)
        return
    _print_head(archive)
    _print_layers(archive["layers"])
    _print_bytes(archive)
    for seam, differs in archive["seams"].items():
        if differs:
            print_note(f"at the {seam} seam the joined text would have other tokens than the two parts")


def _print_head(archive: dict[str, Any]) -> None:
    from rich.text import Text

    document, model, counts, layers = (archive[name] for name in ("document", "model", "counts", "layers"))
    spreads = [layer["clusters"] for layer in layers if layer["clusters"] is not None]
    tokens = f"{counts['prefix_tokens']:,} prefix + {counts['document_tokens']:,} document"
    clusters = "none: every token is always attended"
    if spreads:
        exact = counts["n_tokens"] - counts["archived_tokens"]
        tokens += f"; in global layers {counts['archived_tokens']:,} in clusters and {exact:,} always attended"
        clusters = (
            f"{counts['clusters_asked']:,} asked of each KV head, {min(each['min'] for each in spreads):,} to "
            f"{max(each['max'] for each in spreads):,} built"
        )
    lines = {
        "document": f"{document['name'] or '(no name)'}, SHA-256 {document['sha256'][:12]}...",
        "model": f"{model['name']} ({model['model_type']}, {model['dtype']}), "
        f"weights SHA-256 {model['weights_sha256'][:12]}...",
        "tokens": tokens,
        "recipe": _listed(archive["recipe"]),
        "recall": _listed(archive["policy"]),
        "clusters": clusters,
        "transforms": _whose_transforms(archive),
        "built by": f"{archive['created_by']}, format version {archive['version']}",
    }
    width = max(map(len, lines))
    for name, text in lines.items():
        out.print(Text.assemble((f"{name:<{width}}  ", "bold"), text), soft_wrap=True)


def _whose_transforms(archive: dict[str, Any]) -> str:
    """Where the rotations are that keys and values are written in: an archive of a catalog shares the catalog's."""
    if archive["transforms"] is None:
        return "none, because there are no clusters"
    whose = "its own" if "transforms" in archive["bytes"] else "those of its catalog"
    return f"{whose}, SHA-256 {archive['transforms'][:12]}..."


def _listed(values: dict[str, Any]) -> str:
    """Names and values in one line; empty lists and tables are left out."""
    return ", ".join(f"{name} {value}" for name, value in values.items() if value not in ([], {}))


def _print_layers(layers: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("layer", "kind", "KV\nheads", "exact\ntokens"):
        table.add_column(name, justify="left" if name == "kind" else "right", no_wrap=True, vertical="bottom")
    table.add_column("codec", no_wrap=True, vertical="bottom")
    for name in ("clusters a head\nmin / mean / max", "tokens a cluster\nmin / median / max"):
        table.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    for layer in layers:
        kind = layer["kind"] if layer["window"] is None else f"{layer['kind']} {layer['window']:,}"
        counts = [f"{layer['index']}", kind, f"{layer['n_kv_heads']}", f"{layer['exact_tokens']:,}"]
        codec = "/".join(dict.fromkeys((layer["codecs"] or {"key": "-"}).values()))
        table.add_row(*counts, codec, _spread(layer["clusters"]), _spread(layer["cluster_size"]))
    out.print(table)


def _spread(numbers: dict[str, float] | None) -> str:
    if numbers is None:
        return "-"
    return " / ".join(f"{number:,.0f}" if number == int(number) else f"{number:,.1f}" for number in numbers.values())


def _print_bytes(archive: dict[str, Any]) -> None:
    from rich.text import Text

    sizes = archive["bytes"]
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if name != "total")
    line = f"{format_bytes(sizes['total'])} on disk ({parts}); dense cache {format_bytes(archive['dense_bytes'])}"
    if archive["disk_over_dense"] is not None:
        line += f", disk over dense {archive['disk_over_dense']:.2f}"
    out.print(Text(line), soft_wrap=True)
