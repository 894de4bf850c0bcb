"""What a calibration leaves behind: the recipe file, the table, the figures as JSON, and the report."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ragkv.errors import ConfigError
from ragkv.evaluation.calibrate.knee import Knee
from ragkv.evaluation.calibrate.rule import Point
from ragkv.evaluation.calibrate.search import Calibration
from ragkv.evaluation.calibrate.words import About, describe, layer_verdict, more_budget, verdict
from ragkv.evaluation.report.figures import Axis, Bars, Series, draw_bars, draw_curves
from ragkv.evaluation.report.page import Cell, Picture, Report, Section, Table, write_report
from ragkv.evaluation.stats import standard_error

RECIPE_FILE, TABLE_FILE, RESULT_FILE, REPORT_FILE = "recipe.toml", "table.csv", "result.json", "report.html"

RULE = (
    "Loss is the KL divergence of the next-token distribution from that of dense attention over the same cache, in "
    "nats, at every position of the dense answer, averaged per question. Lower is better; 0 is dense attention.",
    "Clusters and codec: of all pairs at the largest budget, the one of fewest bytes (resident and on disk together) "
    "whose loss is as good as the best pair's.",
    "Budget: the knee of that pair's curve of loss against bytes read per answer token.",
    "Budgets by layer: each layer recalls alone while all others are dense and nothing is coded. Twice the budget in "
    "the worst quarter of the layers and half of it in the best half, the same in all, is measured against the same "
    "budget everywhere, and kept only if its loss is lower by more than one standard error of the paired difference.",
)
_COMMENT_WIDTH = 110
_KL = "KL from dense, nats"
_READ = "Read per answer token, share of the dense cache"
_BUDGET = "Budget, tokens per KV head"


def write_outputs(calibration: Calibration, about: About, folder: Path) -> dict[str, Any]:
    """Write the four files into `folder`; returns what stands in ``result.json``.

    Raises
    ------
    ConfigError
        If a file cannot be written.
    MissingExtraError
        If matplotlib is not installed.
    """
    result = result_dict(calibration, about)
    texts = {
        RECIPE_FILE: recipe_text(calibration, about),
        TABLE_FILE: table_text(calibration),
        RESULT_FILE: json.dumps(result, indent=2, allow_nan=False) + "\n",
    }
    for name, text in texts.items():
        try:
            (folder / name).write_text(text, encoding="utf-8", newline="")
        except OSError as error:
            raise ConfigError(f"{str(folder / name)!r} cannot be written: {error.strerror}") from error
    write_report(build_report(calibration, about), folder / REPORT_FILE)
    return result


def result_dict(calibration: Calibration, about: About) -> dict[str, Any]:
    """Plain values: recipe, chosen and base point, grid, knees, layers."""
    choice, check = calibration.choice, calibration.layer_check
    return {
        "model": about.model,
        "archives": dict(about.archives),
        "questions": about.questions,
        "metric": about.metric,
        "recipe": calibration.recipe.to_dict(),
        "verdict": verdict(calibration, about),
        "more_budget_helps": not choice.budget_knee.flat,
        "chosen": point_dict(calibration.final),
        "base": point_dict(calibration.base),
        "dense_score": mean_or_none(calibration.dense_scores),
        "grid": [point_dict(point) for point in calibration.grid],
        "pairs": [point.name for point in choice.pairs],
        "curve": [point.name for point in choice.curve],
        "knees": {"pairs": _knee_dict(choice.pair_knee), "budget": _knee_dict(choice.budget_knee)},
        "layers": [
            {"layer": point.layer, "kl": fmean(point.losses), "kl_standard_error": standard_error(point.losses)}
            for point in calibration.layers
        ],
        "layer_budgets": None
        if check is None
        else {
            "kept": check.kept,
            "gain": check.gain,
            "gain_standard_error": check.error,
            "budgets": dict(check.by_layer.recipe.recall.layer_budgets),
        },
        "settings": dict(about.settings),
    }


def mean_or_none(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def point_dict(point: Point) -> dict[str, Any]:
    """A row of the table."""
    recipe = point.recipe
    return {
        "name": point.name,
        "tokens_per_cluster": recipe.tokens_per_cluster,
        "key_codec": recipe.key_codec,
        "value_codec": recipe.value_codec,
        "budget": recipe.recall.budget,
        "kl": point.loss,
        "kl_standard_error": standard_error(point.losses),
        "same_answer": fmean(point.same),
        "score": mean_or_none(point.scores),
        "read_over_dense": point.read,
        "resident_over_dense": point.resident,
        "disk_over_dense": point.disk,
    }


def _knee_dict(knee: Knee) -> dict[str, Any]:
    return {**dataclasses.asdict(knee), "margins": list(knee.margins)}


def table_text(calibration: Calibration) -> str:
    """The grid as CSV, the base recipe as a last row where the grid lacks it."""
    rows = [
        {
            **point_dict(point),
            "chosen": int(point.name == calibration.choice.chosen.name),
            "base": int(point.name == calibration.base.name),
        }
        for point in _measured(calibration)
    ]
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _measured(calibration: Calibration) -> list[Point]:
    """The grid, and the base recipe where the grid lacks it."""
    known = {point.name: point for point in (*calibration.grid, calibration.base)}
    return list(known.values())


def recipe_text(calibration: Calibration, about: About) -> str:
    """The recipe as TOML below a few lines of comment that say where it comes from."""
    names = ", ".join(about.archives)
    lines = [
        f"Found by ragkv calibrate for {about.model} on {names}.",
        f"Asked: {about.questions}",
        verdict(calibration, about),
        "Use it with 'ragkv build --recipe' and 'ragkv ask --recipe'; the report beside it shows the curves.",
    ]
    comments = ["".join(char if char.isprintable() else " " for char in line) for line in lines]
    wrapped = [f"# {part}" for comment in comments for part in textwrap.wrap(comment, _COMMENT_WIDTH)]
    return "\n".join(wrapped) + "\n\n" + calibration.recipe.to_toml()


def build_report(calibration: Calibration, about: About) -> Report:
    """Verdict, curves, tables and the rule."""
    n_asked = len(calibration.base.losses)
    documents = ", ".join(f"{name} ({n_tokens:,} tokens)" for name, n_tokens in about.archives.items())
    asked = Section("What was asked", [f"{n_asked:,} questions about {documents}.", about.questions])
    sections = [
        _budget_section(calibration, about),
        _pairs_section(calibration),
        _answers_section(calibration, about),
        _layers_section(calibration),
        Section("All configurations", [_grid_table(calibration)]),
        asked,
        Section("The rule", [*RULE, f"As good as: {calibration.choice.budget_knee.rule}"]),
        Section("Recipe", [f"{RECIPE_FILE} holds it: {describe(calibration.recipe)}.", _recipe_table(calibration)]),
    ]
    return Report(f"Calibration of {about.model}", verdict(calibration, about), sections, about.settings)


def _budget_section(calibration: Calibration, about: About) -> Section:
    curve, knee, base = calibration.choice.curve, calibration.choice.budget_knee, calibration.base
    on_curve = any(point.name == base.name for point in curve)
    found = "knee" if knee.flat else "chosen"
    labels = [
        " and ".join(name for name, here in ((found, at == knee.chosen), (about.base, point.name == base.name)) if here)
        for at, point in enumerate(curve)
    ]
    # A budget says nothing of a base recipe that recalls by clusters or by mass.
    by_budget = base.recipe.recall.top_m is None and base.recipe.recall.mass is None
    pictures = []
    for x_label, cost in ((_BUDGET, _budget), (_READ, _read)):
        series = [_series(curve, cost, labels=labels)]
        if not on_curve and (by_budget or cost is _read):
            series.append(_series([base], cost, name=about.base, labels=[about.base]))
        words = "; ".join(f"{cost(point):.3g}: {point.loss:.3g}" for point in curve)
        pictures.append(
            Picture(
                draw_curves(series, x=Axis(x_label, log=cost is _budget), y=Axis(_KL)),
                f"{x_label}: loss of the chosen clusters and codec, and of the {about.base} recipe. Bars are standard "
                "errors over questions.",
                f"A curve of KL against {x_label}: {words}. Chosen: {cost(curve[knee.chosen]):.3g}.",
            )
        )
    return Section("Budget and the knee", [more_budget(calibration), *pictures])


def _pairs_section(calibration: Calibration) -> Section:
    choice = calibration.choice
    rows: list[list[Cell]] = [
        [
            _pair_name(point),
            point.resident,
            point.disk,
            point.resident + point.disk,
            point.loss,
            point.loss - choice.pairs[choice.pair_knee.best].loss,
            margin,
        ]
        for point, margin in zip(choice.pairs, choice.pair_knee.margins, strict=True)
    ]
    columns = ["clusters and codec", "resident", "on disk", "together", _KL, "above the best", "allowed"]
    table = Table(
        f"Pairs at budget {choice.pairs[0].budget}, fewest bytes first; bytes as shares of the dense cache",
        columns,
        rows,
        highlight=choice.pair_knee.chosen,
    )
    series = [_series(points, _read) for points in _by_pair(calibration)]
    picture = Picture(
        draw_curves(series, x=Axis(_READ), y=Axis(_KL, log=True)),
        "Loss against bytes read, for all pairs.",
        f"Curves of KL against bytes read, one for each pair: {_ends(series)}.",
    )
    return Section("Clusters and codec", [table, picture])


def _answers_section(calibration: Calibration, about: About) -> Section:
    pairs = _by_pair(calibration)
    same = [_series(points, _budget, values=lambda p: p.same) for points in pairs]
    blocks: list[str | Table | Picture] = [
        Picture(
            draw_curves(same, x=Axis(_BUDGET, log=True), y=Axis("Share of answers that are those of dense")),
            "Agreement with dense: greedy answers that are the same text.",
            f"Curves of the share of equal answers: {_ends(same)}.",
        )
    ]
    if not calibration.dense_scores:
        return Section("Answers", [*blocks, "The questions have no gold answers, so there is no task score."])
    dense = fmean(calibration.dense_scores)
    scored = [_series(points, _budget, values=lambda p: p.scores) for points in pairs]
    scored.append(Series("dense", scored[0].x, [dense] * len(scored[0].x)))
    blocks += [
        f"Dense attention itself scores {dense:.3g} on the {len(calibration.dense_scores)} questions with gold answers "
        f"({about.metric}); what it fails, an archive cannot be blamed for.",
        Picture(
            draw_curves(scored, x=Axis(_BUDGET, log=True), y=Axis(f"Task score ({about.metric}), 0 to 1")),
            "Task score of the greedy answers, and that of dense attention.",
            f"Curves of the task score: {_ends(scored)}.",
        ),
    ]
    return Section("Answers", blocks)


def _layers_section(calibration: Calibration) -> Section:
    check, layers = calibration.layer_check, calibration.layers
    blocks: list[str | Table | Picture] = [layer_verdict(calibration)]
    means = [fmean(point.losses) for point in layers]
    if layers:
        words = ", ".join(f"{point.layer}: {mean:.3g}" for point, mean in zip(layers, means, strict=True))
        bars = Bars("alone", means, [standard_error(point.losses) for point in layers])
        blocks.append(
            Picture(
                draw_bars([str(point.layer) for point in layers], [bars], y=Axis(_KL)),
                "Loss with recall in one layer only, by layer; all others dense, nothing coded.",
                f"Bars of KL by layer: {words}.",
            )
        )
    if check is not None:
        columns = ["budgets", _KL, "same answer as dense", "read per answer token", "resident", "on disk"]
        rows: list[list[Cell]] = [
            [p.name, p.loss, fmean(p.same), p.read, p.resident, p.disk] for p in (check.even, check.by_layer)
        ]
        blocks.append(Table("The same budget everywhere, and budgets by layer", columns, rows, int(check.kept), "kept"))
        own = check.by_layer.recipe.recall.layer_budgets
        blocks.append(
            "Budgets by layer: " + ", ".join(f"{layer}: {own[layer]}" for layer in sorted(own, key=int)) + "."
        )
    return Section("Layer by layer", blocks)


def _grid_table(calibration: Calibration) -> Table:
    points = _measured(calibration)
    columns = ["configuration", _KL, "standard error", "same answer", "score", "read", "resident", "on disk"]
    rows = [
        [p.name, p.loss, standard_error(p.losses), fmean(p.same), mean_or_none(p.scores), p.read, p.resident, p.disk]
        for p in points
    ]
    chosen = [point.name for point in points].index(calibration.choice.chosen.name)
    return Table("Bytes as shares of the dense cache; read per answer token", columns, rows, chosen)


def _recipe_table(calibration: Calibration) -> Table:
    values = calibration.recipe.to_dict()
    recall = values.pop("recall")
    flat = {**values, **{f"recall.{name}": value for name, value in recall.items()}}
    return Table("The recipe", ["key", "value"], [[name, str(value)] for name, value in flat.items()])


def _by_pair(calibration: Calibration) -> list[list[Point]]:
    """The grid's points of each pair, in the order of the table of pairs, budgets ascending."""
    return [
        sorted((point for point in calibration.grid if point.pair == pair.pair), key=lambda point: point.budget)
        for pair in calibration.choice.pairs
    ]


def _pair_name(point: Point) -> str:
    return f"{point.pair[0]} per cluster, {point.pair[1]}"


def _series(
    points: Sequence[Point],
    cost: Callable[[Point], float],
    *,
    values: Callable[[Point], Sequence[float]] = lambda point: point.losses,
    name: str | None = None,
    labels: Sequence[str] | None = None,
) -> Series:
    """The means of `values` with their standard errors; named after the pair unless there is a `name`."""
    means, errors = [fmean(values(point)) for point in points], [standard_error(values(point)) for point in points]
    return Series(name or _pair_name(points[0]), [cost(point) for point in points], means, errors, labels)


def _ends(series: Sequence[Series]) -> str:
    """Where each curve begins and ends, in words."""
    return "; ".join(f"{line.name} from {line.y[0]:.3g} to {line.y[-1]:.3g}" for line in series)


def _budget(point: Point) -> float:
    return float(point.budget)


def _read(point: Point) -> float:
    return point.read
