"""A recipe of the wrong kinds is one clear sentence, in Python as in a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from ragkv import RecallPolicy, Recipe
from ragkv.errors import ConfigError

WRONG = (None, True, 5, 2.5, "x", b"x", [], [1.5], ["1"], {}, {"x": 1}, {1: "x"}, {1}, object(), RecallPolicy, range(3))
"""A value of each kind; the few of them that a field takes are left out below."""

TAKEN: dict[str, Callable[[Any], bool]] = {
    "dense_layers": lambda value: value == [] or isinstance(value, range),
    "layer_budgets": lambda value: value == {},
    "layer_codecs": lambda value: value == {},
    "mass": lambda value: value is None,
    "top_m": lambda value: value is None or (isinstance(value, int) and value is not True),
}


def kinds(cls: type) -> list[tuple[str, object]]:
    def whole(value: object) -> bool:
        return value == 5 and isinstance(value, int)

    return [
        (each.name, value)
        for each in dataclasses.fields(cls)
        for value in WRONG
        if not TAKEN.get(each.name, whole if isinstance(each.default, int) else lambda _: False)(value)
    ]


@pytest.mark.parametrize(("name", "value"), kinds(RecallPolicy))
@pytest.mark.parametrize("make", [RecallPolicy, lambda **values: RecallPolicy.from_dict(values)])
def test_a_policy_of_the_wrong_kind(make: Callable[..., object], name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^recall: {name} ") as raised:
        make(**{name: value})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("name", "value"), kinds(Recipe))
def test_a_recipe_of_the_wrong_kind(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^recipe: {name} ") as raised:
        Recipe(**{name: value})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("values", [None, 5, "budget", ["budget"], {5: 5, "x": 5}, {None: 1, 2: 2}])
@pytest.mark.parametrize("cls", [RecallPolicy, Recipe])
def test_what_is_no_table_of_known_keys(cls: type[RecallPolicy | Recipe], values: Any) -> None:
    with pytest.raises(ConfigError, match=r"^(recall|recipe)(:| is) ") as raised:
        cls.from_dict(values)
    assert "\n" not in str(raised.value)
