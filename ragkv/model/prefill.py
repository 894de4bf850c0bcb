"""Run a document through the model once, and take keys and values out of its cache."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ragkv.errors import ConfigError, NonFiniteError
from ragkv.model.shape import LARGEST_NUMBER, check_length, model_shape

CHUNK_TOKENS = 512


@dataclass(frozen=True)
class CapturedLayer:
    """Keys and values of one layer after a prefill, as the model's own cache holds them.

    ``keys`` and ``values`` are (n_kv_heads, n_tokens, head_dim) in the model's dtype, keys after RoPE;
    ``first_position`` is the position of the first of them (above 0 only in sliding layers).
    """

    keys: torch.Tensor
    values: torch.Tensor
    first_position: int


def captured_layers(cache: DynamicCache) -> tuple[CapturedLayer, ...]:
    """Take keys and values out of a prefilled cache (batch 1); nothing is copied.

    Raises
    ------
    NonFiniteError
        If a key or value is NaN, infinite or beyond `LARGEST_NUMBER`.
    """
    n_tokens = cache.get_seq_length()
    captured: list[CapturedLayer] = []
    for index, (keys, values) in enumerate(layer_tensors(cache)):
        first_position = n_tokens - keys.shape[2]
        captured.append(CapturedLayer(keys=keys[0], values=values[0], first_position=first_position))
        _check_finite(index, captured[-1])
    return tuple(captured)


@torch.no_grad()
def prefill_cache(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    on_progress: Callable[[int, int], None] | None = None,
) -> DynamicCache:
    """Prefill `token_ids` (batch 1) in chunks, with the model's own attention, into its own dynamic cache.

    This is the dense baseline, and what an archive is built from. `on_progress` is called with (tokens done, tokens in
    all) after each chunk.

    Raises
    ------
    ConfigError
        If there are no tokens, or more than the model's context holds.
    """
    check_document_length(model, len(token_ids))
    ids = torch.tensor([list(token_ids)], dtype=torch.int64, device=model.device)
    cache = DynamicCache(config=model.config)
    decoder = model.get_decoder()
    for start in range(0, ids.shape[1], chunk_tokens):
        chunk = ids[:, start : start + chunk_tokens]
        positions = torch.arange(start, start + chunk.shape[1], device=ids.device).unsqueeze(0)
        decoder(input_ids=chunk, position_ids=positions, cache=cache, use_cache=True)
        if on_progress is not None:
            on_progress(start + chunk.shape[1], ids.shape[1])
    return cache


def check_document_length(model: PreTrainedModel, n_tokens: int) -> None:
    """Refuse a prefill of no tokens, of more than the context holds, or beyond what a length-dependent RoPE allows."""
    if n_tokens == 0:
        raise ConfigError("there are no tokens to prefill; give a document that is not empty")
    shape = model_shape(model.config)
    if shape.max_positions is not None and n_tokens > shape.max_positions:
        raise ConfigError(
            f"prefix and document are {n_tokens} tokens and the model's context holds {shape.max_positions}; "
            "split the document"
        )
    check_length(shape, n_tokens)


def layer_tensors(cache: Cache) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values (batch, n_kv_heads, n_tokens, head_dim) of every layer that holds some, in layer order."""
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
            yield layer.keys, layer.values


def kv_nbytes(cache: Cache) -> int:
    """Bytes of all keys and values that a cache holds."""
    return sum(keys.nbytes + values.nbytes for keys, values in layer_tensors(cache))


def fork_cache(cache: DynamicCache) -> DynamicCache:
    """A cache that starts with what `cache` holds and grows on its own; nothing is copied.

    Growing rebinds a layer's tensors and never writes into them, so `cache` stays as it is.
    """
    fork = copy.copy(cache)
    fork.layers = [copy.copy(layer) for layer in cache.layers]
    return fork


def _check_finite(layer_index: int, layer: CapturedLayer) -> None:
    for name, tensor in (("key", layer.keys), ("value", layer.values)):
        fits = tensor.abs() <= min(LARGEST_NUMBER, torch.finfo(tensor.dtype).max)  # false for NaN
        if not bool(fits.all()):
            head, token, dim = (~fits).nonzero()[0].tolist()
            number = tensor[head, token, dim].item()
            cure = f"archives take numbers up to {LARGEST_NUMBER:g}"
            if not math.isfinite(number):
                cure = f"the document cannot be archived in {tensor.dtype}; load the model in a wider dtype"
            raise NonFiniteError(
                f"{name} in layer {layer_index}, kv_head {head}, position {layer.first_position + token} is {number}: "
                f"{cure}"
            )
