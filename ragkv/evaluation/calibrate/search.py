"""Find the recipe for a model and a corpus: sweep, choose by a stated rule, look layer by layer, check, write.

1. The grid: tokens per cluster x codec x budget, and the base recipe, teacher-forced on the dense answers of every
   question.
2. Clusters and codec: of the pairs, each at the largest budget of the sweep, the one of fewest bytes (resident and on
   disk) whose loss is as good as the best pair's.
3. Budget: the knee of that pair's curve of loss against bytes read per answer token.
4. Layer by layer: recall in one layer only, all others dense, without codes, so that recall alone is seen. A candidate
   with twice the budget in the worst quarter of the layers and half of it in the best half is run against the chosen
   budget, and kept only if its loss is lower by more than one standard error of the paired difference.
5. Do no harm: if the base recipe loses less than what was found, by more than one standard error, it stays.

Loss is the KL divergence from dense, averaged per question; "as good as" is the rule of `find_knee`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

from ragkv.evaluation.calibrate.rule import (
    BASE,
    Choice,
    LayerCheck,
    LayerPoint,
    Point,
    Sweep,
    check_questions,
    choose,
    layer_budgets,
)
from ragkv.evaluation.compare import Outcome
from ragkv.evaluation.results import ResultsFolder
from ragkv.evaluation.run import Measured, Task, run
from ragkv.evaluation.subjects import DENSE, SubjectSpec
from ragkv.evaluation.timing import Progress
from ragkv.model.load import LoadedModel
from ragkv.model.prompt import PromptLayout
from ragkv.model.shape import model_shape
from ragkv.recipe import Recipe

LAYER_QUESTIONS = 6
"""Questions of each document that the sweep over single layers asks."""


@dataclass(frozen=True)
class Calibration:
    """The result: ``final`` is the point whose recipe to use, and the rest is how it came about.

    ``base`` is the point of the base recipe. ``dense_scores`` are dense attention's own, where there are gold answers.
    ``layer_check`` is None for a model with too few layers that recall.
    """

    grid: tuple[Point, ...]
    base: Point
    dense_scores: tuple[float, ...]
    choice: Choice
    layers: tuple[LayerPoint, ...]
    layer_check: LayerCheck | None

    @property
    def found(self) -> Point:
        """What the rule found, with budgets by layer if they were kept."""
        check = self.layer_check
        return check.by_layer if check is not None and check.kept else self.choice.chosen

    @property
    def base_is_better(self) -> bool:
        """Whether the base recipe loses less than what was found, by more than one standard error."""
        return self.found.loss - self.base.loss > self.found.error_to(self.base)

    @property
    def final(self) -> Point:
        return self.base if self.base_is_better else self.found

    @property
    def recipe(self) -> Recipe:
        return self.final.recipe


@dataclass(frozen=True)
class _Bench:
    """Where the phases run: each keeps its results in a folder of its own below `out`."""

    model: LoadedModel
    layout: PromptLayout
    out: Path
    settings: dict[str, object]
    on_progress: Progress | None

    def run(self, phase: str, tasks: Sequence[Task], specs: Sequence[SubjectSpec]) -> list[Measured]:
        results = ResultsFolder(self.out / phase.replace(" ", "-"), self.settings, Measured)
        report = None if self.on_progress is None else _counted(self.on_progress, phase, tasks, specs, results.read())
        return run(self.model, tasks, specs, results, layout=self.layout, on_progress=report)


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

    `settings` must hold whatever changes results; `on_progress` is called with (phase, answers done, answers in all).

    Raises
    ------
    ConfigError
        If `out` holds a run of other settings, or there are fewer than two questions.
    """
    check_questions(n_questions(tasks))
    sweep.base.check_layers(len(model_shape(model.model.config).layers))
    bench = _Bench(model, layout, out, settings, on_progress)
    recipes = sweep.recipes()
    specs = [SubjectSpec(name, recipe=recipe) for name, recipe in recipes.items()]
    measured = bench.run("grid", tasks, specs)
    points = {name: _point(measured, name, recipe) for name, recipe in recipes.items()}
    grid = tuple(point for name, point in points.items() if name != BASE)
    choice = choose(grid)
    recipe = choice.chosen.recipe
    layers = _single_layers(bench, tasks, recipe)
    candidate = layer_budgets(recipe, layers)
    check = None if candidate is None else _check_layers(bench, tasks, recipe, candidate)
    return Calibration(
        grid=grid,
        base=next(point for point in points.values() if point.recipe == sweep.base),
        dense_scores=_scores(_outcomes(measured, DENSE)),
        choice=choice,
        layers=layers,
        layer_check=check,
    )


def n_questions(tasks: Iterable[Task]) -> int:
    return sum(len(task.questions.items) for task in tasks if task.questions is not None)


def _single_layers(bench: _Bench, tasks: Sequence[Task], recipe: Recipe) -> tuple[LayerPoint, ...]:
    """Recall in one layer only, for each that the recipe lets recall."""
    shape = model_shape(bench.model.model.config)
    plain = dataclasses.replace(recipe, key_codec="lossless", value_codec="lossless")
    recalling = [layer.index for layer in shape.global_layers if layer.index not in recipe.recall.dense_layers]
    specs = []
    for index in recalling:
        others = tuple(layer.index for layer in shape.layers if layer.index != index)
        policy = dataclasses.replace(recipe.recall, dense_layers=others)
        specs.append(SubjectSpec(f"layer {index}", recipe=plain, policy=policy))
    measured = bench.run("single layers", [_fewer(task, LAYER_QUESTIONS) for task in tasks], specs)
    return tuple(LayerPoint(index, _losses(_outcomes(measured, f"layer {index}"))) for index in recalling)


def _check_layers(bench: _Bench, tasks: Sequence[Task], recipe: Recipe, candidate: Recipe) -> LayerCheck:
    recipes = {"even budgets": recipe, "budgets by layer": candidate}
    specs = [SubjectSpec(name, recipe=each) for name, each in recipes.items()]
    measured = bench.run("layer budgets", tasks, specs)
    even, by_layer = (_point(measured, name, each) for name, each in recipes.items())
    return LayerCheck(even, by_layer)


def _fewer(task: Task, n_kept: int) -> Task:
    """The same task with at most `n_kept` questions, at even distances of all."""
    if task.questions is None or len(task.questions.items) <= n_kept:
        return task
    items = task.questions.items
    kept = [items[place * len(items) // n_kept] for place in range(n_kept)]
    return dataclasses.replace(task, questions=dataclasses.replace(task.questions, items=kept))


def _outcomes(measured: Sequence[Measured], subject: str) -> list[Outcome]:
    """Document by document, in the order of the tasks."""
    return [outcome for each in measured if each.subject == subject for outcome in each.outcomes]


def _losses(outcomes: Sequence[Outcome]) -> tuple[float, ...]:
    """Mean KL of every question; rounding can put that of an exact one just below 0."""
    return tuple(max(0.0, fmean(outcome.kl)) for outcome in outcomes)


def _scores(outcomes: Sequence[Outcome]) -> tuple[float, ...]:
    """F1 where the metric has it, else its only number."""
    return tuple(o.scores.get("f1", fmean(o.scores.values())) for o in outcomes if o.scores)


def _point(measured: Sequence[Measured], name: str, recipe: Recipe) -> Point:
    own = [each for each in measured if each.subject == name]
    dense = sum(each.resident_bytes for each in measured if each.subject == DENSE)
    outcomes = _outcomes(measured, name)
    return Point(
        name=name,
        recipe=recipe,
        losses=_losses(outcomes),
        same=tuple(float(outcome.same_answer) for outcome in outcomes),
        scores=_scores(outcomes),
        read=sum(map(_read, own)) / dense,
        resident=sum(each.resident_bytes for each in own) / dense,
        disk=sum(each.disk_bytes for each in own) / dense,
    )


def _read(measured: Measured) -> float:
    """Mean bytes read per answer token; all that is resident where no answer had a second token."""
    known = [outcome.bytes_read for outcome in measured.outcomes if outcome.bytes_read is not None]
    return fmean(known) if known else float(measured.resident_bytes)


def _counted(
    on_progress: Progress, phase: str, tasks: Sequence[Task], specs: Sequence[SubjectSpec], known: Sequence[Measured]
) -> Callable[[str, int, int], None]:
    """Progress of a phase as answers done of all; the stages of `run` are one for each document and subject."""
    names = {spec.name for spec in specs}
    before = sum(len(each.outcomes) for each in known if each.subject in names)
    total = n_questions(tasks) * len(specs)
    counts: dict[str, int] = {}

    def report(stage: str, done: int, total_here: int) -> None:
        if stage.split("] ", 1)[-1] in names:
            counts[stage] = done
            on_progress(phase, before + sum(counts.values()), total)
        else:
            on_progress(f"{phase}: dense", done, total_here)

    return report
