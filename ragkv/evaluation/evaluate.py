"""The whole evaluation: plan, run or go on with a run, and summarise what was found."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ragkv.errors import MissingExtraError
from ragkv.evaluation.bench import environment
from ragkv.evaluation.frontier import COSTS, KL, Frontier, judge_frontier
from ragkv.evaluation.plan import (
    BOUNDS,
    PERPLEXITY,
    Contender,
    EvalOptions,
    check_tasks,
    plan_subjects,
    plan_tasks,
)
from ragkv.evaluation.results import ResultsFolder, write_whole
from ragkv.evaluation.run import Measured, Task, measure_layers, run
from ragkv.evaluation.summary import GroupSummary, summarise
from ragkv.evaluation.timing import Progress
from ragkv.model.load import LoadedModel
from ragkv.model.prompt import PromptLayout
from ragkv.model.shape import model_shape
from ragkv.version import __version__

LAYERS_FILE = "layers.json"
LAYER_QUESTIONS = 4

_PACKAGES = {"matplotlib": "plot", "torchmetrics": "eval"}


@dataclass(frozen=True)
class Evaluation:
    """Everything that was found.

    ``layers`` has, for each recipe, what `ragkv.evaluation.layers` found on the first document: one table of
    plain values for each layer, empty unless asked for.
    """

    model: str
    settings: dict[str, Any]
    environment: dict[str, str | int]
    contenders: tuple[Contender, ...]
    groups: tuple[GroupSummary, ...]
    frontiers: tuple[Frontier, ...]
    layers: dict[str, list[dict[str, Any]]]

    @property
    def main(self) -> str:
        """The archive that verdicts are about: the usual one of the first recipe."""
        return next(each.name for each in self.contenders if each.usual)

    def to_dict(self) -> dict[str, Any]:
        subjects = {
            each.name: {"kind": each.kind, "family": each.family, "budget": each.budget} for each in self.contenders
        }
        values = {
            "model": self.model,
            "settings": self.settings,
            "environment": self.environment,
            "subjects": subjects,
            "groups": [group.to_dict() for group in self.groups],
            "frontiers": [frontier.to_dict() for frontier in self.frontiers],
            "layers": self.layers,
        }
        plain: dict[str, Any] = _finite(values)
        return plain


def settings_of(options: EvalOptions, *, model: str, dtype: str | None, layout: PromptLayout | str) -> dict[str, Any]:
    """What the results of a folder depend on; another run may go on with them only if all of it is the same."""
    prompt = layout if isinstance(layout, str) else layout.to_dict()
    return {"ragkv": __version__, "model": model, "dtype": dtype, "layout": prompt, **options.to_dict()}


def check_extras(options: EvalOptions) -> None:
    """Refuse to begin a long run that could not be scored or reported in the end."""
    wanted = ["matplotlib", *(["torchmetrics"] if any(name.startswith("xquad") for name in options.suites) else [])]
    for package in wanted:
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(f"the evaluation needs {package}: pip install 'ragkv[{_PACKAGES[package]}]'")


def evaluate(
    model: LoadedModel,
    options: EvalOptions,
    out: Path,
    *,
    layout: PromptLayout,
    settings: dict[str, Any],
    on_progress: Progress | None = None,
) -> Evaluation:
    """Measure what the folder `out` does not hold yet, and summarise all of it.

    Parameters
    ----------
    settings
        From `settings_of`: what the results depend on.
    on_progress
        Called with a stage, what is done of it and how much that is.

    Raises
    ------
    ConfigError
        If `out` holds other results, a suite cannot be made, or something does not fit into the model's context.
    """
    shape = model_shape(model.model.config)
    options.check_context(shape)
    contenders = plan_subjects(options, shape)
    tasks = plan_tasks(options, model.tokenizer, layout)
    check_tasks(tasks, shape, model.tokenizer, layout)
    results = ResultsFolder(out, settings, Measured)
    specs = [each.spec for each in contenders]
    measured = run(model, tasks, specs, results, layout=layout, on_progress=on_progress)
    layers = _layers(model, contenders, tasks, out, layout, on_progress) if options.layers else {}
    return Evaluation(
        model=model.name,
        settings=settings,
        environment=environment(),
        contenders=contenders,
        groups=summarise(measured, imitations=[each.name for each in contenders if each.kind == "peer"]),
        frontiers=judge_frontiers(measured, contenders, options.suites),
        layers=layers,
    )


def judge_frontiers(
    measured: Sequence[Measured], contenders: Sequence[Contender], suites: Sequence[str]
) -> tuple[Frontier, ...]:
    """KL against each cost and score against bytes read, for every suite that asks; bounds and steps beat nobody."""
    subjects = [each.name for each in contenders if each.kind == "archive"]
    rivals = [each.name for each in contenders if each.kind == "peer" and each.family not in BOUNDS]
    found = []
    for group in suites:
        if group == PERPLEXITY:
            continue
        scores = next(outcome.scores for each in measured if each.group == group for outcome in each.outcomes)
        figures = [(KL, cost) for cost in COSTS] + [(list(scores)[-1], "read")]
        found += [
            judge_frontier(measured, group, quality, cost, subjects=subjects, rivals=rivals)
            for quality, cost in figures
        ]
    return tuple(found)


def _layers(
    model: LoadedModel,
    contenders: Sequence[Contender],
    tasks: Sequence[Task],
    out: Path,
    layout: PromptLayout,
    on_progress: Progress | None,
) -> dict[str, list[dict[str, Any]]]:
    """Layer by layer for the usual subject of each recipe, on the first document with questions; kept in the folder."""
    path = out / LAYERS_FILE
    if path.exists():
        kept: dict[str, list[dict[str, Any]]] = json.loads(path.read_text(encoding="utf-8"))
        return kept
    task = next(each for each in tasks if each.questions is not None)
    found: dict[str, list[dict[str, Any]]] = {}
    for contender in (each for each in contenders if each.usual):
        layers = measure_layers(
            model, task, contender.spec, layout=layout, n_questions=LAYER_QUESTIONS, on_progress=on_progress
        )
        found[contender.name] = [_finite(asdict(layer)) for layer in layers]
    write_whole(path, json.dumps(found, indent=1, allow_nan=False) + "\n")
    return found


def _finite(value: Any) -> Any:
    """Plain values, with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
