"""Find the recipe for a model and a corpus: sweep, choose by a stated rule, look layer by layer, check, write.

1. The grid: tokens per cluster x codec x budget, teacher-forced on the dense answers of every question.
2. Clusters and codec: of the pairs, each at the largest budget of the sweep, the one of fewest bytes (resident and on
   disk) whose loss is as good as the best pair's.
3. Budget: the knee of that pair's curve of loss against bytes read per answer token.
4. Layer by layer: recall in one layer only, all others dense. A candidate with twice the budget in the worst quarter of
   the layers and half of it in the best half is run against the chosen budget, and kept only if its loss is lower by
   more than one standard error of the paired difference.

Loss is the KL divergence from dense, averaged per question; "as good as" is the rule of `find_paired_knee`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

from ragkv.architecture import model_shape
from ragkv.errors import ConfigError
from ragkv.evaluation.knee import Knee, find_paired_knee
from ragkv.evaluation.run import Measured, Progress, ResultsFolder, Task, run
from ragkv.evaluation.subjects import DENSE, SubjectSpec
from ragkv.layout import PromptLayout
from ragkv.models import LoadedModel
from ragkv.recipe import Recipe

TOKENS_PER_CLUSTER = (4, 8, 16)
CODECS = ("int4", "int3", "int2")
BUDGETS = (64, 128, 256, 512, 1024)
LAYER_QUESTIONS = 6
"""Questions of each document that the sweep over single layers asks."""


@dataclass(frozen=True)
class Sweep:
    """What is tried; `base` supplies everything else of a recipe."""

    base: Recipe
    tokens_per_cluster: tuple[int, ...] = TOKENS_PER_CLUSTER
    codecs: tuple[str, ...] = CODECS
    budgets: tuple[int, ...] = BUDGETS

    def __post_init__(self) -> None:
        for name in ("tokens_per_cluster", "codecs", "budgets"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ConfigError(f"calibrate: {name} is {list(values)}; give at least one value, each once")
        object.__setattr__(self, "budgets", tuple(sorted(self.budgets)))

    def recipe(self, tokens_per_cluster: int, codec: str) -> Recipe:
        return dataclasses.replace(
            self.base, tokens_per_cluster=tokens_per_cluster, key_codec=codec, value_codec=codec, layer_codecs={}
        )


@dataclass(frozen=True)
class Point:
    """One configuration of the grid, over all documents: ``losses`` and ``same`` hold one number per question.

    ``read``, ``resident`` and ``disk`` are shares of the dense cache; ``read`` per answer token.
    """

    tokens_per_cluster: int
    codec: str
    budget: int
    losses: tuple[float, ...]
    same: tuple[float, ...]
    scores: tuple[float, ...]
    read: float
    resident: float
    disk: float

    @property
    def loss(self) -> float:
        return fmean(self.losses)


@dataclass(frozen=True)
class LayerPoint:
    """One layer recalled alone at the chosen configuration; losses per question."""

    layer: int
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Calibration:
    """The result: ``recipe``, and how it came about.

    ``pairs`` holds one `Point` per pair of tokens per cluster and codec in the order of their bytes, ``curve`` the
    chosen pair's points in the order of their budgets; ``default`` is the point that is nearest to the base recipe.
    """

    recipe: Recipe
    chosen: Point
    default: Point
    grid: tuple[Point, ...]
    pairs: tuple[Point, ...]
    pair_knee: Knee
    curve: tuple[Point, ...]
    budget_knee: Knee
    layers: tuple[LayerPoint, ...]
    layer_budgets_gain: float | None
    layer_budgets_error: float | None
    layer_budgets_kept: bool


@torch.no_grad()
def calibrate(
    model: LoadedModel,
    tasks: Sequence[Task],
    sweep: Sweep,
    out: Path,
    *,
    layout: PromptLayout,
    settings: dict[str, object],
    on_progress: Progress | None = None,
) -> Calibration:
    """Run the sweep over `tasks`, which must have questions, and choose; a stopped run goes on from `out`.

    Raises
    ------
    ConfigError
        If `out` holds a run of other settings.
    """
    recipes = [(t, c) for t in sweep.tokens_per_cluster for c in sweep.codecs]
    specs = [
        SubjectSpec(_name(t, c, b), recipe=sweep.recipe(t, c), policy=sweep.base.recall.with_budget(b))
        for t, c in recipes
        for b in sweep.budgets
    ]
    measured = run(model, tasks, specs, ResultsFolder(out / "grid", settings), layout=layout, on_progress=on_progress)
    grid = tuple(_point(measured, t, c, b) for t, c in recipes for b in sweep.budgets)
    pairs = sorted((p for p in grid if p.budget == sweep.budgets[-1]), key=lambda p: (p.resident + p.disk, p.loss))
    pair_knee = _knee([p.resident + p.disk for p in pairs], pairs)
    pair = pairs[pair_knee.chosen]
    curve = [p for p in grid if (p.tokens_per_cluster, p.codec) == (pair.tokens_per_cluster, pair.codec)]
    budget_knee = _knee([p.read for p in curve], curve)
    chosen = curve[budget_knee.chosen]
    recipe = sweep.recipe(chosen.tokens_per_cluster, chosen.codec)
    recipe = dataclasses.replace(recipe, recall=sweep.base.recall.with_budget(chosen.budget))
    layers = _single_layers(model, tasks, recipe, out, layout=layout, settings=settings, on_progress=on_progress)
    candidate = _layer_budgets(recipe, layers)
    gain = error = None
    if candidate is not None:
        specs = [SubjectSpec("even", recipe=recipe), SubjectSpec("by layer", recipe=candidate)]
        checked = run(
            model, tasks, specs, ResultsFolder(out / "check", settings), layout=layout, on_progress=on_progress
        )
        even, by_layer = (_losses(checked, name) for name in ("even", "by layer"))
        gain, error = _paired([a - b for a, b in zip(even, by_layer, strict=True)])
    kept = candidate is not None and gain is not None and error is not None and gain > error
    return Calibration(
        recipe=candidate if kept and candidate is not None else recipe,
        chosen=chosen,
        default=_nearest(grid, sweep.base),
        grid=grid,
        pairs=tuple(pairs),
        pair_knee=pair_knee,
        curve=tuple(curve),
        budget_knee=budget_knee,
        layers=layers,
        layer_budgets_gain=gain,
        layer_budgets_error=error,
        layer_budgets_kept=kept,
    )


def _name(tokens_per_cluster: int, codec: str, budget: int) -> str:
    return f"{tokens_per_cluster} per cluster, {codec}, budget {budget}"


def _losses(measured: Sequence[Measured], subject: str) -> list[float]:
    """Mean KL of every question, document by document."""
    return [fmean(outcome.kl) for each in measured if each.subject == subject for outcome in each.outcomes]


def _point(measured: Sequence[Measured], tokens_per_cluster: int, codec: str, budget: int) -> Point:
    name = _name(tokens_per_cluster, codec, budget)
    own = [each for each in measured if each.subject == name]
    dense = sum(each.resident_bytes for each in measured if each.subject == DENSE)
    outcomes = [outcome for each in own for outcome in each.outcomes]
    by_document = [[o.bytes_read for o in each.outcomes if o.bytes_read is not None] for each in own]
    read = sum(
        fmean(values) if values else float(each.resident_bytes) for values, each in zip(by_document, own, strict=True)
    )
    return Point(
        tokens_per_cluster=tokens_per_cluster,
        codec=codec,
        budget=budget,
        losses=tuple(_losses(measured, name)),
        same=tuple(float(outcome.same_answer) for outcome in outcomes),
        scores=tuple(fmean(outcome.scores.values()) for outcome in outcomes if outcome.scores),
        read=read / dense,
        resident=sum(each.resident_bytes for each in own) / dense,
        disk=sum(each.disk_bytes for each in own) / dense,
    )


def _read(measured: Measured) -> float:
    """Mean bytes read per answer token; all that is resident where no answer had a second token."""
    known = [outcome.bytes_read for outcome in measured.outcomes if outcome.bytes_read is not None]
    return fmean(known) if known else float(measured.resident_bytes)


def _knee(costs: Sequence[float], points: Sequence[Point]) -> Knee:
    """The knee over `points` in ascending order of cost; equal costs are told apart by the smallest difference."""
    rising: list[float] = []
    for cost in costs:
        rising.append(cost if not rising or cost > rising[-1] else rising[-1] * (1 + 1e-9))
    return find_paired_knee(rising, [point.losses for point in points])


def _single_layers(
    model: LoadedModel,
    tasks: Sequence[Task],
    recipe: Recipe,
    out: Path,
    *,
    layout: PromptLayout,
    settings: dict[str, object],
    on_progress: Progress | None,
) -> tuple[LayerPoint, ...]:
    """Recall in one global layer only, for each of them."""
    shape = model_shape(model.model.config)
    every = tuple(layer.index for layer in shape.layers)
    few = [
        dataclasses.replace(
            task, questions=dataclasses.replace(task.questions, items=task.questions.items[:LAYER_QUESTIONS])
        )
        for task in tasks
        if task.questions is not None
    ]
    specs = [
        SubjectSpec(
            f"layer {layer.index}",
            recipe=recipe,
            policy=dataclasses.replace(
                recipe.recall, dense_layers=tuple(other for other in every if other != layer.index)
            ),
        )
        for layer in shape.global_layers
    ]
    measured = run(model, few, specs, ResultsFolder(out / "layers", settings), layout=layout, on_progress=on_progress)
    return tuple(
        LayerPoint(layer.index, tuple(_losses(measured, f"layer {layer.index}"))) for layer in shape.global_layers
    )


def _with_questions(task: Task, n_questions: int) -> Task:
    """The same task with questions at even distances of all."""
    if task.questions is None:
        return task
    items = task.questions.items
    n_kept = min(n_questions, len(items))
    kept = [items[place * len(items) // n_kept] for place in range(n_kept)]
    return dataclasses.replace(task, questions=dataclasses.replace(task.questions, items=kept))


def _layer_budgets(recipe: Recipe, layers: Sequence[LayerPoint]) -> Recipe | None:
    """The same recall in all, moved to the layers that lose most; None for fewer than four layers."""
    if len(layers) < 4:
        return None
    worst_first = sorted(layers, key=lambda point: -fmean(point.losses))
    n_more = len(layers) // 4
    budget = recipe.recall.budget
    budgets = {str(point.layer): 2 * budget for point in worst_first[:n_more]}
    budgets |= {str(point.layer): max(1, budget // 2) for point in worst_first[-2 * n_more :]}
    return dataclasses.replace(recipe, recall=dataclasses.replace(recipe.recall, layer_budgets=budgets))


def _paired(differences: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error over questions."""
    values = torch.tensor(differences, dtype=torch.float64)
    error = float(values.std() / len(values) ** 0.5) if len(values) > 1 else 0.0
    return float(values.mean()), error


def _nearest(grid: Sequence[Point], base: Recipe) -> Point:
    """The point of the grid that is the base recipe, or differs from it least."""

    def distance(point: Point) -> tuple[int, int, int]:
        same_codec = point.codec == base.key_codec == base.value_codec
        return (
            not same_codec,
            abs(point.tokens_per_cluster - base.tokens_per_cluster),
            abs(point.budget - base.recall.budget),
        )

    return min(grid, key=distance)
