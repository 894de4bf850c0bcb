"""``ragkv ask``: answer one question from an archive."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.cli.common import DeviceOption, DtypeOption, JsonOption, load, local, progress
from ragkv.cli.options import (
    ArchiveOption,
    BudgetOption,
    CatalogOption,
    DocumentOption,
    MassOption,
    PilotOption,
    PositionsOption,
    RecomputeOption,
    ScaleOption,
    TemperatureOption,
    TopMOption,
    archive_folders,
    check_compose_options,
    choose_policy,
    compose,
)
from ragkv.cli.output import format_bytes, out, print_json
from ragkv.errors import ConfigError

if TYPE_CHECKING:
    from ragkv.answer.ask import Answer


def ask(
    question: Annotated[str, typer.Argument(help="The question.")],
    *,
    archive: ArchiveOption = None,
    catalog: CatalogOption = None,
    document: DocumentOption = None,
    model: Annotated[
        str | None, typer.Option(help="The model it was built with. [default: the name it was built by]")
    ] = (None),
    recipe: Annotated[
        Path | None,
        typer.Option(callback=local, help="Recipe file whose [recall] table to follow. [default: the archive's own]"),
    ] = None,
    budget: BudgetOption = None,
    top_m: TopMOption = None,
    mass: MassOption = None,
    pilot_layer: PilotOption = None,
    positions: PositionsOption = "consecutive",
    temperature: TemperatureOption = 1.0,
    scale: ScaleOption = 1.0,
    recompute: RecomputeOption = 0,
    mode: Annotated[
        str,
        typer.Option(
            help="recall: answer from the archive. dense: prefill the text again, of several archives joined, to "
            "compare."
        ),
    ] = "recall",
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 64,
    stream: Annotated[bool, typer.Option("--stream", help="Print the answer while it is generated.")] = False,
    report: Annotated[
        Path | None,
        typer.Option(
            callback=local,
            help="Write a page that shows where the answer looked: one HTML file, to be shown to others.",
        ),
    ] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer a question from one archive, or several together: only the question goes through the model.

    \b
    Examples:
      ragkv ask "Who wrote the report?" --archive indexes/report
      ragkv ask "Who wrote the report?" --archive indexes/report --report answer.html
      ragkv ask "Which of them is newer?" --archive indexes/report --archive indexes/minutes
      ragkv ask "Which of them is newer?" --catalog indexes/reports --document north.txt --document south.txt
      ragkv ask "Who wrote the report?" --archive indexes/report --mode dense --json
      ragkv ask "Who wrote the report?" --archive indexes/report --pilot-layer 12
    """
    if as_json and stream:
        raise ConfigError("--json prints one object at the end; leave out --stream")
    if report is not None and mode != "recall":
        raise ConfigError(f"--report shows what was recalled, and --mode is {mode!r}; leave one of them out")
    if report is not None and (report.is_dir() or not report.absolute().parent.is_dir()):
        raise ConfigError(f"--report is {str(report)!r}; give the name of a file in a folder that exists")
    from ragkv.answer.ask import ask as answer_question
    from ragkv.answer.ask import check_options
    from ragkv.archive.manifest import read_manifest
    from ragkv.recall.placed import Weighting

    check_options(budget=budget, mode=mode, max_new_tokens=max_new_tokens, question=question)
    check_compose_options(positions=positions, recompute=recompute)
    weighting = Weighting(temperature, scale)
    folders = archive_folders(archive, catalog, document)
    manifests = [read_manifest(path) for path in folders]
    policy = choose_policy(
        manifests[0].recipe.recall,
        len(manifests[0].layers),
        recipe=recipe,
        budget=budget,
        top_m=top_m,
        mass=mass,
        pilot=pilot_layer,
    )
    dtype = manifests[0].fingerprint.dtype if dtype is None and catalog is not None else dtype
    loaded = load(model or manifests[0].model_name, dtype, device)

    def show(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    with progress() as bar:
        composition = compose(
            folders,
            loaded,
            catalog=catalog,
            positions=positions,
            weighting=weighting,
            recompute=recompute if mode == "recall" else 0,  # a dense prefill computes all of them again
            bar=bar,
        )
        answer = answer_question(
            composition,
            question,
            policy=policy,
            mode=mode,
            max_new_tokens=max_new_tokens,
            on_text=show if stream else None,
            on_progress=(lambda done, total: bar("dense prefill", done, total)) if mode == "dense" else None,
            evidence=report is not None,
        )
    if report is not None:
        write_report(report, question, answer, loaded.name, recomputed=sum(composition.recomputed_tokens))
    if as_json:
        print_json(answer.to_dict())
        return
    out.print("" if stream else answer.text, markup=False, soft_wrap=True)
    out.print(summary(answer), markup=False, style="dim", soft_wrap=True)
    if report is not None:
        out.print(f"where the answer looked: {report}", markup=False, style="dim", soft_wrap=True)


def write_report(path: Path, question: str, answer: Answer, model: str, *, recomputed: int = 0) -> None:
    """Write the page of an answer that carries evidence; `recomputed` tokens of its documents were computed again."""
    from ragkv.answer.page import AnswerPage, render_answer
    from ragkv.page import write_page
    from ragkv.version import __version__

    kv = answer.kv_bytes
    figures = [
        ("KV cache, dense", format_bytes(kv.dense)),
        ("KV resident", format_bytes(kv.resident)),
        ("KV on disk", format_bytes(kv.archive)),
        ("Tokens in the archives", f"{answer.archive_tokens:,}"),
        ("Question tokens prefilled", f"{answer.prefilled_tokens:,}"),
        ("Document tokens computed", f"{recomputed:,}"),
        ("First token after", f"{answer.ttft_s:.2f} s"),
        ("Each further token", "none" if answer.tpot_s is None else f"{answer.tpot_s * 1e3:.0f} ms"),
        ("Attention estimated", f"{answer.unrecalled_mass:.0%}"),
    ]
    page = AnswerPage(
        question=question,
        answer=answer.text,
        model=model,
        documents=answer.evidence,
        figures=tuple(figures),
        layers=answer.layers,
        created_by=f"ragkv {__version__}",
    )
    write_page(render_answer(page), path)


def summary(answer: Answer) -> str:
    """What an answer cost, in two lines."""
    per_token = f"{answer.tpot_s * 1e3:.0f} ms per further token" if answer.tpot_s is not None else "one token"
    kv = answer.kv_bytes
    lines = [
        f"{answer.mode}: {answer.prefilled_tokens:,} tokens prefilled of {answer.archive_tokens:,} + question; "
        f"first token after {answer.ttft_s:.2f} s, {per_token}",
        f"KV: dense {format_bytes(kv.dense)}, resident {format_bytes(kv.resident)}, on disk {format_bytes(kv.archive)}",
    ]
    if answer.mode == "recall":
        lines[1] += (
            f"; {answer.recalled_tokens:.0f} tokens recalled per KV head and step from {answer.clusters:,} clusters, "
            f"{answer.unrecalled_mass:.0%} of the attention estimated"
        )
    return "\n".join(lines)
