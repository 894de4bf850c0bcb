"""How an archive is built and recalled: frozen, validated configurations that round-trip to TOML and JSON.

The recipe decides the bytes of an archive; the recall policy kept beside it decides how much of it is read.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ragkv.errors import ConfigError

CODEC_BITS: Mapping[str, float] = {"int8": 8, "int4": 4, "int3": 3, "int2.5": 2.5, "int2": 2}
"""Mean bits per number of each lossy codec; the scale of a token takes one byte more."""

CODECS = ("lossless", *CODEC_BITS)
EXACT_CODECS = ("lossless", "int8")
_TENSOR_CODECS = ("key_codec", "value_codec")
_MOST_PROTOTYPE_BITS = 8


QUESTION_SHARE = 1.5
"""Question tokens are read once and shape all that follows: they recall this many times what an answer token does."""

EVERYTHING = 1 << 40

LARGEST = (1 << 63) - 1
"""The largest whole number that a manifest can hold."""


@dataclass(frozen=True)
class Limit:
    """What one query token recalls per KV head: whole clusters, in order of what they are worth.

    Clusters are taken while they begin below ``tokens`` tokens and are among the first ``clusters``. With ``mass``,
    taking also ends as soon as that share of the attention is exact, but not before ``floor`` tokens.
    """

    tokens: int = EVERYTHING
    clusters: int | None = None
    mass: float | None = None
    floor: int = 0

    def candidates(self, n_clusters: int) -> int:
        """The most clusters that can be taken: a cluster has at least one token."""
        return min(n_clusters, self.tokens, self.clusters or n_clusters)


@dataclass(frozen=True, kw_only=True)
class RecallPolicy:
    """What is recalled of an archive; the table ``[recall]`` of a recipe file.

    Parameters
    ----------
    budget
        Archived tokens recalled per KV head and answer token. Counts unless `top_m` or `mass` is given.
    top_m
        Clusters recalled per KV head and answer token, instead of a number of tokens.
    mass
        Recall until this share of the attention (0 to 1) is exact by the prototypes' estimate, instead of a fixed
        number: at least `floor` tokens, at most `cap`. Spends more on diffuse heads; a dial of quality, not a saving.
    floor, cap
        Tokens per KV head and answer token, with `mass` only.
    dense_layers
        Layers that attend to every token, decoded into memory on first use. All but one layer here is the way to
        pilot recall.
    layer_budgets
        Layer index (as text, since TOML keys are) to a budget of its own.
    """

    budget: int = 256
    top_m: int | None = None
    mass: float | None = None
    floor: int = 64
    cap: int = 1024
    dense_layers: tuple[int, ...] = ()
    layer_budgets: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("budget", "top_m", "floor", "cap"):
            value = getattr(self, name)
            if value is None and name == "top_m":
                continue
            check_whole(f"recall: {name}", value, 1)
        if self.mass is not None and not _share(self.mass):
            raise ConfigError(f"recall: mass is {self.mass!r}; give a share of the attention above 0 and up to 1")
        if self.top_m is not None and self.mass is not None:
            raise ConfigError("recall: top_m and mass are both given; choose one")
        if self.floor > self.cap:
            raise ConfigError(
                f"recall: floor is {self.floor} and cap is {self.cap}; the floor must not be above the cap"
            )
        listed = isinstance(self.dense_layers, Sequence) and not isinstance(self.dense_layers, str | bytes)
        if not listed or not all(_whole(layer, 0) for layer in self.dense_layers):
            shown = list(self.dense_layers) if listed else self.dense_layers
            raise ConfigError(f"recall: dense_layers is {shown!r}; give layer numbers from 0, as a list")
        if not isinstance(self.layer_budgets, Mapping):
            raise ConfigError(f"recall: layer_budgets is {self.layer_budgets!r}; give a table of layer numbers")
        for layer, budget in self.layer_budgets.items():
            if not is_layer(layer) or not _whole(budget, 1):
                raise ConfigError(
                    f"recall: layer_budgets has {layer!r} = {budget!r}; give layer numbers and budgets of at least 1"
                )
        if self.layer_budgets and (self.top_m is not None or self.mass is not None):
            raise ConfigError("recall: layer_budgets count tokens and go with budget, not with top_m or mass")
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
        budgets = {str(int(layer)): budget for layer, budget in self.layer_budgets.items()}
        if len(budgets) < len(self.layer_budgets):
            raise ConfigError(f"recall: layer_budgets names a layer twice: {', '.join(map(str, self.layer_budgets))}")
        object.__setattr__(self, "layer_budgets", budgets)

    def limit(self, layer: int, *, question: bool) -> Limit:
        """What a token recalls in `layer`; a question token takes `QUESTION_SHARE` times as much."""

        def scaled(count: int) -> int:
            return min(int(count * QUESTION_SHARE) if question else count, EVERYTHING)

        if self.mass is not None:
            return Limit(tokens=scaled(self.cap), mass=self.mass, floor=scaled(self.floor))
        if self.top_m is not None:
            return Limit(clusters=scaled(self.top_m))
        return Limit(tokens=scaled(self.layer_budgets.get(str(layer), self.budget)))

    def with_budget(self, budget: int) -> RecallPolicy:
        """The same policy with a number of tokens for every layer."""
        return dataclasses.replace(self, budget=budget, top_m=None, mass=None, layer_budgets={})

    def check_layers(self, n_layers: int) -> None:
        """Refuse layers that the model does not have."""
        for layer in (*self.dense_layers, *map(int, self.layer_budgets)):
            if layer >= n_layers:
                raise ConfigError(f"recall: there is no layer {layer}; the model has layers 0 to {n_layers - 1}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RecallPolicy:
        """Build a policy from plain values; unknown keys are refused."""
        _check_keys("recall", values, [each.name for each in dataclasses.fields(cls)])
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; what is not given is left out."""
        values = dataclasses.asdict(self)
        values["dense_layers"] = list(self.dense_layers)
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The choices that decide the bytes of an archive, and how it is recalled unless a request says otherwise.

    Parameters
    ----------
    tokens_per_cluster
        Mean number of document tokens in a cluster; 4 is the measured default (docs/evaluation.md).
    kmeans_iterations
        Lloyd iterations per layer and KV head.
    segment_tokens
        Tokens are clustered in runs of about this many, so that clustering time grows linearly with the document.
    sink_tokens
        The first tokens of the prompt that are always attended exactly, when the prefix has fewer.
    window_tokens
        The last tokens of the document that are always attended exactly.
    exact_codec
        How tokens that are always attended exactly are stored: ``int8``, a byte for each number, or ``lossless``.
        Those of a tensor whose codec is ``lossless`` are lossless in any case.
    key_codec, value_codec
        How the keys and values of archived tokens are stored: ``lossless`` keeps the bits of the model's dtype, the
        others take 8, 4, 3, 2.5 or 2 bits per number on average.
    layer_codecs
        Layer index (as text) to ``{key_codec = ..., value_codec = ...}`` of its own; either may be left out.
    key_prototype_bits, value_prototype_bits
        Bits per number, 1 to 8, of centroids and mean values, which stay in memory.
    recall
        What is recalled by default; changes no byte of keys and values.
    """

    tokens_per_cluster: int = 4
    kmeans_iterations: int = 5
    segment_tokens: int = 8192
    sink_tokens: int = 16
    window_tokens: int = 64
    exact_codec: str = "int8"
    key_codec: str = "int3"
    value_codec: str = "int2.5"
    layer_codecs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    key_prototype_bits: int = 4
    value_prototype_bits: int = 2
    recall: RecallPolicy = field(default_factory=RecallPolicy)

    def __post_init__(self) -> None:
        for name, low in (
            ("tokens_per_cluster", 1),
            ("kmeans_iterations", 0),
            ("segment_tokens", 1),
            ("sink_tokens", 0),
            ("window_tokens", 1),
            ("key_prototype_bits", 1),
            ("value_prototype_bits", 1),
        ):
            check_whole(f"recipe: {name}", getattr(self, name), low)
        for name in ("key_prototype_bits", "value_prototype_bits"):
            if getattr(self, name) > _MOST_PROTOTYPE_BITS:
                raise ConfigError(f"recipe: {name} is {getattr(self, name)}; give 1 to {_MOST_PROTOTYPE_BITS}")
        for name, allowed in (("exact_codec", EXACT_CODECS), ("key_codec", CODECS), ("value_codec", CODECS)):
            _check_choice(name, getattr(self, name), allowed)
        if not isinstance(self.recall, RecallPolicy):
            raise ConfigError(f"recipe: recall is {self.recall!r}; give a RecallPolicy, or use Recipe.from_dict")
        if not isinstance(self.layer_codecs, Mapping):
            raise ConfigError(f"recipe: layer_codecs is {self.layer_codecs!r}; give a table of layer numbers")
        for layer, own in self.layer_codecs.items():
            if not is_layer(layer) or not isinstance(own, Mapping) or not set(own) <= set(_TENSOR_CODECS):
                raise ConfigError(
                    f"recipe: layer_codecs has {layer!r} = {own!r}; give a layer number and key_codec, value_codec"
                )
            for name, value in own.items():
                _check_choice(f"layer_codecs.{layer}.{name}", value, CODECS)
        if len({int(layer) for layer in self.layer_codecs}) < len(self.layer_codecs):
            raise ConfigError(f"recipe: layer_codecs names a layer twice: {', '.join(map(str, self.layer_codecs))}")
        own_codecs = {str(int(layer)): dict(own) for layer, own in self.layer_codecs.items() if own}
        object.__setattr__(self, "layer_codecs", own_codecs)

    def codecs(self, layer: int) -> tuple[str, str]:
        """Codec of keys and codec of values in `layer`."""
        own = self.layer_codecs.get(str(layer), {})
        return own.get("key_codec", self.key_codec), own.get("value_codec", self.value_codec)

    def exact_codecs(self, layer: int) -> tuple[str, str]:
        """How the keys and the values of exact tokens of `layer` are stored."""
        key, value = ("lossless" if codec == "lossless" else self.exact_codec for codec in self.codecs(layer))
        return key, value

    def identity(self) -> dict[str, Any]:
        """What decides an archive's bytes, as plain values: everything but what is recalled by default."""
        return {name: value for name, value in self.to_dict().items() if name != "recall"}

    def check_layers(self, n_layers: int) -> None:
        """Refuse layers that the model does not have."""
        for layer in map(int, self.layer_codecs):
            if layer >= n_layers:
                raise ConfigError(f"recipe: there is no layer {layer}; the model has layers 0 to {n_layers - 1}")
        self.recall.check_layers(n_layers)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """Build a recipe from plain values; unknown keys are refused."""
        _check_keys("recipe", values, sorted(each.name for each in dataclasses.fields(cls)))
        recall = values.get("recall", {})
        if not isinstance(recall, Mapping):
            raise ConfigError(f"recipe: recall is {recall!r}; give a table, [recall]")
        return cls(**{**values, "recall": RecallPolicy.from_dict(recall)})

    @classmethod
    def from_toml(cls, path: str | Path) -> Recipe:
        """Read a recipe file: a TOML table of the parameters above, with `recall` as the table ``[recall]``."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"recipe file {str(path)!r} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"recipe file {str(path)!r} is not UTF-8 text") from error
        try:
            values = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # also numbers of more digits than Python reads
            raise ConfigError(f"recipe file {str(path)!r} is not valid TOML: {error}") from error
        return cls.from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "recall": self.recall.to_dict()}

    def to_toml(self) -> str:
        """The recipe as TOML text that `from_toml` reads back to an equal recipe."""
        return "\n".join(_toml_lines(self.to_dict(), "")) + "\n"


def _check_keys(where: str, values: object, known: Sequence[str]) -> None:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} is {values!r}; give a table of {', '.join(known)}")
    unknown = sorted(map(repr, set(values) - set(known)))
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]}; known are {', '.join(known)}")


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"recipe: {name} is {value!r}; give one of {', '.join(allowed)}")


def _toml_lines(values: Mapping[str, Any], table: str) -> list[str]:
    """Plain keys first, then a table for each mapping that is not empty."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items() if not isinstance(value, Mapping)]
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            path = f"{table}.{name}" if table else name
            inner = _toml_lines(value, path)
            has_own_keys = any(not isinstance(each, Mapping) for each in value.values())
            lines += ["", f"[{path}]", *inner] if has_own_keys else inner
    return lines


def check_whole(name: str, value: object, low: int) -> None:
    """Refuse what is not a whole number from `low` to `LARGEST`.

    Raises
    ------
    ConfigError
        That begins with `name`.
    """
    if isinstance(value, int) and value > LARGEST:  # not shown: Python refuses to print numbers of many digits
        raise ConfigError(f"{name} is too large; give at most 2^63 - 1")
    if not _whole(value, low):
        raise ConfigError(f"{name} is {value!r}; give a whole number of at least {low}")


def is_layer(name: object) -> bool:
    """Whether `name`, a key of a table, is a layer number in decimal."""
    return re.fullmatch("[0-9]{1,9}", str(name)) is not None


def _share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


def _whole(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= LARGEST
