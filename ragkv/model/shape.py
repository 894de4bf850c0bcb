"""What an attention cache looks like for a model, read from its configuration alone.

No weights are loaded here. A model whose cache cannot be archived exactly is refused with one sentence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from ragkv.errors import ConfigError, UnsupportedModelError

SUPPORTED_MODEL_TYPES = (
    "gemma2",
    "gemma3_text",
    "glm",
    "gpt_oss",
    "llama",
    "mistral",
    "phi3",
    "qwen2",
    "qwen3",
)
"""``config.model_type`` values whose exactness against dense attention is part of the test matrix."""

LARGEST_NUMBER = 1e15
"""Keys and values beyond it are not archived: sums of their squares over a long document would not fit float32."""

STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
LENGTH_DEPENDENT_ROPE_TYPES = ("dynamic", "longrope")

DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}
"""Number formats that models are loaded and archived in, by the names that may be given for them."""

DTYPE_NAMES = tuple(name for name, dtype in DTYPES.items() if str(dtype) == f"torch.{name}")
"""Their names as files write them."""


@dataclass(frozen=True)
class LayerShape:
    """The cache of one decoder layer.

    ``window`` is None for a global layer, else the number of tokens (itself included) that a query token sees.
    """

    index: int
    window: int | None
    n_kv_heads: int
    head_dim: int

    @property
    def is_global(self) -> bool:
        return self.window is None

    def cached_tokens(self, n_tokens: int) -> int:
        """Tokens a cache must hold for the next query token after `n_tokens` (source: transformers' dynamic cache)."""
        return n_tokens if self.window is None else min(n_tokens, self.window - 1)


@dataclass(frozen=True)
class ModelShape:
    """Everything about a model that decides the size and the handling of its KV cache.

    ``max_positions`` is the context length of the configuration; ``static_positions`` is the length beyond which
    a length-dependent RoPE changes its frequencies (None when the RoPE is static).
    """

    model_type: str
    layers: tuple[LayerShape, ...]
    n_query_heads: int
    max_positions: int | None
    static_positions: int | None
    rope_parameters: dict[str, Any]

    @property
    def global_layers(self) -> tuple[LayerShape, ...]:
        return tuple(layer for layer in self.layers if layer.is_global)

    @property
    def sliding_layers(self) -> tuple[LayerShape, ...]:
        return tuple(layer for layer in self.layers if not layer.is_global)


def model_shape(config: PreTrainedConfig) -> ModelShape:
    """Describe the KV cache of `config`, or refuse it.

    Raises
    ------
    UnsupportedModelError
        For multi-head latent attention, KV shared between layers, linear or chunked attention, and any
        ``model_type`` that is not in `SUPPORTED_MODEL_TYPES`.
    """
    config = config.get_text_config(decoder=True)
    _refuse_unsupported(config)
    n_query_heads = int(config.num_attention_heads)
    n_kv_heads = int(getattr(config, "num_key_value_heads", None) or n_query_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // n_query_heads)
    layers = tuple(
        LayerShape(index=index, window=window, n_kv_heads=n_kv_heads, head_dim=head_dim)
        for index, window in enumerate(_layer_windows(config))
    )
    rope = dict(getattr(config, "rope_parameters", None) or {})
    return ModelShape(
        model_type=config.model_type,
        layers=layers,
        n_query_heads=n_query_heads,
        max_positions=getattr(config, "max_position_embeddings", None),
        static_positions=_static_positions(config, rope),
        rope_parameters=rope,
    )


def check_length(shape: ModelShape, n_positions: int) -> None:
    """Refuse `n_positions` positions when a length-dependent RoPE would change its frequencies.

    Raises
    ------
    UnsupportedModelError
        If `n_positions` is beyond the original length of a ``dynamic`` or ``longrope`` RoPE.
    """
    limit = shape.static_positions
    if limit is not None and n_positions > limit:
        kinds = sorted({p["rope_type"] for p in _rope_entries(shape.rope_parameters)})
        raise UnsupportedModelError(
            f"RoPE type {'/'.join(kinds)} changes its frequencies beyond {limit} positions and {n_positions} were "
            f"asked for: archived keys would be wrong; keep prefix, document, question and answer within {limit}"
        )


def dtype_bytes(name: str) -> int:
    """Bytes of one value of the dtype called `name`.

    Raises
    ------
    ConfigError
        If `name` is not a key of `DTYPES`.
    """
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}; give one of {', '.join(DTYPES)}")
    return DTYPES[name].itemsize


def _refuse_unsupported(config: PreTrainedConfig) -> None:
    name = config.model_type
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModelError(f"model type {name!r} uses multi-head latent attention, which is not supported")
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModelError(f"model type {name!r} shares KV between layers, which is not supported")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise UnsupportedModelError(
            f"model type {name!r} has {', '.join(sorted(kinds))} layers; only full and sliding attention are supported"
        )
    if name not in SUPPORTED_MODEL_TYPES:
        raise UnsupportedModelError(
            f"model type {name!r} is not supported; supported are {', '.join(SUPPORTED_MODEL_TYPES)}"
        )


def _layer_windows(config: PreTrainedConfig) -> list[int | None]:
    n_layers = int(config.num_hidden_layers)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["full_attention" if window is None else "sliding_attention"] * n_layers
    return [int(window) if kind == "sliding_attention" and window is not None else None for kind in kinds[:n_layers]]


def _rope_entries(rope_parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry per layer type for hybrid models, else a single one."""
    if "rope_type" in rope_parameters:
        return [rope_parameters]
    return [entry for entry in rope_parameters.values() if isinstance(entry, dict) and "rope_type" in entry]


def _static_positions(config: PreTrainedConfig, rope_parameters: dict[str, Any]) -> int | None:
    limits = []
    for entry in _rope_entries(rope_parameters):
        kind = entry["rope_type"]
        if kind in STATIC_ROPE_TYPES:
            continue
        if kind not in LENGTH_DEPENDENT_ROPE_TYPES:
            raise UnsupportedModelError(
                f"RoPE type {kind!r} is not supported; supported are "
                f"{', '.join(STATIC_ROPE_TYPES + LENGTH_DEPENDENT_ROPE_TYPES)}"
            )
        original = entry.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        limits.append(int(original or config.max_position_embeddings))
    return min(limits) if limits else None
