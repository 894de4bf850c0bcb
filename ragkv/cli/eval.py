"""``ragkv eval``: dense attention and archives side by side on fixed tasks, with a report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ragkv.cli.common import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    LayoutOption,
    Report,
    choose_layout,
    load,
    local,
    read_layout,
)
from ragkv.cli.output import err, format_bytes, out, print_json, print_note
from ragkv.errors import ConfigError
from ragkv.recipe import Recipe

if TYPE_CHECKING:
    from ragkv.evaluation.evaluate import Evaluation
    from ragkv.evaluation.summary import SubjectSummary


def evaluate(
    *,
    model: Annotated[str, typer.Option(help="'demo', a hub id, a local folder or a .gguf file.")],
    data: Annotated[Path, typer.Option(callback=local, help="Folder with the files of the suites.")],
    suite: Annotated[
        list[str],
        typer.Option(
            help="xquad-en, xquad-zh, kv75, babi-qa1, babi-qa2, squality-entities or perplexity; repeat for more."
        ),
    ],
    out_dir: Annotated[
        Path, typer.Option("--out", callback=local, help="Folder for results; a stopped run goes on there.")
    ],
    documents: Annotated[int, typer.Option(help="Documents in each suite.")] = 4,
    items: Annotated[int, typer.Option(help="Questions for each document.")] = 6,
    tokens: Annotated[int, typer.Option(help="The most tokens of prefix and document, as the model counts.")] = 8192,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            callback=local,
            help="TOML file of an archive to measure, named by its stem, or 'default'; repeat for more. [default]",
        ),
    ] = None,
    budget: Annotated[
        list[int] | None,
        typer.Option(
            help="Tokens recalled per KV head and answer token, for every recipe and budgeted peer; repeat to sweep. "
            "[default: the recipe's]"
        ),
    ] = None,
    peers: Annotated[
        str | None, typer.Option(help="Policies to compare with: names with commas between, or 'all'. [default: none]")
    ] = None,
    steps: Annotated[bool, typer.Option(help="Also measure clusters only and codes only.")] = False,
    layers: Annotated[bool, typer.Option(help="Also measure each layer, on the first document.")] = False,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest answer. [default: the suite's]")] = None,
    seed: Annotated[int, typer.Option(help="Chooses documents and questions.")] = 0,
    layout: LayoutOption = "auto",
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare archives with dense attention on fixed tasks: answers, fidelity, bytes and times.

    Dense answers every question greedily first. Every archive is forced through the same answers (KL, agreement,
    times) and gives its own (scores); several questions go to each document, and compression sees none of them. In the
    folder --out, results.jsonl and settings.json let a stopped run go on: give the same command again. result.json has
    all figures, report.html shows them without a network.

    Peers are imitations of other systems' policies: clusters-drop, pages-minmax, window-sinks, quantised-8,
    quantised-4, eviction and the oracle, a bound. Their bytes are worked out; their times are not quoted.

    \b
    Examples:
      ragkv eval --model demo --data data --suite xquad-en --out results
      ragkv eval --model demo --data data --suite kv75 --suite babi-qa2 --out results --tokens 6144 --documents 10
      ragkv eval --model demo --data data --suite xquad-en --out frontier --peers all --budget 64 --budget 256
      ragkv eval --model demo --data data --suite xquad-en --out steps --steps --layers --recipe mine.toml
      ragkv eval --model demo --data data --suite perplexity --out perplexity --tokens 16384 --json
    """
    from ragkv.evaluation.evaluate import check_extras, settings_of
    from ragkv.evaluation.evaluate import evaluate as measure
    from ragkv.evaluation.plan import EvalOptions
    from ragkv.evaluation.report.evaluation import REPORT_FILE, write_result
    from ragkv.evaluation.results import check_folder
    from ragkv.model.load import load_config
    from ragkv.model.shape import model_shape

    options = EvalOptions(
        data=data,
        suites=tuple(suite),
        documents=documents,
        items=items,
        tokens=tokens,
        recipes=_recipes(recipe or ["default"]),
        budgets=tuple(budget or ()),
        peers=_peers(peers),
        steps=steps,
        layers=layers,
        max_new_tokens=max_new_tokens,
        seed=seed,
    )
    check_extras(options)
    prompt = layout if layout in ("auto", "plain", "chat") else read_layout(Path(layout))
    settings = settings_of(options, model=model, dtype=dtype, layout=prompt)
    check_folder(out_dir, settings)
    options.check_context(model_shape(load_config(model)))
    loaded = load(model, dtype, device)
    with _progress() as report:
        evaluation = measure(
            loaded,
            options,
            out_dir,
            layout=choose_layout(layout, loaded),
            settings=settings,
            on_progress=report,
        )
    write_result(evaluation, out_dir)
    if as_json:
        print_json(evaluation.to_dict())
        return
    for group in evaluation.groups:
        out.print(_table(evaluation, group.group, group.subjects))
    for frontier in evaluation.frontiers:
        if frontier.rivals:
            out.print(f"{frontier.group}, {frontier.words}", markup=False, soft_wrap=True)
    print_note(f"the report is {str(out_dir / REPORT_FILE)!r}")


def _recipes(given: list[str]) -> dict[str, Recipe]:
    from ragkv.evaluation.plan import DEFAULT_NAME

    found: dict[str, Recipe] = {}
    for each in given:
        name = DEFAULT_NAME if each == "default" else Path(each).stem
        if name in found:
            raise ConfigError(f"two recipes are named {name!r}; rename the file {each!r}")
        found[name] = Recipe() if each == "default" else Recipe.from_toml(each)
    return found


def _peers(given: str | None) -> tuple[str, ...]:
    from ragkv.evaluation.peers.policies import PEERS

    if given == "all":
        return tuple(PEERS)
    return tuple(name.strip() for name in (given or "").split(",") if name.strip())


@contextmanager
def _progress() -> Iterator[Report]:
    """One bar on stderr for the stage that runs: there are too many stages for a bar each."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as bars:
        task = bars.add_task("planning", total=None)
        stage_now = ""

        def report(stage: str, done: int, total: int) -> None:
            nonlocal stage_now
            if stage != stage_now:
                bars.reset(task, description=stage, total=total)
                stage_now = stage
            bars.update(task, completed=done, total=total)

        yield report


def _table(evaluation: Evaluation, group: str, subjects: tuple[SubjectSummary, ...]) -> Table:
    first = subjects[0]
    held = format_bytes(int(first.bytes.resident))
    title = f"{evaluation.model}, {group}; dense holds {held}, bytes are over those of dense"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("subject", no_wrap=True)
    scores = [] if first.answers is None else list(first.answers.scores)
    headings = [scores[-1], "minus dense", "s.e.", "KL"] if scores else ["perplexity", "x dense", "tail x dense"]
    for heading in (*headings, "read", "memory", "disk"):
        table.add_column(heading, justify="right")
    for subject in subjects:
        table.add_row(subject.subject, *_quality(subject), *_sizes(subject))
    return table


def _quality(subject: SubjectSummary) -> list[str]:
    if subject.answers is not None:
        score = list(subject.answers.scores.values())[-1]
        off = score.difference
        error = "-" if off.standard_error is None else f"{off.standard_error:.3f}"
        return [f"{score.mean.value:.3f}", f"{off.value:+.3f}", error, f"{subject.answers.kl.mean:.4f}"]
    found = subject.perplexity
    return [] if found is None else [f"{found.value:.2f}", f"{found.ratio:.4f}", f"{found.tail_ratio:.4f}"]


def _sizes(subject: SubjectSummary) -> list[str]:
    """Bytes read per token, resident and on disk, over those of dense."""
    sizes = subject.bytes
    ratios = (sizes.read_over_dense, sizes.resident_over_dense, sizes.disk_over_dense)
    return ["-" if ratio is None else f"{ratio:.3f}x" for ratio in ratios]
