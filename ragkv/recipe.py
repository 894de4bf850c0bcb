"""How an archive is built: one frozen, validated configuration that round-trips to TOML and JSON."""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragkv.errors import ConfigError

CLUSTERERS = ("auto", "torch", "faiss")
CODECS = ("lossless",)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The choices that decide the bytes of an archive.

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
    codec
        How keys and values are stored; ``lossless`` keeps the bits of the model's dtype.
    """

    tokens_per_cluster: int = 8
    kmeans_iterations: int = 5
    segment_tokens: int = 8192
    clusterer: str = "auto"
    seed: int = 0
    sink_tokens: int = 16
    window_tokens: int = 64
    codec: str = "lossless"

    def __post_init__(self) -> None:
        for name, low in (
            ("tokens_per_cluster", 1),
            ("kmeans_iterations", 0),
            ("segment_tokens", 1),
            ("seed", 0),
            ("sink_tokens", 0),
            ("window_tokens", 1),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ConfigError(f"recipe: {name} is {value!r}; give a whole number of at least {low}")
        for name, allowed in (("clusterer", CLUSTERERS), ("codec", CODECS)):
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"recipe: {name} is {value!r}; give one of {', '.join(allowed)}")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Recipe:
        """Build a recipe from plain values; unknown keys are refused."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"recipe: unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}")
        return cls(**values)

    @classmethod
    def from_toml(cls, path: str | Path) -> Recipe:
        """Read a recipe file: a TOML table of the parameters above."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"recipe file {str(path)!r} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"recipe file {str(path)!r} is not UTF-8 text") from error
        try:
            return cls.from_dict(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"recipe file {str(path)!r} is not valid TOML: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_toml(self) -> str:
        """The recipe as TOML text that `from_toml` reads back to an equal recipe."""
        lines = []
        for name, value in self.to_dict().items():
            lines.append(f'{name} = "{value}"' if isinstance(value, str) else f"{name} = {value}")
        return "\n".join(lines) + "\n"
