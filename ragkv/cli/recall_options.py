"""The options of commands that recall: what is recalled, from a recipe file, an archive's own recipe, or the line."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from ragkv.errors import ConfigError
from ragkv.policy import RecallPolicy
from ragkv.recipe import Recipe

BudgetOption = Annotated[
    int | None,
    typer.Option(help="Archived tokens recalled per KV head and answer token. [default: the recipe's, or 256]"),
]
TopMOption = Annotated[int | None, typer.Option(help="Clusters recalled, instead of a budget of tokens.")]
MassOption = Annotated[
    float | None,
    typer.Option(help="Recall until this share (0 to 1) of the attention is exact, within the recipe's floor and cap."),
]
PilotOption = Annotated[
    list[int] | None,
    typer.Option(help="Recall in this layer only and keep all others dense; repeat for more layers."),
]


def choose_policy(
    default: RecallPolicy,
    n_layers: int,
    *,
    recipe: Path | None,
    budget: int | None,
    top_m: int | None,
    mass: float | None,
    pilot: list[int] | None,
) -> RecallPolicy:
    """`default`, or the policy of a recipe file, with what the command line says in its place."""
    given = [name for name, value in (("--budget", budget), ("--top-m", top_m), ("--mass", mass)) if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are given; choose one")
    policy = Recipe.from_toml(recipe).recall if recipe else default
    if budget is not None:
        policy = policy.with_budget(budget)
    elif given:
        policy = dataclasses.replace(policy, top_m=top_m, mass=mass, layer_budgets={})
    if pilot:
        dataclasses.replace(policy, dense_layers=tuple(pilot)).check_layers(n_layers)
        policy = dataclasses.replace(
            policy, dense_layers=tuple(layer for layer in range(n_layers) if layer not in pilot)
        )
    policy.check_layers(n_layers)
    return policy
