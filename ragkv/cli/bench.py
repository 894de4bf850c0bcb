"""``ragkv bench``: dense attention against recall, in one run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ragkv.cli.common import DeviceOption, DtypeOption, JsonOption, LayoutOption, choose_layout, load, local, progress
from ragkv.cli.options import BudgetOption
from ragkv.cli.output import format_bytes, out, print_json
from ragkv.errors import ConfigError
from ragkv.recipe import Recipe

if TYPE_CHECKING:
    from ragkv.evaluation.bench import Run


def bench(
    *,
    model: Annotated[str, typer.Option(help="'demo', a hub id, a local folder or a .gguf file.")],
    tokens: Annotated[list[int] | None, typer.Option(help="Length of prefix and document; repeat for more. [8192]")] = (
        None
    ),
    budget: BudgetOption = None,
    recipe: Annotated[
        Path | None, typer.Option(callback=local, help="TOML file that says how to build and recall.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            callback=local, help="Document to measure on. [default: the Python reference that ships with Python]"
        ),
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(
            callback=local, help="Questions about the text, one a line. [default: sentences of it are to be continued]"
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Decode steps timed.")] = 48,
    layout: LayoutOption = "auto",
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure dense attention and recall on the same text: times, bytes, memory and fidelity.

    Every time is also given as a ratio, and dense, recall and zero-context steps are timed in turn: quote the ratios.
    Fidelity is teacher-forced on the dense model's own answers: to your questions, or else to requests to continue two
    dozen sentences of the document. Nothing is kept on disk.

    \b
    Examples:
      ragkv bench --model demo --tokens 8192
      ragkv bench --model demo --tokens 8192 --tokens 16384 --json
      ragkv bench --model ./my-model --text report.txt --questions questions.txt
    """
    if steps < 1:
        raise ConfigError(f"--steps is {steps}; give at least 1")
    from ragkv.answer.ask import check_options
    from ragkv.evaluation.bench import BenchOptions, environment
    from ragkv.evaluation.bench import bench as measure
    from ragkv.evaluation.data.reference_text import default_text
    from ragkv.text import read_questions, read_text

    check_options(budget=budget)
    settings = Recipe.from_toml(recipe) if recipe else Recipe()
    body = read_text(text) if text else default_text()
    asked = read_questions(questions) if questions else ()
    loaded = load(model, dtype, device)
    options = BenchOptions(
        text=body,
        questions=asked,
        budget=budget,
        recipe=settings,
        layout=choose_layout(layout, loaded),
        steps=steps,
    )
    runs = []
    for n_tokens in tokens or [8192]:
        with progress(f"{n_tokens:,} tokens:") as report:
            runs.append(measure(loaded, n_tokens, options, on_progress=report))
        if not as_json:
            out.print(_table(runs[-1]))
    if as_json:
        print_json({"model": model, "environment": environment(), "runs": [run.to_dict() for run in runs]})
    else:
        versions = ", ".join(f"{name} {value}" for name, value in environment().items())
        out.print(f"{model}; {versions}", style="dim", soft_wrap=True)


def _table(run: Run) -> Table:
    table = Table(title=f"{run.tokens:,} tokens, {run.n_clusters:,} clusters per KV head", title_justify="left")
    table.add_column("what")
    table.add_column("figure", justify="right")
    table.add_column("ratio", justify="right")
    ratios, times, n_bytes, fidelity = run.ratios, run.times, run.bytes, run.fidelity
    table.add_row("dense prefill", f"{times['prefill_s']:.1f} s", "")
    table.add_row("clustering and writing", f"{times['build_s']:.1f} s", f"{ratios['build_over_prefill']:.2f}x prefill")
    opening = f"{ratios['open_over_zero']:.2f}x a question with zero context"
    table.add_row("opening the archive", f"{times['ttft_open']['median']:.3f} s", opening)
    ttft, tpot = times["ttft_archive"], times["tpot_archive"]
    table.add_row("first token", f"{ttft['median']:.3f} s", f"{ratios['ttft_archive_over_zero']:.2f}x zero context")
    table.add_row("", "", f"{ratios['ttft_dense_over_archive']:.0f}x faster than dense")
    table.add_row("first token, cold", f"{times['ttft_cold']['median']:.3f} s", f"{ratios['cold_over_warm']:.2f}x warm")
    figures = f"{tpot['median']:.3f} s (p90 {tpot['p90']:.3f}, p99 {tpot['p99']:.3f})"
    table.add_row("further token", figures, f"{ratios['tpot_archive_over_zero']:.2f}x zero context")
    table.add_row("", "", f"{ratios['tpot_archive_over_dense']:.2f}x dense")
    table.add_row("KV dense, bf16", format_bytes(n_bytes["dense_bf16"]), "")
    table.add_row("KV resident", format_bytes(n_bytes["resident"]), f"{ratios['resident_over_dense']:.3f}x dense")
    table.add_row("KV on disk", format_bytes(n_bytes["disk"]), f"{ratios['disk_over_dense']:.3f}x dense")
    table.add_row("memory peak, dense prefill", format_bytes(n_bytes["peak_memory_dense_prefill"]), "")
    table.add_row("memory peak, opening", format_bytes(n_bytes["peak_memory_archive_load"]), "")
    table.add_row("KL to dense", f"{fidelity.kl:.4f} (s.e. {fidelity.kl_standard_error:.4f})", "")
    table.add_row("top-1 agreement", f"{fidelity.top1:.3f} (s.e. {fidelity.top1_standard_error:.3f})", "")
    table.add_row("measured on", f"{fidelity.n_positions} positions, {fidelity.n_questions} questions", "")
    return table
