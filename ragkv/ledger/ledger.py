"""What a KV cache costs in bytes, dense and archived, computed from a configuration alone.

The rule of the dense cache is the textbook one: 2 (keys and values) x layers x KV heads x head dimension x bytes per
value x tokens. Nothing is loaded: weights are counted on the meta device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedConfig

from ragkv.errors import ConfigError, UnsupportedModelError
from ragkv.model.shape import LayerShape
from ragkv.recipe import CODEC_BITS, Recipe

# In memory per cluster and KV head, beside its codes: a size, an address, and measures of spread.
CLUSTER_TABLE_BYTES = 1 + 4 + 10
# On disk per archived token and KV head: the token's position, packed; per cluster: a length, a size, and the spreads.
POSITION_BYTES = 2
CLUSTER_ROW_BYTES = 4 + 1 + 10
# Of each token, once: in memory the position where a layer keeps it exactly, on disk its id and its characters.
EXACT_POSITION_BYTES = 8
TOKEN_BYTES = 12
# Headers, footers and checksums of the files of an archive with clusters.
HEADER_BYTES = 8192
# Share of the coefficients of a transform that is stored: some get no bits, unless each may have eight.
KEPT_SHARE = 15 / 16
# An exact token's key or value in a byte a number has a scale of four bytes.
EXACT_SCALE_BYTES = 4
# Axes along which the spread of clusters is kept, 2 bytes a number; see ragkv.archive.transforms.
N_AXES = 8
# Rule of thumb: below this share of total memory, shrinking the KV cache changes little.
KV_SHARE_WORTH = 1 / 3

_SIZE_UNITS = {"": 2**30, "B": 1}
_SIZE_UNITS |= {f"{prefix}IB": 2 ** (10 * power) for power, prefix in enumerate("KMGT", start=1)}
_SIZE_UNITS |= {f"{prefix}B": 10 ** (3 * power) for power, prefix in enumerate("KMGT", start=1)}


@dataclass(frozen=True)
class KVBytes:
    """The dense cache: `logical` is what each layer needs, `allocated` what a cache that ignores windows takes."""

    logical: int
    allocated: int


@dataclass(frozen=True)
class ArchiveBytes:
    """An archive: clusters per global layer and KV head, bytes that stay resident, bytes on disk."""

    n_clusters: int
    resident: int
    on_disk: int


@dataclass(frozen=True, kw_only=True)
class LedgerRow:
    """The account at one context length, in bytes; ``weights`` and ``gpu_memory`` are None when unknown.

    Activations, and the tokens recalled for the step at hand, are not counted.
    """

    n_tokens: int
    kv: KVBytes
    archive: ArchiveBytes
    weights: int | None
    gpu_memory: int | None

    @property
    def kv_share(self) -> float | None:
        """Dense KV over KV and weights together."""
        return None if self.weights is None else self.kv.logical / (self.kv.logical + self.weights)

    @property
    def gpu_share(self) -> float | None:
        """Dense KV over the memory of the card."""
        return None if self.gpu_memory is None else self.kv.logical / self.gpu_memory

    @property
    def fits(self) -> bool | None:
        """Whether weights and dense KV fit the card; None when that cannot be told."""
        return self._fits(self.kv.logical)

    @property
    def archive_fits(self) -> bool | None:
        """Whether weights and the resident part of the archive fit the card; None when that cannot be told."""
        return self._fits(self.archive.resident)

    @property
    def worth_it(self) -> bool | None:
        """Whether `kv_share` is over `KV_SHARE_WORTH`; None when the weights are unknown."""
        return None if self.kv_share is None else self.kv_share > KV_SHARE_WORTH

    @property
    def verdict(self) -> str:
        """The rule of thumb as one sentence, or what is missing to apply it."""
        if self.kv_share is None:
            missing = "the weights are unknown, so the KV share of total memory is too: name a model to get it."
            if self.gpu_share is None:
                return f"T{missing[1:]}"
            return f"KV is {self.gpu_share:.1%} of the card at {self.n_tokens} tokens; {missing}"
        lead = f"KV is {self.kv_share:.1%} of total memory at {self.n_tokens} tokens"
        if self.worth_it:
            return f"{lead}, over a third: an archive is worth it."
        if self.fits is False and self.archive_fits:
            return f"{lead}, not over a third: an archive saves little, but only with it does the model fit the card."
        return f"{lead}, not over a third: an archive saves little."

    def _fits(self, kv: int) -> bool | None:
        if self.gpu_memory is None:
            return None
        if self.weights is None:
            return False if kv > self.gpu_memory else None
        return kv + self.weights <= self.gpu_memory


def parse_size(text: str) -> int:
    """Bytes of a size such as ``24GiB`` (binary), ``24GB`` (decimal) or ``24`` (GiB); case does not matter.

    Raises
    ------
    ConfigError
        If `text` is not a positive number with one of the units B, KB, KiB, MB, MiB, GB, GiB, TB, TiB.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text, re.ASCII | re.IGNORECASE)
    unit = _SIZE_UNITS.get(match[2].upper()) if match else None
    n_bytes = int(float(match[1]) * unit) if match and unit else 0
    if n_bytes < 1:
        raise ConfigError(f"size is {text!r}; give a positive number with a unit, such as 24GiB or 24GB (24 means GiB)")
    return n_bytes


def plain_layers(*, n_layers: int, n_kv_heads: int, head_dim: int) -> tuple[LayerShape, ...]:
    """Global layers from three numbers, for a model that has no configuration at hand.

    Raises
    ------
    ConfigError
        If a number is below 1.
    """
    for name, value in (("layers", n_layers), ("KV heads", n_kv_heads), ("head dimension", head_dim)):
        _check_count(name, value)
    return tuple(
        LayerShape(index=index, window=None, n_kv_heads=n_kv_heads, head_dim=head_dim) for index in range(n_layers)
    )


def kv_bytes_per_token(layers: Sequence[LayerShape], *, value_bytes: int, batch: int = 1) -> int:
    """Bytes that one more token adds to a dense cache, while no sliding window is full."""
    return batch * sum(_token_bytes(layer, value_bytes) * layer.n_kv_heads for layer in layers)


def kv_bytes(layers: Sequence[LayerShape], n_tokens: int, *, value_bytes: int, batch: int = 1) -> KVBytes:
    """Bytes of the dense cache of `n_tokens` tokens, for `batch` sequences of that length.

    A sliding layer needs the last ``window - 1`` tokens only (source: transformers' dynamic cache).

    Raises
    ------
    ConfigError
        If `n_tokens` or `batch` is below 1.
    """
    _check_count("tokens", n_tokens)
    _check_count("batch", batch)
    logical = sum(
        layer.cached_tokens(n_tokens) * layer.n_kv_heads * _token_bytes(layer, value_bytes) for layer in layers
    )
    allocated = n_tokens * kv_bytes_per_token(layers, value_bytes=value_bytes)
    return KVBytes(logical=batch * logical, allocated=batch * allocated)


def archive_bytes(
    layers: Sequence[LayerShape], n_tokens: int, *, value_bytes: int, recipe: Recipe, batch: int = 1
) -> ArchiveBytes:
    """Bytes of an archive of `n_tokens` tokens, for `batch` different documents of that length.

    Per global layer and KV head, the sink tokens and the local window stay exact and the rest is clustered. Resident
    are the coded prototypes (with `CLUSTER_TABLE_BYTES` each), the exact tokens and the transforms; on disk are the
    archived keys and values as the recipe codes them, with `POSITION_BYTES` each, the prototypes with
    `CLUSTER_ROW_BYTES`, the transforms, the exact tokens, and `TOKEN_BYTES` of each token. Sliding layers keep what
    they cache in both places. The rounding of clusters to segments, and a prefix of more than the sink tokens, are not
    counted. Archives of a catalog share their transforms: `transforms_bytes` says what each is spared.

    Raises
    ------
    ConfigError
        If `n_tokens` or `batch` is below 1.
    """
    _check_count("tokens", n_tokens)
    _check_count("batch", batch)
    n_exact = min(n_tokens, recipe.sink_tokens + recipe.window_tokens)
    n_archived = n_tokens - n_exact
    n_clusters = -(-n_archived // recipe.tokens_per_cluster)
    resident, on_disk = 0, TOKEN_BYTES * n_tokens
    for layer in layers:
        token = _token_bytes(layer, value_bytes)
        resident += EXACT_POSITION_BYTES * (n_exact if layer.is_global else layer.cached_tokens(n_tokens))
        if not layer.is_global:
            n_cached = layer.cached_tokens(n_tokens)
            resident += layer.n_kv_heads * n_cached * token
            on_disk += layer.n_kv_heads * n_cached * _exact_bytes(layer, recipe, value_bytes)
            continue
        on_disk += layer.n_kv_heads * n_exact * _exact_bytes(layer, recipe, value_bytes)
        resident += layer.n_kv_heads * n_exact * token
        if n_archived:
            prototype = _prototype_bytes(layer, recipe)
            resident += layer.n_kv_heads * n_clusters * (prototype + CLUSTER_TABLE_BYTES)
            row = _row_bytes(layer, recipe, value_bytes)
            on_disk += layer.n_kv_heads * (n_archived * row + n_clusters * (prototype + CLUSTER_ROW_BYTES))
    if n_archived:
        own = transforms_bytes(layers, recipe=recipe)
        resident, on_disk = resident + own, on_disk + own + HEADER_BYTES
    return ArchiveBytes(n_clusters=n_clusters, resident=batch * resident, on_disk=batch * on_disk)


def transforms_bytes(layers: Sequence[LayerShape], *, recipe: Recipe) -> int:
    """Bytes of the transforms of an archive, which those of a catalog share, if `KEPT_SHARE` of each is kept."""
    total = 0
    for layer in layers:
        if layer.is_global:
            dim = layer.head_dim
            bits = [recipe.key_prototype_bits, recipe.value_prototype_bits]
            kept = [dim if each == 8 else int(KEPT_SHARE * min(dim, 2 * math.ceil(dim * each / 8))) for each in bits]
            widths = [CODEC_BITS[codec] for codec in recipe.codecs(layer.index) if codec in CODEC_BITS]
            kept += [dim if each == 8 else int(KEPT_SHARE * dim) for each in widths]
            total += layer.n_kv_heads * 2 * dim * (sum(kept) + min(N_AXES, dim) + 4)
    return total


def _prototype_bytes(layer: LayerShape, recipe: Recipe) -> int:
    """Bytes of the coded centroid and mean value of a cluster."""
    bits = (recipe.key_prototype_bits, recipe.value_prototype_bits)
    return sum(math.ceil(layer.head_dim * each / 8) for each in bits)


def _exact_bytes(layer: LayerShape, recipe: Recipe, value_bytes: int) -> int:
    """Bytes on disk of the key and value of an exact token of a KV head."""
    codecs = recipe.exact_codecs(layer.index)
    return sum(
        layer.head_dim * value_bytes if each == "lossless" else layer.head_dim + EXACT_SCALE_BYTES for each in codecs
    )


def _row_bytes(layer: LayerShape, recipe: Recipe, value_bytes: int) -> int:
    """Bytes on disk of an archived token of a KV head."""
    dim, row = layer.head_dim, POSITION_BYTES
    for codec in recipe.codecs(layer.index):
        row += 1 + math.ceil(dim * CODEC_BITS[codec] / 8) if codec in CODEC_BITS else dim * value_bytes
    return row


def count_parameters(config: PreTrainedConfig) -> int:
    """Parameters of the causal language model of `config`; tied embeddings count once and nothing is loaded.

    Raises
    ------
    UnsupportedModelError
        If transformers cannot build a causal language model from `config`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise UnsupportedModelError(
            f"model type {config.model_type!r} cannot be built as a causal language model: {error}"
        ) from error
    return sum(parameter.numel() for parameter in model.parameters())


def weight_bytes(config: PreTrainedConfig, *, value_bytes: int) -> int:
    """Bytes of the unquantised weights of `config` at `value_bytes` per parameter; see `count_parameters`."""
    return count_parameters(config) * value_bytes


def build_ledger(
    layers: Sequence[LayerShape],
    tokens: Iterable[int],
    *,
    value_bytes: int,
    batch: int = 1,
    weights: int | None = None,
    gpu_memory: int | None = None,
    recipe: Recipe | None = None,
) -> tuple[LedgerRow, ...]:
    """One row per context length of `tokens`, shortest first and each once.

    Parameters
    ----------
    layers
        The layers of a `ModelShape`, or `plain_layers`.
    tokens
        Context lengths.
    value_bytes
        Bytes per value of the cache; see `dtype_bytes`.
    batch
        Sequences (for the archive: documents) of that length held at once.
    weights, gpu_memory
        Bytes, or None when unknown.
    recipe
        How the archive is built; the default recipe when None.

    Raises
    ------
    ConfigError
        If a context length or `batch` is below 1, or the recipe names a layer that there is not.
    """
    recipe = recipe or Recipe()
    recipe.check_layers(len(layers))
    return tuple(
        LedgerRow(
            n_tokens=n_tokens,
            kv=kv_bytes(layers, n_tokens, value_bytes=value_bytes, batch=batch),
            archive=archive_bytes(layers, n_tokens, value_bytes=value_bytes, recipe=recipe, batch=batch),
            weights=weights,
            gpu_memory=gpu_memory,
        )
        for n_tokens in sorted(set(tokens))
    )


def _token_bytes(layer: LayerShape, value_bytes: int) -> int:
    """Key and value of one token in one KV head."""
    return 2 * layer.head_dim * value_bytes


def _check_count(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} is {value!r}; give a whole number of at least 1")
