"""The points of a calibration and the rule that chooses among them; what is measured is in `calibrate`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ragkv.errors import ConfigError
from ragkv.evaluation.calibrate.knee import Knee, find_knee
from ragkv.evaluation.stats import paired_error
from ragkv.recipe import Recipe

TOKENS_PER_CLUSTER = (4, 8, 16)
CODECS = ("int4", "int3/int2.5", "int2")
"""One codec for keys and values, or one for each with a slash between them; the second is the default recipe's."""

BUDGETS = (64, 128, 256, 512, 1024)
MIN_LAYERS = 4
"""Fewer layers that recall have no quarter to give more to."""

BASE = "base recipe"


@dataclass(frozen=True)
class Sweep:
    """What is tried; `base` supplies everything else of a recipe and is measured too.

    Values are checked as those of a recipe are. Budgets are kept in ascending order.
    """

    base: Recipe
    tokens_per_cluster: tuple[int, ...] = TOKENS_PER_CLUSTER
    codecs: tuple[str, ...] = CODECS
    budgets: tuple[int, ...] = BUDGETS

    def __post_init__(self) -> None:
        for name in ("tokens_per_cluster", "codecs", "budgets"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ConfigError(f"calibrate: {name} is {list(values)}; give at least one value, each once")
        for tokens_per_cluster, codec in self.pairs:
            for budget in self.budgets:
                self.recipe(tokens_per_cluster, codec, budget)
        object.__setattr__(self, "budgets", tuple(sorted(self.budgets)))

    @property
    def pairs(self) -> list[tuple[int, str]]:
        """(tokens per cluster, codec), in the order in which they are measured."""
        return [(tokens, codec) for tokens in self.tokens_per_cluster for codec in self.codecs]

    def recipe(self, tokens_per_cluster: int, codec: str, budget: int) -> Recipe:
        """The recipe of one point: codecs of keys and values, the same in all layers, and one budget for all layers."""
        key_codec, _, value_codec = codec.partition("/")
        return dataclasses.replace(
            self.base,
            tokens_per_cluster=tokens_per_cluster,
            key_codec=key_codec,
            value_codec=value_codec or key_codec,
            layer_codecs={},
            recall=self.base.recall.with_budget(budget),
        )

    def recipes(self) -> dict[str, Recipe]:
        """Every point of the grid by its name, and the base recipe where it is not one of them."""
        found = {
            point_name(tokens, codec, budget): self.recipe(tokens, codec, budget)
            for tokens, codec in self.pairs
            for budget in self.budgets
        }
        return found if self.base in found.values() else {**found, BASE: self.base}


@dataclass(frozen=True)
class Point:
    """One configuration, over all documents: ``losses`` and ``same`` hold one number per question.

    ``same`` is 1 where the answer is that of dense; ``scores`` has a number for each question with gold answers.
    ``read``, ``resident`` and ``disk`` are shares of the dense cache; ``read`` is per answer token.
    """

    name: str
    recipe: Recipe
    losses: tuple[float, ...]
    same: tuple[float, ...]
    scores: tuple[float, ...]
    read: float
    resident: float
    disk: float

    @property
    def loss(self) -> float:
        return fmean(self.losses)

    def error_to(self, other: Point) -> float:
        """Standard error of the difference between the losses of two points."""
        return paired_error(self.losses, other.losses)

    @property
    def pair(self) -> tuple[int, str]:
        return self.recipe.tokens_per_cluster, codec_name(self.recipe)

    @property
    def budget(self) -> int:
        return self.recipe.recall.budget


@dataclass(frozen=True)
class Choice:
    """What the rule makes of the grid.

    ``pairs`` holds one `Point` per pair of tokens per cluster and codec, at the largest budget, in the order of their
    bytes; ``curve`` the chosen pair's points in the order of their budgets. The knees index into them.
    """

    pairs: tuple[Point, ...]
    pair_knee: Knee
    curve: tuple[Point, ...]
    budget_knee: Knee

    @property
    def chosen(self) -> Point:
        return self.curve[self.budget_knee.chosen]


@dataclass(frozen=True)
class LayerPoint:
    """One layer recalled alone with the chosen clusters and budget; losses per question."""

    layer: int
    losses: tuple[float, ...]


@dataclass(frozen=True)
class LayerCheck:
    """The same recall in every layer (``even``) against budgets by layer, on the same questions."""

    even: Point
    by_layer: Point

    @property
    def gain(self) -> float:
        """How much lower the mean loss is by layer."""
        return self.even.loss - self.by_layer.loss

    @property
    def error(self) -> float:
        """Standard error of `gain`."""
        return self.even.error_to(self.by_layer)

    @property
    def kept(self) -> bool:
        return self.gain > self.error


def choose(grid: Sequence[Point]) -> Choice:
    """Clusters and codec first, at the largest budget, then the budget: steps 2 and 3 of the rule."""
    largest = max(point.budget for point in grid)
    pairs = sorted((p for p in grid if p.budget == largest), key=lambda p: (p.resident + p.disk, p.loss))
    pair_knee = _knee([p.resident + p.disk for p in pairs], pairs)
    pair = pairs[pair_knee.chosen].pair
    curve = sorted((p for p in grid if p.pair == pair), key=lambda p: p.budget)
    return Choice(tuple(pairs), pair_knee, tuple(curve), _knee([p.read for p in curve], curve))


def layer_budgets(recipe: Recipe, layers: Sequence[LayerPoint]) -> Recipe | None:
    """The same recall in all, moved to the layers that lose most; None for fewer than `MIN_LAYERS`."""
    if len(layers) < MIN_LAYERS:
        return None
    worst_first = sorted(layers, key=lambda point: -fmean(point.losses))
    n_more = len(layers) // 4
    budget = recipe.recall.budget
    budgets = {str(point.layer): 2 * budget for point in worst_first[:n_more]}
    budgets |= {str(point.layer): max(1, budget // 2) for point in worst_first[-2 * n_more :]}
    return dataclasses.replace(recipe, recall=dataclasses.replace(recipe.recall, layer_budgets=budgets))


def codec_name(recipe: Recipe) -> str:
    """The codec of a recipe as a sweep names it."""
    key, value = recipe.key_codec, recipe.value_codec
    return key if key == value else f"{key}/{value}"


def point_name(tokens_per_cluster: int, codec: str, budget: int) -> str:
    return f"{tokens_per_cluster} per cluster, {codec}, budget {budget}"


def check_questions(n_asked: int) -> None:
    """Refuse fewer questions than the standard error of a difference needs."""
    if n_asked < 2:
        raise ConfigError(f"calibrate: {n_asked} question in all; the rule needs at least 2, and more tell more")


def _knee(costs: Sequence[float], points: Sequence[Point]) -> Knee:
    """The knee over `points` in ascending order of cost; equal costs are told apart by the smallest difference."""
    rising: list[float] = []
    for cost in costs:
        rising.append(cost if not rising or cost > rising[-1] else rising[-1] * (1 + 1e-9))
    return find_knee(rising, [point.losses for point in points])
