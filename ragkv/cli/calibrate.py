"""``ragkv calibrate``: the recipe for a model and its documents, found by measuring."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragkv.cli.common import DeviceOption, DtypeOption, JsonOption, load, local, progress
from ragkv.cli.output import out, print_json, print_note
from ragkv.errors import MissingExtraError
from ragkv.recipe import Recipe

if TYPE_CHECKING:
    from ragkv.evaluation.calibrate.rule import Sweep
    from ragkv.evaluation.calibrate.search import Calibration
    from ragkv.evaluation.calibrate.tasks import Plan, Source
    from ragkv.evaluation.calibrate.words import About

QUICK_TOKENS_PER_CLUSTER = (4, 8)
QUICK_CODECS = ("int3/int2.5",)
QUICK_BUDGETS = (64, 256, 1024)
QUICK_QUESTIONS = 12


def calibrate(
    *,
    archive: Annotated[
        list[Path],
        typer.Option(
            callback=local, help="Folder of an archive; repeat for more of the same model.", show_default=False
        ),
    ],
    out_dir: Annotated[
        Path, typer.Option("--out", callback=local, help="New folder for the results, or that of a run to go on with.")
    ],
    questions: Annotated[
        Path | None,
        typer.Option(
            callback=local,
            help='One question a line; or JSON Lines, {"question": "...", "answers": ["..."], "document": "report"}, '
            "the last two optional; document is the name of an archive's folder. [default: made from the documents]",
        ),
    ] = None,
    task: Annotated[
        str,
        typer.Option(
            help="How gold answers are scored. qa: F1 of words. lookup: the answer stands in the output. auto: lookup "
            "if every gold answer is one word, else qa; agreement with dense only if there are none."
        ),
    ] = "auto",
    model: Annotated[
        str | None, typer.Option(help="The model they were built with. [default: the name they were built by]")
    ] = None,
    tokens_per_cluster: Annotated[
        list[int] | None, typer.Option(help="To try; repeat for more. [default: 4 8 16]")
    ] = None,
    codec: Annotated[
        list[str] | None,
        typer.Option(
            help="To try, for keys and values, or KEYS/VALUES: lossless, int8, int4, int3, int2.5, int2; repeat. "
            "[default: int4 int3/int2.5 int2]"
        ),
    ] = None,
    budget: Annotated[
        list[int] | None,
        typer.Option(help="Tokens recalled, to try; repeat for more. [default: 64 128 256 512 1024]"),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(
            callback=local, help="Recipe that supplies all else and is compared. [default: the default recipe]"
        ),
    ] = None,
    n_questions: Annotated[
        int | None,
        typer.Option(
            help="Most questions of each document, at even distances. [default: all of a file; 24 if made, 12 with "
            "--quick]"
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 32,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Try less: 4 and 8 tokens per cluster, int3/int2.5, budgets 64, 256 and 1024, 12 questions of each "
            "document. What is given by itself still counts.",
        ),
    ] = False,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the recipe for a model and its documents: where more budget, finer clusters and wider codes stop helping.

    Each document is prefilled once for the dense answers, then archived and asked under every combination of tokens
    per cluster, codec and budget; then each layer recalls alone, to see whether budgets by layer pay. The choice
    follows a rule that the report states. Without --questions it asks how sentences of the document go on, and for
    facts that it plants in it; questions of your own are the better guide. Building never sees a question.

    --out receives recipe.toml, table.csv, result.json and report.html. An interrupted run goes on when repeated.

    \b
    Examples:
      ragkv calibrate --archive indexes/report --out calibration
      ragkv calibrate --archive indexes/report --out first-look --quick
      ragkv calibrate --archive indexes/a --archive indexes/b --questions asked.jsonl --task qa --out calibration
      ragkv build report.txt --model demo --recipe calibration/recipe.toml
    """
    from ragkv.evaluation.calibrate.tasks import find_sources, plan_questions, read_asked
    from ragkv.evaluation.results import check_folder

    base = Recipe.from_toml(recipe) if recipe else Recipe()
    sweep = _sweep(base, tokens_per_cluster, codec, budget, quick=quick)
    sources = find_sources(archive)
    base.check_layers(len(sources[0].manifest.layers))
    plan = plan_questions(
        sources,
        read_asked(questions) if questions else None,
        task=task,
        n_questions=QUICK_QUESTIONS if quick and n_questions is None else n_questions,
        max_new_tokens=max_new_tokens,
    )
    _require_extras(plan)
    settings = _settings(sources, plan, sweep)
    check_folder(out_dir, settings)
    print_note(_effort(sources, plan, sweep))
    name = model or sources[0].manifest.model_name
    calibration, about = _measure(name, sources, plan, sweep, out_dir, settings, dtype=dtype, device=device)
    from ragkv.evaluation.calibrate.outputs import RECIPE_FILE, REPORT_FILE, RESULT_FILE, TABLE_FILE, write_outputs

    result = write_outputs(calibration, about, out_dir)
    if as_json:
        files = {"recipe": RECIPE_FILE, "table": TABLE_FILE, "result": RESULT_FILE, "report": REPORT_FILE}
        print_json({**result, "files": {kind: str(out_dir / file) for kind, file in files.items()}})
        return
    _show(calibration, result)
    out.print(f"report: {out_dir / REPORT_FILE}\nrecipe: {out_dir / RECIPE_FILE}", markup=False, soft_wrap=True)


def _sweep(
    base: Recipe,
    tokens_per_cluster: list[int] | None,
    codecs: list[str] | None,
    budgets: list[int] | None,
    *,
    quick: bool,
) -> Sweep:
    from ragkv.evaluation.calibrate import rule

    return rule.Sweep(
        base,
        tuple(tokens_per_cluster or (QUICK_TOKENS_PER_CLUSTER if quick else rule.TOKENS_PER_CLUSTER)),
        tuple(codecs or (QUICK_CODECS if quick else rule.CODECS)),
        tuple(budgets or (QUICK_BUDGETS if quick else rule.BUDGETS)),
    )


def _require_extras(plan: Plan) -> None:
    """Say what is missing now, not after hours of measuring."""
    if find_spec("matplotlib") is None:
        raise MissingExtraError("reports with figures need matplotlib: pip install 'ragkv[plot]'")
    if (plan.metric or "").startswith("squad") and find_spec("torchmetrics") is None:
        raise MissingExtraError("answer scores need torchmetrics: pip install 'ragkv[eval]'")


def _settings(sources: tuple[Source, ...], plan: Plan, sweep: Sweep) -> dict[str, object]:
    """All that changes results and is known without the model: a run goes on only where it is the same."""
    from ragkv.archive.tokens import TOKENS_FILE
    from ragkv.version import __version__

    first = sources[0].manifest
    return {
        "ragkv": __version__,
        "model": {name: value for name, value in first.fingerprint.to_dict().items() if name != "dtype"},
        "archives": {source.name: source.manifest.files[TOKENS_FILE].sha256 for source in sources},
        "layout": first.layout.to_dict(),
        "asked": plan.to_dict(),
        "sweep": {
            "base": sweep.base.to_dict(),
            "tokens_per_cluster": list(sweep.tokens_per_cluster),
            "codecs": list(sweep.codecs),
            "budgets": list(sweep.budgets),
        },
    }


def _effort(sources: tuple[Source, ...], plan: Plan, sweep: Sweep) -> str:
    """How much there is to measure, in one sentence, with the ways to make it less."""
    from ragkv.evaluation.calibrate.rule import MIN_LAYERS
    from ragkv.evaluation.calibrate.search import LAYER_QUESTIONS

    n_asked, n_points, layers = plan.n_questions(len(sources)), len(sweep.recipes()), sources[0].manifest.layers
    per_source = [len(items) for items in plan.items.values()] or [plan.n_own] * len(sources)
    n_layers = sum(layer.window is None and layer.index not in sweep.base.recall.dense_layers for layer in layers)
    n_alone = n_layers * sum(min(count, LAYER_QUESTIONS) for count in per_source)
    n_check = 2 * n_asked if n_layers >= MIN_LAYERS else 0
    check = f", and {n_check:,} to check budgets by layer" if n_check else ""
    n_tokens = sum(source.manifest.n_tokens for source in sources)
    return (
        f"{n_points:,} configurations x {n_asked:,} questions, {n_alone:,} answers with one layer recalled alone{check}"
        f": {n_points * n_asked + n_alone + n_check:,} answers over {n_tokens:,} tokens (documents: {len(sources):,}); "
        "--quick, fewer --budget, --codec or --tokens-per-cluster, or a smaller --n-questions make it less"
    )


def _measure(
    name: str,
    sources: tuple[Source, ...],
    plan: Plan,
    sweep: Sweep,
    out_dir: Path,
    settings: dict[str, object],
    *,
    dtype: str | None,
    device: str | None,
) -> tuple[Calibration, About]:
    from ragkv.evaluation.bench import environment
    from ragkv.evaluation.calibrate import search as measuring
    from ragkv.evaluation.calibrate.tasks import make_tasks
    from ragkv.evaluation.calibrate.words import About
    from ragkv.evaluation.results import claim_folder
    from ragkv.model.fingerprint import require_match

    loaded = load(name, dtype, device)
    first = sources[0].manifest
    require_match(first.fingerprint, loaded)
    tasks = make_tasks(loaded, sources, plan)
    claim_folder(out_dir, settings)
    placed = {"dtype": str(loaded.model.dtype).removeprefix("torch."), "device": loaded.model.device.type}
    with progress() as report:
        calibration = measuring.calibrate(
            loaded, tasks, sweep, out_dir, layout=first.layout, settings={**settings, **placed}, on_progress=report
        )
    about = About(
        model=name,
        archives={source.name: source.manifest.n_tokens for source in sources},
        questions=plan.description,
        metric=plan.metric,
        base="default" if sweep.base == Recipe() else "base",
        settings={
            "model": name,
            "weights SHA-256": first.fingerprint.weights_sha256,
            **placed,
            "tokens per cluster": ", ".join(map(str, sweep.tokens_per_cluster)),
            "codecs": ", ".join(sweep.codecs),
            "budgets": ", ".join(map(str, sweep.budgets)),
            "longest answer, tokens": plan.max_new_tokens,
            **environment(),
        },
    )
    return calibration, about


def _show(calibration: Calibration, result: dict[str, Any]) -> None:
    from rich.table import Table

    choice = calibration.choice
    table = Table(
        title=f"{choice.curve[0].pair[0]} tokens per cluster, {choice.curve[0].pair[1]}", title_justify="left"
    )
    for column in ("budget", "KL", "same answer", "read", "resident", "on disk"):
        table.add_column(column, justify="right")
    for place, point in enumerate(choice.curve):
        mark = "* " if place == choice.budget_knee.chosen else ""
        shares = [f"{share:.1%}" for share in (point.read, point.resident, point.disk)]
        same = sum(point.same) / len(point.same)
        table.add_row(f"{mark}{point.budget}", f"{point.loss:.4f}", f"{same:.0%}", *shares)
    out.print(table)
    out.print(result["verdict"], markup=False, soft_wrap=True)
