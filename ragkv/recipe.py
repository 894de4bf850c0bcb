"""How an archive is built and recalled: one frozen, validated configuration that round-trips to TOML and JSON."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ragkv.errors import ConfigError
from ragkv.policy import RecallPolicy, check_whole, is_layer

CLUSTERERS = ("auto", "torch", "faiss")
CODEC_BITS = {"int8": 8, "int4": 4, "int3": 3, "int2": 2}
"""Mean bits per number of each lossy codec; the scale of a token takes one byte more."""

CODECS = ("lossless", *CODEC_BITS)
_TENSOR_CODECS = ("key_codec", "value_codec")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The choices that decide the bytes of an archive, and how it is recalled unless a request says otherwise.

    Parameters
    ----------
    tokens_per_cluster
        Mean number of document tokens in a cluster; 8 is the measured default.
    kmeans_iterations
        Lloyd iterations per layer and KV head.
    segment_tokens
        Tokens are clustered in runs of about this many, so that clustering time grows linearly with the document.
    clusterer
        ``torch`` (all heads of a layer in one batched product), ``faiss`` (one head after another), or ``auto``:
        FAISS only where a segment has more than 16,384 clusters.
    seed
        Seeds every draw of the build.
    sink_tokens
        The first tokens of the prompt that are always attended exactly, when the prefix has fewer.
    window_tokens
        The last tokens of the document that are always attended exactly.
    key_codec, value_codec
        How the keys and values of archived tokens are stored: ``lossless`` keeps the bits of the model's dtype, the
        others take 8, 4, 3 or 2 bits per number on average. Tokens that are always attended exactly stay lossless.
    layer_codecs
        Layer index (as text) to ``{key_codec = ..., value_codec = ...}`` of its own; either may be left out.
    recall
        What is recalled by default.
    """

    tokens_per_cluster: int = 8
    kmeans_iterations: int = 5
    segment_tokens: int = 8192
    clusterer: str = "auto"
    seed: int = 0
    sink_tokens: int = 16
    window_tokens: int = 64
    key_codec: str = "int3"
    value_codec: str = "int3"
    layer_codecs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    recall: RecallPolicy = field(default_factory=RecallPolicy)

    def __post_init__(self) -> None:
        for name, low in (
            ("tokens_per_cluster", 1),
            ("kmeans_iterations", 0),
            ("segment_tokens", 1),
            ("seed", 0),
            ("sink_tokens", 0),
            ("window_tokens", 1),
        ):
            check_whole(f"recipe: {name}", getattr(self, name), low)
        for name, allowed in (("clusterer", CLUSTERERS), ("key_codec", CODECS), ("value_codec", CODECS)):
            _check_choice(name, getattr(self, name), allowed)
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

    def check_layers(self, n_layers: int) -> None:
        """Refuse layers that the model does not have."""
        for layer in map(int, self.layer_codecs):
            if layer >= n_layers:
                raise ConfigError(f"recipe: there is no layer {layer}; the model has layers 0 to {n_layers - 1}")
        self.recall.check_layers(n_layers)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """Build a recipe from plain values; unknown keys are refused."""
        known = {each.name for each in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"recipe: unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}")
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
