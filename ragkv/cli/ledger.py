"""``ragkv ledger``: what the KV cache of a model costs, and what an archive would leave of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragkv.cli.common import local
from ragkv.cli.output import format_bytes, out, print_json, print_note
from ragkv.errors import ConfigError
from ragkv.recipe import Recipe

if TYPE_CHECKING:
    from ragkv.ledger.ledger import LedgerRow
    from ragkv.model.shape import LayerShape

DEFAULT_TOKENS = (4096, 16384, 32768, 131072)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is accounted for: a model, or layers given by three numbers."""

    model: str | None
    layers: tuple[LayerShape, ...]
    weights: int | None
    max_positions: int | None = None
    quantised: bool = False


def ledger(
    *,
    model: Annotated[
        str | None, typer.Option(help="Hub id, local folder, .gguf file, or 'demo'; only its config is read.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Number of layers, instead of --model.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads per layer, instead of --model.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Dimension of a head, instead of --model.")] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(help=f"Context length; repeat for more. [default: {' '.join(map(str, DEFAULT_TOKENS))}]"),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of cache and weights: bf16, fp16 or fp32.")] = "bf16",
    batch: Annotated[int, typer.Option(help="Sequences of that length held at once.")] = 1,
    gpu_memory: Annotated[str | None, typer.Option(help="Memory of the card: 24GiB, 24GB, or 24 for GiB.")] = None,
    recipe: Annotated[
        Path | None, typer.Option(callback=local, help="TOML file that says how the archive is built.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(callback=local, help="Also draw KV against context length: .png or .svg.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, sizes in bytes.")] = False,
) -> None:
    """Show what the KV cache costs in bytes, and what an archive would leave of it.

    No weights are loaded. Weights are counted unquantised; activations are not counted.

    \b
    Examples:
      ragkv ledger --model Qwen/Qwen3-8B --gpu-memory 24GiB
      ragkv ledger --layers 32 --kv-heads 32 --head-dim 128 --dtype fp16 --tokens 32768
    """
    from ragkv.ledger import ledger as account
    from ragkv.model.shape import dtype_bytes

    settings = Recipe.from_toml(recipe) if recipe else Recipe()
    value_bytes = dtype_bytes(dtype)
    card = account.parse_size(gpu_memory) if gpu_memory is not None else None
    subject = find_subject(model, value_bytes, layers=layers, kv_heads=kv_heads, head_dim=head_dim)
    rows = account.build_ledger(
        subject.layers,
        tokens or DEFAULT_TOKENS,
        value_bytes=value_bytes,
        batch=batch,
        weights=subject.weights,
        gpu_memory=card,
        recipe=settings,
    )
    per_token = account.kv_bytes_per_token(subject.layers, value_bytes=value_bytes, batch=batch)
    if plot:
        from ragkv.ledger.plot import plot_ledger

        plot_ledger(rows, plot, title=f"KV cache of {_title(subject, dtype, batch)}")
    if as_json:
        head = {"dtype": dtype, "batch": batch, "kv_bytes_per_token": per_token, "recipe": settings.to_dict()}
        print_json(_to_json(subject, rows, head))
    else:
        _print_table(subject, rows, title=f"{_title(subject, dtype, batch)}: {format_bytes(per_token)} of KV a token")
    print_notes(subject, rows)


def find_subject(
    model: str | None, value_bytes: int, *, layers: int | None, kv_heads: int | None, head_dim: int | None
) -> Subject:
    from ragkv.ledger.ledger import plain_layers, weight_bytes

    numbers = {"--layers": layers, "--kv-heads": kv_heads, "--head-dim": head_dim}
    given = [name for name, value in numbers.items() if value is not None]
    if model is not None and given:
        raise ConfigError(f"{given[0]} was given together with --model {model!r}; give one or the other")
    if model is not None:
        from ragkv.model.load import load_config
        from ragkv.model.shape import model_shape

        config = load_config(model)
        shape = model_shape(config)
        return Subject(
            model=model,
            layers=shape.layers,
            weights=weight_bytes(config, value_bytes=value_bytes),
            max_positions=shape.max_positions,
            quantised=getattr(config, "quantization_config", None) is not None,
        )
    if layers is None or kv_heads is None or head_dim is None:
        missing = [name for name in numbers if name not in given]
        raise ConfigError(f"{', '.join(missing)} not given; give --model, or all of {', '.join(numbers)}")
    return Subject(
        model=None, layers=plain_layers(n_layers=layers, n_kv_heads=kv_heads, head_dim=head_dim), weights=None
    )


def _title(subject: Subject, dtype: str, batch: int) -> str:
    first = subject.layers[0]
    name = subject.model or f"{len(subject.layers)} layers, {first.n_kv_heads} KV heads, {first.head_dim} dims"
    return f"{name}, {dtype}" + (f", batch {batch}" if batch > 1 else "")


def _to_json(subject: Subject, rows: Sequence[LedgerRow], head: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": subject.model,
        "n_layers": len(subject.layers),
        "n_global_layers": sum(layer.is_global for layer in subject.layers),
        "max_positions": subject.max_positions,
        "weights_bytes": subject.weights,
        "gpu_memory_bytes": rows[0].gpu_memory,
        **head,
        "rows": [
            {
                "n_tokens": row.n_tokens,
                "kv_bytes": row.kv.logical,
                "kv_allocated_bytes": row.kv.allocated,
                "kv_share": row.kv_share,
                "gpu_share": row.gpu_share,
                "fits": row.fits,
                "archive_resident_bytes": row.archive.resident,
                "archive_disk_bytes": row.archive.on_disk,
                "archive_clusters": row.archive.n_clusters,
                "archive_fits": row.archive_fits,
                "worth_it": row.worth_it,
                "verdict": row.verdict,
            }
            for row in rows
        ],
    }


def _print_table(subject: Subject, rows: Sequence[LedgerRow], *, title: str) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    columns = {"tokens": [f"{row.n_tokens:,}" for row in rows]}
    columns["KV\ndense"] = [format_bytes(row.kv.logical) for row in rows]
    if any(row.kv.allocated != row.kv.logical for row in rows):
        columns["KV, no\nwindows"] = [format_bytes(row.kv.allocated) for row in rows]
    if subject.weights is not None:
        columns["weights"] = [format_bytes(subject.weights) for _ in rows]
        columns["KV\nshare"] = [f"{row.kv_share:.1%}" for row in rows]
    elif rows[0].gpu_memory is not None:
        columns["KV of\ncard"] = [f"{row.gpu_share:.1%}" for row in rows]
    columns["archive\nresident"] = [format_bytes(row.archive.resident) for row in rows]
    columns["archive\non disk"] = [format_bytes(row.archive.on_disk) for row in rows]
    if subject.weights is not None and rows[0].gpu_memory is not None:
        columns["fits\ncard"] = ["dense" if row.fits else "archive" if row.archive_fits else "no" for row in rows]

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    out.print(Text(title, style="bold"), soft_wrap=True)
    out.print(table)
    out.print(Text(rows[-1].verdict), soft_wrap=True)


def print_notes(subject: Subject, rows: Sequence[LedgerRow]) -> None:
    if subject.quantised:
        print_note("the configuration stores quantised weights; they are counted here as if unquantised")
    longest = rows[-1].n_tokens
    if subject.max_positions is not None and longest > subject.max_positions:
        print_note(f"{longest} tokens are beyond the {subject.max_positions} positions of this model")
